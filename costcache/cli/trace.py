"""``costcache trace``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costcache.cli.options import console, echo_json, json_option, new_table, say, show
from costcache.cli.reading import read, trace_options

if TYPE_CHECKING:
    from rich.console import Console

    from costcache.sim.traces.summary import TraceSummary

__all__ = ["trace"]

_SMALLEST_PAGE = 16
_BAR = 40


@click.group()
def trace() -> None:
    """Look at trace files, and convert them."""


@trace.command()
@click.argument("path", metavar="TRACE")
@click.option(
    "--page-size",
    type=click.IntRange(min=1),
    help="Tokens per page.  [default: the trace's block size, 16 at least]",
)
@trace_options
@json_option
def info(path: str, page_size: int | None, as_json: bool, **options: Any) -> None:
    """Say what TRACE holds, and what an unlimited cache would find.

    TRACE is a file of any format, plain or compressed, or - for standard input.
    """
    from costcache.sim.traces.summary import summarize

    requests, form = read(path, options)
    summary = summarize(requests, page_size or max(requests.block_size, _SMALLEST_PAGE))
    if as_json:
        echo_json({"format": form, **asdict(summary)})
    else:
        _print(summary, form)


@trace.command()
@click.argument("path", metavar="TRACE")
@click.option("--out", required=True, metavar="FILE", help="Where to write; compressed for .gz and .xz.")
@click.option(
    "--out-block-size",
    type=click.IntRange(min=1),
    help="Tokens per block id of the result, a multiple of the trace's own.  "
    "[default: the trace's own, or 16 where that is 1]",
)
@trace_options
def convert(path: str, out: str, out_block_size: int | None, **options: Any) -> None:
    """Write TRACE in Mooncake's form, with an id for each block and all before it.

    Equal input and options give equal bytes. Sessions and think times are not part of that form:
    requests come at the times that --arrivals gives them.
    """
    from costcache.report.files import check_distinct
    from costcache.sim.traces import write_trace
    from costcache.sim.traces.convert import with_path_ids

    check_distinct([path, options["retime"]], {"--out": Path(out)})
    requests, form = read(path, options)
    size = requests.block_size
    converted = with_path_ids(requests, out_block_size or (_SMALLEST_PAGE if size == 1 else size))
    write_trace(converted, out)
    click.echo(
        f"wrote {len(converted):,} requests of {form}, {int(converted.input_tokens.sum()):,} prompt tokens, "
        f"in blocks of {converted.block_size} to {'standard output' if out == '-' else out}",
        err=True,
    )


def _print(summary: TraceSummary, form: str) -> None:
    out = console()
    say(out, f"{summary.name}: {form}, blocks of {summary.block_size}, pages of {summary.page_size}")
    say(out)
    rows = [
        ("requests", f"{summary.requests:,}"),
        ("sessions", "not recorded" if summary.sessions is None else f"{summary.sessions:,}"),
        ("duration", _span(summary.duration_seconds)),
        ("input tokens", f"{summary.input_tokens:,}, {summary.longest_input:,} in the longest prompt"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("distinct pages", f"{summary.distinct_pages:,} of {summary.pages:,} whole pages"),
        ("ideal hit rate", f"{summary.ideal_token_hit_rate:.2%} of the input tokens"),
    ]
    if summary.ideal_with_outputs is not None:
        rows.append(("  with outputs", f"{summary.ideal_with_outputs:.2%} if generated tokens are kept too"))
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
    table = new_table(">used again\nwithin", ">pages", ">share", ">so far", " ")
    most, so_far = max(each.uses for each in bins), 0
    for each in bins:
        so_far += each.uses
        share = f"{each.uses / total:.1%}"
        table.add_row(
            _span(each.stop), f"{each.uses:,}", share, f"{so_far / total:.1%}", _bar(each.uses, most)
        )
    show(out, table)


def _print_depths(out: Console, summary: TraceSummary) -> None:
    if not summary.depths:
        return
    say(out)
    table = new_table(">tokens\nbefore", ">pages", ">found", " ")
    for each in summary.depths:
        share = each.found / each.pages if each.pages else 0.0
        table.add_row(f"{each.start:,}+", f"{each.pages:,}", f"{share:.1%}", _bar(each.found, each.pages))
    show(out, table)


def _bar(part: int, whole: int) -> str:
    return "█" * round(_BAR * part / whole) if whole else ""


def _span(seconds: float) -> str:
    """A time in the largest unit of which it has two or more."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
