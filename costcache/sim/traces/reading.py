"""Reads trace files of any format, which it detects from the beginning of the file."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from costcache.errors import CostcacheError, PluginError, TraceError
from costcache.plugins import PluginManager, ask, get_plugins
from costcache.sim.trace import MOST_BLOCK
from costcache.sim.traces.arrivals import DEFAULT_ARRIVALS, Arrivals, at_times
from costcache.sim.traces.azure import HEADER, read_arrivals
from costcache.sim.traces.files import Progress, Source, open_source
from costcache.sim.traces.limits import Limits
from costcache.sim.traces.rows import MOST_SHOWN, NOT_JSON, fail

if TYPE_CHECKING:
    from costcache.formats import TraceFormat
    from costcache.sim.trace import Trace

__all__ = ["FORMATS", "Format", "Offered", "Reading", "load_trace", "read_trace"]

_TAR = slice(257, 262), b"ustar"
_LFS = b"version https://git-lfs"
_START = 1 << 16
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading a file.

    Args:
        block_size: Tokens per block id if the file does not say; None for the format's default.
        tokenizer: Name or path of a tokenizer, for files of text.
        limits: Bounds of the file.
        format: Name of the format; None to detect it.
    """

    block_size: int | None = None
    tokenizer: str | None = None
    limits: Limits = field(default_factory=Limits)
    format: str | None = None


def _is_object(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value).startswith(b"{")


