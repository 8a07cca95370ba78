"""``costcache completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

_WHERE = {
    "bash": "~/.local/share/bash-completion/completions/costcache",
    "zsh": "a file _costcache in a folder of $fpath",
    "fish": "~/.config/fish/completions/costcache.fish",
}


@click.command(epilog="; ".join(f"{shell}: {where}" for shell, where in _WHERE.items()))
@click.argument("shell", type=click.Choice(list(_WHERE)))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and their values.

    For this shell alone, evaluate it: eval "$(costcache completion bash)". For all, write it to the place
    that is named below.
    """
    from costcache.cli import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click completes no {shell}")
    click.echo(kind(cli, {}, "costcache", "_COSTCACHE_COMPLETE").source())
