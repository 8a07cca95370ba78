"""SGLang's Python tree core, which reports changes of its nodes to the pools.

Stock code makes every change; the methods here call it and then report what changed. Each node carries
one record per pool that holds a value of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from costcache.eviction import Refused
from costcache.pool import Pool
from costcache.sglang.hosted import HostedLeaves
from costcache.sglang.leaves import LeafTaking
from costcache.sglang.lists import HOST_OF, HostLeaves, HostValues, ValueList
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
        host_swa: Record while its sliding-window KV is on the host alone.
        host_state: Record while a state at its end is on the host alone.
        page_size: Tokens per page.
        checksum: CRC-32 of the whole prefix through this node; None until it is needed.
    """

    kv: PoolRecord | None = None
    host: PoolRecord | None = None
    swa: PoolRecord | None = None
    state: PoolRecord | None = None
    host_swa: PoolRecord | None = None
    host_state: PoolRecord | None = None
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


class CostTreeCore(LeafTaking, HostedLeaves):
    """The Python tree core, with events.

    Attributes:
        pools: The pools to which every change is reported.
        kv: The pool of full-attention KV.
        trimming: Whether the node that is being split is a victim, of which the first part stays.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        cache = next(iter(components.values())).cache
        self.pools: Pools = cache.pools
        self.kv: Pool = self.pools.kv
        self.trimming = False
        self._step = self.pools.trim_step
        self._cache: Any = cache
        self._copies_wanted = 0
        self._copy_to_cut: CostNode | None = None
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
                    StateList(self, pool, stock) if self.pools.ranks_states else ValueList(self, pool, stock)
                )
        if "host" in self.pools.by_name:
            self._add_host_pools()

    def set_hicache_enabled(self) -> None:
        """Add the pools of the host: a host tier was attached."""
        super().set_hicache_enabled()
        self._add_host_pools()

    def _add_host_pools(self) -> None:
        pools = self.pools
        for name in [name for name in pools.by_name if name in HOST_OF]:
            pool = pools.by_name.get(HOST_OF[name]) or pools.add(HOST_OF[name])
            if name == "kv":
                self.evictable_host_leaves = HostLeaves(self, pool)
            else:
                stock = self.host_lru_lists[AUXILIARY[name]]
                self.host_lru_lists[AUXILIARY[name]] = HostValues(self, pool, name, stock)

    def take_off_host(self, node: CostNode, name: str) -> PoolRecord | None:
        """Report that a value of the pool ``name`` is no longer on the host alone; returns its record."""
        record: PoolRecord | None = getattr(node, HOST_OF[name])
        if record is not None:
            setattr(node, HOST_OF[name], None)
            drop_record(self.pools.by_name[HOST_OF[name]], record)
        return record

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
        past = self.take_off_host(node, "kv")
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
        if to_host:
            # The tail of a trimmed leaf has no record: that stays with the prefix. The order of the host may
            # look at what that of the device still knows.
            self.to_host(node, end, node.parent.kv if record is None else record)
        if record is not None:
            node.kv = None
            drop_record(self.kv, record)

    def to_host(self, node: CostNode, end: int, history: NodeRecord | None) -> None:
        tokens, above = len(node.key), node.parent
        # Locked until it is a leaf of the host tier.
        node.host = add_record(
            self.pools.by_name["host"],
            node,
            tokens,
            end - tokens,
            priority=node.priority,
            history=history,
            after=above.kv or above.host,
            locks=1,
        )

    def _split_node(self, key: Any, child: CostNode, split_len: int) -> tuple[CostNode, Any]:
        prefix, action = super()._split_node(key, child, split_len)
        record = child.kv
        if record is not None:
            if self.trimming:
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
            if self.trimming:
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
            if node.component_data[data].value is None and node.component_data[data].host_value is None:
                return False
            covered += length
            if covered >= window:
                return True
            node = node.parent
            length = len(node.key)
        return True

    def _cut(self, node: CostNode, keep: int, pool: Pool, record: PoolRecord) -> None:
        """Split a leaf: the first part keeps the record, the rest (the same node id) is to be evicted."""
        self.trimming = True
        try:
            _, action = self._split_node(node.key, node, keep)
        finally:
            self.trimming = False
        if action is not None:
            raise AssertionError(f"a leaf with a transfer under way was cut: {action}")
        pool.trim(record, record.tokens - keep)

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

    # -- the host tier -----------------------------------------------------------------------

    def _update_evictable_leaf_sets(self, node: CostNode) -> None:
        if len(self.components) > 1 or node is self.root_node:
            super()._update_evictable_leaf_sets(node)
            return
        # The same rules for full attention alone, which each step of an eviction asks for several times.
        data, children = node.component_data[FULL], node.children
        is_device_leaf = is_host_leaf = False
        if not data.lock_ref:
            if data.value is not None:
                is_device_leaf = not children or not any(
                    child.component_data[FULL].value is not None for child in children.values()
                )
            else:
                is_host_leaf = data.host_value is not None and not data.host_lock_ref and not children
        if is_device_leaf:
            self.evictable_device_leaves.add(node)
        else:
            self.evictable_device_leaves.discard(node)
        if is_host_leaf:
            self.evictable_host_leaves.add(node)
        else:
            self.evictable_host_leaves.discard(node)

    def cut_host_leaf(self, record: PoolRecord, needed: int) -> CostNode:
        """Return the node to evict of a host leaf: its tail if that is enough, else all of it."""
        node: CostNode = record.node
        step = self._step
        keep = (record.tokens - needed) // step * step if step else 0
        if keep > 0 and self._may_trim(node, keep):
            self._cut(node, keep, self.pools.by_name["host"], record)
        return node

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        """Advance a walk by one step; see SGLang's interface."""
        result = super().evict_device_next_node(component_type, tracker)
        if result.swa_backup_node_id is not None:
            # SGLang would ask the host for all that the backup takes, if any of it is missing.
            self._cache.make_host_room(ComponentType.SWA, result.swa_backup_num_tokens)
        return result

    def _reclaim_full_host_duplicates(self, num_tokens: int, tracker: Any, *frees: Any, **more: Any) -> None:
        # Copies on the host of what is on the device, too: SGLang frees those of whole nodes.
        self._copies_wanted, self._copy_to_cut = num_tokens, None
        super()._reclaim_full_host_duplicates(num_tokens, tracker, *frees, **more)
        node, self._copies_wanted = self._copy_to_cut, 0
        if node is None:
            return
        needed = num_tokens - (tracker[FULL] - len(node.key))
        tracker[FULL] -= len(node.key)
        self._split_node(node.key, node, len(node.key) - self._pages(needed))
        self._release_full_host_duplicate(node, tracker, *frees, **more)

    def _release_full_host_duplicate(self, node: CostNode, tracker: Any, *frees: Any, **more: Any) -> None:
        needed = self._copies_wanted - tracker[FULL]
        if self._step and 0 < self._pages(needed) < len(node.key) and len(self.components) == 1:
            # Cut once SGLang's walk is over, which nothing may be added to. Not with windows: those of this
            # node may be in the transfer that needs the room.
            self._copy_to_cut = node
            tracker[FULL] += len(node.key)
            return
        super()._release_full_host_duplicate(node, tracker, *frees, **more)

    def _pages(self, tokens: int) -> int:
        """Round up to what a trim may cut."""
        step: int = self._step
        return -(-tokens // step) * step
