"""The hooks: costcache loads this module, since an entry point in ``pyproject.toml`` names it."""

from __future__ import annotations

from costcache import hookimpl
from costcache.model import ModelSpec
from costcache.policies import PolicySpec
from costcache_example.worth import Worth, WorthSettings

__all__: list[str] = []


# A policy plugin is found by name. This policy looks at the depth and size of nodes, so it sees "nodes", the
# default, and serves models without states.
@hookimpl
def policies() -> dict[str, PolicySpec]:
    """Offer ``worth``."""
    return {
        "worth": PolicySpec(
            lambda cost, _, settings: Worth(cost, settings),
            "Cheapest to recompute: FLOPs per token, times the requests that used it.",
            WorthSettings,
            sees=frozenset({"nodes"}),
        )
    }


# An architecture plugin is found by matching. This one changes a single answer for the models of one
# vendor; every hook that it leaves out keeps the core's default, bytes per token included.
@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Claim the models named ``acme-...`` (the folder of their config), ahead of mla's and mha's 10."""
    return 20 if model.name.startswith("acme-") else None


@hookimpl
def default_policy(model: ModelSpec) -> str | None:
    """Make the policy name ``costcache`` mean ``worth``, for models that it serves."""
    return None if model.has_states else "worth"
