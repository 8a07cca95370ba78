"""The command line: ``costcache COMMAND``. Each command is imported when it is used."""

from __future__ import annotations

import difflib
import importlib
import logging
from typing import Any

import click

from costcache._version import described
from costcache.cli.plain import Failure, Formatter, plain_lines, prepare_streams
from costcache.errors import CostcacheError

__all__ = ["cli", "main"]

COMMANDS = {
    "completion": "Print the script by which a shell completes commands and values.",
    "explain": "Show which classes of nodes a policy kept and evicted in a replay.",
    "models": "List the preset models and the bytes a cached token of each takes.",
    "new-architecture": "Write an installable distribution with an architecture plugin.",
    "new-policy": "Write an installable distribution with a policy.",
    "plan": "Show how many tokens a memory budget can cache.",
    "plugins": "List plugins and policies, and plugins that failed to load.",
    "record": "Record a server's requests as a trace without their tokens, and inspect recordings.",
    "simulate": "Replay a trace under several policies and pool sizes.",
    "trace": "Inspect and convert trace files.",
    "watch": "Show what a running server's cache finds and evicts, and why its hit rate is low.",
    "workload": "Generate a workload and write it as a trace.",
}
"""Summary of each command, which is defined in the module of its name."""


class _Commands(click.Group):
    """Imports a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 # click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            close = difflib.get_close_matches(cmd_name, COMMANDS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"No such command {cmd_name!r}.{hint}", ctx)
        name = cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(f"costcache.cli.{name}"), name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 # as above
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = plain_lines(error.message)  # final to a type checker
            raise
        except CostcacheError as error:
            raise Failure(str(error)) from error
        except MemoryError as error:
            raise Failure(
                "out of memory; give larger pages (--page-size) or blocks (--block-size), fewer --jobs, or a "
                "shorter trace"
            ) from error
        except BrokenPipeError:
            raise  # click exits quietly: `costcache ... | head` is not an error
        except OSError as error:  # such as a full disk behind standard output
            raise Failure(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(described(), prog_name="costcache")
def cli() -> None:
    """Decide by cost what an LLM server keeps in its prefix (KV) cache."""


def main() -> None:
    """Run the command line: the entry point of the console script."""
    prepare_streams()
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.getLogger("costcache").addHandler(handler)
    cli(prog_name="costcache")
