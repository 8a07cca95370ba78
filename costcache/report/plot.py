"""Plots the token hit rate over pool size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from costcache.report.picture import DASHES, picture
from costcache.report.style import INK, MUTED, styles
from costcache.report.words import count

if TYPE_CHECKING:
    from costcache.report.material import Material

__all__ = ["write_plot"]

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
    """Plot the hit-rate curves to a file, atomically, in the format of its suffix.

    Raises:
        SettingsError: If matplotlib is not installed, the folder does not exist, or the suffix is not that of
            a supported format.
        OSError: If the file cannot be written.
    """
    from matplotlib.ticker import FuncFormatter

    with picture(path, f"{material.trace} on {material.model}") as axes:
        axes.axhline(material.ceiling, color=MUTED, linestyle=":", label="unlimited pool")
        if material.optimum:
            axes.plot(*zip(*material.optimum, strict=True), "--*", color=INK, label="offline optimum")
        for policy, style in styles(material.policies).items():
            replays = material.of(policy)
            marker = _MARKERS[style.symbol]
            points = [(material.pool(r.run), r.run.token_hit_rate) for r in replays]
            whole = policy == "lru" and bool(material.lru)
            axes.plot(
                *zip(*points, strict=True),
                color=style.color,
                linewidth=style.width,
                marker=marker,
                linestyle="" if whole else DASHES[style.dash],
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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda _, __: ""))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("Pool size in tokens")
        axes.set_ylabel("Token hit rate")
