"""Any trace file to a trace: the format is told from the file's beginning."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from costcache.errors import TraceError
from costcache.sim.traces.arrivals import DEFAULT_ARRIVALS, Arrivals, at_times
from costcache.sim.traces.azure import HEADER, read_arrivals
from costcache.sim.traces.files import Progress, Source, open_source
from costcache.sim.traces.rows import NOT_JSON, fail

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["FORMATS", "Format", "Reading", "load_trace", "read_trace"]

_TAR = slice(257, 262), b"ustar"
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a file.

    Args:
        block_size: Tokens per block id where the file does not say; None for the format's own.
        tokenizer: Name or path of a tokenizer, for files of text.
    """

    block_size: int | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format.

    Args:
        name: What to call it.
        read: Reads a file of it.
        claims: Whether the first line is of this format, given its fields; None for files that are
            not told by a line.
        clock: Whether its requests have times on one clock. Else sessions get arrivals.
    """

    name: str
    read: Callable[[Source, Reading], Trace]
    claims: Callable[[Mapping[str, Any]], bool] | None
    clock: bool = True


def _mooncake(source: Source, reading: Reading) -> Trace:
    from costcache.sim.traces.mooncake import read_mooncake

    return read_mooncake(source, block_size=reading.block_size)


def _bailian(source: Source, reading: Reading) -> Trace:
    from costcache.sim.traces.bailian import read_bailian

    return read_bailian(source, block_size=reading.block_size)


def _weka(source: Source, reading: Reading) -> Trace:
    from costcache.sim.traces.weka import read_weka

    return read_weka(source, block_size=reading.block_size)


def _ragpulse(source: Source, reading: Reading) -> Trace:
    from costcache.sim.traces.ragpulse import read_ragpulse

    return read_ragpulse(source, block_size=reading.block_size)


MOONCAKE = Format("mooncake", _mooncake, lambda row: bool({"hash_ids", "input_length"} & row.keys()))
FORMATS = (
    Format("ragpulse", _ragpulse, lambda row: isinstance(row.get("hash_ids"), dict)),
    Format("bailian", _bailian, lambda row: {"chat_id", "hash_ids"} <= row.keys()),
    Format("weka", _weka, lambda row: {"hash_id_scope", "requests"} <= row.keys(), clock=False),
    MOONCAKE,
)
"""Every format, the most particular first."""


def load_trace(
    path: str | os.PathLike[str],
    block_size: int | None = None,
    *,
    arrivals: str | None = None,
    seed: int = 0,
    retime: str | os.PathLike[str] | None = None,
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace file of any format, plain, gzip or xz; ``-`` is standard input.

    Requests are put in the order of their times; those of the same time stay in file order.

    Args:
        path: The file.
        block_size: Tokens per block id where the file does not say; without it, the format's own.
        arrivals: How sessions start: ``uniform:6h``, ``poisson:0.05`` or ``even:0.25`` (sessions a
            second), or ``together``; see :class:`~costcache.sim.traces.arrivals.Arrivals`. Without it,
            the trace's own clock, and ``uniform:6h`` where it has none.
        seed: Of the arrivals.
        retime: An Azure CSV of arrivals, which the requests get in their order.
        tokenizer: For files of text: ``words``, ``bytes``, or the path of a ``tokenizer.json`` or its
            folder (with the extra ``tokenizer``).
        progress: Called now and then with bytes read and bytes in all (None if unknown).

    Raises:
        TraceError: The file cannot be read, is of no known format, holds no request, or a line is
            malformed; names the file, the line, the field, its value and what belongs there.
    """
    return read_trace(
        path,
        Reading(block_size, tokenizer),
        arrivals=arrivals,
        seed=seed,
        retime=retime,
        progress=progress,
    )[0]


def read_trace(
    path: str | os.PathLike[str],
    reading: Reading | None = None,
    *,
    arrivals: str | None = None,
    seed: int = 0,
    retime: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Trace, Format]:
    """Read a trace file as :func:`load_trace` does, and say of which format it is.

    Raises:
        TraceError: As there.
    """
    reading = reading or Reading()
    if reading.block_size is not None and reading.block_size < 1:
        raise TraceError(f"block size is {reading.block_size}; give 1 token or more")
    if arrivals is not None and retime is not None:
        raise TraceError(f"arrivals {arrivals!r} and times from {retime}: give one of them")
    process = Arrivals.parse(arrivals) if arrivals is not None else None
    times = read_arrivals(retime) if retime is not None else None
    with open_source(path, progress) as source:
        found = detect(source)
        trace = found.read(source, reading)
    if process is None and not found.clock:
        process = DEFAULT_ARRIVALS
    if process is not None:
        trace = process.spread(trace, seed, clock=found.clock)
    if times is not None:
        trace = at_times(trace, times)
    return trace, found


def detect(source: Source) -> Format:
    """The format of a file, from its beginning. Nothing of it is used up.

    Raises:
        TraceError: It is none that is known here.
    """
    place, mark = _TAR
    if source.starts()[place] == mark:
        raise TraceError(f"{source.label}: is a tar archive; give one of its files")
    line = source.first()
    if line.startswith(HEADER):
        raise TraceError(
            f"{source.label}: has arrivals and lengths but no prefixes; use it to re-time another trace"
        )
    if line.startswith(_LFS):
        raise TraceError(
            f"{source.label}: is a Git LFS pointer and not the data; fetch it with `git lfs pull`"
        )
    try:
        row = msgspec.json.decode(line)
    except NOT_JSON:
        return MOONCAKE  # its reader says what is wrong
    if not isinstance(row, dict):
        return MOONCAKE
    found = next((known for known in FORMATS if known.claims is not None and known.claims(row)), None)
    if found is not None:
        return found
    names = ", ".join(known.name for known in FORMATS)
    return fail(source.label, source.number, "the line", row, f"the fields of a known format ({names})")
