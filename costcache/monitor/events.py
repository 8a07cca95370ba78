"""What a server's KV events say of its cache: tokens stored, removed and stored again, and resets.

An event names blocks by hashes of their tokens and all before them, so a block that is stored again is
recognised, and it is known why it was gone: evicted, or dropped by a reset. A block that begins as an earlier
one does, and ends otherwise, is one whose beginning smaller blocks would share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from costcache.errors import TraceError
from costcache.sim.recordings.published import (
    CLEARED,
    REMOVED,
    STORED,
    Batch,
    block_size_of,
    hash_of,
    read_batches,
)

__all__ = ["EventCounts", "EventFigures", "read_events"]

_MOST = 1 << 19
"""Blocks that are gone, and beginnings of blocks, that are remembered of one cache."""
_PARTS = 4
"""Parts of a block whose beginnings are compared."""
_NAMESPACE = ("lora_id", "lora_name", "cache_salt")


@dataclass(frozen=True, slots=True)
class EventFigures:
    """The KV events of a span of time. Counts of tokens are those of whole blocks.

    Attributes:
        seconds: The span.
        batches: Batches of events.
        lost: Batches that were published and did not arrive.
        block_size: Tokens per block; 0 if none was stored.
        stored: Tokens stored.
        removed: Tokens removed.
        resets: Times that all was cleared, and something was cached.
        after_eviction: Tokens stored that had been removed before.
        after_reset: Tokens stored that a reset had dropped.
        cut: Tokens stored, in whole quarters of a block, that an earlier block begins with and goes on
            otherwise.
        cached: Tokens cached now, of those stored since events are read.
    """

    seconds: float
    batches: int
    lost: int
    block_size: int
    stored: int
    removed: int
    resets: int
    after_eviction: int
    after_reset: int
    cut: int
    cached: int


class _Cache:
    """The blocks of one cache."""

    def __init__(self) -> None:
        self.size = 0
        self.present: set[bytes] = set()
        self._by_reset: dict[bytes, bool] = {}  # of blocks that are gone
        self._beginnings: dict[int, None] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a span of time."""
        self.stored = self.removed = self.resets = self.after_eviction = self.after_reset = self.cut = 0

    def read(self, events: Iterable[dict[str, Any]]) -> None:
        """Follow events.

        Raises:
            ValueError: One is malformed; KeyError and TypeError likewise.
        """
        for event in events:
            kind = event.get("type")
            if kind == STORED:
                self._store(event)
            elif kind == REMOVED:
                for block in map(hash_of, event["block_hashes"]):
                    self.removed += 1
                    self.present.discard(block)
                    self._forget(block, by_reset=False)
            elif kind == CLEARED:
                self.resets += bool(self.present)
                for block in self.present:
                    self._forget(block, by_reset=True)
                self.present.clear()

    def _forget(self, block: bytes, *, by_reset: bool) -> None:
        self._by_reset.pop(block, None)
        self._by_reset[block] = by_reset
        _shorten(self._by_reset)

    def _store(self, event: dict[str, Any]) -> None:
        self.size = size = block_size_of(event, self.size)
        parent, tokens = event.get("parent_block_hash"), list(event.get("token_ids") or ())
        for number, block in enumerate(map(hash_of, event["block_hashes"])):
            if block in self.present:
                continue  # found, and published again
            self.present.add(block)
            self.stored += 1
            by_reset = self._by_reset.pop(block, None)
            if by_reset is None:
                # Blocks after the first follow one that is new as well, and nothing else begins there.
                if not number:
                    self.cut += self._shared(hash((parent, *map(event.get, _NAMESPACE))), tokens[:size])
            elif by_reset:
                self.after_reset += 1
            else:
                self.after_eviction += 1

    def _shared(self, place: int, tokens: list[int]) -> int:
        """Tokens that an earlier block at a place begins with, in whole parts; remembers this one's."""
        found = 0
        if len(tokens) == self.size:
            for part in range(1, _PARTS):
                shared = self.size * part // _PARTS
                beginning = hash((place, *tokens[:shared]))
                if shared and beginning in self._beginnings:
                    found = shared
                self._beginnings[beginning] = None
            _shorten(self._beginnings)
        return found


def _shorten(remembered: dict[Any, Any]) -> None:
    while len(remembered) > _MOST:
        del remembered[next(iter(remembered))]


@dataclass(slots=True)
class EventCounts:
    """Counts the events of one server, which may have several caches: one per data-parallel rank.

    Attributes:
        batches: Batches since the last :meth:`take`.
        lost: Batches that did not arrive.
    """

    batches: int = 0
    lost: int = 0
    _caches: dict[tuple[Any, int | None], _Cache] = field(default_factory=dict)

    def add(self, batch: Batch, source: Any = None) -> None:
        """Count a batch.

        Args:
            batch: The batch.
            source: Tells publishers apart that number their ranks alike.

        Raises:
            ValueError: An event is malformed; KeyError and TypeError likewise.
        """
        self.batches += 1
        cache = self._caches.setdefault((source, batch.rank), _Cache())
        cache.read(batch.events)

    def restarted(self, source: Any) -> None:
        """A publisher has been started again: its caches are empty."""
        for key in [key for key in self._caches if key[0] == source]:
            self._caches[key].present.clear()

    def take(self, seconds: float) -> EventFigures:
        """Figures since the last call, over ``seconds``."""
        caches = list(self._caches.values())

        def tokens(name: str) -> int:
            return sum(getattr(cache, name) * cache.size for cache in caches)

        figures = EventFigures(
            seconds=seconds,
            batches=self.batches,
            lost=self.lost,
            block_size=max((cache.size for cache in caches), default=0),
            stored=tokens("stored"),
            removed=tokens("removed"),
            resets=sum(cache.resets for cache in caches),
            after_eviction=tokens("after_eviction"),
            after_reset=tokens("after_reset"),
            cut=sum(cache.cut for cache in caches),
            cached=sum(len(cache.present) * cache.size for cache in caches),
        )
        self.batches = self.lost = 0
        for cache in caches:
            cache.begin()
        return figures


def read_events(path: str | os.PathLike[str]) -> EventFigures:
    """Figures of a file of published batches, from the first to the last.

    Raises:
        TraceError: The file cannot be read, holds no batch, or a batch is malformed.
    """
    counts, first, last = EventCounts(), None, 0.0
    for number, batch in read_batches(path):
        first = batch.time if first is None else first
        last = batch.time
        try:
            counts.add(batch)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, batch {number}: an event is malformed ({error!r})") from None
    if first is None:
        raise TraceError(f"{path}: holds no batch of KV events; give a file of --save-events")
    return counts.take(max(0.0, last - first))
