"""A request trace in memory: its columns, and the block ids of all prompts end to end.

A block id stands for ``block_size`` tokens of a prompt. A replay reads the prompts as pages,
which may be smaller or larger than blocks: :meth:`Trace.page_keys` rewrites the ids in the
largest unit that both sizes are made of, so that equal pages are equal bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costcache.errors import TraceError
from costcache.sim.reuse import previous_use

__all__ = ["MOST_BLOCK", "PageKeys", "Trace"]

MOST_BLOCK = 2**20
"""Tokens of the largest block or page: more than any server has, and few enough to be written out."""

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_ID_BYTES = 8
_OPTIONAL = ("sessions", "think_seconds", "service_seconds", "finish", "priorities")
# Units expanded at once: enough that numpy's overhead is paid seldom, few enough for a cache.
_UNITS_PER_BATCH = 1 << 19


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """Requests in the order of their replay.

    Args:
        name: What to call the trace in a report.
        block_size: Tokens per block id.
        timestamps: Arrival in seconds from the trace's own zero, float64 of shape (n,).
        input_tokens: Prompt length in tokens, int64 of shape (n,).
        output_tokens: Generated tokens, int64 of shape (n,).
        ids: Block ids of all prompts, one after the other, int64. A prompt has
            ``ceil(input_tokens / block_size)`` of them; the last may stand for fewer tokens.
        offsets: int64 of shape (n + 1,); request i has ``ids[offsets[i]:offsets[i + 1]]``.
        sessions: Number of each request's session, from 0, int64 of shape (n,); None where the trace
            does not say. A session's requests come one after the other.
        follows: The request whose end each one waits for, int64 of shape (n,), -1 where it waits for its
            session's start only, without circles; None where each waits for the one before in its session.
        think_seconds: What passed on the client's side between the end of the request that this one
            waits for and this one, float64 of shape (n,), 0 where it is not known; None where no
            request says.
        service_seconds: What the recorded server took, from arrival to last token, float64 of shape
            (n,), NaN where it is not known; None where no request says.
        finish: Recorded stop reason as an index of ``finish_names``, int64 of shape (n,), -1 where it
            is not known; None where no request says.
        finish_names: The stop reasons that occur.
        priorities: Priority of each request, higher is kept longer, int64 of shape (n,); None where no
            request says.
        output_ids: Block ids of prompts with their generated tokens, int64; None where those are not
            known. Of request i, the blocks from ``input_tokens // block_size`` on: the partial last
            block of the prompt as it is when the output has filled it up, and the rest of the output.
        output_offsets: int64 of shape (n + 1,); request i has
            ``output_ids[output_offsets[i]:output_offsets[i + 1]]``.

    Raises:
        TraceError: The columns do not fit together.
    """

    name: str
    block_size: int
    timestamps: Float64
    input_tokens: Int64
    output_tokens: Int64
    ids: Int64
    offsets: Int64
    sessions: Int64 | None = None
    follows: Int64 | None = None
    think_seconds: Float64 | None = None
    service_seconds: Float64 | None = None
    finish: Int64 | None = None
    finish_names: tuple[str, ...] = ()
    priorities: Int64 | None = None
    output_ids: Int64 | None = None
    output_offsets: Int64 | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MOST_BLOCK:
            raise TraceError(f"{self.name}: block_size is {self.block_size}; give 1 to {MOST_BLOCK:,} tokens")
        requests = len(self.input_tokens)
        for column in ("timestamps", "output_tokens", "follows", *_OPTIONAL):
            entries = getattr(self, column)
            if entries is not None and len(entries) != requests:
                raise TraceError(
                    f"{self.name}: {column} has {len(entries)} entries, input_tokens has {requests}; "
                    f"give one per request"
                )
        blocks = -(-self.input_tokens // self.block_size)
        self._check_ids("offsets", self.offsets, self.ids, blocks, self.input_tokens)
        if self.follows is not None and not ((self.follows >= -1) & (self.follows < requests)).all():
            raise TraceError(f"{self.name}: follows must hold request numbers from -1 to {requests - 1}")
        if (self.output_ids is None) != (self.output_offsets is None):
            raise TraceError(f"{self.name}: give output_ids and output_offsets, or neither")
        if self.output_ids is not None and self.output_offsets is not None:
            tokens = self.input_tokens + self.output_tokens
            blocks = -(-tokens // self.block_size) - self.input_tokens // self.block_size
            self._check_ids("output_offsets", self.output_offsets, self.output_ids, blocks, tokens)

    def _check_ids(self, column: str, offsets: Int64, ids: Int64, blocks: Int64, tokens: Int64) -> None:
        requests = len(blocks)
        edges = offsets[[0, -1]].tolist() if len(offsets) == requests + 1 else None
        if edges != [0, len(ids)]:
            raise TraceError(
                f"{self.name}: {column} has {len(offsets)} entries; it must go from 0 to "
                f"{len(ids)}, the number of ids, in {requests + 1}"
            )
        wrong = np.flatnonzero(np.diff(offsets) != blocks)
        if len(wrong):
            i = int(wrong[0])
            what = "ids" if column == "offsets" else "output ids"
            raise TraceError(
                f"{self.name}: request {i} has {offsets[i + 1] - offsets[i]} {what} for "
                f"{tokens[i]} tokens in blocks of {self.block_size}"
            )

    def __len__(self) -> int:
        return len(self.input_tokens)

    def in_time_order(self) -> Trace:
        """The requests by timestamp; those of the same time keep their order."""
        if len(self) < 2 or bool((np.diff(self.timestamps) >= 0).all()):
            return self
        return self.take(np.argsort(self.timestamps, kind="stable"))

    def take(self, requests: Int64) -> Trace:
        """The requests of these numbers, int64 of shape (k,), in this order."""
        ids, offsets = _gather(self.ids, self.offsets, requests)
        outputs: tuple[Int64, Int64] | tuple[None, None] = (None, None)
        if self.output_ids is not None and self.output_offsets is not None:
            outputs = _gather(self.output_ids, self.output_offsets, requests)
        columns = {name: getattr(self, name) for name in _OPTIONAL}
        follows = None
        if self.follows is not None:
            place = np.full(len(self) + 1, -1, np.int64)  # the last is that of -1
            place[requests] = np.arange(len(requests))
            follows = place[self.follows[requests]]
        return Trace(
            name=self.name,
            block_size=self.block_size,
            timestamps=self.timestamps[requests],
            input_tokens=self.input_tokens[requests],
            output_tokens=self.output_tokens[requests],
            ids=ids,
            offsets=offsets,
            finish_names=self.finish_names,
            follows=follows,
            output_ids=outputs[0],
            output_offsets=outputs[1],
            **{name: None if column is None else column[requests] for name, column in columns.items()},
        )

    def predecessors(self) -> Int64:
        """The request whose end each one waits for, int64 of shape (n,); -1 where there is none."""
        if self.follows is not None:
            return self.follows
        return np.full(len(self), -1, np.int64) if self.sessions is None else previous_use(self.sessions)

    def with_outputs(self, *, computed: bool = False) -> Trace | None:
        """The prompts with their generated tokens behind them; None where those are not known.

        Args:
            computed: Leave out the last generated token, as servers do: it was never computed on.
        """
        if self.output_ids is None or self.output_offsets is None:
            return None
        size = self.block_size
        tokens = self.input_tokens + self.output_tokens
        if computed:
            tokens = tokens - (self.output_tokens > 0)
        blocks, whole = -(-tokens // size), self.input_tokens // size
        pieces: list[Int64] = []
        for at, own, out, count in zip(
            self.offsets.tolist(), whole.tolist(), self.output_offsets.tolist(), blocks.tolist(), strict=False
        ):
            pieces += (self.ids[at : at + own], self.output_ids[out : out + count - own])
        return Trace(
            name=self.name,
            block_size=size,
            timestamps=self.timestamps,
            input_tokens=tokens,
            output_tokens=np.zeros_like(tokens),
            ids=np.concatenate(pieces) if pieces else self.ids,
            offsets=np.concatenate(([0], np.cumsum(blocks))).astype(np.int64),
        )

    def page_keys(self, page_size: int) -> PageKeys:
        """The prompts as keys of whole pages of ``page_size`` tokens.

        Raises:
            TraceError: ``page_size`` is under 1, or over :data:`MOST_BLOCK`.
        """
        return PageKeys(self, page_size)

    def distinct_pages(self, page_size: int) -> int:
        """How many whole pages of ``page_size`` tokens a cache without limit would hold at the end.

        Pages are told apart by their path from the root, not by their id: where ids are hashes
        of content, one id after two different prefixes is two pages.

        Raises:
            TraceError: ``page_size`` is under 1, or over :data:`MOST_BLOCK`.
        """
        unit, units_per_page = _units(page_size, self.block_size)
        units_per_block = self.block_size // unit
        # In lexicographic order, what a prompt shares with any earlier one it shares with the
        # one just before it. Any total order of ids will do, so memcmp decides. Among equal ids
        # the shorter partial block goes first.
        raw = _read_only_bytes(self.ids)
        edges = (self.offsets * _ID_BYTES).tolist()
        prompts = [bytes(raw[start:stop]) for start, stop in itertools.pairwise(edges)]
        order = np.argsort(self.input_tokens, kind="stable").tolist()
        order.sort(key=prompts.__getitem__)
        units = (self.input_tokens // unit).tolist()
        starts = self.offsets.tolist()
        pages = 0
        before = -1
        for i in order:
            pages += units[i] // units_per_page
            if before >= 0:
                left = self.ids[starts[before] : starts[before + 1]]
                blocks = _common_prefix(left, self.ids[starts[i] : starts[i + 1]])
                pages -= min(blocks * units_per_block, units[before], units[i]) // units_per_page
            before = i
        return pages

    def ideal_hit_rate(self, page_size: int) -> float:
        """Share of the input tokens that a cache without limit finds, whole pages of inputs only.

        Every distinct page misses once, whatever the order of the requests; tokens of a
        partial last page always miss. 0 for a trace without tokens.
        """
        total = int(self.input_tokens.sum())
        whole = int((self.input_tokens // page_size).sum()) if page_size >= 1 else 0
        return (whole - self.distinct_pages(page_size)) * page_size / total if total else 0.0


class PageKeys:
    """The prompts of a trace as bytes: request i's key is its unit ids, cut to whole pages.

    A unit is the greatest common divisor of page and block size in tokens; block id b becomes
    the ids ``b * m, ..., b * m + m - 1`` with m units to a block, each a little-endian int64.
    A partial last block of r tokens gives ``r // unit`` of them. Two keys share a page where
    their bytes are the same from the start to the end of that page.

    A key is a read-only view of format ``B``: slices of it are views too and compare equal to
    bytes; take ``bytes(key[a:b])`` where something hashable is needed. If blocks are units (the
    page size is a multiple of the block size), keys are slices of one buffer and nothing is
    copied; otherwise they are expanded as they are asked for, many at once when iterating.
    """

    __slots__ = (
        "_edges",
        "_ids",
        "_lengths",
        "_units_per_block",
        "_views",
        "bytes_per_page",
        "page_size",
        "tokens",
        "unit_tokens",
        "units_per_page",
    )

    def __init__(self, trace: Trace, page_size: int) -> None:
        self.page_size = page_size
        """Tokens in a page."""
        self.unit_tokens, self.units_per_page = _units(page_size, trace.block_size)
        self.bytes_per_page = _ID_BYTES * self.units_per_page
        self.tokens: Int64 = trace.input_tokens // page_size * page_size
        """Tokens of each request in whole pages, int64 of shape (n,)."""
        self._units_per_block = trace.block_size // self.unit_tokens
        self._ids = _room_for_units(trace.ids, self._units_per_block)
        self._edges: list[int] = trace.offsets.tolist()
        self._lengths: list[int] = (self.tokens // self.unit_tokens * _ID_BYTES).tolist()
        self._views: list[memoryview] | None = None
        if self._units_per_block == 1:
            raw = _read_only_bytes(self._ids)
            self._views = [
                raw[edge * _ID_BYTES : edge * _ID_BYTES + length]
                for edge, length in zip(self._edges, self._lengths, strict=False)
            ]

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, request: int) -> memoryview:
        """The key of one request.

        Raises:
            IndexError: There is no such request.
        """
        if self._views is not None:
            return self._views[request]
        if not -len(self) <= request < len(self):
            raise IndexError(f"request {request} of a trace of {len(self)}")
        request %= len(self)
        return self._expand(request, request + 1)[: self._lengths[request]]

    def __iter__(self) -> Iterator[memoryview]:
        """The keys of all requests, in order."""
        return self._expanded() if self._views is None else iter(self._views)

    def _expanded(self) -> Iterator[memoryview]:
        edges, lengths = self._edges, self._lengths
        ids_per_batch = max(1, _UNITS_PER_BATCH // self._units_per_block)
        bytes_per_id = self._units_per_block * _ID_BYTES
        first = 0
        while first < len(self):
            last = first + 1
            while last < len(self) and edges[last + 1] - edges[first] <= ids_per_batch:
                last += 1
            raw = self._expand(first, last)
            for i in range(first, last):
                start = (edges[i] - edges[first]) * bytes_per_id
                yield raw[start : start + lengths[i]]
            first = last

    def _expand(self, first: int, last: int) -> memoryview:
        ids = self._ids[self._edges[first] : self._edges[last]]
        within = np.arange(self._units_per_block, dtype=np.int64)
        return _read_only_bytes((ids[:, None] * self._units_per_block + within).ravel())


def _gather(ids: Int64, offsets: Int64, requests: Int64) -> tuple[Int64, Int64]:
    """The ids of some requests, end to end, and their offsets."""
    lengths = np.diff(offsets)[requests]
    edges = zip(offsets[:-1][requests].tolist(), lengths.tolist(), strict=True)
    pieces = [ids[start : start + length] for start, length in edges]
    gathered = np.concatenate(pieces) if pieces else ids[:0]
    return gathered, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def _units(page_size: int, block_size: int) -> tuple[int, int]:
    """Tokens per unit, units per page."""
    if not 1 <= page_size <= MOST_BLOCK:
        raise TraceError(f"page size is {page_size}; give 1 to {MOST_BLOCK:,} tokens")
    unit = math.gcd(page_size, block_size)
    return unit, page_size // unit


def _common_prefix(left: Int64, right: Int64) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    if not shorter:
        return 0
    first = int(differs.argmax())
    return first if differs[first] else shorter


def _room_for_units(ids: Int64, units_per_block: int) -> Int64:
    """The ids themselves, or dense numbers for them where a unit id would pass 64 bits."""
    if units_per_block == 1 or not len(ids):
        return ids
    lowest = int(ids.min()) * units_per_block
    highest = (int(ids.max()) + 1) * units_per_block - 1
    if lowest >= -(2**63) and highest < 2**63:
        return ids
    return np.unique(ids, return_inverse=True)[1].astype(np.int64, copy=False)


def _read_only_bytes(ids: Int64) -> memoryview:
    # "<i8" is int64 itself on a little-endian machine, so nothing is copied there.
    # numpy's uint8 view is taken, since memoryview.cast refuses an empty array.
    return np.ascontiguousarray(ids, dtype="<i8").view(np.uint8).data.toreadonly()
