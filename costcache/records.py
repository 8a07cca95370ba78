"""What an eviction order sees: one record per node of a cache, and the state of a pool.

Orders see records only, never a tree, so the same order object serves the generic radix cache,
the simulator and the server adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Self, SupportsFloat, TypeVar

from mypy_extensions import mypyc_attr

__all__ = [
    "Action",
    "Clock",
    "NodeRecord",
    "PoolState",
    "RequestInfo",
    "RequestRecord",
    "State",
    "Victim",
    "tuple_maker",
]

T = TypeVar("T", bound=tuple[Any, ...])


def tuple_maker(kind: type[T]) -> Callable[[tuple[Any, ...]], T]:
    """Make named tuples of all their fields, in order: without the Python code of their constructor."""
    return partial(tuple.__new__, kind)


class Action(Enum):
    """What to do with a victim."""

    DELETE = "delete"
    """Free the node's tokens (or its tail's, when it is trimmed) and, once it is empty, the node."""
    TOMBSTONE = "tombstone"
    """Free the state checkpoint of the node and keep its tokens (models with states only)."""


class Clock:
    """Logical time, made from the request stream alone, so that every rank reads the same.

    Attributes:
        requests: How many requests have begun.
        accesses: How many walks of the tree have happened; orders recency.
        now: The reading that orders use: stream seconds once :meth:`advance` has been called; the count of
            requests until then.
        in_seconds: Whether it has been.
    """

    __slots__ = ("accesses", "in_seconds", "now", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.accesses = 0
        self.now = 0.0
        self.in_seconds = False

    def begin(self) -> int:
        """Count one more request and return its number, from 1."""
        self.requests += 1
        if not self.in_seconds:
            self.now = float(self.requests)
        return self.requests

    def advance(self, seconds: SupportsFloat) -> None:
        """Set the stream clock, in seconds; a reading older than the last one is ignored.

        Raises:
            ValueError: Not a finite number.
        """
        if not math.isfinite(seconds):
            raise ValueError(f"seconds is {seconds!r}: give a finite number")
        reading = float(seconds)
        if not self.in_seconds or reading > self.now:
            self.now = reading
        self.in_seconds = True


@mypyc_attr(allow_interpreted_subclasses=True)
class State:
    """A checkpoint of a recurrent state, at the end of a node: where a request can go on.

    Attributes:
        slot: Slot of the state pool that holds it.
        locks: Locks on it; a locked state is never a victim.
        uses: Requests that went on from it, and the one that made it.
        last_use: Clock reading of the last of them.
        recency: ``Clock.accesses`` of the last of them.
        created: ``Clock.accesses`` when it was made.
    """

    __slots__ = ("created", "last_use", "locks", "recency", "slot", "uses")

    def __init__(self, slot: int, clock: Clock) -> None:
        self.slot = slot
        self.locks = 0
        self.uses = 1
        self.last_use = clock.now
        self.recency = self.created = clock.accesses


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeRecord:
    """The facts of one tree node that an eviction order may use.

    The cache keeps every field up to date; an order reads them and writes only ``data``.

    Attributes:
        serial: Number of the node in order of creation, equal on every rank; breaks ties.
        parent: Record of the parent node; None for a root and for a node that has gone.
        tokens: Tokens that the node holds.
        depth: Tokens of the prefix in front of the node: it covers [depth, depth + tokens).
        uses: Requests that used the node, the one that made it included; one per request.
        last_use: Clock reading of the last counted use.
        recency: ``Clock.accesses`` at the last touch or refresh. A refresh moves this alone.
        created: ``Clock.accesses`` at creation; the prefix part of a split inherits it.
        creator: Number of the request that made the node; inherited on a split.
        live_children: Child nodes that hold tokens. A node without any is a leaf.
        locks: Locks on the node itself, plus its children that are locked. Locked nodes
            are never victims.
        priority: Highest priority of the requests that inserted it.
        state: Models with states: the checkpoint at the end of this node, None where there is none.
        bytes: Bytes of KV memory, per rank, that deleting the node frees.
        data: Free for the order's own use; None when the node is created.
    """

    __slots__ = (
        "bytes",
        "created",
        "creator",
        "data",
        "depth",
        "last_use",
        "live_children",
        "locks",
        "parent",
        "priority",
        "recency",
        "serial",
        "state",
        "tokens",
        "uses",
    )

    def __init__(self, serial: int, parent: Self | None, tokens: int, depth: int) -> None:
        self.serial = serial
        self.parent: Self | None = parent
        self.tokens = tokens
        self.depth = depth
        self.uses = 0
        self.last_use = 0.0
        self.recency = 0
        self.created = 0
        self.creator = 0
        self.live_children = 0
        self.locks = 0
        self.priority = 0
        self.state: State | None = None
        self.bytes = 0
        self.data: Any = None

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with this node."""
        return self.depth + self.tokens

    @property
    def replay(self) -> int:
        """Tokens from the nearest live state in front of this node's end, not its own, to its end.

        Models with states recompute so many if its own state is not there. O(nodes in between).
        """
        above = self.parent
        while above is not None and above.state is None:
            above = above.parent
        return self.end - (0 if above is None else above.end)

    @property
    def is_dead(self) -> bool:
        """Models with states: True for a leaf without a state, which no request can go on from."""
        return self.state is None and self.is_leaf

    @property
    def is_leaf(self) -> bool:
        """True for a node that holds tokens and has no live children."""
        return not self.live_children and self.parent is not None

    @property
    def is_evictable(self) -> bool:
        """True for an unlocked leaf: what an order may name as a victim."""
        return not self.live_children and not self.locks and self.parent is not None

    def prefix_hash(self, offset: int = 0) -> int | None:  # noqa: ARG002 # for caches that can tell
        """A name for what the node holds, by which a policy knows it when it comes back as a new node.

        64 bits made of the whole prefix up to the end of the node's first page, or of the page that
        begins ``offset`` tokens behind its start: the same in every process, and untouched by where nodes in
        front of it begin and end. None in a cache that cannot tell; then every node is a stranger.
        """
        return None

    def inherit(self, tail: NodeRecord) -> None:
        """Take over the history of ``tail``, of which this node was just split off as prefix."""
        self.uses = tail.uses
        self.last_use = tail.last_use
        self.recency = tail.recency
        self.created = tail.created
        self.creator = tail.creator
        self.priority = tail.priority

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} #{self.serial} [{self.depth}, {self.end}) uses={self.uses} "
            f"recency={self.recency} children={self.live_children} locks={self.locks}>"
        )


