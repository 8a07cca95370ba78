"""Bytes and FLOPs of one layer: one function per layer kind.

Bytes are those on one rank; FLOPs are those of the whole model, with a multiply-add counted as two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import FullAttention, LatentAttention, LayerSpec, SlidingWindow, StateSpace

__all__ = [
    "AttentionFlops",
    "LayerBytes",
    "PoolName",
    "attention_flops",
    "attention_kv_bytes",
    "decompressed_latent_bytes",
    "latent_kv_bytes",
    "layer_bytes",
    "state_bytes",
]

PoolName = Literal["kv", "swa", "state"]

# DeepSeek's scaled fp8 layout: one fp32 scale per 128 values (SGLang 0.5.23, DSA pool).
_SCALE_BLOCK = 128
_SCALE_BYTES = 4
_STATE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class LayerBytes(NamedTuple):
    """Bytes that one layer caches on one rank: per token, or per state in the state pool."""

    pool: PoolName
    label: str
    formula: str
    bytes: int


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

    ``max(1, kv_heads / tp) x (head_dim + v_head_dim) x element``; 0 if the layer shares an earlier
    layer's K/V. Raises `SettingsError` if the heads cannot be divided over the ranks.
    """
    if layer.kv_shared:
        return 0
    heads = _heads_per_rank(layer.kv_heads, deployment, "KV heads")
    return heads * (layer.head_dim + layer.v_head_dim) * deployment.kv_bytes


def latent_kv_bytes(layer: LatentAttention, deployment: Deployment) -> int:
    """Bytes per token and rank of a latent layer, including its index key.

    Every attention rank keeps a full copy: nothing is divided. A DSA layer in fp8_e4m3 uses
    DeepSeek's scaled layout: the latent in fp8, an fp32 scale per 128 values, the rotary key in
    bf16 (656 bytes for 512/64). Its index key is fp8 with a scale, whatever the KV dtype.
    Raises `SettingsError` if the scaled layout does not fit the latent.
    """
    return _latent_row_bytes(layer, deployment) + _index_bytes(layer)


def decompressed_latent_bytes(layer: LatentAttention, deployment: Deployment) -> int:
    """Bytes per token and rank if every head's key and value were cached, including the index key."""
    heads = _heads_per_rank(layer.heads, deployment, "attention heads")
    per_head = layer.decompressed_dim // layer.heads
    return heads * per_head * deployment.kv_bytes + _index_bytes(layer)


def state_bytes(layer: StateSpace, deployment: Deployment) -> int:
    """Bytes of one state of a recurrent layer on one rank.

    ``(conv_kernel - 1) x conv_dim x conv element + heads x head_dim x state_size x state element``;
    heads and convolution channels are divided over the attention ranks, and each rank keeps
    at least one group of B and C (SGLang 0.5.23, ``Mamba2StateShape.create``). Raises
    `SettingsError` if they cannot be divided.
    """
    conv, recurrent = _state_values(layer, deployment)
    dtype = deployment.state_dtype or layer.state_dtype
    return conv * _STATE_BYTES[layer.conv_dtype] + recurrent * _STATE_BYTES[dtype]


def layer_bytes(layer: LayerSpec, deployment: Deployment) -> LayerBytes:
    """Bytes that a layer of any kind caches on one rank, with the arithmetic behind them.

    Raises `SettingsError` if the deployment does not fit the layer.
    """
    if isinstance(layer, StateSpace):
        conv, recurrent = _state_values(layer, deployment)
        dtype = deployment.state_dtype or layer.state_dtype
        formula = (
            f"{layer.conv_kernel - 1}·{conv // max(1, layer.conv_kernel - 1)} conv·"
            f"{_STATE_BYTES[layer.conv_dtype]} B + {recurrent} state·{_STATE_BYTES[dtype]} B"
        )
        return LayerBytes("state", layer.variant, formula, state_bytes(layer, deployment))
    if isinstance(layer, LatentAttention):
        formula, label = _latent_formula(layer, deployment)
        return LayerBytes("kv", label, formula, latent_kv_bytes(layer, deployment))
    sliding = isinstance(layer, SlidingWindow)
    size = attention_kv_bytes(layer, deployment)
    formula = "K/V of an earlier layer"
    if not layer.kv_shared:
        heads = _heads_per_rank(layer.kv_heads, deployment, "KV heads")
        formula = f"{heads}·({layer.head_dim} + {layer.v_head_dim})·{deployment.kv_bytes} B"
    label = f"sliding window of {layer.window}" if isinstance(layer, SlidingWindow) else "attention"
    return LayerBytes("swa" if sliding else "kv", label, formula, size)


