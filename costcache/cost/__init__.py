"""Cost of a cached token: its bytes, and the FLOPs and seconds to restore it.

`layers` has one function per layer kind, `token` sums them over the layers of one rank, and `model`
prices recomputing and reloading. Plugins compose the functions of `layers` and `token`.
"""

from __future__ import annotations

from costcache.cost.layers import (
    AttentionFlops,
    LayerBytes,
    PoolName,
    attention_flops,
    attention_kv_bytes,
    compressed_kv_bytes,
    decompressed_latent_bytes,
    latent_kv_bytes,
    layer_bytes,
    state_bytes,
)
from costcache.cost.model import CostModel
from costcache.cost.token import CostTerm, TokenCost, token_cost
from costcache.cost.windows import longest_window, pool_sizes, sequence_bytes, split_tokens, window_share

__all__ = [
    "AttentionFlops",
    "CostModel",
    "CostTerm",
    "LayerBytes",
    "PoolName",
    "TokenCost",
    "attention_flops",
    "attention_kv_bytes",
    "compressed_kv_bytes",
    "decompressed_latent_bytes",
    "latent_kv_bytes",
    "layer_bytes",
    "longest_window",
    "pool_sizes",
    "sequence_bytes",
    "split_tokens",
    "state_bytes",
    "token_cost",
    "window_share",
]
