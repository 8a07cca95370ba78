"""What a model is, as far as its cache is concerned: layers by kind, read from its config."""

from __future__ import annotations

from costcache.model.layers import (
    AttentionLayer,
    FullAttention,
    LatentAttention,
    LayerSpec,
    SlidingWindow,
    StateDtype,
    StateSpace,
)
from costcache.model.spec import ModelSpec

__all__ = [
    "AttentionLayer",
    "FullAttention",
    "LatentAttention",
    "LayerSpec",
    "ModelSpec",
    "SlidingWindow",
    "StateDtype",
    "StateSpace",
]
