"""Recordings of a server: a line on the server, and a line per request.

``costcache.recording.lines`` has the fields. Files that were joined have several lines on servers, each of
which is for the requests after it. A last line that was cut off, as by the end of a server, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from costcache.errors import TraceError
from costcache.recording.lines import MOST_BLOCK, VERSION, Header, Line, Request
from costcache.sim.trace import RecordedServer
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.rows import MOST_TOKENS, Rows, fail, fail_block_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from costcache.sim.trace import Trace
    from costcache.sim.traces.columns import Named
    from costcache.sim.traces.files import Source

__all__ = [
    "Recorded",
    "join_headers",
    "read_lines",
    "read_recorded",
    "read_recording",
    "read_rows",
    "recorded",
]

V = TypeVar("V")

_SERVERS = ("sglang", "vllm")
_TOKENS = f"a whole number of tokens, from 0 to {MOST_TOKENS}"
_ROWS = Rows(
    Line,
    {
        "recording": "an object that describes the server",
        "request": "an object with timestamp, input_length, output_length and hash_ids",
        "version": f"a version that this costcache reads, {VERSION} or less: install a newer one",
        "started": "seconds, 0 or more",
        "block_size": f"tokens per hash, a whole number from 1 to {MOST_BLOCK}",
        "page_size": f"tokens per page, a whole number from 1 to {MOST_BLOCK}",
        "capacity": _TOKENS,
        "chunk": _TOKENS,
        "trim": _TOKENS,
        "salt": "text",
        "timestamp": "milliseconds, a number",
        "input_length": _TOKENS,
        "output_length": _TOKENS,
        "hash_ids": "a list of whole numbers of 64 bits",
        "hash_ids[]": "a whole number of 64 bits",
        "output_ids": "a list of whole numbers of 64 bits",
        "output_ids[]": "a whole number of 64 bits",
        "cached_tokens": _TOKENS,
        "service_ms": "milliseconds, 0 or more",
        "priority": "a whole number; higher is kept longer",
        "returns_after": "seconds, 0 or more, or text",
        "keep_seconds": "seconds, 0 or more",
        "dropped": "a whole number, 0 or more",
    },
)


def read_lines(source: Source) -> Iterator[tuple[int, Header, Request | None]]:
    """Read a file: line numbers, headers, and the requests, None for a header's own line.

    Raises:
        TraceError: A line is malformed.
    """
    header: Header | None = None
    label = source.label
    for number, line in source.lines():
        if _is_cut_off(line):
            return
        row = _ROWS.decode(label, number, line)
        if row.recording is not None:
            header = row.recording
            yield number, header, None
        elif header is None:
            fail(
                label,
                number,
                "the line",
                row,
                "a line on the server, the field 'recording', before any request",
            )
        elif row.request is not None:
            _check(label, number, row.request, header.block_size)
            yield number, header, row.request


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is the last one, and was not written to its end."""
    if line.endswith(b"\n"):
        return False
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return True
    return False


