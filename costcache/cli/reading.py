"""Options that say how a trace file is read, shared by the commands that read one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from costcache.cli.progress import Task, progress_display

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["read", "trace_options"]

F = TypeVar("F", bound=Callable[..., Any])


def trace_options(command: F) -> F:
    """Add the options that say how a trace is read: those of :func:`costcache.sim.traces.load_trace`."""
    for option in (
        click.option(
            "--tokenizer",
            metavar="PATH",
            help="For a trace of text: a tokenizer.json or its folder, or the rough 'words' or 'bytes'.",
        ),
        click.option(
            "--retime",
            metavar="FILE",
            help="Give the requests, in their order, the arrival times of an Azure 2023 CSV file.",
        ),
        click.option(
            "--gaps",
            type=click.Choice(["answers", "recorded"]),
            default="answers",
            show_default=True,
            help="With arrivals, how a session goes on: when the recorded answer and the think time are "
            "over, or as its own clock says.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of --arrivals."),
        click.option(
            "--arrivals",
            metavar="PROCESS",
            help="How sessions start: uniform:6h, poisson:RATE or even:RATE (a second), or together.  "
            "[default: the trace's own clock, else uniform:6h]",
        ),
        click.option(
            "--block-size",
            type=click.IntRange(min=1),
            help="Tokens per block id, where the trace does not say.",
        ),
    ):
        command = option(command)
    return command


def read(path: str, options: dict[str, Any]) -> tuple[Trace, str]:
    """Read a trace with a progress bar, as :func:`trace_options` say; gives it and its format's name.

    Raises:
        TraceError: It cannot be read.
    """
    from costcache.sim.traces.reading import Reading, read_trace

    with progress_display() as bar:
        task = Task(bar, f"reading {path}")
        trace, found = read_trace(
            path,
            Reading(options["block_size"], options["tokenizer"]),
            arrivals=options["arrivals"],
            seed=options["seed"],
            gaps=options["gaps"],
            retime=options["retime"],
            progress=task.to,
        )
        task.done()
    return trace, found.name
