"""Builds layer specs from the fields of a config."""

from __future__ import annotations

from typing import NamedTuple

from costcache.model.blocks import Block, read_blocks
from costcache.model.fields import Fields
from costcache.model.layers import (
    FullAttention,
    LatentAttention,
    LayerSpec,
    SlidingWindow,
    StateDtype,
    StateSpace,
)

__all__ = ["ReadModel", "read_model"]

# Fields that change what a token caches in a way that the layer kinds cannot express. Reading such
# a model by its remaining fields would silently give wrong figures.
_UNSUPPORTED = {
    "attn_config": "nested attention settings (MPT, DBRX)",
    "attn_type_list": "lightning attention layers (MiniMax-01)",
    "attention_other_setting": "per-layer attention settings (Step-3.5)",
    "block_configs": "per-layer attention settings (Nemotron-NAS)",
    "block_types": "RG-LRU layers (RecurrentGemma)",
    "compress_ratios": "compressed attention (DeepSeek-V4)",
    "cross_attention_layers": "cross-attention layers (Llama-3.2-Vision)",
    "efficient_attention_config": "searched attention layers (Jet-Nemotron)",
    "is_encoder_decoder": "an encoder",
    "kv_source_layer_ids": "K/V shared across layers (DeepSeek-V4.1)",
    "layer_group_size": "linear attention groups (Ling and Ring hybrids)",
    "use_cla": "K/V shared across layers (Hunyuan)",
}

_DTYPES: dict[str, StateDtype] = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp16": "fp16",
    "fp32": "fp32",
}


class ReadModel(NamedTuple):
    """A config, read: its numbered blocks, the layers that cache something, and their numbers."""

    blocks: list[Block]
    layers: list[LayerSpec]
    layer_ids: list[int]


def read_model(fields: Fields) -> ReadModel:
    """Read every layer. Raises `ConfigError` that names the missing or wrong field."""
    for name, what in _UNSUPPORTED.items():
        if fields.get(name) not in (None, False, [], {}):
            raise fields.error(
                name,
                f"says that the model has {what}, which costcache does not support",
                "build ModelSpec(layers=...) yourself",
            )
    if fields.integer("index_kpool", default=1) > 1:
        raise fields.error(
            "index_kpool",
            "says that index keys are pooled, which costcache does not support",
            "build ModelSpec(layers=...) yourself",
        )
    blocks = read_blocks(fields)
    shared = fields.integer("num_kv_shared_layers", default=0, least=0)
    layers: list[LayerSpec] = []
    layer_ids: list[int] = []
    made: dict[tuple[str, bool, bool], LayerSpec] = {}  # identical layers share one object
    for index, block in enumerate(blocks):
        kv_shared = index >= len(blocks) - shared > 0
        for mixer in block.mixers:
            key = (mixer, kv_shared, _reuses_selection(fields, index, len(blocks)))
            if key not in made:
                made[key] = _layer(fields, *key)
            layers.append(made[key])
            layer_ids.append(index)
    if not layers:
        raise fields.error("layer_types", "lists no attention or state layer", "correct the list of layers")
    return ReadModel(blocks, layers, layer_ids)


def _layer(fields: Fields, mixer: str, kv_shared: bool, reuses_selection: bool) -> LayerSpec:
    if mixer == "state":
        return _state_space(fields)
    if mixer == "full" and fields.has("kv_lora_rank") and fields.flag("use_mla", default=True):
        return _latent(fields, reuses_selection)
    window = _window(fields) if mixer == "sliding" else None
    heads, kv_heads, head_dim, v_head_dim = _attention_dims(fields, sliding=mixer == "sliding")
    if window is None:
        return FullAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            kv_shared=kv_shared,
        )
    return SlidingWindow(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_shared=kv_shared,
        window=window,
    )


def _window(fields: Fields) -> int | None:
    """Window in tokens; None if it covers the longest context, so that it never slides."""
    window = fields.integer("sliding_window", "sliding_window_size", "attention_chunk_size")
    longest = fields.optional_integer("max_position_embeddings")
    return None if longest is not None and window >= longest else window


