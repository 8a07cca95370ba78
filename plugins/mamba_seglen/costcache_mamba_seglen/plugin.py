"""The hooks for hybrid models, whose recurrent layers keep a state per sequence beside KV.

Hooks that are left out keep the core's defaults: the headroom as set, in each pool, and exact counts.
"""

from __future__ import annotations

from costcache import hookimpl
from costcache.cost import TokenCost
from costcache.cost import token_cost as compose_token_cost
from costcache.deployment import Deployment
from costcache.model import ModelSpec

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
