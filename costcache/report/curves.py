"""Plots the reuse intervals of the main classes of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from costcache.errors import SettingsError
from costcache.report.picture import DASHES, picture
from costcache.report.style import styles

if TYPE_CHECKING:
    from costcache.sim.explain import Explanation

__all__ = ["write_curves"]

_MOST = 8
_FIRST = 0.99
"""The plot starts where the first curve falls below this share."""


def write_curves(explanation: Explanation, title: str, longest: float, path: Path) -> None:
    """Plot the survival curves of the classes with the most tokens used or evicted.

    Args:
        explanation: Result of :func:`costcache.sim.explain.explain`.
        title: Title of the plot.
        longest: Length of the trace in seconds; beyond, the curves are extrapolated.
        path: The file, written atomically in the format of its suffix.

    Raises:
        SettingsError: If the policy has no curves yet, matplotlib is not installed, the folder does not
            exist, or the suffix is not that of a supported format.
        OSError: If the file cannot be written.
    """
    shown = [account for account in explanation.classes if account.unused][:_MOST]
    if not shown:
        raise SettingsError(
            f"--plot {path}: {explanation.policy} has estimated nothing, since nothing had to be evicted: "
            "give a smaller --capacity"
        )
    ages = explanation.ages
    first = min(
        (age for account in shown for age, share in zip(ages, account.unused, strict=True) if share < _FIRST),
        default=1.0,
    )
    with picture(path, title) as axes:
        from matplotlib.ticker import FuncFormatter

        look = styles([account.name for account in shown])
        for account in shown:
            style = look[account.name]
            axes.plot(
                ages, account.unused, color=style.color, linestyle=DASHES[style.dash], label=account.name
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlim(first / 2, max(longest, 4 * first))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("Seconds since the last use")
        axes.set_ylabel("Share not reused yet")
