"""``costcache workload``."""

from __future__ import annotations

import json
from typing import Any

import click

from costcache.errors import SettingsError

__all__ = ["workload"]


@click.command(epilog="Equal settings and seed give equal bytes.")
@click.argument("name")
@click.option("--out", required=True, metavar="FILE", help="Where to write; compressed for .gz and .xz.")
@click.option("--requests", type=int, help="Requests to generate.  [default: the workload's own]")
@click.option("--seed", type=int, help="Seed.  [default: 0]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a parameter, such as user.median=300; repeat for more.",
)
def workload(name: str, out: str, requests: int | None, seed: int | None, overrides: tuple[str, ...]) -> None:
    """Generate a workload and write it as a trace, in Mooncake's form.

    NAME is agentic, chat, few-shot, multi-turn or random.
    """
    from costcache.sim.traces import write_trace
    from costcache.sim.workloads import generate, workload_settings

    values: dict[str, Any] = dict(read_assignment(text, "--set") for text in overrides)
    if requests is not None:
        values["requests"] = requests
    if seed is not None:
        values["seed"] = seed
    trace = generate(name, workload_settings(name, values))
    write_trace(trace, out)
    click.echo(
        f"wrote {len(trace):,} requests, {int(trace.input_tokens.sum()):,} prompt tokens, "
        f"in blocks of {trace.block_size} to {'standard output' if out == '-' else out}",
        err=True,
    )


def read_assignment(text: str, option: str, form: str = "FIELD=VALUE") -> tuple[str, Any]:
    """Read ``FIELD=VALUE``; the value is JSON where it can be read as such, else text.

    Args:
        text: What was given.
        option: The option's name, for the error.
        form: What belongs there, for the error.

    Raises:
        SettingsError: There is no ``=``, or no field.
    """
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise SettingsError(f"{option} {text!r} is not {form}")
    try:
        return field.strip(), json.loads(value)
    except json.JSONDecodeError:
        return field.strip(), value
