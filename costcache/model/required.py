"""Fields that a config must have, since without them it would be read as a model of another kind or size."""

from __future__ import annotations

from costcache.model.blocks import EXPERTS
from costcache.model.fields import Fields

__all__ = ["require_fields"]

# Families that are not plain attention, and the fields of which one must say how; without them the
# remaining fields would read as plain attention.
_NEEDED = {
    "deci": ("num_key_value_heads_per_layer", "block_configs"),
    "deepseek_v32": ("index_topk",),
    "gemma3n_text": ("num_kv_shared_layers",),
    "gemma4_text": ("global_head_dim", "per_layer_config", "swa_head_dim"),
    "gemma4_unified_text": ("global_head_dim", "per_layer_config", "swa_head_dim"),
    "glm5_next_text": ("index_kpool",),
    "glm_moe_dsa": ("index_topk",),
    "hy_v4": ("indexer_types",),
    "kimi_linear": ("linear_attn_config", "layer_types"),
    "longcat_flash": ("zero_expert_num",),
    "minimax": ("attn_type_list", "layer_types"),
    "minimax_m3_vl_text": ("sparse_attention_config", "layer_types"),
    "nemotron_h": ("hybrid_override_pattern", "layers_block_type", "layer_types"),
    "zamba": ("layers_block_type", "layer_types"),
    "zamba2": ("layers_block_type", "layer_types"),
}
# Fields that the classes of these families fill in with a number of their own, where costcache would read
# none: they must be there, if only as null.
_STATED = {
    "attention_head_dim": ("zamba", "zamba2"),
    "hidden_size_per_layer_input": ("gemma3n_text", "gemma4_text"),
    "intermediate_size": ("apertus", "arcee", "cosmos3_edge_text", "jais2", "nanochat", "nemotron_h"),
    "mlp_layer_types": ("glm5_next_text",),
    "moe_intermediate_size": ("mellum", "qwen3_moe", "qwen3_vl_moe_text"),
    "moe_num_shared_experts": ("aria_text", "ernie4_5_moe"),
    "n_groups": ("nemotron_h",),
    "n_shared_experts": (
        "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe",
        "glm4_moe_lite", "glm4v_moe_text", "glm5_next_text", "glm_moe_dsa", "hy_v4", "kimi_k2", "mistral4",
        "solar_open",
    ),
    "num_key_value_heads": (
        "bamba", "bitnet", "cosmos3_edge_text", "cwm", "ernie4_5", "ernie4_5_moe", "falcon_h1", "gemma2",
        "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4v_moe_text",
        "glm4v_text", "glm_ocr_text", "gpt_oss", "granite_swa", "hy_v3", "jamba", "laguna", "lfm2",
        "lfm2_moe", "llama4_text", "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral",
        "ministral3", "mistral", "mixtral", "muse_glimmer_text", "nemotron_h", "phi4_multimodal",
        "phimoe", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
        "qwen3_next", "qwen4_exp_text", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
    ),
    "num_shared_experts": ("afmoe", "exaone_moe", "hy_v3", "kimi_linear"),
    "q_lora_rank": (
        "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm5_next_text",
        "glm_moe_dsa", "hy_v4", "kimi_k2", "longcat_flash", "minicpm3", "mistral4", "youtu",
    ),
    "shared_expert_intermediate_size": (
        "laguna", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text",
    ),
    "shared_intermediate_size": ("granitemoehybrid", "minimax_m3_vl_text"),
    "v_head_dim": ("mimo_v2_flash",),
}  # fmt: skip
_OTHER_NAMES = {
    "mlp_layer_types": ("first_k_dense_replace",),
    "moe_num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "n_groups": ("mamba_n_groups", "mamba_ngroups"),
    "n_shared_experts": ("num_shared_experts",),
    "num_key_value_heads": ("num_kv_heads", "num_key_value_heads_per_layer", "num_attention_groups"),
    "num_shared_experts": ("n_shared_experts",),
}


def require_fields(fields: Fields) -> None:
    """Refuse a config that leaves out what its family's class would fill in. Raises `ConfigError`."""
    needed = _NEEDED.get(fields.model_type)
    if needed is not None and not any(name in fields.data for name in needed):
        raise fields.error(
            needed[0], f"is missing, which every {fields.model_type} model has", "add it to the config"
        )
    for name, families in _STATED.items():
        named = (name, *_OTHER_NAMES.get(name, ()))
        if ("expert" in name or name.startswith(("moe", "shared"))) and not fields.has(*EXPERTS):
            continue
        if fields.model_type in families and not any(other in fields.data for other in named):
            raise fields.error(
                name,
                f"is missing, and the class of {fields.model_type} models has a default of its own for it",
                "add it to the config, as null if the model has none",
            )
