"""Real configs with fields dropped, renamed, of wrong types or inconsistent: errors with a name, or right."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costcache.cost import TokenCost, token_cost
from costcache.deployment import Deployment
from costcache.errors import ConfigError
from costcache.model import ModelSpec
from costcache.model.fields import text_fields
from costcache.model.presets import PRESETS

EXAMPLES = 250  # of each of the four kinds of mutation: 1,000 in all

# What it means that a field is missing, where that is not an error: an equal config with the field.
MEANINGS: dict[str, Any] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "decoder_sparse_step": lambda config: 1,
    "first_k_dense_replace": lambda config: 0,
    "expert_layer_offset": lambda config: 0,
    "attn_layer_offset": lambda config: 0,
    "mamba_n_groups": lambda config: 1,
    "n_groups": lambda config: 1,
    "mamba_ngroups": lambda config: 1,
    "q_lora_rank": lambda config: 0,
}
# Fields that tell a family from another: without them the config is of an unknown family, read by its
# fields alone.
IDENTITY = {"architectures", "model_type", "text_config"}
# Fields that matter for the count of parameters only: bytes stay right without them.
COUNTED = {
    "attn_output_gate", "hidden_act", "mamba_dt_rank", "mlp_hidden_act", "moe_layer_freq", "n_shared_experts",
    "num_shared_experts", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size", "use_full_rank_gate", "mla_use_output_gate", "hidden_size_per_layer_input",
    "routed_expert_hidden_size", "intermediate_size", "tie_word_embeddings", "use_double_wide_mlp",
    "interleave_moe_layer_step", "mlp_only_layers", "moe_intermediate_size", "expert_layer_period",
    "intermediate_size_mlp", "dense_intermediate_size", "norm_topk_prob", "o_groups",
}  # fmt: skip
# Fields without which another, shorter form of the same fact is read, or the class's own default.
RESTATED = {
    "attention_chunk_size", "full_attention_interval", "head_dim", "layer_types", "max_position_embeddings",
    "sliding_window", "sliding_window_pattern", "use_sliding_window", "v_head_dim", "num_kv_shared_layers",
    "attention_k_eq_v", "num_global_key_value_heads", "global_head_dim", "enable_moe_block",
    "swa_num_key_value_heads", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim",
    "sliding_window_size", "hybrid_layer_pattern", "quantization_config", "num_nextn_predict_layers",
    "index_topk_freq", "indexer_types", "index_topk_pattern", "mamba_head_dim", "mamba_d_head",
    "mamba_ssm_dtype", "mamba_ssm_cache_dtype", "mamba_d_ssm", "mamba_expand", "attention_bias",
    "mtp_num_hidden_layers", "no_rope_layers", "rotary_dim", "hidden_size", "attention_head_dim",
}  # fmt: skip


def inner(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def read(config: dict[str, Any]) -> tuple[ModelSpec | None, str]:
    try:
        return ModelSpec.from_config(config), ""
    except ConfigError as error:
        return None, str(error)


def figures(spec: ModelSpec) -> TokenCost:
    return token_cost(spec, Deployment())


@st.composite
def mutable(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A config, its language part, and the name of a field of that."""
    config = copy.deepcopy(PRESETS[draw(st.sampled_from(sorted(PRESETS)))])
    part = inner(config)
    return config, part, draw(st.sampled_from(sorted(set(part) - IDENTITY)))


FIELD = re.compile(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)+")


def assert_named(message: str, *fields: str) -> None:
    """An error must name a field: one that was changed, or one that its loss leaves unexplained."""
    field = message.split(": ", 1)[1].split(" ", maxsplit=1)[0] if ": " in message else ""
    assert message.startswith("config dict"), message
    assert ";" in message, "says what to do"
    assert FIELD.fullmatch(field.rstrip(",")) or any(name in message for name in fields), message


