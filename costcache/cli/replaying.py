"""Options that say what is replayed, shared by the commands that replay a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from costcache.cli.workload import read_assignment
from costcache.errors import SettingsError
from costcache.hookspecs import PROJECT

if TYPE_CHECKING:
    from costcache.settings import Settings

__all__ = [
    "CAPACITIES",
    "eviction_options",
    "eviction_settings",
    "own_settings",
    "page_size_option",
    "states_option",
]

F = TypeVar("F", bound=Callable[..., Any])

CAPACITIES = (
    "Capacities: 5% (of the trace's distinct whole pages), 14054pages, 7195648tok, 50GB, 50GiB, "
    "80GiB-16GiB (a GPU's memory less its weights), unlimited."
)

page_size_option = click.option(
    "--page-size", type=click.IntRange(min=1), help="Tokens per page.  [default: the trace's block size]"
)


def _share(_: click.Context, option: click.Parameter, ratio: float) -> float | None:
    """The share of the memory that is for states; None for one pool."""
    if ratio == 0.0:
        return None
    share = ratio / (1 + ratio)
    if not share < 1.0:
        raise click.BadParameter(
            f"{ratio} leaves nothing for KV; give 0, or a ratio such as 0.9", param=option
        )
    return share


states_option = click.option(
    "--mamba-full-memory-ratio",
    "state_share",
    callback=_share,
    type=click.FloatRange(min=0.0),
    default=0.9,
    show_default=True,
    help="Models with states: memory for states over memory for KV, as SGLang's option of that name; 0 for "
    "one pool that both share.",
)


def eviction_options(command: F) -> F:
    """Add the options that say how a pool is evicted from."""
    for option in (
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="WHERE.FIELD=VALUE",
            help="A setting of the model's plugin (architecture.floor=0.05) or of a policy "
            "(slru.protected_threshold=3); repeat for more.",
        ),
        click.option(
            "--trim",
            type=click.Choice(["auto", "exact", "chunk", "off"]),
            default="auto",
            show_default=True,
            help="How the last victim is cut.",
        ),
        click.option(
            "--headroom", type=float, default=0.0, show_default=True, help="Share of the pool to leave free."
        ),
    ):
        command = option(command)
    return command


def own_settings(
    assignments: tuple[str, ...], policies: Sequence[str], default: str
) -> dict[str, dict[str, Any]]:
    """``--set`` options by what they are for: ``architecture`` or the name of a policy.

    Args:
        assignments: The options.
        policies: The policies that are replayed, as they were named.
        default: What ``costcache`` means: a setting of that policy is one of ``costcache`` where it is not
            replayed under its own name too.

    Raises:
        SettingsError: One is for neither.
    """
    targets = {name: name for name in ("architecture", *policies)}
    if PROJECT in policies:
        targets.setdefault(default, PROJECT)
    own: dict[str, dict[str, Any]] = {}
    for text in assignments:
        target, value = read_assignment(text, "--set", "WHERE.FIELD=VALUE")
        where, dot, field = target.rpartition(".")
        if not dot or where not in targets:
            raise SettingsError(
                f"--set {text!r} is for {where or target!r}: write architecture.FIELD=VALUE or "
                f"POLICY.FIELD=VALUE with one of the policies {', '.join(policies)}"
            )
        own.setdefault(targets[where], {})[field] = value
    return own


def eviction_settings(policy: str, own: dict[str, dict[str, Any]], headroom: float, trim: str) -> Settings:
    """The settings of one policy, of the options and what :func:`own_settings` gave."""
    from costcache.settings import Settings, read_settings

    return read_settings(
        Settings,
        {
            "policy": policy,
            "headroom": headroom,
            "trim": trim,
            "architecture": own.get("architecture", {}),
            "policy_settings": own.get(policy, {}),
        },
    )
