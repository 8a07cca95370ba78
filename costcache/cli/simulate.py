"""``costcache simulate``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from costcache.cli.options import (
    console,
    deployment_of,
    deployment_options,
    echo_json,
    json_option,
    model_option,
    new_table,
    say,
    show,
    split_commas,
)
from costcache.cli.workload import read_assignment
from costcache.errors import SettingsError

if TYPE_CHECKING:
    from rich.progress import Progress

    from costcache.sim.replay import Run
    from costcache.sim.trace import Trace

__all__ = ["simulate"]


@click.command(
    epilog="Capacities: 5% (of the trace's distinct whole pages), 14054pages, 7195648tok, 50GB, 50GiB, "
    "unlimited."
)
@click.argument("trace_path", metavar="TRACE")
@model_option
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("costcache",),
    show_default=True,
    metavar="NAME[,NAME...]",
    help="Policies to replay (see 'costcache plugins').",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    default=("5%,10%,20%",),
    show_default=True,
    metavar="SIZE[,SIZE...]",
    help="Pool sizes to replay; bytes are those of keys and values on one rank.",
)
@click.option(
    "--page-size", type=click.IntRange(min=1), help="Tokens per page.  [default: the trace's block size]"
)
@click.option(
    "--block-size", type=click.IntRange(min=1), help="Tokens per block id, where the trace does not say."
)
@click.option(
    "--headroom", type=float, default=0.0, show_default=True, help="Share of the pool to leave free."
)
@click.option(
    "--trim",
    type=click.Choice(["auto", "exact", "chunk", "off"]),
    default="auto",
    show_default=True,
    help="How the last victim is cut.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="WHERE.FIELD=VALUE",
    help="A setting of the model's plugin (architecture.floor=0.05) or of a policy "
    "(slru.protected_threshold=3); repeat for more.",
)
@deployment_options
@json_option
def simulate(
    trace_path: str,
    model_name: str,
    policies: tuple[str, ...],
    capacities: tuple[str, ...],
    page_size: int | None,
    block_size: int | None,
    headroom: float,
    trim: str,
    assignments: tuple[str, ...],
    as_json: bool,
    **deployment: Any,
) -> None:
    """Replay TRACE under many policies and capacities.

    TRACE is a file of Mooncake JSONL, plain or compressed, or - for standard input. Prompts are
    cached, in whole pages; requests come one at a time.
    """
    from costcache.model import ModelSpec
    from costcache.plugins import get_plugins
    from costcache.settings import Settings, read_settings
    from costcache.sim.replay import replay
    from costcache.sim.traces import load_trace
    from costcache.sizes import parse_capacity

    names = split_commas(policies, "--policy")
    sizes = [parse_capacity(size) for size in split_commas(capacities, "--capacity")]
    own = _settings(assignments, names)
    model = ModelSpec.resolve(model_name)
    plugins = get_plugins()
    settings = {
        name: read_settings(
            Settings,
            {
                "policy": name,
                "headroom": headroom,
                "trim": trim,
                "architecture": own.get("architecture", {}),
                "policy_settings": own.get(name, {}),
            },
        )
        for name in names
    }
    architecture = plugins.match(model)
    for name in names:  # before the trace is read, which may take long
        plugins.check_settings(settings[name], architecture)
    with _progress() as bar:
        reading = _Task(bar, f"reading {trace_path}")
        trace = load_trace(trace_path, block_size, progress=reading.to).in_time_order()
        reading.done()
        served = deployment_of(page_size=page_size or trace.block_size, **deployment)
        cost = architecture.cost(served)
        token_bytes = cost.token.kv_bytes + cost.token.swa_bytes
        distinct = trace.distinct_pages(served.page_size)
        pools = [
            (
                size.text,
                size.tokens(
                    distinct_pages=distinct,
                    page_size=served.page_size,
                    token_bytes=token_bytes,
                ),
            )
            for size in sizes
        ]
        keys = trace.page_keys(served.page_size)
        runs = []
        for text, pool in pools:
            for name in names:
                task = _Task(bar, f"{name} at {text}", len(trace))
                runs.append(
                    replay(
                        trace,
                        keys,
                        model,
                        served,
                        settings[name],
                        pool,
                        capacity=text,
                        plugins=plugins,
                        progress=task.by,
                    )
                )
                task.done()
    ideal = trace.ideal_hit_rate(served.page_size)
    if as_json:
        echo_json(
            {
                "trace": {
                    "name": trace.name,
                    "requests": len(trace),
                    "input_tokens": int(trace.input_tokens.sum()),
                    "block_size": trace.block_size,
                    "distinct_pages": distinct,
                    "ideal_token_hit_rate": ideal,
                },
                "model": model.name,
                "deployment": served.model_dump(mode="json"),
                "kv_bytes_per_token": cost.token.kv_bytes,
                "swa_bytes_per_token": cost.token.swa_bytes,
                "settings": {"headroom": headroom, "trim": trim, "own": own},
                "runs": [asdict(run) for run in runs],
            }
        )
        return
    _print(trace, model.name, served.page_size, distinct, ideal, runs)


def _settings(assignments: tuple[str, ...], policies: list[str]) -> dict[str, dict[str, Any]]:
    """``--set`` options by what they are for: ``architecture`` or the name of a policy."""
    own: dict[str, dict[str, Any]] = {}
    for text in assignments:
        target, value = read_assignment(text, "--set")
        where, dot, field = target.rpartition(".")
        if not dot or where not in ("architecture", *policies):
            raise SettingsError(
                f"--set {text!r} is for {where or target!r}: write architecture.FIELD=VALUE or "
                f"POLICY.FIELD=VALUE with one of the policies {', '.join(policies)}"
            )
        own.setdefault(where, {})[field] = value
    return own


def _print(trace: Trace, model: str, page_size: int, distinct: int, ideal: float, runs: list[Run]) -> None:
    out = console()
    say(
        out,
        f"{trace.name}: {len(trace):,} requests, {int(trace.input_tokens.sum()):,} prompt tokens; "
        f"{model}, pages of {page_size}",
    )
    say(out, f"{distinct:,} distinct whole pages; unlimited, {ideal:.2%} of the tokens hit")
    say(out)
    table = new_table(
        ">capacity",
        ">pool\ntokens",
        "policy",
        ">tokens\nhit",
        ">FLOPs\nsaved",
        ">evictions",
        ">evicted\ntokens",
        ">requests\n/s",
    )
    last = None
    for run in runs:
        if last not in (None, run.capacity):
            table.add_section()
        last = run.capacity
        table.add_row(
            run.capacity,
            "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,}",
            run.policy,
            f"{run.token_hit_rate:.2%}",
            f"{run.flops_saved_rate:.2%}",
            f"{run.evictions:,}",
            f"{run.evicted_tokens:,}",
            f"{run.requests_per_second:,.0f}",
        )
    show(out, table)
    say(out)
    meant = {r.policy: r.policy_in_force for r in runs if r.policy != r.policy_in_force and not r.fallbacks}
    for name, policy in meant.items():
        say(out, f"{name} means {policy} for {model}")
    # The same for every policy: it is a matter of lengths.
    for capacity, oversized in {r.capacity: r.oversized_requests for r in runs}.items():
        if oversized:
            say(out, f"{oversized:,} requests are longer than the pool of {capacity}: their heads are cached")
    for run in runs:
        if run.fallbacks:
            say(out, f"policy {run.policy!r} failed at {run.capacity} and was replaced by lru")
        if run.clamped:
            say(
                out,
                f"{run.clamped:,} answers of plugin {run.plugin!r} were out of bounds at {run.capacity} "
                f"({run.policy}) and were replaced",
            )


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress display on a terminal, nothing elsewhere."""
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


class _Task:
    """One line of the progress display, or nothing."""

    def __init__(self, bar: Progress | None, text: str, total: float | None = None) -> None:
        self._bar = bar
        self._id = None if bar is None else bar.add_task(text, total=total)

    def by(self, amount: int) -> None:
        """Advance."""
        if self._bar is not None and self._id is not None:
            self._bar.advance(self._id, amount)

    def to(self, done: int, total: int | None) -> None:
        """Set what is done, and the total."""
        if self._bar is not None and self._id is not None:
            self._bar.update(self._id, completed=done, total=total)

    def done(self) -> None:
        """Take the line away."""
        if self._bar is not None and self._id is not None:
            self._bar.remove_task(self._id)
