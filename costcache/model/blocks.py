"""Reads the kind of every layer from a config, in order, before any dimensions."""

from __future__ import annotations

from typing import Literal, NamedTuple

from costcache.model.fields import MAX_LAYERS, Fields

__all__ = ["Block", "read_blocks"]

Mixer = Literal["full", "sliding", "state"]
Ffn = Literal["none", "dense", "moe"]


class Block(NamedTuple):
    """One numbered layer: its token mixers (Falcon-H1 has two in parallel) and its feed-forward part."""

    mixers: tuple[Mixer, ...]
    ffn: Ffn


_MIXERS: dict[str, tuple[Mixer, ...]] = {
    "attention": ("full",),
    "chunked_attention": ("sliding",),
    "conv": ("state",),
    "deepseek_sparse_attention": ("full",),
    "full_attention": ("full",),
    "indexed_attention": ("full",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "mamba2": ("state",),
    "mlp": (),
    "moe": (),
    "sliding_attention": ("sliding",),
}
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_PURE_STATE = ("falcon_mamba", "mamba", "mamba2")
_STATE_FIELDS = ("linear_num_value_heads", "mamba_d_state", "mamba_n_heads", "mamba_num_heads")
# Families whose sliding window is off unless use_sliding_window turns it on.
_WINDOW_OPT_IN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def read_blocks(fields: Fields) -> list[Block]:
    """Return one `Block` per numbered layer.

    Raises `ConfigError` for an unknown layer kind, or a list that does not match the number of layers.
    """
    named = _named_layers(fields)
    if named is not None:
        count = len(named)
        if not 1 <= count <= MAX_LAYERS:
            raise fields.error(
                "hybrid_override_pattern / layers_block_type",
                f"lists {count} layers",
                f"1 to {MAX_LAYERS} are supported: correct it",
            )
        if "mlp" in named or "moe" in named or fields.model_type == "nemotron_h":
            # Nemotron-H: every entry is a mixer or a feed-forward part, never both.
            return [Block(_mixers(fields, name), _ffn_entry(name)) for name in named]
        mixers = [_mixers(fields, name) for name in named]
    else:
        count = fields.integer("num_hidden_layers", "n_layer", "n_layers")
        if count > MAX_LAYERS:
            raise fields.error(
                "num_hidden_layers", f"is {count}", f"at most {MAX_LAYERS} are supported: correct it"
            )
        mixers = _layer_mixers(fields, count)
    if fields.model_type in _PURE_STATE:
        return [Block(m, "none") for m in mixers]
    return [Block(m, ffn) for m, ffn in zip(mixers, _ffns(fields, count), strict=True)]


def _named_layers(fields: Fields) -> list[str] | None:
    pattern = fields.text("hybrid_override_pattern")
    if pattern is None:
        return fields.strings("layers_block_type")
    unknown = sorted(set(pattern) - set(_NEMOTRON))
    if unknown:
        raise fields.error(
            "hybrid_override_pattern",
            f"has unknown characters {unknown}",
            f"use only {', '.join(_NEMOTRON)}",
        )
    return [_NEMOTRON[character] for character in pattern]


def _ffn_entry(name: str) -> Ffn:
    return "dense" if name == "mlp" else "moe" if name == "moe" else "none"


def _mixers(fields: Fields, name: str) -> tuple[Mixer, ...]:
    if name not in _MIXERS:
        raise fields.error(
            "layer_types" if fields.has("layer_types") else "layers_block_type",
            f"contains {name!r}, a layer kind that costcache does not support",
            f"known kinds are {', '.join(sorted(_MIXERS))}; build ModelSpec(layers=...) yourself",
        )
    return _MIXERS[name]


def _layer_mixers(fields: Fields, count: int) -> list[tuple[Mixer, ...]]:
    """Token mixers of each layer, from the field in which this family lists them."""
    names = fields.strings("layer_types", count)
    if names is not None:
        return [_mixers(fields, name) for name in names]
    if fields.model_type in _PURE_STATE:
        return [("state",)] * count
    if fields.model_type == "falcon_h1":
        return [("full", "state")] * count
    linear = fields.nested("linear_attn_config")
    if linear is not None:
        return _kda_mixers(linear, count)
    attention = _attention_indices(fields, count)
    if attention is not None:
        return [("full",) if index in attention else ("state",) for index in range(count)]
    if fields.has(*_STATE_FIELDS):
        raise fields.error(
            "layer_types",
            "is missing, though the config describes state layers",
            "add it: one of 'full_attention', 'linear_attention' or 'mamba' per layer",
        )
    return _window_mixers(fields, count)


def _kda_mixers(linear: Fields, count: int) -> list[tuple[Mixer, ...]]:
    """Token mixers of Kimi-Linear, whose config numbers layers from 1."""
    kda, full = (linear.integers(name) for name in ("kda_layers", "full_attn_layers"))
    if kda is None or full is None or sorted(kda + full) != list(range(1, count + 1)):
        raise linear.error(
            "kda_layers and full_attn_layers",
            f"are {kda} and {full}",
            f"together they must list each layer from 1 to {count} exactly once",
        )
    return [("state",) if index + 1 in set(kda) else ("full",) for index in range(count)]


def _attention_indices(fields: Fields, count: int) -> set[int] | None:
    """Indices of a hybrid's attention layers; all others keep states. None if the config gives none."""
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        listed = fields.integers(name)
        if listed is not None:
            if any(not 0 <= index < count for index in listed):
                raise fields.error(name, f"is {listed}", f"layers are numbered 0 to {count - 1}: correct it")
            return set(listed)
    period = fields.optional_integer("attn_layer_period")  # Jamba
    if period is not None:
        offset = fields.integer("attn_layer_offset", default=0, least=0)
        return {index for index in range(count) if index % period == offset}
    interval = fields.optional_integer("full_attention_interval")  # Qwen3-Next, Qwen3.5
    if interval is not None:
        return {index for index in range(count) if (index + 1) % interval == 0}
    return None


def _window_mixers(fields: Fields, count: int) -> list[tuple[Mixer, ...]]:
    """Token mixers of a pure attention model: full or sliding, for each layer."""
    full: tuple[Mixer, ...] = ("full",)
    sliding: tuple[Mixer, ...] = ("sliding",)
    hybrid = fields.integers("hybrid_layer_pattern", count)  # MiMo-V2: 1 marks a sliding layer
    if hybrid is not None:
        return [sliding if flag else full for flag in hybrid]
    if not fields.has("sliding_window") or not fields.flag(
        "use_sliding_window", default=fields.model_type not in _WINDOW_OPT_IN
    ):
        return [full] * count
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str):  # EXAONE-4: "LLLG", local and global
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error("sliding_window_pattern", f"is {pattern!r}", "use only the letters L and G")
        return [sliding if pattern[i % len(pattern)] == "L" else full for i in range(count)]
    period = fields.optional_integer("sliding_window_pattern", "_sliding_window_pattern")
    if period is not None:  # Gemma-2 and -3, Cohere-2: the last layer of each period is full
        return [full if (index + 1) % period == 0 else sliding for index in range(count)]
    if fields.has("use_sliding_window"):  # Qwen2 and 3: full up to max_window_layers
        first = fields.integer("max_window_layers", default=0, least=0)
        return [sliding if index >= first else full for index in range(count)]
    return [sliding] * count  # Mistral-7B-v0.1, Phi-3


