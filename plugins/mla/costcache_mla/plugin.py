"""The hooks for models whose attention layers all keep one latent vector per token (MLA).

They leave ``adjust_eviction_count`` out. A pool counts tokens, and its slots are sized in latent bytes
already: a count scaled by the compression ratio would free too little, and the allocation could fail.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache import hookimpl
from costcache.cost import TokenCost
from costcache.cost import token_cost as compose_token_cost
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.records import PoolState
from costcache.settings import PoolSettings

__all__ = ["SPECIFICITY", "MLASettings"]

SPECIFICITY = 10
"""Claim on a model whose attention layers are all latent."""


class MLASettings(BaseModel):
    """Settings under ``architecture`` for MLA models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    floor: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Least share of the pool to leave free, whatever headroom / compression_ratio is.",
        examples=[0.05],
    )


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Claim models with latent attention only; hybrids with states belong to another plugin."""
    return SPECIFICITY if model.is_latent and not model.has_states else None


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Bytes of the latent vector, the rotary key and any index keys, in full on each rank.

    Every attention-TP rank needs the whole latent vector, so tensor parallelism does not divide it.
    """
    return compose_token_cost(model, deployment)


@hookimpl
def free_target(model: ModelSpec, pool: PoolState, settings: PoolSettings) -> float:
    """``max(floor, headroom / compression_ratio)``; 0.0 unless one of them is set.

    The idea, from the project "MLA-aware RadixAttention": headroom is sized for a number of bytes, and a
    latent token takes fewer of them. With headroom 0.20 and floor 0.05 a DeepSeek-V3 pool keeps 5 % free,
    with floor 0 it keeps 0.28 %.
    """
    own = settings.architecture
    floor = own.floor if isinstance(own, MLASettings) else 0.0
    return max(floor, settings.headroom / model.compression_ratio)


@hookimpl
def settings_model() -> type[BaseModel] | None:
    """:class:`MLASettings`."""
    return MLASettings
