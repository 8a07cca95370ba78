"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from costcache.cli.from_models import model_options
from costcache.deployment import Deployment
from costcache.errors import SettingsError

__all__ = ["deployment_options", "json_option", "model_option", "split_commas"]

F = TypeVar("F", bound=Callable[..., Any])

model_option = click.option(
    "--model",
    "model_name",
    required=True,
    metavar="MODEL",
    help="A preset (see 'costcache models'), or the path of a config.json or its folder.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def deployment_options(*fields: str) -> Callable[[F], F]:
    """Add an argument ``deployment`` with its options; ``fields`` precede those of every command."""
    dp_attention = {
        "is_flag": False,  # though the field may be a bool
        "type": int,
        "default": 1,
        "show_default": True,
        "metavar": "N",
        "help": "Data-parallel attention groups; 1 for none.",
    }
    return model_options(
        Deployment, "deployment", *fields, "kv_dtype", "tp", "dp_attention", "pp", dp_attention=dp_attention
    )


def split_commas(values: tuple[str, ...], option: str) -> list[str]:
    """Return the parts of ``("a,b", "c")`` as ``["a", "b", "c"]``, each once.

    Raises:
        SettingsError: If nothing is left.
    """
    parts = (part.strip() for value in values for part in value.split(","))
    found = list(dict.fromkeys(part for part in parts if part))
    if not found:
        raise SettingsError(f"{option} is {','.join(values)!r}: give one or more, separated by commas")
    return found
