"""``costcache plan``."""

from __future__ import annotations

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
)
from costcache.cli.workload import read_assignment
from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.planning import Plan

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
@deployment_options
@json_option
def plan(
    model_name: str,
    memory: str,
    weights: str,
    page_size: int,
    headroom: float,
    assignments: tuple[str, ...],
    as_json: bool,
    **deployment: Any,
) -> None:
    """Say how many tokens a memory budget can cache, and show the arithmetic."""
    from costcache.model import ModelSpec
    from costcache.planning import plan as analyse
    from costcache.plugins import get_plugins
    from costcache.settings import Settings, read_settings
    from costcache.sizes import parse_bytes

    own = {}
    for text in assignments:
        target, value = read_assignment(text, "--set")
        where, _, field = target.partition(".")
        if where != "architecture" or not field:
            raise SettingsError(f"--set {text!r} is not architecture.FIELD=VALUE")
        own[field] = value
    result = analyse(
        get_plugins().match(ModelSpec.resolve(model_name)),
        deployment_of(page_size=page_size, **deployment),
        read_settings(Settings, {"headroom": headroom, "architecture": own}),
        memory=parse_bytes(memory, "--memory"),
        weights=parse_bytes(weights, "--weights"),
    )
    if as_json:
        echo_json(result.as_dict())
    else:
        _print(result)


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


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
