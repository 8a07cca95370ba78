"""One pool: its order, fed with the events of a tree core, and its evictions.

In the pool ``kv`` (and in a tree core's own terms) records form a tree; in the others they are flat: a node
that holds a value is a candidate whatever hangs below it, so its record is a leaf whose parent is the pool's
root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mypy_extensions import mypyc_attr

from costcache.eviction import EvictionCounters, EvictionHost, EvictionPipeline
from costcache.guard import OrderGuard
from costcache.policies.keyed import LRU
from costcache.policies.states import StateOrder, state_lru
from costcache.records import Clock, NodeRecord, PoolState, RequestInfo, RequestRecord
from costcache.sglang.names import page_name

__all__ = ["PoolEvents", "PoolRecord"]


class PoolRecord(NodeRecord):
    """A record that knows its tree node.

    Attributes:
        node: The tree node, or its id, as the tree core likes it; None once it has gone.
    """

    __slots__ = ("node",)

    def __init__(self, serial: int, parent: NodeRecord | None, tokens: int, depth: int, node: Any) -> None:
        NodeRecord.__init__(self, serial, parent, tokens, depth)
        self.node = node

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`; None on the Rust core, which hides its keys."""
        node = self.node
        return None if node is None or isinstance(node, int) else page_name(node, self.depth, offset)


