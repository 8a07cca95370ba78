"""The Python tree core with events, fast walks, and leaves trimmed in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused
from costcache.sglang.hosted import shortened
from costcache.sglang.pycore import CostTreeCore
from costcache.sglang.records import drop_record
from costcache.sglang.walks import FULL, FastWalks

if TYPE_CHECKING:
    from costcache.sglang.records import PoolRecord

__all__ = ["FastTreeCore"]


class FastTreeCore(FastWalks, CostTreeCore):
    """Reports fast walks to the pools; SGLang's own walks are reported by the base class."""

    def path_walked(self, path: list[Any], inserting: bool) -> None:
        """Report that a walk used these nodes."""
        records = [node.kv for node in path]
        if inserting:
            for node, record in zip(path, records, strict=True):
                record.priority = node.priority
        self.kv.use(records, self.kv.request, again=inserting)

    def nodes_locked(self, nodes: list[Any]) -> None:
        """Report that these nodes became locked."""
        lock = self.kv.lock
        for node in nodes:
            lock(node.kv)

    def nodes_unlocked(self, nodes: list[Any]) -> None:
        """Report that these nodes became unlocked."""
        unlock = self.kv.unlock
        for node in nodes:
            unlock(node.kv)

    def leaf_removed(self, node: Any) -> None:
        """Report that the KV of this leaf has left the device."""
        self.left_device(node, to_host=False)

    # -- victims -----------------------------------------------------------------------------

    def full_evictable_size(self) -> int:
        """Tokens that can be evicted."""
        return int(self.component_evictable_size_[FULL])

    def full_protected_size(self) -> int:
        """Tokens that are locked."""
        return int(self.component_protected_size_[FULL])

    def take_leaf(self, record: PoolRecord, needed: int) -> tuple[int | Refused, list[Any], list[Any]]:
        """Evict a leaf, or as much of its tail as ``needed`` asks for."""
        if not self.has_fast_walks or self.enable_session_radix_cache or self.kv_events.enabled:
            return super().take_leaf(record, needed)
        # Only the tree refers to a leaf, so SGLang's many steps are done in one, and a trimmed leaf is
        # shortened instead of being split first.
        node, kv = record.node, self.kv
        if node is None or node.kv is not record or record.live_children:
            return Refused.NOT_A_LEAF, [], []
        if record.locks:
            return Refused.LOCKED, [], []
        if node not in self.evictable_device_leaves:
            return Refused.NOT_NOW, [], []
        tokens, step, data = record.tokens, self._step, node.component_data[FULL]
        slots = data.value
        keep = (tokens - needed) // step * step if step and needed < tokens else 0
        if keep:
            tokens -= keep
            kv.trim(record, tokens)  # before the key is cut: the order may look at what is trimmed off
            node.key = key = node.key[:keep]
            if self.page_size > 1:
                node.name.key = key
            node.checksum = None
            data.value, slots = shortened(slots, keep), slots[keep:]
            self.component_evictable_size_[FULL] -= tokens
        else:
            self._take_out(node)
            self.component_evictable_size_[FULL] -= tokens
            node.kv = None
            drop_record(kv, record)
        return tokens, [slots], []
