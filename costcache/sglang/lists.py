"""SGLang's own collections of nodes, which report additions and removals to the pools.

Every place in SGLang that makes or frees a value of a component, or a leaf of the host tier, goes through
one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedLRUList

from costcache.sglang.records import PoolRecord, add_record, drop_record

if TYPE_CHECKING:
    from costcache.pool import Pool
    from costcache.sglang.pycore import CostNode, CostTreeCore

__all__ = ["HostLeaves", "ValueList"]


class ValueList(UnifiedLRUList):
    """SGLang's list of the nodes that have a component's value on the device; reports to the pool.

    A node is in this list exactly as long as its value is on the device: every place in SGLang that
    makes or frees one goes through it. SGLang's own order in the list is kept, for its own walks.
    """

    def __init__(self, core: CostTreeCore, pool: Pool, stock: Any) -> None:
        super().__init__(stock.component_type, core.component_types, is_referenced=stock._is_referenced)
        self._core = core
        self._pool = pool
        self._name = pool.name
        self.silent = False

    def _units(self, node: CostNode) -> int:
        return 1 if self._name == "state" else len(node.key)

    def insert_mru(self, node: CostNode) -> None:
        super().insert_mru(node)
        self._arrived(node)

    def insert_after(self, prev_node: CostNode, node: CostNode) -> None:
        super().insert_after(prev_node, node)
        tail: PoolRecord | None = getattr(prev_node, self._name)
        if tail is None or self._name == "state":
            self._arrived(node)
        else:
            prefix = PoolRecord(None, len(node.key), tail.depth, node)
            self._pool.split(prefix, tail, locked=True)
            setattr(node, self._name, prefix)
            # An order takes the prefix of a split for a node with a child, never a victim; here it can be
            # one.
            self._pool.unlock(prefix)

    def _arrived(self, node: CostNode) -> None:
        units = self._units(node)
        record = add_record(self._pool, node, units, node.end - units, priority=node.priority)
        setattr(node, self._name, record)

    def remove_node(self, node: CostNode) -> None:
        super().remove_node(node)
        record: PoolRecord | None = getattr(node, self._name)
        if record is not None:
            setattr(node, self._name, None)
            drop_record(self._pool, record)

    def reset_node_mru(self, node: CostNode) -> None:
        super().reset_node_mru(node)
        if not self.silent:
            self._pool.use([getattr(node, self._name)], self._pool.request, again=False)

    def reset_node_and_window_ancestors_mru(
        self, node: CostNode, root_node: CostNode, window_size: int, should_include: Callable[[Any], bool]
    ) -> None:
        super().reset_node_and_window_ancestors_mru(node, root_node, window_size, should_include)
        used, covered = [], 0
        while node is not root_node and covered < window_size:
            if should_include(node):
                used.append(getattr(node, self._name))
            covered += len(node.key)
            node = node.parent
        used.reverse()
        self._pool.use(used, self._pool.request, again=False)


class HostLeaves(set[Any]):
    """SGLang's set of evictable host leaves; reports to the pool ``host``.

    Every node that is on the host alone has a record in that pool; the record is locked unless the node is in
    this set.

    Attributes:
        tokens: Tokens of the leaves in the set, all of which can be evicted now.
    """

    def __init__(self, core: CostTreeCore, pool: Pool) -> None:
        super().__init__()
        self._core = core
        self._pool = pool
        self.tokens = 0

    def add(self, node: CostNode) -> None:
        if node in self:
            return
        super().add(node)
        if node.host is None:
            self._core.to_host(node, node.end, None)  # read from storage, never on the device
        if node.host is not None and node.host.locks:
            self._pool.unlock(node.host)
        self.tokens += len(node.key)

    def discard(self, node: Any) -> None:
        if node not in self:
            return
        super().discard(node)
        self.tokens -= len(node.key)
        if node.host is not None:
            self._pool.lock(node.host)
