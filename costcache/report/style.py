"""Colours, dashes and markers of policies, the same in every chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GRID", "INK", "MUTED", "Style", "styles"]

INK = "#1f2328"
MUTED = "#6b7280"
GRID = "#e5e7eb"

# Okabe and Ito's palette, distinct to all kinds of colour vision, without its yellow, which is faint on
# white.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4f2c")
# Five and seven are coprime: a pair of colour and dash repeats only after 35 policies.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon")
_PATTERNS = ("", "/", ".", "x", "-")
_LRU = "#9ca3af"


@dataclass(frozen=True, slots=True)
class Style:
    """The look of one policy, by plotly's names."""

    color: str
    dash: str
    symbol: str
    pattern: str
    width: float


def styles(policies: Sequence[str]) -> dict[str, Style]:
    """A style for each policy, in their order but LRU first, so that the others are drawn over it.

    LRU, the baseline, is broad and grey.
    """
    found = {}
    others = [name for name in policies if name != "lru"]
    if len(others) < len(policies):
        found["lru"] = Style(_LRU, "solid", "circle", "", 5.0)
    for at, name in enumerate(others):
        found[name] = Style(
            _COLORS[at % len(_COLORS)],
            _DASHES[at % len(_DASHES)],
            _SYMBOLS[at % len(_SYMBOLS)],
            _PATTERNS[at // len(_COLORS) % len(_PATTERNS)],
            2.5,
        )
    return found
