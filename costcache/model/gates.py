"""Output gates of attention: weights that multiply the heads' output before it is projected."""

from __future__ import annotations

import re

from costcache.model.fields import Fields

__all__ = ["gate_width"]

# Families with a gate as wide as the heads' values that no field speaks of.
_ALWAYS = ("afmoe", "axk2", "beam", "hy_v4", "muse_", "qwen3_5", "qwen3_next", "qwen4")
_FULL = ("attn_output_gate", "attention_output_gate", "mla_use_output_gate", "use_output_gate")
_PER_HEAD = ("use_attention_gate", "use_head_wise_attn_gate")  # LFM3, Step-3.5
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
    gating = fields.get("gating")  # Laguna, Step-3.7
    if gating is True or gating == "per-head":
        return heads
    if gating == "per-element":
        return heads * v_head_dim
    if gating not in (None, False):
        raise fields.error("gating", f"is {gating!r}", "known are true, 'per-head' and 'per-element'")
    for name, value in fields.data.items():
        if value and name not in fields.seen and _UNKNOWN.search(name):
            raise fields.error(
                name,
                f"is {value!r}: it names a gate of attention that costcache does not know",
                "give active_params, or build ModelSpec(layers=...) yourself",
            )
    return heads * v_head_dim if fields.model_type.startswith(_ALWAYS) else 0
