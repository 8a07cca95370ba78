"""Shadow LRU: the tokens that LRU of the same size would hold, and the hits that it would have had."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from costcache.policies.hazard.history import Part, Piece, Tracked, Walk
from costcache.records import NodeRecord

__all__ = ["ShadowLRU"]

_PER_END: Final = 64
"""Parked walks that are looked at again for each request that ends."""
_UNLIMITED: Final = 1 << 60
"""Tokens for which there is room until it is known."""
_SPARE: Final = 1024
"""Stale entries that are tolerated, besides as many as there are others."""


class ShadowLRU:
    """An LRU cache of the same size that sees the same requests, to the token.

    LRU evicts leaves, the least recent first, page by page. A request touches its whole path. So each walk
    owns an interval of its path: later walks take tokens from its front, and evictions from its back. LRU's
    cache is the sum of these intervals, and its next victim is the end of the interval of the oldest walk.

    The tokens are looked up by what the cache itself knows. A cached one is in a piece of a node, which names
    its latest walk. One that was evicted here and that LRU holds is in a *remnant*: by the name of its first
    page, with its content, so that a prompt that shares only a part of it is told apart.

    What happens to a path between two uses need not be announced. It is looked up in the cache's own records
    when the end of an interval is about to be evicted: a pinned token stays, in both caches, and one that was
    touched since (by a waiting request, or by the second walk of a request) gets its place then.

    LRU's room is that of the cache: what running requests own is owned in both. It is known after each
    eviction, which leaves just what is needed.

    Exact where requests come one at a time, trims are exact, and the cache can give contents. Otherwise a
    remnant counts as the same tokens if its first page is the same. LRU is taken to trim exactly, whatever
    the cache does.

    Attributes:
        gained: Tokens found that LRU would not have found, since the start.
        lost: Tokens that LRU would have found, and the policy did not, since the start.
        tokens: Tokens that LRU holds.
        room: Tokens that it has room for.
        newest: The latest walk.
        remnants: Remnants by name, see :meth:`costcache.records.NodeRecord.prefix_hash`: their parts, from
            back to front.
        behind_by: Lost minus gained of the request under way, each token by its worth.
    """

    def __init__(self) -> None:
        self.gained = 0
        self.lost = 0
        self.tokens = 0
        self.room = _UNLIMITED
        self.newest = Walk(-1, 0)
        self.remnants: dict[int, list[Part]] = {}
        self.behind_by = 0.0
        self._remembered = 0  # tokens of remnants at most, those that LRU has evicted since included
        self._most = _SPARE
        self._line: list[Walk] = []  # in order of recency
        self._oldest = 0  # where the line begins: those before have been taken out
        self._heap: list[tuple[int, int, Walk]] = []  # others, which have found their place since
        self._moved = 0
        self._most_walks = _SPARE
        self._parked: list[Walk] = []
        self._looks = 0

    # -- requests ----------------------------------------------------------------------------

    def begin(self, recency: int, start: int) -> Walk:
        """Begin a walk.

        Args:
            recency: ``Clock.accesses``.
            start: First token of its path that it has not touched before.
        """
        if self.tokens > self.room:
            self.fit(recency)  # for the request before, which made nothing here
        walk = self.newest = Walk(recency, start)
        line = self._line
        line.append(walk)
        if len(line) > self._most_walks:
            line = line[self._oldest :]
            self._line = line = [each for each in line if each.high > each.low or each is walk]
            self._oldest = 0
            self._most_walks = 2 * len(line) + _SPARE
        return walk

    def use(self, piece: Piece, value: float) -> None:
        """Use a piece that is cached here, of which LRU does not hold all; ``value`` is the worth of a token.

        The usual case, that it holds all, is in :meth:`costcache.policies.hazard.intake.Intake.catch_up`.
        """
        walk, held = piece.walk, 0
        if walk is not None:
            held = max(0, min(piece.start + piece.tokens, walk.high) - piece.start)
            if held:
                walk.low = piece.start + held
        missed = piece.tokens - held
        self.tokens += missed
        self.gained += missed
        self.behind_by -= missed * value

    def insert(
        self, tracked: Tracked, before: Tracked | None, name: int | None, within: int, later: int | None
    ) -> int:
        """Add a new node, of which LRU may hold some tokens already; returns how many it does.

        Args:
            tracked: The node.
            before: Its parent, if that is no root.
            name: The node's name, if there are remnants and it has one.
            within: Tokens of the node before a page whose name is known; 0 if none is.
            later: The name of that page, if it has one.
        """
        record, held = tracked.record, 0
        tokens = record.tokens
        if before is not None and before.rest is not None:
            rest, before.rest = before.rest, None
            held = self._match(rest, tracked)
        while held < tokens and self.remnants:
            if held:
                name = later if held == within else record.prefix_hash(held)
            parts = None if name is None else self.remnants.pop(name, None)
            if parts is None:
                break
            more = self._match(parts, tracked)
            if not more:
                break
            held += more
        self.tokens += tokens - held
        return held

    def _match(self, parts: list[Part], tracked: Tracked) -> int:
        """Take the tokens of a remnant that a new node has too; returns how many of them LRU holds.

        The rest is remembered under a name of its own.
        """
        record = tracked.record
        depth, held = record.depth, 0
        end = depth + record.tokens
        while parts:
            start, stop, walk, content = parts[-1]
            high = walk.high
            if high <= start:  # evicted, and so is what follows
                break
            reach = stop if stop < end else end
            if content is not None and reach > start:
                reach = min(reach, start + record.shared(start - depth, content))
            if reach > start:
                walk.low = reach if reach < high else high
                held += walk.low - start
            if high <= reach:
                if high < stop:
                    break
                parts.pop()
            elif reach == stop:
                parts.pop()
            else:
                if content is not None:
                    content = content[(reach - start) * len(content) // (stop - start) :]
                parts[-1] = reach, stop, walk, content
                if reach == end:
                    tracked.rest = parts
                elif content is not None:
                    name = record.prefix_hash_with(reach - depth, content)
                    if name is not None:
                        self._remember(name, parts)
                break
        return held

    # -- evictions ---------------------------------------------------------------------------

    def evict(self, tracked: Tracked, start: int, end: int) -> None:
        """Remember the last tokens of a node, which are evicted here, as long as LRU holds them.

        Args:
            tracked: The node.
            start: Where the tokens start.
            end: Where they end.
        """
        record, rest, piece = tracked.record, tracked.rest, tracked.pieces[-1]
        depth, walk = record.depth, piece.walk
        if piece.start <= start:  # the usual case: all of them have one history
            if walk is None or walk.high <= start:
                tracked.rest = None  # LRU has evicted them, and so what follows
            else:
                part = start, end, walk, record.content(start - depth, end - depth)
                if rest is None:
                    tracked.rest = [part]
                else:
                    rest.append(part)
            return
        for piece in reversed(tracked.pieces):
            stop, first, walk = piece.start + piece.tokens, piece.start, piece.walk
            if first >= end:
                continue
            if stop <= start:
                break
            first = max(first, start)
            if walk is None or walk.high <= first:
                rest = None
                continue
            if rest is None:
                rest = []
            content = record.content(first - depth, end - depth)
            if stop >= end:
                stop = end
            elif content is not None:
                content = content[: (stop - first) * len(content) // (end - first)]
            rest.append((first, stop, walk, content))
        tracked.rest = rest

    def keep(self, rest: list[Part], record: NodeRecord, at: int) -> None:
        """Remember by its name what was trimmed off a node that another one was merged into.

        Args:
            rest: Its parts.
            record: The node by now.
            at: Where they begin, which is inside it.
        """
        content = rest[-1][3]
        name = None if content is None else record.prefix_hash_with(at - record.depth, content)
        if name is not None:
            self._remember(name, rest)

    def remove(self, tracked: Tracked, name: int | None) -> None:
        """A node was evicted whole, and :meth:`evict` has been called."""
        parent, rest = tracked.record.parent, tracked.rest
        tracked.above = None if parent is None else parent.data
        if rest is not None:
            tracked.rest = None
            if name is not None:
                self._remember(name, rest)

    def _remember(self, name: int, parts: list[Part]) -> None:
        remnants = self.remnants
        remnants[name] = parts
        self._remembered += parts[0][1] - parts[-1][0]
        if self._remembered > self._most:
            for stale in [name for name, each in remnants.items() if each[-1][2].high <= each[-1][0]]:
                del remnants[stale]
            self._remembered = sum([each[0][1] - each[-1][0] for each in remnants.values()])
            self._most = 2 * self._remembered + self.room

    def release(self) -> None:
        """A request ended, or a leaf was unlocked: what it pinned may be evicted."""
        if self._parked:
            self._looks += _PER_END

    def fit(self, before: int = 1 << 62) -> None:
        """Evict what does not fit.

        Args:
            before: Recency from which on touches have not happened yet, as far as this eviction is concerned.
        """
        line, heap, parked = self._line, self._heap, self._parked
        if parked and self._looks >= len(parked):
            for walk in parked:
                self._move(walk)
            parked.clear()
            self._looks = 0
        at, count = self._oldest, len(line)
        excess = self.tokens - self.room
        while excess > 0:
            if heap and (at == count or heap[0][0] <= line[at].recency):
                walk = heap[0][2]
            elif at < count:
                walk = line[at]
            else:
                break
            low, high, later = walk.low, walk.high, 0
            if high > low:
                tracked, floor, until = walk.end, low, high
                merged: Tracked | None = None
                while tracked is not None:
                    record = tracked.record
                    if record.data is not tracked:
                        if tracked.merged_at:
                            _skip_merged(tracked)
                            if tracked.merged_at < until:
                                merged, until = tracked, tracked.merged_at
                        tracked = tracked.above
                        continue
                    start = record.depth
                    if start >= until:
                        tracked = None if record.parent is None else record.parent.data
                        continue
                    until = min(until, start + record.tokens)
                    if until < high:
                        start = until
                    elif walk.recency < record.recency < before:  # touched since, and so is all before it
                        later = record.recency
                    elif record.locks and record.locks > int(record.recency >= before):  # one may be its own
                        later = -1
                    if start > low:
                        floor = start
                    break
                walk.end = tracked if merged is None else merged
                if not later:
                    if high - floor > excess:
                        walk.high = high - excess
                        excess = 0
                        break
                    excess -= high - floor
                    walk.high = floor
                    if floor > low or walk is self.newest:
                        continue
                    walk.end = None
            if heap and walk is heap[0][2]:
                heappop(heap)
            else:
                at += 1
            if later > 0:
                walk.recency = later
                self._move(walk)
            elif later:
                parked.append(walk)
        self._oldest = at
        self.tokens = self.room + excess

    def _move(self, walk: Walk) -> None:
        self._moved += 1
        heappush(self._heap, (walk.recency, self._moved, walk))


def _skip_merged(tracked: Tracked) -> None:
    """Let a merged node refer to the node that has its tokens now, past others that were merged since."""
    above = tracked.above
    while above is not None and above.merged_at:
        tracked.merged_at = min(tracked.merged_at, above.merged_at)  # less, if that was trimmed before
        tracked.above = above = above.above
