"""The command line: ``costcache COMMAND``. Commands are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

import click

from costcache._version import described
from costcache.errors import CostcacheError

__all__ = ["cli", "main"]

COMMANDS = {
    "explain": "Show what a policy kept and dropped in a replay, class by class.",
    "models": "List the preset models and what a cached token of each costs.",
    "plan": "Say how many tokens a memory budget can cache.",
    "plugins": "List plugins and policies, and what failed to load.",
    "simulate": "Replay a trace under many policies and capacities.",
    "trace": "Look at trace files, and convert them.",
    "workload": "Generate a workload and write it as a trace.",
}
"""Each command lives in the module of its name."""


class _Commands(click.Group):
    """A group that imports a command's module only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 # click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 # as above
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"costcache.cli.{cmd_name}"), cmd_name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 # as above
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CostcacheError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            raise  # click ends quietly: `costcache ... | head` is no error
        except OSError as error:  # a full disk behind standard output, say
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(described(), prog_name="costcache")
def cli() -> None:
    """Decide by cost what an LLM server keeps in its prefix (KV) cache."""


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="costcache")
