"""Takes in what happens in the cache: keeps the history of each node, and tells the learner of each use.

What is new in the cache but had been cached before gets its history back from the ghosts.
"""

from __future__ import annotations

from typing import Final, Literal

from costcache.policies.ghosts import Ghosts
from costcache.policies.hazard.history import Piece, Tracked, join, split_at
from costcache.policies.hazard.learner import Learner
from costcache.policies.hazard.pace import Pace
from costcache.policies.hazard.ranker import Ranker
from costcache.records import NodeRecord, RequestInfo, RequestRecord

__all__ = ["Intake"]

_TRIMMED: Final = 8
"""Pieces trimmed off a node that are remembered with it."""
_SLACK: Final = 0.05
"""Share of the room for ghosts that may be exceeded until a request ends."""


class Intake:
    """Histories of the nodes of one cache, and of evicted ones.

    A match is on the path to the first token of a request, so a use is only noted in ``pending``; its work
    is done by :meth:`catch_up` before anything else happens.

    Attributes:
        pending: Uses that were noted: the node, the time, the tokens from and up to which it reached, and
            its recency.
        ghosts: Pieces of evicted nodes.
        now: The latest time of a use, by the pace.
        began: The time of the first use.
        clock: Unit of the time; None until a request has ended.
        pace: Clock of ages where the host tells the time in seconds; None where ages are its own readings.
        requests: Requests so far.
        nodes: Nodes in the cache.
        resident: Tokens in the cache.
        full: Whether the cache has ever asked for a victim.
    """

    def __init__(self, learner: Learner, ranker: Ranker, ghost_tokens: float) -> None:
        """Start with an empty cache.

        Args:
            learner: Learns from the uses.
            ranker: Ranks the nodes that change.
            ghost_tokens: Evicted tokens to remember.
        """
        self.pending: list[tuple[Tracked, float, int, int, int]] = []
        self.ghosts: Ghosts[list[Piece]] = Ghosts(ghost_tokens, self._censor, slack=_SLACK)
        self.now = self.began = 0.0
        self.clock: Literal["requests", "seconds"] | None = None
        self.pace: Pace | None = None
        self.requests = 0
        self.nodes = 0
        self.resident = 0
        self.full = False
        self._ended = 0  # requests
        self._learner = learner
        self._ranker = ranker
        self._dirty = ranker.dirty

    @property
    def watched(self) -> float:
        """Time since the first interval began, and that of the tables that it started from."""
        return self.now - self.began + self._learner.watched_before

    @property
    def gap(self) -> float:
        """Mean time between requests, without those of the tables."""
        return (self.now - self.began) / max(1, self.requests)

    def insert(self, record: NodeRecord) -> None:
        """Track a new node, of which parts may have been cached before."""
        if self.pending:
            self.catch_up()
        if not self.nodes and not self.requests:
            self.began = record.last_use
        learner, ghosts, pace = self._learner, self.ghosts, self.pace
        shadow = learner.shadow
        now, start, tokens = record.last_use, record.depth, record.tokens
        if pace is not None:
            now = pace.now if start else pace.begin(now, self.requests - self._ended)
        if now > self.now:
            self.now = now
        else:
            now = self.now
        known: list[Piece] = []
        before: Tracked | None = None
        walk, recency = shadow.newest, record.recency
        if start:
            parent = record.parent
            before = None if parent is None else parent.data
            if parent is not None and before is not None:
                last = before.pieces[-1]
                if last.walk is walk:
                    walk.recency = recency  # the request walked its path again
                if parent.live_children == 1:
                    # What follows a trimmed node is, except in rare cases, what was trimmed off it.
                    if last.end > start:
                        # Trimmed while the request waited, which had used it whole: it was not touched again.
                        self._cut_off(before, [last.cut(start)])
                    if before.trimmed and before.trimmed[0].start == start:
                        known, before.trimmed = before.trimmed, []
        else:
            self.requests += 1
            learner.end_request()
        self.resident = resident = self.resident + tokens
        if resident > shadow.room:  # noqa: PLR1730 # max is a call
            shadow.room = resident
        if recency != walk.recency:
            walk = shadow.begin(recency, start)
        remnants = shadow.remnants
        name = record.prefix_hash() if remnants or (ghosts.tokens and not known) else None
        pieces: list[Piece] = []
        trimmed: list[Piece] = []
        at, end = start, start + tokens
        within, later = 0, None  # a page inside the node and its name: the shadow looks for the same, mostly
        while at < end:
            if not known and ghosts.tokens:
                if at > start:
                    within = at - start
                    later = record.prefix_hash(within)
                known = ghosts.take(later if within else name) or []
                if known and known[0].start != at:  # another prefix, whose name is the same by chance
                    self._censor(known)
                    known = []
            if not known:
                pieces.append(Piece(at, end - at, now, learner.classes.open, walk))
                break
            known, trimmed = split_at(known, end)
            for piece in known:
                piece.walk = walk
                learner.end(piece, now)
            pieces += known
            at = known[-1].end
            known = []
        tracked = record.data = Tracked(record, pieces if len(pieces) < 2 else join(pieces), trimmed, name)
        if name in remnants or (before is not None and before.rest is not None):
            if held := shadow.insert(tracked, before, name, within, later):
                learner.missed(tracked, held)
        else:
            shadow.tokens += tokens
        walk.end, walk.high = tracked, end
        if shadow.tokens > shadow.room:
            shadow.fit()
        self.nodes += 1
        self._dirty.append(tracked)
        tracked.dirty = True

    def catch_up(self) -> None:
        """Do the work of the uses noted up to now; it comes before anything else that happens."""
        learner, dirty, shadow = self._learner, self._dirty, self._learner.shadow
        walk, pace = shadow.newest, self.pace
        for tracked, time, depth, end, recency in self.pending:
            now = time
            if pace is not None:
                now = pace.now if depth else pace.begin(time, self.requests - self._ended)
            if now > self.now:  # noqa: PLR1730 # max is a call
                self.now = now
            if not depth:
                self.requests += 1
                learner.end_request()
            if recency != walk.recency:
                walk = shadow.begin(recency, depth)
            pieces = tracked.pieces
            last = pieces[-1]
            if last.start + last.tokens > end:
                self._cut_off(tracked, [last.cut(end)])
            for piece in pieces:
                before, stop = piece.walk, piece.start + piece.tokens
                if before is not None and stop <= before.high:
                    before.low = stop  # LRU has it too: the usual case of shadow.use
                else:
                    learner.found(piece)
                piece.walk = walk
                learner.end(piece, now)
            walk.end, walk.high = tracked, end
            if last is not pieces[0]:
                tracked.pieces = join(pieces)
            tracked.pinned_until = 0
            if not tracked.dirty and not tracked.record.live_children:
                tracked.dirty = True
                dirty.append(tracked)
        self.pending.clear()

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """Give both parts of a split node their share of its history."""
        if self.pending:
            self.catch_up()
        known: Tracked = tail.data
        front, known.pieces = split_at(known.pieces, tail.depth)
        tracked = prefix.data = Tracked(prefix, front, [], known.name)
        known.name = None
        tracked.pinned_until = known.pinned_until
        self.nodes += 1

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """Put the histories of two nodes in a row that became one; those that are equal are joined."""
        if self.pending:
            self.catch_up()
        first: Tracked = prefix.data
        last: Tracked = tail.data
        end = prefix.depth + prefix.tokens
        front, off = split_at(first.pieces, end)
        off += first.trimmed
        if off:  # tokens that were trimmed off the prefix before others followed it
            self._censor(off)
        if first.rest is not None:
            self._learner.shadow.keep(first.rest, tail, end)
            first.rest = None
        front += last.pieces
        last.pieces = join(front)
        last.name = first.name
        last.pinned_until = max(last.pinned_until, first.pinned_until)
        first.above, first.merged_at = last, end
        first.stamp = 0
        prefix.data = None
        self.nodes -= 1

    def trim(self, record: NodeRecord, tokens: int) -> None:
        """Remember the last ``tokens`` tokens of a node, which were evicted, with what is left of it."""
        if self.pending:
            self.catch_up()
        tracked: Tracked = record.data
        pieces, end = tracked.pieces, record.depth + record.tokens
        shadow = self._learner.shadow
        self.resident = shadow.room = self.resident - tokens
        shadow.evict(tracked, end, end + tokens)
        if pieces[-1].start >= end:  # another piece is the last one now
            tracked.pieces, off = split_at(pieces, end)
            self._cut_off(tracked, off)
            self._ranker.mark_dirty(tracked)

    def _cut_off(self, tracked: Tracked, pieces: list[Piece]) -> None:
        for piece in pieces:
            piece.walk = None
        tracked.trimmed[:0] = pieces
        if len(tracked.trimmed) > _TRIMMED:
            self._censor(tracked.trimmed[_TRIMMED:])
            del tracked.trimmed[_TRIMMED:]

    def remove(self, record: NodeRecord) -> None:
        """Remember an evicted node as a ghost, if the cache can name it."""
        if self.pending:
            self.catch_up()
        tracked: Tracked = record.data
        shadow, depth, tokens = self._learner.shadow, record.depth, record.tokens
        shadow.evict(tracked, depth, depth + tokens)
        record.data = None
        tracked.stamp = 0
        self.nodes -= 1
        self.resident = shadow.room = self.resident - tokens
        name = tracked.name
        if name is None:
            name = record.prefix_hash()
        shadow.remove(tracked, name)
        pieces = tracked.pieces
        for piece in pieces:
            piece.walk = None
        if tracked.trimmed:
            pieces = pieces + tracked.trimmed
        if name is None:
            self._censor(pieces)
        else:
            last = pieces[-1]
            self.ghosts.keep(name, last.start + last.tokens - depth, pieces)

    def _censor(self, pieces: list[Piece]) -> None:
        self._learner.censor(pieces, self.now)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """Class the intervals that a request began, by how it ended, and let them count."""
        if self.pending:
            self.catch_up()
        if request.counted:  # else it was too short to begin here
            self._ended += 1
        if request.in_seconds and self.pace is None:
            self.pace = Pace(self.now)
        self.clock = "seconds" if request.in_seconds else "requests"
        shadow = self._learner.shadow
        shadow.release()
        if shadow.tokens > shadow.room:
            shadow.fit()
        learner, now = self._learner, self.now
        number, classes = request.number, learner.classes
        open_class = classes.open
        made = 0
        record = request.end
        while record is not None and record.creator == number and record.data is not None:
            last = record.data.pieces[-1]
            if last.group == open_class:
                made += last.tokens
            record = record.parent
        ending = classes.ending(info)
        record = request.end
        while record is not None:
            tracked: Tracked | None = record.data
            if tracked is None:
                break  # the root, or an end that has been evicted
            moved = False
            for piece in tracked.pieces:
                group = piece.group
                if group == open_class:
                    if record.creator != number:
                        continue  # its own request is still running
                    if piece.cohort is not None:
                        learner.withdraw(piece)
                    piece.group = group = classes.fresh(made, ending)
                elif piece.cohort is None:
                    group = classes.after(group, ending)
                else:
                    continue
                learner.begin(piece, group, now)
                moved = True
            if moved and tracked.stamp:
                self._ranker.mark_dirty(tracked)
            record = record.parent
