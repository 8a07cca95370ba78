"""Prints results: JSON, tables that stay whole on any terminal, and unwrapped lines."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal

import click

from costcache.cli.plain import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "duration", "echo_json", "new_table", "say", "show"]

WIDTH = 100


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=2))


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error.

    It prints text literally: names of files, models and plugins may contain what rich would read as markup.
    Without a terminal it is 100 columns wide, or as wide as ``COLUMNS`` if that is more: a pipe, a file and a
    log get the same text, whatever terminal the program is started from.
    """
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        wanted = os.environ.get("COLUMNS", "")
        out.width = max(int(wanted) if wanted.isdecimal() and len(wanted) < 5 else 0, WIDTH)
    return out


def new_table(*headings: str) -> Table:
    """Return a table without a border.

    Args:
        headings: One per column; ``>`` in front right-aligns a column of numbers, ``~`` lets a column of text
            wrap.
    """
    from rich import box
    from rich.table import Table

    # Said to be ASCII, so that rich keeps its shape: prepare_streams prints its lines in any encoding.
    lines = box.Box(str(box.SIMPLE_HEAD), ascii=True)
    table = Table(box=lines, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading[0] == ">" else "left"
        table.add_column(heading.lstrip(">~"), justify=justify, no_wrap=heading[0] != "~")
    return table


def show(out: Console, table: Table) -> None:
    """Print a table without cutting a word or number, wider than the terminal if need be."""
    from rich.cells import cell_len
    from rich.measure import Measurement

    for column in table.columns:
        column._cells = [plain(cell) if isinstance(cell, str) else cell for cell in column._cells]
        text = "\n".join(map(str, (column.header, *column.cells)))
        # Rich would cut a word rather than widen the table.
        parts = text.splitlines() if column.no_wrap else text.split()
        column.min_width = max(map(cell_len, parts), default=0)

    def least() -> int:
        return Measurement.get(out, out.options.update(width=10_000), table).minimum

    if least() > out.width:
        table.padding = (0, 0, 0, 0)
    out.width = max(out.width, least())
    out.print(table)


def say(out: Console, text: str = "") -> None:
    """Print a line unwrapped, however long. Control characters in it are escaped."""
    out.print(plain(text), soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
