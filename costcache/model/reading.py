"""Builds layer specs from the fields of a config."""

from __future__ import annotations

from typing import NamedTuple

from costcache.model.blocks import Block, is_compressed, read_blocks
from costcache.model.fields import Fields
from costcache.model.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    SlidingWindow,
)
from costcache.model.refusals import refuse_kinds, refuse_unread
from costcache.model.states import read_embedding_state, read_state_space

__all__ = ["ReadModel", "read_model", "window_fields"]

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "num_attention_groups",  # Step-3
    "multi_query_group_num",  # ChatGLM
    "num_query_groups",  # Megatron, NeMo
    "n_head_kv",  # Falcon's first form
    "n_kv_heads",  # OLMo, Meta's params.json
)
# What the families call the parts of an indexer: width of its key, its query heads, what each query
# attends to, the unit of that in tokens, and the tokens that share an index key.
_INDEXERS = (
    ("indexer_head_dim", "indexer_n_heads", "indexer_budget", "", "indexer_compress_ratio"),  # Qwen-4
    ("index_head_dim", "index_n_heads", "index_topk_blocks", "index_block_size", ""),  # MiniMax-M3
    ("index_head_dim", "index_n_heads", "index_topk", "", "index_kpool"),  # DeepSeek-V3.2, GLM-5
)
_NESTED_INDEXER = (  # MiniMax-M3 as published, in sparse_attention_config
    "sparse_index_dim",
    "sparse_num_index_heads",
    "sparse_topk_blocks",
    "sparse_block_size",
    "",
)


class ReadModel(NamedTuple):
    """A config, read: its numbered blocks, the layers that cache something, and their numbers.

    ``fields`` has one `Fields` per block, with the settings of that layer.
    """

    blocks: list[Block]
    layers: list[LayerSpec]
    layer_ids: list[int]
    fields: list[Fields]


def read_model(fields: Fields) -> ReadModel:
    """Read every layer. Raises `ConfigError` that names the missing, wrong or unknown field."""
    refuse_kinds(fields)
    blocks = read_blocks(fields)
    count = len(blocks)
    fields.per_layer(count, _without_positions(fields, count))
    own = [fields.at(index) for index in range(count)]
    _check_latent(fields)
    shared = _shared_layers(fields, count)
    layers: list[LayerSpec] = []
    layer_ids: list[int] = []
    made: dict[tuple[int, str, int, bool, bool], LayerSpec] = {}  # identical layers share one object
    for index, block in enumerate(blocks):
        kv_shared = index in shared
        reuses = _reuses_selection(fields, index, count)
        for mixer in block.mixers:
            key = (id(own[index]), mixer, block.ratio, kv_shared, reuses)
            if key not in made:
                made[key] = _layer(own[index], mixer, block.ratio, kv_shared, reuses)
            layers.append(made[key])
            layer_ids.append(index)
    if not layers:
        raise fields.error("layer_types", "lists no attention or state layer", "correct the list of layers")
    # SGLang adds these to every config; layers that slide have read them by now.
    fields.settle("swa_head_dim", "swa_v_head_dim", "swa_num_key_value_heads", "swa_num_attention_heads")
    # What only the count of parameters reads.
    fields.settle("hidden_size_per_layer_input", "moe_latent_size", "ple_embed_dim", "no_kda_lora")
    listed = fields.has("layer_types", "layers_block_type")
    stateless = listed and not any("state" in block.mixers for block in blocks)
    refuse_unread(fields, count, stateless=stateless)
    return ReadModel(blocks, layers, layer_ids, own)


def _without_positions(fields: Fields, count: int) -> dict[int, dict[str, int]]:
    """Latent layers without rotary positions, whose keys are as wide but cache no rotary part.

    Mistral-Large-4 has them.
    """
    if not fields.has("kv_lora_rank") or not fields.get("no_rope_layers"):
        return {}
    rotary = fields.integers("no_rope_layers", count) or []
    rope = fields.integer("qk_rope_head_dim", least=0)
    widths = {"qk_rope_head_dim": 0, "qk_nope_head_dim": fields.integer("qk_nope_head_dim") + rope}
    return {index: widths for index, flag in enumerate(rotary) if not flag}


