"""One picture: token hit rate over pool size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from costcache.report.picture import picture
from costcache.report.style import INK, MUTED, styles

if TYPE_CHECKING:
    from costcache.report.material import Material

__all__ = ["write_plot"]

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
    "triangle-down": "v",
    "pentagon": "p",
}


def write_plot(material: Material, path: Path) -> None:
    """Draw the hit-rate curves, whole or not at all; the name's ending says the format.

    Raises:
        SettingsError: matplotlib is not installed, there is no such folder, or the ending is of no format
            that can be drawn.
        OSError: The file cannot be written.
    """
    from matplotlib.ticker import FuncFormatter

    with picture(path, f"{material.trace} on {material.model}") as axes:
        look = styles(material.policies)
        axes.axhline(material.ceiling, color=MUTED, linestyle=":", label="pool without limit")
        if material.optimum:
            axes.plot(*zip(*material.optimum, strict=True), "--*", color=INK, label="best possible")
        for policy in look:
            replays = sorted(
                (r for r in material.replays if r.run.policy == policy), key=lambda r: material.pool(r.run)
            )
            style = look[policy]
            marker = _MARKERS[style.symbol]
            points = [(material.pool(r.run), r.run.token_hit_rate) for r in replays]
            whole = policy == "lru" and bool(material.lru)
            axes.plot(
                *zip(*points, strict=True),
                color=style.color,
                linewidth=style.width,
                marker=marker,
                linestyle="" if whole else _DASHES[style.dash],
                label=None if whole else replays[0].label,
            )
            if whole:
                axes.plot(
                    *zip(*material.lru, strict=True),
                    color=style.color,
                    linewidth=style.width,
                    label=replays[0].label,
                )
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda _, __: ""))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("Tokens in the pool")
        axes.set_ylabel("Prompt tokens found in the cache")


def _tokens(value: float) -> str:
    for divisor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= divisor:
            return f"{value / divisor:g} {unit}"
    return f"{value:g}"
