"""Completes values in the shell: files, and names of policies, models and workloads."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from costcache.hookspecs import PROJECT

__all__ = ["files", "models", "policies", "replayed_policies", "workloads"]


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files: the shell's own completion."""
    return [CompletionItem(incomplete, type="file")]


def models(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Presets, and files where no preset begins so."""
    from costcache.model.presets import PRESETS

    # The file first: bash clears what came before it.
    return [CompletionItem(incomplete, type="file"), *_beginning(PRESETS, incomplete.lower())]


def policies(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Policies of the installed plugins."""
    return _beginning([PROJECT, *_policy_names()], incomplete)


def replayed_policies(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same and the simulator's own, in a list with commas."""
    from costcache.sim.engine import OFFLINE

    before, comma, last = incomplete.rpartition(",")
    given = set(before.split(","))
    names = (name for name in (PROJECT, *_policy_names(), *OFFLINE) if name not in given)
    return [CompletionItem(f"{before}{comma}{name}") for name in names if name.startswith(last)]


def workloads(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Workloads that can be generated."""
    from costcache.sim.workloads import WORKLOADS

    return _beginning(WORKLOADS, incomplete)


def _policy_names() -> list[str]:
    """Names of the policies; a plugin that fails to load is no news for a shell."""
    import logging

    from costcache.plugins import get_plugins

    logging.disable()
    try:
        return [policy["name"] for policy in get_plugins().describe()["policies"]]
    finally:
        logging.disable(logging.NOTSET)


def _beginning(names: Iterable[str], start: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(start)]
