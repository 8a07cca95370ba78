"""`TokenCost`: what a token and a state hold on one rank, added up over a model's layers."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from costcache.cost.layers import LayerBytes, Pool, decompressed_latent_bytes, layer_bytes
from costcache.deployment import Deployment
from costcache.model import LatentAttention, LayerSpec, ModelSpec

__all__ = ["CostTerm", "TokenCost", "token_cost"]


class CostTerm(BaseModel):
    """One line of the arithmetic behind a `TokenCost`: ``layers`` alike, on one rank.

    ``formula`` is the arithmetic of one layer in words; ``bytes`` is the sum over the layers.
    """

    model_config = ConfigDict(frozen=True)

    pool: Pool
    label: str
    formula: str
    layers: int
    bytes: int


class TokenCost(BaseModel):
    """What a token or a state holds on one rank, in bytes.

    Attributes:
        kv_bytes: Per token of the KV pool: full and latent attention, index keys included.
        swa_bytes: Per token of the sliding-window pool.
        state_bytes: Of one state checkpoint, all recurrent layers; 0 without any.
        compression_ratio: Values of decompressed keys and values over latent values, in the
            latent layers of the whole model; 1.0 without any.
        decompressed_kv_bytes: ``kv_bytes`` if the latent layers kept every head's keys and values
            instead; those heads are divided over the ranks, latents are not. Equal to ``kv_bytes``
            by default.
        terms: The arithmetic, per pool and kind of layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_bytes: NonNegativeInt
    swa_bytes: NonNegativeInt = 0
    state_bytes: NonNegativeInt = 0
    compression_ratio: PositiveFloat = 1.0
    decompressed_kv_bytes: NonNegativeInt = Field(default_factory=lambda data: data["kv_bytes"])
    terms: tuple[CostTerm, ...] = ()


def token_cost(spec: ModelSpec, deployment: Deployment) -> TokenCost:
    """What a token and a state of ``spec`` hold on the rank that holds most, in bytes.

    With pipeline stages each pool is counted on the stage that holds most of it, since the smallest
    pool bounds them all. Raises `SettingsError` where the deployment does not fit.
    """
    ranges = deployment.stages(spec.num_layers)
    stage_of = {index: number for number, stage in enumerate(ranges) for index in stage}
    stages: list[dict[Pool, list[LayerSpec]]] = [{"kv": [], "swa": [], "state": []} for _ in ranges]
    held = {layer: layer_bytes(layer, deployment) for layer in dict.fromkeys(spec.layers)}
    for index, layer in zip(spec.layer_ids, spec.layers, strict=True):
        stages[stage_of[index]][held[layer].pool].append(layer)

    totals: dict[Pool, int] = {}
    largest: dict[Pool, list[LayerSpec]] = {}
    for pool in ("kv", "swa", "state"):
        largest[pool] = max(
            (stage[pool] for stage in stages), key=lambda x: sum(held[layer].bytes for layer in x)
        )
        totals[pool] = sum(held[layer].bytes for layer in largest[pool])
    return TokenCost(
        kv_bytes=totals["kv"],
        swa_bytes=totals["swa"],
        state_bytes=totals["state"],
        compression_ratio=spec.compression_ratio,
        decompressed_kv_bytes=max(
            sum(_decompressed(layer, held[layer], deployment) for layer in stage["kv"]) for stage in stages
        ),
        terms=tuple(
            CostTerm(
                pool=pool,
                label=held[layer].label,
                formula=held[layer].formula,
                layers=count,
                bytes=count * held[layer].bytes,
            )
            for pool in largest
            for layer, count in Counter(largest[pool]).items()
        ),
    )


def _decompressed(layer: LayerSpec, held: LayerBytes, deployment: Deployment) -> int:
    if isinstance(layer, LatentAttention):
        return decompressed_latent_bytes(layer, deployment)
    return held.bytes
