"""``costcache plan``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from pydantic import Field

from costcache.cli import completing
from costcache.cli.from_models import Options, model_options
from costcache.cli.options import WINDOW_OPTIONS, deployment_options, json_option, model_option
from costcache.cli.output import console, echo_json, say
from costcache.cli.progress import Task, progress_display
from costcache.cli.reading import TraceOptions, trace_options
from costcache.cli.workload import read_assignment
from costcache.deployment import SWA_RATIO, Deployment
from costcache.errors import SettingsError
from costcache.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costcache.model import ModelSpec
    from costcache.planning import Plan
    from costcache.sim.ratio import RatioFit

__all__ = ["PlanOptions", "plan"]


class PlanOptions(Options):
    """Options of this command alone."""

    memory: str = Field(description="Accelerator memory of one rank, such as 80GiB.")
    weights: str = Field(
        "0B", description="Memory of one rank that is not for the cache: weights, activations, graphs."
    )
    sequence: int = Field(
        65_536,
        ge=1,
        description="Sliding windows: tokens of each sequence, which caches its last window and no more.",
    )
    assignments: tuple[str, ...] = Field(
        (),
        description="A setting of the model's plugin, such as architecture.floor=0.05; repeat for more.",
    )
    trace: str | None = Field(
        None,
        description="Hybrid models: replay this trace to find the best --mamba-full-memory-ratio for it.",
    )
    policy: str = Field("lru", description="With --trace: eviction policy of the server.")


@click.command()
@model_option
@model_options(
    PlanOptions,
    "options",
    memory={"metavar": "SIZE"},
    weights={"metavar": "SIZE"},
    assignments={"flag": "--set", "metavar": "architecture.FIELD=VALUE"},
    trace={"metavar": "FILE", "shell_complete": completing.files},
    policy={"metavar": "NAME", "shell_complete": completing.policies},
)
@model_options(Settings, "settings", "headroom")
@trace_options
@deployment_options(
    "page_size",
    "index_dtype",
    "state_dtype",
    "conv_dtype",
    "draft_layers",
    "decode_context_parallel",
    *WINDOW_OPTIONS,
)
@json_option
def plan(
    model_name: str,
    options: PlanOptions,
    settings: Settings,
    reading: TraceOptions,
    deployment: Deployment,
    as_json: bool,
) -> None:
    """Show how many tokens a memory budget can cache, with the arithmetic.

    With a trace, also find how a hybrid model's memory is best divided between states and KV.
    """
    from costcache.planning import plan as analyse
    from costcache.plugins import get_plugins
    from costcache.sizes import parse_bytes

    if options.trace is None:
        _refuse_without_trace("policy", *TraceOptions.model_fields)
    own = {}
    for text in options.assignments:
        target, value = read_assignment(text, "--set", "architecture.FIELD=VALUE")
        where, _, field = target.partition(".")
        if where != "architecture" or not field:
            raise SettingsError(f"--set {text!r} is not architecture.FIELD=VALUE")
        own[field] = value
    plugins = get_plugins()
    model = plugins.resolve(model_name)
    result = analyse(
        plugins.match(model),
        deployment,
        settings.model_copy(update={"architecture": own}),
        memory=parse_bytes(options.memory, "--memory"),
        weights=parse_bytes(options.weights, "--weights"),
        sequence=options.sequence,
    )
    fit = None
    if options.trace is not None:
        from costcache.sim.ratio import RATIOS, fit_ratio

        if not model.has_states:
            raise SettingsError(f"--trace is for hybrid models, and {model.name!r} has no states")
        trace, _ = reading.read(options.trace)
        with progress_display() as bar:
            task = Task(bar, "replaying", len(trace) * (len(RATIOS) + 1))
            fit = fit_ratio(trace, model, deployment, result.budget, policy=options.policy, progress=task.by)
    if as_json:
        echo_json(result.as_dict() | ({} if fit is None else {"ratios": fit.as_dict()}))
    else:
        _print(result, model)
        if fit is not None:
            _print_fit(fit)


def _refuse_without_trace(*names: str) -> None:
    """Refuse options of a replay without one, rather than ignore them."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{option} applies to a replay: give --trace FILE, or leave it out")


