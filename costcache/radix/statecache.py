"""The generic cache for models with states: prefixes, their slots, and checkpoints to go on from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.eviction import Eviction
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.radix.cache import Inserted, Match, RadixCache, deployment_in_pages
from costcache.radix.hybrid import HybridStore
from costcache.radix.keys import as_count, as_whole
from costcache.radix.node import Node
from costcache.radix.states import StateTree
from costcache.records import PoolState
from costcache.settings import Settings, read_settings

__all__ = ["StateCache", "StateMatch"]


class StateMatch(Match):
    """What :meth:`StateCache.match_prefix` found.

    Attributes:
        matched_len: Tokens that need no prefill: those in front of the deepest state on the path.
        node: The node with that state: what to lock while it is in use. The root without any.
        state: Slot of the state, to copy from and never to write to; None where none is usable.
        beyond: Tokens behind the state whose KV is cached. They have to be run again, for their states.
        branch: Where those end, if no state is kept there: a place that two prompts have come by, and the
            best one for a further state (:meth:`StateCache.attach`). None otherwise.
    """

    __slots__ = ("beyond", "branch", "state")

    def __init__(self, cache: StateCache, usable: Node, deepest: Node) -> None:
        super().__init__(cache, usable)
        self.state = None if usable.state is None else usable.state.slot
        self.beyond = deepest.end - usable.end
        self.branch = deepest if self.beyond else None

    def __repr__(self) -> str:
        return f"StateMatch(matched_len={self.matched_len}, state={self.state}, beyond={self.beyond})"


class StateCache(RadixCache):
    """A prefix cache of a hybrid model: KV slots, and state slots beside them or under one budget.

    A request goes on from a state: it matches up to the deepest one on its path, copies it
    (:meth:`fork`) and runs the rest. Where it ends, and where prompts part, it leaves a state of its
    own: with :meth:`insert`, and with :meth:`attach`. Cached states are never written to.

    When space is short a state can go alone; its node is a tombstone then, and its KV still serves the states
    behind it. KV behind the last state of its path serves nobody, and goes before anything else.
    """

    _store: HybridStore
    _tree: StateTree

    def __init__(
        self,
        model: ModelSpec | str,
        memory: int,
        page_size: int = 1,
        policy: str = "costcache",
        *,
        state_share: float | None = None,
        deployment: Deployment | None = None,
        plugins: PluginManager | None = None,
        **settings: Any,
    ) -> None:
        """Make an empty cache.

        Args:
            model: A model spec with states, or a preset's name or a path for :meth:`ModelSpec.resolve`.
            memory: Bytes for KV and states, on one rank.
            page_size: Tokens per page; only whole pages are cached, and states are at the ends of pages.
            policy: Name of the eviction policy; ``costcache`` is what the model's plugin prefers.
            state_share: Share of the memory that only states may use; None for one pool of bytes. SGLang's
                ``--mamba-full-memory-ratio`` r is a share of r / (1 + r).
            deployment: How the model is served; its page size must be ``page_size``.
            plugins: Where to look for plugins; the process's own by default.
            **settings: Further fields of :class:`costcache.settings.Settings`.

        Raises:
            SettingsError: A setting is wrong, the model has no states, or the memory is too small.
            PluginError: No plugin or policy can serve the model.
            ConfigError: The model cannot be read.
        """
        memory, page_size = as_count(memory, "memory"), as_whole(page_size, "page_size")
        deployment = deployment_in_pages(deployment, page_size)
        spec = ModelSpec.resolve(model) if isinstance(model, str) else model
        if not spec.has_states:
            raise SettingsError(f"model {spec.name!r} keeps no states: use RadixCache")
        store = HybridStore(
            spec,
            memory,
            read_settings(Settings, {"policy": policy, **settings}),
            deployment,
            state_share=state_share,
            plugins=plugins,
        )
        self._begin(spec, store, store.capacity, page_size)
        count = store.state_capacity
        self._state_slots = memory // store.state_bytes if count is None else count
        self._free_slots = list(range(self._state_slots - 1, -1, -1))
        self._held_slots: set[int] = set()

    # -- facts -------------------------------------------------------------------------------

    @property
    def states(self) -> int:
        """States in the cache."""
        return self._tree.states

    @property
    def held_states(self) -> int:
        """States that requests own outside the cache."""
        return len(self._held_slots)

    @property
    def pools(self) -> tuple[PoolState, ...]:
        """Each pool as it is now: one of bytes, or one of tokens and one of states."""
        return tuple(self._store.pool_state(name) for name in self._store.pool_names)

    # -- requests ----------------------------------------------------------------------------

    def match_prefix(
        self,
        tokens: Any,
        request: Hashable = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> StateMatch:
        """Find the longest prefix of ``tokens`` that a request can go on from, and use it.

        Arguments as :meth:`RadixCache.match_prefix` has them; a server asks for ``tokens[:-1]``.
        """
        return cast(
            "StateMatch",
            super().match_prefix(tokens, request, extra_key=extra_key, cache_salt=cache_salt),
        )

    def insert(
        self,
        tokens: Any,
        slots: Any = None,
        request: Hashable = None,
        *,
        state: int | None = None,
        priority: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Inserted:
        """Cache ``tokens``, and a state behind them.

        Args:
            tokens: As in :meth:`RadixCache.insert`.
            slots: Likewise.
            request: Likewise.
            priority: Likewise.
            extra_key: Likewise.
            cache_salt: Likewise.
            state: A held state slot with the state after all of ``tokens``, which must be whole pages. It
                becomes the cache's, if ``tokens`` are cached to their end and have no state there yet;
                else it stays the caller's. Without one, what is added is dead until a state comes behind it.

        Raises:
            ValueError: As there; or the state is not held, or the tokens are not whole pages.
        """
        if state is not None:
            state = self._as_held(state)
            if len(tokens) % self._page_size:
                raise ValueError(
                    f"the state is one of {len(tokens)} tokens, not whole pages of {self._page_size}: keep "
                    "one at the end of a page"
                )
        done = super().insert(
            tokens, slots, request, priority=priority, extra_key=extra_key, cache_salt=cache_salt
        )
        self._collect_states()
        node = done.node
        if state is not None and node.end == len(tokens) and node.parent is not None and node.state is None:
            self.attach(node, state)
        return done

    def attach(self, node: Node, state: int) -> None:
        """Keep a state at the end of ``node``, such as the ``branch`` of a match.

        Raises:
            ValueError: The state is not held, or the node has one already or has been evicted.
        """
        state = self._as_held(state)
        self._tree.attach(node, state)
        self._held_slots.remove(state)
        self._store.held_states = len(self._held_slots)

    def fork(self, node: Node) -> tuple[int, int] | None:
        """Take a state slot to copy the state of ``node`` to: what a request writes to is its own.

        Returns:
            The slot to copy from and the held one to copy to; None where none can be freed.

        Raises:
            ValueError: The node has no state.
        """
        if node.state is None:
            raise ValueError(f"{node!r} has no state: match its prefix again")
        self._tree.lock(node)
        taken = self.allocate_state()
        self._tree.unlock(node)
        return None if taken is None else (node.state.slot, taken)

    # -- slots -------------------------------------------------------------------------------

    def allocate_state(self) -> int | None:
        """Take a state slot, evicting if none is free; None, with nothing evicted, if that is not enough."""
        if not self._make_room(0, 1) or not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._held_slots.add(slot)
        self._store.held_states = len(self._held_slots)
        return slot

    def release_state(self, state: int) -> None:
        """Free a state slot that a request holds.

        Raises:
            ValueError: It is free already, or in the cache.
        """
        state = self._as_held(state)
        self._held_slots.remove(state)
        self._free_slots.append(state)
        self._store.held_states = len(self._held_slots)

    def allocate(self, tokens: int) -> Any:
        """As :meth:`RadixCache.allocate`."""
        tokens = as_count(tokens, "tokens")
        wanted = -(-tokens // self._page_size) * self._page_size
        if not self._make_room(wanted, 0):
            return None
        return super().allocate(tokens)  # it fits now

    def evict(self, num_tokens: int) -> Eviction:
        """Free room for ``num_tokens`` tokens, or all that is evictable if that is less.

        Returns:
            As :meth:`RadixCache.evict`; counts are bytes where KV and states share one pool.
        """
        num_tokens = as_count(num_tokens, "num_tokens")
        if self._store.state_capacity is None:
            num_tokens *= self._store.cost.token.kv_bytes
        eviction = super().evict(num_tokens)
        self._collect_states()
        return eviction

    def evict_states(self, states: int) -> Eviction:
        """Free ``states`` states, or all that are evictable if those are fewer.

        Returns:
            As :meth:`evict`. States of leaves take their KV along.
        """
        store, states = self._store, as_count(states, "states")
        if store.state_capacity is None:
            eviction = store.evict(states * store.state_bytes)
        else:
            eviction = store.pipelines["state"].evict(states)
        eviction.slots = self._out(self._collect())
        self._collect_states()
        return eviction

    def reset(self, *, force: bool = False) -> None:
        """As :meth:`RadixCache.reset`; cached states go too, held ones stay held."""
        super().reset(force=force)
        self._collect_states()

    # -- internals ---------------------------------------------------------------------------

    def _found(self, node: Node, first: bool) -> StateMatch:
        usable = self._tree.usable(node)
        if usable.state is not None:
            self._tree.consume(usable, first)
        return StateMatch(self, usable, node)

    def _make_room(self, tokens: int, states: int) -> bool:
        """Evict what is missing, if that is possible at all."""
        store = self._store
        if store.state_capacity is None:
            pool = store.pool_state("memory")
            need = tokens * store.cost.token.kv_bytes + states * store.state_bytes - pool.free
            possible = need <= pool.evictable
        else:
            possible = (
                tokens - store.free <= self._tree.evictable
                and states - store.free_states <= self._tree.evictable_states
            )
        if possible:
            store.make_room((), tokens, states)
            self._collect()
            self._collect_states()
        return possible

    def _collect_states(self) -> None:
        freed = self._tree.freed_states
        self._free_slots.extend(freed)
        freed.clear()

    def _as_held(self, state: int) -> int:
        slot = as_whole(state, "state")
        if slot not in self._held_slots:
            where = "in the cache or free" if 0 <= slot < self._state_slots else "not in the pool"
            raise ValueError(f"state slot {slot} is {where}: take one with allocate_state()")
        return slot
