"""Requests of the KV events that vLLM and SGLang publish: which blocks were stored, removed, or all cleared.

A file holds the published batches one after another. Events name no requests: blocks stored one
after another within :data:`PAUSE` seconds are taken for one request, whose prompt is what was stored and the
prefix before it. So a request's output counts as part of its prompt, and a request that stored nothing shows
only if the server also publishes the blocks that it found, as vLLM does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from costcache.errors import TraceError
from costcache.recording.hashes import Hashed
from costcache.recording.lines import MOST_BLOCK
from costcache.recording.recorder import Ended
from costcache.records import RequestInfo
from costcache.sim.recordings.published import (
    CLEARED,
    REMOVED,
    STORED,
    block_size_of,
    hash_of,
    read_batches,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PAUSE", "events_block_size", "read_events"]

PAUSE = 2.0
"""Seconds without a block after which a request has ended."""


class _Open:
    """A request that stores blocks."""

    __slots__ = ("began", "cached", "hashes", "last", "session")

    def __init__(self, began: float, hashes: list[bytes], session: str | None) -> None:
        self.began = self.last = began
        self.hashes = hashes
        self.cached = len(hashes)
        self.session = session


class _Follower:
    """Follows the blocks of one publisher."""

    def __init__(self) -> None:
        self.size = 0
        self._parents: dict[bytes, bytes | None] = {}
        self._present: set[bytes] = set()
        self._open: dict[bytes, _Open] = {}  # by the last block
        self._done: list[_Open] = []
        self._count = 0

    def stored(self, at: float, event: dict[str, Any]) -> None:
        """Blocks were stored, or were found and are published again."""
        self.size = block_size_of(event, self.size)
        hashes = [hash_of(value) for value in event["block_hashes"]]
        parent = event.get("parent_block_hash")
        before = None if parent is None else hash_of(parent)
        if not hashes:
            return
        found = all(value in self._present for value in hashes)
        for value in hashes:
            self._parents[value] = before
            before = value
        self._present.update(hashes)
        first = self._parents[hashes[0]]
        request = None if found or first is None else self._open.pop(first, None)
        if request is None:
            session = event.get("session_id")
            path = self._path(hashes[-1] if found else first)
            request = _Open(at, path, session if isinstance(session, str) else None)
        if not found:
            request.hashes += hashes
        request.last = at
        before = hashes[-1]
        if before in self._open:
            self._done.append(self._open[before])  # two requests of the same prompt
        self._open[before] = request

    def _path(self, last: bytes | None) -> list[bytes]:
        path: dict[bytes, None] = {}
        while last is not None and last in self._parents:
            if last in path:
                raise ValueError("a block comes before itself")
            path[last] = None
            last = self._parents[last]
        return list(path)[::-1]

    def removed(self, event: dict[str, Any]) -> None:
        """Blocks were evicted."""
        self._present.difference_update(map(hash_of, event["block_hashes"]))

    def cleared(self) -> None:
        """The cache was reset."""
        self._present.clear()

    def ended(self, before: float) -> Iterator[Ended]:
        """The requests whose last block is older than a time."""
        for last, request in list(self._open.items()):
            if request.last < before:
                self._done.append(self._open.pop(last))
        done, self._done = self._done, []
        for request in done:
            self._count += 1
            tokens = len(request.hashes) * self.size
            content = Hashed(request.hashes, tokens, 0, self.size, self._count.to_bytes(8, "little"))
            yield Ended(
                content,
                tokens,
                request.cached * self.size,
                request.began,
                request.last,
                RequestInfo(session=request.session),
            )


def events_block_size(path: str | os.PathLike[str]) -> int:
    """Tokens per block of the first blocks that were stored.

    Raises:
        TraceError: The file cannot be read, or no block was stored.
    """
    for _, batch in read_batches(path):
        for event in batch.events:
            size = event.get("block_size")
            if event.get("type") == STORED and isinstance(size, int) and 1 <= size <= MOST_BLOCK:
                return size
    raise TraceError(f"{path}: holds no event BlockStored; record while the server answers requests")


def read_events(path: str | os.PathLike[str]) -> Iterable[Ended]:
    """The requests of a file of KV events.

    Raises:
        TraceError: The file cannot be read, or a batch is malformed.
    """
    ranks: dict[Any, _Follower] = {}
    for number, batch in read_batches(path):
        follower = ranks.setdefault(batch.rank, _Follower())
        yield from follower.ended(batch.time - PAUSE)
        try:
            for event in batch.events:
                kind = event.get("type")
                if kind == STORED:
                    follower.stored(batch.time, event)
                elif kind == REMOVED:
                    follower.removed(event)
                elif kind == CLEARED:
                    follower.cleared()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise TraceError(f"{path}, batch {number}: an event is malformed ({error!r})") from None
    for follower in ranks.values():
        yield from follower.ended(float("inf"))
