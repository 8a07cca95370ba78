"""SGLang's Python tree core, which reports changes of its nodes to the pools.

Stock code makes every change; the methods here call it and then report what changed. Each node carries
one record per pool that holds a value of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from costcache.eviction import Refused
from costcache.pool import Pool
from costcache.sglang.leaves import LeafTaking
from costcache.sglang.lists import HostLeaves, ValueList
from costcache.sglang.pools import Pools
from costcache.sglang.records import PoolRecord, add_record, drop_record
from costcache.sglang.states import StateList
from costcache.sglang.walks import take_result

if TYPE_CHECKING:
    from costcache.records import NodeRecord

__all__ = ["CORE", "CostNode", "CostTreeCore"]

CORE = "costcache"
"""Name under which the core is registered."""

AUXILIARY = {"swa": ComponentType.SWA, "state": ComponentType.MAMBA}
FULL = ComponentType.FULL


class CostNode(UnifiedTreeNode):
    """A tree node with its records.

    Attributes:
        kv: Record while its full-attention KV is on the device.
        host: Record while that KV is on the host alone.
        swa: Record while its sliding-window KV is on the device.
        state: Record while a state at its end is on the device, and states have a separate order.
        page_size: Tokens per page.
        checksum: CRC-32 of the whole prefix through this node; None until it is needed.
    """

    kv: PoolRecord | None = None
    host: PoolRecord | None = None
    swa: PoolRecord | None = None
    state: PoolRecord | None = None
    page_size: int = 1
    checksum: int | None = None

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with this node."""
        if self.kv is not None:
            return self.kv.depth + self.kv.tokens
        total, node = 0, self
        while node.parent is not None:
            if node.kv is not None:
                return total + node.kv.depth + node.kv.tokens
            total += len(node.key)
            node = node.parent
        return total


