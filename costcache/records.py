"""The facts that an eviction order sees: one record per node of a cache, and the state of a pool.

Orders see records only, never a tree, so the same order object serves the generic radix cache,
the simulator and the server adapter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, Self, SupportsFloat, TypeVar

from mypy_extensions import mypyc_attr

__all__ = [
    "MOST_ENDING",
    "Action",
    "Asker",
    "Askers",
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

MOST_ENDING: Final = 4
"""Last tokens of an output that a :class:`RequestInfo` may hold."""
MOST_NAME: Final = 200
"""Characters of a name of an :class:`Asker`; a longer one ends in a checksum of the whole."""
MOST_ASKERS: Final = 65_536
"""Askers that a table of them knows at a time."""


def tuple_maker(kind: type[T]) -> Callable[[tuple[Any, ...]], T]:
    """Return a constructor of ``kind`` from all fields in order, which skips the class's own Python code."""
    return partial(tuple.__new__, kind)


class Action(Enum):
    """The action on a victim."""

    DELETE = "delete"
    """Free the node's tokens (or its tail's, when it is trimmed) and, once it is empty, the node."""
    TOMBSTONE = "tombstone"
    """Free the state checkpoint of the node and keep its tokens (models with states only)."""


class Asker(NamedTuple):
    """Who sent a request, as far as clients and server say. In a cache, equal ones are one object.

    Attributes:
        session: Name of the session, such as a conversation or an agent's run; None if unknown.
        tenant: Name of the customer or application, or of the namespace that the server keeps apart (SGLang's
            ``extra_key``, a cache salt); None if unknown.
        user: Name of the end user; None if unknown.
    """

    session: str | None = None
    tenant: str | None = None
    user: str | None = None


_make_asker: Final = tuple_maker(Asker)


