"""``costcache plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from costcache.cli.options import (
    console,
    deployment_of,
    deployment_options,
    echo_json,
    json_option,
    model_option,
    say,
)
from costcache.cli.progress import Task, progress_display
from costcache.cli.reading import read, trace_options
from costcache.cli.workload import read_assignment
from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.planning import Plan
    from costcache.sim.ratio import RatioFit

__all__ = ["plan"]


@click.command()
@model_option
@click.option(
    "--memory", required=True, metavar="SIZE", help="Accelerator memory of one rank, such as 80GiB."
)
@click.option(
    "--weights",
    default="0B",
    show_default=True,
    metavar="SIZE",
    help="What of it is not for the cache on one rank: weights, activations, graphs.",
)
@click.option(
    "--page-size", type=click.IntRange(min=1), default=1, show_default=True, help="Tokens per page."
)
@click.option(
    "--headroom", type=float, default=0.0, show_default=True, help="Share of the pool to leave free."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="architecture.FIELD=VALUE",
    help="A setting of the model's plugin, such as architecture.floor=0.05; repeat for more.",
)
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    help="Hybrid models: replay this trace, for the --mamba-full-memory-ratio that fits it.",
)
@click.option(
    "--policy",
    default="lru",
    show_default=True,
    metavar="NAME",
    help="With --trace: the eviction policy of the server.",
)
@trace_options
@deployment_options
@json_option
def plan(
    model_name: str,
    memory: str,
    weights: str,
    page_size: int,
    headroom: float,
    assignments: tuple[str, ...],
    trace_path: str | None,
    policy: str,
    tokenizer: str | None,
    retime: str | None,
    gaps: str,
    seed: int,
    arrivals: str | None,
    block_size: int | None,
    as_json: bool,
    **deployment: Any,
) -> None:
    """Say how many tokens a memory budget can cache, and show the arithmetic.

    With a trace, also how a hybrid model's memory is best divided between states and KV.
    """
    from costcache.model import ModelSpec
    from costcache.planning import plan as analyse
    from costcache.plugins import get_plugins
    from costcache.settings import Settings, read_settings
    from costcache.sizes import parse_bytes

    reading = {
        "tokenizer": tokenizer,
        "retime": retime,
        "gaps": gaps,
        "seed": seed,
        "arrivals": arrivals,
        "block_size": block_size,
    }
    if trace_path is None:
        _refuse_without_trace(("policy", *reading))
    own = {}
    for text in assignments:
        target, value = read_assignment(text, "--set", "architecture.FIELD=VALUE")
        where, _, field = target.partition(".")
        if where != "architecture" or not field:
            raise SettingsError(f"--set {text!r} is not architecture.FIELD=VALUE")
        own[field] = value
    model, served = ModelSpec.resolve(model_name), deployment_of(page_size=page_size, **deployment)
    result = analyse(
        get_plugins().match(model),
        served,
        read_settings(Settings, {"headroom": headroom, "architecture": own}),
        memory=parse_bytes(memory, "--memory"),
        weights=parse_bytes(weights, "--weights"),
    )
    fit = None
    if trace_path is not None:
        from costcache.sim.ratio import RATIOS, fit_ratio

        if not model.has_states:
            raise SettingsError(f"--trace is for hybrid models, and {model.name!r} keeps no states")
        trace, _ = read(trace_path, reading)
        with progress_display() as bar:
            task = Task(bar, "replaying", len(trace) * (len(RATIOS) + 1))
            fit = fit_ratio(trace, model, served, result.budget, policy=policy, progress=task.by)
    if as_json:
        echo_json(result.as_dict() | ({} if fit is None else {"ratios": fit.as_dict()}))
    else:
        _print(result)
        if fit is not None:
            _print_fit(fit)


def _refuse_without_trace(names: tuple[str, ...]) -> None:
    """What is said of a trace must not be passed over where there is none."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{option} is of a replay: give --trace FILE, or leave it out")


def _print(result: Plan) -> None:
    out, cost, served = console(), result.cost, result.deployment

    def line(text: str = "") -> None:
        say(out, text)

    alone = ", if no state is kept" if result.states is not None else ""
    line(
        f"{result.model} (plugin {result.plugin}), {served.kv_dtype}, tp {served.tp}, "
        f"attention over {served.attention_tp} rank(s), pp {served.pp}, pages of {served.page_size}; "
        "all figures of one rank"
    )
    line()
    line(f"budget    {result.memory:,} - {result.weights:,} = {result.budget:,} B ({_gib(result.budget)})")
    for term in cost.terms:
        each = "state" if term.pool == "state" else "token"
        line(
            f"{term.pool:<9} {term.layers} layers x ({term.formula}) = {term.bytes:,} B per {each}, "
            f"{term.label}"
        )
    if result.tokens is not None:
        line(f"cacheable {result.budget:,} / {result.token_bytes:,} = {result.tokens:,} tokens{alone}")
    if result.decompressed_tokens is not None:
        line(
            f"          {result.budget:,} / {result.decompressed_token_bytes:,} = "
            f"{result.decompressed_tokens:,} tokens if keys and values were kept decompressed"
        )
        line(f"          compression ratio {cost.compression_ratio:.1f} (values of the whole model)")
    if result.states is not None:
        line(
            f"states    {result.budget:,} / {cost.state_bytes:,} = {result.states:,} states, "
            "if no token is kept"
        )
    if result.state_tokens is not None:
        line(f"          one state holds as much memory as {result.state_tokens:,} tokens")
    if not result.free_targets:
        return
    line()
    line("free target: what an eviction leaves free beyond its shortfall; free space caches nothing")
    for target in result.free_targets:
        line(f"  {target.label:<36} {target.share:7.2%}  {target.tokens:>12,} tokens")


def _print_fit(fit: RatioFit) -> None:
    out = console()
    say(out, "")
    say(
        out,
        f"--mamba-full-memory-ratio: {fit.requests:,} requests replayed under {fit.policy!r}, states at "
        f"multiples of {fit.page_size} tokens",
    )
    say(out, f"  {'ratio':>9} {'states':>9} {'tokens':>12}  tokens found")
    for run in fit.runs:
        best = "  <- best" if run is fit.best else ""
        say(out, f"  {run.ratio:>9g} {run.states:>9,} {run.tokens:>12,} {run.token_hit_rate:>13.2%}{best}")
    say(out, f"  {'one pool':>9} {'':>9} {'':>12} {fit.shared.token_hit_rate:>13.2%}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
