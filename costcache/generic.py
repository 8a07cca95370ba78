"""The built-in architecture plugin: serves every readable model, hybrids included.

It claims with specificity 0, so that any plugin's claim is higher. Its hooks are also what applies
where another plugin leaves one out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from costcache import cost as costs
from costcache.cost import TokenCost
from costcache.deployment import Deployment
from costcache.hookspecs import hookimpl
from costcache.model import ModelSpec
from costcache.records import PoolState
from costcache.settings import PoolSettings

__all__ = ["DEFAULTS"]


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    return 0


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Compose the core's formula of each layer kind."""
    return costs.token_cost(model, deployment)


@hookimpl
def free_target(model: ModelSpec, pool: PoolState, settings: PoolSettings) -> float:
    """The headroom as it is set."""
    return settings.headroom


@hookimpl
def adjust_eviction_count(model: ModelSpec, pool: PoolState, requested: int, settings: PoolSettings) -> int:
    """What is requested: exact shortfall is best."""
    return requested


@hookimpl
def default_policy(model: ModelSpec) -> str | None:
    """No preference: the framework's default."""
    return None


@hookimpl
def settings_model() -> type[BaseModel] | None:
    """No settings."""
    return None


DEFAULTS: dict[str, Callable[..., Any]] = {
    "token_cost": token_cost,
    "free_target": free_target,
    "adjust_eviction_count": adjust_eviction_count,
    "default_policy": default_policy,
    "settings_model": settings_model,
}
"""What a hook of an architecture plugin answers where the plugin leaves it out."""