class Askers:
    """Makes askers so that equal ones are one object, of which records hold references.

    Bounded: a name has at most :data:`MOST_NAME` characters, and the table at most :data:`MOST_ASKERS`
    entries, after which it starts anew. What records refer to stays.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, str | None, str | None], Asker] = {}

    def of(self, session: str | None, tenant: str | None = None, user: str | None = None) -> Asker | None:
        """The asker of these names; None if none is known."""
        if session is None and tenant is None and user is None:
            return None
        names = (session, tenant, user)
        known = self._known.get(names)
        if known is None:
            short = (_shortened(session), _shortened(tenant), _shortened(user))
            known = self._known.get(short)
            if known is None:
                if len(self._known) >= MOST_ASKERS:
                    self._known.clear()
                known = self._known[short] = _make_asker(short)
        return known


def _shortened(name: str | None) -> str | None:
    if name is None or len(name) <= MOST_NAME:
        return name
    checksum = zlib.crc32(name.encode("utf-8", "surrogatepass"))
    return f"{name[: MOST_NAME - 9]}~{checksum:08x}"


class Clock:
    """Logical time, made from the request stream alone, so that every rank reads the same.

    Attributes:
        requests: Requests that have begun.
        accesses: Walks of the tree; recency is counted in these.
        now: The reading that orders use: the count of requests, or stream seconds once :meth:`advance` was
            called.
        in_seconds: Whether ``now`` is in stream seconds.
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
    """A checkpoint of a recurrent state at the end of a node, from which a request can resume.

    Attributes:
        slot: Slot of the state pool that it is in.
        locks: Locks on it; a locked state is never a victim.
        uses: Requests that resumed from it, and the one that made it.
        last_use: Clock reading of its last use.
        recency: ``Clock.accesses`` at its last use.
        created: ``Clock.accesses`` when it was made.
        parts: Whether the host knows that prompts part there; False where it does not say, and where they do
            is seen by the node's children.
    """

    __slots__ = ("created", "last_use", "locks", "parts", "recency", "slot", "uses")

    def __init__(self, slot: int, clock: Clock) -> None:
        self.slot = slot
        self.locks = 0
        self.parts = False
        self.uses = 1
        self.last_use = clock.now
        self.recency = self.created = clock.accesses


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeRecord:
    """The facts of one tree node that an eviction order may use.

    The pool keeps every field up to date; an order reads them and writes only ``data``, which nobody else
    reads or writes but to make it None before an order starts.

    Attributes:
        serial: Number of the node in order of creation, equal on every rank; breaks ties.
        parent: Record of the parent node; None for a root and for an evicted node.
        tokens: Tokens of the node.
        depth: Tokens of the prefix before the node: it covers [depth, depth + tokens).
        uses: Requests that used the node, including the one that made it; one per request.
        last_use: Clock reading of the last counted use.
        recency: ``Clock.accesses`` at the last touch or refresh. A refresh changes nothing else.
        created: ``Clock.accesses`` at creation; the prefix of a split inherits it.
        creator: Number of the request that made the node; the prefix of a split inherits it.
        live_children: Child nodes in the cache. A node without any is a leaf.
        pins: Pins on this very node.
        locks: Its pins, plus its children that are locked. A locked node is never a victim.
        priority: Highest priority of the requests that inserted it.
        made_by: Who sent the request that made the node; None if unknown. The prefix of a split inherits it.
        used_by: Who sent the last request that walked over the node and of which that is known; None without
            any.
        state: Models with states: the checkpoint at the end of this node, or None.
        data: For the order's own use; None when the node is created.
        queued: For the base classes of orders: the key of the node's place in their queue, None without one.
    """

    __slots__ = (
        "created",
        "creator",
        "data",
        "depth",
        "last_use",
        "live_children",
        "locks",
        "made_by",
        "parent",
        "pins",
        "priority",
        "queued",
        "recency",
        "serial",
        "state",
        "tokens",
        "used_by",
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
        self.pins = 0
        self.locks = 0
        self.priority = 0
        self.made_by: Asker | None = None
        self.used_by: Asker | None = None
        self.state: State | None = None
        self.data: Any = None
        self.queued: Any = None

    @property
    def end(self) -> int:
        """Tokens of the prefix that ends with this node."""
        return self.depth + self.tokens

    @property
    def replay(self) -> int:
        """Tokens to recompute if this node's own state is evicted, in models with states.

        They reach from the nearest state before it to the end of the node. O(nodes in between).
        """
        above = self.parent
        while above is not None and above.state is None:
            above = above.parent
        return self.end - (0 if above is None else above.end)

    @property
    def is_dead(self) -> bool:
        """Models with states: True for a leaf without a state, from which no request can resume."""
        return self.state is None and self.is_leaf

    @property
    def is_leaf(self) -> bool:
        """True for a node of the cache without live children."""
        return not self.live_children and self.parent is not None

    @property
    def is_evictable(self) -> bool:
        """True for an unlocked leaf, which an order may name as a victim."""
        return not self.live_children and not self.locks and self.parent is not None

    def prefix_hash(self, offset: int = 0) -> int | None:  # noqa: ARG002 # for caches that can tell
        """Hash of the prefix, by which a policy recognises an evicted node that is made again.

        64 bits made of the whole prefix up to the end of the node's first page, or of the page that begins
        ``offset`` tokens after its start. The same in every process, and independent of where the nodes
        before it begin and end. None if the cache cannot hash prefixes; evicted nodes are then never
        recognised.
        """
        return None

    def content(self, start: int, end: int) -> bytes | bytearray | None:  # noqa: ARG002 # for caches that can tell
        """Bytes that stand for the last tokens of the node, which are evicted: equal bytes are equal tokens.

        Args:
            start: Tokens of the node before them.
            end: Tokens of the node, including those of a trim that is being announced.

        Returns:
            The bytes, the same number for each page; None if the cache cannot give them.
        """
        return None

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int | None:  # noqa: ARG002 # as before
        """The :meth:`prefix_hash` at an offset, if the page there were the first one of a content."""
        return None

    def shared(self, offset: int, content: bytes | bytearray) -> int:  # noqa: ARG002 # for caches that can tell
        """Tokens, whole pages, that the node has in common from ``offset`` on with what gave ``content``."""
        return 0

    def inherit(self, tail: NodeRecord) -> None:
        """Take over the history of ``tail``, from which this node was just split off as the prefix."""
        self.uses = tail.uses
        self.last_use = tail.last_use
        self.recency = tail.recency
        self.created = tail.created
        self.creator = tail.creator
        self.priority = tail.priority
        self.made_by = tail.made_by
        self.used_by = tail.used_by

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} #{self.serial} [{self.depth}, {self.end}) uses={self.uses} "
            f"recency={self.recency} children={self.live_children} locks={self.locks}>"
        )


