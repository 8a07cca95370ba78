"""The hooks for models that keep keys and values per head: MHA, GQA, MQA and sliding windows."""

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
"""Claim on a model without latent attention and without states."""


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Claim models whose layers all keep keys and values per head."""
    return None if model.has_latent or model.has_states else SPECIFICITY


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Bytes of keys and values; tensor parallelism divides the KV heads, down to one a rank."""
    return compose_token_cost(model, deployment)


@hookimpl
def free_target(model: ModelSpec, pool: PoolState, settings: PoolSettings) -> float:
    """The headroom as it is set; 0.0 by default, since free space caches nothing."""
    return settings.headroom


@hookimpl
def adjust_eviction_count(model: ModelSpec, pool: PoolState, requested: int, settings: PoolSettings) -> int:
    """What is requested, in whole pages: within one pool of slots, counting tokens is exact."""
    return pool.in_pages(requested)


@hookimpl
def default_policy() -> str | None:
    """The framework's default."""
    return DEFAULT_POLICY
