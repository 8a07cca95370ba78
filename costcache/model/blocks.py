"""Reads the kind of every layer from a config, in order, before any dimensions."""

from __future__ import annotations

from typing import Literal, NamedTuple

from costcache.model.fields import MAX_LAYERS, Fields

__all__ = ["EXPERTS", "Block", "is_compressed", "read_blocks"]

Mixer = Literal["full", "sliding", "indexed", "compressed", "state", "embedding"]
Ffn = Literal["none", "dense", "moe", "both"]


class Block(NamedTuple):
    """One numbered layer: its token mixers (Falcon-H1 has two in parallel) and its feed-forward part.

    ``ratio`` is the tokens per latent of a "compressed" mixer. A feed-forward part of "both" is a dense
    one with experts beside it.
    """

    mixers: tuple[Mixer, ...]
    ffn: Ffn
    ratio: int = 1


_MIXERS: dict[str, tuple[Mixer, ...]] = {
    "attention": ("full",),
    "chunked_attention": ("sliding",),
    "conv": ("state",),
    "deepseek_sparse_attention": ("indexed",),
    "full_attention": ("full",),
    "hybrid": ("full", "state"),
    "indexed_attention": ("indexed",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "mamba2": ("state",),
    "minimax_m3_sparse": ("indexed",),
    "mlp": (),
    "moe": (),
    "qwen_sparse_attention": ("indexed",),
    "sliding_attention": ("sliding",),
}
# Layers that keep a window of latents, and compressed ones of the whole context (DeepSeek-V4): the
# field with the tokens per latent, and the usual number.
_COMPRESSED = {
    "sliding_attention": ("", 0),
    "compressed_sparse_attention": ("compress_rate_csa", 4),
    "heavily_compressed_attention": ("compress_rate_hca", 128),
}
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
"""Names of the number of routed experts."""

_FFNS: dict[str, Ffn] = {"dense": "dense", "sparse": "moe", "moe": "moe", "hash_moe": "moe"}
# Numbers of dense layers before the expert layers, and fields that a list of the layers makes moot.
_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "moe_layer_num_skipped")
_PLACEMENT = (
    *_FIRST,
    "decoder_sparse_step",
    "expert_layer_offset",
    "expert_layer_period",
    "interleave_moe_layer_step",
    "mlp_only_layers",
    "moe_every_n_layer",
    "moe_layer_end_index",
    "moe_layer_freq",
    "moe_layer_interval",
    "moe_layers",
    "moe_layers_enum",
    "mtp_mlp_layer_types",
)
# MiniMax-M3's indexer, which only layers listed as sparse have.
_INDEXER = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks")
# Fields that describe which layers slide or keep states; a list of the layers makes them moot.
_LAYOUT = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_offset",
    "attn_layer_period",
    "attn_type_list",
    "first_layers_types",
    "full_attention_interval",
    "full_attention_layers",
    "full_attn_idxs",
    "global_attn_every_n_layers",
    "hybrid_layers_types_block",
    "last_layers_types",
    "layer_group_size",
    "local_attention",
    "prefix_dense_sliding_window_pattern",
    "hybrid_layer_ids",
    "hybrid_layer_pattern",
    "max_window_layers",
    "mtp_layer_types",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_attn_layers",
    "num_hybrid_layers_block",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "sliding_window_size",
    "use_sliding_window",
)
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_PURE_STATE = ("falcon_mamba", "mamba", "mamba2")
_STATE_FIELDS = (
    "conv_L_cache",
    "linear_num_value_heads",
    "linear_num_heads",
    "short_conv_kernel_size",
    "mamba_d_state",
    "mamba_n_heads",
    "mamba_num_heads",
    "n_mamba_heads",
)
# Families without experts, whose classes in SGLang write the numbers of a relative's.
_DENSE = ("qwen3_5_text",)
# Families in which a window without more words is that of every layer: Mistral-7B-v0.1, Phi-3.
_ALL_SLIDE = ("ministral", "mistral", "mixtral", "phi", "starcoder2")
# Families whose sliding window is off unless use_sliding_window turns it on.
_WINDOW_OPT_IN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def read_blocks(fields: Fields) -> list[Block]:
    """Return one `Block` per numbered layer.

    Raises `ConfigError` for an unknown layer kind, or a list that does not match the number of layers.
    """
    fields.agree("num_hidden_layers", "n_layer", "n_layers")
    if is_compressed(fields):
        return _compressed_blocks(fields)
    if fields.model_type.startswith("longcat"):
        return _shortcut_blocks(fields)
    named = _named_layers(fields)
    if named is not None:
        count = len(named)
        if not fields.has("hybrid_override_pattern"):
            stated = fields.optional_integer("num_hidden_layers")
            if stated is not None and stated != count:
                raise fields.error(
                    "layers_block_type",
                    f"has {count} entries for {stated} layers",
                    "give one per layer, or correct the number of layers",
                )
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
        if fields.model_type.startswith("zamba"):  # only the shared blocks have a feed-forward part
            return [Block(m, "dense" if "full" in m else "none") for m in mixers]
    else:
        count = _count(fields)
        mixers = _layer_mixers(fields, count)
    if fields.model_type in _PURE_STATE:
        return [Block(m, "none") for m in mixers]
    if fields.model_type == "nanbeige":  # every pass through the stack caches K/V of its own
        mixers *= fields.integer("num_loops", default=1)
        return [Block(m, "dense") for m in mixers]
    mixers = _with_embeddings(fields, mixers)
    return [Block(m, ffn) for m, ffn in zip(mixers, _ffns(fields, count), strict=True)]


