"""Runs commands as a user does."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from costcache.cli import cli


def costcache_(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], input=stdin)


def answer(*arguments: str | Path, stdin: bytes | None = None) -> str:
    """The output of a command that succeeds."""
    result = costcache_(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str | Path, stdin: bytes | None = None) -> str:
    """The one line with which wrong input ends."""
    result = costcache_(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)  # nothing was raised through the program
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip()
