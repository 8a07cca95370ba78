"""Mooncake's trace format: one JSON object a line, with a hash id per block of the prompt.

Fields: ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (tokens), ``hash_ids``
(one per block, the partial last one included, so ``ceil(input_length / block_size)``). Blocks
are of 512 tokens unless the caller or a field ``block_size`` of the lines says otherwise. Lines of Dynamo
and AIPerf may have ``session_id`` and, in place of the timestamp of a session's later requests, ``delay``
(milliseconds since the answer before); sessions without any timestamp have no clock. Lines of ours may
also have ``finish_reason``, and what clients say: ``session_id`` (unless ``names_session`` is false),
``tenant``, ``user``, ``priority``, and the hints ``session_ends``, ``returns_after`` and ``keep_seconds``.
Other fields are ignored. Source:
github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec

from costcache.errors import TraceError
from costcache.sim.requests import RequestInfos
from costcache.sim.trace import HINTS, MOST_BLOCK
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.files import open_output
from costcache.sim.traces.rows import MOST_TOKENS, Milliseconds, Rows, Seconds, Tokens, fail, fail_block_size

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["DEFAULT_BLOCK_SIZE", "read_mooncake", "write_trace"]

DEFAULT_BLOCK_SIZE = 512
"""Tokens per hash id in Mooncake's own traces."""

_HIGHEST_INT64 = 2**63 - 1
_LOWEST_ID, _HIGHEST_ID = -(2**63), 2**64 - 1
_TIME = "milliseconds from the start, from 0 to 1e+15"
_COMMON_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class _Line(msgspec.Struct, gc=False):
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]
    timestamp: Milliseconds | msgspec.UnsetType = msgspec.UNSET
    delay: Milliseconds | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK)] | None = None
    finish_reason: str | None = None
    session_id: str | int | None = None
    names_session: bool = True
    tenant: str | None = None
    user: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] = 0
    session_ends: bool = False
    returns_after: Seconds | str | None = None
    keep_seconds: Seconds | None = None


class _Output(msgspec.Struct, gc=False, omit_defaults=True):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int
    session_id: str | None = None
    names_session: bool = True
    tenant: str | None = None
    user: str | None = None
    priority: int = 0
    session_ends: bool = False
    returns_after: float | str | None = None
    keep_seconds: float | None = None


_ROWS = Rows(
    _Line,
    {
        "timestamp": _TIME,
        "input_length": f"tokens of the prompt, a whole number from 0 to {MOST_TOKENS}",
        "output_length": f"generated tokens, a whole number from 0 to {MOST_TOKENS}",
        "hash_ids": "a list of whole numbers",
        "hash_ids[]": "a whole number",
        "block_size": f"tokens per hash id, a whole number from 1 to {MOST_BLOCK}",
        "finish_reason": "the stop reason, text",
        "session_id": "the session's name, text",
        "delay": "milliseconds since the answer before, from 0 to 1e+15",
        "names_session": "true, or false if only the recorder knew the session",
        "tenant": "the tenant's name, text",
        "user": "the end user's name, text",
        "priority": "a whole number; higher is kept longer",
        "session_ends": "true or false",
        "returns_after": "seconds, 0 or more, or a label",
        "keep_seconds": "seconds, 0 or more",
    },
)