def _of_objects(value: msgspec.Raw) -> bool:
    """Whether a list begins with an object."""
    return bytes(value)[1:].lstrip().startswith(b"{")


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format: ``read_NAME`` of the module of its name reads it.

    Args:
        name: Name of the format.
        claims: Whether a file is of this format, given the fields of its first line.
        clock: Whether requests have times on one clock; otherwise sessions get arrivals. None if times are
            optional: then the reader says (``Source.timed``).
        text: Whether it holds text, and needs a tokenizer.
    """

    name: str
    claims: Callable[[Mapping[str, msgspec.Raw]], bool]
    clock: bool | None = True
    text: bool = False

    def read(self, source: Source, reading: Reading) -> Trace:
        """Read a file of this format.

        Raises:
            TraceError: If a line is malformed.
        """
        module = importlib.import_module(f"costcache.sim.traces.{self.name}")
        options: dict[str, Any] = {"block_size": reading.block_size}
        if self.text:
            options["tokenizer"] = reading.tokenizer
        trace: Trace = getattr(module, f"read_{self.name}")(source, **options)
        return trace


@dataclass(frozen=True, slots=True)
class Offered:
    """A format that a plugin offers.

    Attributes:
        name: Name of the format.
        plugin: Name of the plugin.
        offer: What it offers.
    """

    name: str
    plugin: str
    offer: TraceFormat

    @property
    def clock(self) -> bool:
        """As that of a built-in format."""
        return self.offer.clock

    def read(self, source: Source, reading: Reading) -> Trace:
        """Read a file of this format.

        Raises:
            TraceError: If a line is malformed; or the plugin failed, which is named.
        """
        from costcache.sim.trace import Trace

        where = f"{source.label}: format {self.name!r} of plugin {self.plugin!r}"
        other = "correct the plugin, or name another format with --format"
        try:
            trace: Any = self.offer.read(source, reading)
        except (CostcacheError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise TraceError(f"{where} raised {error!r}: {other}") from error
        if not isinstance(trace, Trace):
            raise TraceError(f"{where} answered {trace!r}, not a Trace: {other}")
        return trace.in_time_order()


MOONCAKE = Format("mooncake", lambda row: bool({"hash_ids", "input_length"} & row.keys()), clock=None)
# An archive, detected from its first bytes.
FEW_SHOT = Format("few_shot", lambda row: False, clock=False, text=True)  # noqa: ARG005 # the signature of the others
FORMATS = (
    Format("recording", lambda row: _is_object(row.get("recording"))),
    Format("ragpulse", lambda row: _is_object(row.get("hash_ids"))),
    Format("bailian", lambda row: {"chat_id", "hash_ids"} <= row.keys()),
    Format("weka", lambda row: {"hash_id_scope", "requests"} <= row.keys(), clock=False),
    Format("dynamo", lambda row: _is_object(row.get("event"))),
    Format("sharegpt", lambda row: "turns" in row and not _of_objects(row["turns"]), clock=False),
    Format(
        "conversations", lambda row: bool({"traj", "conversations", "turns"} & row.keys()), None, text=True
    ),
    Format(
        "messages",
        lambda row: (
            bool({"messages", "body", "text_input", "texts"} & row.keys())
            or ("text" in row and "input" not in row)
        ),
        clock=None,
        text=True,
    ),
    Format("lmcache", lambda row: {"input", "output"} <= row.keys(), text=True),
    FEW_SHOT,
    MOONCAKE,
)
"""All formats, the most specific first."""


def load_trace(
    path: str | os.PathLike[str],
    block_size: int | None = None,
    *,
    arrivals: str | None = None,
    seed: int | None = None,
    gaps: Literal["answers", "recorded"] = "answers",
    retime: str | os.PathLike[str] | None = None,
    think: float | None = None,
    tokenizer: str | None = None,
    limits: Limits | None = None,
    format: str | None = None,  # noqa: A002 # as the option
    plugins: PluginManager | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace file of any format, plain, gzip or xz; ``-`` is standard input.

    Requests are sorted by time; those of equal times stay in file order.

    Args:
        path: The file.
        block_size: Tokens per block id if the file does not say; None for the format's default.
        arrivals: The process that starts sessions: ``uniform:6h``, ``poisson:0.05`` or ``even:0.25``
            (sessions per second), or ``together``; see :class:`~costcache.sim.traces.arrivals.Arrivals`.
            None for the trace's own clock, and ``uniform:6h`` if it has none.
        seed: Seed of the arrivals, for processes that draw random numbers; 0 if None.
        gaps: The time between the requests of a session that gets an arrival: ``answers``, the recorded
            service time plus the think time, or ``recorded``, by the session's own clock.
        retime: An Azure CSV whose arrival times the requests get, in order.
        think: Seconds from the answer to a request to the session's next one, for a trace that records
            neither times nor think times; None for 0.
        tokenizer: For files of text: ``words``, ``bytes``, or the path of a ``tokenizer.json`` or its
            folder (with the extra ``tokenizer``).
        limits: Bounds of the file: its longest line, and what its bytes may unfold into.
        format: Name of the format, built in or a plugin's; None to detect it.
        plugins: Where formats of plugins are looked up; those that are installed by default.
        progress: Called now and then with bytes read and total bytes (None if unknown).

    Raises:
        TraceError: If the file cannot be read, is of no known format, has no requests, or a line is
            malformed (names the file, the line, the field, its value and the valid values); if the file
            exceeds its limits; or an option is wrong.
    """
    return read_trace(
        path,
        Reading(block_size, tokenizer, limits or Limits(), format),
        arrivals=arrivals,
        seed=seed,
        gaps=gaps,
        retime=retime,
        think=think,
        plugins=plugins,
        progress=progress,
    )[0]


def read_trace(
    path: str | os.PathLike[str],
    reading: Reading | None = None,
    *,
    arrivals: str | None = None,
    seed: int | None = None,
    gaps: Literal["answers", "recorded"] = "answers",
    retime: str | os.PathLike[str] | None = None,
    think: float | None = None,
    plugins: PluginManager | None = None,
    progress: Progress | None = None,
) -> tuple[Trace, Format | Offered]:
    """Read a trace file as :func:`load_trace` does; returns the trace and its format.

    Raises:
        TraceError: As :func:`load_trace` does.
    """
    reading = reading or Reading()
    if reading.block_size is not None and not 1 <= reading.block_size <= MOST_BLOCK:
        raise TraceError(f"block size is {reading.block_size}; give 1 to {MOST_BLOCK:,} tokens")
    if seed is not None and seed < 0:
        raise TraceError(f"seed is {seed}; give 0 or more")
    if arrivals is not None and retime is not None:
        raise TraceError(f"arrivals {arrivals!r} and times from {retime}: give one of them")
    process = Arrivals.parse(arrivals) if arrivals is not None else None
    if seed is not None and process is not None and not process.random:
        raise TraceError(
            f"seed is {seed}, and arrivals {arrivals!r} draw no random numbers; leave the seed out"
        )
    if think is not None and retime is not None:
        raise TraceError(f"think is {think:g}, and times are those of {retime}: give one of them")
    times = read_arrivals(retime, reading.limits) if retime is not None else None
    with open_source(path, progress, reading.limits) as source:
        found = _format_of(source, reading.format, plugins or get_plugins())
        trace = found.read(source, reading)
    clock = bool(source.timed) if found.clock is None else found.clock
    if think is not None:
        trace = _with_think_time(trace, think, clock=clock)
    if process is None and not clock and times is None:
        process = DEFAULT_ARRIVALS
    if process is not None:
        trace = process.spread(trace, seed or 0, clock=clock, recorded=gaps == "recorded")
    if times is not None:
        trace = at_times(trace, times)
    return trace, found


