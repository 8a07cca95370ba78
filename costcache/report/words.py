"""Formats figures for readers."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count", "listed", "points", "seconds", "share", "size"]


def size(amount: float) -> str:
    """Bytes in the largest unit under 1024 of it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def count(value: float) -> str:
    """A count with a decimal prefix."""
    for divisor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= divisor:
            return f"{value / divisor:g}{unit}"
    return f"{value:g}"


def share(value: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{value * 100:.{digits}f} %"


def points(difference: float) -> str:
    """A difference of two rates in percentage points."""
    return f"{difference * 100:+.1f} points"


def seconds(value: float) -> str:
    """A time in milliseconds, or in seconds from one second up."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
