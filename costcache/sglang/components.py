"""SGLang's tree components, reporting evicted values and locks, and naming victims in SGLang's walks.

Most evictions are driven by the cache (see :mod:`costcache.sglang.cache`). A few walks stay SGLang's, since
only SGLang can tell when they end: joint reclaim of pools that share memory, and the host tier. In these the
components name the victims, from the same orders.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import (
    ComponentType,
    EvictLayer,
    FullComponent,
    MambaComponent,
    SWAComponent,
    TreeComponent,
)
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase, LRURefreshPhase

from costcache.pool import Pool
from costcache.records import Victim
from costcache.sglang.lists import HOST_OF
from costcache.sglang.pycore import CostNode, CostTreeCore

__all__ = ["COMPONENTS", "CostFull", "CostMamba", "CostSWA"]


class _Naming:
    """Names the victims of one walk, from a pool's order; defers those that were not evicted."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._deferred: dict[int, Victim] = {}
        self._last: Victim | None = None

    def next(self) -> Any:
        """Name the next victim; None if there is none."""
        self._set_aside()
        victim = self._pool.next_victim(self._deferred)
        if victim is None:
            return None
        self._last = victim
        return victim.record

    def refuse(self) -> None:
        """Note that the last victim cannot be evicted."""
        self._set_aside()

    def end(self) -> None:
        """End the walk."""
        self._set_aside()
        for victim in self._deferred.values():
            self._pool.defer(victim)

    def _set_aside(self) -> None:
        last, self._last = self._last, None
        if last is not None and last.record.parent is not None:
            self._deferred[last.record.serial] = last


