"""Layer kinds, by the values that they cache for later tokens.

A layer spec has the dimensions of the whole layer, before tensor parallelism. The formulas that
turn dimensions into bytes and FLOPs are in `costcache.cost`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

__all__ = [
    "AttentionLayer",
    "FullAttention",
    "LatentAttention",
    "LayerSpec",
    "SlidingWindow",
    "StateDtype",
    "StateSpace",
]

StateDtype = Literal["fp32", "bf16", "fp16"]


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _head_dim_of(data: dict[str, int]) -> int:
    return data["head_dim"]


class FullAttention(_Layer):
    """Softmax attention over the whole context: MHA, GQA or MQA.

    ``kv_shared`` marks a layer that reads an earlier layer's K/V and stores none (Gemma-3n).
    """

    kind: Literal["full_attention"] = "full_attention"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt = Field(default_factory=_head_dim_of)
    kv_shared: bool = False


class SlidingWindow(_Layer):
    """Softmax attention over the last ``window`` tokens, cached in a separate pool."""

    kind: Literal["sliding_window"] = "sliding_window"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt = Field(default_factory=_head_dim_of)
    window: PositiveInt
    kv_shared: bool = False


class LatentAttention(_Layer):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent row per token.

    With sparse attention (DSA, DeepSeek-V3.2), ``index_topk`` is the number of tokens that each
    query attends to. ``index_head_dim`` is the width of the index key that the layer stores; None
    if it stores none (plain MLA, or a layer that reuses an earlier layer's selection).
    """

    kind: Literal["latent_attention"] = "latent_attention"
    heads: PositiveInt
    kv_lora_rank: PositiveInt
    qk_rope_head_dim: NonNegativeInt
    qk_nope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    index_head_dim: PositiveInt | None = None
    index_heads: PositiveInt | None = None
    index_topk: PositiveInt | None = None

    @property
    def latent_dim(self) -> int:
        """Values cached per token: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def decompressed_dim(self) -> int:
        """Values per token if every head's key and value were cached instead."""
        return self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)


class StateSpace(_Layer):
    """A recurrent layer: one state of fixed size per sequence, however long the sequence.

    The recurrent state has heads x head_dim x state_size values, the convolution state
    (conv_kernel - 1) x conv_dim. Mamba-1 is expressed with head_dim 1 and one head per
    channel. A short convolution (LFM2) has no recurrent state: heads is 0.

    ``groups`` counts the groups of B and C (Mamba-2) or the key heads (gated delta net); their
    2 x groups x state_size channels are part of ``conv_dim``, and each tensor-parallel rank keeps
    at least one group. None if all channels are divided evenly over the ranks.
    """

    kind: Literal["state_space"] = "state_space"
    variant: Literal["mamba1", "mamba2", "gdn", "kda", "shortconv"]
    conv_dim: NonNegativeInt
    conv_kernel: PositiveInt
    heads: NonNegativeInt
    head_dim: PositiveInt
    state_size: PositiveInt
    groups: PositiveInt | None = None
    conv_dtype: StateDtype = "bf16"
    state_dtype: StateDtype = "fp32"


AttentionLayer = FullAttention | LatentAttention | SlidingWindow
LayerSpec = Annotated[
    FullAttention | LatentAttention | SlidingWindow | StateSpace, Field(discriminator="kind")
]
