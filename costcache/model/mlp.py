"""Parameters of the feed-forward part of one layer: dense, or the experts that a token passes."""

from __future__ import annotations

from costcache.model.blocks import EXPERTS
from costcache.model.fields import Fields

__all__ = ["LATENT", "dense_params", "expert_params"]

# Families whose classes are gated, or not, whatever their activation is called.
_GATED = ("bitnet", "modernbert-decoder", "zamba")
_UNGATED = (
    "apertus",
    "arcee",
    "biogpt",
    "bloom",
    "codegen",
    "cosmos3_edge_text",
    "falcon",
    "git",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "jais2",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "opt",
    "persimmon",
    "phi",
    "starcoder2",
    "xglm",
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "activation")
# Activations of two-matrix parts: a gated part is named for its gate (swiglu, geglu) or uses SiLU.
_PLAIN = ("relu2", "relu_squared", "squared_relu", "xielu")
_RMS = ("rms_norm_eps", "rms_norm_epsilon", "layernorm_type")
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "experts_per_token",
)
_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
LATENT = ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size")
"""Width of the space in which routed experts run, if it is narrower (Nemotron-H, Kimi-K3, Muse)."""

# Families whose expert layers are as wide as intermediate_size says, under names that others use too.
_ONE_WIDTH = ("aria", "cohere2_moe", "flex_olmo", "grok", "hunyuan", "olmoe")
_HALVED = ("molmo", "qwen")
"""Families that count gate and up together in the width of a dense part: Molmo, Qwen-1."""


def dense_params(fields: Fields, hidden: int) -> int:
    """Parameters of a dense part. Raises `ConfigError` if its width is missing."""
    return _matrices(fields) * hidden * _dense_width(fields, hidden)


def expert_params(fields: Fields, hidden: int) -> int:
    """Active parameters of an expert layer: chosen routed experts, shared experts, router.

    Raises `ConfigError` if a number or width is missing, or more experts are chosen than there are.
    """
    routed = fields.integer(*EXPERTS)
    chosen = fields.integer(*_CHOSEN)
    # Experts that do nothing (LongCat): of those chosen, as many are such on average as there are of them.
    idle = fields.integer("zero_expert_num", default=0, least=0)
    if chosen > routed + idle:
        raise fields.error("num_experts_per_tok", f"is {chosen} of {routed} experts", "correct one of them")
    width = _expert_width(fields)
    latent = fields.integer(*LATENT, default=hidden)
    each = _matrices(fields) * latent * width
    total = each * chosen * routed // (routed + idle) + hidden * (routed + idle)
    if latent != hidden:
        total += 2 * hidden * latent
    return total + _matrices(fields) * hidden * _shared_width(fields, width)


def _matrices(fields: Fields) -> int:
    """3 for a gated part (gate, up, down), 2 for an ungated one.

    The class of a family decides; for others the activation and, where that says nothing, the norm: the
    ungated parts came with LayerNorm, the gated ones with RMSNorm.
    """
    kind = fields.model_type
    if kind.startswith(_GATED):
        return 3
    if kind in _UNGATED:
        return 2
    activation = fields.get(*_ACTIVATIONS)
    name = activation.lower() if isinstance(activation, str) else ""
    if "glu" in name or name in ("silu", "swish", "situ", "gegelu"):
        return 3
    if name in _PLAIN or fields.has("ffn_dim") or "activation_function" in fields.data:
        return 2
    layer_norm = any("layer_norm_ep" in field for field in fields.data) and not fields.has(*_RMS)
    return 2 if layer_norm and name.startswith(("gelu", "relu", "quick_gelu")) else 3


def _dense_width(fields: Fields, hidden: int) -> int:
    if fields.model_type.startswith("granitemoe") and fields.has("shared_intermediate_size"):
        return fields.integer("shared_intermediate_size")  # Granite-4 without experts
    own = [name for name in ("intermediate_size_mlp", "dense_intermediate_size") if fields.has(name)]
    if fields.has("block_ff_dim"):  # LFM2's own name, which wins
        own = ["block_ff_dim"]
        fields.settle("intermediate_size")
    names = (*own, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ff_intermediate_size")
    usual = _matrices(fields) == 2 or fields.model_type.startswith("zamba")
    width = fields.integer(*names, default=4 * hidden if usual else None)
    if fields.model_type in _HALVED:
        return width // 2
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(fields.ratio("block_ffn_dim_multiplier", 1.0) * (2 * width // 3))  # LFM2
    multiple = fields.integer("block_multiple_of", default=1)
    return -(-width // multiple) * multiple


def _expert_width(fields: Fields) -> int:
    """Width of a routed expert.

    Families that have dense layers too, or number their experts as DeepSeek or Qwen do, give it a
    field of its own; read without it, the width of a dense layer would be taken for an expert's.
    """
    if fields.has(*_WIDTHS):
        return fields.integer(*_WIDTHS)
    if fields.has("dense_intermediate_size"):  # IQuest-Q1: that is the other one's name
        return fields.integer("intermediate_size")
    one = fields.has("num_local_experts", "expert_layer_period") or fields.model_type.startswith(_ONE_WIDTH)
    if one and not fields.has("n_routed_experts"):
        return fields.integer("intermediate_size", "ffn_hidden_size")
    return fields.integer(_WIDTHS[0])


def _shared_width(fields: Fields, width: int) -> int:
    """Summed width of the shared experts, or of the dense part, that every token also passes through."""
    count = fields.optional_integer(*_SHARED, least=0)
    stated = fields.optional_integer(
        "shared_expert_intermediate_size",  # Qwen
        "moe_shared_expert_intermediate_size",  # Nemotron-H
        "share_expert_dim",  # Step-3
        "share_expert_dims",  # Step-3.5
        "shared_experts_intermediate_size",  # dots
        least=0,
    )
    if stated is not None:
        return stated
    each = fields.optional_integer("shared_intermediate_size", least=0)
    if each is not None:  # Granite-4; MiniMax-M3, per shared expert
        return each * (1 if count is None else count)
    if fields.model_type.startswith("gemma4"):  # experts run in parallel with the dense part
        return fields.integer("intermediate_size")
    if count is None and fields.model_type.startswith(("hunyuan", "llama4")):
        return width
    return (count or 0) * width
