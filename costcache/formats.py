"""The offer of a plugin that reads trace files: how to know a format, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source
    from costcache.sim.traces.reading import Reading

__all__ = ["TraceFormat"]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format of trace files that a plugin reads.

    Attributes:
        read: ``read(source, reading)`` returns the trace. Of the source, a
            :class:`~costcache.sim.traces.files.Source`, it takes the ``lines()`` or the bytes of ``stream``,
            both unpacked; :class:`~costcache.sim.traces.columns.Columns` collects requests. The reading has
            the user's options (``block_size``, ``tokenizer``). For a line that is malformed it raises a
            :class:`~costcache.errors.TraceError` that names the line, the field, its value and the fix.
        claims: ``claims(name, start)`` says whether a file is of this format, given its name without folder
            (``-`` for standard input) and its first bytes, unpacked: about 64 KiB, or all that there are.
        summary: One line for users: whose traces these are.
        clock: Whether requests have times on one clock; if not, sessions get arrivals.
    """

    read: Callable[[Source, Reading], Trace]
    claims: Callable[[str, bytes], bool]
    summary: str
    clock: bool = True