def _shared_layers(fields: Fields, count: int) -> set[int]:
    """Numbers of the layers that read the K/V of an earlier layer, and store none."""
    last = fields.integer("num_kv_shared_layers", default=0, least=0)  # Gemma-3n and -4
    if last >= count:
        raise fields.error(
            "num_kv_shared_layers", f"is {last} for {count} layers", "at least one must store K/V: correct it"
        )
    sources = fields.integers("kv_source_layers", count)  # Mistral-Large-4
    if sources is None:
        return set(range(count - last, count))
    wrong = [source for index, source in enumerate(sources) if not 0 <= source <= index]
    if wrong:
        raise fields.error("kv_source_layers", f"contains {wrong[0]}", "a source is the layer, or one before")
    return {index for index, source in enumerate(sources) if source != index}


def _has_latent(fields: Fields) -> bool:
    """Whether attention is latent. Ling-2.5 and Ring-2.5 say so in words."""
    return (
        fields.has("kv_lora_rank")
        and fields.flag("use_mla", default=True)
        and fields.get("full_attention_type") in (None, "mla")
    )


def _layer(fields: Fields, mixer: str, ratio: int, kv_shared: bool, reuses: bool) -> LayerSpec:
    if mixer == "state":
        return read_state_space(fields)
    if mixer == "embedding":
        return read_embedding_state(fields)
    if mixer == "compressed" or is_compressed(fields):
        return _compressed(fields, mixer, ratio)
    latent = _has_latent(fields)
    if mixer == "sliding":
        own = fields.has("swa_num_key_value_heads") and not fields.has("swa_kv_lora_rank")
        return _sliding(fields, kv_shared, latent and not own)
    if latent:
        return _latent(fields, reuses, kv_shared)
    heads, kv_heads, head_dim, v_head_dim = _attention_dims(fields, sliding=False)
    return FullAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_shared=kv_shared,
        **_sparse(fields, mixer),
    )


def _sliding(fields: Fields, kv_shared: bool, latent: bool) -> LayerSpec:
    window = _window(fields)
    if latent:
        layer = _latent(window_fields(fields), reuses=True, kv_shared=kv_shared)
        return layer.model_copy(update={"window": window, "index_topk": None})
    heads, kv_heads, head_dim, v_head_dim = _attention_dims(fields, sliding=True)
    if window is None:
        return FullAttention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, kv_shared=kv_shared
        )
    return SlidingWindow(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_shared=kv_shared,
        window=window,
    )


def window_fields(fields: Fields) -> Fields:
    """Return the fields of windows of latents: dots.3 has dimensions of their own for them."""
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    more = ("num_attention_heads", "attention_gate_type")
    own = {name: fields.get(f"swa_{name}") for name in (*names, *more)}
    own = {name: value for name, value in own.items() if value is not None}
    if "kv_lora_rank" not in own:
        return fields
    fields.integer("swa_qk_rope_head_dim", least=0)
    fields.settle("qk_head_dim")
    data = {**fields.data, **own, "qk_head_dim": None}
    return Fields(data, fields.source, fields.architecture, fields.seen)


def _window(fields: Fields) -> int | None:
    """Window in tokens; None if it covers the longest context, so that it never slides."""
    window = fields.integer("sliding_window", "sliding_window_size", "attention_chunk_size")
    longest = fields.optional_integer("max_position_embeddings")
    return None if longest is not None and window >= longest else window


def _attention_dims(fields: Fields, sliding: bool) -> tuple[int, int, int, int]:
    """Heads, KV heads, key width and value width of the sliding layers, or of the full ones."""
    heads = fields.integer(*_HEADS)
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
    if fields.get("use_mla") is False:  # DeepSeek-VL2-tiny, DeepSeek-OCR: widths of latents, all 0
        fields.settle("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim")
        v_head_dim = head_dim
    else:
        v_head_dim = fields.integer("v_head_dim", default=head_dim)
    if sliding:
        heads, kv_heads, head_dim, v_head_dim = _sliding_dims(fields, heads, kv_heads, head_dim, v_head_dim)
    elif fields.has("global_head_dim"):  # Gemma-4
        head_dim = v_head_dim = fields.integer("global_head_dim")
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.integer("num_global_key_value_heads", default=kv_heads)
    fields.settle("num_global_key_value_heads", "attention_k_eq_v", "num_global_attention_heads")
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"is {kv_heads} for {heads} attention heads",
            "each KV head must serve the same number of heads: correct one of them",
        )
    return heads, kv_heads, head_dim, v_head_dim


