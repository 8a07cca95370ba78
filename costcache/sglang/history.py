"""What the Rust core's nodes have been through, kept at the leaves.

A walk is noted at the deepest node that it reached. When a leaf goes, its parent takes over its history: the
sum of the uses, the latest recency, the earliest creation, the highest priority. By the time a node is a leaf
it has so heard of every walk through it, as in the Python core, where each walk notes every node. A
request that walks deeper takes its use along, so each counts once per node.

What an interior node holds until then is not whole, and depth and tokens of a node that was split are
corrected only when it is named. So orders that look at more than leaves, or at these two, need the
Python core; see :func:`costcache.sglang.choice.choose_core`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costcache.sglang.pool import PoolEvents, PoolRecord

if TYPE_CHECKING:
    from costcache.records import NodeRecord

__all__ = ["LeafHistory", "Path"]

LOWEST = -(1 << 63)

Path = Sequence[tuple[int, int, int, int, int | None, int]]
"""From the root's child down: id, parent's id, start and end in tokens, tokens on the device, children."""


class LeafHistory:
    """Records by node id; a base of the tree core, which calls it with what the core's binding answers.

    Attributes:
        kv: The pool of full-attention KV.
    """

    kv: PoolEvents

    def forget(self) -> None:
        """Start anew."""
        # Records in kv.live have been leaves at least once; the others only gather history.
        self._records: dict[int, PoolRecord] = {}
        self._holds: dict[int, int] = {}

    def _use(self, node_id: int, end: int, *, inserting: bool = False) -> PoolRecord:
        """A walk ended at a node, ``end`` tokens from the root."""
        kv = self.kv
        guard, request = kv.guard, kv.request
        heard = guard.refresh
        record = self._records.get(node_id)
        if record is None:
            record = self._records[node_id] = self._unseen(node_id, end)
        record.recency = kv.clock.accesses
        if request is not None:
            before = request.end
            if end > request.counted:
                record.uses += 1
                record.last_use = kv.clock.now
                heard = guard.touch
                if before is not None:
                    self._move_use(before)
                request.counted = end
                request.end = record
                if guard.use is not None and record.parent is not None:
                    guard.use(record)
            else:
                if inserting:
                    heard = guard.touch
                # SGLang inserts the prompt once more after the whole: the request ends deeper.
                if not inserting or before is None or before.end <= end or self._current(before) is None:
                    request.end = record
        if heard is not None and record.parent is not None:
            heard(record)
        return record

    def _current(self, record: NodeRecord | None) -> PoolRecord | None:
        """The record that its node has now; None where the node has gone."""
        node_id = getattr(record, "node", None)
        return None if node_id is None else self._records.get(node_id)

    def _move_use(self, end: NodeRecord | None) -> PoolRecord | None:
        """A request goes on below the node where it ended, if any, and takes its use along."""
        record = self._current(end)
        if record is not None:
            record.uses -= 1
            record.live_children = record.live_children or 1
        return record

    def _unseen(self, node_id: int, end: int) -> PoolRecord:
        """A record for an interior node: all that it starts with is where the node ends."""
        record = PoolRecord(0, None, 0, end, node_id)
        record.live_children = 1
        record.created = self.kv.clock.accesses
        record.priority = LOWEST
        record.locks = int(node_id in self._holds)
        return record

    def _refreshed(self, record: PoolRecord) -> None:
        heard = self.kv.guard.refresh
        if heard is not None and record.parent is not None:
            heard(record)

    def _hold(self, node_id: int) -> None:
        holds = self._holds
        count = holds.get(node_id, 0)
        holds[node_id] = count + 1
        if not count:
            record = self._records.get(node_id)
            if record is not None:
                if record.parent is None:
                    record.locks = 1
                else:
                    self.kv.lock(record)

    def _release(self, node_id: int) -> None:
        holds = self._holds
        count = holds[node_id] - 1
        if count:
            holds[node_id] = count
            return
        del holds[node_id]
        record = self._records.get(node_id)
        if record is not None:
            if record.parent is None:
                record.locks = 0
            else:
                self.kv.unlock(record)

    def _gone(self, path: Path) -> None:
        records, kv = self._records, self.kv
        record = records.pop(path[-1][0], None)
        parent = leaf = None
        if len(path) > 1:
            parent_id, _, start, end, _, children = path[-2]
            parent = records.get(parent_id)
            if parent is None:
                parent = records[parent_id] = self._unseen(parent_id, end)
            if record is not None:
                _merge(parent, record)
                self._refreshed(parent)
            parent.live_children = children - 1
            if children == 1:
                parent.depth, parent.tokens, leaf = start, end - start, parent
        if record is not None and record.parent is not None:
            if leaf is not None and leaf.parent is not None:
                # The order offers the parent when it hears that its last child went.
                kv.root.live_children -= 1
                leaf.live_children, record.parent = 1, leaf
            kv.remove(record)
        if leaf is not None and leaf.parent is None:
            records[leaf.node] = kv.insert(
                leaf.node, leaf.tokens, leaf.depth, priority=leaf.priority, history=leaf, locks=leaf.locks
            )


def _merge(parent: PoolRecord, record: PoolRecord) -> None:
    """Add to a node's history that of a child that went."""
    parent.uses += record.uses
    parent.last_use = max(parent.last_use, record.last_use)
    parent.recency = max(parent.recency, record.recency)
    parent.priority = max(parent.priority, record.priority)
    if record.created <= parent.created:
        parent.created, parent.creator = record.created, record.creator
