"""Mooncake's trace format: one JSON object a line, with a hash id per block of the prompt.

Fields: ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (tokens), ``hash_ids``
(one per block, the partial last one included, so ``ceil(input_length / block_size)``). Blocks
are of 512 tokens unless the caller or a field ``block_size`` of the lines says otherwise. Other
fields are left alone. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import numpy as np

from costcache.errors import TraceError
from costcache.sim.trace import MOST_BLOCK, Trace
from costcache.sim.traces.files import open_output
from costcache.sim.traces.rows import MOST_TOKENS, NOT_JSON, Tokens, fail, not_json

if TYPE_CHECKING:
    from costcache.sim.traces.files import Source

__all__ = ["DEFAULT_BLOCK_SIZE", "read_mooncake", "write_trace"]

DEFAULT_BLOCK_SIZE = 512
"""Tokens per hash id in Mooncake's own traces."""

_HIGHEST_INT64 = 2**63 - 1
_LOWEST_ID, _HIGHEST_ID = -(2**63), 2**64 - 1
_LATEST = 1e15  # milliseconds
_COMMON_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class _Line(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK)] | None = None


class _Output(msgspec.Struct, gc=False):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int


def read_mooncake(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a file of requests.

    Args:
        source: The file.
        block_size: Tokens per hash id; without it, what the lines say, else 512.

    Raises:
        TraceError: A line is malformed: names the file, the line, the field, its value and what
            belongs there.
    """
    label = source.label
    decode = msgspec.json.Decoder(_Line).decode
    times, inputs, outputs = array("d"), array("q"), array("q")
    ids, offsets = array("q"), array("q", [0])
    size = block_size
    wrapped = 0
    for number, line in source.lines():
        try:
            row = decode(line)
        except NOT_JSON as error:
            _explain(label, number, line, error)
        if row.block_size is not None and row.block_size != size:
            if size is not None:
                from_whom = "as asked for" if block_size is not None else "as in the lines before"
                fail(label, number, "block_size", row.block_size, f"{size}, {from_whom}")
            size = row.block_size
        elif size is None:
            size = DEFAULT_BLOCK_SIZE
        if len(row.hash_ids) != -(-row.input_length // size):
            _fail_count(label, number, row, size)
        try:
            ids.fromlist(row.hash_ids)
        except OverflowError:
            wrapped += sum(i > _HIGHEST_INT64 for i in row.hash_ids)
            ids.fromlist(_wrap(label, number, row.hash_ids))
        times.append(row.timestamp)
        inputs.append(row.input_length)
        outputs.append(row.output_length)
        offsets.append(len(ids))
    if not inputs or size is None:
        raise TraceError(f"{label}: holds no request; give a file with one JSON object a line")
    trace = Trace(
        name=source.name,
        block_size=size,
        timestamps=np.frombuffer(times, dtype=np.float64) / 1000.0,
        input_tokens=np.frombuffer(inputs, dtype=np.int64),
        output_tokens=np.frombuffer(outputs, dtype=np.int64),
        ids=np.frombuffer(ids, dtype=np.int64),
        offsets=np.frombuffer(offsets, dtype=np.int64),
    )
    if wrapped and int((trace.ids < 0).sum()) > wrapped:
        raise TraceError(
            f"{label}: hash_ids mixes negative ids with ids of 2**63 and more, which 64 bits "
            f"cannot tell apart; number the ids from 0"
        )
    return trace.in_time_order()


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace in Mooncake's format, with its ``block_size`` in every line.

    A name that ends in ``.gz`` or ``.xz`` is compressed; ``-`` is standard output. The file
    appears only once it is whole, and the same trace gives the same bytes. Times are written in
    whole milliseconds where they are whole, so that reading gives the trace back.

    Raises:
        TraceError: The file cannot be written.
    """
    encode = msgspec.json.Encoder().encode_into
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
        for time, inputs, outputs, start, stop in columns:
            hash_ids = trace.ids[start:stop].tolist()
            encode(_Output(time, inputs, outputs, hash_ids, trace.block_size), line)
            line += b"\n"
            stream.write(line)


def _milliseconds(seconds: float) -> int | float:
    """Whole where it is so but for the rounding of a division by 1000."""
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


def _explain(label: str, number: int, line: bytes, error: Exception) -> NoReturn:
    """Turn a decoding failure into an error that names the field and its value."""
    where = f"{label}, line {number}"
    try:
        row = msgspec.json.decode(line)
    except NOT_JSON:
        not_json(label, number, line, error)
    if not isinstance(row, dict):
        names = ", ".join(field for field, _, _ in _FIELDS[:4])
        fail(label, number, "the line", row, f"a JSON object with the fields {names}")
    for field, expected, fits in _FIELDS:
        if field not in row and field != "block_size":
            raise TraceError(f"{where}: {field} is missing; expected {expected}") from error
        if not fits(row.get(field)):
            if field == "hash_ids" and isinstance(row[field], list):
                i = next(i for i, value in enumerate(row[field]) if not _is_int(value))
                fail(label, number, f"hash_ids[{i}]", row[field][i], "a whole number")
            fail(label, number, field, row[field], expected)
    raise TraceError(f"{where}: {error}") from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tokens(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _is_block_size(value: object) -> bool:
    return value is None or (
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_BLOCK
    )


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LATEST


_FIELDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("timestamp", f"milliseconds from the start, from 0 to {_LATEST:.0e}", _is_time),
    ("input_length", f"tokens of the prompt, a whole number from 0 to {MOST_TOKENS}", _is_tokens),
    ("output_length", f"generated tokens, a whole number from 0 to {MOST_TOKENS}", _is_tokens),
    ("hash_ids", "a list of whole numbers", lambda v: isinstance(v, list) and all(map(_is_int, v))),
    ("block_size", f"tokens per hash id, a whole number from 1 to {MOST_BLOCK}", _is_block_size),
)
