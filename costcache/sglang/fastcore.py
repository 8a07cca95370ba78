"""The Python tree core with events, fast walks, and leaves that are cut where they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.sglang.pycore import CostTreeCore
from costcache.sglang.walks import FULL, FastWalks

if TYPE_CHECKING:
    from costcache.sglang.pools import PoolEvents, PoolRecord

__all__ = ["FastTreeCore"]


class FastTreeCore(FastWalks, CostTreeCore):
    """Tells the pools of fast walks; all else is told where SGLang's own walks tell it."""

    def reset(self) -> None:
        """Forget every node, and what the orders know."""
        self._to_cut: tuple[Any, int] | None = None
        super().reset()

    def path_walked(self, path: list[Any], inserting: bool) -> None:
        """A walk used these nodes."""
        records = [node.kv for node in path]
        if inserting:
            for node, record in zip(path, records, strict=True):
                record.priority = node.priority
        self.kv.use(records, inserting=inserting)

    def nodes_locked(self, nodes: list[Any]) -> None:
        """These nodes are protected now."""
        lock = self.kv.lock
        for node in nodes:
            lock(node.kv)

    def nodes_unlocked(self, nodes: list[Any]) -> None:
        """These nodes are protected no more."""
        unlock = self.kv.unlock
        for node in nodes:
            unlock(node.kv)

    def leaf_removed(self, node: Any) -> None:
        """The device holds the KV of this leaf no more."""
        self.left_device(node, to_host=False)

    # -- trimming ----------------------------------------------------------------------------

    def _cut(self, node: Any, keep: int, pool: PoolEvents, record: PoolRecord) -> None:
        # SGLang can only split a leaf and evict the part behind. Where nothing but the tree knows of the
        # leaf it is simply made shorter, in evict_device_leaf.
        if (
            pool is self.kv
            and self.has_fast_walks
            and not self.enable_session_radix_cache
            and not self.kv_events.enabled
        ):
            self._to_cut = node, keep
        else:
            super()._cut(node, keep, pool, record)

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Evict a leaf, or the tail that it was to be cut to."""
        cut, self._to_cut = self._to_cut, None
        if cut is None or cut[0].id != node_id:
            return super().drop_leaf(node_id)
        node, keep = cut
        data = node.component_data[FULL]
        slots = data.value
        node.key = node.key[:keep]
        node.checksum = None
        data.value = slots[:keep].clone()
        tail = slots[keep:]
        tokens = self._left(tail)
        self.kv.trim(node.kv, node.kv.tokens - keep)
        return [tail], tokens, []
