"""Configs that cannot be read: the error names the file, the architecture, the field and the fix."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costcache.errors import ConfigError
from costcache.model import ModelSpec
from costcache.model.presets import PRESETS

LLAMA = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2}


def failure(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelSpec.from_config({**LLAMA, **changes})
    return str(caught.value)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size"])
def test_a_missing_field_is_named(field: str) -> None:
    message = failure(**{field: None})
    assert message.startswith(f"config dict (LlamaForCausalLM): {field} is missing")
    assert "ModelSpec(layers=...)" in message


@pytest.mark.parametrize("value", ["32", -1, 0, 2.5, True, [], {}, 10**30])
def test_a_wrong_value_is_named(value: Any) -> None:
    message = failure(num_attention_heads=value)
    assert f"num_attention_heads is {value!r}; it must be an integer of at least 1" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5 for 32 attention heads"),
        ({"head_dim": None, "num_attention_heads": 24, "hidden_size": 4097}, "head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": "full"}, "layer_types is 'full'; it must be a list of strings"),
        ({"layer_types": ["full_attention", "magic"]}, "layer_types contains 'magic'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_num_value_heads"),
        ({"layer_types": ["moe", "mlp"]}, "layer_types lists no attention or state layer"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ({"hybrid_override_pattern": "M?"}, "hybrid_override_pattern has unknown characters"),
        ({"hybrid_override_pattern": ""}, "lists 0 layers"),
        ({"hybrid_override_pattern": 3}, "hybrid_override_pattern is 3; it must be a string"),
        ({"mamba_n_heads": 4}, "layer_types is missing, though the config describes state layers"),
        ({"attn_layer_indices": [7]}, "attn_layer_indices is [7]; layers are numbered 0 to 1"),
        ({"linear_attn_config": 3}, "linear_attn_config is 3; it must be an object"),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}, "from 1 to 2 exactly once"),
        (
            {"sliding_window": 8, "use_sliding_window": "yes"},
            "use_sliding_window is 'yes'; it must be true or",
        ),
        ({"sliding_window": 8, "sliding_window_pattern": "LX"}, "sliding_window_pattern is 'LX'"),
        ({"compress_ratios": [4]}, "compress_ratios has 1 entries for 2 layers"),
        ({"compress_ratios": [4, 7]}, "compress_ratios contains 7; known ratios are 0, 4 and 128"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder says that the model has an encoder"),
        ({"index_kpool": 16}, "index_kpool is 16: its name speaks of sparse attention"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"text_config": 3}, "text_config is 3; it must be an object"),
    ],
)
def test_messages(changes: dict[str, Any], message: str) -> None:
    assert message in failure(**changes)


def test_state_dtypes_and_mamba_widths() -> None:
    config = {**PRESETS["qwen3-next"], "mamba_ssm_dtype": "int8"}
    with pytest.raises(ConfigError, match="mamba_ssm_dtype is 'int8'; use one of bf16, bfloat16"):
        ModelSpec.from_config(config)
    config = {**PRESETS["nemotron-h-8b"], "mamba_head_dim": None, "mamba_expand": 1, "mamba_num_heads": 3}
    with pytest.raises(ConfigError, match="not a multiple of 3 heads"):
        ModelSpec.from_config(config)


def test_architecture_must_be_named() -> None:
    with pytest.raises(ConfigError, match="config dict: architectures and model_type are both missing"):
        ModelSpec.from_config({})
    with pytest.raises(ConfigError, match="architectures is 'Llama'; it must be a list"):
        ModelSpec.from_config({"architectures": "Llama"})
    with pytest.raises(ConfigError, match="model_type is 3"):
        ModelSpec.from_config({"model_type": 3})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelSpec.from_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: is not JSON"):
        ModelSpec.from_config(file)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"config\.json: is not JSON"):
        ModelSpec.from_config(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: is not a JSON object"):
        ModelSpec.from_config(file)
    file.write_text(json.dumps({**LLAMA, "vocab_size": "many"}))
    with pytest.raises(ConfigError, match=r"config\.json \(LlamaForCausalLM\): vocab_size is 'many'"):
        ModelSpec.from_config(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelSpec.from_config(file / "below")


@pytest.mark.parametrize("thing", [3, None, object()])
def test_things_that_are_no_config(thing: object) -> None:
    with pytest.raises(ConfigError, match="object: cannot be read as a config"):
        ModelSpec.from_config(thing)


def test_unknown_names_get_close_matches() -> None:
    with pytest.raises(ConfigError, match=r"'deepseekv3' is neither.* did you mean deepseek-v3"):
        ModelSpec.resolve("deepseekv3")
    with pytest.raises(ConfigError, match=r"'qwen3-9b' is not a preset; did you mean .*qwen3-8b"):
        ModelSpec.preset("qwen3-9b")
    with pytest.raises(ConfigError, match="'costcache models' lists the presets"):
        ModelSpec.preset("zzzzzz")
    with pytest.raises(ConfigError, match="no such file"):
        ModelSpec.resolve("missing/config.json")


# Values that a damaged or hand-written config may have.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**41, 10**400]),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 9), max_size=3),
    st.lists(st.sampled_from(["full_attention", "mamba", "x"]), max_size=3),
    st.dictionaries(st.sampled_from(["num_heads", "model_type", "hidden_size"]), st.integers(), max_size=2),
)
OTHER_FIELDS = [
    "architectures",
    "attn_layer_period",
    "conv_L_cache",
    "full_attention_interval",
    "head_dim",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_topk",
    "index_topk_freq",
    "indexer_types",
    "intermediate_size",
    "kv_lora_rank",
    "layer_types",
    "linear_attn_config",
    "mamba_d_state",
    "mamba_n_heads",
    "mlp_layer_types",
    "mlp_only_layers",
    "model_type",
    "moe_layer_freq",
    "num_experts",
    "num_kv_shared_layers",
    "sliding_window",
    "text_config",
    "use_sliding_window",
]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_mangled_configs_are_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    config = copy.deepcopy(PRESETS[data.draw(st.sampled_from(sorted(PRESETS)))])
    if data.draw(st.booleans()):
        config = config.get("text_config", config)
    names = st.sampled_from([*config, *OTHER_FIELDS])
    config.update(data.draw(st.dictionaries(names, VALUES, max_size=3)))
    for name in data.draw(st.lists(st.sampled_from(list(config)), max_size=2)):
        config.pop(name, None)
    problem, spec = "", None
    try:
        spec = ModelSpec.from_config(config)
    except ConfigError as error:
        problem = str(error)
    if spec is None:
        assert problem.startswith("config dict")
        assert ";" in problem
    else:
        assert spec.layers
        assert spec.active_params > 0