class CostFull(FullComponent):
    """Full attention: reports nodes that leave the device or become locked."""

    tree_core: CostTreeCore

    def evict_component(
        self,
        node: CostNode,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """Free the node's KV on the device, the host or both."""
        data = node.component_data[self.component_type]
        off_device = EvictLayer.DEVICE in target and data.value is not None
        off_host = EvictLayer.HOST in target and data.host_value is not None
        freed: tuple[int, int] = super().evict_component(
            node, device_frees, host_frees, cache_actions, target=target
        )
        if off_device:
            self.tree_core.left_device(node, to_host=data.host_value is not None)
        elif off_host:
            self.tree_core.take_off_host(node, "kv")
        return freed

    def redistribute_on_node_split(self, new_parent: CostNode, child: CostNode) -> None:
        """Divide the values and the locks of a node that is split."""
        whole = child.component_data[self.component_type]
        if not self.tree_core.trimming or whole.host_lock_ref or whole.session_ref:
            super().redistribute_on_node_split(new_parent, child)
            return
        # A victim, which nothing refers to, and which is about to go: its slots need no copies.
        part, at = new_parent.component_data[self.component_type], len(new_parent.key)
        if whole.value is not None:
            part.value, whole.value = whole.value[:at], whole.value[at:]
        if whole.host_value is not None:
            part.host_value, whole.host_value = whole.host_value[:at], whole.host_value[at:]

    def commit_hicache_transfer(
        self, node: CostNode, phase: CacheTransferPhase, transfers: Any = (), **more: Any
    ) -> None:
        """Report KV that was copied between the tiers."""
        super().commit_hicache_transfer(node, phase, transfers, **more)
        if phase is CacheTransferPhase.LOAD_BACK and transfers and transfers[0].device_indices is not None:
            for loaded in transfers[0].nodes_to_load or ():
                self.tree_core.entered_device(self.tree_core.node_by_id(loaded))

    def acquire_component_lock(self, node: CostNode, result: Any, lock_host: bool = False) -> Any:
        """Lock the path from ``node`` to the root."""
        if lock_host:
            return super().acquire_component_lock(node, result, lock_host=True)
        # A lock covers the whole path, so what is not locked yet is the path's lower end.
        result = super().acquire_component_lock(node, result)
        data, root, kv = self.component_type, self.tree_core.root_node, self.tree_core.kv
        while node is not root and node.component_data[data].lock_ref == 1:
            if node.kv is not None:
                kv.lock(node.kv)
            node = node.parent
        return result

    def release_component_lock(self, node: CostNode, params: Any, lock_host: bool = False) -> None:
        """Undo a lock."""
        super().release_component_lock(node, params, lock_host=lock_host)
        if lock_host:
            return
        data, root, kv = self.component_type, self.tree_core.root_node, self.tree_core.kv
        while node is not root and node.component_data[data].lock_ref == 0:
            if node.kv is not None:
                kv.unlock(node.kv)
            node = node.parent

    # -- walks that stay SGLang's ---------------------------------------------------------------

    # With sessions SGLang also names the victims: references decide which node is evicted first.

    def _evict_device_start(self, request_cnt: int) -> None:
        if self.tree_core.enable_session_radix_cache:
            super()._evict_device_start(request_cnt)
            return
        self._evict_device_request_cnt = request_cnt
        self._naming = _Naming(self.tree_core.kv)

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> int | None:
        if self.tree_core.enable_session_radix_cache:
            leaf: int | None = super()._evict_device_next_node(
                tracker, device_frees, host_frees, cache_actions
            )
            return leaf
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        while (record := self._naming.next()) is not None:
            node: CostNode = record.node
            if node in self.tree_core.evictable_device_leaves:
                return int(node.id)
            self._naming.refuse()
        return None

    def _evict_device_end(self) -> None:
        if self.tree_core.enable_session_radix_cache:
            super()._evict_device_end()
        else:
            self._naming.end()

    def drive_host_eviction(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> None:
        """Free ``num_tokens`` of the host tier, leaf by leaf."""
        if "host" in self.tree_core.pools.by_name:
            victims = self.cache.victims("host")
            victims.evict(num_tokens, (tracker, device_frees, host_frees, cache_actions))


class _ListWalk(TreeComponent):
    """Names the nodes of SGLang's walks over its lists of values, on the device and on the host."""

    record_pool: str  # SGLang's SWAComponent has a pool_name

    def drive_host_eviction(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> None:
        """Free ``num_tokens`` units of the values on the host alone."""
        if HOST_OF[self.record_pool] in self.tree_core.pools.by_name:
            victims = self.cache.victims(HOST_OF[self.record_pool])
            victims.evict(num_tokens, (tracker, device_frees, host_frees, cache_actions))

    def evict_host_value(self, until: int, *sinks: Any) -> None:
        """Run SGLang's walk on the host until ``until`` units are freed, from the node that was named."""
        super().drive_host_eviction(until, *sinks)

    def evict_component(self, node: CostNode, *frees: Any, **more: Any) -> Any:
        """Free the node's value on the device, the host or both."""
        freed = super().evict_component(node, *frees, **more)
        if node.component_data[self.component_type].host_value is None:
            # Its list said so already, unless the node was out of it.
            self.tree_core.take_off_host(node, self.record_pool)
        return freed

    def name(self, node: CostNode) -> None:
        """Make ``node`` the next of SGLang's walk."""
        self._evict_device_cursor: CostNode | None = node
        self._named_by_cache = True

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        self._named_by_cache = False
        self._naming = _Naming(self.tree_core.pools.by_name[self.record_pool])

    def _evict_device_next_node(self, tracker: Any, *frees: Any, **more: Any) -> Any:
        if self._named_by_cache:
            self._named_by_cache = False
        elif (
            not self.tree_core.enable_session_radix_cache
            and tracker[self.component_type] < self._evict_device_request_cnt
        ):
            self._evict_device_cursor = self._named()
        return super()._evict_device_next_node(tracker, *frees, **more)

    def _named(self) -> CostNode | None:
        while (record := self._naming.next()) is not None:
            node: CostNode = record.node
            if node.component_data[self.component_type].lock_ref == 0:
                return node
            self._naming.refuse()
        return None

    def _evict_device_end(self) -> None:
        self._naming.end()
        super()._evict_device_end()

    def _refresh_session_partition(self, node: CostNode) -> None:
        core, component = self.tree_core, self.component_type
        lists = core.lru_lists[component], core.host_lru_lists[component]
        for values in lists:
            values.silent = True  # a session's reference is not a use
        try:
            super()._refresh_session_partition(node)
        finally:
            for values in lists:
                values.silent = False


class CostMamba(_ListWalk, MambaComponent):
    """States: the order names the next victim."""

    record_pool = "state"

    def refresh_lru(self, phase: LRURefreshPhase, node: CostNode, root_node: CostNode) -> None:
        """Count a match that resumes from the state of ``node``, on the host, too."""
        super().refresh_lru(phase, node, root_node)
        if phase is LRURefreshPhase.MATCH_END and node.host_state is not None:
            self.tree_core.host_lru_lists[self.component_type].used(node)


class CostSWA(_ListWalk, SWAComponent):
    """Sliding-window KV: the order names the node whose KV is evicted next."""

    record_pool = "swa"

    def refresh_lru(self, phase: LRURefreshPhase, node: CostNode, root_node: CostNode) -> None:
        """Count the use of the window before the end of ``node``, on the host, too."""
        super().refresh_lru(phase, node, root_node)
        core = self.tree_core
        if phase is LRURefreshPhase.WALKDOWN or not core.enable_hicache:
            return
        values, covered = core.host_lru_lists[self.component_type], 0
        while node is not root_node and covered < self.sliding_window_size + core.page_size:
            if node.host_swa is not None:
                values.used(node)
            covered += len(node.key)
            node = node.parent

    def redistribute_on_node_split(self, new_parent: CostNode, child: CostNode) -> None:
        """Divide the window of a node that is split."""
        super().redistribute_on_node_split(new_parent, child)
        if child.host_swa is not None and new_parent.host_swa is None:
            # Something reads it, so that it is in no list.
            self.tree_core.host_lru_lists[self.component_type].split(child, new_parent)

    def alloc_prefetch_staging(self, num_tokens: int) -> Any:
        """Allocate room on the host for what is read from storage."""
        with self.cache.evicting_the_shortfall():
            return super().alloc_prefetch_staging(num_tokens)


COMPONENTS = {
    ComponentType.FULL: CostFull,
    ComponentType.MAMBA: CostMamba,
    ComponentType.SWA: CostSWA,
}
"""Replacements of SGLang's own components."""
