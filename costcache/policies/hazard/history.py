"""Histories of tokens: pieces of nodes, cohorts of pieces, and the nodes themselves.

A node that returns after an eviction is new to the tree, and often longer than it was. Tokens that had been
cached before get their history back, new ones start without any. So one node may hold pieces of several
histories, as if it were several nodes in a row.
"""

from __future__ import annotations

from costcache.records import NodeRecord

__all__ = ["Cohort", "Part", "Piece", "Tracked", "Walk", "join", "split_at"]


class Piece:
    """Tokens of a node that have one history, cached or remembered.

    Attributes:
        start: First token of the prefix that it covers.
        tokens: Number of tokens.
        uses: Uses, those before an eviction included.
        first_use: Time of the first use.
        last_use: Time of the last use.
        group: Number of its class, as far as it is known before the request that used it has ended.
        cohort: Where its open reuse interval counts; None until the request has ended.
        walk: The walk that touched it last, in the comparison with LRU; None once it has been evicted.
    """

    __slots__ = ("cohort", "first_use", "group", "last_use", "start", "tokens", "uses", "walk")

    def __init__(self, start: int, tokens: int, now: float, group: int, walk: Walk | None = None) -> None:
        self.start = start
        self.tokens = tokens
        self.uses = 1
        self.first_use = self.last_use = now
        self.group = group
        self.cohort: Cohort | None = None
        self.walk = walk

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with the piece."""
        return self.start + self.tokens

    def cut(self, at: int) -> Piece:
        """Keep the tokens before ``at``; return the rest, with the same history."""
        rest = Piece(at, self.start + self.tokens - at, self.last_use, self.group, self.walk)
        rest.uses, rest.first_use, rest.cohort = self.uses, self.first_use, self.cohort
        self.tokens = at - self.start
        return rest


class Walk:
    """One walk of the tree, as LRU remembers it: an interval of its path that LRU holds.

    A later walk of the same prefix takes tokens from the front, and LRU evicts from the back. So the tokens
    of which this walk is still the latest are ``[low, high)`` of its path.

    Attributes:
        low: First token that no later walk has touched.
        high: End of the tokens that LRU has not evicted.
        recency: ``Clock.accesses`` at the walk; higher once it is known that the path was touched again.
        end: The deepest node of the path that may still be in the cache.
    """

    __slots__ = ("end", "high", "low", "recency")

    def __init__(self, recency: int, start: int) -> None:
        self.low = self.high = start
        self.recency = recency
        self.end: Tracked | None = None


Part = tuple[int, int, Walk, bytes | bytearray | None]
"""Start, end, walk and content of tokens that were evicted here, and that LRU may hold.

The content is None if the cache cannot give it.
"""


class Cohort:
    """Pieces of one class and depth that were last used at about the same time.

    Attributes:
        stratum: Their class and depth, see :class:`costcache.policies.hazard.worth.Worth`.
        slot: Its row in the columns of :class:`costcache.policies.hazard.cohorts.Cohorts`, until it merges
            into another.
        heap: Leaves that may be evicted: ``(recency, stamp, node)``, the least recent on top.
        into: The cohort that it has merged into.
    """

    __slots__ = ("heap", "into", "slot", "stratum")

    def __init__(self, stratum: int, slot: int) -> None:
        self.stratum = stratum
        self.slot = slot
        self.heap: list[tuple[int, int, Tracked]] = []
        self.into: Cohort | None = None

    def whole(self) -> Cohort:
        """The cohort that it is part of by now: itself, until it merges."""
        cohort = self
        while cohort.into is not None:
            cohort = cohort.into
        if cohort is not self:
            self.into = cohort  # the next call finds it at once
        return cohort


class Tracked:
    """History of one node of the cache.

    Attributes:
        record: The node's record.
        stamp: Stamp of its heap entry; 0 while it has none. Entries with another stamp are stale.
        name: ``record.prefix_hash()``, once it has been worked out; the node's first page does not change.
        pieces: Its tokens, from front to back. The last piece may include tokens that have been trimmed off.
        trimmed: Pieces that were trimmed off after those, from front to back.
        pinned_until: Count of requests up to which it stays, since a waiting request needs it.
        dirty: Whether it is on the ranker's list of nodes whose rank is out of date.
        rest: Tokens trimmed off the node that LRU may still hold, from back to front; None if there are none.
        above: The parent of an evicted node, or the node that took over the tokens of a merged one.
        merged_at: Where a merged node ended: walks that ended there, or in a child that is evicted by now,
            do not follow the other one further. 0 for others.
    """

    __slots__ = (
        "above",
        "dirty",
        "merged_at",
        "name",
        "pieces",
        "pinned_until",
        "record",
        "rest",
        "stamp",
        "trimmed",
    )

    def __init__(
        self, record: NodeRecord, pieces: list[Piece], trimmed: list[Piece], name: int | None = None
    ) -> None:
        self.record = record
        self.stamp = 0
        self.name = name
        self.pieces = pieces
        self.trimmed = trimmed
        self.pinned_until = 0
        self.dirty = False
        self.rest: list[Part] | None = None
        self.above: Tracked | None = None
        self.merged_at = 0


def join(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours of one class and cohort; the result has the history of the last."""
    kept = [pieces[0]]
    for piece in pieces[1:]:
        last = kept[-1]
        same = piece.group == last.group and piece.cohort is last.cohort
        if same and piece.walk is last.walk:
            last.tokens += piece.tokens
            last.uses, last.first_use = piece.uses, piece.first_use
        else:
            kept.append(piece)
    return kept


def split_at(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces before token ``at``, and pieces from there on; one that covers it is cut."""
    front: list[Piece] = []
    back: list[Piece] = []
    for piece in pieces:
        if piece.start >= at:
            back.append(piece)
        else:
            front.append(piece)
            if piece.end > at:
                back.append(piece.cut(at))
    return front, back
