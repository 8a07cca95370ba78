"""``costcache plugins``."""

from __future__ import annotations

from typing import Any

import click

from costcache.cli.options import json_option
from costcache.cli.output import console, echo_json, new_table, say, show

__all__ = ["plugins"]


@click.command()
@json_option
def plugins(as_json: bool) -> None:
    """List plugins and policies, and plugins that failed to load.

    Exits with status 1 if a plugin failed to load.
    """
    import logging

    from costcache.plugins import get_plugins

    logger = logging.getLogger("costcache")
    level = logger.level
    logger.setLevel(logging.ERROR)  # failures are printed below, once
    try:
        found = get_plugins().describe()
    finally:
        logger.setLevel(level)
    if as_json:
        echo_json(found)
    else:
        _print(found)
    if found["failures"]:
        raise click.exceptions.Exit(1)


def _print(found: dict[str, Any]) -> None:
    out = console()
    architectures = new_table("architecture", "~hooks", "from")
    for plugin in found["plugins"]:
        if "match_model" in plugin["hooks"]:
            architectures.add_row(plugin["name"], ", ".join(plugin["hooks"]), plugin["source"])
    show(out, architectures)
    say(out)
    policies = new_table("policy", "~evicts first", "~sees", "~settings", "plugin")
    for policy in found["policies"]:
        settings = ", ".join(policy["settings"]) or "-"
        policies.add_row(
            policy["name"], policy["summary"], ", ".join(policy["sees"]), settings, policy["plugin"]
        )
    show(out, policies)
    for failure in found["failures"]:
        say(out, f"skipped: {failure['plugin']} ({failure['source']}): {failure['reason']}")
