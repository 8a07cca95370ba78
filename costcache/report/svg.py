"""Draws line charts and boxes as inline SVG.

Places are in percent of the drawing and sizes in pixels, so that a chart fits every width and its text
keeps its size. Colours are the page's CSS classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.report.axes import Axis
    from costcache.report.style import Style

__all__ = ["Chart", "Line", "box", "draw", "legend", "scale"]

_DASHES = {"solid": "", "dash": "8 4", "dot": "2 4", "dashdot": "9 4 2 4", "longdash": "14 5"}
_SYMBOLS = {
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "square": "M-4-4h8v8h-8z",
    "diamond": "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "triangle-up": "M0-5.5L5 4h-10z",
    "cross": "M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "x": "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z",
    "triangle-down": "M0 5.5L5-4h-10z",
    "pentagon": "M0-5.5L5.2-1.7L3.2 4.4h-6.4L-5.2-1.7z",
    "star": "M0-6.5L1.7-2.1L6.2-2L2.7 .9L3.9 5.3L0 2.8L-3.9 5.3L-2.7 .9L-6.2-2L-1.7-2.1z",
}
_MOST_LABELS = 4
"""Most labels of a horizontal axis on a narrow screen."""
_GRAIN = 1000
"""Places of a line along each axis: finer than a screen shows, and the same on every machine."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        name: Its name in the legend.
        style: Its look.
        path: Points to connect; empty for none.
        marks: Points to mark, each with the text that a pointer over it shows.
    """

    name: str
    style: Style
    path: Sequence[tuple[float, float]] = ()
    marks: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines.

    Attributes:
        name: Its element id.
        title: What it shows.
        text: What can be read from it, in a sentence or two.
        x: Horizontal axis.
        y: Vertical axis.
        lines: Its lines; later ones are drawn over earlier ones.
        level: A dotted horizontal line, with its label.
    """

    name: str
    title: str
    text: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = field(default_factory=tuple)
    level: tuple[float, str] | None = None


def draw(chart: Chart) -> str:
    """Draw a chart; its description and title are elements ``NAME-text`` and ``NAME-title``."""
    x, y = chart.x, chart.y
    parts = []
    for value, label in y.ticks:
        at = _percent(1 - y.place(value))
        parts.append(f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="-8" y="{at}" dy=".35em" text-anchor="end">{escape(label)}</text>')
    for nth, (value, label) in enumerate(x.ticks):
        at = _percent(x.place(value))
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y2="100%"/>')
        kind = _kind(nth, len(x.ticks))
        parts.append(f'<text{kind} x="{at}" y="100%" dy="20" text-anchor="middle">{escape(label)}</text>')
    if chart.level is not None:
        value, label = chart.level
        at = _percent(1 - y.place(value))
        parts.append(f'<line class="level" x2="100%" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="4" y="{at}" dy="-5">{escape(label)}</text>')
    for line in chart.lines:
        parts += _line(line, x, y)
    ids = f'aria-labelledby="{chart.name}-title" aria-describedby="{chart.name}-text"'
    return (
        f'<p class="axis">{escape(y.title)}</p>'
        f'<svg class="plot" role="img" {ids}>{"".join(parts)}</svg>'
        f'<p class="axis x">{escape(x.title)}</p>'
    )


def _line(line: Line, x: Axis, y: Axis) -> list[str]:
    parts = []
    if line.path:
        points = [(round(x.place(a) * _GRAIN), round((1 - y.place(b)) * _GRAIN)) for a, b in line.path]
        kept = " ".join(f"{a},{b}" for (a, b), _ in groupby(points))
        parts.append(
            f'<svg class="path" viewBox="0 0 {_GRAIN} {_GRAIN}" preserveAspectRatio="none">'
            f'<polyline class="{line.style.name}" points="{kept}"{_stroke(line.style)}/></svg>'
        )
    for a, b, tip in line.marks:
        at = f'x="{_percent(x.place(a))}" y="{_percent(1 - y.place(b))}"'
        parts.append(f"<svg {at}>{_mark(line.style, tip)}</svg>")
    return parts


def _stroke(style: Style) -> str:
    dashes = f' stroke-dasharray="{_DASHES[style.dash]}"' if _DASHES[style.dash] else ""
    return f' stroke-width="{style.width:g}"{dashes}'


def _mark(style: Style, tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<path class="mark {style.name}" d="{_SYMBOLS[style.symbol]}">{title}</path>'


def legend(lines: Sequence[Line]) -> str:
    """A list of the lines' names, each with a sample."""
    shown = {line.name: line for line in lines}
    items = []
    for name, line in shown.items():
        drawn = any(each.path for each in lines if each.name == name)
        marked = any(each.marks for each in lines if each.name == name)
        sample = (
            f'<line class="{line.style.name}" x2="36" y1="8" y2="8"{_stroke(line.style)}/>' if drawn else ""
        )
        if marked:
            sample += f'<svg x="18" y="8">{_mark(line.style)}</svg>'
        items.append(f'<li><svg class="key" aria-hidden="true">{sample}</svg>{escape(name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def box(style: Style, axis: Axis, five: Sequence[float], words: Callable[[float], str]) -> str:
    """A box with whiskers, from the percentiles 5, 25, 50, 75 and 95."""
    low, first, middle, third, high = (axis.place(value) for value in five)
    grid = "".join(f'<line class="grid" x1="{p}" x2="{p}" y2="100%"/>' for p in _ticks(axis))
    said = "box from {1} to {3}, whiskers from {0} to {4}, median {2}".format(*map(words, five))
    span = f'x="{_percent(first)}" width="{_percent(third - first)}"'
    return (
        f'<svg class="box" role="img" aria-label="{escape(said)}">{grid}'
        f'<line class="{style.name}" stroke-width="1.5" x1="{_percent(low)}" x2="{_percent(high)}" '
        'y1="50%" y2="50%"/>'
        f'<rect class="mark {style.name}" {span} y="20%" height="60%"/>'
        f'<line class="middle" x1="{_percent(middle)}" x2="{_percent(middle)}" y1="10%" y2="90%"/></svg>'
    )


def scale(axis: Axis) -> str:
    """The labels of a horizontal axis alone; on a narrow screen those at its ends."""
    ends = (0, len(axis.ticks) - 1)
    labels = "".join(
        f'<text class="{"" if nth in ends else "wide"}" x="{at}" y="14" text-anchor="middle">'
        f"{escape(label)}</text>"
        for nth, (at, (_, label)) in enumerate(zip(_ticks(axis), axis.ticks, strict=True))
    )
    return f'<svg class="scale" aria-hidden="true">{labels}</svg>'


def _kind(nth: int, labels: int) -> str:
    """Every other label of many is left out on a narrow screen."""
    return ' class="wide"' if nth % 2 and labels > _MOST_LABELS else ""


def _ticks(axis: Axis) -> list[str]:
    return [_percent(axis.place(value)) for value, _ in axis.ticks]


def _percent(share: float) -> str:
    return f"{round(share * 100, 2):g}%"
