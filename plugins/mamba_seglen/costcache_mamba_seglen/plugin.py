"""The hooks for hybrid models, whose recurrent layers keep a state per sequence beside KV."""

from __future__ import annotations

from costcache import hookimpl
from costcache.cost import TokenCost
from costcache.cost import token_cost as compose_token_cost
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.records import PoolState
from costcache.settings import DEFAULT_POLICY, PoolSettings

__all__ = ["SPECIFICITY"]

SPECIFICITY = 10
"""Claim on a model with recurrent states, whatever its attention is."""


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Claim models with states."""
    return SPECIFICITY if model.has_states else None


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Bytes of a token's KV in the attention layers, and of one state in the recurrent ones."""
    return compose_token_cost(model, deployment)


@hookimpl
def free_target(model: ModelSpec, pool: PoolState, settings: PoolSettings) -> float:
    """The headroom as it is set, of each pool; 0.0 by default, since free space caches nothing."""
    return settings.headroom


@hookimpl
def adjust_eviction_count(model: ModelSpec, pool: PoolState, requested: int, settings: PoolSettings) -> int:
    """What is requested; in a pool of tokens, in whole pages."""
    return pool.in_pages(requested)


@hookimpl
def default_policy() -> str | None:
    """The framework's default."""
    return DEFAULT_POLICY
