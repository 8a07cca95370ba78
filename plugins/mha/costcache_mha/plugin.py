"""The hooks for models that keep keys and values per head: MHA, GQA, MQA and sliding windows.

Hooks that are left out keep the core's defaults: no free space beyond the headroom as set, and exact counts.
"""

from __future__ import annotations

from costcache import hookimpl
from costcache.cost import TokenCost
from costcache.cost import token_cost as compose_token_cost
from costcache.deployment import Deployment
from costcache.model import ModelSpec

__all__ = ["SPECIFICITY"]

SPECIFICITY = 10
"""Claim on a model without latent attention and without states."""


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Claim models whose layers all keep keys and values per head."""
    return None if model.has_latent or model.has_states else SPECIFICITY


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Bytes of keys and values; tensor parallelism divides the KV heads, down to one per rank."""
    return compose_token_cost(model, deployment)
