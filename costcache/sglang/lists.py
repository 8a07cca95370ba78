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

__all__ = ["HOST_OF", "HostLeaves", "HostValues", "ValueList"]

HOST_OF = {"kv": "host", "swa": "host_swa", "state": "host_state"}
"""The pool of each pool's copies on the host; a node has its record under the same name."""


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
        past = self._core.take_off_host(node, self._name)
        record = add_record(self._pool, node, units, node.end - units, priority=node.priority, history=past)
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


class HostValues(UnifiedLRUList):
    """SGLang's list of the nodes that have a component's value on the host alone; reports to the pool.

    SGLang takes a node out of the list while something reads its value, too: then its record is locked.

    Attributes:
        silent: Whether a move to the front is not a use.
        named: The node at which SGLang's next walk begins, in place of the least recent one.
        tokens: Units of the values in the list.
    """

    def __init__(self, core: CostTreeCore, pool: Pool, name: str, stock: Any) -> None:
        super().__init__(
            stock.component_type, core.component_types, use_host_ptr=True, is_referenced=stock._is_referenced
        )
        self._core = core
        self._pool = pool
        self._name = name
        self._of = pool.name
        self.silent = False
        self.named: CostNode | None = None
        self.tokens = 0

    def _units(self, node: CostNode) -> int:
        return 1 if self._name == "state" else len(node.key)

    def insert_mru(self, node: CostNode) -> None:
        super().insert_mru(node)
        self._arrived(node)

    def insert_after(self, prev_node: CostNode, node: CostNode) -> None:
        super().insert_after(prev_node, node)
        if getattr(prev_node, self._of) is None or self._name == "state":
            self._arrived(node)
        else:
            self.split(prev_node, node)
            self._pool.unlock(getattr(node, self._of))

    def split(self, tail: CostNode, prefix: CostNode) -> None:
        """Give the prefix of a split node its part of the tail's record, locked."""
        record: PoolRecord = getattr(tail, self._of)
        part = PoolRecord(None, len(prefix.key), record.depth, prefix)
        self._pool.split(part, record, locked=True)
        setattr(prefix, self._of, part)

    def _arrived(self, node: CostNode) -> None:
        units = self._units(node)
        self.tokens += units
        record: PoolRecord | None = getattr(node, self._of)
        if record is not None:
            if record.locks:
                self._pool.unlock(record)
            return
        # Its record on the device, while there still is one: the value was evicted from there just now.
        # A state that is ranked with its KV has none of its own.
        past = getattr(node, self._name) or node.kv
        record = add_record(self._pool, node, units, node.end - units, priority=node.priority, history=past)
        setattr(node, self._of, record)

    def remove_node(self, node: CostNode) -> None:
        super().remove_node(node)
        self.tokens -= self._units(node)
        data, record = node.component_data[self.component_type], getattr(node, self._of)
        if record is None:
            return
        if data.host_value is None:
            self._core.take_off_host(node, self._name)
        elif data.value is None and not record.locks:
            self._pool.lock(record)  # else it is back on the device, whose list takes the record off

    def reset_node_mru(self, node: CostNode) -> None:
        super().reset_node_mru(node)
        if not self.silent:
            self.used(node)

    def used(self, node: CostNode) -> None:
        """Report that the current request found the node's value."""
        record: PoolRecord | None = getattr(node, self._of)
        if record is not None:
            self._pool.use([record], self._pool.request, again=False)

    # SGLang's own walk evicts the node that the order named.

    def get_lru_no_host_lock(self) -> Any:
        return super().get_lru_no_host_lock() if self.named is None else self._take_named()

    def cursor_next(self, *, host_lock: bool = False) -> Any:
        return super().cursor_next(host_lock=host_lock) if self.named is None else self._take_named()

    def _take_named(self) -> CostNode | None:
        named, self.named = self.named, None
        return named
