"""Configs of full-size models for an Engine with dummy weights: the shapes are real, the weights are not.

Every field is that of the model's own config.json, except for the hybrid's numbers of layers and experts. The
Engine needs more fields than costcache's presets have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["MODELS", "write_model"]

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": False,
        "max_position_embeddings": 163840,
        "vocab_size": 102400,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    # Qwen3-Next-80B-A3B with half its layers and 64 of its 512 experts, so that two Engines fit on one GPU.
    "qwen3-next-half": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 24,
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "max_position_embeddings": 262144,
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}


def write_model(name: str, folder: Path) -> Path:
    """Return a model's folder: one of :data:`MODELS`, written under ``folder``, or one with a config.json.

    Raises:
        FileNotFoundError: If ``name`` is neither.
    """
    if name not in MODELS:
        path = Path(name)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"--model is {name!r}: give {', '.join(MODELS)}, or a folder with a config.json"
            )
        return path
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return path
