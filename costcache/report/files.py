"""Checks and writes output files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from costcache.errors import SettingsError
from costcache.files import open_whole, probe

__all__ = ["check_distinct", "check_folder", "check_outputs", "write_whole"]


def check_outputs(*, report: Path | None = None, plot: Path | None = None) -> None:
    """Check before the replays that a report and a plot can be written.

    Args:
        report: File for the page; None for no page.
        plot: File for the plot; None for no plot.

    Raises:
        SettingsError: If a folder does not exist, or matplotlib, which draws the plot, is not installed.
    """
    for option, path in (("--report", report), ("--plot", plot)):
        if path is None:
            continue
        if option == "--plot" and importlib.util.find_spec("matplotlib") is None:
            raise SettingsError(
                f"{option} {path} needs matplotlib, which is not installed: pip install 'costcache[plot]'"
            )
        check_folder(option, path)


def check_folder(option: str, path: Path) -> None:
    """Check before the work that a file can be written.

    Raises:
        SettingsError: If its folder does not exist or takes no file, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise SettingsError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise SettingsError(f"{option} {path} is a folder: give the name of a file in it")
    try:
        probe(path)
    except OSError as error:
        raise SettingsError(
            f"{option} {path} cannot be written ({error.strerror or error}): give another place"
        ) from error


def check_distinct(inputs: Iterable[str | None], outputs: Mapping[str, Path | None]) -> None:
    """Check that no output overwrites an input or another output.

    Args:
        inputs: Files to read; None for none, ``-`` for standard input.
        outputs: Files to write, by option; None for none, ``-`` for standard output.

    Raises:
        SettingsError: If two are the same file.
    """
    taken = {os.path.realpath(name): "is an input" for name in inputs if name and name != "-"}
    for option, path in outputs.items():
        if path is None or str(path) == "-" or path.is_char_device():
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise SettingsError(f"{option} {path} {taken[place]}: give another name")
        taken[place] = f"is also written by {option}"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part.

    A symbolic link stays, and its target is written. A device or a pipe is written to directly.

    Raises:
        OSError: The file, which is named, cannot be written; the old one is unchanged.
    """
    try:
        with open_whole(path) as stream:
            stream.write(content)
    except OSError as error:  # name the file, not a temporary one
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
