"""``costcache plugins``."""

from __future__ import annotations

from typing import Any

import click

from costcache.cli.options import console, echo_json, json_option

__all__ = ["plugins"]


@click.command()
@json_option
def plugins(as_json: bool) -> None:
    """List plugins and policies, and what failed to load.

    Exits with 1 when a plugin failed to load.
    """
    import logging

    from costcache.plugins import get_plugins

    logging.getLogger("costcache").setLevel(logging.ERROR)  # failures are shown below, once
    found = get_plugins().describe()
    if as_json:
        echo_json(found)
    else:
        _print(found)
    if found["failures"]:
        raise click.exceptions.Exit(1)


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    architectures = Table("plugin", "hooks", "from", title="Architecture plugins", title_justify="left")
    for plugin in found["plugins"]:
        if "match_model" in plugin["hooks"]:
            architectures.add_row(plugin["name"], ", ".join(plugin["hooks"]), plugin["source"])
    out.print(architectures)
    policies = Table(
        "policy", "what goes first", "settings", "plugin", title="Policies", title_justify="left"
    )
    for policy in found["policies"]:
        policies.add_row(
            policy["name"], policy["summary"], ", ".join(policy["settings"]) or "-", policy["plugin"]
        )
    out.print(policies)
    for failure in found["failures"]:
        out.print(f"skipped: {failure['plugin']} ({failure['source']}): {failure['reason']}", markup=False)
