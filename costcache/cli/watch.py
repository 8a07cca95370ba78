"""``costcache watch``."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costcache.cli import completing
from costcache.cli.options import Seconds, json_option
from costcache.cli.output import console, duration, echo_json, new_table, say, show
from costcache.cli.plain import Failure, plain
from costcache.eviction import USES

if TYPE_CHECKING:
    from rich.console import Console

    from costcache.monitor.events import EventFigures
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
@click.option(
    "--events",
    "sources",
    metavar="ADDRESS|FILE",
    multiple=True,
    shell_complete=completing.files,
    help="KV events that the server publishes, such as tcp://127.0.0.1:5557, or a file of --save-events; "
    "once per data-parallel rank.",
)
@click.option("--once", is_flag=True, help="Print the figures since the server's start, and end.")
@click.option(
    "--interval",
    type=Seconds(0.1),
    default=5.0,
    show_default=True,
    help="Seconds between samples; --once listens to events as long.",
)
@click.option(
    "--save",
    metavar="FILE",
    shell_complete=completing.files,
    help="Append each sample to FILE, without metrics of other programs.",
)
@click.option(
    "--save-events",
    metavar="FILE",
    shell_complete=completing.files,
    help="Append the events to FILE as they are published: with the tokens of prompts.",
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
    sources: tuple[str, ...],
    once: bool,
    interval: float,
    save: str | None,
    save_events: str | None,
    recording: str | None,
    as_json: bool,
) -> None:
    """Show what a server's cache holds, finds and evicts, and why its hit rate is low.

    It reads the metrics of SGLang or vLLM, of the last interval, and the KV events that it publishes; with
    --json, an object per interval. Of a FILE it shows the time from its first sample to its last.
    """
    from costcache.monitor.events import read_events
    from costcache.monitor.figures import figures
    from costcache.monitor.samples import NOTHING, address, load
    from costcache.monitor.subscribing import SCHEMES

    live = tuple(source for source in sources if source.startswith(SCHEMES))
    files = tuple(source for source in sources if source not in live)
    if (url and path) or not (url or path or sources):
        raise click.UsageError(
            "give --url of a server, such as http://127.0.0.1:30000, or --file, or --events"
        )
    if files and (url or live or len(files) > 1):
        raise click.UsageError("a file of --events goes with --file or alone; give one, or addresses")
    if path and live:
        raise click.UsageError("an address of --events goes with --url or alone; --file needs a file of them")
    if save_events is not None and not live:
        raise click.UsageError("--save-events is for a server that publishes: give --events its address")
    misses = _misses(recording)
    if url is None and not live:
        if save is not None:
            raise click.UsageError("--save is for a server: leave it out with --file")
        samples = list(load(path)) if path is not None else [NOTHING]
        if not samples:
            raise Failure(f"{path}: holds no sample; give a file of --save, or a page of metrics")
        events = read_events(sources[0]) if sources else None
        first = samples[0] if len(samples) > 1 else None
        _show(figures(samples[-1], first, events), misses, as_json=as_json)
        return
    if url is None and save is not None:
        raise click.UsageError("--save is for metrics: give --url")
    server = _Server(None if url is None else address(url), live, save, save_events)
    with contextlib.suppress(KeyboardInterrupt), server:
        shown = server.look(interval if once else 0.0)
        if once:
            _show(shown, misses, as_json=as_json)
        else:
            _follow(server, shown, interval, misses, as_json=as_json)


class _Server:
    """A running server: its metrics, its events, or both.

    Args:
        url: Address of its metrics; None for none.
        events: Addresses of its events.
        save: File to append samples to.
        save_events: File to append events to.
    """

    def __init__(
        self, url: str | None, events: tuple[str, ...], save: str | None, save_events: str | None
    ) -> None:
        from costcache.monitor.subscribing import Subscription

        self._url = url
        self._save = save
        self._before: Sample | None = None
        self._subscription = Subscription(events, save_events) if events else None
        self._since = time.monotonic()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._subscription is not None:
            self._subscription.close()

    def look(self, wait: float) -> Figures:
        """Figures since the last look, after ``wait`` seconds; of metrics since the server's start at first.

        Raises:
            MetricsError: The server does not answer, or with something else.
        """
        from costcache.monitor.figures import figures
        from costcache.monitor.samples import NOTHING, fetch

        if self._subscription is not None:
            self._subscription.listen(wait)
        elif self._before is not None:
            time.sleep(wait)
        sample = NOTHING
        if self._url is not None:
            sample = fetch(self._url)
            _save(sample, self._save)
        events = None
        if self._subscription is not None:
            now = time.monotonic()
            events = self._subscription.counts.take(now - self._since)
            self._since = now
        shown = figures(sample, self._before, events)
        self._before = sample
        return shown


def _follow(
    server: _Server, first: Figures, interval: float, misses: Misses | None, *, as_json: bool
) -> None:
    """Show one interval after another, until the user ends it."""
    from rich.live import Live
    from rich.text import Text

    from costcache.monitor.samples import MetricsError

    out = console()
    shown = first
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
            try:
                shown = server.look(interval)
            except MetricsError as error:  # it may be restarting
                note = f"\n{plain(str(error))}"
                continue
            note = ""


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
    if now.server or now.events is None:
        _print_metrics(out, now)
    if now.events is not None:
        if now.server:
            say(out)
        _print_events(out, now.events)
    if why:
        say(out)
        say(out, "Why the hit rate is what it is:")
    for reason in why:
        say(out, f"- {reason.text}")
        say(out, f"  {reason.fix}")


def _print_metrics(out: Console, now: Figures) -> None:
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
    if not now.pools:
        return
    say(out)
    table = new_table(
        "pool", ">evictions", ">victims", ">trimmed", ">evicted", ">short", ">clamped", ">slow", ">resets"
    )
    for pool in now.pools:
        name, *counts, _ = asdict(pool).values()
        table.add_row(name, *map(_number, counts))
    show(out, table)
    if any(pool.victims for pool in now.pools):
        say(out)
        table = new_table("victims by the requests that used them", *(f">{uses}" for uses in USES))
        for pool in now.pools:
            table.add_row(pool.name, *map(_number, pool.by_uses.values()))
        show(out, table)


def _print_events(out: Console, events: EventFigures) -> None:
    lost = f", {events.lost:,} lost" if events.lost else ""
    say(out, f"KV events, over {duration(events.seconds)}: {events.batches:,} batches{lost}")
    say(out)
    if not events.batches:
        say(out, "None was published: the server does with --kv-events-config, once it answers requests.")
        return

    def rate(tokens: int) -> str:
        return f"{tokens:,} tokens" + (f", {tokens / events.seconds:,.0f} a second" if events.seconds else "")

    again = (
        f"{_part(events.after_eviction, events.stored)} after eviction, "
        f"{_part(events.after_reset, events.stored)} after a reset"
    )
    rows = [
        ("stored", rate(events.stored)),
        ("  again", again),
        ("removed", rate(events.removed)),
        ("resets", f"{events.resets:,}"),
        ("cached", f"{events.cached:,} tokens of those, in blocks of {events.block_size:,}"),
    ]
    for name, text in rows:
        say(out, f"{name:<15} {text}")


def _part(part: int, whole: int) -> str:
    return _share(part / whole if whole else None)


def _number(value: Any) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