@mypyc_attr(allow_interpreted_subclasses=True)
class PoolEvents:
    """One pool's order and its evictions.

    A tree core changes its tree first and then calls one of the methods below, each of which brings the
    records up to date and then tells the order.

    Attributes:
        name: Name of the pool.
        clock: Logical time, shared by all pools of a cache.
        guard: The guarded order; a new one after each reset.
        pipeline: Runs the pool's evictions.
        root: Parent of the records of top nodes.
        live: Records of the nodes that the pool holds, by serial, in order of creation.
        request: On whose behalf the tree is walked now; None for nobody's.
        dropped: Orders dropped for LRU before the last reset.
    """

    __slots__ = (
        "_make_order",
        "_serial",
        "_unit_bytes",
        "clock",
        "dropped",
        "guard",
        "live",
        "name",
        "pipeline",
        "request",
        "root",
    )

    def __init__(
        self,
        name: str,
        clock: Clock,
        host: EvictionHost,
        make_order: Callable[[], tuple[str, Any]],
        free_target: Callable[[PoolState], Any],
        adjust: Callable[[PoolState, int], Any],
        *,
        plugin: str,
        unit_bytes: int,
    ) -> None:
        """Bind the parts.

        Args:
            name: Name of the pool.
            clock: Logical time.
            host: Frees the victims.
            make_order: Makes a new order and gives its name.
            free_target: The plugin's free target.
            adjust: The plugin's adjusted count.
            plugin: The plugin's name, for messages.
            unit_bytes: Bytes that one unit of the pool holds, per rank.
        """
        self.name = name
        self.clock = clock
        self.dropped = 0
        self._make_order = make_order
        self._unit_bytes = unit_bytes
        self.guard: OrderGuard
        self._clear()
        self.pipeline = EvictionPipeline(host, self.guard, free_target, adjust, plugin=plugin, pool=name)

    def _clear(self) -> None:
        self._serial = 0
        self.live: dict[int, PoolRecord] = {}
        self.request: RequestRecord | None = None
        self.root = PoolRecord(0, None, 0, 0, None)
        name, order = self._make_order()
        fallback = state_lru if isinstance(order, StateOrder) else LRU
        self.guard = OrderGuard(name, order, self.records, fallback)

    def reset(self) -> None:
        """Forget all records and start the policy afresh."""
        self.dropped += self.guard.fallbacks
        for record in self.live.values():
            record.parent = record.node = None
        self._clear()
        self.pipeline.guard = self.guard

    @property
    def fallbacks(self) -> int:
        """Orders dropped for LRU since the start."""
        return self.dropped + self.guard.fallbacks

    @property
    def counters(self) -> EvictionCounters:
        """Counts of the pool's evictions."""
        return self.pipeline.counters

    def records(self) -> list[PoolRecord]:
        """Records of all nodes that the pool holds, in order of creation."""
        return list(self.live.values())

    # -- events ------------------------------------------------------------------------------

    def insert(
        self,
        node: Any,
        tokens: int,
        depth: int,
        parent: PoolRecord | None = None,
        *,
        priority: int = 0,
        history: NodeRecord | None = None,
        locks: int = 0,
    ) -> PoolRecord:
        """The pool holds a new node: its value was made, or came back from another tier.

        Args:
            node: The tree node.
            tokens: Units of the pool that it holds.
            depth: Tokens of the prefix in front of it.
            parent: The parent's record; the pool's root by default.
            priority: Priority of the request that made it.
            history: Record of the same tokens in another tier, or of the same prefix before: what is
                known of their past. Without it the request at work made the node.
            locks: 1 when it is made under a lock.
        """
        clock, request = self.clock, self.request
        parent = self.root if parent is None else parent
        self._serial = serial = self._serial + 1
        record = self.live[serial] = PoolRecord(serial, parent, tokens, depth, node)
        parent.live_children += 1
        record.bytes = tokens * self._unit_bytes
        record.locks = locks
        if history is None:
            record.uses = 1
            record.last_use = clock.now
            record.recency = record.created = clock.accesses
            record.priority = priority
            if request is not None:
                record.creator = request.number
                request.counted = max(request.counted, depth + tokens)
        else:
            record.inherit(history)
            record.priority = max(priority, history.priority)
        if request is not None and self.name != "host":
            _reached(request, record)
        heard = self.guard.insert
        if heard is not None:
            heard(record)
        return record

    def split(self, tail: PoolRecord, tokens: int, node: Any, *, locked: bool | None = None) -> PoolRecord:
        """The first ``tokens`` units of a node became a node of their own; the rest keeps its record.

        Args:
            tail: The record of the node before the split.
            tokens: Units that went to the prefix.
            node: The tree node of the prefix.
            locked: Whether the prefix is locked; as the tail by default.
        """
        parent = tail.parent
        self._serial = serial = self._serial + 1
        prefix = self.live[serial] = PoolRecord(serial, parent, tokens, tail.depth, node)
        prefix.inherit(tail)
        prefix.bytes = tokens * self._unit_bytes
        prefix.locks = int(bool(tail.locks) if locked is None else locked)
        if parent is self.root and self.name != "kv":
            self.root.live_children += 1  # flat: both hang under the root
        else:
            tail.parent = prefix
            prefix.live_children = 1
        tail.depth += tokens
        tail.tokens -= tokens
        tail.bytes -= prefix.bytes
        heard = self.guard.split
        if heard is not None:
            heard(prefix, tail)
        return prefix

    def trim(self, record: PoolRecord, tokens: int) -> None:
        """The last ``tokens`` units of a victim went."""
        record.tokens -= tokens
        record.bytes -= tokens * self._unit_bytes
        heard = self.guard.trim
        if heard is not None:
            heard(record, tokens)

    def remove(self, record: PoolRecord) -> None:
        """The pool holds the node no more."""
        parent = record.parent
        if parent is not None:
            parent.live_children -= 1
        del self.live[record.serial]
        heard = self.guard.remove
        if heard is not None:
            heard(record)
        record.parent = record.node = None

    def lock(self, record: PoolRecord) -> None:
        """The node is protected now and was not before."""
        record.locks = 1
        heard = self.guard.lock
        if heard is not None:
            heard(record)

    def unlock(self, record: PoolRecord) -> None:
        """The last lock on the node went."""
        record.locks = 0
        if not record.live_children:
            heard = self.guard.unlock
            if heard is not None:
                heard(record)

    def use(self, path: Iterable[PoolRecord], *, inserting: bool = False) -> None:
        """A walk used these nodes, parents first.

        In nobody's name, or in the name of a request that has used them already and only looks
        them up again (a server matches a waiting request many times), it is a refresh.

        Args:
            path: Their records.
            inserting: The request walks them to add what it computed: a touch in any case.
        """
        clock, request, guard = self.clock, self.request, self.guard
        recency, use, touch, refresh = clock.accesses, guard.use, guard.touch, guard.refresh
        record: PoolRecord | None = None
        if request is None:
            for record in path:
                record.recency = recency
                if refresh is not None:
                    refresh(record)
            return
        now, counted = clock.now, request.counted
        for record in path:
            record.recency = recency
            end = record.depth + record.tokens
            if end > counted:
                record.uses += 1
                record.last_use = now
                request.counted = counted = end
                if use is not None:
                    use(record)
            elif not inserting:
                if refresh is not None:
                    refresh(record)
                continue
            if touch is not None:
                touch(record)
        if record is not None and self.name != "host":
            _reached(request, record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """A request ended."""
        heard = self.guard.finish
        if heard is not None:
            heard(request, info)


def _reached(request: RequestRecord, record: PoolRecord) -> None:
    """The request used or made a node: its end is the deepest that is still there."""
    end = request.end
    if end is None or end.parent is None or record.depth + record.tokens >= end.depth + end.tokens:
        request.end = record
