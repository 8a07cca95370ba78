"""Layer kinds, by the values that they cache for later tokens.

A layer spec has the dimensions of the whole layer, before tensor parallelism. The formulas that
turn dimensions into bytes and FLOPs are in `costcache.cost`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

__all__ = [
    "AttentionLayer",
    "CompressedAttention",
    "FullAttention",
    "KVDtype",
    "LatentAttention",
    "LayerSpec",
    "SlidingWindow",
    "StateDtype",
    "StateSpace",
]

StateDtype = Literal["fp32", "bf16", "fp16"]
KVDtype = Literal["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Indexed(_Layer):
    """Attention that may be sparse: an indexer scores the context and picks ``index_topk`` tokens of it.

    ``index_head_dim`` is the width of the index key that the layer stores, once per ``index_pool``
    tokens; None if it stores none (dense attention, or a layer that reuses an earlier layer's
    selection). ``index_heads`` is the number of the indexer's query heads.
    """

    index_head_dim: PositiveInt | None = None
    index_heads: PositiveInt | None = None
    index_topk: PositiveInt | None = None
    index_pool: PositiveInt = 1


def _head_dim_of(data: dict[str, int]) -> int:
    return data["head_dim"]


class FullAttention(_Indexed):
    """Softmax attention over the whole context: MHA, GQA or MQA; sparse with an indexer (MiniMax-M3).

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


class LatentAttention(_Indexed):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent row per token.

    With sparse attention (DSA, DeepSeek-V3.2) it has an indexer. ``window`` limits it to the last
    tokens, which are cached in the pool of the windows. ``kv_shared`` marks a layer that reads an
    earlier layer's latents (Mistral-Large-4); it may still store index keys.
    """

    kind: Literal["latent_attention"] = "latent_attention"
    heads: PositiveInt
    kv_lora_rank: PositiveInt
    qk_rope_head_dim: NonNegativeInt
    qk_nope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    window: PositiveInt | None = None
    kv_shared: bool = False

    @property
    def latent_dim(self) -> int:
        """Values cached per token: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def decompressed_dim(self) -> int:
        """Values per token if every head's key and value were cached instead."""
        return self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)


class CompressedAttention(_Indexed):
    """Attention of all heads to one latent per ``ratio`` tokens, key and value at once (DeepSeek-V4).

    A layer of that model is two of these with the same number: one keeps the latents of the last
    ``window`` tokens uncompressed (ratio 1), the other the compressed ones of the whole context (ratio
    4, with an indexer that picks ``index_topk`` of them, or 128). ``rope_head_dim`` of the
    ``head_dim`` values carry positions. ``index_pool`` equals the ratio.
    """

    kind: Literal["compressed_attention"] = "compressed_attention"
    heads: PositiveInt
    head_dim: PositiveInt
    rope_head_dim: NonNegativeInt
    ratio: PositiveInt
    window: PositiveInt | None = None

    @property
    def decompressed_dim(self) -> int:
        """Values per token if every head's key and value were cached instead."""
        return 2 * self.heads * self.head_dim

    @property
    def latent_dim(self) -> float:
        """Values cached per token of the context."""
        return self.head_dim / self.ratio


class StateSpace(_Layer):
    """A recurrent layer: one state of fixed size per sequence, however long the sequence.

    The recurrent state has heads x head_dim x state_size values, the convolution state
    (conv_kernel - 1) x conv_dim. Mamba-1 is expressed with head_dim 1 and one head per
    channel. A short convolution (LFM2) has no recurrent state: heads is 0. Lightning attention
    (MiniMax-01) has no convolution: conv_dim is 0.

    ``groups`` counts the groups of B and C (Mamba-2) or the key heads (gated delta net); their
    2 x groups x state_size channels are part of ``conv_dim``, and each tensor-parallel rank keeps
    at least one group. None if all channels are divided evenly over the ranks. ``replicated`` says that
    they are not: each rank keeps the whole state (the n-gram embeddings of Qwen4).
    """

    kind: Literal["state_space"] = "state_space"
    variant: Literal["mamba1", "mamba2", "gdn", "kda", "shortconv", "lightning"]
    conv_dim: NonNegativeInt
    conv_kernel: PositiveInt
    heads: NonNegativeInt
    head_dim: PositiveInt
    state_size: PositiveInt
    groups: PositiveInt | None = None
    replicated: bool = False
    conv_dtype: StateDtype = "bf16"
    state_dtype: StateDtype = "fp32"


AttentionLayer = FullAttention | LatentAttention | CompressedAttention | SlidingWindow
LayerSpec = Annotated[
    FullAttention | LatentAttention | CompressedAttention | SlidingWindow | StateSpace,
    Field(discriminator="kind"),
]