def is_compressed(fields: Fields) -> bool:
    """Whether the layers are those of DeepSeek-V4, in the published form or in that of transformers."""
    return fields.has("compress_ratios", "compress_rates") or fields.model_type == "deepseek_v4"


def _count(fields: Fields) -> int:
    count = fields.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > MAX_LAYERS:
        raise fields.error(
            "num_hidden_layers", f"is {count}", f"at most {MAX_LAYERS} are supported: correct it"
        )
    return count


def _shortcut_blocks(fields: Fields) -> list[Block]:
    """The layers of LongCat: each has attention and a dense part twice, and experts beside the second.

    They count as two, as in transformers' cache.
    """
    halves = [Block(("full",), "dense"), Block(("full",), "both")]
    return halves * fields.integer("num_layers", "num_hidden_layers")


def _with_embeddings(fields: Fields, mixers: list[tuple[Mixer, ...]]) -> list[tuple[Mixer, ...]]:
    """Add the short convolutions of Qwen4's n-gram embeddings, whose layers are numbered from 1."""
    numbers = _numbers(fields, "ple_layer_ids", len(mixers), first=1)
    if not numbers:
        fields.settle("ple_conv_kernel_size", "ngram_size")
    return [(*m, "embedding") if index + 1 in numbers else m for index, m in enumerate(mixers)]


def _compressed_blocks(fields: Fields) -> list[Block]:
    """The layers of DeepSeek-V4: a window, and latents of several tokens each unless the ratio is 0."""
    count = _count(fields)
    ratios = fields.integers("compress_ratios")
    names = fields.strings("layer_types", count)
    if names is not None:
        ratios = [_ratio(fields, name) for name in names]
    elif ratios is None:
        raise fields.error(
            "compress_ratios", "and layer_types are both missing", "add one: the ratio of each layer"
        )
    elif not count <= len(ratios) <= count + max(1, fields.draft_layers()):
        # The published list has an entry for the draft layer, whether or not the config counts that.
        raise fields.error(
            "compress_ratios",
            f"has {len(ratios)} entries for {count} layers",
            "give one per layer, or correct the number of layers",
        )
    blocks = []
    # Every layer has experts; SGLang's class inherits the dense layers of DeepSeek-V3's.
    experts: list[Ffn] = ["moe"] * count
    ffns = _ffns(fields, count) if fields.has("mlp_layer_types") else experts
    fields.settle(*_PLACEMENT)
    for ratio, ffn in zip(ratios[:count], ffns, strict=True):
        if ratio not in (0, 4, 128):
            raise fields.error("compress_ratios", f"contains {ratio}", "known ratios are 0, 4 and 128")
        mixers: tuple[Mixer, ...] = ("sliding", "compressed") if ratio else ("sliding",)
        blocks.append(Block(mixers, ffn, ratio))
    return blocks


