"""What transformers' own classes cache in each layer, and the parameters that a token passes.

A model is built from its default config on the meta device, where tensors have shapes and no memory,
and runs once on a few tokens. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

__all__ = ["Facts", "LayerFacts", "default_config", "examine", "names", "plain"]

TOKENS = 7

# Default configs that their own class cannot be built from, with what they lack.
COMPLETED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18]},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": (["mamba"] * 3 + ["attention"]) * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "jamba": {"mamba_dt_rank": 256},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 64,
    },
}
_LOOK_UPS = re.compile(r"(^|\.)(wte|wpe|w)(\.|$)|embed|shared\.weight|lang_emb")
_OUTSIDE = re.compile(r"vision|visual|image|audio|mm_|multi_modal|projector|speech")
_HEADS = re.compile(r"^output\.|lm_head|output_projection|embed_out|lm_loss|predictions|(^|\.)cls\.")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "n_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


@dataclass(frozen=True)
class LayerFacts:
    """What one numbered layer caches, in values: per token, per index key, and per sequence."""

    values: int = 0
    window: int | None = None
    index: int = 0
    conv: int = 0
    state: int = 0


@dataclass
class Facts:
    """A model, examined.

    ``layers`` has None where the classes' cache could not be read; ``why`` says why.
    """

    active: int
    layers: list[LayerFacts] | None = None
    why: str = ""


def names() -> list[str]:
    """Every model type with a causal language model, and the text models of those that also see."""
    found = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for name in getattr(auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", {}):
        kind = _text_type(name)
        if kind in auto.MODEL_MAPPING_NAMES:
            found.add(kind)
    return sorted(name for name in found if _text_type(name) in (name, ""))


def _text_type(name: str) -> str:
    """Type of a model's language part: its own but for models that also see; "" if it has no default."""
    try:
        return str(CONFIG_MAPPING[name]().get_text_config().model_type)
    except Exception:
        return ""


def default_config(name: str) -> Any:
    """Return the config with the class's defaults. Raises whatever transformers raises."""
    return CONFIG_MAPPING[name](**COMPLETED.get(name, {}))


def plain(config: Any) -> dict[str, Any]:
    """Return a config as its JSON file would have it."""
    return dict(json.loads(json.dumps(config.to_dict(), default=str)))


def examine(config: Any) -> Facts:
    """Build one model and run it. Raises whatever transformers raises if it cannot be built."""
    config._attn_implementation = "eager"
    mapping = auto.MODEL_FOR_CAUSAL_LM_MAPPING
    cls = mapping[type(config)] if type(config) in mapping else auto.MODEL_MAPPING[type(config)]
    if isinstance(cls, tuple):
        cls = cls[0]
    before = torch.get_default_dtype()
    keep = PreTrainedModel.init_weights
    torch.set_default_dtype(torch.bfloat16)
    PreTrainedModel.init_weights = lambda self: None  # on the meta device there is nothing to set
    try:
        with torch.device("meta"):
            model = cls(config).eval()
        passed: Counter[str] = Counter()
        _count_passes(model, passed)
        cache, why = _run(model)
    finally:
        torch.set_default_dtype(before)
        PreTrainedModel.init_weights = keep
    facts = Facts(_active(model, config, passed if not why else None), why=why)
    if not why:
        try:
            facts.layers = _cached(cache)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            facts.why = f"cache of type {type(cache).__name__}: {error!r}"
    return facts