@settings(max_examples=EXAMPLES, deadline=None)
@given(mutable())
def test_a_field_is_dropped(drawn: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    config, part, name = drawn
    whole = ModelSpec.from_config(config)
    del part[name]
    spec, message = read(config)
    if spec is None:
        assert_named(message, name)
        return
    if text_fields(config, "config dict").has(name):
        return  # the class's own default, which published configs rely on
    if name in MEANINGS and name not in ("first_k_dense_replace",):
        part[name] = MEANINGS[name](part)
        meant, _ = read(config)
        assert meant is None or (meant.layers, meant.active_params) == (spec.layers, spec.active_params)
        return
    if name in RESTATED:
        return
    assert figures(spec) == figures(whole), f"without {name} other bytes are read"
    assert name in COUNTED | set(MEANINGS) or spec.active_params == whole.active_params, name


@settings(max_examples=EXAMPLES, deadline=None)
@given(mutable(), st.sampled_from(["{}_x", "x_{}", "my_{}s", "{}_count"]))
def test_a_field_is_renamed(drawn: tuple[dict[str, Any], dict[str, Any], str], pattern: str) -> None:
    """A name that nobody knows: an error, or the figures of the config without the field."""
    config, part, name = drawn
    value = part.pop(name)
    dropped, _ = read(config)
    part[pattern.format(name)] = value
    spec, message = read(config)
    if spec is None:
        assert_named(message, name, pattern.format(name))
    else:
        assert dropped is not None
        assert (spec.layers, spec.active_params) == (dropped.layers, dropped.active_params)
    telling = ("num_key_value_heads", "kv_lora_rank", "sliding_window", "index_topk", "compress_ratios")
    if value is not None and name in telling:
        assert spec is None, f"{pattern.format(name)} is not to be overlooked"


WRONG = st.sampled_from([-1, "8", 2.5, True, [], {}, [1, "x"], {"a": 1}, 10**30, "full_attention", [3, 3, 3]])


@settings(max_examples=EXAMPLES, deadline=None)
@given(mutable(), WRONG)
def test_a_field_has_a_wrong_type(drawn: tuple[dict[str, Any], dict[str, Any], str], value: Any) -> None:
    config, part, name = drawn
    whole = ModelSpec.from_config(config)
    part.pop(name)
    dropped, _ = read(config)
    part[name] = value
    spec, message = read(config)
    if spec is None:
        assert_named(message, name)
        return
    if name == "mamba_expand" and isinstance(value, float):
        return  # Mamba's own configs have 1.5
    # The field was not asked for, or the value means that it is off.
    same = (spec.layers, spec.active_params)
    allowed = [(x.layers, x.active_params) for x in (whole, dropped) if x is not None]
    assert same in allowed, f"{name} = {value!r} was read as something"


INCONSISTENT: dict[str, Any] = {
    "num_key_value_heads": lambda part: part["num_attention_heads"] * 2 + 1,
    "num_experts_per_tok": lambda part: 10**6,
    "num_experts_per_token": lambda part: 10**6,
    "num_attention_heads": lambda part: 7 if part.get("num_key_value_heads", 1) % 7 else None,
    "num_hidden_layers": lambda part: part["num_hidden_layers"] - 1,
    "layer_types": lambda part: [*part["layer_types"], "full_attention"],
    "full_attn_layers": lambda part: [1],
}


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_fields_contradict_each_other(data: st.DataObject) -> None:
    config = copy.deepcopy(PRESETS[data.draw(st.sampled_from(sorted(PRESETS)))])
    part = inner(config)
    listed = [n for n, v in part.items() if isinstance(v, list) and n != "architectures" and v]
    names = sorted({*listed, *(set(INCONSISTENT) & set(part))})
    assume(names)
    name = data.draw(st.sampled_from(names))
    whole = ModelSpec.from_config(config)
    if name in listed and data.draw(st.booleans()):
        part[name] = part[name][:-1]
    elif name in INCONSISTENT:
        part[name] = INCONSISTENT[name](part)
    spec, message = read(config)
    if spec is None:
        assert_named(message, name)
    elif name in ("num_experts_per_tok", "num_experts_per_token"):
        pytest.fail(f"{part[name]} of the experts were chosen")
    elif name == "num_hidden_layers":
        assert spec.num_layers in (whole.num_layers, whole.num_layers - 1)
    elif name == "num_key_value_heads":
        assert spec.layers == whole.layers, "latent attention has no such heads"