def _ratio(fields: Fields, name: str) -> int:
    if name not in _COMPRESSED:
        raise fields.error(
            "layer_types",
            f"contains {name!r}, a layer kind that costcache does not support in this architecture",
            f"known kinds are {', '.join(sorted(_COMPRESSED))}",
        )
    rates = fields.nested("compress_rates")
    field, usual = _COMPRESSED[name]
    if not usual:
        return 0
    if rates is not None:
        return rates.integer(name, default=usual)
    return fields.integer(field, default=usual)


def _named_layers(fields: Fields) -> list[str] | None:
    pattern = fields.text("hybrid_override_pattern")
    if pattern is None:
        named = fields.strings("layers_block_type")
        if named is not None:
            fields.settle(*_LAYOUT, "layer_types")
        return named
    fields.settle(*_LAYOUT, "layers_block_type", "layer_types", "num_hidden_layers")
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
    if not fields.has("sliding_window"):
        fields.settle("max_window_layers", "use_sliding_window")
    names = fields.strings("layer_types", count)
    if names is not None:
        fields.settle(*_LAYOUT, "linear_attn_config", "num_linear_key_value_heads")
        mixers = [_mixers(fields, name) for name in names]
        if ("indexed",) not in mixers:
            fields.settle(*_INDEXER)
        return mixers
    if fields.model_type in _PURE_STATE:
        return [("state",)] * count
    if fields.model_type == "falcon_h1":
        return [("full", "state")] * count
    linear = fields.nested("linear_attn_config")
    if linear is not None:
        return _kda_mixers(linear, count)
    listed = _repeated_types(fields, count)
    if listed is not None:
        return listed
    kinds = fields.integers("attn_type_list", count)
    if kinds is not None:
        return _typed_mixers(fields, kinds)
    attention = _attention_indices(fields, count)
    if attention is not None:
        return [("full",) if index in attention else ("state",) for index in range(count)]
    sparse = fields.nested("sparse_attention_config")
    if sparse is not None and sparse.flag("use_sparse_attention", default=True):
        flags = sparse.integers("sparse_attention_freq", count)
        return [("indexed",) if flag else ("full",) for flag in flags or [1] * count]
    if fields.has(*_STATE_FIELDS):
        raise fields.error(
            "layer_types",
            "is missing, though the config describes state layers",
            "add it: one of 'full_attention', 'linear_attention' or 'mamba' per layer",
        )
    return _window_mixers(fields, count)


def _kda_mixers(linear: Fields, count: int) -> list[tuple[Mixer, ...]]:
    """Token mixers of Kimi-Linear, whose config numbers layers from 1; GLM-5.3's numbers them from 0."""
    kda, full = (linear.integers(name) for name in ("kda_layers", "full_attn_layers"))
    listed = None if kda is None or full is None else sorted(kda + full)
    first = 0 if listed == list(range(count)) else 1
    if kda is None or listed != list(range(first, count + first)):
        raise linear.error(
            "kda_layers and full_attn_layers",
            f"are {kda} and {full}",
            f"together they must list each layer from 1 to {count} exactly once",
        )
    return [("state",) if index + first in set(kda) else ("full",) for index in range(count)]


def _repeated_types(fields: Fields, count: int) -> list[tuple[Mixer, ...]] | None:
    """Token mixers of IQuest-Q1: the first layers, a block of layers several times, the last ones."""
    if not fields.has("hybrid_layers_types_block", "num_hybrid_layers_block"):
        return None
    fields.settle(*_LAYOUT)
    block = fields.strings("hybrid_layers_types_block") or ["full_attention"] + ["sliding_attention"] * 3
    names = fields.strings("first_layers_types") or ["full_attention"]
    names = names + block * fields.integer("num_hybrid_layers_block")
    names += fields.strings("last_layers_types") or ["full_attention"] * 3
    if len(names) != count:
        raise fields.error(
            "hybrid_layers_types_block",
            f"and its neighbours list {len(names)} layers of {count}",
            "correct one of them",
        )
    if not fields.flag("use_hybrid_layers", True) or not fields.flag("use_sliding_window", True):
        return [("full",)] * count
    return [_mixers(fields, name) for name in names]