def _check(label: str, number: int, request: Request, size: int) -> None:
    prompt, tokens = request.input_length, request.input_length + request.output_length
    blocks = -(-prompt // size)
    if len(request.hash_ids) != blocks:
        expected = f"{blocks} for {prompt} tokens in blocks of {size}"
        fail(label, number, "the number of request.hash_ids", len(request.hash_ids), expected)
    output = -(-tokens // size) - prompt // size
    if request.output_ids is not None and len(request.output_ids) != output:
        expected = f"{output} for {prompt} and {request.output_length} tokens in blocks of {size}"
        fail(label, number, "the number of request.output_ids", len(request.output_ids), expected)


@dataclass(slots=True)
class Recorded:
    """A recording.

    Attributes:
        trace: The requests, in order of arrival.
        headers: The servers.
        cached: Prompt tokens that the server found, int64 of shape (n,), -1 where unknown.
        dropped: Requests that were not recorded.
    """

    trace: Trace
    headers: list[Header] = field(default_factory=list)
    cached: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    dropped: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the server found, of requests of which that is known."""
        known = self.cached >= 0
        total = int(self.trace.input_tokens[known].sum())
        return int(self.cached[known].sum()) / total if total else 0.0


def read_recording(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a recording as a trace.

    Args:
        source: The file.
        block_size: The expected tokens per hash; None for any.

    Raises:
        TraceError: If a line is malformed.
    """
    return read_recorded(source, block_size=block_size).trace


def read_recorded(source: Source, *, block_size: int | None = None) -> Recorded:
    """Read a recording, with what the server found.

    Raises:
        TraceError: If a line is malformed.
    """
    headers: list[Header] = []
    return recorded(source, headers, read_rows(source, headers, block_size))


def read_rows(
    source: Source, headers: list[Header], block_size: int | None = None
) -> Iterator[tuple[float, Request]]:
    """Read the requests of a file, with the Unix times of their arrivals, in the order of the file.

    Args:
        source: The file.
        headers: Gets the servers.
        block_size: The expected tokens per hash; None for any. All servers must have the same.

    Raises:
        TraceError: If a line is malformed.
    """
    asked = block_size is not None
    size = block_size
    for number, header, row in read_lines(source):
        if row is not None:
            yield header.started + row.timestamp / 1000.0, row
            continue
        if size is not None and header.block_size != size:
            fail_block_size(
                source.label, number, "recording.block_size", header.block_size, size, asked=asked
            )
        size = header.block_size
        headers.append(header)


def recorded(source: Named, headers: list[Header], rows: Iterable[tuple[float, Request]]) -> Recorded:
    """Collect requests, with their Unix times, as a recording.

    Args:
        source: Where they are from.
        headers: The servers, at least one once there is a request.
        rows: The requests.

    Raises:
        TraceError: There is no request.
    """
    columns = Columns(source)
    cached: list[int] = []
    times: list[float] = []
    dropped = 0
    for seconds, row in rows:
        columns.ids.fromlist(row.hash_ids)
        if row.output_ids is None:
            columns.no_outputs()
        else:
            columns.output_ids.fromlist(row.output_ids)
        columns.add(
            seconds,
            row.input_length,
            row.output_length,
            session=row.session,
            service=None if row.service_ms is None else row.service_ms / 1000.0,
            finish=row.finish_reason,
            priority=row.priority,
        )
        columns.hint(
            tenant=row.tenant,
            session_ends=row.session_ends,
            returns_after=row.returns_after,
            keep_seconds=row.keep_seconds,
        )
        times.append(seconds)
        cached.append(-1 if row.cached_tokens is None else row.cached_tokens)
        dropped += row.dropped
    if not times:
        raise TraceError(f"{source.label}: holds no request; let the server answer some, and try again")
    columns.names_sessions = True
    server = _server(join_headers(headers))
    trace = replace(columns.trace(headers[0].block_size, from_zero=True), server=server)
    seen = np.array(times)
    order = np.argsort(seen - seen.min(), kind="stable")
    return Recorded(trace, headers, np.array(cached, np.int64)[order], dropped)


def join_headers(headers: Sequence[Header]) -> Header:
    """One header for several servers: what they have in common, and the names of all."""
    first = headers[0]
    return Header(
        version=first.version,
        started=min(header.started for header in headers),
        block_size=first.block_size,
        salt="+".join(sorted({header.salt for header in headers})),
        server=_all([header.server for header in headers]),
        costcache=_all([header.costcache for header in headers]),
        policy=_all([header.policy for header in headers]),
        architecture=_all([header.architecture for header in headers]),
        page_size=_common([header.page_size for header in headers]),
        capacity=_common([header.capacity for header in headers]),
        chunk=_common([header.chunk for header in headers]),
        trim=_common([header.trim for header in headers]),
    )


def _all(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(name for name in names if name))


def _common(values: list[V | None]) -> V | None:
    return values[0] if len(set(values)) == 1 else None


def _server(header: Header) -> RecordedServer:
    return RecordedServer(_name(header.server), header.policy, header.chunk, header.trim)


def _name(servers: str) -> str:
    """Which server all of these names and versions are of; empty if none, or not the same."""
    found = {next((name for name in _SERVERS if each.startswith(name)), "") for each in servers.split(", ")}
    return found.pop() if len(found) == 1 else ""
