"""Reads and writes recordings of several files: of ranks, replicas, or one server after another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from costcache.errors import TraceError
from costcache.recording.files import ENDING
from costcache.recording.lines import Header, Line, Request
from costcache.sim.recordings.misses import Misses, find_misses
from costcache.sim.traces.files import Progress, open_output, open_source
from costcache.sim.traces.recording import Recorded, join_headers, read_rows, recorded

__all__ = ["Report", "expand", "read_recordings", "report", "write_recording"]


@dataclass(frozen=True, slots=True)
class _Files:
    """Several files as one source; each was checked against its own limits as it was read."""

    label: str
    name: str

    def allow(self, tokens: int) -> None:
        """Allow any number."""


def expand(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of a recording: those named, and those of the folders named.

    Raises:
        TraceError: A folder holds none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.glob(f"*{ENDING}*"))
        if not found:
            raise TraceError(
                f"{path}: holds no recording (a file *{ENDING}); name the folder of the setting 'record'"
            )
        files += found
    return files


def read_recordings(
    paths: Sequence[str | os.PathLike[str]], progress: Progress | None = None
) -> tuple[Recorded, list[tuple[float, Request]]]:
    """Read files and folders of files as one recording.

    Returns:
        The recording, and its lines with the Unix times of their arrivals, in order of these.

    Raises:
        TraceError: A file cannot be read, or their blocks differ in size.
    """
    headers: list[Header] = []
    rows: list[tuple[float, Request]] = []
    files = expand(paths)
    for path in files:
        with open_source(path, progress) as source:
            rows += read_rows(source, headers, headers[0].block_size if headers else None)
    rows.sort(key=lambda row: row[0])
    label = str(files[0]) if len(files) == 1 else f"{len(files)} files"
    return recorded(_Files(label, Path(paths[0]).name), headers, rows), rows


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of a recording.

    Attributes:
        server: Names and versions of the servers.
        policy: Policies that chose victims.
        page_size: Tokens per page, None if unknown or not the same.
        capacity: Tokens that the pool of each server holds, likewise.
        block_size: Tokens per hash.
        requests: Requests.
        dropped: Requests that were not recorded.
        sessions: Sessions that clients named; None if they named none.
        tenants: Tenants, likewise.
        duration_seconds: From the first arrival to the last.
        input_tokens: Prompt tokens.
        output_tokens: Tokens generated.
        hit_rate: Share of the prompt tokens that the servers found; None if unknown.
        misses: Why others were not found; None if it is unknown what was.
    """

    server: str
    policy: str
    page_size: int | None
    capacity: int | None
    block_size: int
    requests: int
    dropped: int
    sessions: int | None
    tenants: int | None
    duration_seconds: float
    input_tokens: int
    output_tokens: int
    hit_rate: float | None
    misses: Misses | None


def report(recording: Recorded) -> Report:
    """Figures of a recording."""
    trace, header = recording.trace, join_headers(recording.headers)
    known = bool((recording.cached >= 0).any())
    return Report(
        server=header.server,
        policy=header.policy,
        page_size=header.page_size,
        capacity=header.capacity,
        block_size=header.block_size,
        requests=len(trace),
        dropped=recording.dropped,
        sessions=None if trace.sessions is None else len(set(trace.sessions.tolist())),
        tenants=None if trace.tenants is None else len(trace.tenant_names),
        duration_seconds=float(trace.timestamps.max() - trace.timestamps.min()),
        input_tokens=int(trace.input_tokens.sum()),
        output_tokens=int(trace.output_tokens.sum()),
        hit_rate=recording.hit_rate if known else None,
        misses=find_misses(recording, header.page_size) if known else None,
    )


def write_recording(
    header: Header, rows: Iterable[tuple[float, Request]], path: str | os.PathLike[str]
) -> None:
    """Write requests, with the Unix times of their arrivals; compressed if the name ends in .gz or .xz.

    Raises:
        TraceError: The file cannot be written.
    """
    encode = msgspec.json.Encoder().encode
    with open_output(path) as stream:
        stream.write(encode(Line(recording=header)) + b"\n")
        for seconds, row in rows:
            row.timestamp = round((seconds - header.started) * 1000.0, 3)
            stream.write(encode(Line(request=row)) + b"\n")