def _typed_mixers(fields: Fields, kinds: list[int]) -> list[tuple[Mixer, ...]]:
    """Token mixers of the MiniMax models: 0 marks lightning attention, 1 softmax attention."""
    if set(kinds) - {0, 1}:
        raise fields.error(
            "attn_type_list",
            f"contains {sorted(set(kinds) - {0, 1})}",
            "known are 0 (lightning attention) and 1 (softmax attention)",
        )
    return [("full",) if kind else ("state",) for kind in kinds]


def _attention_indices(fields: Fields, count: int) -> set[int] | None:
    """Indices of a hybrid's attention layers; all others keep states. None if the config gives none."""
    grouped = _grouped(fields, count)
    if grouped is not None:
        return grouped
    for name in ("attn_layer_indices", "full_attn_idxs", "full_attention_layers"):  # Bamba, LFM2, GigaChat
        listed = fields.integers(name)
        if listed is not None:
            return _numbers(fields, name, count)
    period = fields.optional_integer("attn_layer_period")  # Jamba
    if period is not None:
        offset = fields.integer("attn_layer_offset", default=0, least=0)
        return {index for index in range(count) if index % period == offset}
    interval = fields.optional_integer("full_attention_interval")  # Qwen3-Next, Qwen3.5
    if interval is not None:
        return {index for index in range(count) if (index + 1) % interval == 0}
    return None


def _numbers(fields: Fields, name: str, count: int, first: int = 0) -> set[int]:
    """Numbers of layers, each listed once. Raises `ConfigError` for one that does not exist, or twice."""
    listed = fields.integers(name) or []
    if any(not first <= number < count + first for number in listed) or len(set(listed)) < len(listed):
        raise fields.error(
            name, f"is {listed}", f"layers are numbered {first} to {count + first - 1}: list each once"
        )
    return set(listed)


def _grouped(fields: Fields, count: int) -> set[int] | None:
    """Attention layers of the Ling and Ring hybrids: the last of each group; or a list, where 1 is linear."""
    if isinstance(fields.get("layer_group_size"), list | tuple):
        flags = fields.integers("layer_group_size", count) or []
        return {index for index, flag in enumerate(flags) if flag != 1}
    size = fields.optional_integer("layer_group_size")
    if size is None or size == 1:
        return None
    if count % size and not fields.has("kv_lora_rank"):  # Ring-linear: what is left over is attention
        return {index for index in range(count) if (index + 1) % size == 0 or index >= count // size * size}
    return {index for index in range(count) if (index + 1) % size == 0}


def _window_mixers(fields: Fields, count: int) -> list[tuple[Mixer, ...]]:
    """Token mixers of a pure attention model: full or sliding, for each layer."""
    full: tuple[Mixer, ...] = ("full",)
    sliding: tuple[Mixer, ...] = ("sliding",)
    hybrid = fields.integers("hybrid_layer_pattern", count)  # MiMo-V2: 1 marks a sliding layer
    if hybrid is not None:
        fields.settle("attention_chunk_size", "sliding_window", "sliding_window_size")
        return [sliding if flag else full for flag in hybrid]
    fields.settle("use_sliding_window", "max_window_layers")
    if not fields.has("sliding_window"):
        fields.settle("global_attn_every_n", "global_attn_every_n_layers")
        return _chunked_mixers(fields, count)
    fields.settle("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval")
    if not fields.flag("use_sliding_window", default=fields.model_type not in _WINDOW_OPT_IN):
        fields.settle("sliding_window_pattern", "_sliding_window_pattern")
        return [full] * count
    pattern = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str):  # EXAONE-4: "LLLG", local and global
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error("sliding_window_pattern", f"is {pattern!r}", "use only the letters L and G")
        return [sliding if pattern[i % len(pattern)] == "L" else full for i in range(count)]
    period = fields.optional_integer(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
    )
    if period is not None:  # Gemma-2 and -3, Cohere-2, AFMoE: the last layer of each period is full
        return [full if (index + 1) % period == 0 else sliding for index in range(count)]
    if fields.has("use_sliding_window"):  # Qwen2 and 3: full up to max_window_layers
        first = fields.integer("max_window_layers", default=0, least=0)
        return [sliding if index >= first else full for index in range(count)]
    longest = fields.optional_integer("max_position_embeddings")
    never = longest is not None and fields.integer("sliding_window") >= longest
    if not never and not fields.model_type.startswith(_ALL_SLIDE):
        raise fields.error(
            "sliding_window",
            f"is {fields.get('sliding_window')!r}, but nothing says which layers it applies to",
            "add layer_types: one of 'full_attention' or 'sliding_attention' per layer",
        )
    return [sliding] * count


