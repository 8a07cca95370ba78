"""Colours, dashes and markers of policies, the same in every chart, on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COLORS", "DARK", "DARK_COLORS", "GRID", "INK", "LIGHT", "MUTED", "Style", "styles"]

LIGHT = {
    "page": "#f6f7f9",
    "card": "#ffffff",
    "code": "#f3f4f6",
    "line": "#d8dce2",
    "edge": "#6b7280",
    "ink": "#1f2328",
    "muted": "#4b5563",
    "accent": "#0969a8",
    "lru": "#7d8590",
}
"""Colours of a light page by name, which is that of a CSS variable."""
DARK = {
    "page": "#0d1117",
    "card": "#161b22",
    "code": "#0d1117",
    "line": "#30363d",
    "edge": "#8b949e",
    "ink": "#e6edf3",
    "muted": "#a5afba",
    "accent": "#58a6ff",
    "lru": "#8b949e",
}
"""The same of a dark page."""
INK, MUTED, GRID = LIGHT["ink"], LIGHT["edge"], "#e5e7eb"

# After Okabe and Ito's palette, which all kinds of colour vision tell apart; each has a contrast of 3:1 or
# more with its page.
COLORS = ("#0072b2", "#c24e00", "#007d5a", "#b25590", "#9a6700", "#6e56cf", "#7b4f2c")
DARK_COLORS = ("#4ea8de", "#ff8c42", "#2fbf9a", "#e58cc3", "#e3b341", "#b5a3ff", "#c9986b")
# Five and seven are coprime: a pair of colour and dash repeats only after 35 policies.
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon")


@dataclass(frozen=True, slots=True)
class Style:
    """The look of one policy.

    Attributes:
        name: Name of its colour, ``lru`` or ``c`` and its place in :data:`COLORS`.
        color: Its colour on a light page.
        dash: Name of its dashes.
        symbol: Name of its markers.
        width: Width of its lines in pixels.
    """

    name: str
    color: str
    dash: str
    symbol: str
    width: float


def styles(policies: Sequence[str]) -> dict[str, Style]:
    """A style for each policy, in their order but LRU first, so that the others are drawn over it.

    LRU, the baseline, is broad and grey.
    """
    found = {}
    others = [name for name in policies if name != "lru"]
    if len(others) < len(policies):
        found["lru"] = Style("lru", LIGHT["lru"], "solid", "circle", 5.0)
    for at, name in enumerate(others):
        color = at % len(COLORS)
        found[name] = Style(
            f"c{color}", COLORS[color], _DASHES[at % len(_DASHES)], _SYMBOLS[at % len(_SYMBOLS)], 2.5
        )
    return found
