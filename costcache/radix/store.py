"""A radix tree under an eviction policy: what the cache and the simulator share.

It counts tokens and knows no slots of its own; the slots that a tree's nodes carry, if any, are
handed out with each eviction.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from mypy_extensions import mypyc_attr

from costcache.deployment import Deployment
from costcache.eviction import LOCKED, NOT_A_LEAF, Eviction, EvictionHost, EvictionPipeline
from costcache.guard import OrderGuard
from costcache.plugins import PluginManager, get_plugins
from costcache.radix.node import Node
from costcache.radix.tree import RadixTree
from costcache.records import Action, PoolState, RequestRecord, Victim, tuple_maker

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from costcache.model import ModelSpec
    from costcache.orders import VictimOrder
    from costcache.settings import Settings

__all__ = ["PrefixStore"]

_DELETE = Action.DELETE
_pool_state = tuple_maker(PoolState)


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixStore:
    """A tree, its policy and its pool's counts.

    Attributes:
        tree: The tree.
        architecture: The plugin that serves the model.
        cost: The cost model.
        guard: The policy in force.
        pipeline: The eviction pipeline.
        capacity: Tokens that the pool holds, whole pages.
        held: Tokens of the pool that the owner uses outside the tree.
        oversized: Requests that were longer than the whole pool.
        freed: Slots that evictions freed and the owner has not collected yet.
        on_remove: Called with a node and the number of its last pages, just before they go.
    """

    def __init__(
        self,
        model: ModelSpec,
        capacity: SupportsIndex,
        settings: Settings,
        deployment: Deployment,
        *,
        page_bytes: int | None = None,
        plugins: PluginManager | None = None,
    ) -> None:
        """Match the model, make the order and bind the hooks.

        Args:
            model: The model's architecture facts.
            capacity: Tokens that the pool holds; the part of a page at its end is not used.
            settings: Policy, headroom, trimming and the settings of plugins.
            deployment: Page size, parallelism and KV dtype.
            page_bytes: Key bytes per page; 8 per token by default.
            plugins: Where to look for plugins; the process's own by default.

        Raises:
            PluginError: No plugin, or no policy, can serve the model.
            SettingsError: A setting is wrong.
        """
        plugins = get_plugins() if plugins is None else plugins
        page_size = deployment.page_size
        self.capacity = operator.index(capacity) // page_size * page_size
        self.held = 0
        self.oversized = 0
        self.freed: list[NDArray[np.int64]] = []
        self.on_remove: Callable[[Node, int], None] | None = None
        self.architecture = architecture = plugins.match(model)
        self.cost = architecture.cost(deployment)
        self.tree = self._make_tree(page_size, page_bytes or 8 * page_size)
        self._settings = settings
        self._plugins = plugins
        self._trim_step = {
            "auto": page_size,
            "exact": page_size,
            "chunk": -(-settings.trim_chunk // page_size) * page_size,
            "off": 0,
        }[settings.trim]
        pool_settings = architecture.pool_settings(settings)
        # What a plugin answers is the pipeline's to check.
        free_target: Callable[..., Any] = architecture.free_target
        adjust: Callable[..., Any] = architecture.adjust_eviction_count
        self._free_target = lambda pool: free_target(model, pool, pool_settings)
        self._adjust = lambda pool, requested: adjust(model, pool, requested, pool_settings)
        self._make_guard()
        self.pipeline = self._make_pipeline(self, "kv")

    def _make_tree(self, page_size: int, page_bytes: int) -> RadixTree:
        return RadixTree(page_size, page_bytes, self.cost.token.kv_bytes)

    def _make_guard(self) -> None:
        name, order = self._plugins.make_order(
            self._settings, self.architecture, self.cost, (self.pool_state("kv"),)
        )
        self._guard_by(name, order)

    def _guard_by(self, name: str, order: VictimOrder) -> None:
        self.guard = self.tree.events = OrderGuard(name, order, self.tree.records)

    def use(self, name: str, order: VictimOrder) -> None:
        """Evict by an order that was made elsewhere, before anything is cached."""
        self._guard_by(name, order)
        self.pipeline.guard = self.guard

    def _make_pipeline(self, host: EvictionHost, pool: str) -> EvictionPipeline:
        return EvictionPipeline(
            host, self.guard, self._free_target, self._adjust, plugin=self.architecture.name, pool=pool
        )

    @property
    def free(self) -> int:
        """Tokens that nobody uses."""
        return self.capacity - self.tree.cached - self.held

    # -- what the pipeline needs -------------------------------------------------------------

    def pool_state(self, pool: str) -> PoolState:
        """The pool as it is now."""
        tree, held = self.tree, self.held
        cached = tree.cached
        capacity = self.capacity
        free, evictable = capacity - cached - held, cached - tree.protected
        return _pool_state((pool, "tokens", capacity, free, evictable, held, tree.page_size))

    def take(self, victim: Victim, needed: int) -> int:
        """Free a leaf, or the tail of it that ``needed`` tokens ask for."""
        node, action, limit = victim
        if not isinstance(node, Node) or node.parent is None or node.children:
            return NOT_A_LEAF
        if action is not _DELETE:
            return NOT_A_LEAF  # there are no states to tombstone here
        if node.locks:
            return LOCKED
        tree, tokens, step = self.tree, node.tokens, self._trim_step
        if limit is not None:
            needed = victim.at_most(needed)
        keep = (tokens - needed) // step * step if step and needed < tokens else 0
        freed = tokens - keep
        if self.on_remove is not None:
            self.on_remove(node, freed // tree.page_size)
        slots = tree.trim(node, freed) if keep else tree.remove(node)
        if slots is not None:
            self.freed.append(slots)
        return freed

    # -- what owners need --------------------------------------------------------------------

    def evict(self, shortfall: SupportsIndex, *, watermark: bool = True) -> Eviction:
        """Run an eviction; see :meth:`costcache.eviction.EvictionPipeline.evict`."""
        return self.pipeline.evict(shortfall, watermark=watermark)

    def fit(self, node: Node, tokens: int, *, watermark: bool = True) -> int:
        """Make room under ``node`` for ``tokens`` more tokens.

        Args:
            node: What the request matched: it stays.
            tokens: Tokens to add, whole pages.
            watermark: Also free up to the free target, if anything has to go.

        Returns:
            How many of them fit, whole pages: all, unless the pool is too small or too much of it
            is locked or held.
        """
        tree = self.tree
        shortfall = tokens - (self.capacity - tree.cached - self.held)  # less what is free
        if shortfall > 0:
            tree.hold(node)  # what this request matched must not go for it
            self.pipeline.evict(shortfall, watermark=watermark)
            tree.release(node)
            free = self.free
            if free < tokens:
                return free // tree.page_size * tree.page_size
        return tokens

    def request(self) -> RequestRecord:
        """Begin a request."""
        clock = self.tree.clock
        return RequestRecord(clock.begin(), clock.now, clock.in_seconds)

    def reset(self) -> None:
        """Forget all nodes and start the policy afresh."""
        self.tree.clear()
        self._make_guard()
        self.pipeline.guard = self.guard
