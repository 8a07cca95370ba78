"""States under one order with the KV that they belong to, where the policy knows states.

A state has no record of its own then: it hangs on the record of its node's KV, as in the generic cache. The
order names victims for both pools: leaves for ``kv``, and for ``state`` the node whose state goes, alone
(a tombstone) or with the leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedLRUList

from costcache.eviction import EvictionHost, EvictionPipeline
from costcache.records import PoolState, RequestInfo, RequestRecord, State
from costcache.sglang.pool import PoolEvents, PoolRecord

if TYPE_CHECKING:
    from costcache.records import Clock

__all__ = ["NodeState", "StateList", "StatePool"]


class NodeState(State):
    """A state whose locks are what SGLang's tree node says: SGLang changes them in many places."""

    __slots__ = ("_data",)

    def __init__(self, data: Any, clock: Clock) -> None:
        self._data = data
        super().__init__(-1, clock)  # SGLang keeps the slots

    @property
    def locks(self) -> int:
        return int(self._data.lock_ref)

    @locks.setter
    def locks(self, value: int) -> None:
        """Ignored: the tree node says it."""


class StatePool(PoolEvents):
    """The pool of states: its own evictions, by the order and the records of the pool of KV."""

    __slots__ = ("_kv",)

    def __init__(
        self,
        kv: PoolEvents,
        host: EvictionHost,
        free_target: Callable[[PoolState], Any],
        adjust: Callable[[PoolState, int], Any],
        *,
        plugin: str,
    ) -> None:
        """Bind the parts, as :class:`PoolEvents` does; ``kv`` has the order and the records."""
        self.name = "state"
        self.clock = kv.clock
        self.dropped = 0
        self._kv = kv
        self._clear()
        self.pipeline = EvictionPipeline(host, self.guard, free_target, adjust, plugin=plugin, pool=self.name)

    def _clear(self) -> None:
        kv = self._kv  # made, and reset, before this pool
        self.request: RequestRecord | None = None
        self.guard, self.live, self.root = kv.guard, kv.live, kv.root

    def reset(self) -> None:
        """Follow the pool of KV, which was reset."""
        self._clear()
        self.pipeline.guard = self.guard

    @property
    def fallbacks(self) -> int:
        """None of its own."""
        return 0

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """The pool of KV tells the order."""

    # -- events ------------------------------------------------------------------------------

    def attach(self, record: PoolRecord, data: Any) -> None:
        """The device holds a state at the end of a node.

        Args:
            record: Record of the node's KV.
            data: What the tree node keeps of its state.
        """
        record.state = NodeState(data, self.clock)
        request = self.request
        if request is not None:
            request.counted = max(request.counted, record.end)
        heard = self.guard.attach
        if heard is not None:
            heard(record)

    def detach(self, record: PoolRecord) -> None:
        """The state went, and the node stays."""
        record.state = None
        heard = self.guard.detach
        if heard is not None:
            heard(record)

    def consume(self, record: PoolRecord) -> None:
        """The request at work goes on from a state; nobody, or the same one again, only makes it recent.

        Orders hear of the first time alone: a server looks a waiting request up many times.
        """
        state, clock, request = record.state, self.clock, self.request
        if state is None:
            return
        state.recency = clock.accesses
        if request is None or record.end <= request.counted:
            return
        request.counted = record.end
        state.uses += 1
        state.last_use = clock.now
        heard = self.guard.consume
        if heard is not None:
            heard(record)


class StateList(UnifiedLRUList):
    """SGLang's list of the nodes that hold a state on the device, telling the pool of states.

    A node is in this list exactly as long as the device holds its state.
    """

    def __init__(self, pool: StatePool, stock: Any, component_types: Any) -> None:
        super().__init__(stock.component_type, component_types, is_referenced=stock._is_referenced)
        self._pool = pool
        self.silent = False

    def insert_mru(self, node: Any) -> None:
        super().insert_mru(node)
        self.arrived(node)

    def insert_after(self, prev_node: Any, node: Any) -> None:
        super().insert_after(prev_node, node)
        self.arrived(node)

    def arrived(self, node: Any) -> None:
        """The device holds a node's state, and its KV or not yet."""
        record: PoolRecord | None = node.kv
        if record is not None and record.state is None:
            self._pool.attach(record, node.component_data[ComponentType.MAMBA])

    def remove_node(self, node: Any) -> None:
        super().remove_node(node)
        record: PoolRecord | None = node.kv
        # A node that is going took its state along, as far as the order knows.
        if record is not None and record.state is not None:
            self._pool.detach(record)

    def reset_node_mru(self, node: Any) -> None:
        super().reset_node_mru(node)
        if not self.silent and node.kv is not None:
            self._pool.consume(node.kv)
