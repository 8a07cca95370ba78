"""Progress display on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from costcache.cli.output import console
from costcache.cli.plain import plain

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Task", "progress_display"]


@contextlib.contextmanager
def progress_display() -> Iterator[Progress | None]:
    """Show a progress display while on a terminal; yields None elsewhere."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
    ) as bar:
        yield bar


class Task:
    """One line of the progress display; does nothing without one."""

    def __init__(self, bar: Progress | None, text: str, total: float | None = None) -> None:
        self._bar = bar
        text = plain(text)
        self._text: str | None = text
        self._id = None if bar is None else bar.add_task(text, total=total)

    def by(self, amount: int, text: str | None = None) -> None:
        """Advance by ``amount``, and show ``text`` for the current step."""
        if self._bar is not None and self._id is not None:
            text = None if text is None else plain(text)
            self._bar.update(self._id, advance=amount, description=text)
            if text not in (None, self._text):
                self._text = text
                self._bar.refresh()  # a short step would start and end between two refreshes

    def to(self, done: int, total: int | None) -> None:
        """Set the amount done and the total."""
        if self._bar is not None and self._id is not None:
            self._bar.update(self._id, completed=done, total=total)

    def done(self) -> None:
        """Remove the line."""
        if self._bar is not None and self._id is not None:
            self._bar.remove_task(self._id)
