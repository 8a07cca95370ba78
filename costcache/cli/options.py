"""Options that several commands share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from costcache.cli import completing
from costcache.cli.from_models import model_options
from costcache.deployment import Deployment
from costcache.errors import SettingsError

__all__ = [
    "WINDOW_OPTIONS",
    "Seconds",
    "command_line",
    "deployment_options",
    "json_option",
    "model_option",
    "split_commas",
]

F = TypeVar("F", bound=Callable[..., Any])

WINDOW_OPTIONS = ("window_layout", "swa_full_tokens_ratio", "window_chunk", "page_overhead")
"""Fields of a deployment about sliding windows."""


class Seconds(click.FloatRange):
    """Seconds that a command waits, up to a day: clocks do not take any number, and NaN is in any range."""

    def __init__(self, least: float) -> None:
        super().__init__(least, 86400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number, as click calls for."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return found


model_option = click.option(
    "--model",
    "model_name",
    required=True,
    metavar="MODEL",
    shell_complete=completing.models,
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


def command_line(*left_out: str) -> str:
    """Return the command line of the running command, from what was given on it.

    Args:
        left_out: Names of parameters to leave out.
    """
    context = click.get_current_context()
    words = ["costcache", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name in left_out or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if not isinstance(parameter, click.Option):
            words.append(str(value))
        elif parameter.is_flag:
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for each in value if parameter.multiple else (value,):
                words += [parameter.opts[0], str(each)]
    return shlex.join(words)


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
