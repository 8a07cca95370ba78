"""Bytes that a sequence caches, with its windows in a pool of their own or in one pool of all layers."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from costcache.cost.layers import layer_bytes
from costcache.cost.token import TokenCost
from costcache.deployment import Deployment
from costcache.model import ModelSpec

__all__ = ["WindowLayout", "sequence_bytes"]

WindowLayout = Literal["own-pool", "one-pool"]
"""Where a server keeps sliding-window KV: apart, the last window of each sequence; or with the rest,
every token of it."""


def sequence_bytes(
    spec: ModelSpec, deployment: Deployment, token: TokenCost, tokens: int, layout: WindowLayout
) -> int:
    """Bytes that one sequence of ``tokens`` tokens caches on one rank.

    ``kv x tokens``, plus the windows: ``swa x tokens`` in one pool of all layers, else
    ``sum of swa_layer x min(tokens, window)``. ``token`` has the bytes of the model's plugin, which are
    divided over the windows as the core's formulas say.
    """
    full = token.kv_bytes * tokens
    if layout == "one-pool" or not token.swa_bytes:
        return full + token.swa_bytes * tokens
    deployment = deployment.serving(spec)
    weights: Counter[int] = Counter()
    for layer in spec.layers:
        window = getattr(layer, "window", None)
        if window is not None:
            weights[window] += layer_bytes(layer, deployment).bytes
    total = sum(weights.values())
    kept = sum(weight * min(tokens, window) for window, weight in weights.items())
    return full + -(-token.swa_bytes * kept // total) if total else full + token.swa_bytes * tokens
