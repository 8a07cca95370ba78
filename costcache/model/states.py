"""Builds the specs of recurrent layers from the fields of a config."""

from __future__ import annotations

from costcache.model.fields import Fields
from costcache.model.layers import StateDtype, StateSpace

__all__ = ["read_embedding_state", "read_state_space"]

_DTYPES: dict[str, StateDtype] = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp16": "fp16",
    "fp32": "fp32",
}
_MAMBA2_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")


def read_state_space(fields: Fields) -> StateSpace:
    """Read what a recurrent layer keeps per sequence.

    Raises `ConfigError` for missing fields, or a kind of state that costcache does not know.
    """
    linear = fields.nested("linear_attn_config")
    if linear is not None or fields.has("linear_num_heads"):
        return _kda(fields, linear)
    if fields.model_type == "zamba":  # Mamba-1 in groups of channels: the same number of values
        fields.settle("n_mamba_heads")
        return _mamba1(fields)
    if fields.has("short_conv_kernel_size"):  # Ling-3: the attention heads have the states
        return _kda(fields, None)
    if fields.has("attn_type_list", "layer_group_size") or fields.model_type.startswith("minimax"):
        return _lightning(fields)
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields)
    if fields.has(*_MAMBA2_HEADS) or fields.model_type == "mamba2":
        return _mamba2(fields)
    if fields.has("mamba_d_state") or fields.model_type in ("falcon_mamba", "mamba"):
        return _mamba1(fields)
    if fields.has("conv_L_cache"):  # LFM2's short convolution
        fields.settle("conv_dim_out", "conv_use_xavier_init")
        return StateSpace(
            variant="shortconv",
            conv_dim=fields.integer("conv_dim", default=fields.integer("hidden_size")),
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


def read_embedding_state(fields: Fields) -> StateSpace:
    """Read the short convolution of an n-gram embedding (Qwen4), which every rank has in full."""
    streams = fields.integer("hc_count", default=4)
    steps = (fields.integer("ple_conv_kernel_size", default=4) - 1) * fields.integer("ngram_size", default=3)
    return StateSpace(
        variant="shortconv",
        conv_dim=fields.integer("hidden_size") * streams,
        conv_kernel=steps + 1,
        heads=0,
        head_dim=1,
        state_size=1,
        replicated=True,
    )


def _lightning(fields: Fields) -> StateSpace:
    """Lightning attention: a key width x value width matrix per head, and no convolution."""
    fields.settle("num_linear_key_value_heads")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        head_dim = _divided(fields, "head_dim", fields.integer("hidden_size"), heads)
    return StateSpace(
        variant="lightning",
        conv_dim=0,
        conv_kernel=1,
        heads=heads,
        head_dim=head_dim,
        state_size=head_dim,
        state_dtype=_state_dtype(fields),
    )


def _divided(fields: Fields, name: str, width: int, heads: int) -> int:
    if width % heads:
        raise fields.error(
            name, f"is missing, and the width {width} is not a multiple of {heads} heads", "add it"
        )
    return width // heads


def _kda(fields: Fields, linear: Fields | None) -> StateSpace:
    """Kimi delta attention: q, k and v each pass a convolution of heads x head_dim channels."""
    fields.settle(
        "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "num_linear_key_value_heads"
    )
    if linear is not None:
        heads, head_dim = linear.integer("num_heads"), linear.integer("head_dim")
        kernel = linear.integer("short_conv_kernel_size")
    elif fields.has("short_conv_kernel_size"):
        heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
        kernel = fields.integer("short_conv_kernel_size")
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
    if fields.get("linear_attention_type") == "Qwen3NextGatedDeltaNet":  # GigaChat; others are refused
        fields.settle("linear_attention_type")
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
    fields.settle("mamba_expand", "expand")  # the heads and their width say as much
    fields.settle("mamba_intermediate", "mamba_intermediate_size")  # SGLang's classes write their product
    heads = fields.integer(*_MAMBA2_HEADS, *(("num_heads",) if fields.model_type == "mamba2" else ()))
    head_dim = _mamba2_head_dim(fields, heads)
    groups = fields.integer("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
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
    names = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    if fields.get(*names) not in (None, "auto"):
        head_dim = fields.integer(*names)
        inner = fields.optional_integer("mamba_d_ssm")
        if inner is not None and inner != heads * head_dim:
            raise fields.error(
                "mamba_d_ssm", f"is {inner} for {heads} heads of {head_dim}", "correct one of them"
            )
        return head_dim
    if fields.model_type == "mamba2" and fields.has("head_dim"):
        return fields.integer("head_dim")
    width = fields.integer("mamba_d_ssm", default=0, least=0) or _mamba_width(fields)
    return _divided(fields, "mamba_d_head", width, heads)


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
    return _mamba_width(fields)


def _mamba_width(fields: Fields) -> int:
    """Inner width: hidden_size times the expansion, which may be a fraction (1.5)."""
    name = "mamba_expand" if fields.has("mamba_expand") else "expand"
    if not fields.has(name):
        return fields.integer("mamba_expand", "expand")  # raises the error for a missing field
    return max(1, int(fields.ratio(name, 2.0) * fields.integer("hidden_size")))


def _state_dtype(fields: Fields) -> StateDtype:
    for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        value = fields.text(name)
        if value is None:
            continue
        if value not in _DTYPES:
            raise fields.error(name, f"is {value!r}", f"use one of {', '.join(sorted(_DTYPES))}")
        return _DTYPES[value]
    return "fp32"
