"""Configs as their authors published them: families whose fields differ from what their relatives write."""

from __future__ import annotations

from typing import Any

import pytest

from costcache.cost import token_cost
from costcache.deployment import Deployment
from costcache.model import FullAttention, ModelSpec
from tests.unit.small import LLAMA, read, refusal, without

EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
# Attention of the small Llama: queries and outputs of 4 heads of 16, keys and values of 2.
ATTENTION = 64 * (64 + 64 + 32 + 32)
HEAD = 512 * 64


def per_layer(spec: ModelSpec) -> float:
    """Active parameters of the feed-forward part of a layer."""
    return (spec.active_params - HEAD) / len(spec.layers) - ATTENTION


def test_a_layer_of_short_convolutions_is_as_wide_as_its_config_says() -> None:
    lfm2 = {
        **without(LLAMA, "intermediate_size"),
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "block_dim": 64,
        "block_ff_dim": 192,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "block_auto_adjust_ff_dim": True,
        "conv_L_cache": 3,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [1],
    }
    spec = ModelSpec.from_config(lfm2)
    assert [layer.conv_dim for layer in spec.state_layers] == [64] * 3
    assert spec.active_params == HEAD + 4 * 3 * 64 * 128 + ATTENTION + 3 * 4 * 64 * 64
    narrow = ModelSpec.from_config({**lfm2, "conv_dim": 32})
    assert [layer.conv_dim for layer in narrow.state_layers] == [32] * 3
    both = ModelSpec.from_config({**lfm2, "intermediate_size": 999})  # the class takes the other name
    assert both.active_params == spec.active_params
    wider = ModelSpec.from_config({**lfm2, "block_ffn_dim_multiplier": 2.0})
    assert wider.active_params - spec.active_params == 4 * 3 * 64 * 128
    assert "short_conv_dim is 64" in refusal(lfm2, short_conv_dim=64)


def test_a_hybrid_class_without_states_may_describe_them() -> None:
    states = {
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_proj_bias": False,
    }  # fmt: skip
    granite = {
        **LLAMA,
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 128,
        "layer_types": ["attention"] * 4,
    }
    assert ModelSpec.from_config({**granite, **states}).layers == read().layers
    assert "mamba_d_head is 64" in refusal(mamba_d_head=64)


def test_latent_attention_that_is_switched_off_has_no_widths() -> None:
    """DeepSeek-OCR writes zeros; its language model names no family of its own."""
    off: dict[str, Any] = {
        "use_mla": False, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0, "v_head_dim": 0,
    }  # fmt: skip
    inner = {**without(LLAMA, "model_type"), **off}
    outer = {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2"}
    spec = ModelSpec.from_config({**outer, "language_config": inner})
    assert set(spec.layers) == {FullAttention(heads=4, kv_heads=2, head_dim=16)}
    assert read(**{**off, "v_head_dim": 128, "qk_nope_head_dim": 128}).layers == read().layers
    assert "v_head_dim is 0" in refusal(**{**off, "use_mla": None})


@pytest.mark.parametrize("family", ["ernie4_5_moe_vl", "ernie4_5_vl_moe"])
def test_experts_once_per_modality(family: str) -> None:
    ernie = {
        **LLAMA,
        "model_type": family,
        "moe_num_experts": [8, 8],
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": [32, 16],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [3, 2],
    }
    experts = 3 * 64 * 32 * 3 + 64 * 8
    assert ModelSpec.from_config(ernie).active_params == HEAD + 4 * ATTENTION + 3 * 64 * 128 + 3 * experts


def test_grok_by_its_class() -> None:
    """Grok-1 has experts only; Grok-2, whose config names another family, a dense part beside them."""
    base = without(LLAMA, "model_type")
    first = {**base, "architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1"}
    first |= {"num_experts": 8, "num_experts_per_tok": 2}
    assert per_layer(ModelSpec.from_config(first)) == 2 * 3 * 64 * 128 + 64 * 8
    second = {**base, **EXPERTS, "architectures": ["Grok1ForCausalLM"], "model_type": "git"}
    second |= {"moe_intermediate_size": 64, "residual_moe": True, "rms_norm_eps": 1e-5}
    second |= {"sliding_window_size": -1, "global_attn_every_n": 1}
    spec = ModelSpec.from_config(second)
    assert per_layer(spec) == 3 * 64 * 128 + 2 * 3 * 64 * 64 + 64 * 8
    assert spec.layers == read().layers
    assert "sliding_window_size is 128: its name speaks of attention windows" in refusal(
        second, sliding_window_size=128
    )


@pytest.mark.parametrize("family", ["molmo", "qwen"])
def test_a_width_that_counts_gate_and_up_together(family: str) -> None:
    assert per_layer(read(model_type=family)) == 3 * 64 * 64


def test_one_expert_is_a_dense_part_of_hunyuan() -> None:
    one = {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1}
    assert per_layer(read(model_type="hunyuan_v1_dense", **one)) == 3 * 64 * 128
    experts = 2 * 3 * 64 * 128 + 64  # transformers' class of the other family has one, and a shared one
    assert per_layer(read(model_type="hunyuan_v1_moe", **one)) == experts
    two = {"num_experts": 2, "moe_topk": 1, "num_shared_expert": 1}
    assert per_layer(read(model_type="hunyuan_v1_moe", **two)) == 2 * 3 * 64 * 128 + 64 * 2


def test_attention_in_chunks_of_which_each_sees_everything() -> None:
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}
    assert read(dual_chunk_attention_config=chunks).layers == read().layers
    sparse = {**chunks, "sparse_attention_enabled": True}
    assert "dual_chunk_attention_config (LlamaForCausalLM): sparse_attention_enabled is true" in refusal(
        dual_chunk_attention_config=sparse
    )


@pytest.mark.parametrize(
    ("inner", "layers", "heads", "kv_heads"),
    [
        ({"model_type": "llama", "vocab_size": 32_064}, 32, 32, 32),  # LLaVA 1.5
        ({"model_type": "llama", "num_hidden_layers": 30}, 30, 32, 32),  # Janus
        (  # Pixtral
            {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40,
             "num_key_value_heads": 8, "sliding_window": None},
            40, 32, 8,
        ),
        ({"model_type": "qwen2", "intermediate_size": 11_008}, 32, 32, 32),  # Qwen2-Audio
    ],
)  # fmt: skip
def test_a_language_model_inside_a_multimodal_one_states_what_differs(
    inner: dict[str, Any], layers: int, heads: int, kv_heads: int
) -> None:
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    spec = ModelSpec.from_config({**outer, "text_config": inner})
    assert spec.layers == (FullAttention(heads=heads, kv_heads=kv_heads, head_dim=128),) * layers
    assert "is missing" in refusal({**outer, **inner})  # a file of its own states all of it
    unknown = {**inner, "model_type": "unheard_of"}
    assert "is missing" in refusal({**outer, "text_config": unknown})


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_scales_for_an_fp8_cache_that_servers_use_only_if_asked(scheme: str) -> None:
    spec = read(quantization_config={"quant_method": "fp8", "kv_cache_scheme": scheme})
    assert spec.kv_dtype is None
    assert token_cost(spec, Deployment()) == token_cost(read(), Deployment())


def test_attention_in_both_directions_is_refused() -> None:
    assert "attention in both directions (Dream)" in refusal(model_type="Dream")
