"""A tree with states under one policy: pools for KV and for states, or one that is priced in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.errors import SettingsError
from costcache.eviction import LOCKED, NOT_A_LEAF, EvictionPipeline
from costcache.guard import OrderGuard
from costcache.policies.states import make_state_order, state_lru
from costcache.radix.node import Node
from costcache.radix.states import StateTree
from costcache.radix.store import PrefixStore
from costcache.records import Action, PoolState, Victim

if TYPE_CHECKING:
    from costcache.deployment import Deployment
    from costcache.model import ModelSpec
    from costcache.orders import VictimOrder
    from costcache.plugins import PluginManager
    from costcache.settings import Settings

__all__ = ["HybridStore"]


class HybridStore(PrefixStore):
    """A tree of a model with states, its policy and its pools' counts.

    Attributes:
        memory: Bytes of all pools together.
        state_capacity: States that the state pool holds; None where one pool holds both.
        state_bytes: Bytes of one state.
        held_states: States that the owner uses outside the tree.
    """

    tree: StateTree

    def __init__(
        self,
        model: ModelSpec,
        memory: int,
        settings: Settings,
        deployment: Deployment,
        *,
        state_share: float | None = None,
        page_bytes: int | None = None,
        plugins: PluginManager | None = None,
    ) -> None:
        """Match the model, make the order and bind the hooks.

        Args:
            model: The model's architecture facts.
            memory: Bytes for KV and states, per rank.
            settings: Policy, headroom and the settings of plugins. Trimming does not apply: a leaf's tail
                could go back only to a state, and states are at the ends of nodes.
            deployment: Page size, parallelism and KV dtype.
            state_share: Share of the bytes that only states may use; None for one pool priced in bytes.
            page_bytes: Key bytes per page; 8 per token by default.
            plugins: Where to look for plugins; the process's own by default.

        Raises:
            PluginError: No plugin, or no policy, can serve the model.
            SettingsError: A setting is wrong, or the memory holds less than a page and a state.
        """
        if state_share is not None and not 0.0 < state_share < 1.0:
            raise SettingsError(f"state_share is {state_share}: give a share between 0 and 1, or None")
        self.memory = memory
        self._state_share = state_share
        self.held_states = 0
        self.pipelines: dict[str, EvictionPipeline] = {}
        super().__init__(model, memory, settings, deployment, page_bytes=page_bytes, plugins=plugins)
        for name in self.pool_names:
            self.pipelines[name] = self._make_pipeline(_Pool(self, name), name)
        self.pipeline = next(iter(self.pipelines.values()))

    def _make_tree(self, page_size: int, page_bytes: int) -> StateTree:
        token = self.cost.token
        self._kv_bytes, self.state_bytes = token.kv_bytes, token.state_bytes
        share = self._state_share
        kv_memory = self.memory if share is None else int(self.memory * (1 - share))
        self.state_capacity = None if share is None else (self.memory - kv_memory) // self.state_bytes
        self.capacity = kv_memory // (self._kv_bytes * page_size) * page_size
        least = page_size * self._kv_bytes + (self.state_bytes if share is None else 0)
        if kv_memory < least or self.state_capacity == 0:
            shared = "" if share is None else f", {kv_memory:,} of them for KV"
            divide = "" if share is None else ", or divide it otherwise between KV and states"
            raise SettingsError(
                f"memory is {self.memory:,} bytes{shared}: a page of {page_size} tokens takes "
                f"{page_size * self._kv_bytes:,} and a state {self.state_bytes:,}; give more{divide}"
            )
        return StateTree(page_size, page_bytes, self._kv_bytes)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The pools that are evicted from."""
        return ("memory",) if self.state_capacity is None else ("kv", "state")

    def _make_guard(self) -> None:
        pools = tuple(self.pool_state(name) for name in self.pool_names)
        name, order = self._plugins.make_order(self._settings, self.architecture, self.cost, pools)
        self._guard_by(name, make_state_order(order))

    def _guard_by(self, name: str, order: VictimOrder) -> None:
        self.guard = self.tree.events = OrderGuard(name, order, self.tree.records, state_lru)
        for pipeline in self.pipelines.values():
            pipeline.guard = self.guard

    # -- pools -------------------------------------------------------------------------------

    @property
    def free_states(self) -> int:
        """States that fit into what nobody uses; in one pool, as if only states were added."""
        if self.state_capacity is None:
            return max(0, self._free_bytes) // self.state_bytes
        return self.state_capacity - self.tree.states - self.held_states

    @property
    def free(self) -> int:
        """Tokens that fit into what nobody uses; in one pool, as if only tokens were added."""
        if self.state_capacity is None:
            return max(0, self._free_bytes) // self._kv_bytes
        return self.capacity - self.tree.cached - self.held

    @property
    def _free_bytes(self) -> int:
        tree = self.tree
        tokens, states = tree.cached + self.held, tree.states + self.held_states
        return self.memory - tokens * self._kv_bytes - states * self.state_bytes

    def pool_state(self, pool: str) -> PoolState:
        """A pool as it is now."""
        tree, page = self.tree, self.tree.page_size
        if pool == "kv":
            return super().pool_state(pool)
        if pool == "state":
            capacity = self.state_capacity or 0
            free = capacity - tree.states - self.held_states
            return PoolState(pool, "states", capacity, free, tree.evictable_states, self.held_states, page)
        evictable = tree.evictable * self._kv_bytes + tree.evictable_states * self.state_bytes
        held = self.held * self._kv_bytes + self.held_states * self.state_bytes
        return PoolState(pool, "bytes", self.memory, self._free_bytes, evictable, held, page)

    def fit(self, node: Node, tokens: int, *, watermark: bool = True) -> int:  # noqa: ARG002  # always
        """Make room under ``node`` for ``tokens`` more tokens, and say how many of them fit."""
        return self.make_room((node,), tokens, 0)[0]

    def make_room(self, nodes: tuple[Node, ...], tokens: int, states: int) -> tuple[int, int]:
        """Make room for more tokens and states.

        Args:
            nodes: What the request uses: their paths and states stay.
            tokens: Tokens to add, whole pages.
            states: States to add.

        Returns:
            How many of each fit: all, unless the memory is too small or too much of it is locked or
            held. Where it is, states come first, since tokens behind the last state are dead.
        """
        tree = self.tree
        for node in nodes:
            tree.lock(node)
        if self.state_capacity is None:
            self.pipelines["memory"].evict(
                tokens * self._kv_bytes + states * self.state_bytes - self._free_bytes
            )
        else:
            self.pipelines["state"].evict(states - self.free_states)
            self.pipelines["kv"].evict(tokens - self.free)
        for node in nodes:
            tree.unlock(node)
        states = min(states, self.free_states)
        if self.state_capacity is None:
            room = (self._free_bytes - states * self.state_bytes) // self._kv_bytes
        else:
            room = self.free
        if tokens > room:
            tokens = max(0, room) // tree.page_size * tree.page_size
        return tokens, states

    def take_from(self, pool: str, victim: Victim) -> int:
        """Free a victim for a pool; returns the pool's units."""
        node, tree = victim.record, self.tree
        if not isinstance(node, Node) or node.parent is None:
            return NOT_A_LEAF
        state = node.state
        if node.live_children:
            if victim.action is not Action.TOMBSTONE or state is None or pool == "kv":
                return NOT_A_LEAF
            if state.locks:
                return LOCKED
            tree.freed_states.append(tree.detach(node))
            return 1 if pool == "state" else self.state_bytes
        # A leaf without its state is of no use: it goes whole, whatever was asked for.
        if node.locks:
            return LOCKED
        if pool == "state" and state is None:
            return NOT_A_LEAF
        tokens = node.tokens
        if self.on_remove is not None:
            self.on_remove(node, tokens // tree.page_size)
        slots = tree.remove(node)
        if slots is not None:
            self.freed.append(slots)
        if pool == "kv":
            return tokens
        if pool == "state":
            return 1
        return tokens * self._kv_bytes + (0 if state is None else self.state_bytes)

    def evicted_tokens(self) -> tuple[int, int]:
        """Shortfall and evictions so far, of all pools, in the bytes of so many tokens of KV."""
        shortfall = evicted = 0
        sizes = {"kv": self._kv_bytes, "state": self.state_bytes, "memory": 1}
        for name, pipeline in self.pipelines.items():
            shortfall += pipeline.counters.shortfall * sizes[name]
            evicted += pipeline.counters.evicted * sizes[name]
        return shortfall // self._kv_bytes, evicted // self._kv_bytes


class _Pool:
    """One pool, as the eviction pipeline sees it."""

    def __init__(self, store: HybridStore, name: str) -> None:
        self._store = store
        self._name = name

    def pool_state(self, pool: str) -> PoolState:
        return self._store.pool_state(pool)

    def take(self, victim: Victim, needed: int) -> int:  # noqa: ARG002  # a node or a state goes whole
        return self._store.take_from(self._name, victim)
