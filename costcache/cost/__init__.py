"""What a token holds, in bytes, and what it costs to bring back, in FLOPs and seconds.

`layers` has one function per layer kind, `token` adds them up over the layers of one rank, and `model`
prices recomputing and reloading. Plugins compose the functions of `layers` and `token`.
"""

from __future__ import annotations

from costcache.cost.layers import (
    AttentionFlops,
    LayerBytes,
    Pool,
    attention_flops,
    attention_kv_bytes,
    decompressed_latent_bytes,
    latent_kv_bytes,
    layer_bytes,
    state_bytes,
)
from costcache.cost.model import CostModel
from costcache.cost.token import CostTerm, TokenCost, token_cost

__all__ = [
    "AttentionFlops",
    "CostModel",
    "CostTerm",
    "LayerBytes",
    "Pool",
    "TokenCost",
    "attention_flops",
    "attention_kv_bytes",
    "decompressed_latent_bytes",
    "latent_kv_bytes",
    "layer_bytes",
    "state_bytes",
    "token_cost",
]
