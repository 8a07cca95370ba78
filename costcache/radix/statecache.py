"""The generic prefix cache for models with states: prefixes, their slots, and checkpoints to resume from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.eviction import Eviction
from costcache.model import ModelSpec
from costcache.plugins import PluginManager, get_plugins
from costcache.radix.cache import PrefixCache, deployment_in_pages, exclusive
from costcache.radix.keys import as_count, as_whole
from costcache.radix.node import Node
from costcache.radix.results import Inserted, Match
from costcache.radix.slots import Slots
from costcache.radix.states import StateTree
from costcache.records import Asker, PoolState
from costcache.settings import Settings, read_settings

__all__ = ["StateCache", "StateMatch"]


class StateMatch(Match):
    """The result of :meth:`StateCache.match_prefix`.

    Attributes:
        matched_len: Tokens that need no prefill: those before the deepest state on the path.
        node: The node with that state; lock it while the state is in use. The root if there is none.
        state: Slot of the state, to copy from and never to write to; None if none is usable.
        beyond: Tokens after the state whose KV is cached. They are recomputed, for their states.
        branch: The node where those end, if no state is kept there: two prompts have passed it, so it is the
            best place for a further state (:meth:`StateCache.attach`). None otherwise.
    """

    __slots__ = ("beyond", "branch", "state")

    def __init__(self, usable: Node, deepest: Node, out: Any) -> None:
        super().__init__(usable, out)
        self.state = None if usable.state is None else usable.state.slot
        self.beyond = deepest.end - usable.end
        self.branch = deepest if self.beyond else None

    def __repr__(self) -> str:
        return f"StateMatch(matched_len={self.matched_len}, state={self.state}, beyond={self.beyond})"


class StateCache(PrefixCache):
    """A prefix cache of a hybrid model: KV slots, and state slots beside them or under one budget.

    A request resumes from a state: it matches up to the deepest one on its path, copies it
    (:meth:`fork`) and runs the rest. Where it ends, and where prompts branch, it leaves a state of its
    own: with :meth:`insert`, and with :meth:`attach`. Cached states are never written to.

    When space is short a state can be evicted alone; its node is a tombstone then, and its KV still serves
    the states after it. KV after the last state of its path is dead, and is evicted before anything else.
    """

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
            model: A model spec with states, or a preset's name, or the path of a config.
            memory: Bytes for KV and states, on one rank.
            page_size: Tokens per page; only whole pages are cached, and states are at the ends of pages.
            policy: Name of the eviction policy; ``costcache`` is the one that the model's plugin prefers.
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
        plugins = get_plugins() if plugins is None else plugins
        spec = plugins.resolve(model) if isinstance(model, str) else model
        if not spec.has_states:
            raise SettingsError(f"model {spec.name!r} keeps no states: use RadixCache")
        chosen = read_settings(Settings, {"policy": policy, **settings})
        binding = Binding.of(spec, deployment, chosen, plugins=plugins)
        tree = StateTree(binding, memory, state_share=state_share)
        super().__init__(tree, Slots(tree.capacity, page_size))
        count = tree.state_capacity
        self._state_slots = memory // tree.state_bytes if count is None else count
        self._free_slots = list(range(self._state_slots - 1, -1, -1))
        self._reserved_slots: set[int] = set()
        tree.on_free_state = self._free_slots.append

    # -- facts -------------------------------------------------------------------------------

    @property
    def states(self) -> int:
        """States in the cache."""
        return self._pool.states

    @property
    def reserved_states(self) -> int:
        """States that running requests own outside the cache."""
        return len(self._reserved_slots)

    @property
    def pools(self) -> tuple[PoolState, ...]:
        """Each pool as it is now: one of bytes, or one of tokens and one of states."""
        return tuple(pool.state() for pool in self._tree.pools.values())

    # -- requests ----------------------------------------------------------------------------

    def match_prefix(
        self,
        tokens: Any,
        request: Hashable = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        asker: Asker | None = None,
    ) -> StateMatch:
        """Find the longest prefix of ``tokens`` that a request can resume from, and use it.

        The arguments are those of :meth:`RadixCache.match_prefix`; a server asks for ``tokens[:-1]``.
        """
        return cast(
            "StateMatch",
            super().match_prefix(tokens, request, extra_key=extra_key, cache_salt=cache_salt, asker=asker),
        )

    @exclusive
    def insert(  # type: ignore[override]  # there are no windows apart, so no window_from
        self,
        tokens: Any,
        slots: Any = None,
        request: Hashable = None,
        *,
        state: int | None = None,
        priority: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        asker: Asker | None = None,
    ) -> Inserted:
        """Cache ``tokens``, and a state after them.

        Args:
            tokens: As in :meth:`RadixCache.insert`.
            slots: Likewise.
            request: Likewise.
            priority: Likewise.
            extra_key: Likewise.
            cache_salt: Likewise.
            asker: Likewise.
            state: A reserved state slot with the state after all of ``tokens``, which must be whole pages. It
                becomes the cache's, if ``tokens`` are cached to their end and have no state there yet;
                else it stays the caller's. Without one, the added KV is dead until a state is kept after it.

        Raises:
            ValueError: As :meth:`RadixCache.insert` does; or the state is not reserved, or the tokens are not
                whole pages.
        """
        if state is not None:
            state = self._as_reserved(state)
            if len(tokens) % self._page_size:
                raise ValueError(
                    f"the state is one of {len(tokens)} tokens, not whole pages of {self._page_size}: keep "
                    "one at the end of a page"
                )
        done = self._insert(tokens, slots, request, 0, priority, (extra_key, cache_salt), asker)
        node = done.node
        if state is not None and node.end == len(tokens) and node.parent is not None and node.state is None:
            self._attach(node, state)
        return done

    @exclusive
    def attach(self, node: Node, state: int) -> None:
        """Keep a state at the end of ``node``, such as the ``branch`` of a match.

        Raises:
            ValueError: The state is not reserved, or the node has one already or has been evicted.
        """
        self._attach(self._checked_node(node), self._as_reserved(state))

    def _attach(self, node: Node, state: int) -> None:
        self._tree.attach(node, state)
        self._reserved_slots.remove(state)
        self._reserve()

    @exclusive
    def fork(self, node: Node) -> tuple[int, int] | None:
        """Reserve a state slot to copy the state of ``node`` to: a request writes to its own state only.

        Returns:
            The slot to copy from and the reserved one to copy to; None if none can be freed.

        Raises:
            ValueError: The node has no state.
        """
        node = self._checked_node(node)
        if node.state is None:
            raise ValueError(f"{node!r} has no state: match its prefix again")
        self._pool.pin(node)
        taken = self._allocate_state()
        self._pool.unpin(node)
        return None if taken is None else (node.state.slot, taken)

    # -- slots -------------------------------------------------------------------------------

    @exclusive
    def allocate_state(self) -> int | None:
        """Reserve a state slot, evicting if none is free; None, with nothing evicted, if none can be."""
        return self._allocate_state()

    def _allocate_state(self) -> int | None:
        if not self._make_room(0, 1) or not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._reserved_slots.add(slot)
        self._reserve()
        return slot

    @exclusive
    def release_state(self, state: int) -> None:
        """Free a reserved state slot.

        Raises:
            ValueError: It is free already, or in the cache.
        """
        state = self._as_reserved(state)
        self._reserved_slots.remove(state)
        self._free_slots.append(state)
        self._reserve()

    @exclusive
    def allocate(self, tokens: int) -> Any:
        """Reserve slots for a running request; see :meth:`RadixCache.allocate`."""
        tokens = as_count(tokens, "tokens")
        wanted = -(-tokens // self._page_size) * self._page_size
        if not self._make_room(wanted, 0):
            return None
        slots = self._slots.allocate(wanted)  # it fits now
        self._reserve()
        return None if slots is None else self._out(slots)

    def evict(self, num_tokens: int, *, watermark: bool = True) -> Eviction:
        """Free room for ``num_tokens`` tokens, or all that is evictable if that is less.

        Args:
            num_tokens: As in :meth:`RadixCache.evict`.
            watermark: Likewise.

        Returns:
            As :meth:`RadixCache.evict`; counts are bytes where KV and states share one pool.
        """
        num_tokens = as_count(num_tokens, "num_tokens")
        return super().evict(num_tokens * self._pool.token_units, watermark=watermark)

    @exclusive
    def evict_states(self, states: int) -> Eviction:
        """Free ``states`` states, or all that are evictable if those are fewer.

        Returns:
            As :meth:`evict`. States of leaves take their KV along.
        """
        pool = self._tree.pools.get("state", self._pool)
        eviction = pool.evict(as_count(states, "states") * pool.state_units)
        eviction.slots = self._out(self._collect())
        return eviction

    # -- internals ---------------------------------------------------------------------------

    def _checked_node(self, node: Any) -> Node:
        """As in every cache; but a state belongs to the end that the node had when the caller got it."""
        current = super()._checked_node(node)
        return current if current is node else self._tree.ending_at(current, node.end)

    def _found(self, node: Node, first: bool) -> StateMatch:
        usable = self._tree.usable(node)
        if usable.state is not None:
            self._pool.consume(usable, counts=first)
        return StateMatch(usable, node, self._out)

    def _fit(self, node: Node, tokens: int) -> int:
        return self._tree.make_room((node,), tokens, 0)[0]

    def _reserve(self) -> None:
        self._tree.reserve(self._slots.reserved, len(self._reserved_slots))

    def _make_room(self, tokens: int, states: int) -> bool:
        """Evict the shortfall, if that is possible at all."""
        possible = all(
            tokens * pool.token_units + states * pool.state_units - pool.free <= pool.evictable
            for pool in self._tree.pools.values()
        )
        if possible:
            self._tree.make_room((), tokens, states)
            self._collect()
        return possible

    def _as_reserved(self, state: int) -> int:
        slot = as_whole(state, "state")
        if slot not in self._reserved_slots:
            where = "in the cache or free" if 0 <= slot < self._state_slots else "not in the pool"
            raise ValueError(f"state slot {slot} is {where}: take one with allocate_state()")
        return slot
