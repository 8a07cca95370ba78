"""The built-in architecture plugin: serves every readable model, hybrids included.

It claims with specificity 0, so that any other plugin's claim is higher. Its hooks are also the defaults of
those that another plugin leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
def read_config(config: Mapping[str, Any]) -> ModelSpec | None:
    """Read no config: the core does."""
    return None


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    return 0


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Add up the core's formula of each kind of layer."""
    return costs.token_cost(model, deployment)


@hookimpl
def free_target(model: ModelSpec, pool: PoolState, settings: PoolSettings) -> float:
    """Leave the headroom free, as it is set."""
    return settings.headroom


@hookimpl
def adjust_eviction_count(model: ModelSpec, pool: PoolState, requested: int, settings: PoolSettings) -> int:
    """Evict what is requested: the exact shortfall is best."""
    return requested


@hookimpl
def default_policy(model: ModelSpec) -> str | None:
    """Prefer the framework's default."""
    return None


@hookimpl
def settings_model() -> type[BaseModel] | None:
    """Have no settings."""
    return None


DEFAULTS: dict[str, Callable[..., Any]] = {
    "token_cost": token_cost,
    "free_target": free_target,
    "adjust_eviction_count": adjust_eviction_count,
    "default_policy": default_policy,
    "settings_model": settings_model,
}
"""Functions for the hooks that an architecture plugin leaves out."""