def _with_think_time(trace: Trace, seconds: float, *, clock: bool) -> Trace:
    """Put ``seconds`` between the requests of a session.

    Raises:
        TraceError: If the trace has times or think times of its own, or no sessions.
    """
    if clock or trace.think_seconds is not None:
        recorded = "think times" if trace.think_seconds is not None else "the times of requests"
        raise TraceError(f"{trace.name}: records {recorded}, so think {seconds:g} cannot apply; leave it out")
    if trace.sessions is None:
        raise TraceError(
            f"{trace.name}: records no sessions, so think {seconds:g} cannot apply; leave it out"
        )
    return replace(trace, think_seconds=np.where(trace.predecessors() >= 0, seconds, 0.0))


def _format_of(source: Source, name: str | None, plugins: PluginManager) -> Format | Offered:
    """The format of a file: the one of this name, else one that a plugin claims it for, else a built-in one.

    Raises:
        TraceError: There is none of this name, two plugins claim the file, or the format is unknown.
    """
    known = {each.name: each for each in FORMATS}
    offered = {
        each: Offered(each, plugin, offer)
        for each, (plugin, offer) in plugins.trace_formats(known.keys()).items()
    }
    if name is not None:
        found = offered.get(name) or known.get(name)
        if found is None:
            names = [*sorted(offered), *known]
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise TraceError(f"format is {name!r}: {hint}The formats are {', '.join(names)}")
        return found
    claiming = [each for each in offered.values() if _claims(each, source, plugins)]
    if len(claiming) > 1:
        names_ = " and ".join(f"{each.name!r} of plugin {each.plugin!r}" for each in claiming)
        raise TraceError(f"{source.label}: formats {names_} both claim it: name one with --format")
    return claiming[0] if claiming else detect(source)


def _claims(offered: Offered, source: Source, plugins: PluginManager) -> bool:
    name = "-" if source.path is None else source.path.name
    where = f"trace format {offered.name!r}: claims"
    try:
        claim: Any = ask(f"{where} raised", offered.offer.claims, name, source.starts()[:_START])
    except PluginError as error:
        plugins.skip(offered.plugin, str(error))
        return False
    if not isinstance(claim, bool):
        plugins.skip(offered.plugin, f"{where} answered {claim!r}, not True or False")
        return False
    return claim


def detect(source: Source) -> Format:
    """Detect the built-in format of a file from its beginning, without consuming any of it.

    Raises:
        TraceError: If the format is unknown.
    """
    where, mark = _TAR
    if source.starts()[where] == mark:
        return FEW_SHOT
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
        row = _FIELDS.decode(line)  # the values as they are: unfolded, they could take 20 times the memory
    except NOT_JSON:
        return MOONCAKE  # its reader explains the error
    found = next((known for known in FORMATS if known.claims(row)), None)
    if found is not None:
        return found
    names = ", ".join(known.name for known in FORMATS)
    values: Any = dict.fromkeys(row, "...")
    if len(line) <= MOST_SHOWN:
        try:
            values = msgspec.json.decode(line)
        except NOT_JSON:
            return MOONCAKE  # as above
    return fail(source.label, source.number, "the line", values, f"the fields of a known format ({names})")
