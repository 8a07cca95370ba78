"""Output gates of attention: weights that multiply the heads' output before it is projected."""

from __future__ import annotations

import re

from costcache.model.fields import Fields

__all__ = ["gate_width"]

# Families with a gate as wide as the heads' values that no field speaks of.
_ALWAYS = ("afmoe", "axk2", "beam", "hy_v4", "muse_", "qwen3_5", "qwen3_next", "qwen4")
_FULL = (
    "attn_output_gate",
    "attention_output_gate",
    "gated_attention",  # GigaChat
    "mla_use_output_gate",
    "use_attn_output_gate",
    "use_output_gate",
)
# LFM3, Step-3.5, Spark-2.5
_PER_HEAD = ("use_attention_gate", "use_head_wise_attn_gate", "headwise_attn_output_gate")
# Fields that say of which kind the gate is: Laguna and Step-3.7, dots.3, Ling-3.
_KINDS = ("gating", "attention_gate_type", "gated_attention_proj_granularity_type")
_OF_HEADS = ("per-head", "headwise", "head_wise")
_OF_VALUES = ("per-element", "elementwise", "element_wise")
# Names of gates that are none of these; such a field must not be left unread.
_UNKNOWN = re.compile(r"(attn|attention|mla|head|output).*gat(e|ing)$|gat(e|ing)_(attn|attention)")


def gate_width(fields: Fields, heads: int, v_head_dim: int) -> int:
    """Width of the output gate: one value per head and channel, one per head, or 0 without a gate.

    Raises `ConfigError` for a field that names a gate of another kind.
    """
    for name in _FULL:
        if fields.has(name):
            return heads * v_head_dim if fields.flag(name) else 0
    if any(fields.flag(name) for name in _PER_HEAD):
        return heads
    for name in _KINDS:
        gating = fields.get(name)
        if gating is True or gating in _OF_HEADS:
            return heads
        if gating in _OF_VALUES:
            return heads * v_head_dim
        if gating not in (None, False, "disabled"):
            known = ", ".join(repr(kind) for kind in (*_OF_HEADS, *_OF_VALUES))
            raise fields.error(name, f"is {gating!r}", f"known are true, {known}")
    for name, value in fields.data.items():
        if value and name not in fields.seen and _UNKNOWN.search(name):
            raise fields.error(
                name,
                f"is {value!r}: it names a gate of attention that costcache does not know",
                "give active_params, or build ModelSpec(layers=...) yourself",
            )
    return heads * v_head_dim if fields.model_type.startswith(_ALWAYS) else 0