def attention_flops(layer: LayerSpec, absorbed: bool = False) -> AttentionFlops:
    """FLOPs of one token's attention in one layer, over all ranks, per token of context.

    Scores and weighted values: ``2 x heads x (key width + value width)``. Latent attention is counted
    unabsorbed (keys and values decompressed, as prefill runs it) unless ``absorbed`` (attention on
    the latents themselves). A DSA layer scores the context with its indexer and attends to
    ``index_topk`` tokens, always on latents, as DeepSeek-V3.2's sparse kernels do.
    Recurrent layers cost nothing per token of context.
    """
    if isinstance(layer, StateSpace):
        return AttentionFlops(0.0)
    if isinstance(layer, LatentAttention):
        on_latents = 2.0 * layer.heads * (layer.latent_dim + layer.kv_lora_rank)
        if layer.index_topk is None:
            return AttentionFlops(on_latents if absorbed else 2.0 * layer.decompressed_dim)
        indexer = 2.0 * (layer.index_heads or 0) * (layer.index_head_dim or 0)
        return AttentionFlops(indexer, on_latents, layer.index_topk)
    flops = 2.0 * layer.heads * (layer.head_dim + layer.v_head_dim)
    if isinstance(layer, SlidingWindow):
        return AttentionFlops(0.0, flops, layer.window)
    return AttentionFlops(flops)


def _heads_per_rank(heads: int, deployment: Deployment, what: str) -> int:
    """Number of heads on one rank; with more ranks than heads, each head is replicated."""
    ranks = deployment.attention_tp
    if heads % ranks and ranks % heads:
        raise SettingsError(
            f"tp is {deployment.tp} ({ranks} attention ranks) for {heads} {what}; "
            f"use a divisor or a multiple of {heads}"
        )
    return max(1, heads // ranks)


def _latent_row_bytes(layer: LatentAttention, deployment: Deployment) -> int:
    if not _scaled(layer, deployment):
        return layer.latent_dim * deployment.kv_bytes
    blocks, rest = divmod(layer.kv_lora_rank, _SCALE_BLOCK)
    if rest:
        raise SettingsError(
            f"kv_dtype is 'fp8_e4m3' for a DSA latent of {layer.kv_lora_rank}, which is not a multiple of "
            f"{_SCALE_BLOCK}; use 'bf16'"
        )
    return layer.kv_lora_rank + blocks * _SCALE_BYTES + 2 * layer.qk_rope_head_dim


def _scaled(layer: LatentAttention, deployment: Deployment) -> bool:
    return layer.index_topk is not None and deployment.kv_dtype == "fp8_e4m3"


def _index_bytes(layer: LatentAttention) -> int:
    if layer.index_head_dim is None:
        return 0
    return layer.index_head_dim + -(-layer.index_head_dim // _SCALE_BLOCK) * _SCALE_BYTES


def _latent_formula(layer: LatentAttention, deployment: Deployment) -> tuple[str, str]:
    rank, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    formula = f"({rank} + {rope})·{deployment.kv_bytes} B"
    if _scaled(layer, deployment):
        scales = rank // _SCALE_BLOCK
        formula = f"{rank}·1 B + {scales} scales·{_SCALE_BYTES} B + {rope}·2 B"
    if layer.index_head_dim is None:
        return formula, "latent attention"
    index = layer.index_head_dim
    return f"{formula} + index ({index} + {_index_bytes(layer) - index}) B", "latent attention, DSA"


def _state_values(layer: StateSpace, deployment: Deployment) -> tuple[int, int]:
    """Number of values in the convolution state and in the recurrent state, on one rank."""
    ranks = deployment.attention_tp
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
        channels += 2 * _heads_per_rank(layer.groups, deployment, "state groups") * layer.state_size
    recurrent = layer.heads // ranks * layer.head_dim * layer.state_size
    return (layer.conv_kernel - 1) * channels, recurrent
