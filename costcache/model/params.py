"""Active parameters per token, counted from a config's dimensions.

Only weight matrices count: norms, biases and convolutions are left out (under 0.1 % of any
preset). The input embedding is a look-up without FLOPs and is left out too. The output head
counts, tied or not, since a tied head is still multiplied with. Weights that a token passes several
times (the shared blocks of Zamba) count each time.
"""

from __future__ import annotations

from collections.abc import Iterator

from costcache.model.blocks import EXPERTS
from costcache.model.fields import Fields
from costcache.model.gates import gate_width
from costcache.model.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    SlidingWindow,
    StateSpace,
)
from costcache.model.mlp import dense_params, expert_params
from costcache.model.reading import ReadModel, window_fields
from costcache.model.refusals import refuse_uncounted

__all__ = ["active_params"]


def active_params(fields: Fields, model: ReadModel) -> int:
    """Count the parameters active per token: mixers, feed-forward parts or chosen experts, output head.

    Raises `ConfigError` if a dimension is missing, or if a field names a part that is not known.
    """
    hidden = fields.integer("hidden_size", "n_embd", "d_model")
    total = fields.integer("vocab_size", "padded_vocab_size") * hidden
    counted: dict[tuple[int, int], int] = {}  # identical layers are counted once
    for index, layer in zip(model.layer_ids, model.layers, strict=True):
        own = model.fields[index]
        key = (id(own), id(layer))
        if key not in counted:
            counted[key] = _mixer(own, layer, hidden)
        total += counted[key]
    parts: dict[tuple[int, str, bool], int] = {}
    shares = [getattr(x, "kv_shared", False) for x in model.layers]
    sharing = {index for index, shared in zip(model.layer_ids, shares, strict=True) if shared}
    for index, block in enumerate(model.blocks):
        own = model.fields[index]
        part = (id(own), block.ffn, index in sharing)
        if part not in parts:
            parts[part] = _ffn(own, block.ffn, hidden, shared_kv=index in sharing)
        total += parts[part]
    total += sum(_extras(fields, hidden, len(model.blocks)))
    dense = all(block.ffn not in ("moe", "both") for block in model.blocks)
    if not (
        dense and any(name in fields.data for name in EXPERTS)
    ):  # experts that no layer has are not asked about
        refuse_uncounted(fields)
    return total


def _mixer(fields: Fields, layer: LayerSpec, hidden: int) -> int:
    if isinstance(layer, StateSpace):
        return _state_space(fields, layer, hidden)
    if isinstance(layer, LatentAttention):
        return _latent(fields, layer, hidden)
    if isinstance(layer, CompressedAttention):
        return _compressed(fields, layer, hidden)
    return _attention(fields, layer, hidden)


def _ffn(fields: Fields, kind: str, hidden: int, *, shared_kv: bool) -> int:
    if kind == "none":
        return 0
    if kind in ("moe", "both"):
        return expert_params(fields, hidden) + (dense_params(fields, hidden) if kind == "both" else 0)
    # Gemma-4 doubles the width in the layers that store no K/V.
    wide = shared_kv and fields.flag("use_double_wide_mlp")
    return dense_params(fields, hidden) * (2 if wide else 1)


def _attention(fields: Fields, layer: FullAttention | SlidingWindow, hidden: int) -> int:
    # The shared blocks of Zamba read the embedding beside the hidden state.
    into = 2 * hidden if fields.model_type.startswith("zamba") else hidden
    query = layer.heads * layer.head_dim
    stored = 0 if layer.kv_shared else layer.kv_heads * (layer.head_dim + layer.v_head_dim)
    if not isinstance(layer, SlidingWindow) and fields.flag("attention_k_eq_v"):  # Gemma-4
        stored //= 2
    low = fields.integer("share_q_dim", default=0, least=0)  # Step-3: one low rank for all queries
    asked = low * (into + query) if low else into * query
    total = asked + into * stored + layer.heads * layer.v_head_dim * hidden
    total += gate_width(fields, layer.heads, layer.v_head_dim) * hidden
    if into != hidden:
        total += hidden * hidden + _adapters(fields, hidden)
    if isinstance(layer, FullAttention) and layer.index_head_dim is not None:
        total += hidden * layer.index_head_dim * (1 + (layer.index_heads or 0))
    return total


def _adapters(fields: Fields, hidden: int) -> int:
    """Low-rank weights that each use of a shared block of Zamba-2 has of its own."""
    if fields.model_type != "zamba2":
        return 0
    rank = fields.integer("adapter_rank", default=128)
    total = rank * (hidden + 2 * fields.integer("intermediate_size", default=4 * hidden))
    if fields.flag("use_shared_attention_adapter"):
        total += 3 * rank * 4 * hidden
    return total


