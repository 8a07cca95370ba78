"""``costcache models``."""

from __future__ import annotations

from typing import Any

import click

from costcache.cli.options import deployment_options, json_option
from costcache.cli.output import console, echo_json, new_table, say, show
from costcache.deployment import Deployment
from costcache.errors import SettingsError

__all__ = ["models"]


@click.command()
@deployment_options()
@json_option
def models(deployment: Deployment, as_json: bool) -> None:
    """List the preset models and the bytes that a cached token of each takes on one rank."""
    from costcache.model import ModelSpec
    from costcache.plugins import get_plugins

    plugins = get_plugins()
    rows: list[dict[str, Any]] = []
    for name in ModelSpec.presets():
        spec = ModelSpec.preset(name)
        architecture = plugins.match(spec)
        row: dict[str, Any] = {
            "name": name,
            "architecture": spec.architecture,
            "plugin": architecture.name,
            "layers": spec.num_layers,
            "active_params": spec.active_params,
        }
        try:
            cost = architecture.cost(deployment)
        except SettingsError as error:
            rows.append({**row, "error": str(error)})
            continue
        rows.append(
            {
                **row,
                "kv_bytes_per_token": cost.token.kv_bytes,
                "swa_bytes_per_token": cost.token.swa_bytes,
                "state_bytes": cost.token.state_bytes,
                "compression_ratio": cost.token.compression_ratio,
                "crossover_tokens": cost.crossover_tokens,
            }
        )
    if as_json:
        echo_json({"deployment": deployment.model_dump(mode="json"), "models": rows})
        return
    out = console()
    ranks = f", attention over {deployment.attention_tp} of them" if deployment.attention_dp > 1 else ""
    say(
        out, f"{deployment.kv_dtype or 'bf16'}, tp {deployment.tp}{ranks}, pp {deployment.pp}; bytes per rank"
    )
    say(out)
    table = new_table(
        "model",
        "plugin",
        ">layers",
        ">active\nparams",
        ">KV bytes\n/token",
        ">state\nbytes",
        ">ratio",
        ">L*\ntokens",
    )
    for row in rows:
        if "error" in row:
            continue
        table.add_row(
            row["name"],
            row["plugin"],
            str(row["layers"]),
            f"{row['active_params'] / 1e9:.1f}B",
            f"{row['kv_bytes_per_token']:,}",
            f"{row['state_bytes']:,}" if row["state_bytes"] else "-",
            f"{row['compression_ratio']:.1f}",
            f"{row['crossover_tokens']:,.0f}",
        )
    show(out, table)
    say(out)
    say(
        out,
        "ratio: decompressed over latent values; L*: depth where attention costs a token as much as the rest",
    )
    for row in rows:
        if "error" in row:
            say(out, f"{row['name']}: {row['error']}")
