"""Active parameters per token, counted from a config's dimensions.

Only weight matrices count: norms, biases and convolutions are left out (under 0.1 % of any
preset). The input embedding is a look-up without FLOPs and is left out too. The output head
counts, tied or not, since a tied head is still multiplied with.
"""

from __future__ import annotations

from costcache.model.fields import Fields
from costcache.model.layers import (
    FullAttention,
    LatentAttention,
    LayerSpec,
    SlidingWindow,
    StateSpace,
)
from costcache.model.reading import ReadModel

__all__ = ["active_params"]

# Families whose feed-forward part has two matrices (up, down); all others are gated and have three.
_UNGATED = (
    "apertus",
    "arcee",
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "nemotron",
    "nemotron_h",
    "opt",
    "persimmon",
    "phi",
    "starcoder2",
    "xglm",
)


def active_params(fields: Fields, model: ReadModel) -> int:
    """Count the parameters active per token: mixers, feed-forward parts or chosen experts, output head.

    Raises `ConfigError` if a dimension is missing.
    """
    hidden = fields.integer("hidden_size", "n_embd", "d_model")
    total = fields.integer("vocab_size") * hidden
    mixers: dict[int, int] = {}
    for layer in model.layers:
        if id(layer) not in mixers:
            mixers[id(layer)] = _mixer(fields, layer, hidden)
        total += mixers[id(layer)]
    kinds = [block.ffn for block in model.blocks]
    if "dense" in kinds:
        total += kinds.count("dense") * _dense(fields, hidden)
    if "moe" in kinds:
        total += kinds.count("moe") * _experts(fields, hidden)
    return total


def _mixer(fields: Fields, layer: LayerSpec, hidden: int) -> int:
    if isinstance(layer, StateSpace):
        return _state_space(fields, layer, hidden)
    if isinstance(layer, LatentAttention):
        return _latent(fields, layer, hidden)
    return _attention(fields, layer, hidden)


def _attention(fields: Fields, layer: FullAttention | SlidingWindow, hidden: int) -> int:
    gate = _gates_attention(fields)  # Qwen3-Next and Qwen3.5: an output gate as wide as q
    query = layer.heads * layer.head_dim * (2 if gate else 1)
    stored = 0 if layer.kv_shared else layer.kv_heads * (layer.head_dim + layer.v_head_dim)
    return hidden * (query + stored + layer.heads * layer.v_head_dim)


def _gates_attention(fields: Fields) -> bool:
    family = fields.model_type.startswith(("qwen3_next", "qwen3_5"))
    return fields.flag("attn_output_gate", default=family)


def _latent(fields: Fields, layer: LatentAttention, hidden: int) -> int:
    key_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    rank = fields.optional_integer("q_lora_rank", least=0)
    query = rank * (hidden + layer.heads * key_dim) if rank else hidden * layer.heads * key_dim
    up = layer.kv_lora_rank * layer.heads * (layer.qk_nope_head_dim + layer.v_head_dim)
    total = query + hidden * layer.latent_dim + up + layer.heads * layer.v_head_dim * hidden
    if layer.index_head_dim is not None and layer.index_heads is not None:
        index_query = (rank or hidden) * layer.index_heads * layer.index_head_dim
        total += index_query + hidden * (layer.index_head_dim + layer.index_heads)
    return total


def _state_space(fields: Fields, layer: StateSpace, hidden: int) -> int:
    inner = layer.heads * layer.head_dim
    if layer.variant == "shortconv":  # B, C and x in; out
        return 4 * hidden * layer.conv_dim
    if layer.variant == "kda":  # q, k, v, out; the decay and output gates through head_dim
        gates = 2 * layer.head_dim * (hidden + inner)
        return 4 * hidden * inner + gates + hidden * layer.heads
    if layer.variant == "gdn":  # q, k, v and the output gate; a and b per head; out
        return hidden * (layer.conv_dim + 2 * inner + 2 * layer.heads)
    if layer.variant == "mamba2":  # z, x, B, C and dt; out
        return hidden * (layer.conv_dim + 2 * inner + layer.heads)
    rank = _dt_rank(fields, hidden)  # mamba1: x and z, then dt, B, C from x, dt up; out
    return 3 * hidden * inner + inner * (2 * rank + 2 * layer.state_size)


def _dt_rank(fields: Fields, hidden: int) -> int:
    """Rank of Mamba-1's time step; "auto" is hidden / 16, rounded up."""
    names = ("mamba_dt_rank", "time_step_rank")
    if fields.get(*names) in (None, "auto"):
        return -(-hidden // 16)
    return fields.integer(*names)


def _matrices(fields: Fields) -> int:
    return 2 if fields.model_type in _UNGATED else 3


def _dense(fields: Fields, hidden: int) -> int:
    return _matrices(fields) * hidden * _dense_width(fields, hidden)


def _dense_width(fields: Fields, hidden: int) -> int:
    if fields.model_type.startswith("granitemoe") and fields.has("shared_intermediate_size"):
        return fields.integer("shared_intermediate_size")  # Granite-4 without experts
    listed = fields.get("intermediate_size")
    if isinstance(listed, list | tuple) and listed:  # Gemma-3n: one width per layer, all alike
        widths = fields.integers("intermediate_size") or []
        if min(widths) < 1:
            raise fields.error("intermediate_size", f"contains {min(widths)}", "correct it")
        return sum(widths) // len(widths)
    llama4 = ("intermediate_size_mlp",) if fields.has("intermediate_size_mlp") else ()
    names = (*llama4, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    width = fields.integer(*names, default=4 * hidden if _matrices(fields) == 2 else None)
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3  # LFM2
    multiple = fields.integer("block_multiple_of", default=1)
    return -(-width // multiple) * multiple


def _experts(fields: Fields, hidden: int) -> int:
    """Active parameters of one expert layer: chosen routed experts, shared experts, router."""
    routed = fields.integer("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    chosen = fields.integer("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")
    width = fields.integer("moe_intermediate_size", "intermediate_size")
    # Nemotron-H can run its routed experts in a narrower latent space.
    latent = fields.integer("moe_latent_size", default=hidden)
    total = _matrices(fields) * chosen * latent * width + hidden * routed
    if latent != hidden:
        total += 2 * hidden * latent
    return total + _matrices(fields) * hidden * _shared_width(fields, width)


def _shared_width(fields: Fields, width: int) -> int:
    """Summed width of the shared experts, or of the dense part, that every token also passes through."""
    stated = fields.optional_integer(
        "shared_expert_intermediate_size",  # Qwen
        "moe_shared_expert_intermediate_size",  # Nemotron-H
        "shared_intermediate_size",  # Granite-4
        least=0,
    )
    if stated is not None:
        return stated
    if fields.model_type.startswith("gemma4"):  # experts run in parallel with the dense part
        return fields.integer("intermediate_size")
    if fields.model_type.startswith("llama4"):
        return width
    count = fields.integer(
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0, least=0
    )
    return count * width