def _count_passes(model: torch.nn.Module, passed: Counter[str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, name=name: passed.update([name]))


class _NoMasks(dict[str, None]):
    """A mask for every kind of layer: none."""

    def __missing__(self, kind: str) -> None:
        return None


def _run(model: torch.nn.Module) -> tuple[Any, str]:
    """Run the model with one of three masks, whichever its classes take without looking at values."""
    why = ""
    for mask in (None, torch.ones((1, TOKENS), dtype=torch.long), _NoMasks()):
        options = {} if mask is None else {"attention_mask": mask}
        try:
            with torch.no_grad(), torch.device("meta"):
                ids = torch.zeros((1, TOKENS), dtype=torch.long)
                out = model(input_ids=ids, use_cache=True, **options)
        except Exception as error:
            why = why or repr(error)
            continue
        for attribute in ("past_key_values", "cache_params", "cache"):
            cache = getattr(out, attribute, None)
            if cache is not None:
                return cache, ""
        why = "returns no cache"
    return None, why


def _cached(cache: Any) -> list[LayerFacts]:
    cache = getattr(cache, "self_attention_cache", cache)  # of a decoder beside an encoder
    layers = [_layer(layer) for layer in cache.layers]
    for index, state in enumerate(getattr(cache, "linear_cache", ())):  # MiniMax keeps states apart
        if torch.is_tensor(state):
            own = LayerFacts(state=state[0].numel())
            layers[index : index + 1] = [own]
    return layers


def _layer(layer: Any) -> LayerFacts:
    found = vars(layer)
    keys, values = found.get("keys"), found.get("values")
    stored = 0 if keys is None else _per_token(keys) + (0 if values is keys else _per_token(values))
    if "compressed_kv" in found or type(layer).__name__.startswith("DeepseekV4"):
        stored = 0 if keys is None else _per_token(keys)  # key and value are one latent
    index = next(
        (found[n] for n in ("indexer_keys", "idx_keys", "index_keys") if torch.is_tensor(found.get(n))), None
    )
    sliding = found.get("sliding_window") if stored else None
    conv = sum(x.shape[1] * (x.shape[2] - 1) for x in _tensors(found.get("conv_states")))
    state = sum(x[0].numel() for x in _tensors(found.get("recurrent_states")))
    return LayerFacts(stored, sliding, 0 if index is None else index.shape[-1], conv, state)


def _per_token(tensor: torch.Tensor) -> int:
    return 0 if not tensor.numel() else tensor.shape[1] * tensor.shape[3]


def _tensors(states: Any) -> list[torch.Tensor]:
    if torch.is_tensor(states):
        return [states]
    items = states.values() if isinstance(states, dict) else states or ()
    return [item for item in items if torch.is_tensor(item)]


def _active(model: torch.nn.Module, config: Any, passed: Counter[str] | None) -> int:
    """Parameters in matrices that one token passes; each pass counts, and chosen experts alone."""
    experts = next((v for n in _EXPERTS if isinstance(v := getattr(config, n, None), int) and v), 0)
    chosen = next((v for n in _CHOSEN if isinstance(v := getattr(config, n, None), int)), 0)
    all_of = (experts, experts + (getattr(config, "zero_expert_num", 0) or 0))
    total, heads = 0, 0
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, size = name.rpartition(".")[0], parameter.numel()
        if parameter.dim() < 2 or _OUTSIDE.search(name) or "conv" in path.rpartition(".")[2]:
            continue
        if _HEADS.search(name):
            heads += size
        elif _LOOK_UPS.search(name) and not isinstance(modules[path], torch.nn.Linear):
            continue
        elif experts > 0 and "expert" in name and "shared" not in name and _routed(name, parameter, all_of):
            # Those that do nothing (LongCat) are chosen as often as the others; some have rows all the same.
            rows = parameter.shape[0] if parameter.shape[0] in all_of else experts
            total += size * chosen * experts // (rows * all_of[-1])
        elif passed is not None and isinstance(modules[path], torch.nn.Linear):
            # A weight that is used without its module's call counts once; adapters are called, or belong
            # to another use of their block.
            total += size * max(0 if "adapter" in path else 1, passed[path])
        else:
            total += size
    if not heads:
        width = next(getattr(config, n) for n in ("hidden_size", "n_embd", "d_model") if hasattr(config, n))
        heads = config.vocab_size * width
    return total + heads


def _routed(name: str, parameter: torch.Tensor, numbers: tuple[int, ...]) -> bool:
    return parameter.shape[0] in numbers or bool(re.search(r"experts\.\d+\.", name))
