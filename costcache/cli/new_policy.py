"""``costcache new-policy``."""

from __future__ import annotations

from pathlib import Path

import click

from costcache.cli.new import write_distribution
from costcache.cli.output import console, say

__all__ = ["new_policy"]


@click.command()
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder to make; costcache-NAME by default.",
)
def new_policy(name: str, out: Path | None) -> None:
    """Write an installable distribution with a policy of 20 lines, and its tests.

    NAME is the plugin's name: lower-case words, with hyphens between them. The distribution has the plugin,
    an entry point, tests on the conformance kit, and a file for continuous integration.
    """
    written = write_distribution("policy", name, out)
    for path in written:
        say(console(), f"wrote {path}")
    folder = written[0].parent
    say(console(), f"next: pip install -e '{folder}[test]' && python -m pytest {folder}")
