"""Options that several commands share, and how results leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from costcache.errors import SettingsError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from costcache.deployment import Deployment

__all__ = [
    "console",
    "deployment_of",
    "deployment_options",
    "echo_json",
    "json_option",
    "model_option",
    "new_table",
    "say",
    "show",
    "split_commas",
]

F = TypeVar("F", bound=Callable[..., Any])

KV_DTYPES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
WIDTH = 100

model_option = click.option(
    "--model",
    "model_name",
    required=True,
    metavar="MODEL",
    help="A preset (see 'costcache models'), or a path to a config.json or its folder.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def deployment_options(command: F) -> F:
    """Add the options that say how the model is served."""
    for option in (
        click.option("--pp", type=int, default=1, show_default=True, help="Pipeline-parallel stages."),
        click.option(
            "--dp-attention",
            type=int,
            default=1,
            show_default=True,
            metavar="N",
            help="Data-parallel attention groups; 1 is off.",
        ),
        click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks."),
        click.option(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default="bf16",
            show_default=True,
            help="Type of the cached keys and values.",
        ),
    ):
        command = option(command)
    return command


def deployment_of(*, tp: int, dp_attention: int, pp: int, kv_dtype: str, page_size: int = 1) -> Deployment:
    """The deployment that the options describe.

    Raises:
        SettingsError: They do not fit together.
    """
    from costcache.deployment import Deployment

    return Deployment(tp=tp, dp_attention=dp_attention, pp=pp, kv_dtype=kv_dtype, page_size=page_size)


def split_commas(values: tuple[str, ...], option: str) -> list[str]:
    """``("a,b", "c")`` as ``["a", "b", "c"]``, each once.

    Raises:
        SettingsError: Nothing is left.
    """
    parts = (part.strip() for value in values for part in value.split(","))
    found = list(dict.fromkeys(part for part in parts if part))
    if not found:
        raise SettingsError(f"{option} is {','.join(values)!r}: give one or more, with commas between")
    return found


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=2))


def console(*, stderr: bool = False) -> Console:
    """A console that writes to standard output, or to standard error.

    It takes text as it is: names of files, models and plugins may hold what rich reads as markup. Where
    no terminal gives it a width it has 100 columns or more, so that a log is as readable as a screen.
    """
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = max(out.width, WIDTH)
    return out


def new_table(*headings: str) -> Table:
    """A table without lines around it.

    Args:
        headings: One per column. One that starts with ``>`` is of a column of numbers, on the right; one
            that starts with ``~`` of a column of text, which may go on in the next line.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading[0] == ">" else "left"
        table.add_column(heading.lstrip(">~"), justify=justify, no_wrap=heading[0] != "~")
    return table


def show(out: Console, table: Table) -> None:
    """Print a table with every word and number whole, wider than the terminal where need be."""
    from rich.cells import cell_len
    from rich.measure import Measurement

    for column in table.columns:
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
    """Print a line as it is, however long."""
    out.print(text, soft_wrap=True)