def read_mooncake(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a file of requests.

    Args:
        source: The file.
        block_size: Tokens per hash id; by default as the lines say, else 512.

    Raises:
        TraceError: If a line is malformed; names the file, the line, the field, its value and the valid
            values.
    """
    label = source.label
    columns = Columns(source)
    size = block_size
    wrapped = 0
    named = True
    timed: bool | None = None
    came: dict[str | int, float] = {}  # when each session's last request did
    for number, row in _ROWS.read(source):
        if row.block_size is not None and row.block_size != size:
            if size is not None:
                fail_block_size(
                    label, number, "block_size", row.block_size, size, asked=block_size is not None
                )
            size = row.block_size
        elif size is None:
            size = DEFAULT_BLOCK_SIZE
        if len(row.hash_ids) != -(-row.input_length // size):
            _fail_count(label, number, row, size)
        try:
            columns.ids.fromlist(row.hash_ids)
        except OverflowError:
            wrapped += sum(i > _HIGHEST_INT64 for i in row.hash_ids)
            columns.ids.fromlist(_wrap(label, number, row.hash_ids))
        milliseconds = None if row.timestamp is msgspec.UNSET else row.timestamp
        if milliseconds is None and row.delay is not None and row.session_id in came:
            milliseconds = came[row.session_id] + row.delay
        else:
            if timed is None:
                timed = milliseconds is not None or (row.session_id is None and row.delay is None)
            if timed and milliseconds is None:
                raise TraceError(f"{label}, line {number}: timestamp is missing; expected {_TIME}")
            if not timed and milliseconds is not None:
                fail(label, number, "timestamp", milliseconds, "none, as in the lines before")
            milliseconds = milliseconds or 0.0
        if row.session_id is not None:
            came[row.session_id] = milliseconds
            named &= row.names_session
        columns.add(
            milliseconds / 1000.0,
            row.input_length,
            row.output_length,
            session=row.session_id,
            think=None if row.delay is None else row.delay / 1000.0,
            finish=row.finish_reason,
            priority=row.priority,
        )
        columns.hint(
            tenant=row.tenant,
            user=row.user,
            session_ends=row.session_ends,
            returns_after=row.returns_after,
            keep_seconds=row.keep_seconds,
        )
    columns.names_sessions = named
    source.timed = timed
    trace = columns.trace(size or DEFAULT_BLOCK_SIZE)
    if wrapped and int((trace.ids < 0).sum()) > wrapped:
        raise TraceError(
            f"{label}: hash_ids mixes negative ids with ids of 2**63 and more, which 64 bits "
            f"cannot tell apart; number the ids from 0"
        )
    return trace


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace in Mooncake's format, with its ``block_size`` in every line.

    Sessions are written too, and what clients say of themselves: tenants, users, priorities and hints.

    A file whose name ends in ``.gz`` or ``.xz`` is compressed; ``-`` is standard output. The file appears
    only once it is complete, and equal traces give equal bytes. Whole milliseconds are written as integers,
    so reading the file gives the trace back.

    Raises:
        TraceError: If the file cannot be written.
    """
    encode = msgspec.json.Encoder().encode_into
    clients = RequestInfos(trace, "all").of if _has_clients(trace) else None
    named = trace.sessions is None or trace.names_sessions
    columns = zip(
        map(_milliseconds, trace.timestamps.tolist()),
        trace.input_tokens.tolist(),
        trace.output_tokens.tolist(),
        trace.offsets[:-1].tolist(),
        trace.offsets[1:].tolist(),
        strict=True,
    )
    line = bytearray()
    with open_output(path) as stream:
        for number, (time, inputs, outputs, start, stop) in enumerate(columns):
            row = _Output(time, inputs, outputs, trace.ids[start:stop].tolist(), trace.block_size)
            if clients is not None:
                info = clients(number, 0)
                row.session_id, row.names_session = info.session, named
                row.tenant, row.user, row.priority = info.tenant, info.user, info.priority
                row.session_ends, row.returns_after = info.session_ends, info.returns_after
                row.keep_seconds = info.keep_seconds
            encode(row, line)
            line += b"\n"
            stream.write(line)


def _has_clients(trace: Trace) -> bool:
    """Whether anything is known of who sent the requests, or clients said anything."""
    return any(getattr(trace, column) is not None for column in ("sessions", "priorities", *HINTS))


def _milliseconds(seconds: float) -> int | float:
    """Milliseconds, as an integer if whole but for the rounding of a division by 1000."""
    exact = seconds * 1000.0
    return round(exact) if abs(exact - round(exact)) < 1e-6 else exact


def _wrap(label: str, number: int, hash_ids: list[int]) -> list[int]:
    """Unsigned 64-bit ids as the int64 of the same bits."""
    for i, value in enumerate(hash_ids):
        if not _LOWEST_ID <= value <= _HIGHEST_ID:
            fail(label, number, f"hash_ids[{i}]", value, "a whole number of 64 bits")
    return [value - 2**64 if value > _HIGHEST_INT64 else value for value in hash_ids]


def _fail_count(label: str, number: int, row: _Line, size: int) -> NoReturn:
    count, tokens = len(row.hash_ids), row.input_length
    expected = f"{-(-tokens // size)} for input_length {tokens} in blocks of {size} tokens, "
    expected += "the partial last one included"
    fits = [str(s) for s in _COMMON_BLOCK_SIZES if -(-tokens // s) == count]
    if fits:
        expected += f" (the count fits a block size of {' or '.join(fits)})"
    fail(label, number, "the number of hash_ids", count, expected)
