"""What every picture shares: it is drawn off screen, is the same at every rerun, and is written whole."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from costcache.errors import SettingsError
from costcache.report.files import check_outputs, write_whole
from costcache.report.style import GRID

__all__ = ["check_picture", "picture"]

_FORMATS = ("pdf", "png", "svg")


def check_picture(path: Path) -> None:
    """Fail now rather than after the replay.

    Raises:
        SettingsError: matplotlib is not installed, there is no such folder, or the ending is of no format
            that can be drawn.
    """
    check_outputs(plot=path)
    if path.suffix.lstrip(".").lower() not in _FORMATS:
        raise SettingsError(f"--plot {path}: end the name with .{', .'.join(_FORMATS)}")


@contextmanager
def picture(path: Path, title: str) -> Iterator[Any]:
    """Axes to draw on; the picture is written when that is done, whole or not at all.

    Args:
        path: Where it goes; the name's ending says the format.
        title: Its title.

    Raises:
        SettingsError: As :func:`check_picture`.
        OSError: The file cannot be written.
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
