"""``costcache simulate``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import Field

from costcache.cli import completing
from costcache.cli.from_models import Options, model_options
from costcache.cli.options import WINDOW_OPTIONS, command_line, json_option, model_option, split_commas
from costcache.cli.output import console, echo_json, say
from costcache.cli.progress import Task, progress_display
from costcache.cli.replaying import (
    CAPACITIES,
    pool_tokens,
    replay_options,
    with_own_settings,
)
from costcache.cli.tables import print_details, print_runs, trace_facts
from costcache.cli.tiering import TierOptions, print_tiered, tiered_json
from costcache.cli.writing import write_outputs
from costcache.errors import SettingsError
from costcache.hookspecs import PROJECT
from costcache.planning import LENGTHS
from costcache.sim.settings import ServingSettings

if TYPE_CHECKING:
    from rich.progress import Progress

    from costcache.cli.reading import TraceOptions
    from costcache.cli.replaying import ReplayOptions
    from costcache.cli.writing import Output
    from costcache.deployment import Deployment
    from costcache.report.material import Material
    from costcache.settings import Settings
    from costcache.sim.engine import Simulator
    from costcache.sim.results import Outcome, Run
    from costcache.sim.settings import TiersBelow
    from costcache.sim.sweep import Cell
    from costcache.sim.tiered import TieredRun
    from costcache.sizes import Capacity

__all__ = ["FAILED", "SimulateOptions", "simulate"]

FAILED = 3
"""Exit status after replays of which one was finished by LRU, because its policy failed."""


class SimulateOptions(Options):
    """Options of this command alone."""

    policies: tuple[str, ...] = Field(
        (PROJECT,),
        description="Policies to replay (see 'costcache plugins'); also 'optimum', which knows the future, "
        "and 'infinite', an unlimited pool.",
    )
    capacities: tuple[str, ...] = Field(
        ("5%,10%,20%",),
        description="Pool sizes to replay; bytes are those of keys and values on one rank, sliding windows "
        "included.",
    )
    round_up: bool = Field(
        False,
        description="Count and cache the partial last block of each prompt as a whole one, as some "
        "simulators do: hit rates are then of blocks.",
    )
    warmup: int = Field(0, description="Requests at the start that rates and times leave out.")
    prefill: str = Field("auto", description="Model of prefill times: auto, roofline, or a measured model.")
    always_free: bool = Field(False, description="Restore the free target after every request.")
    tree: bool = Field(
        False, description="Replay the radix tree even where a pass over pages gives the same."
    )
    jobs: int = Field(1, ge=1, description="Processes.")
    ray: bool = Field(
        False,
        description="Spread replays over a Ray cluster ($RAY_ADDRESS, else this machine); needs the extra "
        "'ray'.",
    )
    report: Path | None = Field(None, description="Write a report, one HTML page, to FILE.")
    plot: Path | None = Field(None, description="Plot the hit rates to FILE (.png, .svg, .pdf).")
    details: bool = Field(
        False,
        description="Also print all TTFT percentiles, bytes, shortfalls and the wall time per eviction. With "
        "--json, add wall times; without them, reruns print the same bytes.",
    )
    serving: bool = Field(
        False,
        description="Replay on a server with a queue, locks and reserved slots, not one request at a time.",
    )


@click.command(epilog=CAPACITIES)
@click.argument("trace_path", metavar="TRACE", shell_complete=completing.files)
@model_option
@model_options(
    SimulateOptions,
    "options",
    policies={
        "flag": "--policy",
        "metavar": "NAME[,NAME...]",
        "shell_complete": completing.replayed_policies,
    },
    capacities={"flag": "--capacity", "metavar": "SIZE[,SIZE...]"},
    report={"metavar": "FILE"},
    plot={"metavar": "FILE"},
)
@model_options(
    ServingSettings,
    "server",
    *("concurrency", "chunk", "decode_seconds", "rate", "load", "service", "clock", "outputs", "running"),
    prefix="With --serving, ",
    running={
        "help": "With --host, where running requests are: in_pool keeps their prompts, and room for their "
        "outputs, in the device's pool until they end, as servers do; beside takes --capacity for what is "
        "left for the cache."
    },
)
@model_options(
    TierOptions,
    "below",
    host={"metavar": "SIZE"},
    disk={"metavar": "SIZE"},
    link={"metavar": "RATE"},
    disk_bandwidth={"metavar": "RATE"},
)
@replay_options(*WINDOW_OPTIONS[:3])
@json_option
def simulate(
    trace_path: str,
    model_name: str,
    options: SimulateOptions,
    server: ServingSettings,
    below: TierOptions,
    replay: ReplayOptions,
    settings: Settings,
    reading: TraceOptions,
    deployment: Deployment,
    as_json: bool,
) -> None:
    """Replay TRACE under several policies and pool sizes.

    TRACE is a file of any format that 'costcache trace info' reads, or - for standard input. Prompts are
    cached in whole pages. Requests run one at a time unless --serving or --host is given. A policy that fails
    is replaced by LRU: its rows say so, and the exit status is 3.
    """
    from costcache.plugins import get_plugins
    from costcache.report.files import check_distinct, check_outputs
    from costcache.report.picture import check_picture
    from costcache.sim.engine import OFFLINE, Simulator
    from costcache.sim.traces.convert import rounded_up
    from costcache.sim.traces.summary import ideal_with_outputs
    from costcache.sizes import parse_capacity

    tiers = below.settings(
        always_free=options.always_free,
        tree=options.tree,
        ray=options.ray,
        jobs=options.jobs > 1,
        plot=options.plot is not None,
    )
    if tiers is None and server.running == "beside":
        raise SettingsError("--running is for tiers: give --host too, or leave it out")
    if below.host_price is not None and options.report is None:
        raise SettingsError("--host-price and --gpu-price are for the report: give --report too, or neither")
    if options.report or options.plot:
        check_outputs(report=options.report)
        if options.plot is not None:
            check_picture(options.plot)
    check_distinct([trace_path, reading.retime], {"--report": options.report, "--plot": options.plot})
    names = split_commas(options.policies, "--policy")
    sizes = [parse_capacity(size) for size in split_commas(options.capacities, "--capacity")]
    plugins = get_plugins()
    model = plugins.resolve(model_name)
    architecture = plugins.match(model)
    own = replay.own_settings(names, plugins.policy_name(PROJECT, architecture))
    by_policy = {name: with_own_settings(settings, name, own) for name in names}
    for name, each in by_policy.items():  # before the trace is read, which may take long
        if name not in OFFLINE:
            plugins.check_settings(each, architecture)
    trace = reading.read(trace_path)[0].in_time_order()
    if options.round_up:
        trace = rounded_up(trace)
    with progress_display() as bar:
        simulator = Simulator(
            trace,
            model,
            replay.paged(deployment, trace),
            plugins=plugins,
            prefill=options.prefill,
            warmup=options.warmup,
            state_share=replay.state_share,
            known=replay.known,
        )
        if tiers is not None:
            _tiered(simulator, list(by_policy.values()), sizes, tiers, server, below, options, bar, as_json)
            return
        cells = _cells(simulator, list(by_policy.values()), sizes, server, options)
        found = _outcomes(simulator, cells, options, bar)
    runs = [cell.figures(simulator, outcome) for cell, outcome in zip(cells, found, strict=True)]
    page_size = simulator.keys.page_size
    distinct, ideal = trace.distinct_pages(page_size), trace.ideal_hit_rate(page_size)
    with_outputs = ideal_with_outputs(trace, page_size) if options.serving and server.outputs else None
    if as_json:
        facts = {
            "rounded_up": options.round_up,
            "distinct_pages": distinct,
            "ideal_token_hit_rate": ideal,
            "ideal_with_outputs": with_outputs,
        }
        token = simulator.cost.token
        echo_json(
            {
                "trace": trace_facts(trace) | facts,
                "model": model.name,
                "deployment": simulator.cost.deployment.model_dump(mode="json"),
                "kv_bytes_per_token": token.kv_bytes,
                "swa_bytes_per_token": token.swa_bytes,
                "windows": _windows(simulator, cells),
                "settings": {"headroom": settings.headroom, "trim": settings.trim, "own": own},
                "serving": server.model_dump() if options.serving else None,
                "prefill": simulator.prefill.model_dump(),
                "warmup": options.warmup,
                "known": replay.known,
                "runs": [_as_json(run, runs, options.details) for run in runs],
            }
        )
    else:
        print_runs(simulator, distinct, ideal, with_outputs, runs)
        if options.details:
            print_details(runs)
        queued = "with" if options.serving else "without"
        say(console(), f"TTFT model: {simulator.prefill.name}, {queued} queueing")
    _write_reports(simulator, cells, found, options, reading.seed or 0, quiet=as_json)
    _end(runs)


def _cells(
    simulator: Simulator,
    policies: list[Settings],
    sizes: list[Capacity],
    server: ServingSettings,
    options: SimulateOptions,
) -> list[Cell]:
    """Every policy at every capacity."""
    from costcache.sim.sweep import Cell

    distinct = simulator.trace.distinct_pages(simulator.keys.page_size)
    return [
        Cell(
            settings=each,
            capacity=size.text,
            capacity_tokens=pool_tokens(size, simulator, distinct),
            serving=server if options.serving else None,
            always_free=options.always_free,
            tree=options.tree,
        )
        for size in sizes
        for each in policies
    ]


def _outcomes(
    simulator: Simulator, cells: list[Cell], options: SimulateOptions, bar: Progress | None
) -> list[Outcome]:
    """Replay all cells, in as many processes as the options say."""
    from costcache.sim.sweep import outcomes

    task = Task(bar, f"{len(cells)} replays", len(cells) * len(simulator.trace))

    def progress(cell: Cell, done: int) -> None:
        task.by(done, f"{cell.settings.policy} at {cell.capacity}")

    found = outcomes(simulator, cells, jobs=options.jobs, ray=options.ray, progress=progress)
    task.done()
    return found


def _tiered(
    simulator: Simulator,
    policies: list[Settings],
    sizes: list[Capacity],
    tiers: TiersBelow,
    server: ServingSettings,
    below: TierOptions,
    options: SimulateOptions,
    bar: Progress | None,
    as_json: bool,
) -> None:
    """Replay over tiers, and print the figures."""
    from costcache.sim.tiered import make_tiered_run, tiered_bound

    distinct = simulator.trace.distinct_pages(simulator.keys.page_size)
    pools: dict[str, int] = {}
    for size in sizes:
        tokens = pool_tokens(size, simulator, distinct)
        if tokens is None:
            raise SettingsError("--capacity unlimited leaves nothing for a host: give a size")
        pools[size.text] = tokens
    task = Task(bar, "replays", len(pools) * len(policies) * len(simulator.trace))
    runs = []
    for capacity, tokens in pools.items():
        for each in policies:
            outcome = simulator.tiered(each, tokens, tiers, serving=server, progress=task.by)
            runs.append(make_tiered_run(outcome, simulator, each, capacity, tokens, tiers))
    bounds = {
        capacity: tiered_bound(simulator, policies[0], tokens, tiers) for capacity, tokens in pools.items()
    }
    task.done()
    if as_json:
        echo_json(
            {
                "trace": trace_facts(simulator.trace),
                "model": simulator.cost.spec.name,
                "deployment": simulator.cost.deployment.model_dump(mode="json"),
                "kv_bytes_per_token": simulator.cost.token.kv_bytes,
                "state_bytes": simulator.cost.token.state_bytes,
                "tiers": tiers.model_dump(),
                "serving": server.model_dump(exclude={"outputs", "service", "clock", "chunk"}),
                "prefill": simulator.prefill.model_dump(),
                "warmup": simulator.warmup,
            }
            | tiered_json(runs, bounds)
        )
    else:
        print_tiered(simulator, tiers, runs, bounds)
    if options.report is not None:
        from costcache.report import gather, gather_tiers, write_report
        from costcache.sim.sweep import Cell, outcomes

        cells = [
            Cell(settings=each, capacity=capacity, capacity_tokens=tokens)
            for capacity, tokens in pools.items()
            for each in policies
        ]
        capacity, tokens = next(iter(pools.items()))
        host = gather_tiers(
            simulator,
            policies[0],
            capacity,
            tokens,
            tiers,
            serving=server,
            host_price=below.host_price,
            gpu_price=below.gpu_price,
        )
        command = command_line("report", "as_json", "details") + " --report report.html"
        material = replace(gather(simulator, cells, outcomes(simulator, cells), command=command), host=host)
        write_outputs([("report", options.report, lambda path: write_report(material, path))], quiet=as_json)
    _end(runs)


def _end(runs: Sequence[Run | TieredRun]) -> None:
    """End with status 3 if a policy failed: its rows are those of LRU from then on."""
    if any(run.fallbacks for run in runs):
        click.get_current_context().exit(FAILED)


def _windows(simulator: Simulator, cells: list[Cell]) -> dict[str, Any] | None:
    """The assumptions of the replay on sliding windows, and what they mean; None for a model without any."""
    layout = simulator.window_layout
    if layout is None:
        return None
    pools = {cell.capacity: cell.capacity_tokens for cell in cells if cell.capacity_tokens is not None}
    return {
        "layout": layout,
        "swa_full_tokens_ratio": simulator.window_ratio if layout == "own-pool" else None,
        "pools": [
            {
                "capacity": name,
                "window_tokens": simulator.window_capacity(tokens),
                "fits": [
                    {"sequence": length, "tokens": fits, "one_pool_tokens": one}
                    for length in LENGTHS
                    for fits, one in [simulator.fitting(tokens, length)]
                ],
            }
            for name, tokens in pools.items()
        ],
    }


def _write_reports(
    simulator: Simulator,
    cells: list[Cell],
    found: list[Outcome],
    options: SimulateOptions,
    seed: int,
    *,
    quiet: bool,
) -> None:
    """Write the report and the plot, which need further replays."""
    if not (options.report or options.plot):
        return
    from costcache.report import gather, write_plot, write_report

    # What changes no figure is left out, so that equal figures give equal pages.
    command = command_line("report", "plot", "as_json", "details", "jobs", "ray") + " --report report.html"

    @functools.cache
    def material() -> Material:
        with progress_display() as bar:
            task = Task(bar, "replays of the report")
            return gather(simulator, cells, found, command=command, seed=seed, progress=task.by)

    outputs: list[Output] = []
    if options.report is not None:
        outputs.append(("report", options.report, lambda path: write_report(material(), path)))
    if options.plot is not None:
        outputs.append(("plot", options.plot, lambda path: write_plot(material(), path)))
    write_outputs(outputs, quiet=quiet)


def _as_json(run: Run, runs: list[Run], timing: bool) -> dict[str, Any]:
    from costcache.sim.results import TIMING, gap_closed

    fields = asdict(run) | {"gap_closed": gap_closed(run, runs)}
    return fields if timing else {name: value for name, value in fields.items() if name not in TIMING}