class Victim(NamedTuple):
    """What an order answers: a record and what to do with it.

    Attributes:
        record: The leaf, or the node whose state goes.
        action: What to do with it.
        tokens: The last tokens of the leaf that may go; None for all. What is in front of them is worth
            more to the order, which may name the rest again. A cache that trims in larger steps, or
            not at all, takes more.
    """

    record: NodeRecord
    action: Action = Action.DELETE
    tokens: int | None = None

    def at_most(self, needed: int) -> int:
        """Of the ``needed`` tokens, at least 1, those that may go from this leaf now."""
        tokens = self.tokens
        return needed if tokens is None or tokens >= needed else max(1, tokens)


class PoolState(NamedTuple):
    """One pool at the moment of an eviction; immutable.

    Attributes:
        pool: Name of the pool (``"kv"``, ``"swa"``, ``"state"``).
        unit: What the counts below count: ``"tokens"``, ``"states"`` or ``"bytes"``.
        capacity: Units that the pool has.
        free: Units that nobody uses.
        evictable: Cached units that no lock protects.
        held: Units that running requests own outside the cache.
        page_size: Tokens per page.
    """

    pool: str
    unit: str
    capacity: int
    free: int
    evictable: int
    held: int
    page_size: int

    def in_pages(self, requested: int) -> int:
        """``requested`` units as the pool can free them: tokens in whole pages, up to its capacity.

        Never under ``requested``.
        """
        rest = requested % self.page_size if self.unit == "tokens" else 0
        if not rest:
            return requested
        whole = requested - rest + self.page_size
        return whole if whole <= self.capacity else max(self.capacity, requested)


class RequestInfo(NamedTuple):
    """What is known of a request when it finishes; everything is optional.

    Attributes:
        output_tokens: Tokens generated.
        new_tokens: Prompt tokens that the cache did not have when the request began, None where unknown.
        finish_reason: ``"stop"``, ``"tool_call"``, ``"length"``, ``"abort"``, or the
            server's own word; None where unknown.
        priority: The request's priority; higher is kept longer by the ``priority`` order.
        session: Name of the session that the request belongs to, None where unknown.
    """

    output_tokens: int = 0
    new_tokens: int | None = None
    finish_reason: str | None = None
    priority: int = 0
    session: str | None = None


class RequestRecord:
    """What the cache remembers of a running request.

    Attributes:
        number: The request's number in the stream, from 1.
        began: Clock reading at its start.
        in_seconds: The clock reads stream seconds, and not the count of requests.
        end: Record of the deepest node that it used or made.
        counted: Tokens of its prefix whose nodes have already counted this request's use.
        matched: Tokens that its first match found.
        oversized: True once it was longer than the whole pool.
    """

    __slots__ = ("began", "counted", "end", "in_seconds", "matched", "number", "oversized")

    def __init__(self, number: int, began: float, in_seconds: bool = False) -> None:
        self.number = number
        self.began = began
        self.in_seconds = in_seconds
        self.end: NodeRecord | None = None
        self.counted = 0
        self.matched = 0
        self.oversized = False