def _latent(fields: Fields, layer: LatentAttention, hidden: int) -> int:
    if layer.window is not None:
        fields = window_fields(fields)
    key_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    rank = fields.optional_integer("q_lora_rank", least=0)
    query = rank * (hidden + layer.heads * key_dim) if rank else hidden * layer.heads * key_dim
    up = layer.kv_lora_rank * layer.heads * (layer.qk_nope_head_dim + layer.v_head_dim)
    down = 0 if layer.kv_shared else hidden * layer.latent_dim
    total = query + down + up + layer.heads * layer.v_head_dim * hidden
    gate = gate_width(fields, layer.heads, layer.v_head_dim)
    if rank and fields.model_type == "axk2":  # query and gate from twice the low rank
        total += rank * layer.heads * key_dim + 2 * rank * gate
    else:
        total += gate * hidden
    if layer.index_head_dim is not None and layer.index_heads is not None:
        index_query = (rank or hidden) * layer.index_heads * layer.index_head_dim
        total += index_query + hidden * (layer.index_head_dim + layer.index_heads)
        if layer.index_pool > 1:  # how much each key counts in its pool
            total += hidden * layer.index_head_dim
    return total


def _compressed(fields: Fields, layer: CompressedAttention, hidden: int) -> int:
    """The window's part has the attention itself, the compressed part its compressors and indexer."""
    rank = fields.integer("q_lora_rank")
    width = layer.heads * layer.head_dim
    if layer.window is not None:
        out = fields.integer("o_lora_rank")
        groups = fields.integer("o_groups", default=8)
        return rank * (hidden + width) + hidden * layer.head_dim + out * (width + groups * hidden)
    overlap = 2 if layer.index_head_dim is not None else 1  # ratio 4 reads the window before as well
    total = 2 * hidden * overlap * layer.head_dim  # values and gates
    if layer.index_head_dim is not None and layer.index_heads is not None:
        total += 2 * hidden * overlap * layer.index_head_dim
        total += rank * layer.index_heads * layer.index_head_dim + hidden * layer.index_heads
    return total


def _state_space(fields: Fields, layer: StateSpace, hidden: int) -> int:
    inner = layer.heads * layer.head_dim
    if layer.variant == "shortconv" and layer.replicated:  # key and value from an n-gram's embedding
        return fields.integer("ple_embed_dim", default=hidden) * (layer.conv_dim + hidden)
    if layer.variant == "shortconv":  # B, C and x in; out
        return 4 * hidden * layer.conv_dim
    if layer.variant == "lightning":  # q, k, v, the output gate; out
        return 5 * hidden * inner
    if layer.variant == "kda":  # q, k, v, out; the decay and output gates through head_dim
        if fields.flag("no_kda_lora"):  # Ling-3: neither gate is of low rank
            return 6 * hidden * inner + hidden * layer.heads
        low = layer.head_dim * (hidden + inner)
        linear = fields.nested("linear_attn_config")
        full = linear is not None and linear.flag("use_full_rank_gate")  # Kimi-K3's output gate
        return 4 * hidden * inner + low + (hidden * inner if full else low) + hidden * layer.heads
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


def _extras(fields: Fields, hidden: int, layers: int) -> Iterator[int]:
    """Matrices beside mixers and feed-forward parts."""
    width = fields.integer("hidden_size_per_layer_input", default=0, least=0)
    if width:  # Gemma-3n and -4: an embedding per layer, projected and gated
        yield layers * 3 * hidden * width
    rank = fields.integer("laurel_rank", default=0, least=0)
    yield layers * 2 * hidden * rank
    inputs = fields.integer("altup_num_inputs", default=0, least=0)
    if inputs > 1:  # Gemma-3n's streams
        yield 2 * (inputs - 1) * hidden * hidden
    # Hyper-connections, around each mixer and each feed-forward part: DeepSeek-V4's, Qwen-4's.
    streams = fields.integer("hc_mult", default=1)
    if streams > 1 and fields.flag("mhc", default=True):
        yield layers * 2 * (streams * streams + 2 * streams) * streams * hidden
    streams = fields.integer("hc_count", default=1)
    if streams > 1:
        rank = fields.integer("hc_lowrank", default=0, least=0)
        yield (2 * layers + 1) * 2 * rank * streams * hidden + 2 * layers * streams * streams * hidden
