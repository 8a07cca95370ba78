"""``costcache workload``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from costcache.cli import completing
from costcache.cli.plain import plain
from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["read_assignment", "say_written", "workload"]


@click.command(epilog="Equal settings and seeds give equal bytes.")
@click.argument("name", shell_complete=completing.workloads)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    shell_complete=completing.files,
    help="File to write; compressed if it ends in .gz or .xz.",
)
@click.option("--requests", type=int, help="Requests to generate.  [default: the workload's own]")
@click.option("--seed", type=int, help="Seed of the random numbers.  [default: 0]")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set a parameter, such as user.median=300; repeat for more.",
)
def workload(
    name: str, out: str, requests: int | None, seed: int | None, assignments: tuple[str, ...]
) -> None:
    """Generate a workload and write it as a trace in Mooncake's format.

    NAME is agentic, agents-documents, chat, drift, few-shot, in-turn, multi-turn, random or tenants.
    """
    from costcache.sim.traces import write_trace
    from costcache.sim.traces.files import check_output
    from costcache.sim.workloads import generate, workload_settings

    values: dict[str, Any] = dict(read_assignment(text, "--set") for text in assignments)
    if requests is not None:
        values["requests"] = requests
    if seed is not None:
        values["seed"] = seed
    check_output(out)
    trace = generate(name, workload_settings(name, values))
    write_trace(trace, out)
    say_written(trace, "requests", out)


def say_written(trace: Trace, requests: str, out: str) -> None:
    """Report a written trace on standard error."""
    click.echo(
        f"wrote {len(trace):,} {requests}, {int(trace.input_tokens.sum()):,} prompt tokens, "
        f"in blocks of {trace.block_size} to {'standard output' if out == '-' else plain(out)}",
        err=True,
    )


def read_assignment(text: str, option: str, form: str = "FIELD=VALUE") -> tuple[str, Any]:
    """Split ``FIELD=VALUE``; the value is read as JSON if possible, else as text.

    Args:
        text: The text to split.
        option: Name of the option, for the error.
        form: Expected form, for the error.

    Raises:
        SettingsError: If the ``=`` or the field is missing.
    """
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise SettingsError(f"{option} {text!r} is not {form}")
    try:
        return field.strip(), json.loads(value)
    except json.JSONDecodeError:
        return field.strip(), value
