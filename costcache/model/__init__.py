"""Model architecture as the cache sees it: layers by kind, read from a ``config.json``."""

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
