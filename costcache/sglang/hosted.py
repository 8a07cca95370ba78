"""Leaves under a host tier, of full attention alone: evicted in one step instead of SGLang's many.

Nothing but the tree refers to such a leaf. Where something might, a step returns None, and SGLang's own steps
do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
    UnifiedTreeCore,
    get_and_increase_time_counter,
)

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
    to_host: Any

    def _has_short_steps(self) -> bool:
        return (
            self.enable_hicache
            and len(self.components) == 1
            and not self.enable_session_radix_cache
            and not self.enable_external_cache_linker
            and not self.is_host_memory_buffer_only
        )

    def _is_in_reach(self, node: CostNode) -> bool:
        return node in self.evictable_device_leaves and self._has_short_steps()

    def demote_leaf(self, node_id: int) -> tuple[Any, int] | None:
        """Take a leaf that the host has, too, off the device; returns its slots and tokens."""
        node: CostNode = self._node_arena[node_id]
        if not self._is_in_reach(node) or node.component_data[FULL].host_value is None:
            return None
        return self._demote_whole(node)

    def take_hosted(self, record: PoolRecord, needed: int, *, backs_up: bool) -> tuple[Any, int] | None:
        """Evict a leaf, or as much of its tail as ``needed`` asks for: what the host has of it stays there.

        Args:
            record: The victim.
            needed: Tokens that are to be freed.
            backs_up: Whether what the host does not have has to be copied first; it is left alone then.

        Returns:
            Its slots and tokens.
        """
        node: CostNode | None = record.node
        if node is None or node.kv is not record or record.locks or not self._is_in_reach(node):
            return None
        data = node.component_data[FULL]
        if data.host_value is None and (backs_up or node.children):
            return None
        keep = self._kept(record, needed)
        if not keep:
            return self._drop_whole(node) if data.host_value is None else self._demote_whole(node)
        if not self._can_shorten(node):
            return None
        tokens = record.tokens - keep
        slots, data.value = data.value[keep:], shortened(data.value, keep)
        self.component_evictable_size_[FULL] -= tokens
        self.kv.trim(record, tokens)  # the order may look at what is trimmed off
        if data.host_value is None:
            self._shorten(node, keep)
        else:
            self._split_off(node, keep)
        return slots, tokens

    def _drop_whole(self, node: CostNode) -> tuple[Any, int]:
        data, parent = node.component_data[FULL], node.parent
        slots, data.value = data.value, None
        tokens = int(slots.shape[0])
        self.component_evictable_size_[FULL] -= tokens
        self.left_device(node, to_host=False)
        self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        self.evictable_device_leaves.discard(node)
        self._remove_leaf_from_parent(node)
        self._update_evictable_leaf_sets(parent)
        return slots, tokens

    def _demote_whole(self, node: CostNode) -> tuple[Any, int]:
        data = node.component_data[FULL]
        slots, data.value = data.value, None
        tokens = int(slots.shape[0])
        self.component_evictable_size_[FULL] -= tokens
        self.left_device(node, to_host=True)
        self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        self.full_host_duplicates.pop(node.id, None)
        self.evictable_device_leaves.discard(node)
        if not node.children and not data.host_lock_ref:
            self.evictable_host_leaves.add(node)
        self._update_evictable_leaf_sets(node.parent)
        return slots, tokens

    def _split_off(self, node: CostNode, keep: int) -> None:
        """Make what follows the first tokens of a leaf a node that is on the host alone."""
        data = node.component_data[FULL]
        end = node.end + len(node.key) - keep  # its record is shorter already
        tail: CostNode = self._new_node(priority=node.priority)
        tail.key, tail.parent, tail.children = node.key[keep:], node, node.children
        for child in tail.children.values():
            child.parent = tail
        tail.hit_count, tail.creation_time = node.hit_count, node.creation_time
        tail.external_cache_stored, tail.rotation_base = node.external_cache_stored, node.rotation_base
        tail.last_access_time = get_and_increase_time_counter()
        tail.component_data[FULL].host_value = data.host_value[keep:].clone()
        data.host_value = shortened(data.host_value, keep)
        self._shorten(node, keep)
        node.children = {tail.key.child_key(self.page_size): tail}
        self.to_host(tail, end, node.kv)
        if not tail.children:
            self.evictable_host_leaves.add(tail)

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
