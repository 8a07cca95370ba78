"""Azure's traces of 2023: arrival times and lengths of requests, without their prefixes.

A CSV file with the columns ``TIMESTAMP`` (date and time, fractions of a second with up to 7 digits),
``ContextTokens`` and ``GeneratedTokens``. It cannot be replayed; it re-times other traces. Source:
github.com/Azure/AzurePublicDataset; Patel et al., "Splitwise", ISCA 2024.
"""

from __future__ import annotations

import os
import re
from array import array
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from costcache.errors import TraceError
from costcache.sim.traces.files import open_source
from costcache.sim.traces.limits import Limits
from costcache.sim.traces.rows import fail

__all__ = ["HEADER", "read_arrivals"]

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
"""The first line."""

_COLUMNS = HEADER.decode().split(",")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(?:\+00:00|Z)?")


def read_arrivals(path: str | os.PathLike[str], limits: Limits | None = None) -> NDArray[np.float64]:
    """Read ascending seconds from the first arrival, float64 of shape [arrivals].

    Args:
        path: The file.
        limits: Bounds of the file; the default ones if None.

    Raises:
        TraceError: If the file cannot be read, or a line is malformed.
    """
    times = array("d")
    with open_source(path, limits=limits) as source:
        label = source.label
        for number, line in source.lines():
            text = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
            cells = text.split(",")
            if not times and cells == _COLUMNS:
                continue
            if len(cells) != len(_COLUMNS):
                fail(label, number, "the line", text, f"{len(_COLUMNS)} columns: {', '.join(_COLUMNS)}")
            times.append(_seconds(label, number, cells[0]))
            for name, cell in zip(_COLUMNS[1:], cells[1:], strict=True):
                if not (cell.isascii() and cell.isdigit()):
                    fail(label, number, name, cell, "tokens, a whole number")
    if not times:
        raise TraceError(f"{label}: holds no arrival; give a CSV file with the columns {', '.join(_COLUMNS)}")
    seconds: NDArray[np.float64] = np.sort(np.frombuffer(times, dtype=np.float64))
    seconds -= seconds[0]
    return seconds


def _seconds(label: str, number: int, text: str) -> float:
    found = _TIME.fullmatch(text)
    try:
        # The fraction is parsed separately: a datetime resolves microseconds, the file tenths of them.
        whole = datetime.fromisoformat(found[1] if found else text).replace(tzinfo=UTC)
    except ValueError:
        found = None
    if found is None:
        fail(label, number, "TIMESTAMP", text, "a date and time, as 2023-11-16 18:15:46.6805900")
    return (whole - datetime(2023, 1, 1, tzinfo=UTC)).total_seconds() + float(found[2] or 0)
