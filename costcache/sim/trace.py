"""A request trace in memory: its columns, and the block ids of all prompts, concatenated.

A block id stands for ``block_size`` tokens of a prompt. A replay reads the prompts in pages, which may be
smaller or larger than blocks: :meth:`Trace.page_keys` rewrites the ids in units of the greatest common
divisor of both sizes, so that equal pages are equal bytes.
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

__all__ = ["HINTS", "MOST_BLOCK", "PageKeys", "RecordedServer", "Trace"]

MOST_BLOCK = 2**20
"""Tokens of the largest block or page: more than any server uses, and few enough to expand into ids."""

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_ID_BYTES = 8
HINTS = ("tenants", "users", "session_ends", "returns_after", "labels", "keep_seconds")
"""Columns of what clients say of themselves."""
_OPTIONAL = ("sessions", "think_seconds", "service_seconds", "finish", "priorities", *HINTS)
# Units expanded at once: enough to amortise numpy's overhead, few enough for a CPU cache.
_UNITS_PER_BATCH = 1 << 19


@dataclass(frozen=True, slots=True)
class RecordedServer:
    """A server that was recorded, as far as a replay has to know how it makes room.

    Attributes:
        name: ``sglang`` or ``vllm``; empty if it is neither, or unknown.
        policy: Policy that chose the victims; empty if unknown.
        chunk: Prompt tokens that it computed at once, at most; 0 for all, None if unknown.
        trim: Tokens that it cut victims at multiples of; 0 if it evicted them whole, None if unknown.
    """

    name: str = ""
    policy: str = ""
    chunk: int | None = None
    trim: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """Requests in the order of their replay.

    Args:
        name: Name of the trace, for reports.
        block_size: Tokens per block id.
        timestamps: Arrival in seconds from the trace's own zero, float64 of shape (n,).
        input_tokens: Prompt length in tokens, int64 of shape (n,).
        output_tokens: Generated tokens, int64 of shape (n,).
        ids: Block ids of all prompts, concatenated, int64. A prompt has
            ``ceil(input_tokens / block_size)`` of them; the last one may stand for fewer tokens.
        offsets: int64 of shape (n + 1,); request i has ``ids[offsets[i]:offsets[i + 1]]``.
        sessions: Number of each request's session, from 0, int64 of shape (n,); None if not recorded. A
            session's requests run one after another.
        follows: The predecessor of each request, for whose end it waits, int64 of shape (n,); -1 if it waits
            for its session's start only. No cycles. None if each waits for the previous one of its session.
        think_seconds: The client's time from the end of a request's predecessor to the request, float64 of
            shape (n,), 0 where unknown; None if not recorded.
        service_seconds: The recorded server's time, from arrival to last token, float64 of shape (n,), NaN
            where unknown; None if not recorded.
        finish: Recorded stop reason as an index of ``finish_names``, int64 of shape (n,), -1 where
            unknown; None if not recorded.
        finish_names: The stop reasons that occur.
        priorities: Priority of each request, higher is kept longer, int64 of shape (n,); None if not
            recorded.
        output_ids: Block ids of the generated tokens, int64; None if they are unknown. Of request i, the
            blocks of prompt and output from ``input_tokens // block_size`` on: the prompt's partial last
            block, completed by the output, and the rest of the output.
        output_offsets: int64 of shape (n + 1,); request i has
            ``output_ids[output_offsets[i]:output_offsets[i + 1]]``.
        names_sessions: Whether clients tell the server their sessions; otherwise only the recorder knew.
        server: The server that it is a recording of, whose policy told the time by counting requests; None if
            it is none.
        tenants: Each request's tenant as an index of ``tenant_names``, int64 of shape (n,), -1 where unknown;
            None if not recorded.
        tenant_names: The tenants that occur.
        users: The same of the end users, as an index of ``user_names``.
        user_names: The users that occur.
        session_ends: Whether the client said that its session ends, bool of shape (n,); None if not recorded.
        returns_after: Seconds after which the client said it would continue from the prompt, float64 of shape
            (n,), NaN where it did not; None if not recorded.
        labels: The same as a label, as an index of ``label_names``, int64 of shape (n,), -1 where it gave
            none; None if not recorded.
        label_names: The labels that occur.
        keep_seconds: Seconds for which the client asked to keep the prompt, float64 of shape (n,), NaN where
            it did not; None if not recorded.

    Raises:
        TraceError: If the columns are inconsistent.
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
    names_sessions: bool = False
    server: RecordedServer | None = None
    tenants: Int64 | None = None
    tenant_names: tuple[str, ...] = ()
    users: Int64 | None = None
    user_names: tuple[str, ...] = ()
    session_ends: NDArray[np.bool_] | None = None
    returns_after: Float64 | None = None
    labels: Int64 | None = None
    label_names: tuple[str, ...] = ()
    keep_seconds: Float64 | None = None

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
            raise TraceError(f"{self.name}: follows must be request numbers from -1 to {requests - 1}")
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
                f"{self.name}: {column} has {len(offsets)} entries; give {requests + 1}, from 0 to "
                f"{len(ids)}, the number of ids"
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
        """The trace sorted by timestamp; requests of equal times keep their order."""
        if len(self) < 2 or bool((np.diff(self.timestamps) >= 0).all()):
            return self
        return self.take(np.argsort(self.timestamps, kind="stable"))

    def take(self, requests: Int64) -> Trace:
        """The trace of these requests alone, given as int64 of shape (k,), in this order."""
        ids, offsets = _gather(self.ids, self.offsets, requests)
        outputs: tuple[Int64, Int64] | tuple[None, None] = (None, None)
        if self.output_ids is not None and self.output_offsets is not None:
            outputs = _gather(self.output_ids, self.output_offsets, requests)
        columns = {name: getattr(self, name) for name in _OPTIONAL}
        follows = None
        if self.follows is not None:
            number = np.full(len(self) + 1, -1, np.int64)  # index -1, no predecessor, stays -1
            number[requests] = np.arange(len(requests))
            follows = number[self.follows[requests]]
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
            names_sessions=self.names_sessions,
            server=self.server,
            tenant_names=self.tenant_names,
            user_names=self.user_names,
            label_names=self.label_names,
            **{name: None if column is None else column[requests] for name, column in columns.items()},
        )

    def predecessors(self) -> Int64:
        """The request for whose end each one waits, int64 of shape (n,); -1 for none."""
        if self.follows is not None:
            return self.follows
        if self.sessions is None:
            return np.full(len(self), -1, np.int64)
        return previous_use(self.sessions).astype(np.int64, copy=False)

    def with_outputs(self, *, computed: bool = False) -> Trace | None:
        """A trace whose prompts include the generated tokens; None if those are unknown.

        Args:
            computed: Leave out the last generated token, as servers do: its KV is never computed.
        """
        if self.output_ids is None or self.output_offsets is None:
            return None
        size = self.block_size
        tokens = self.input_tokens + self.output_tokens
        if computed:
            tokens = tokens - (self.output_tokens > 0)
        blocks, whole = -(-tokens // size), self.input_tokens // size
        pieces: list[Int64] = []
        for at, full, out, count in zip(
            self.offsets.tolist(), whole.tolist(), self.output_offsets.tolist(), blocks.tolist(), strict=False
        ):
            pieces += (self.ids[at : at + full], self.output_ids[out : out + count - full])
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
            TraceError: If ``page_size`` is under 1, or over :data:`MOST_BLOCK`.
        """
        return PageKeys(self, page_size)

    def distinct_pages(self, page_size: int) -> int:
        """Number of distinct whole pages of ``page_size`` tokens: those an unlimited cache holds at the end.

        A page is identified by its path from the root, not by its id: if ids are hashes of content, one id
        after two different prefixes is two pages.

        Raises:
            TraceError: If ``page_size`` is under 1, or over :data:`MOST_BLOCK`.
        """
        unit, units_per_page = _units(page_size, self.block_size)
        if unit == self.block_size:
            from costcache.sim.runs import page_runs

            return page_runs(self.page_keys(page_size)).distinct
        # Blocks larger than pages are compared as they are: their pages would take many times the memory.
        units_per_block = self.block_size // unit
        # In lexicographic order, the longest prefix that a prompt shares with any earlier one is the one it
        # shares with the prompt just before it. Any total order of ids will do, so memcmp decides. With
        # equal ids, the shorter partial block comes first.
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
        """Share of the prompt tokens that hit in an unlimited cache of the whole pages of prompts.

        Every distinct page misses once, whatever the order of the requests; tokens of a partial last
        page always miss. 0 for a trace without tokens.
        """
        total = int(self.input_tokens.sum())
        whole = int((self.input_tokens // page_size).sum()) if page_size >= 1 else 0
        return (whole - self.distinct_pages(page_size)) * page_size / total if total else 0.0


class PageKeys:
    """The prompts of a trace as bytes: request i's key is its unit ids, cut to whole pages.

    A unit is the greatest common divisor of page and block size in tokens. With m units to a block, block
    id b becomes the unit ids ``b * m, ..., b * m + m - 1``, each a little-endian int64; a partial last
    block of r tokens gives ``r // unit`` of them. Two keys share a page if their bytes are equal from the
    start to the end of that page.

    A key is a read-only view of format ``B``. Slices of it are views too and compare equal to bytes; take
    ``bytes(key[a:b])`` for something hashable. If blocks are units (the page size is a multiple of the
    block size), keys are slices of one buffer and nothing is copied; otherwise they are expanded on
    demand, in batches when iterating.
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
        """Tokens per page."""
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
            IndexError: If there is no such request.
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
    """The ids of some requests, concatenated, and their offsets."""
    lengths = np.diff(offsets)[requests]
    edges = zip(offsets[:-1][requests].tolist(), lengths.tolist(), strict=True)
    pieces = [ids[start : start + length] for start, length in edges]
    gathered = np.concatenate(pieces) if pieces else ids[:0]
    return gathered, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def _units(page_size: int, block_size: int) -> tuple[int, int]:
    """Tokens per unit, and units per page."""
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
    """The ids, renumbered densely if unit ids would overflow 64 bits."""
    if units_per_block == 1 or not len(ids):
        return ids
    lowest = int(ids.min()) * units_per_block
    highest = (int(ids.max()) + 1) * units_per_block - 1
    if lowest >= -(2**63) and highest < 2**63:
        return ids
    return np.unique(ids, return_inverse=True)[1].astype(np.int64, copy=False)


def _read_only_bytes(ids: Int64) -> memoryview:
    # "<i8" is int64 itself on a little-endian machine, so nothing is copied there.
    # The view as uint8 is numpy's, since memoryview.cast refuses an empty array.
    return np.ascontiguousarray(ids, dtype="<i8").view(np.uint8).data.toreadonly()
