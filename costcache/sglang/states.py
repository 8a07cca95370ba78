"""States ranked with the KV that they belong to, for policies that see states.

A state then has no separate record: it is on the record of its node's KV, as in the generic cache. One
order names victims for both pools: leaves for ``kv``, and for ``state`` the node whose state is evicted,
alone (a tombstone) or with the leaf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedLRUList

from costcache.records import State

if TYPE_CHECKING:
    from costcache.pool import Pool
    from costcache.records import Clock
    from costcache.sglang.pycore import CostTreeCore
    from costcache.sglang.records import PoolRecord

__all__ = ["NodeState", "StateList"]


class NodeState(State):
    """A state that reads its locks from SGLang's tree node, where SGLang changes them in many places."""

    __slots__ = ("_data",)

    def __init__(self, data: Any, clock: Clock) -> None:
        self._data = data
        super().__init__(-1, clock)  # SGLang keeps the slots

    @property
    def locks(self) -> int:
        return int(self._data.lock_ref)

    @locks.setter
    def locks(self, value: int) -> None:
        """Ignored: the tree node has the count."""


class StateList(UnifiedLRUList):
    """SGLang's list of the nodes that have a state on the device; reports to the pool of KV.

    A node is in this list exactly as long as its state is on the device.
    """

    def __init__(self, core: CostTreeCore, pool: Pool, stock: Any) -> None:
        super().__init__(stock.component_type, core.component_types, is_referenced=stock._is_referenced)
        self._core = core
        self._pool = pool
        self._kv = pool.book
        self.silent = False

    def insert_mru(self, node: Any) -> None:
        super().insert_mru(node)
        self._core.take_off_host(node, "state")
        self.arrived(node)

    def insert_after(self, prev_node: Any, node: Any) -> None:
        super().insert_after(prev_node, node)
        self.arrived(node)

    def arrived(self, node: Any) -> None:
        """Attach a node's state, which is on the device, to the record of its KV, once that is there too."""
        record: PoolRecord | None = node.kv
        if record is None or record.state is not None:
            return
        request = self._pool.request
        if request is not None:
            request.counted = max(request.counted, record.end)
        self._kv.attach(record, NodeState(node.component_data[ComponentType.MAMBA], self._pool.clock))

    def remove_node(self, node: Any) -> None:
        super().remove_node(node)
        record: PoolRecord | None = node.kv
        # To the order, a node that is being evicted no longer has its state.
        if record is not None and record.state is not None:
            self._kv.detach(record)

    def reset_node_mru(self, node: Any) -> None:
        super().reset_node_mru(node)
        if not self.silent and node.kv is not None:
            self._resume(node.kv)

    def _resume(self, record: PoolRecord) -> None:
        """Count once that the current request resumes from a state; repeats only make the state recent.

        A server looks a waiting request up many times.
        """
        state, request = record.state, self._pool.request
        if state is None:
            return
        if request is None or record.end <= request.counted:
            state.recency = self._pool.clock.accesses
            return
        request.counted = record.end
        self._kv.consume(record)
