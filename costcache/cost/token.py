"""`TokenCost`: bytes of a token and of a state on one rank, summed over a model's layers."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from costcache.cost.layers import LayerBytes, PoolName, decompressed_latent_bytes, layer_bytes
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import CompressedAttention, LatentAttention, LayerSpec, ModelSpec

__all__ = ["CostTerm", "TokenCost", "token_cost"]


class CostTerm(BaseModel):
    """One line of the arithmetic behind a `TokenCost`: ``layers`` identical layers, on one rank.

    ``formula`` spells out the arithmetic of one layer; ``bytes`` is the sum over the layers.
    """

    model_config = ConfigDict(frozen=True)

    pool: PoolName
    label: str
    formula: str
    layers: int
    bytes: int


class TokenCost(BaseModel):
    """Bytes of a token and of a state on one rank.

    Attributes:
        kv_bytes: Bytes per token of the KV pool: full and latent attention, including index keys.
        swa_bytes: Bytes per token of the sliding-window pool.
        state_bytes: Bytes of one state checkpoint, over all recurrent layers; 0 without any.
        compression_ratio: Decompressed values per token over latent values, in the latent layers
            of the whole model; 1.0 without any.
        decompressed_kv_bytes: ``kv_bytes`` if the latent layers cached every head's keys and values
            instead. Those heads are divided over the ranks, latents are not. Defaults to
            ``kv_bytes``.
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
    """Bytes of a token and of a state of ``spec``, on the rank where they take most.

    With pipeline stages each pool is counted on the stage that holds most of it, since that stage
    fits the fewest tokens. Draft layers, if the deployment serves any, are on the last stage.
    Raises `SettingsError` if the deployment does not fit the model.
    """
    deployment = deployment.serving(spec)
    ranges = deployment.stages(spec.num_layers)
    stage_of = {index: number for number, stage in enumerate(ranges) for index in stage}
    stages: list[dict[PoolName, list[LayerSpec]]] = [{"kv": [], "swa": [], "state": []} for _ in ranges]
    cached = {layer: layer_bytes(layer, deployment) for layer in dict.fromkeys(spec.layers)}
    for index, layer in zip(spec.layer_ids, spec.layers, strict=True):
        stages[stage_of[index]][cached[layer].pool].append(layer)

    draft = spec.draft_layer if deployment.draft_layers else None
    if deployment.draft_layers and draft is None:
        raise SettingsError(
            f"draft_layers is {deployment.draft_layers}, and {spec.name!r} has no attention for them; use 0"
        )
    if draft is not None:  # beside the model's last layers
        cached[draft] = layer_bytes(draft, deployment)
        stages[-1][cached[draft].pool] += [draft] * deployment.draft_layers

    totals: dict[PoolName, int] = {}
    largest: dict[PoolName, list[LayerSpec]] = {}
    for pool in ("kv", "swa", "state"):
        largest[pool] = max(
            (stage[pool] for stage in stages), key=lambda x: sum(cached[layer].exact for layer in x)
        )
        # Rounded up once: a row may stand for several tokens.
        totals[pool] = math.ceil(sum((cached[layer].exact for layer in largest[pool]), Fraction(0)))
    return TokenCost(
        kv_bytes=totals["kv"],
        swa_bytes=totals["swa"],
        state_bytes=totals["state"],
        compression_ratio=spec.compression_ratio,
        decompressed_kv_bytes=max(
            sum(_decompressed(layer, cached[layer], deployment) for layer in stage["kv"]) for stage in stages
        ),
        terms=tuple(
            CostTerm(
                pool=pool,
                label=cached[layer].label,
                formula=cached[layer].formula,
                layers=count,
                bytes=math.ceil(count * cached[layer].exact),
            )
            for pool in largest
            for layer, count in Counter(largest[pool]).items()
        ),
    )


def _decompressed(layer: LayerSpec, cached: LayerBytes, deployment: Deployment) -> int:
    if isinstance(layer, LatentAttention | CompressedAttention):
        return decompressed_latent_bytes(layer, deployment)
    return cached.bytes