def _sliding_dims(
    fields: Fields, heads: int, kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[int, int, int, int]:
    """Dimensions of the sliding layers, where they differ from those of the full ones."""
    other = fields.nested("attention_other_setting")  # Step-3.5
    if other is not None:
        kind = other.text("attention_type")
        if kind not in (None, "sliding_attention"):
            raise other.error("attention_type", f"is {kind!r}", "costcache knows 'sliding_attention' only")
        heads = other.integer("num_attention_heads", default=heads)
        kv_heads = other.integer(*_KV_HEADS, default=kv_heads)
        head_dim = v_head_dim = other.integer("head_dim", default=head_dim)
    heads = fields.integer(  # MiMo-V2; Step-3.7
        "swa_num_attention_heads", "num_sliding_attention_heads", default=heads
    )
    # transformers writes MiMo-V2's config without the number: its class has twice as many.
    usual = 2 * kv_heads if fields.model_type == "mimo_v2_flash" else kv_heads
    kv_heads = fields.integer("swa_num_key_value_heads", default=usual)
    head_dim = fields.integer("swa_head_dim", default=head_dim)
    v_head_dim = fields.integer("swa_v_head_dim", default=v_head_dim)
    return heads, kv_heads, head_dim, v_head_dim


def _kv_heads(fields: Fields, heads: int) -> int:
    """Number of KV heads. A config that gives none means multi-head attention, unless it says multi-query."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        fields.settle(*_KV_HEADS)
        return 1  # Falcon-7B, StarCoder
    if fields.get("multi_query_attention") is False:  # ChatGLM
        fields.settle(*_KV_HEADS)
        return heads
    if fields.flag("multi_query_attention"):
        return fields.integer("multi_query_group_num", *_KV_HEADS)
    fields.agree(*_KV_HEADS)
    return fields.integer(*_KV_HEADS, default=heads)


def _check_latent(fields: Fields) -> None:
    """Refuse half of the fields of latent attention: without the rest it would be read as multi-head."""
    if fields.has("kv_lora_rank") or not fields.flag("use_mla", default=True):
        return
    if is_compressed(fields):
        return  # DeepSeek-V4 has fields of these names and no latent of this kind
    for name in ("qk_nope_head_dim", "q_lora_rank", "index_topk"):
        if fields.get(name) not in (None, 0):
            raise fields.error(
                "kv_lora_rank",
                f"is missing, though {name} is {fields.get(name)!r}, which belongs to latent attention",
                "add it, or remove the other fields of latent attention",
            )


def _latent(fields: Fields, reuses: bool, kv_shared: bool) -> LatentAttention:
    # One latent serves all heads; these are fields of the form that multi-head attention would have.
    fields.settle(*_KV_HEADS, "head_dim", "q_lora_rank")
    topk = fields.optional_integer("index_topk")
    if topk is None and fields.has("index_head_dim", "index_n_heads"):
        raise fields.error(
            "index_topk",
            "is missing, though other fields describe an indexer",
            "add it, or remove index_head_dim and index_n_heads",
        )
    indexed = topk is not None and not reuses
    rope, nope = fields.integer("qk_rope_head_dim", least=0), fields.integer("qk_nope_head_dim")
    # Kimi's layers with mla_use_nope rotate nothing, and keep the part that others rotate: the widths stand.
    fields.settle("use_mla", "mla_use_nope")
    if fields.flag("use_mla_nope"):  # Ling-3 drops the rotary part of query and key
        rope = 0
        fields.settle("qk_head_dim")
        fields = Fields({**fields.data, "qk_head_dim": None}, fields.source, fields.architecture, fields.seen)
    width = fields.integer("qk_head_dim", default=nope + rope)
    if width != nope + rope:
        raise fields.error(
            "qk_head_dim",
            f"is {width} for parts of {nope} and {rope}",
            "they must add up: correct one of them",
        )
    pool = fields.integer("index_kpool", default=1)
    fields.settle("index_kpool_always_select_tail", "index_kpool_compress")
    return LatentAttention(
        heads=fields.integer("num_attention_heads"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_rope_head_dim=rope,
        qk_nope_head_dim=nope,
        v_head_dim=_latent_v_head_dim(fields),
        kv_shared=kv_shared,
        index_head_dim=fields.integer("index_head_dim") if indexed else None,
        index_heads=fields.integer("index_n_heads") if indexed else None,
        index_topk=topk,
        index_pool=pool if indexed else 1,
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


def _compressed(fields: Fields, mixer: str, ratio: int) -> CompressedAttention:
    """One of the two parts of a DeepSeek-V4 layer: its window, or its compressed context.

    The window's latents are not compressed. Only layers of ratio 4 have an indexer.
    """
    kv_heads = fields.integer("num_key_value_heads", default=1)
    if kv_heads != 1:
        raise fields.error(
            "num_key_value_heads", f"is {kv_heads}", "compressed attention has one shared latent: use 1"
        )
    window = mixer == "sliding"
    fields.settle("index_head_dim", "index_n_heads", "index_topk", "sliding_window")
    fields.settle("q_lora_rank", "o_lora_rank", "num_hash_layers", "compress_rope_theta")
    # SGLang's class inherits these from DeepSeek-V3's, where they describe latents of another kind.
    fields.settle("kv_lora_rank", "qk_head_dim", "qk_nope_head_dim", "v_head_dim")
    head_dim = fields.integer("head_dim")
    indexed = not window and ratio == 4
    topk = fields.integer("index_topk") if indexed else None
    return CompressedAttention(
        heads=fields.integer("num_attention_heads"),
        head_dim=head_dim,
        rope_head_dim=_compressed_rope(fields, head_dim),
        ratio=1 if window else ratio,
        window=fields.integer("sliding_window") if window else None,
        index_head_dim=fields.integer("index_head_dim") if indexed else None,
        index_heads=fields.integer("index_n_heads") if indexed else None,
        index_topk=topk,
        index_pool=ratio if indexed else 1,
    )


def _compressed_rope(fields: Fields, head_dim: int) -> int:
    width = fields.optional_integer("qk_rope_head_dim", least=0)
    if width is None:
        width = round(head_dim * fields.ratio("partial_rotary_factor", 1 / 8))
    if width > head_dim:
        raise fields.error("qk_rope_head_dim", f"is {width} for a head_dim of {head_dim}", "correct it")
    return width


def _sparse(fields: Fields, mixer: str) -> dict[str, int]:
    """The indexer of an attention layer with keys and values; nothing for dense attention."""
    nested = fields.nested("sparse_attention_config")
    if mixer != "indexed":
        if not fields.has("indexer_n_heads"):
            return {}
        fields.settle(*_INDEXERS[0])  # Qwen-4: every attention layer has the indexer
    if nested is not None:
        _check_index_values(nested)
        return _indexer(nested, _NESTED_INDEXER)
    for names in _INDEXERS:
        if fields.has(names[2]):
            keys = fields.integer("indexer_kv_heads", default=1)
            if keys != 1:
                raise fields.error("indexer_kv_heads", f"is {keys}", "costcache knows one index key only")
            return _indexer(fields, names)
    if "indexer_n_heads" in fields.data:  # Qwen-4 without its indexer: null
        return {}
    raise fields.error(
        "index_topk",
        "is missing, though layer_types lists sparse attention",
        "add the fields of the indexer, or build ModelSpec(layers=...) yourself",
    )


def _indexer(fields: Fields, names: tuple[str, ...]) -> dict[str, int]:
    width, heads, topk, unit, pool = names
    return {
        "index_head_dim": fields.integer(width),
        "index_heads": fields.integer(heads),
        "index_topk": fields.integer(topk) * (fields.integer(unit) if unit else 1),
        "index_pool": fields.integer(pool, default=1) if pool else 1,
    }


def _check_index_values(sparse: Fields) -> None:
    """Refuse an indexer that caches values beside its keys (MiniMax-M3 can)."""
    layers = sparse.integers("sparse_attention_freq") or []
    off = sparse.integers("sparse_disable_index_value")
    if off is not None and any(flag and not no for flag, no in zip(layers, off, strict=False)):
        raise sparse.error(
            "sparse_disable_index_value",
            "leaves index values in some sparse layers, which costcache does not support",
            "build ModelSpec(layers=...) yourself",
        )


def _reuses_selection(fields: Fields, index: int, count: int) -> bool:
    """Whether a DSA layer reuses an earlier layer's selection, and so stores no index keys.

    Follows the rules of SGLang 0.5.23 (``dsa_layer_skips_topk``).
    """
    if not fields.has("index_topk") or is_compressed(fields):
        return False
    fields.settle("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    types = fields.strings("indexer_types", count)
    if types is not None:
        return types[index] == "shared"
    pattern = fields.text("index_topk_pattern")
    if pattern is not None:
        return index < len(pattern) and pattern[index] == "S"
    every = fields.integer("index_topk_freq", default=1)
    offset = fields.integer("index_skip_topk_offset", default=2)
    return max(index - offset + 1, 0) % every != 0