def _assumed(result: Plan, model: ModelSpec) -> Iterator[str]:
    """The assumptions of the figures, where a server may do otherwise."""
    served = result.deployment
    if model.kv_dtype is not None:
        other = (
            ""
            if served.kv_dtype == model.kv_dtype
            else f"; the checkpoint's quantisation says {model.kv_dtype}"
        )
        yield f"KV cache in {served.kv_dtype}{other or ', as the checkpoint asks for'}"
    indexed = [x for x in model.layers if getattr(x, "index_head_dim", None) is not None]
    if indexed:
        yield f"index keys in {served.index_dtype or _usual_index(indexed, served)}"
    if model.has_states:
        kept = {served.state_dtype or layer.state_dtype for layer in model.state_layers if layer.heads}
        convolved = {served.conv_dtype or layer.conv_dtype for layer in model.state_layers if layer.conv_dim}
        parts = [("recurrent states", kept), ("convolution states", convolved)]
        yield ", ".join(f"{what} in {' and '.join(sorted(dtypes))}" for what, dtypes in parts if dtypes)
    if served.draft_layers or model.draft_layers:
        yield f"{served.draft_layers} draft layer(s) counted; the checkpoint has {model.draft_layers}"
    ways = served.decode_context_parallel
    if ways > 1:
        yield f"{ways} ranks share out the tokens of the context"
    elif any(getattr(x, "kv_heads", 1) < served.attention_tp for x in model.attention_layers):
        yield "ranks with the same KV heads have the same tokens (no decode context parallelism)"
    if result.cost.swa_bytes:
        where = "in one pool with the rest: every layer caches every token"
        if result.ratio is not None:
            where = (
                f"in a pool of their own, {result.ratio:g} tokens per token of the full pool; sequences of "
                f"{result.sequence:,} tokens"
            )
        elif result.layout != "one-pool":
            pool = (
                "shared pages"
                if result.layout == "shared-pages"
                else "a pool of their own, of the right size"
            )
            where = f"in {pool}: each sequence of {result.sequence:,} tokens caches its last window"
        yield f"windows {where}"
        if result.layout != "one-pool" and (served.window_chunk or served.page_overhead):
            yield (
                f"each sequence also takes window KV of {served.window_chunk:,} tokens in computation and "
                f"{served.page_overhead} page(s) of {served.page_size}"
            )


def _usual_index(indexed: list[Any], served: Deployment) -> str:
    """The dtype in which servers keep index keys, if none is asked for."""
    if indexed[0].kind != "full_attention":
        return "fp8 with scales"
    return "bf16" if indexed[0].index_pool > 1 else f"{served.kv_dtype}, as the KV"


def _print(result: Plan, model: ModelSpec) -> None:
    line, cost, served = functools.partial(say, console()), result.cost, result.deployment

    alone = ", if no states are cached" if result.states is not None else ""
    line(
        f"{result.model} (plugin {result.plugin}), {served.kv_dtype}, tp {served.tp}, "
        f"attention over {served.attention_tp} rank(s), pp {served.pp}, pages of {served.page_size}; "
        "all figures per rank"
    )
    for assumption in _assumed(result, model):
        line(f"assumed   {assumption}")
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
            f"{result.decompressed_tokens:,} tokens if keys and values were cached decompressed"
        )
        line(f"          compression ratio {cost.compression_ratio:.1f} (over the whole model)")
    if result.lengths:
        line()
        line(
            f"{'sequences':>17}  {'windows apart':>15}  {'at ratio':>9}  {'two pools':>15}  {'one pool':>15}"
        )
    for length in result.lengths:
        line(
            f"{length.sequence:>10,} tokens  {length.tokens:>15,}  {length.ratio:>9.3f}  "
            f"{length.split_tokens:>15,}  {length.one_pool_tokens:>15,}"
        )
    if result.lengths:
        line(
            "windows apart: in shared pages, or in a pool that is that ratio of the full one; two pools: "
            f"at a ratio of {result.ratio or SWA_RATIO:g}"
        )
    if result.states is not None:
        line(
            f"states    {result.budget:,} / {cost.state_bytes:,} = {result.states:,} states, "
            "if no tokens are cached"
        )
    if result.state_tokens is not None:
        line(f"          one state takes as much memory as {result.state_tokens:,} tokens")
    if not result.free_targets:
        return
    line()
    line("free target: what an eviction leaves free beyond its shortfall; free space caches nothing")
    for target in result.free_targets:
        line(f"  {target.label:<36} {target.share:7.2%}  {target.tokens:>12,} tokens")


def _print_fit(fit: RatioFit) -> None:
    out = console()
    say(out)
    say(
        out,
        f"--mamba-full-memory-ratio: {fit.requests:,} requests replayed under {fit.policy!r}, states at "
        f"multiples of {fit.page_size} tokens",
    )
    say(out, f"  {'ratio':>9} {'states':>9} {'tokens':>12}  tokens hit")
    for run in fit.runs:
        best = "  <- best" if run is fit.best else ""
        say(out, f"  {run.ratio:>9g} {run.states:>9,} {run.tokens:>12,} {run.token_hit_rate:>11.2%}{best}")
    say(out, f"  {'one pool':>9} {'':>9} {'':>12} {fit.shared.token_hit_rate:>11.2%}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
