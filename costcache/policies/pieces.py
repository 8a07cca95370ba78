"""What is known of the tokens of a node: pieces, each with one history.

A node that returns after an eviction is new to the tree, and often longer than it was. What had been there
before has its history back, and what is new has none. So one node may hold pieces of several
histories, as if it were several nodes behind each other.
"""

from __future__ import annotations

from costcache.policies.ages import Run, Waiting
from costcache.policies.shadow import Span
from costcache.records import NodeRecord

__all__ = ["Piece", "Place", "join", "split_at"]


class Piece:
    """Tokens of a node that have one history, in the cache or remembered.

    Attributes:
        start: First token of the prefix that it covers.
        tokens: How many it covers.
        hits: Uses, those before an eviction included.
        first: When it was first used.
        since: When it was used last.
        group: Its class, as far as it is known without the outcome of the request that used it.
        run: Where the interval counts; None until the request has ended.
        span: When it was used last, for the comparison with LRU.
        locked: Requests that used it hold it, for all that is known.
    """

    __slots__ = ("first", "group", "hits", "locked", "run", "since", "span", "start", "tokens")

    def __init__(self, start: int, tokens: int, now: float, group: int) -> None:
        self.start = start
        self.tokens = tokens
        self.hits = 1
        self.first = self.since = now
        self.group = group
        self.run: Run[Place] | None = None
        self.span: Span | None = None
        self.locked = True

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with the piece."""
        return self.start + self.tokens

    def cut(self, at: int) -> Piece:
        """Keep what is in front of token ``at``; return the rest, with the same history."""
        rest = Piece(at, self.start + self.tokens - at, self.since, self.group)
        rest.hits, rest.first, rest.run, rest.span = self.hits, self.first, self.run, self.span
        rest.locked = self.locked
        self.tokens = at - self.start
        return rest


class Place(Waiting):
    """What is known of a node.

    Attributes:
        name: ``record.prefix_hash()``, where it was worked out; the node's first page does not change.
        pieces: Its tokens, from front to back. The last piece may reach beyond what has not been trimmed off.
        gone: What was trimmed off behind that, from front to back.
        until: Count of requests up to which it stays, since a waiting request wants it.
        marked: It waits to be put into its queue.
    """

    __slots__ = ("gone", "marked", "name", "pieces", "until")

    def __init__(self, record: NodeRecord, pieces: list[Piece], gone: list[Piece]) -> None:
        self.record = record
        self.stamp = 0
        self.name: int | None = None
        self.pieces = pieces
        self.gone = gone
        self.until = 0
        self.marked = False


def join(pieces: list[Piece]) -> list[Piece]:
    """Make one of neighbours that are of one class and in one run; they have the history of the last."""
    kept = [pieces[0]]
    for piece in pieces[1:]:
        last = kept[-1]
        same = piece.group == last.group and piece.run is last.run
        if same and piece.span is last.span and piece.locked == last.locked:
            last.tokens += piece.tokens
            last.hits, last.first = piece.hits, piece.first
        else:
            kept.append(piece)
    return kept


def split_at(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """What is in front of token ``at``, and what is behind."""
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