def _attention_dims(fields: Fields, sliding: bool) -> tuple[int, int, int, int]:
    """Heads, KV heads, key width and value width of the sliding layers, or of the full ones."""
    heads = fields.integer("num_attention_heads", "n_head", "n_heads")
    head_dim = fields.optional_integer("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None:
        hidden = fields.integer("hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise fields.error(
                "head_dim",
                f"is missing, and hidden_size {hidden} is not a multiple of {heads} heads",
                "add head_dim",
            )
        head_dim = hidden // heads
    kv_heads = _kv_heads(fields, heads)
    v_head_dim = fields.integer("v_head_dim", default=head_dim)
    if sliding:  # MiMo-V2
        heads = fields.integer("swa_num_attention_heads", default=heads)
        kv_heads = fields.integer("swa_num_key_value_heads", default=kv_heads)
        head_dim = fields.integer("swa_head_dim", default=head_dim)
        v_head_dim = fields.integer("swa_v_head_dim", default=v_head_dim)
    elif fields.has("global_head_dim"):  # Gemma-4
        head_dim = v_head_dim = fields.integer("global_head_dim")
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.integer("num_global_key_value_heads", default=kv_heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"is {kv_heads} for {heads} attention heads",
            "each KV head must serve the same number of heads: correct one of them",
        )
    return heads, kv_heads, head_dim, v_head_dim


def _kv_heads(fields: Fields, heads: int) -> int:
    """Number of KV heads. A config that gives none means multi-head attention, unless it says multi-query."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1  # Falcon-7B, StarCoder
    return fields.integer("num_key_value_heads", "num_kv_heads", default=heads)


def _latent(fields: Fields, reuses_selection: bool) -> LatentAttention:
    topk = fields.optional_integer("index_topk")
    indexed = topk is not None and not reuses_selection
    return LatentAttention(
        heads=fields.integer("num_attention_heads"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", least=0),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        v_head_dim=_latent_v_head_dim(fields),
        index_head_dim=fields.integer("index_head_dim") if indexed else None,
        index_heads=fields.integer("index_n_heads") if indexed else None,
        index_topk=topk,
    )


def _latent_v_head_dim(fields: Fields) -> int:
    """Value width of a latent layer. MiniCPM3 leaves it out; there it is hidden_size / heads."""
    value = fields.optional_integer("v_head_dim")
    if value is not None:
        return value
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    if fields.model_type != "minicpm3" or hidden % heads:
        return fields.integer("v_head_dim")  # raises the error for a missing field
    return hidden // heads


def _reuses_selection(fields: Fields, index: int, count: int) -> bool:
    """Whether a DSA layer reuses an earlier layer's selection, and so stores no index keys.

    Follows the rules of SGLang 0.5.23 (``dsa_layer_skips_topk``).
    """
    if not fields.has("index_topk"):
        return False
    types = fields.strings("indexer_types", count)
    if types is not None:
        return types[index] == "shared"
    pattern = fields.text("index_topk_pattern")
    if pattern is not None:
        return index < len(pattern) and pattern[index] == "S"
    every = fields.integer("index_topk_freq", default=1)
    offset = fields.integer("index_skip_topk_offset", default=2)
    return max(index - offset + 1, 0) % every != 0


def _state_space(fields: Fields) -> StateSpace:
    linear = fields.nested("linear_attn_config")
    if linear is not None or fields.has("linear_num_heads"):
        return _kda(fields, linear)
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields)
    if fields.has("mamba_num_heads", "mamba_n_heads") or fields.model_type == "mamba2":
        return _mamba2(fields)
    if fields.has("mamba_d_state") or fields.model_type in ("falcon_mamba", "mamba"):
        return _mamba1(fields)
    if fields.has("conv_L_cache"):  # LFM2's short convolution
        return StateSpace(
            variant="shortconv",
            conv_dim=fields.integer("hidden_size"),
            conv_kernel=fields.integer("conv_L_cache"),
            heads=0,
            head_dim=1,
            state_size=1,
        )
    raise fields.error(
        "linear_num_value_heads, linear_attn_config and mamba_n_heads",
        "are all missing, though the config lists state layers",
        "add the fields that describe the model's states, or build ModelSpec(layers=...) yourself",
    )


def _kda(fields: Fields, linear: Fields | None) -> StateSpace:
    """Kimi delta attention: q, k and v each pass a convolution of heads x head_dim channels."""
    if linear is not None:
        heads, head_dim = linear.integer("num_heads"), linear.integer("head_dim")
        kernel = linear.integer("short_conv_kernel_size")
    else:  # the form into which transformers 5 rewrites the config
        heads, head_dim = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        kernel = fields.integer("linear_conv_kernel_dim")
    return StateSpace(
        variant="kda",
        conv_dim=3 * heads * head_dim,
        conv_kernel=kernel,
        heads=heads,
        head_dim=head_dim,
        state_size=head_dim,
        state_dtype=_state_dtype(fields),
    )


def _gated_delta(fields: Fields) -> StateSpace:
    """Gated delta net: a state of key width x value width per value head."""
    key_heads = fields.integer("linear_num_key_heads")
    key_dim = fields.integer("linear_key_head_dim")
    heads = fields.integer("linear_num_value_heads")
    value_dim = fields.integer("linear_value_head_dim")
    return StateSpace(
        variant="gdn",
        conv_dim=2 * key_heads * key_dim + heads * value_dim,
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
        heads=heads,
        head_dim=value_dim,
        state_size=key_dim,
        groups=key_heads,
        state_dtype=_state_dtype(fields),
    )


def _mamba2(fields: Fields) -> StateSpace:
    names = ("mamba_num_heads", "mamba_n_heads")
    heads = fields.integer(*names, *(("num_heads",) if fields.model_type == "mamba2" else ()))
    head_dim = _mamba2_head_dim(fields, heads)
    groups = fields.integer("mamba_n_groups", "n_groups", default=1)
    size = fields.integer("ssm_state_size", "mamba_d_state", "state_size")
    return StateSpace(
        variant="mamba2",
        conv_dim=heads * head_dim + 2 * groups * size,
        conv_kernel=fields.integer("mamba_d_conv", "conv_kernel"),
        heads=heads,
        head_dim=head_dim,
        state_size=size,
        groups=groups,
        state_dtype=_state_dtype(fields),
    )


def _mamba2_head_dim(fields: Fields, heads: int) -> int:
    """Width of a Mamba-2 head; Bamba and Granite may say "auto"."""
    names = ("mamba_head_dim", "mamba_d_head")
    if fields.get(*names) not in (None, "auto"):
        return fields.integer(*names)
    if fields.model_type == "mamba2" and fields.has("head_dim"):
        return fields.integer("head_dim")
    width = fields.integer("mamba_expand", "expand") * fields.integer("hidden_size")
    if width % heads:
        raise fields.error(
            "mamba_d_head",
            f"is missing, and the inner width {width} is not a multiple of {heads} heads",
            "add it",
        )
    return width // heads


def _mamba1(fields: Fields) -> StateSpace:
    """Mamba-1: one head per channel; B and C bypass the convolution."""
    inner = _mamba1_width(fields)
    return StateSpace(
        variant="mamba1",
        conv_dim=inner,
        conv_kernel=fields.integer("mamba_d_conv", "conv_kernel"),
        heads=inner,
        head_dim=1,
        state_size=fields.integer("mamba_d_state", "state_size"),
        state_dtype=_state_dtype(fields),
    )


def _mamba1_width(fields: Fields) -> int:
    if fields.model_type in ("falcon_mamba", "mamba") and fields.has("intermediate_size"):
        return fields.integer("intermediate_size")
    return fields.integer("mamba_expand", "expand") * fields.integer("hidden_size")


def _state_dtype(fields: Fields) -> StateDtype:
    for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        value = fields.text(name)
        if value is None:
            continue
        if value not in _DTYPES:
            raise fields.error(name, f"is {value!r}", f"use one of {', '.join(sorted(_DTYPES))}")
        return _DTYPES[value]
    return "fp32"
