"""``costcache plugins``, and ``costcache plugins doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from costcache.cli.options import Seconds, json_option
from costcache.cli.output import console, echo_json, new_table, say, show

if TYPE_CHECKING:
    from costcache.testing.doctor import Report

__all__ = ["plugins"]


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def plugins(context: click.Context, as_json: bool) -> None:
    """List plugins and policies, and plugins that failed to load.

    Exits with status 1 if a plugin failed to load.
    """
    if context.invoked_subcommand is not None:
        return
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


@plugins.command()
@click.argument("name", required=False)
@click.option(
    "--model", metavar="MODEL", help="A preset, or the path of a config, for which claims are compared."
)
@click.option(
    "--seconds",
    type=Seconds(0),
    default=10.0,
    show_default=True,
    help="Seconds of the conformance run of each plugin; 0 for none.",
)
@click.option(
    "--limit",
    type=Seconds(1),
    default=60.0,
    show_default=True,
    help="Seconds after which a check does not end.",
)
@json_option
def doctor(name: str | None, model: str | None, seconds: float, limit: float, as_json: bool) -> None:
    """Find what is wrong with installed plugins, and say how to mend it.

    NAME is a plugin, or a policy of one; by default all are examined. Each is loaded in another process,
    alone and beside the others, and what it offers is tried by the contracts of costcache.testing.

    Exits with status 1 if anything was found.
    """
    from costcache.testing.doctor import diagnose

    report = diagnose(name, model, seconds=seconds, limit=limit)
    if as_json:
        echo_json(report.as_data())
    else:
        _print_report(report)
    if report.findings:
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
    if found["trace_formats"]:
        say(out)
        formats = new_table("trace format", "~reads", "plugin")
        for each in found["trace_formats"]:
            formats.add_row(each["name"], each["summary"], each["plugin"])
        show(out, formats)
    for failure in found["failures"]:
        say(out, f"skipped: {failure['plugin']} ({failure['source']}): {failure['reason']}")


def _print_report(report: Report) -> None:
    out = console()
    table = new_table("plugin", "from", "~distribution", "~offers", "~claims", "checks passed")
    for plugin in report.plugins:
        results = [result for checks in plugin.checks.values() for result in checks.values()]
        tried = [result for result in results if result in ("passed", "failed")]
        table.add_row(
            plugin.name,
            plugin.source,
            plugin.distribution or "-",
            ", ".join([*plugin.policies, *plugin.trace_formats, *plugin.storage]) or "-",
            ", ".join(f"{model}: {claim}" for model, claim in plugin.claims.items()) or "-",
            f"{tried.count('passed')} of {len(tried)}" if tried else "-",
        )
    show(out, table)
    left = sum(
        result == "left out"
        for each in report.plugins
        for checks in each.checks.values()
        for result in checks.values()
    )
    if left:
        say(out, f"{left} checks were left out: mend what was found, or give more --seconds")
    if report.model is not None:
        claims = ", ".join(f"{plugin} with {claim}" for plugin, claim in sorted(report.claims.items()))
        serves = report.winners[0] if len(report.winners) == 1 else "nobody, for there is a tie"
        say(out)
        say(out, f"{report.model} is claimed by {claims}, and served by {serves}")
    for finding in report.findings:
        part = f", {finding.part}" if finding.part else ""
        say(out)
        say(out, f"{finding.plugin} ({finding.source}{part}): {finding.problem}")
        say(out, f"  fix: {finding.fix}")
    say(out)
    count = len(report.findings)
    say(out, f"{count} finding{'s' if count != 1 else ''}" if count else "nothing found")
