"""Bytes and FLOPs of one layer: one function per layer kind.

Bytes are those on one rank; FLOPs are those of the whole model, with a multiply-add counted as two.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    SlidingWindow,
    StateSpace,
)

__all__ = [
    "AttentionFlops",
    "LayerBytes",
    "PoolName",
    "attention_flops",
    "attention_kv_bytes",
    "compressed_kv_bytes",
    "decompressed_latent_bytes",
    "latent_kv_bytes",
    "layer_bytes",
    "state_bytes",
]

PoolName = Literal["kv", "swa", "state"]

# DeepSeek's scaled fp8 layout: one fp32 scale per 128 values (SGLang 0.5.23, DSA pool).
_SCALE_BLOCK = 128
_SCALE_BYTES = 4
# DeepSeek-V4's: one byte of scale per 64 values, the row padded to 8 bytes (SGLang 0.5.23's pool of
# 448 + 64 values: 448 + 7 + 1 + 2 x 64 = 584 bytes).
_V4_SCALE_BLOCK = 64
_V4_ALIGN = 8
# Such rows are stored in pages of 256 tokens, padded to 576 bytes (SGLang 0.5.23, KVLayout.V4).
_V4_PAGE = 256
_V4_PAGE_ALIGN = 576
# An index key in fp4: a byte of scale per 32 values.
_FP4_INDEX_BLOCK = 32
_STATE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class LayerBytes(NamedTuple):
    """Bytes that one layer caches on one rank: per token, or per state in the state pool.

    ``exact`` is a fraction where a row stands for several tokens; ``bytes`` is that, rounded up.
    """

    pool: PoolName
    label: str
    formula: str
    exact: Fraction

    @property
    def bytes(self) -> int:
        """Bytes, rounded up."""
        return math.ceil(self.exact)


class AttentionFlops(NamedTuple):
    """FLOPs of one token's attention in one layer, per token of context.

    ``per_context_token`` applies to the whole context, ``per_window_token`` only to the last (or
    selected) ``window`` tokens.
    """

    per_context_token: float
    per_window_token: float = 0.0
    window: int = 0


def attention_kv_bytes(layer: FullAttention | SlidingWindow, deployment: Deployment) -> int:
    """Bytes per token and rank of an MHA, GQA or sliding-window layer.

    ``max(1, kv_heads / tp) x (head_dim + v_head_dim) x element``, plus a sparse layer's index key; 0 if
    the layer shares an earlier layer's K/V; rounded up. Raises `SettingsError` if the heads cannot be
    divided over the ranks.
    """
    return math.ceil(_attention(layer, deployment))


def _attention(layer: FullAttention | SlidingWindow, deployment: Deployment) -> Fraction:
    if layer.kv_shared:
        return Fraction(0)
    row = deployment.stored(layer.head_dim) + deployment.stored(layer.v_head_dim)
    if isinstance(layer, SlidingWindow):
        return Fraction(
            _heads_per_rank(layer.kv_heads, deployment.attention_tp, deployment, "KV heads") * row
        )
    ways = deployment.decode_context_parallel  # these ranks share out the tokens, not the heads
    heads = _heads_per_rank(layer.kv_heads, deployment.attention_tp // ways, deployment, "KV heads")
    return (heads * row + _index_bytes(layer, deployment)) / ways


def compressed_kv_bytes(layer: CompressedAttention, deployment: Deployment) -> int:
    """Bytes per token and rank of a compressed layer, or of the window beside it.

    Every rank keeps all latents, one per ``ratio`` tokens, and index keys as rarely; rounded up to a byte.
    In fp8_e4m3 a latent is stored as DeepSeek-V4 does: a byte of scale per 64 values in front of the rotary
    ones, which stay in bf16 (584 bytes for 448 + 64), in pages of 256 tokens that are padded to 576 bytes.
    """
    return math.ceil(_compressed(layer, deployment))


def _compressed(layer: CompressedAttention, deployment: Deployment) -> Fraction:
    row = _compressed_token(layer, deployment) + _index_bytes(layer, deployment)
    return row if layer.window is not None else row / deployment.decode_context_parallel


def latent_kv_bytes(layer: LatentAttention, deployment: Deployment) -> int:
    """Bytes per token and rank of a latent layer, including its index key.

    Every attention rank keeps a full copy: nothing is divided. A DSA layer in fp8_e4m3 uses
    DeepSeek's scaled layout: the latent in fp8, an fp32 scale per 128 values, the rotary key in
    bf16 (656 bytes for 512/64). Its index key is fp8 with a scale, whatever the KV dtype, unless
    the deployment says otherwise. Raises `SettingsError` if the scaled layout does not fit the latent.
    """
    return math.ceil(_latent(layer, deployment))


def _latent(layer: LatentAttention, deployment: Deployment) -> Fraction:
    row = Fraction(_latent_row_bytes(layer, deployment))
    if layer.window is None:
        row /= deployment.decode_context_parallel
    return row + _index_bytes(layer, deployment)  # each rank that shares out the latents has all index keys


def decompressed_latent_bytes(layer: LatentAttention | CompressedAttention, deployment: Deployment) -> int:
    """Bytes per token and rank if every head's key and value were cached, including the index key."""
    if isinstance(layer, LatentAttention) and layer.kv_shared:
        return math.ceil(_index_bytes(layer, deployment))
    heads = _heads_per_rank(layer.heads, deployment.attention_tp, deployment, "attention heads")
    per_head = layer.decompressed_dim // layer.heads
    return deployment.stored(heads * per_head) + math.ceil(_index_bytes(layer, deployment))