def _ffns(fields: Fields, count: int) -> list[Ffn]:
    """Feed-forward kind of each layer, by the family's rule for expert layers."""
    listed = fields.strings("mlp_layer_types", count)
    if listed is not None:
        return ["moe" if name == "sparse" else "dense" for name in listed]
    experts = fields.optional_integer(
        "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", least=0
    )
    if not experts:
        return ["dense"] * count
    return ["moe" if _is_moe(fields, index, count) else "dense" for index in range(count)]


def _is_moe(fields: Fields, index: int, count: int) -> bool:
    period = fields.optional_integer("expert_layer_period")  # Jamba
    if period is not None:
        return index % period == fields.integer("expert_layer_offset", default=0, least=0)
    listed = fields.integers("moe_layers")  # Llama-4
    if listed is not None:
        return index in listed
    step = fields.optional_integer("interleave_moe_layer_step")  # Llama-4
    if step is not None:
        return (index + 1) % step == 0
    if index in (fields.integers("mlp_only_layers") or ()):  # Qwen-MoE
        return False
    step = fields.optional_integer("decoder_sparse_step")
    if step is not None:
        return (index + 1) % step == 0
    if isinstance(fields.get("moe_layer_freq"), list | tuple):  # MiMo-V2
        return bool((fields.integers("moe_layer_freq", count) or [])[index])
    first = fields.integer("first_k_dense_replace", "moe_layer_start_index", default=0, least=0)
    every = fields.integer("moe_layer_freq", "moe_layer_interval", default=1)
    return index >= first and index % every == 0  # DeepSeek, Kimi, GLM, ERNIE
