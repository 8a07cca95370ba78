"""Options that several commands share, and how results leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

    from costcache.deployment import Deployment

__all__ = [
    "console",
    "deployment_of",
    "deployment_options",
    "echo_json",
    "json_option",
    "model_option",
    "split_commas",
]

F = TypeVar("F", bound=Callable[..., Any])

KV_DTYPES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")

model_option = click.option(
    "--model",
    "model_name",
    required=True,
    metavar="MODEL",
    help="A preset (see 'costcache models'), or a path to a config.json or its folder.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def deployment_options(command: F) -> F:
    """Add the options that say how the model is served."""
    for option in (
        click.option("--pp", type=int, default=1, show_default=True, help="Pipeline-parallel stages."),
        click.option(
            "--dp-attention",
            type=int,
            default=1,
            show_default=True,
            metavar="N",
            help="Data-parallel attention groups; 1 is off.",
        ),
        click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks."),
        click.option(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default="bf16",
            show_default=True,
            help="Type of the cached keys and values.",
        ),
    ):
        command = option(command)
    return command


def deployment_of(*, tp: int, dp_attention: int, pp: int, kv_dtype: str, page_size: int = 1) -> Deployment:
    """The deployment that the options describe.

    Raises:
        SettingsError: They do not fit together.
    """
    from costcache.deployment import Deployment
    from costcache.settings import read_settings

    return read_settings(
        Deployment,
        {
            "tp": tp,
            "dp_attention": dp_attention,
            "pp": pp,
            "kv_dtype": kv_dtype,
            "page_size": page_size,
        },
    )


def split_commas(values: tuple[str, ...]) -> list[str]:
    """``("a,b", "c")`` as ``["a", "b", "c"]``, each once."""
    parts = (part.strip() for value in values for part in value.split(","))
    return list(dict.fromkeys(part for part in parts if part))


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=2))


def console(*, stderr: bool = False) -> Console:
    """A console that writes to standard output, or to standard error."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)
