"""Draws plots off screen, the same bytes at every rerun, and writes them atomically."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from costcache.errors import SettingsError
from costcache.report.files import check_outputs, write_whole
from costcache.report.style import GRID

__all__ = ["DASHES", "check_picture", "picture"]

DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
"""Matplotlib's line styles by plotly's names."""

_FORMATS = ("pdf", "png", "svg")


def check_picture(path: Path) -> None:
    """Check before the replay that a plot can be written.

    Raises:
        SettingsError: If matplotlib is not installed, the folder does not exist, or the suffix is not that of
            a supported format.
    """
    check_outputs(plot=path)
    if path.suffix.lstrip(".").lower() not in _FORMATS:
        raise SettingsError(f"--plot {path}: end the name with .{', .'.join(_FORMATS)}")


@contextmanager
def picture(path: Path, title: str) -> Iterator[Any]:
    """Yield axes to draw on, then write the plot, atomically.

    Args:
        path: The file; its suffix names the format.
        title: Title of the plot.

    Raises:
        SettingsError: As :func:`check_picture`.
        OSError: If the file cannot be written.
    """
    check_picture(path)
    kind = path.suffix.lstrip(".").lower()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Salted ids and dates would differ between reruns.
    with mpl.rc_context({**mpl.rcParamsDefault, "svg.hashsalt": "costcache", "text.parse_math": False}):
        figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        yield axes
        axes.grid(color=GRID)
        axes.set_title(title)
        axes.legend(frameon=False)
        buffer = io.BytesIO()
        dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(buffer, format=kind, metadata=dated.get(kind))
    write_whole(path, buffer.getvalue())
