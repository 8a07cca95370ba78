"""Leaves under a host tier, of full attention alone: evicted in one step instead of SGLang's many.

Nothing but the tree refers to such a leaf. Where something might, a step returns None, and SGLang's own steps
do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from costcache.sglang.walks import TOKEN_BYTES, PageName

if TYPE_CHECKING:
    from costcache.pool import Pool
    from costcache.sglang.pools import Pools
    from costcache.sglang.pycore import CostNode
    from costcache.sglang.records import PoolRecord

__all__ = ["HostedLeaves", "shortened"]

FULL = ComponentType.FULL


class HostedLeaves(UnifiedTreeCore):
    """Base of the Python tree core: see the module."""

    pools: Pools
    kv: Pool
    _step: int
    left_device: Any
    take_off_host: Any

    def _has_short_steps(self) -> bool:
        return (
            self.enable_hicache
            and len(self.components) == 1
            and not self.enable_session_radix_cache
            and not self.enable_external_cache_linker
        )

    def demote_leaf(self, node_id: int) -> tuple[Any, int] | None:
        """Take a leaf that the host has, too, off the device; returns its slots and tokens."""
        node: CostNode = self._node_arena[node_id]
        data = node.component_data[FULL]
        if data.host_value is None or node not in self.evictable_device_leaves or not self._has_short_steps():
            return None
        slots, data.value = data.value, None
        tokens = int(slots.shape[0])
        self.component_evictable_size_[FULL] -= tokens
        self.left_device(node, to_host=True)
        self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        self._update_evictable_leaf_sets(node)
        self._update_evictable_leaf_sets(node.parent)
        return slots, tokens

    def drop_unbacked(self, record: PoolRecord, needed: int) -> tuple[Any, int] | None:
        """Drop a leaf of which the host has nothing, or as much of its tail as ``needed`` asks for.

        Returns:
            Its slots and tokens.
        """
        node: CostNode | None = record.node
        if node is None or node.kv is not record or node not in self.evictable_device_leaves:
            return None
        data = node.component_data[FULL]
        if record.locks or data.host_value is not None or node.children or not self._has_short_steps():
            return None
        keep = self._kept(record, needed)
        if keep:
            if not self._can_shorten(node):
                return None
            slots, data.value = data.value[keep:], shortened(data.value, keep)
            self.kv.trim(record, record.tokens - keep)  # the order may look at what is trimmed off
            self._shorten(node, keep)
        else:
            slots, data.value = data.value, None
            parent = node.parent
            self.left_device(node, to_host=False)
            self.kv_events.record_remove(node, medium=StorageMedium.GPU)
            self.evictable_device_leaves.discard(node)
            self._remove_leaf_from_parent(node)
            self._update_evictable_leaf_sets(parent)
        tokens = int(slots.shape[0])
        self.component_evictable_size_[FULL] -= tokens
        return slots, tokens

    def shorten_host_leaf(self, record: PoolRecord, needed: int) -> Any:
        """Cut the tail that ``needed`` asks for off a leaf of the host; returns its slots there."""
        node: CostNode = record.node
        keep = self._kept(record, needed)
        if not keep or not self._has_short_steps() or not self._can_shorten(node):
            return None
        data, tokens = node.component_data[FULL], record.tokens - keep
        slots, data.host_value = data.host_value[keep:], shortened(data.host_value, keep)
        self.evictable_host_leaves.tokens -= tokens
        self.pools.by_name["host"].trim(record, tokens)
        self._shorten(node, keep)
        return slots

    def _kept(self, record: PoolRecord, needed: int) -> int:
        """Tokens of a victim that stay; 0 if it is evicted whole."""
        step = self._step
        return (record.tokens - needed) // step * step if step and needed < record.tokens else 0

    def _can_shorten(self, node: CostNode) -> bool:
        return (
            not self.kv_events.enabled
            and node.write_through_pending_id is None
            and node.load_back_pending_id is None
            and node.hash_value is None
            and node.event_hash_value is None
        )

    def _shorten(self, node: CostNode, keep: int) -> None:
        node.key = node.key[:keep]
        name = getattr(node, "name", None)
        if type(name) is PageName:  # of a node from before the host tier was attached
            name.key = node.key
        node.checksum = None


def shortened(slots: Any, keep: int) -> Any:
    """The first slots of a tensor: a view, unless that would keep over twice their memory."""
    left = slots[:keep]
    return left if left.untyped_storage().nbytes() <= 2 * TOKEN_BYTES * keep else left.clone()
