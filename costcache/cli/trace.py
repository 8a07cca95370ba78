"""``costcache trace``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from costcache.cli import completing
from costcache.cli.options import json_option
from costcache.cli.output import console, duration, echo_json, new_table, say, show
from costcache.cli.reading import TraceOptions, trace_options
from costcache.cli.workload import say_written

if TYPE_CHECKING:
    from rich.console import Console

    from costcache.sim.traces.summary import TraceSummary

__all__ = ["trace"]

_SMALLEST_PAGE = 16
_BAR = 40


@click.group()
def trace() -> None:
    """Inspect and convert trace files."""


@trace.command()
@click.argument("path", metavar="TRACE", shell_complete=completing.files)
@click.option(
    "--page-size",
    type=click.IntRange(min=1),
    help="Tokens per page.  [default: the trace's block size, at least 16]",
)
@trace_options
@json_option
def info(path: str, page_size: int | None, reading: TraceOptions, as_json: bool) -> None:
    """Summarize TRACE, its reuse, and the hit rate of an unlimited cache.

    TRACE is a file of any format, plain or compressed, or - for standard input.
    """
    from costcache.sim.traces.summary import summarize

    requests, form = reading.read(path)
    summary = summarize(requests, page_size or max(requests.block_size, _SMALLEST_PAGE))
    if as_json:
        echo_json({"format": form, **asdict(summary)})
    else:
        _print(summary, form)


@trace.command()
@click.argument("path", metavar="TRACE", shell_complete=completing.files)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    shell_complete=completing.files,
    help="File to write; compressed if it ends in .gz or .xz.",
)
@click.option(
    "--out-block-size",
    type=click.IntRange(min=1),
    help="Tokens per block id of the result, a multiple of the trace's own.  "
    "[default: the trace's own, or 16 if that is 1]",
)
@trace_options
def convert(path: str, out: str, out_block_size: int | None, reading: TraceOptions) -> None:
    """Write TRACE in Mooncake's format, in which an id stands for a block and its whole prefix.

    Equal input and options give equal bytes. The format has no sessions or think times: requests keep the
    times that --arrivals gives them.
    """
    from costcache.report.files import check_distinct
    from costcache.sim.traces import write_trace
    from costcache.sim.traces.convert import with_path_ids
    from costcache.sim.traces.files import check_output

    check_output(out)
    check_distinct([path, reading.retime], {"--out": Path(out)})
    requests, form = reading.read(path)
    size = requests.block_size
    converted = with_path_ids(requests, out_block_size or (_SMALLEST_PAGE if size == 1 else size))
    write_trace(converted, out)
    say_written(converted, f"requests of {form}", out)


def _print(summary: TraceSummary, form: str) -> None:
    out = console()
    say(out, f"{summary.name}: {form}, blocks of {summary.block_size}, pages of {summary.page_size}")
    say(out)
    rows = [
        ("requests", f"{summary.requests:,}"),
        ("sessions", "not recorded" if summary.sessions is None else f"{summary.sessions:,}"),
        ("duration", duration(summary.duration_seconds)),
        ("input tokens", f"{summary.input_tokens:,}, {summary.longest_input:,} in the longest prompt"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("distinct pages", f"{summary.distinct_pages:,} of {summary.pages:,} whole pages"),
        ("ideal hit rate", f"{summary.ideal_token_hit_rate:.2%} of the input tokens"),
    ]
    if summary.ideal_with_outputs is not None:
        rows.append(
            ("  with outputs", f"{summary.ideal_with_outputs:.2%} if generated tokens are cached too")
        )
    if summary.finish:
        rows.append(("stop reasons", ", ".join(f"{name} {n:,}" for name, n in summary.finish.items())))
    for name, text in rows:
        say(out, f"{name:<15} {text}")
    _print_intervals(out, summary)
    _print_depths(out, summary)


def _print_intervals(out: Console, summary: TraceSummary) -> None:
    bins = summary.reuse_intervals
    total = sum(each.uses for each in bins)
    if not total:
        return
    say(out)
    table = new_table(">reused\nwithin", ">pages", ">share", ">cumulative", " ")
    most, so_far = max(each.uses for each in bins), 0
    for each in bins:
        so_far += each.uses
        share = f"{each.uses / total:.1%}"
        table.add_row(
            duration(each.stop), f"{each.uses:,}", share, f"{so_far / total:.1%}", _bar(each.uses, most)
        )
    show(out, table)


def _print_depths(out: Console, summary: TraceSummary) -> None:
    if not summary.depths:
        return
    say(out)
    table = new_table(">depth in\ntokens", ">pages", ">hit", " ")
    for each in summary.depths:
        share = each.found / each.pages if each.pages else 0.0
        table.add_row(f"{each.start:,}+", f"{each.pages:,}", f"{share:.1%}", _bar(each.found, each.pages))
    show(out, table)


def _bar(part: int, whole: int) -> str:
    return "█" * round(_BAR * part / whole) if whole else ""
