"""Tiny models of three architectures, with random weights: a config is all that the Engine needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

MODELS: dict[str, dict[str, Any]] = {
    "mha": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    },
    "mla": {
        **COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,  # no layer is a mixture: the CPU has no kernel for one
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    "hybrid": {
        **COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 1, 2, 3],
    },
}


PLAIN: dict[str, Any] = {**COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
LATENT: dict[str, Any] = {
    **MODELS["mla"], "num_hidden_layers": 4, "q_lora_rank": 32, "first_k_dense_replace": 1,
    "rope_scaling": None,
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_head_dim": 128, "index_n_heads": 2, "index_topk": 64}
GATED_DELTA: dict[str, Any] = {
    name: value for name, value in MODELS["hybrid"].items() if name not in ("mlp_only_layers",)
}
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _model(architecture: str, model_type: str, base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    named = {"architectures": [architecture]} if architecture else {"architectures": None}
    fields = {**base, **named, "model_type": model_type, **changes}
    return {name: value for name, value in fields.items() if value is not None}


# Kinds of which no preset is one, for the pools alone.
KINDS: dict[str, dict[str, Any]] = {
    "windows in a pool of their own": _model(
        "GraniteSWAForCausalLM", "granite_swa", PLAIN, layer_types=WINDOWS, sliding_window=64
    ),
    "windows with the rest": _model(
        "Cohere2ForCausalLM", "cohere2", PLAIN, layer_types=WINDOWS, sliding_window=64, layer_norm_eps=1e-5
    ),
    "windows by a period": _model(
        "AfmoeForCausalLM", "afmoe", PLAIN, global_attn_every_n_layers=4, sliding_window=64, **EXPERTS,
        num_dense_layers=1, num_shared_experts=1,
    ),
    "windows in a repeated block": _model(
        "IQuestQ1ForCausalLM", "iquest_q1", {**PLAIN, "num_hidden_layers": 8}, sliding_window=64,
        dense_intermediate_size=128, intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        num_hybrid_layers_block=1, mlp_only_layers=[0], rotary_dim=8,
    ),
    "windows with other heads": _model(
        "Step3p5ForCausalLM", "step3p5", PLAIN, num_attention_groups=2, num_key_value_heads=None,
        layer_types=WINDOWS, sliding_window=64, moe_num_experts=4, moe_top_k=2, moe_intermediate_size=32,
        share_expert_dims=32, moe_layers_enum="2,3", use_head_wise_attn_gate=True,
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_heads": 4, "num_attention_groups": 2,
            "head_dim": 16,
        },
    ),
    "windows of latents": _model(
        "Dots3NoteForCausalLM", "dots3_note", LATENT, layer_types=WINDOWS, sliding_window_size=64,
        attention_gate_type="headwise", swa_attention_gate_type="headwise", swa_q_lora_rank=32,
        swa_kv_lora_rank=48, swa_qk_nope_head_dim=16, swa_qk_rope_head_dim=8, swa_v_head_dim=16,
        swa_num_attention_heads=2, swa_num_key_value_heads=2, num_nextn_predict_layers=1,
    ),
    "windows of latents, sparse": _model(
        "Dots3NoteForCausalLM", "dots3_note", LATENT, layer_types=WINDOWS, sliding_window_size=64,
        swa_q_lora_rank=32, swa_kv_lora_rank=48, swa_qk_nope_head_dim=16, swa_qk_rope_head_dim=8,
        swa_v_head_dim=16, swa_num_attention_heads=2, swa_num_key_value_heads=2, **INDEXER,
        attention_gate_type="elementwise", swa_attention_gate_type="headwise", num_nextn_predict_layers=1,
    ),
    "gates of heads": _model(
        "Spark2_5ForCausalLM", "spark2_5", PLAIN, layer_types=WINDOWS, sliding_window=64,
        headwise_attn_output_gate=True,
    ),
    "sparse latents, some shared": _model(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", LATENT, **INDEXER, kv_lora_rank=128,
        indexer_types=["full", "shared", "shared", "full"],
    ),
    "pooled index keys": {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": _model(
            "", "glm5_next_text", LATENT, **INDEXER, kv_lora_rank=128, qk_rope_head_dim=0,
            layer_types=["linear_attention", "deepseek_sparse_attention"] * 2, linear_head_dim=16,
            linear_num_heads=4, linear_conv_kernel_dim=4, index_kpool=16, index_kpool_compress=True,
            num_nextn_predict_layers=1,
        ),
    },
    "pooled keys of sparse attention": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": _model(
            "", "qwen4_exp_text", GATED_DELTA, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32,
            indexer_budget=2048, indexer_compress_ratio=4, hc_count=2, hc_lowrank=8,
            layer_types=[*LINEAR[:3], "qwen_sparse_attention"],
        ),
    },
    "states of n-gram embeddings": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": _model(
            "", "qwen4_exp_text", GATED_DELTA, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32,
            indexer_budget=2048, indexer_compress_ratio=4, hc_count=2, hc_lowrank=8, layer_types=LINEAR,
            ple_layer_ids=[1, 3], ple_embed_dim=64, ple_conv_kernel_size=4, ngram_size=3,
        ),
    },
    "lightning attention beside latents": _model(
        "BailingMoeV2_5ForCausalLM", "bailing_hybrid", LATENT, layer_group_size=2, **EXPERTS,
        num_shared_experts=1, n_routed_experts=None, n_shared_experts=None, head_dim=16,
    ),
    "delta attention beside latents without positions": _model(
        "BailingMoeV3ForCausalLM", "bailing_hybrid", LATENT, layer_group_size=2, short_conv_kernel_size=4,
        use_mla_nope=True, no_kda_lora=True, **EXPERTS, num_shared_experts=1, n_routed_experts=None,
        n_shared_experts=None, head_dim=16, gated_attention_proj_granularity_type="head_wise",
    ),
    "gated delta nets beside latents": _model(
        "GigaChat35ForCausalLM", "gigachat3_5", {**GATED_DELTA, **LATENT}, full_attention_layers=[1, 3],
        full_attention_interval=None, num_experts=None, gated_attention=True, head_dim=16,
        shared_expert_intermediate_size=None, decoder_sparse_step=None,
    ),
    "attention twice in a layer": _model(
        "LongcatFlashForCausalLM", "longcat_flash", LATENT, num_layers=2, num_hidden_layers=None,
        ffn_hidden_size=128, expert_ffn_hidden_size=32, intermediate_size=None, moe_topk=3,
        zero_expert_num=2, n_shared_experts=None, moe_intermediate_size=None, num_experts_per_tok=None,
        moe_layer_freq=None, first_k_dense_replace=None, head_dim=None, num_nextn_predict_layers=1,
    ),
    "states of Mamba-1": _model(
        "FalconMambaForCausalLM", "falcon_mamba", COMMON, num_hidden_layers=2, state_size=8,
    ),
    "convolutions with experts": _model(
        "Lfm2MoeForCausalLM", "lfm2_moe", {**PLAIN, "num_key_value_heads": 2}, conv_L_cache=3,
        layer_types=["conv", "full_attention"] * 2, num_dense_layers=1, **EXPERTS,
    ),
}  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "deepseek-v4flash": {"kv_dtype": "fp8_e4m3", "page_size": 256},
    "pooled index keys": {"page_size": 64 * 16},
}
"""How SGLang must be told to serve some models, as arguments of `model_pools`."""


def write_model(name: str, folder: Path) -> Path:
    """Write the config of one model and return its folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return path
