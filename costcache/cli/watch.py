"""``costcache watch``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costcache.cli import completing
from costcache.cli.options import Seconds, json_option
from costcache.cli.output import console, duration, echo_json, new_table, say, show
from costcache.cli.plain import Failure, plain

if TYPE_CHECKING:
    from rich.console import Console

    from costcache.monitor.figures import Figures
    from costcache.monitor.reasons import Reason
    from costcache.monitor.samples import Sample
    from costcache.sim.recordings.misses import Misses

__all__ = ["watch"]


@click.command()
@click.option("--url", metavar="URL", help="Address of the server, or of its metrics.")
@click.option(
    "--file",
    "path",
    metavar="FILE",
    shell_complete=completing.files,
    help="In place of a server: samples that --save wrote, or a page of metrics.",
)
@click.option("--once", is_flag=True, help="Print the figures since the server's start, and end.")
@click.option(
    "--interval",
    type=Seconds(0.1),
    default=5.0,
    show_default=True,
    help="Seconds between samples.",
)
@click.option(
    "--save",
    metavar="FILE",
    shell_complete=completing.files,
    help="Append each sample to FILE, without metrics of other programs.",
)
@click.option(
    "--recording",
    metavar="PATH",
    shell_complete=completing.files,
    help="A recording of the same server, a file or folder: says why tokens were not found, token by token.",
)
@json_option
def watch(
    url: str | None,
    path: str | None,
    once: bool,
    interval: float,
    save: str | None,
    recording: str | None,
    as_json: bool,
) -> None:
    """Show what a server's cache holds, finds and evicts, and why its hit rate is low.

    It reads the metrics of SGLang or vLLM, of the last interval; with --json, an object per interval. Of a
    FILE it shows the time from its first sample to its last.
    """
    from costcache.monitor.figures import figures
    from costcache.monitor.samples import address, fetch, load

    if (url is None) == (path is None):
        raise click.UsageError("give --url of a server, such as http://127.0.0.1:30000, or --file")
    misses = _misses(recording)
    if path is not None:
        if save is not None:
            raise click.UsageError("--save is for a server: leave it out with --file")
        samples = list(load(path))
        if not samples:
            raise Failure(f"{path}: holds no sample; give a file of --save, or a page of metrics")
        _show(figures(samples[-1], samples[0] if len(samples) > 1 else None), misses, as_json=as_json)
        return
    where = address(str(url))
    sample = fetch(where)
    _save(sample, save)
    if once:
        _show(figures(sample), misses, as_json=as_json)
        return
    try:
        _follow(where, sample, interval, save, misses, as_json=as_json)
    except KeyboardInterrupt:
        return


def _follow(
    url: str, first: Sample, interval: float, save: str | None, misses: Misses | None, *, as_json: bool
) -> None:
    """Show one interval after another, until the user ends it."""
    import contextlib

    from rich.live import Live
    from rich.text import Text

    from costcache.monitor.figures import figures
    from costcache.monitor.samples import MetricsError, fetch

    out = console()
    before, shown = first, figures(first)
    live = Live(console=out, auto_refresh=False) if out.is_terminal and not as_json else None
    with live or contextlib.nullcontext():
        note = ""
        while True:
            if live is not None:
                live.update(Text.from_ansi(_text(shown, misses, out.width) + note), refresh=True)
            elif not note:
                _show(shown, misses, as_json=as_json)
            else:
                click.echo(note.strip(), err=True)
            time.sleep(interval)
            try:
                sample = fetch(url)
            except MetricsError as error:  # it may be restarting
                note = f"\n{plain(str(error))}"
                continue
            note = ""
            _save(sample, save)
            before, shown = sample, figures(sample, before)


def _misses(recording: str | None) -> Misses | None:
    if recording is None:
        return None
    from costcache.sim.recordings.joining import read_recordings
    from costcache.sim.recordings.misses import find_misses

    return find_misses(read_recordings([recording])[0])


def _save(sample: Sample, path: str | None) -> None:
    if path is None:
        return
    from costcache.monitor.samples import saved

    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(saved(sample))
    except OSError as error:
        raise Failure(f"--save {path}: cannot be written ({error.strerror}); check the path") from error


def _show(now: Figures, misses: Misses | None, *, as_json: bool) -> None:
    from costcache.monitor.reasons import reasons

    if as_json:
        why = [asdict(reason) for reason in reasons(now, misses)]
        echo_json({**asdict(now), "hit_rate": now.hit_rate, "reasons": why})
    else:
        _print(console(), now, reasons(now, misses))


def _text(now: Figures, misses: Misses | None, width: int) -> str:
    """The same as text, for a display that is replaced."""
    from costcache.monitor.reasons import reasons

    out = console()
    out.width = width
    with out.capture() as captured:
        _print(out, now, reasons(now, misses))
    return captured.get()


def _print(out: Console, now: Figures, why: list[Reason]) -> None:
    span = "since the server's start" if now.seconds is None else f"over {duration(now.seconds)}"
    say(out, f"{now.server or 'server'}, {span}")
    say(out)
    in_force = {None: "", True: ", LRU chooses", False: ""}[now.lru]
    rows: list[tuple[str, str]] = [
        ("policy", f"{now.policy}{in_force}" if now.policy else "none of costcache"),
        ("pool", f"{_number(now.capacity)} tokens in pages of {_number(now.page_size)}"),
        ("occupancy", f"{_share(now.occupied)}, {_share(now.used)} by running requests"),
        (
            "requests",
            f"{_number(now.requests)} ended, {_number(now.running)} run, {_number(now.waiting)} wait",
        ),
        ("prompt tokens", _number(now.prompt_tokens)),
        ("hit rate", f"{_share(now.hit_rate)}, {_number(now.found_tokens)} tokens"),
    ]
    if now.lower_tokens:
        rows.append(("  lower tiers", f"{_number(now.lower_tokens)} tokens of these"))
    if now.gained is not None:
        rows += [
            ("against LRU", f"{_number(now.gained)} tokens gained, {_number(now.lost)} lost (regret)"),
            ("LRU stepped in", f"{_number(now.step_ins)} times{', and is in force' if now.in_force else ''}"),
        ]
    for name, text in rows:
        say(out, f"{name:<15} {text}")
    if now.pools:
        say(out)
        table = new_table(
            "pool", ">evictions", ">victims", ">trimmed", ">evicted", ">short", ">clamped", ">slow"
        )
        for pool in now.pools:
            name, *counts = asdict(pool).values()
            table.add_row(name, *map(_number, counts))
        show(out, table)
    if why:
        say(out)
        say(out, "Why the hit rate is what it is:")
    for reason in why:
        say(out, f"- {reason.text}")
        say(out, f"  {reason.fix}")


def _number(value: Any) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
