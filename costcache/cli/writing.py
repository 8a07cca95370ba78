"""Writes a command's files, after its result is on the screen: what fails here loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import click

from costcache.cli.output import console, say
from costcache.cli.plain import Failure
from costcache.errors import CostcacheError

__all__ = ["Output", "write_outputs"]

Output: TypeAlias = "tuple[str, Path, Callable[[Path], None]]"
"""What a file is, its name, and the function that writes it."""


def write_outputs(outputs: Sequence[Output], *, quiet: bool) -> None:
    """Write files one by one, and name each that is written; one that fails does not hold up the others.

    Args:
        outputs: The files.
        quiet: Do not name the files; standard output has JSON.

    Raises:
        Exit: With status 1, if a file could not be written; the reason is on standard error.
    """
    failed = False
    for kind, path, write in outputs:
        try:
            write(path)
        except (CostcacheError, OSError, MemoryError) as error:
            failed = True
            known = isinstance(error, CostcacheError)
            Failure(str(error) if known else f"{kind} {path} is not written: {_reason(error)}").show()
        else:
            if not quiet:
                say(console(), f"{kind}: {path}")
    if failed:
        raise click.exceptions.Exit(1)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "out of memory"
