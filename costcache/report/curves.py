"""One picture: how long the main classes of a policy wait for their next use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from costcache.errors import SettingsError
from costcache.report.picture import picture
from costcache.report.style import styles

if TYPE_CHECKING:
    from costcache.sim.explain import Explanation

__all__ = ["write_curves"]

_MOST = 8
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_FIRST = 0.99
"""The picture begins where the first curve falls below."""


def write_curves(explanation: Explanation, title: str, longest: float, path: Path) -> None:
    """Draw the survival curves of the classes of which most was used or evicted.

    Args:
        explanation: What :func:`costcache.sim.explain.explain` gave.
        title: Title of the picture.
        longest: Seconds that the trace lasts: of longer waits, a curve says what is supposed.
        path: Where it goes; the name's ending says the format. Written whole or not at all.

    Raises:
        SettingsError: The policy has no curves yet; or matplotlib is not installed, there is no such folder,
            or the ending is of no format that can be drawn.
        OSError: The file cannot be written.
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
                ages, account.unused, color=style.color, linestyle=_DASHES[style.dash], label=account.name
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlim(first / 2, max(longest, 4 * first))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("Seconds since the last use")
        axes.set_ylabel("Share that is not used again yet")