class Victim(NamedTuple):
    """An order's answer: a record, and the action on it.

    Attributes:
        record: The leaf, or the node whose state is evicted.
        action: The action.
        tokens: Last tokens of the leaf that may be evicted; None for all. The tokens before them are worth
            more to the order, which may name the rest again. A cache that trims in larger steps, or not at
            all, evicts more.
    """

    record: NodeRecord
    action: Action = Action.DELETE
    tokens: int | None = None

    def at_most(self, needed: int) -> int:
        """Tokens of this leaf that may be evicted now: ``needed`` or fewer, and at least 1."""
        tokens = self.tokens
        return needed if tokens is None or tokens >= needed else max(1, tokens)


class PoolState(NamedTuple):
    """One pool at the moment of an eviction; immutable.

    Attributes:
        pool: Name of the pool (``"kv"``, ``"swa"``, ``"state"``).
        unit: The unit of the counts below: ``"tokens"``, ``"states"`` or ``"bytes"``.
        capacity: Units that the pool has.
        free: Units that are neither cached nor reserved.
        evictable: Cached units that no lock protects.
        reserved: Units that running requests own outside the cache.
        page_size: Tokens per page.
    """

    pool: str
    unit: str
    capacity: int
    free: int
    evictable: int
    reserved: int
    page_size: int

    def in_pages(self, requested: int) -> int:
        """Round ``requested`` units up to what the pool can free: tokens in whole pages, up to its capacity.

        Never below ``requested``.
        """
        rest = requested % self.page_size if self.unit == "tokens" else 0
        if not rest:
            return requested
        whole = requested - rest + self.page_size
        return whole if whole <= self.capacity else max(self.capacity, requested)


class RequestInfo(NamedTuple):
    """The facts known of a request when it finishes; everything is optional.

    The last six are hints: what the client says it will do, which may be wrong.

    Attributes:
        output_tokens: Tokens generated.
        new_tokens: Prompt tokens that the cache did not have when the request began, None if unknown.
        finish_reason: ``"stop"``, ``"tool_call"``, ``"length"``, ``"abort"``, or the
            server's own word; None if unknown.
        priority: The request's priority; higher is kept longer by the ``priority`` order.
        session: Name of the session that the request belongs to, None if unknown.
        ending: Ids of the last tokens generated, up to :data:`MOST_ENDING` of them; empty if unknown. A tool
            call ends in other tokens than an answer, whatever the model.
        tenant: Name of the customer or application that sent the request, None if unknown.
        session_ends: Whether the client says that this was the session's last request.
        returns_after: Seconds after which the client expects to continue from this prompt, or a label of
            the reason for the pause, such as a tool's name; None if it does not say.
        keep_seconds: Seconds for which the client asks to keep the prompt, None if it does not.
        user: Name of the end user, None if unknown.
    """

    output_tokens: int = 0
    new_tokens: int | None = None
    finish_reason: str | None = None
    priority: int = 0
    session: str | None = None
    ending: tuple[int, ...] = ()
    tenant: str | None = None
    session_ends: bool = False
    returns_after: float | str | None = None
    keep_seconds: float | None = None
    user: str | None = None


class RequestRecord:
    """A pool's record of a running request.

    Attributes:
        number: The request's number in the stream, from 1.
        in_seconds: Whether the clock reads stream seconds, and not the count of requests.
        end: Record of the deepest node that it used or made.
        counted: Tokens of its prefix whose nodes have already counted this request's use.
        matched: Tokens that its first match found.
        lru_matched: Tokens that LRU would have found; None where the host does not say.
        oversized: True once it was longer than the whole pool.
        branch: With windows that are ranked apart: tokens that its match found cached, usable or not; prompts
            branch there. -1 if it has not matched, 0 once a window was kept there.
        windows: Record of the same request among sliding windows that are ranked apart; None without any.
        asker: Who sent it; None if unknown.
    """

    __slots__ = (
        "asker",
        "branch",
        "counted",
        "end",
        "in_seconds",
        "lru_matched",
        "matched",
        "number",
        "oversized",
        "windows",
    )

    def __init__(self, number: int, in_seconds: bool = False, asker: Asker | None = None) -> None:
        self.number = number
        self.asker = asker
        self.in_seconds = in_seconds
        self.end: NodeRecord | None = None
        self.counted = 0
        self.matched = 0
        self.lru_matched: int | None = None
        self.oversized = False
        self.branch = -1
        self.windows: RequestRecord | None = None