def _chunked_mixers(fields: Fields, count: int) -> list[tuple[Mixer, ...]]:
    """Token mixers of Llama-4: layers with rotary positions see their chunk only, the others everything.

    A chunk caches at most ``attention_chunk_size`` tokens of a sequence: it is read as a window.
    """
    full: tuple[Mixer, ...] = ("full",)
    if not fields.has("attention_chunk_size"):
        fields.settle("sliding_window_pattern", "_sliding_window_pattern")
        return [full] * count
    rotary = fields.integers("no_rope_layers", count) if fields.get("no_rope_layers") != [] else None
    if rotary is None:
        named = fields.has("no_rope_layer_interval", "interleave_moe_layer_step")
        if not (named or fields.model_type.startswith("llama4")):
            raise fields.error(
                "attention_chunk_size",
                "says that layers attend to chunks, but nothing says which layers",
                "add layer_types: one of 'full_attention' or 'chunked_attention' per layer",
            )
        interval = fields.integer("no_rope_layer_interval", default=4)
        rotary = [int((index + 1) % interval != 0) for index in range(count)]
    return [("sliding",) if flag else full for flag in rotary]


def _ffns(fields: Fields, count: int) -> list[Ffn]:
    """Feed-forward kind of each layer, by the family's rule for expert layers."""
    fields.settle(*_PLACEMENT)
    listed = fields.strings("mlp_layer_types", count)
    if listed is not None:
        unknown = sorted(set(listed) - set(_FFNS))
        if unknown:
            raise fields.error("mlp_layer_types", f"contains {unknown}", f"known are {', '.join(_FFNS)}")
        return [_FFNS[name] for name in listed]
    if fields.model_type in _DENSE:
        return ["dense"] * count
    switched_off = not fields.flag("is_moe", default=True) or not fields.flag("enable_moe_block", True)
    experts = fields.optional_integer(*EXPERTS, least=0)
    if experts == 1 and fields.model_type in ("hunyuan", "hunyuan_v1_dense"):  # their classes are dense then
        experts = 0
    if not experts or switched_off:
        return ["dense"] * count
    sparse: Ffn = "both" if fields.flag("residual_moe") else "moe"  # Grok-2
    return [sparse if _is_moe(fields, index, count) else "dense" for index in range(count)]


def _is_moe(fields: Fields, index: int, count: int) -> bool:
    period = fields.optional_integer("expert_layer_period")  # Jamba
    if period is not None:
        return index % period == fields.integer("expert_layer_offset", default=0, least=0)
    if fields.has("moe_layers"):  # Llama-4
        return index in _numbers(fields, "moe_layers", count)
    if fields.has("moe_layers_enum"):  # Step-3: "3,4,5"
        return index in _enumerated(fields)
    step = fields.optional_integer("interleave_moe_layer_step")  # Llama-4
    if step is not None:
        return (index + 1) % step == 0
    if index in _numbers(fields, "mlp_only_layers", count):  # Qwen-MoE
        return False
    step = fields.optional_integer("decoder_sparse_step")
    if step is not None:
        return (index + 1) % step == 0
    if isinstance(fields.get("moe_layer_freq"), list | tuple):  # MiMo-V2
        return bool((fields.integers("moe_layer_freq", count) or [])[index])
    first = fields.integer(*_FIRST, default=0, least=0)
    every = fields.integer("moe_layer_freq", "moe_layer_interval", "moe_every_n_layer", default=1)
    return index >= first and index % every == 0  # DeepSeek, Kimi, GLM, ERNIE


def _enumerated(fields: Fields) -> set[int]:
    if isinstance(fields.get("moe_layers_enum"), list | tuple):  # as SGLang's class rewrites it
        return set(fields.integers("moe_layers_enum") or ())
    text = fields.text("moe_layers_enum") or ""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not all(item.isdecimal() for item in items):
        raise fields.error("moe_layers_enum", f"is {text!r}", "it must list layer numbers, as in '3,4,5'")
    return {int(item) for item in items}
