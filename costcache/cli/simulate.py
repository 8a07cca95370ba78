"""``costcache simulate``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costcache.cli.options import (
    console,
    deployment_of,
    deployment_options,
    echo_json,
    json_option,
    model_option,
    say,
    split_commas,
)
from costcache.cli.progress import Task, progress_display
from costcache.cli.reading import read, trace_options
from costcache.cli.replaying import (
    CAPACITIES,
    eviction_options,
    eviction_settings,
    own_settings,
    page_size_option,
    states_option,
)
from costcache.cli.tables import print_details, print_runs
from costcache.hookspecs import PROJECT

if TYPE_CHECKING:
    from rich.progress import Progress

    from costcache.sim.engine import Simulator
    from costcache.sim.results import Outcome, Run
    from costcache.sim.sweep import Cell

__all__ = ["simulate"]

OUTPUT = click.Path(path_type=Path)


@click.command(epilog=CAPACITIES)
@click.argument("trace_path", metavar="TRACE")
@model_option
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("costcache",),
    show_default=True,
    metavar="NAME[,NAME...]",
    help="Policies to replay (see 'costcache plugins'); also optimum, which knows the future, and infinite, "
    "a pool without limit.",
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
@page_size_option
@trace_options
@eviction_options
@click.option(
    "--serving", is_flag=True, help="A server with a queue, locks and held slots, not one request at a time."
)
@click.option(
    "--concurrency", type=int, default=64, show_default=True, help="With --serving: running at once."
)
@click.option(
    "--decode-seconds", type=float, default=0.025, show_default=True, help="With --serving: per output token."
)
@click.option("--rate", type=float, default=1.0, show_default=True, help="With --serving: speed of arrivals.")
@click.option(
    "--load",
    type=click.Choice(["auto", "open", "sessions", "clients"]),
    default="auto",
    show_default=True,
    help="With --serving, what brings requests: the trace's clock; or session starts, answers and think "
    "times; or --concurrency clients, one session after the other.  auto: sessions where the trace has think "
    "times, else open.",
)
@click.option(
    "--service",
    type=click.Choice(["modelled", "recorded"]),
    default="modelled",
    show_default=True,
    help="With --serving, how long a request runs: by its tokens, or as the trace recorded it.",
)
@click.option(
    "--outputs/--no-outputs",
    default=True,
    show_default=True,
    help="With --serving: cache generated tokens, where the trace names them.",
)
@click.option("--always-free", is_flag=True, help="Restore the free target after every request.")
@click.option(
    "--round-up",
    is_flag=True,
    help="Count the partial last block of each prompt as a whole one, and cache it, as some simulators do: "
    "hit rates are then of blocks.",
)
@states_option
@click.option("--warmup", type=int, default=0, show_default=True, help="Requests that rates leave out.")
@click.option(
    "--prefill",
    default="auto",
    show_default=True,
    help="Prefill times: auto, roofline, or a measured model.",
)
@click.option("--tree", is_flag=True, help="Replay the tree also where a pass by pages gives the same.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option(
    "--ray",
    is_flag=True,
    help="Spread replays over a Ray cluster ($RAY_ADDRESS, else this machine); needs the extra 'ray'.",
)
@click.option("--report", type=OUTPUT, metavar="FILE", help="Write a report, one HTML page, to FILE.")
@click.option("--plot", type=OUTPUT, metavar="FILE", help="Draw the hit rates to FILE (.png, .svg, .pdf).")
@click.option(
    "--details",
    is_flag=True,
    help="Also print all times to first token, bytes, shortfalls and the wall time of decisions. With "
    "--json, add wall times; without them reruns give the same bytes.",
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
    arrivals: str | None,
    seed: int,
    gaps: str,
    retime: str | None,
    tokenizer: str | None,
    headroom: float,
    trim: str,
    assignments: tuple[str, ...],
    serving: bool,
    concurrency: int,
    decode_seconds: float,
    rate: float,
    load: str,
    service: str,
    outputs: bool,
    always_free: bool,
    round_up: bool,
    state_share: float | None,
    warmup: int,
    prefill: str,
    tree: bool,
    jobs: int,
    ray: bool,
    report: Path | None,
    plot: Path | None,
    details: bool,
    as_json: bool,
    **deployment: Any,
) -> None:
    """Replay TRACE under many policies and capacities.

    TRACE is a file of any format that 'costcache trace info' knows, or - for standard input. Prompts are
    cached, in whole pages; requests come one at a time, unless --serving is given.
    """
    from costcache.model import ModelSpec
    from costcache.plugins import get_plugins
    from costcache.report.files import check_distinct, check_outputs
    from costcache.settings import read_settings
    from costcache.sim.engine import OFFLINE, Simulator
    from costcache.sim.serving import ServingSettings
    from costcache.sim.sweep import Cell, outcomes
    from costcache.sim.traces.convert import rounded_up
    from costcache.sim.traces.summary import ideal_with_outputs
    from costcache.sizes import parse_capacity

    if report or plot:
        check_outputs(report=report, plot=plot)
    check_distinct([trace_path, retime], {"--report": report, "--plot": plot})
    names = split_commas(policies, "--policy")
    sizes = [parse_capacity(size) for size in split_commas(capacities, "--capacity")]
    model = ModelSpec.resolve(model_name)
    plugins = get_plugins()
    architecture = plugins.match(model)
    own = own_settings(assignments, names, plugins.policy_name(PROJECT, architecture))
    server = read_settings(
        ServingSettings,
        {
            "concurrency": concurrency,
            "decode_seconds": decode_seconds,
            "rate": rate,
            "load": load,
            "service": service,
            "outputs": outputs,
        },
    )
    settings = {name: eviction_settings(name, own, headroom, trim) for name in names}
    for name in names:  # before the trace is read, which may take long
        if name not in OFFLINE:
            plugins.check_settings(settings[name], architecture)
    how = {
        "block_size": block_size,
        "arrivals": arrivals,
        "seed": seed,
        "gaps": gaps,
        "retime": retime,
        "tokenizer": tokenizer,
    }
    trace = read(trace_path, how)[0].in_time_order()
    if round_up:
        trace = rounded_up(trace)
    with progress_display() as bar:
        served = deployment_of(page_size=page_size or trace.block_size, **deployment)
        simulator = Simulator(
            trace,
            model,
            served,
            plugins=plugins,
            prefill=prefill,
            warmup=warmup,
            state_share=state_share,
        )
        cost = simulator.cost
        distinct = trace.distinct_pages(served.page_size)
        cells = [
            Cell(
                settings=settings[name],
                capacity=size.text,
                capacity_tokens=size.tokens(
                    distinct_pages=distinct,
                    page_size=served.page_size,
                    token_bytes=cost.token.kv_bytes + cost.token.swa_bytes,
                ),
                serving=server if serving else None,
                always_free=always_free,
                tree=tree,
            )
            for size in sizes
            for name in names
        ]
        task = Task(bar, f"{len(cells)} replays", len(cells) * len(trace))

        def progress(cell: Cell, done: int) -> None:
            task.by(done, f"{cell.settings.policy} at {cell.capacity}")

        found = outcomes(simulator, cells, jobs=jobs, ray=ray, progress=progress)
        task.done()
        runs = [cell.figures(simulator, outcome) for cell, outcome in zip(cells, found, strict=True)]
        if report or plot:
            _write_reports(bar, simulator, cells, found, report, plot)
    ideal = trace.ideal_hit_rate(served.page_size)
    kept = ideal_with_outputs(trace, served.page_size) if serving and outputs else None
    if as_json:
        echo_json(
            {
                "trace": {
                    "name": trace.name,
                    "requests": len(trace),
                    "input_tokens": int(trace.input_tokens.sum()),
                    "block_size": trace.block_size,
                    "rounded_up": round_up,
                    "distinct_pages": distinct,
                    "ideal_token_hit_rate": ideal,
                    "ideal_with_outputs": kept,
                },
                "model": model.name,
                "deployment": served.model_dump(mode="json"),
                "kv_bytes_per_token": cost.token.kv_bytes,
                "swa_bytes_per_token": cost.token.swa_bytes,
                "settings": {"headroom": headroom, "trim": trim, "own": own},
                "serving": server.model_dump() if serving else None,
                "prefill": simulator.prefill.model_dump(),
                "warmup": warmup,
                "runs": [_as_json(run, runs, details) for run in runs],
            }
        )
        return
    print_runs(trace, model.name, served.page_size, distinct, ideal, kept, runs)
    if details:
        print_details(runs)
    say(
        console(), f"TTFT by {simulator.prefill.name}{', queue included' if serving else ', without a queue'}"
    )
    for kind, path in (("report", report), ("plot", plot)):
        if path is not None:
            say(console(), f"{kind}: {path}")


def _write_reports(
    bar: Progress | None,
    simulator: Simulator,
    cells: list[Cell],
    found: list[Outcome],
    report: Path | None,
    plot: Path | None,
) -> None:
    from costcache.report import gather, write_plot, write_report

    task = Task(bar, "replays of the report")
    material = gather(simulator, cells, found, progress=task.by)
    task.done()
    if report is not None:
        write_report(material, report)
    if plot is not None:
        write_plot(material, plot)


def _as_json(run: Run, runs: list[Run], timing: bool) -> dict[str, Any]:
    from costcache.sim.results import TIMING, gap_closed

    fields = asdict(run) | {"gap_closed": gap_closed(run, runs)}
    return fields if timing else {name: value for name, value in fields.items() if name not in TIMING}
