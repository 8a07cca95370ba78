"""Bytes that a sequence caches, with its windows in a pool of their own or in one pool of all layers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from costcache.cost.layers import layer_bytes
from costcache.cost.token import TokenCost
from costcache.deployment import Deployment, WindowLayout
from costcache.model import ModelSpec

__all__ = ["longest_window", "pool_sizes", "sequence_bytes", "split_tokens", "window_share"]


def longest_window(spec: ModelSpec) -> int:
    """Tokens of the longest sliding window of a model; 0 if it has none."""
    return max((getattr(layer, "window", None) or 0 for layer in spec.layers), default=0)


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
    share = window_share(spec, deployment, tokens)
    return full + -(-token.swa_bytes * share.numerator // share.denominator)


def window_share(spec: ModelSpec, deployment: Deployment, tokens: int) -> Fraction:
    """Tokens of window KV that a sequence of ``tokens`` tokens takes, averaged over the sliding layers.

    Layers with different windows count by their bytes.
    """
    deployment = deployment.serving(spec)
    weights: Counter[int] = Counter()
    for layer in spec.layers:
        window = getattr(layer, "window", None)
        if window is not None:
            weights[window] += layer_bytes(layer, deployment).bytes
    total = sum(weights.values())
    kept = sum(weight * deployment.window_tokens(window, tokens) for window, weight in weights.items())
    return Fraction(kept, total) if total else Fraction(tokens)


def pool_sizes(budget: int, token: TokenCost, ratio: float, page_size: int) -> tuple[int, int]:
    """Tokens of the full pool and of the pool of windows, whole pages, that SGLang makes of a budget.

    ``full = budget / (kv + ratio x swa)`` and ``windows = ratio x full`` (SGLang 0.5.23,
    ``HybridSWAPoolConfigurator``); without layers of full attention the windows get all of it.
    """
    if not token.kv_bytes:
        return 0, budget // token.swa_bytes // page_size * page_size
    full = int(budget // (token.kv_bytes + ratio * token.swa_bytes)) // page_size * page_size
    return full, int(full * ratio) // page_size * page_size


def split_tokens(spec: ModelSpec, deployment: Deployment, full: int, windows: int, sequence: int) -> int:
    """Tokens of sequences of ``sequence`` tokens that fit into two pools, whole pages.

    The smaller of what the pool of ``full`` tokens and the pool of ``windows`` tokens can cache; the latter
    alone for a model without full attention.
    """
    page, share = deployment.page_size, window_share(spec, deployment, sequence)
    by_windows = windows * sequence * share.denominator // share.numerator
    return (min(full, by_windows) if full else by_windows) // page * page
