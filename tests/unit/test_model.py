"""Reading configs: presets, layer kinds, and the ways a config can be given."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from costcache.errors import ConfigError
from costcache.model import (
    FullAttention,
    LatentAttention,
    ModelSpec,
    SlidingWindow,
    StateSpace,
)
from costcache.model.presets import ALIASES, PRESETS
from tests.unit.small import LLAMA, kinds, letters, read, refusal

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4}


# Published counts of parameters that a token passes, embedding included, in billions.
PUBLISHED = {
    "deepseek-v2": 21,  # DeepSeek-V2 report
    "deepseek-v2-lite": 2.4,
    "deepseek-v3": 37,  # DeepSeek-V3 report
    "kimi-k2": 32,  # Kimi-K2 report
    "glm-5": 40,
    "llama-3-8b": 8,
    "llama-3-70b": 70.6,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 3.3,
    "nemotron-h-8b": 8.1,
    "jamba-v0.1": 12,
    "kimi-linear": 3,
    "minicpm3-4b": 4,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_active_params_agree_with_what_is_published(name: str, billions: float) -> None:
    spec = ModelSpec.preset(name)
    tied = name == "minicpm3-4b"  # its head is its embedding, so it is counted already
    total = spec.active_params + (0 if tied else spec.vocab_size * spec.hidden_size)
    # Some publications leave one embedding or both out, so allow for that much and rounding.
    slack = 0.03 * billions + 2 * spec.vocab_size * spec.hidden_size / 1e9
    assert total / 1e9 == pytest.approx(billions, abs=slack)


def test_active_params_of_dense_models_are_exact_but_for_norms() -> None:
    # meta-llama/Meta-Llama-3-8B has 8,030,261,248 parameters: embedding and 65 norms are not ours.
    embedding, norms = 128_256 * 4096, 65 * 4096
    assert ModelSpec.preset("llama-3-8b").active_params == 8_030_261_248 - embedding - norms
    # meta-llama/Meta-Llama-3-70B: 70,553,706,496.
    embedding, norms = 128_256 * 8192, 161 * 8192
    assert ModelSpec.preset("llama-3-70b").active_params == 70_553_706_496 - embedding - norms


def test_active_params_can_be_overridden() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "intermediate_size"}
    with pytest.raises(ConfigError, match="intermediate_size is missing"):
        ModelSpec.from_config(config)
    assert ModelSpec.from_config(config, active_params=7).active_params == 7
    with pytest.raises(ConfigError, match="active_params is 0"):
        ModelSpec.from_config(config, active_params=0)


def test_presets_are_named_and_read_alike() -> None:
    assert ModelSpec.presets() == tuple(sorted(PRESETS))
    assert len(ModelSpec.presets()) >= 60
    for name in ModelSpec.presets():
        spec = ModelSpec.preset(name)
        assert spec.name == name
        assert spec == ModelSpec.preset(name)
        assert hash(spec) == hash(ModelSpec.preset(name))
    assert ModelSpec.preset("deepseek-ai/DeepSeek-V3").name == "deepseek-v3"
    for alias, target in ALIASES.items():
        assert ModelSpec.preset(alias).name == target
        assert alias not in PRESETS


def test_kinds_of_presets() -> None:
    latent = ModelSpec.preset("deepseek-v3")
    assert latent.is_latent
    assert latent.has_latent
    assert not latent.has_states
    assert not latent.has_sliding_window
    mixed = ModelSpec.preset("kimi-linear")
    assert mixed.is_latent
    assert mixed.has_states
    assert len(mixed.state_layers) == 20
    assert len(mixed.attention_layers) == 7
    assert [i for i, k in zip(mixed.layer_ids, kinds(mixed), strict=True) if k == "latent"] == [
        3, 7, 11, 15, 19, 23, 26
    ]  # fmt: skip
    grouped = ModelSpec.preset("llama-3-8b")
    assert not grouped.has_latent
    assert grouped.architecture == "LlamaForCausalLM"
    nemotron = ModelSpec.preset("nemotron-h-8b")
    assert (nemotron.num_layers, len(nemotron.layers)) == (52, 28)
    assert [nemotron.layer_ids[i] for i, k in enumerate(kinds(nemotron)) if k == "full"] == [7, 18, 29, 40]
    jamba = ModelSpec.preset("jamba-v0.1")
    assert [i for i, k in enumerate(kinds(jamba)) if k == "full"] == [4, 12, 20, 28]


def test_a_file_a_folder_a_dict_and_an_object_read_alike(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {**LLAMA, "_name_or_path": "org/tiny"}

    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    from_folder = ModelSpec.from_config(folder)
    assert from_folder.name == "tiny-llama"
    assert from_folder == ModelSpec.from_config(str(folder / "config.json"))
    assert from_folder == ModelSpec.resolve(str(folder))
    from_dict = ModelSpec.from_config(LLAMA)
    assert from_dict.name == "LlamaForCausalLM"
    assert from_dict == from_folder.model_copy(update={"name": "LlamaForCausalLM"})
    assert ModelSpec.from_config(Config()).name == "org/tiny"
    assert ModelSpec.from_config(Config(), name="mine").name == "mine"


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_language_models(key: str) -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "architectures"}
    outer = {
        "architectures": ["SeesForConditionalGeneration"],
        "vision_config": {"hidden_size": 9},
        key: inner,
    }
    spec = ModelSpec.from_config(outer)
    assert spec.architecture == "SeesForConditionalGeneration"
    assert spec.layers == read().layers
    twice = ModelSpec.from_config({"model_type": "omni", "thinker_config": outer})
    assert twice.layers == read().layers


def test_unknown_architectures_are_read_by_their_standard_fields() -> None:
    spec = read(architectures=["BrandNewForCausalLM"], model_type="brand_new", head_dim=32)
    assert set(spec.layers) == {FullAttention(heads=4, kv_heads=2, head_dim=32)}
    assert set(read(num_key_value_heads=None).layers) == {FullAttention(heads=4, kv_heads=4, head_dim=16)}


def test_older_spellings() -> None:
    gpt2 = ModelSpec.from_config(
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
    )
    assert gpt2.layers == (FullAttention(heads=12, kv_heads=12, head_dim=64),) * 12
    assert gpt2.active_params == 50257 * 768 + 12 * (4 * 768**2 + 2 * 768 * 3072)
    opt = read(architectures=["OPTForCausalLM"], model_type="opt", ffn_dim=96, intermediate_size=None)
    assert opt.active_params == 512 * 64 + 4 * (64 * 64 * 2 + 64 * 64 + 2 * 64 * 96)
    falcon = read(model_type="falcon", multi_query=True, num_kv_heads=4)
    assert set(falcon.layers) == {FullAttention(heads=4, kv_heads=1, head_dim=16)}
    grouped = read(
        model_type="falcon",
        multi_query=True,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_key_value_heads=None,
    )
    assert set(grouped.layers) == {FullAttention(heads=4, kv_heads=2, head_dim=16)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 32, "model_type": "mistral"}, "ssss"),  # Mistral-7B-v0.1
        ({"sliding_window": None}, "ffff"),
        ({"sliding_window": 32, "max_position_embeddings": 32}, "ffff"),  # never slides
        ({"sliding_window": 32, "model_type": "qwen2"}, "ffff"),
        ({"sliding_window": 32, "use_sliding_window": False}, "ffff"),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, "fsss"),
        ({"sliding_window": 32, "model_type": "gemma2"}, "sfsf"),
        ({"sliding_window": 32, "model_type": "gpt_oss"}, "sfsf"),
        ({"sliding_window": 32, "sliding_window_pattern": 3}, "ssfs"),
        ({"sliding_window": 32, "_sliding_window_pattern": 4}, "sssf"),
        ({"sliding_window": 32, "sliding_window_pattern": "LLG"}, "ssfs"),
        (
            {
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "architectures": ["GptOssForCausalLM"],
            },
            "sfsf",
        ),
        ({"attention_chunk_size": 32, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, "sssf"),
        ({"sliding_window": 32, "hybrid_layer_pattern": [0, 1, 1, 0]}, "fssf"),
    ],
)
def test_sliding_windows(changes: dict[str, Any], expected: str) -> None:
    spec = read(**changes)
    assert letters(spec) == expected
    assert spec.has_sliding_window == ("s" in expected)
    assert all(layer.window == 32 for layer in spec.layers if isinstance(layer, SlidingWindow))


def test_a_window_of_no_layer_in_particular_is_refused() -> None:
    assert "sliding_window is 32, but nothing says which layers it applies to" in refusal(sliding_window=32)


def test_gemma_3_reads_what_its_published_config_leaves_out() -> None:
    spec = ModelSpec.from_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        }
    )
    assert spec.layers[5] == FullAttention(heads=8, kv_heads=4, head_dim=256)
    assert spec.layers[0] == SlidingWindow(heads=8, kv_heads=4, head_dim=256, window=1024)
    assert Counter(kinds(spec)) == {"sliding": 29, "full": 5}


def test_shapes_that_differ_between_full_and_sliding_layers() -> None:
    mimo = read(
        hybrid_layer_pattern=[0, 1, 1, 1],
        sliding_window_size=8,
        head_dim=24,
        v_head_dim=16,
        swa_num_key_value_heads=4,
        swa_head_dim=24,
        swa_v_head_dim=16,
    )
    assert mimo.layers[0] == FullAttention(heads=4, kv_heads=2, head_dim=24, v_head_dim=16)
    assert mimo.layers[1] == SlidingWindow(heads=4, kv_heads=4, head_dim=24, v_head_dim=16, window=8)
    gemma4 = read(
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=8,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=1,
    )
    assert gemma4.layers[3] == FullAttention(heads=4, kv_heads=1, head_dim=32, kv_shared=True)


def test_hybrids_without_a_preset() -> None:
    granite = read(
        architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid",
        layer_types=["mamba", "mamba", "attention", "mamba"],
        shared_intermediate_size=96,
        num_local_experts=0,
        **MAMBA2,
    )
    state = StateSpace(
        variant="mamba2", conv_dim=192, conv_kernel=4, heads=8, head_dim=16, state_size=32, groups=1
    )
    assert kinds(granite) == ["state", "state", "full", "state"]
    assert granite.state_layers == (state,) * 3
    falcon = read(architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", **MAMBA2)
    assert kinds(falcon) == ["full", "state"] * 4
    assert falcon.layer_ids == (0, 0, 1, 1, 2, 2, 3, 3)
    assert falcon.num_layers == 4
    bamba = read(
        model_type="bamba", attn_layer_indices=[1], **{**MAMBA2, "mamba_d_head": "auto", "mamba_expand": 2}
    )
    assert kinds(bamba) == ["state", "full", "state", "state"]
    assert bamba.state_layers == (state,) * 3
    lfm2 = read(model_type="lfm2", full_attn_idxs=[2], conv_L_cache=3)
    assert kinds(lfm2) == ["state", "state", "full", "state"]
    assert lfm2.state_layers[0].variant == "shortconv"


def test_pure_state_models() -> None:
    mamba2 = ModelSpec.from_config(
        {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "hidden_size": 64,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 32,
            "n_groups": 1,
            "num_hidden_layers": 2,
            "vocab_size": 512,
        }
    )
    assert mamba2.attention_layers == ()
    assert mamba2.state_layers[0].conv_dim == 192
    assert not mamba2.is_latent
    assert mamba2.active_params == 512 * 64 + 2 * (64 * (2 * 128 + 2 * 32 + 8) + 128 * 64)
    mamba1 = ModelSpec.from_config(
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    )
    assert mamba1.state_layers[0] == StateSpace(
        variant="mamba1", conv_dim=128, conv_kernel=4, heads=128, head_dim=1, state_size=16
    )


def test_state_dtype_is_read() -> None:
    config = {**PRESETS["qwen3-next"], "mamba_ssm_dtype": "bfloat16"}
    assert ModelSpec.from_config(config).state_layers[0].state_dtype == "bf16"
    assert ModelSpec.preset("qwen3-next").state_layers[0].state_dtype == "fp32"


def test_dsa_layers_that_reuse_a_selection_keep_no_index() -> None:
    def indexed(**changes: Any) -> list[bool]:
        config = {**PRESETS["glm-5"], "num_hidden_layers": 6, **changes}
        layers = ModelSpec.from_config(config).layers
        return [isinstance(x, LatentAttention) and x.index_head_dim is not None for x in layers]

    assert indexed() == [True] * 6
    assert indexed(indexer_types=["full", "shared"] * 3) == [True, False] * 3
    assert indexed(index_topk_pattern="FFSSF") == [True, True, False, False, True, True]
    assert indexed(index_topk_freq=2) == [True, True, False, True, False, True]
    assert indexed(index_topk_freq=2, index_skip_topk_offset=3) == [True, True, True, False, True, False]


def test_expert_layers_are_placed_as_each_family_does() -> None:
    width, experts, router = 3 * 64 * 128, 2 * 3 * 64 * 32, 64 * 8
    base = read(num_hidden_layers=4).active_params
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

    def expert_layers(**changes: Any) -> float:
        return (base - read(**moe, **changes).active_params) / (width - experts - router)

    assert expert_layers() == 4
    assert expert_layers(mlp_only_layers=[0, 1, 2, 3]) == 0
    assert expert_layers(decoder_sparse_step=2) == 2
    assert expert_layers(first_k_dense_replace=1) == 3
    assert expert_layers(first_k_dense_replace=1, moe_layer_freq=2) == 1
    assert expert_layers(moe_layer_freq=[0, 1, 1, 1]) == 3
    assert expert_layers(interleave_moe_layer_step=2) == 2
    assert expert_layers(moe_layers=[3]) == 1
    assert expert_layers(expert_layer_period=2, expert_layer_offset=1) == 2
    assert expert_layers(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]) == 3


def test_shared_experts_are_counted() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    plain = read(**moe).active_params
    assert read(**moe, n_shared_experts=2).active_params - plain == 4 * 3 * 64 * 64
    assert read(**moe, shared_expert_intermediate_size=16).active_params - plain == 4 * 3 * 64 * 16


def test_specs_by_hand() -> None:
    layer = FullAttention(heads=4, kv_heads=2, head_dim=16)
    spec = ModelSpec(
        name="mine",
        architecture="Mine",
        layers=(layer,) * 3,
        hidden_size=64,
        vocab_size=10,
        active_params=1000,
    )
    assert (spec.num_layers, spec.layer_ids) == (3, (0, 1, 2))
    assert layer.v_head_dim == 16
    with pytest.raises(ValueError, match="layer_ids has 1 entries for 3 layers"):
        ModelSpec(**{**spec.model_dump(), "layer_ids": (0,)})
    with pytest.raises(ValueError, match="layer_ids must lie in"):
        ModelSpec(**{**spec.model_dump(), "layer_ids": (0, 1, 3)})
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