class CostTreeCore(LeafTaking, UnifiedTreeCore):
    """The Python tree core, with events.

    Attributes:
        pools: The pools to which every change is reported.
        kv: The pool of full-attention KV.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        cache = next(iter(components.values())).cache
        self.pools: Pools = cache.pools
        self.kv: Pool = self.pools.kv
        self._trimming = False
        self._step = self.pools.trim_step
        super().__init__(params, components)

    def reset(self) -> None:
        """Forget every node and every record."""
        self.pools.reset()
        super().reset()
        self.root_node.kv = self.kv.root
        for name, component in AUXILIARY.items():
            pool = self.pools.by_name.get(name)
            if pool is not None:
                stock = self.lru_lists[component]
                self.lru_lists[component] = (
                    StateList(pool, stock, self.component_types)
                    if self.pools.ranks_states
                    else ValueList(self, pool, stock)
                )
        if "host" in self.pools.by_name:
            self.evictable_host_leaves = HostLeaves(self, self.pools.by_name["host"])

    def set_hicache_enabled(self) -> None:
        """Add the pool ``host``: a host tier was attached."""
        super().set_hicache_enabled()
        pool = self.pools.by_name.get("host") or self.pools.add("host")
        self.evictable_host_leaves = HostLeaves(self, pool)

    # -- nodes -------------------------------------------------------------------------------

    def _new_node(self, priority: int = 0) -> CostNode:
        node = CostNode(self.component_types, priority=priority)
        node.page_size = self.page_size
        self._register_node(node)
        return node

    def _add_new_node(
        self, parent: CostNode, key: Any, value: Any, priority: int = 0, **more: Any
    ) -> CostNode:
        node: CostNode = super()._add_new_node(parent, key, value, priority=priority, **more)
        node.kv = add_record(self.kv, node, len(key), parent.end, parent.kv, priority=node.priority)
        return node

    def _unevict_node_on_insert(
        self, node: CostNode, fresh_value: Any, session_id: str | None = None
    ) -> None:
        super()._unevict_node_on_insert(node, fresh_value, session_id=session_id)
        self.entered_device(node)

    def entered_device(self, node: CostNode) -> None:
        """Report that the KV of a node is on the device again."""
        past = node.host
        if past is not None:
            drop_record(self.pools.by_name["host"], past)
            node.host = None
        parent = node.parent
        node.kv = add_record(
            self.kv,
            node,
            len(node.key),
            parent.end,
            parent.kv,
            priority=node.priority,
            history=past,
            locks=int(node.component_data[FULL].lock_ref > 0),
        )
        states = self.lru_lists.get(ComponentType.MAMBA)
        if isinstance(states, StateList) and states.in_list(node):
            states.arrived(node)

    def left_device(self, node: CostNode, *, to_host: bool) -> None:
        """Report that the KV of a node left the device; the host may still have it."""
        record, end = node.kv, node.end
        history: NodeRecord | None = record
        if record is None:
            history = node.parent.kv  # the tail of a trimmed leaf, whose record stays with the prefix
        else:
            node.kv = None
            drop_record(self.kv, record)
        if to_host:
            self.to_host(node, end, history)

    def left_host(self, node: CostNode) -> None:
        """Report that the KV of a node left the host."""
        record = node.host
        if record is not None:
            node.host = None
            drop_record(self.pools.by_name["host"], record)

    def to_host(self, node: CostNode, end: int, history: NodeRecord | None) -> None:
        tokens = len(node.key)
        # Locked until it is a leaf of the host tier.
        node.host = add_record(
            self.pools.by_name["host"],
            node,
            tokens,
            end - tokens,
            priority=node.priority,
            history=history,
            locks=1,
        )

    def _split_node(self, key: Any, child: CostNode, split_len: int) -> tuple[CostNode, Any]:
        prefix, action = super()._split_node(key, child, split_len)
        record = child.kv
        if record is not None:
            if self._trimming:
                # The part that stays keeps the record: it is the same victim, only shorter.
                prefix.kv, child.kv = record, None
                record.node = prefix
            else:
                prefix.kv = PoolRecord(None, split_len, record.depth, prefix)
                self.kv.split(prefix.kv, record)
        elif child.host is not None:
            record = child.host
            if child in self.evictable_host_leaves:
                self.evictable_host_leaves.tokens -= split_len
            if self._trimming:
                prefix.host, child.host = record, None
                record.node = prefix
            else:
                prefix.host = PoolRecord(None, split_len, record.depth, prefix)
                self.pools.by_name["host"].split(prefix.host, record, locked=True)
        return prefix, action

    # -- uses --------------------------------------------------------------------------------

    def _match_post_processor(
        self, params: Any, value: Any, best_match_node: CostNode, *more: Any, **named: Any
    ) -> Any:
        # KV below the best match has no state or window, so finding it was not a use.
        self.used(best_match_node)
        return super()._match_post_processor(params, value, best_match_node, *more, **named)

    def _insert_commit_step(self, state: Any) -> None:
        # The existing path is used before the leaf is made; making the leaf counts as its use.
        node = state.node
        if node is not self.root_node:
            current = node
            while current is not self.root_node:
                if current.kv is not None and current.kv.priority < current.priority:
                    current.kv.priority = current.priority
                current = current.parent
            self.used(node, inserting=True)
        super()._insert_commit_step(state)

    def used(self, node: CostNode, *, inserting: bool = False) -> None:
        """Report that the current request's walk used the whole path to ``node``."""
        root = self.root_node
        path: list[NodeRecord] = []
        hosted: list[NodeRecord] = []
        while node is not root:
            if node.kv is not None:
                path.append(node.kv)
            elif node.host is not None:
                hosted.append(node.host)
            node = node.parent
        path.reverse()
        self.kv.use(path, self.kv.request, again=inserting)
        if hosted:
            hosted.reverse()
            host = self.pools.by_name["host"]
            host.use(hosted, host.request, again=inserting)

    # -- victims -----------------------------------------------------------------------------

    def claim(self, record: PoolRecord, needed: int) -> int | Refused:
        """Make a victim of the pool ``kv`` ready to be evicted whole.

        With trimming on, a leaf of more than ``needed`` tokens is cut, and only its tail is a victim; the cut
        has been reported to the pool when this returns.

        Returns:
            The id of the leaf to evict; or why it cannot be evicted.
        """
        node: CostNode | None = record.node
        if node is None or node.kv is not record or record.live_children:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        if node not in self.evictable_device_leaves:
            return Refused.NOT_NOW
        step = self._step
        if step and needed < record.tokens:
            keep = (record.tokens - needed) // step * step
            if keep and self._may_trim(node, keep):
                self._cut(node, keep, self.kv, record)
        return int(node.id)

    def _may_trim(self, node: CostNode, keep: int) -> bool:
        """Whether the first ``keep`` tokens of a leaf can still be reused without the rest."""
        if node.write_through_pending_id is not None or node.load_back_pending_id is not None:
            return False
        for component in self.components:
            if component.component_type is ComponentType.SWA:
                if not self._window_reaches(node, keep, component):
                    return False
            elif component.component_type is not FULL:
                # States sit at the ends of nodes: without its end the leaf has no state, and KV past the
                # last state is dead.
                return False
        return True

    def _window_reaches(self, node: CostNode, keep: int, component: Any) -> bool:
        """Whether a match that ends ``keep`` tokens into a leaf has its whole sliding window."""
        window, data = component.sliding_window_size, component.component_type
        covered, length = 0, keep
        while node is not self.root_node:
            if node.component_data[data].value is None:
                return False
            covered += length
            if covered >= window:
                return True
            node = node.parent
            length = len(node.key)
        return True

    def _cut(self, node: CostNode, keep: int, pool: Pool, record: PoolRecord) -> None:
        """Split a leaf: the first part keeps the record, the rest (the same node id) is to be evicted."""
        self._trimming = True
        try:
            _, action = self._split_node(node.key, node, keep)
        finally:
            self._trimming = False
        if action is not None:
            raise AssertionError(f"a leaf with a transfer under way was cut: {action}")
        pool.trim(record, record.tokens - keep)

    def cut_host_leaf(self, record: PoolRecord, needed: int) -> CostNode:
        """Return the node to evict of a host leaf: its tail if that is enough, else all of it."""
        node: CostNode = record.node
        step = self._step
        keep = (record.tokens - needed) // step * step if step else 0
        if keep > 0 and len(self.components) == 1:
            self._cut(node, keep, self.pools.by_name["host"], record)
        return node

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Evict a leaf; returns its slots, its tokens, and SGLang's actions that must follow."""
        return take_result(self.evict_device_leaf(node_id, False))

    def unclaim(self, node_id: int) -> None:
        """Give the tail of a cut leaf, which was not evicted after all, a record like any other node's."""
        node: CostNode | None = self._node_arena.get(node_id)
        if node is None or node.kv is not None or node.evicted:
            return
        parent = node.parent
        node.kv = add_record(
            self.kv, node, len(node.key), parent.end, parent.kv, priority=node.priority, history=parent.kv
        )
