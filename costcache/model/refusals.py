"""Refuses configs of models that cannot be read right, by the name of the field that says so.

Reading such a model by its remaining fields would silently give wrong figures. What is known to be
different is refused before reading (`refuse_kinds`). After reading, a field that nothing asked for and
whose name says that it changes what a token caches is refused as well (`refuse_unread`): a new kind
of attention is an error with a name, never plain attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from costcache.model.fields import Fields
from costcache.model.required import require_fields

__all__ = ["refuse_kinds", "refuse_uncounted", "refuse_unread"]

_BY_HAND = "build ModelSpec(layers=...) yourself"

_UNSUPPORTED = {
    "attn_config": "nested attention settings (MPT, DBRX)",
    "attention_layers": "local attention in layers that cache everything (GPT-Neo)",
    "block_configs": "per-layer attention settings (Nemotron-NAS)",
    "block_types": "RG-LRU layers (RecurrentGemma)",
    "blocksparse_block_size": "block-sparse attention (Phi-3-small)",
    "cross_attention_layers": "cross-attention layers (Llama-3.2-Vision)",
    "efficient_attention_config": "searched attention layers (Jet-Nemotron)",
    "kv_source_layer_ids": "K/V shared across layers (DeepSeek-V4.1)",
    "use_cla": "K/V shared across layers (Hunyuan)",
}
# Families that no field gives away. The names are those of transformers, or of the checkpoints.
_FAMILIES = {
    "Dream": "attention in both directions (Dream)",
    "blt": "byte patches with models of their own (BLT)",
    "dory": "layers that run several times (Dory)",
    "hrm_text": "layers that run several times (HRM)",
    "inkling": "convolutions beside attention (Inkling)",
    "jetmoe": "a choice of attention heads per token (JetMoE)",
    "moshi": "two models in one (Moshi)",
    "recurrent_gemma": "RG-LRU layers (RecurrentGemma)",
    "reformer": "hashed attention (Reformer)",
    "rwkv": "recurrent WKV states (RWKV)",
    "xlnet": "two attention streams (XLNet)",
    "xlstm": "recurrent matrix states (xLSTM)",
    "zaya": "convolutions beside attention (Zaya)",
}
# Encoders, other than those with "bert" in their name.
_ENCODERS = frozenset(
    {
        "big_bird",
        "canine",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "electra",
        "ernie",
        "ernie_m",
        "esm",
        "flaubert",
        "fnet",
        "funnel",
        "gte",
        "layoutlm",
        "longformer",
        "luke",
        "mpnet",
        "mra",
        "nezha",
        "nystromformer",
        "roformer",
        "xlm",
        "xmod",
        "yoso",
    }
)
_ENCODER_TASKS = re.compile(
    r"For(MaskedLM|TokenClassification|QuestionAnswering|MultipleChoice|NextSentencePrediction"
    r"|PreTraining|CTC|ImageClassification|AudioClassification)$"
)

_RECURRENT = "recurrent layers"
# Names of fields that change what a token caches or attends to, and what each name means.
_MEANINGS = {
    "KV heads": r"(num|n)_.*kv|kv_?heads?|key_value|query_groups?|attention_groups|_kv$|multi_query|k_eq_v",
    "widths of heads": r"head_(dim|size|width)|(^|_)d_(head|kv)$|^head(s)?_dim",
    "K/V shared between layers": r"kv.*shar|shar.*kv|cross_layer|kv_source|\bcla\b|yoco",
    "sparse attention": r"spars|lightning|moba|nsa|compress|indexer|_topk_block"
    r"|index_(head|n_|topk|k|block)",
    _RECURRENT: r"linear_att|retention|delta_rule|recurrent|mamba|ssm|rwkv|gated_delta"
    r"|short_?conv|sconv|conv_(kernel|dim)|d_conv",
    "attention windows": r"window|chunk_size|chunked|local_att|(global|local)_.*every|dilat",
    "cross-attention": r"cross_att",
    "per-layer settings": r"per_layer|layerwise|by_layer|layer_(config|setting|override|pattern)"
    r"|block_(config|type|pattern)|layer_(group|ids|idx|indices|indexes)",
    "kinds of attention layers": r"att(n|ention)_(types?$|type_|layer)|layers?_types?$",
    "latent or repeated layers": r"latent|lora_rank|mla|loop|recurrence|repeat",
}
# Fields of these names change neither bytes nor FLOPs of a cached token.
_HARMLESS = re.compile(
    r"rope|rotary|theta|norm|eps|scal|dropout|_bias$|init|token_id|softcap|clip|limit|router|loss|aux"
    r"|vision|image|audio|video|patch|projector|speech|vit|gate|temperature|alpha|rescale|multiplier"
    r"|chunk_size_feed_forward|^chunk_size$|mamba_chunk_size|residual|tie_|embed|group_limit|^n_group$"
    r"|time_step|_kernels?$|mem_eff_path|dt_|proj_bias|conv_bias|attn_implementation|quant|dtype"
    r"|lightning_block|output_|return_|use_cache|pruned|pretraining|mtp_|nextn|draft|jitter|act$|aggregat"
    r"|max_position|longrope|positions|^pp_|^tp_|ngram|vocab_size|factor$"
    r"|activation_sparsity|strategy|expert_group|capacity|_mode$|use_mlp|^lora_rank$|^ft_lora"
)
# Values that name ordinary attention, or nothing.
_PLAIN = frozenset(
    {
        "",
        "causal",
        "default",
        "full",
        "full_attention",
        "global",
        "gqa",
        "mha",
        "mla",
        "mqa",
        "none",
        "softmax",
    }
)


def refuse_kinds(fields: Fields) -> None:
    """Refuse what is known not to be a decoder, or to need more than the kinds of layer that there are.

    Raises `ConfigError` that names the field, or the family.
    """
    _refuse_encoders(fields)
    for name, what in _UNSUPPORTED.items():
        if not _neutral(fields.get(name)):
            raise fields.error(
                name, f"says that the model has {what}, which costcache does not support", _BY_HAND
            )
    require_fields(fields)
    if "assistant" in fields.architecture.lower():
        raise fields.error(
            "architectures",
            f"is {fields.architecture!r}: a draft model that reads the K/V of its target",
            "give the config of the target",
        )
    dual = fields.nested("dual_chunk_attention_config")  # Qwen-1M: attention to everything, by chunks
    if dual is not None and dual.flag("sparse_attention_enabled"):
        raise dual.error(
            "sparse_attention_enabled",
            "is true: the model has sparse attention by patterns, which costcache does not support",
            _BY_HAND,
        )
    for family, what in _FAMILIES.items():
        if fields.model_type.startswith(family):
            raise fields.error(
                "model_type",
                f"is {fields.model_type!r}: a model with {what}, which costcache does not support",
                _BY_HAND,
            )


def _refuse_encoders(fields: Fields) -> None:
    fix = "costcache serves decoders; give the config of one"
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "says that the model has an encoder", fix)
    two_way = fields.get("use_bidirectional_attention")
    if two_way is True or two_way == "all" or fields.get("is_causal") is False:
        name = "is_causal" if fields.get("is_causal") is False else "use_bidirectional_attention"
        raise fields.error(name, f"is {fields.get(name)!r}: the model is an encoder", fix)
    if fields.get("is_decoder") is True:
        return
    kind = fields.model_type
    if (("bert" in kind and "decoder" not in kind) or kind in _ENCODERS) and fields.data.get("model_type"):
        raise fields.error("model_type", f"is {kind!r}, an encoder", fix)
    if _ENCODER_TASKS.search(fields.architecture):
        raise fields.error("architectures", f"names {fields.architecture!r}, an encoder", fix)
    if fields.get("type_vocab_size") not in (None, 0):
        raise fields.error("type_vocab_size", "says that the model is an encoder with segments", fix)


_EXPERTS = re.compile(r"expert|^moe_|_moe_")
"""Names of fields that change how many experts a token passes, or their width."""


def refuse_uncounted(fields: Fields) -> None:
    """Refuse a field about experts that the count of active parameters did not ask for.

    Raises `ConfigError` that names it.
    """
    for name, value in fields.data.items():
        if name in fields.seen or _neutral(value) or _HARMLESS.search(name):
            continue
        if type(value) in (int, float, list) and _EXPERTS.search(name):
            raise fields.error(
                name,
                f"is {_short(value)}: its name speaks of experts, and costcache does not know it",
                "give active_params, or build ModelSpec(layers=...) yourself",
            )


def refuse_unread(fields: Fields, count: int, *, stateless: bool) -> None:
    """Refuse a field that was not understood and may change what a token caches or attends to.

    ``count`` is the number of layers: an unknown list of as many different entries is a per-layer
    setting. ``stateless`` says that the layers are listed and none has a state: then the dimensions of
    states are moot (Granite-4 without Mamba). Raises `ConfigError` that names the field.
    """
    for name, value in fields.data.items():
        if name in fields.seen or _neutral(value) or _HARMLESS.search(name):
            continue
        if stateless and re.search(_MEANINGS[_RECURRENT], name):
            continue
        meaning = _meaning(name)
        if meaning is None and _differs_by_layer(value, count):
            meaning = "per-layer settings"
        if meaning is None and isinstance(value, Mapping) and re.search("att", name):
            meaning = "attention settings"
        if meaning is not None:
            raise fields.error(
                name,
                f"is {_short(value)}: its name speaks of {meaning}, and costcache does not know it",
                _BY_HAND,
            )


def _meaning(name: str) -> str | None:
    return next((meaning for meaning, pattern in _MEANINGS.items() if re.search(pattern, name)), None)


def _neutral(value: Any) -> bool:
    """Whether a value says that its feature is off."""
    if isinstance(value, list | tuple):
        return all(_neutral(item) for item in value)
    if isinstance(value, Mapping):
        return not value
    if isinstance(value, str):
        return value.lower() in _PLAIN
    return value is None or value is False or (type(value) in (int, float) and value in (0, -1))


def _differs_by_layer(value: Any, count: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and count > 1
        and len(value) == count
        and len({repr(item) for item in value}) > 1
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
