"""How policies look, the same in every chart: told apart by colour, dash and marker together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GRID", "INK", "MUTED", "Style", "styles"]

INK = "#1f2328"
MUTED = "#6b7280"
GRID = "#e5e7eb"

# Okabe and Ito's palette for all kinds of colour vision, without the yellow that white swallows.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4f2c")
# Five and seven have no common factor: a colour and a dash meet again after 35 policies.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon")
_PATTERNS = ("", "/", ".", "x", "-")
_LRU = "#9ca3af"


@dataclass(frozen=True, slots=True)
class Style:
    """How one policy is drawn, in plotly's words."""

    color: str
    dash: str
    symbol: str
    pattern: str
    width: float


def styles(policies: Sequence[str]) -> dict[str, Style]:
    """A style for each policy; LRU, which the others are measured against, is broad and grey.

    In their order, LRU first: what lies on it stays to be seen.
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
