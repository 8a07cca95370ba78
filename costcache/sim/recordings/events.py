"""Requests of the KV events that vLLM and SGLang publish: which blocks were stored, removed, or all cleared.

A file holds the published batches, MessagePack, one after another. Events name no requests: blocks stored one
after another within :data:`PAUSE` seconds are taken for one request, whose prompt is what was stored and the
prefix before it. So a request's output counts as part of its prompt, and a request that stored nothing shows
only if the server also publishes the blocks that it found, as vLLM does. Format:
``vllm/distributed/kv_events.py`` and ``sglang/srt/disaggregation/kv_events.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from costcache.errors import TraceError
from costcache.recording.hashes import Hashed
from costcache.recording.lines import MOST_BLOCK
from costcache.recording.recorder import Ended
from costcache.records import RequestInfo
from costcache.sim.recordings.packed import split
from costcache.sim.traces.files import open_source

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PAUSE", "events_block_size", "read_events"]

PAUSE = 2.0
"""Seconds without a block after which a request has ended."""

_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_DEVICE = (None, "GPU")
_LATEST = 1e12
"""Unix time, in seconds, after that of any batch."""


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
        size = event.get("block_size")
        if not isinstance(size, int) or not 1 <= size <= MOST_BLOCK or (self.size and size != self.size):
            raise ValueError(f"block_size is {size}; expected {self.size or '1 or more'}, as before")
        self.size = size
        hashes = [_bytes(value) for value in event["block_hashes"]]
        parent = event.get("parent_block_hash")
        before = None if parent is None else _bytes(parent)
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
        self._present.difference_update(map(_bytes, event["block_hashes"]))

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


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _batches(path: str | os.PathLike[str]) -> Iterator[tuple[int, float, list[Any], Any]]:
    """Number, time, events and rank of each batch."""
    with open_source(path) as source:
        data = source.stream.read()
    number = 0
    try:
        for number, packed in enumerate(split(data), 1):
            batch = msgspec.msgpack.decode(packed)
            at, events, *more = batch
            rank = more[0] if more else None
            if not isinstance(at, int | float) or not 0.0 <= at < _LATEST or not isinstance(rank, int | None):
                raise ValueError(f"its time is {at!r} and its rank {rank!r}")
            yield number, float(at), list(events), rank
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise TraceError(
            f"{path}, batch {number}: is no batch of KV events ({error}); give a file of the published "
            "payloads, one after another, without their sequence numbers"
        ) from None


def _fields(event: Any) -> dict[str, Any]:
    """An event by its fields: vLLM sends them with names, SGLang and older vLLM without."""
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        return {}
    name, *values = event
    return {"type": name, **dict(zip(_FIELDS.get(name, ()), values, strict=False))}


def events_block_size(path: str | os.PathLike[str]) -> int:
    """Tokens per block of the first blocks that were stored.

    Raises:
        TraceError: The file cannot be read, or no block was stored.
    """
    for _, _, events, _ in _batches(path):
        for event in map(_fields, events):
            size = event.get("block_size")
            if event.get("type") == "BlockStored" and isinstance(size, int) and 1 <= size <= MOST_BLOCK:
                return size
    raise TraceError(f"{path}: holds no event BlockStored; record while the server answers requests")


def read_events(path: str | os.PathLike[str]) -> Iterable[Ended]:
    """The requests of a file of KV events.

    Raises:
        TraceError: The file cannot be read, or a batch is malformed.
    """
    ranks: dict[Any, _Follower] = {}
    for number, at, events, rank in _batches(path):
        follower = ranks.setdefault(rank, _Follower())
        yield from follower.ended(at - PAUSE)
        try:
            for event in map(_fields, events):
                if event.get("medium") not in _DEVICE or event.get("group_idx"):
                    continue  # another tier, or another kind of layers over the same tokens
                kind = event.get("type")
                if kind == "BlockStored":
                    follower.stored(at, event)
                elif kind == "BlockRemoved":
                    follower.removed(event)
                elif kind == "AllBlocksCleared":
                    follower.cleared()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise TraceError(f"{path}, batch {number}: an event is malformed ({error!r})") from None
    for follower in ranks.values():
        yield from follower.ended(float("inf"))