def state_bytes(layer: StateSpace, deployment: Deployment) -> int:
    """Bytes of one state of a recurrent layer on one rank.

    ``(conv_kernel - 1) x conv_dim x conv element + heads x head_dim x state_size x state element``;
    heads and convolution channels are divided over the attention ranks, and each rank keeps
    at least one group of B and C (SGLang 0.5.23, ``Mamba2StateShape.create``). Raises
    `SettingsError` if they cannot be divided.
    """
    conv, recurrent = _state_values(layer, deployment)
    conv_bytes, state_bytes = _state_widths(layer, deployment)
    return conv * conv_bytes + recurrent * state_bytes


def layer_bytes(layer: LayerSpec, deployment: Deployment) -> LayerBytes:
    """Bytes that a layer of any kind caches on one rank, with the arithmetic behind them.

    Raises `SettingsError` if the deployment does not fit the layer.
    """
    found = _layer_bytes(layer, deployment)
    ranks = deployment.attention_tp
    if not isinstance(layer, StateSpace) and layer.heads % ranks:
        raise SettingsError(
            f"tp is {deployment.tp} ({ranks} attention ranks) for {layer.heads} attention heads, which "
            f"cannot be shared out evenly; use a divisor of {layer.heads}"
        )
    return found


def _layer_bytes(layer: LayerSpec, deployment: Deployment) -> LayerBytes:
    if isinstance(layer, StateSpace):
        conv, recurrent = _state_values(layer, deployment)
        conv_bytes, width = _state_widths(layer, deployment)
        formula = (
            f"{layer.conv_kernel - 1}·{conv // max(1, layer.conv_kernel - 1)} conv·"
            f"{conv_bytes} B + {recurrent} state·{width} B"
        )
        return LayerBytes("state", layer.variant, formula, Fraction(state_bytes(layer, deployment)))
    if isinstance(layer, LatentAttention):
        formula, label = _latent_formula(layer, deployment)
        pool: PoolName = "kv" if layer.window is None else "swa"
        return LayerBytes(pool, label, formula, _latent(layer, deployment))
    if isinstance(layer, CompressedAttention):
        formula, label = _compressed_formula(layer, deployment)
        pool = "kv" if layer.window is None else "swa"
        return LayerBytes(pool, label, formula, _compressed(layer, deployment))
    sliding = isinstance(layer, SlidingWindow)
    size = _attention(layer, deployment)
    formula = "K/V of an earlier layer"
    if not layer.kv_shared:
        ways = 1 if sliding else deployment.decode_context_parallel
        heads = _heads_per_rank(layer.kv_heads, deployment.attention_tp // ways, deployment, "KV heads")
        values = f"{heads}·({layer.head_dim} + {layer.v_head_dim})"
        formula = _stored(values, deployment) + _index_formula(layer, deployment)
        if ways > 1:
            formula = f"({formula}) / {ways}"
    label = f"sliding window of {layer.window}" if isinstance(layer, SlidingWindow) else "attention"
    if isinstance(layer, FullAttention) and layer.index_topk is not None:
        label = "sparse attention"
    return LayerBytes("swa" if sliding else "kv", label, formula, size)


def attention_flops(layer: LayerSpec, absorbed: bool = False) -> AttentionFlops:
    """FLOPs of one token's attention in one layer, over all ranks, per token of context.

    Scores and weighted values: ``2 x heads x (key width + value width)``. Latent attention is counted
    unabsorbed (keys and values decompressed, as prefill runs it) unless ``absorbed`` (attention on
    the latents themselves). A sparse layer scores the context with its indexer, once per
    ``index_pool`` tokens, and attends to ``index_topk`` tokens; a DSA layer always on latents, as
    DeepSeek-V3.2's sparse kernels do. Compressed attention sees one latent per ``ratio`` tokens.
    Recurrent layers cost nothing per token of context.
    """
    if isinstance(layer, StateSpace):
        return AttentionFlops(0.0)
    if isinstance(layer, LatentAttention):
        on_latents = 2.0 * layer.heads * (layer.latent_dim + layer.kv_lora_rank)
        if layer.index_topk is not None:
            return AttentionFlops(_index_flops(layer), on_latents, layer.index_topk)
        dense = on_latents if absorbed else 2.0 * layer.decompressed_dim
        return AttentionFlops(dense) if layer.window is None else AttentionFlops(0.0, dense, layer.window)
    if isinstance(layer, CompressedAttention):
        flops = 2.0 * layer.decompressed_dim / layer.ratio
        if layer.window is not None:
            return AttentionFlops(0.0, flops, layer.window)
        if layer.index_topk is None:
            return AttentionFlops(flops)
        # The selection counts latents, each of which stands for ``ratio`` tokens.
        return AttentionFlops(_index_flops(layer), flops, layer.index_topk * layer.ratio)
    flops = 2.0 * layer.heads * (layer.head_dim + layer.v_head_dim)
    if isinstance(layer, SlidingWindow):
        return AttentionFlops(0.0, flops, layer.window)
    if layer.index_topk is not None:
        return AttentionFlops(_index_flops(layer), flops, layer.index_topk)
    return AttentionFlops(flops)


def _index_flops(layer: FullAttention | LatentAttention | CompressedAttention) -> float:
    """FLOPs per token of context that an indexer takes to score it."""
    return 2.0 * (layer.index_heads or 0) * (layer.index_head_dim or 0) / layer.index_pool


def _heads_per_rank(heads: int, ranks: int, deployment: Deployment, what: str) -> int:
    """Number of heads on one of ``ranks``; with more ranks than heads, each head is replicated."""
    if heads % ranks and ranks % heads:
        raise SettingsError(
            f"tp is {deployment.tp} ({ranks} attention ranks) for {heads} {what}; "
            f"use a divisor or a multiple of {heads}"
        )
    return max(1, heads // ranks)


def _latent_row_bytes(layer: LatentAttention, deployment: Deployment) -> int:
    if layer.kv_shared:
        return 0
    if not _scaled(layer, deployment):
        return deployment.stored(layer.latent_dim)
    blocks, rest = divmod(layer.kv_lora_rank, _SCALE_BLOCK)
    if rest:
        raise SettingsError(
            f"kv_dtype is 'fp8_e4m3' for a DSA latent of {layer.kv_lora_rank}, which is not a multiple of "
            f"{_SCALE_BLOCK}; use 'bf16'"
        )
    return layer.kv_lora_rank + blocks * _SCALE_BYTES + 2 * layer.qk_rope_head_dim


def _scaled(layer: LatentAttention, deployment: Deployment) -> bool:
    return layer.index_topk is not None and deployment.kv_dtype == "fp8_e4m3"


def _compressed_row_bytes(layer: CompressedAttention, deployment: Deployment) -> int:
    if deployment.kv_dtype != "fp8_e4m3":
        return deployment.stored(layer.head_dim)
    plain = layer.head_dim - layer.rope_head_dim
    packed = plain + -(-plain // _V4_SCALE_BLOCK)
    return packed + -packed % _V4_ALIGN + 2 * layer.rope_head_dim


def _compressed_token(layer: CompressedAttention, deployment: Deployment) -> Fraction:
    """Bytes per token of the context, with the padding of a page if the rows are packed."""
    row = _compressed_row_bytes(layer, deployment)
    if deployment.kv_dtype != "fp8_e4m3":
        return Fraction(row, layer.ratio)
    page = max(1, _V4_PAGE // layer.ratio) * row
    return Fraction(page + -page % _V4_PAGE_ALIGN, max(_V4_PAGE, layer.ratio))


def _index_bytes(
    layer: FullAttention | SlidingWindow | LatentAttention | CompressedAttention, deployment: Deployment
) -> Fraction:
    """Bytes per token of a layer's index key, which may stand for several tokens."""
    if isinstance(layer, SlidingWindow) or layer.index_head_dim is None:
        return Fraction(0)
    return Fraction(_index_row(layer, deployment), layer.index_pool)


def _index_row(layer: FullAttention | LatentAttention | CompressedAttention, deployment: Deployment) -> int:
    """Bytes of one index key. Beside latents it is fp8 with scales; beside keys and values it has none."""
    width = layer.index_head_dim or 0
    dtype = deployment.index_dtype
    if dtype == "fp4":
        return -(-width // 2) + -(-width // _FP4_INDEX_BLOCK)
    if dtype == "bf16":
        return 2 * width
    if not isinstance(layer, FullAttention):
        return width + -(-width // _SCALE_BLOCK) * _SCALE_BYTES
    if dtype == "fp8":
        return width
    return 2 * width if layer.index_pool > 1 else deployment.stored(width)


def _stored(values: str, deployment: Deployment) -> str:
    if deployment.kv_dtype == "fp4_e2m1":
        return f"{values}·(1/2 + 1/16) B"
    return f"{values}·{deployment.kv_bytes} B"


def _index_formula(
    layer: FullAttention | SlidingWindow | LatentAttention | CompressedAttention, deployment: Deployment
) -> str:
    if isinstance(layer, SlidingWindow) or layer.index_head_dim is None:
        return ""
    row = _index_row(layer, deployment)
    text = f"{row} B"
    if row > layer.index_head_dim and deployment.index_dtype in (None, "fp8"):
        extra = row - layer.index_head_dim
        text = f"({layer.index_head_dim} + {extra}) B" if extra < layer.index_head_dim else text
    per = f" / {layer.index_pool}" if layer.index_pool > 1 else ""
    return f" + index {text}{per}"


def _latent_formula(layer: LatentAttention, deployment: Deployment) -> tuple[str, str]:
    rank, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    if layer.kv_shared:
        return f"latents of an earlier layer{_index_formula(layer, deployment)}", "latent attention"
    formula = _stored(f"({rank} + {rope})", deployment)
    if _scaled(layer, deployment):
        scales = rank // _SCALE_BLOCK
        formula = f"{rank}·1 B + {scales} scales·{_SCALE_BYTES} B + {rope}·2 B"
    ways = deployment.decode_context_parallel
    if ways > 1 and layer.window is None:
        formula = f"({formula}) / {ways}"
    label = "latent attention" if layer.window is None else f"latent attention, window of {layer.window}"
    if layer.index_topk is not None:
        label = f"{label}, DSA"
    return formula + _index_formula(layer, deployment), label


def _compressed_formula(layer: CompressedAttention, deployment: Deployment) -> tuple[str, str]:
    row = _compressed_row_bytes(layer, deployment)
    formula = f"{row} B" if layer.ratio == 1 else f"{row} B / {layer.ratio}"
    if _compressed_token(layer, deployment) * layer.ratio != row:
        formula += ", in padded pages"
    label = f"compressed attention, 1 latent per {layer.ratio} tokens"
    if layer.window is not None:
        label = f"latents of the last {layer.window} tokens"
    return formula + _index_formula(layer, deployment), label


def _state_widths(layer: StateSpace, deployment: Deployment) -> tuple[int, int]:
    """Bytes of an element of the convolution state and of the recurrent state."""
    conv = deployment.conv_dtype or layer.conv_dtype
    return _STATE_BYTES[conv], _STATE_BYTES[deployment.state_dtype or layer.state_dtype]


def _state_values(layer: StateSpace, deployment: Deployment) -> tuple[int, int]:
    """Number of values in the convolution state and in the recurrent state, on one rank."""
    ranks = 1 if layer.replicated else deployment.attention_tp
    grouped = 2 * (layer.groups or 0) * layer.state_size
    own = layer.conv_dim - grouped
    for count, what in ((layer.heads, "state heads"), (own, "convolution channels")):
        if count % ranks:
            raise SettingsError(
                f"tp is {deployment.tp} ({ranks} attention ranks) for {count} {what}; "
                f"use a divisor of {count}"
            )
    channels = own // ranks
    if layer.groups is not None:
        channels += 2 * _heads_per_rank(layer.groups, ranks, deployment, "state groups") * layer.state_size
    recurrent = layer.heads // ranks * layer.head_dim * layer.state_size
    return (layer.conv_kernel - 1) * channels, recurrent
