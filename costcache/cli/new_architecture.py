"""``costcache new-architecture``."""

from __future__ import annotations

from pathlib import Path

import click

from costcache.cli.new import make_plugin, out_option

__all__ = ["new_architecture"]


@click.command()
@click.argument("name")
@out_option
def new_architecture(name: str, out: Path | None) -> None:
    """Write an installable distribution with an architecture plugin, and its tests.

    NAME is the plugin's name: lower-case words, with hyphens between them. The distribution has the plugin,
    an entry point, tests on the conformance kit, and a file for continuous integration.
    """
    make_plugin("architecture", name, out)
