"""The results of a replay: the raw outcome, and the figures computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.sim.trace import Trace
    from costcache.sim.ttft import PrefillModel

__all__ = ["TIMING", "Outcome", "Run", "first_token_seconds", "gap_closed", "make_run"]


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """The raw outcome of one policy at one capacity.

    Attributes:
        matched: Tokens that each request hit, int64 of shape [requests].
        evictions: Evictions that had a shortfall.
        shortfall: Tokens that they were asked to free.
        evicted: Tokens evicted.
        trimmed: Victims evicted in part, from the tail; None if the replay counted pages, not nodes.
        oversized: Requests longer than the pool.
        seconds: Wall time of the replay.
        policy: Policy in force at the end.
        clamped: Answers of plugins that were out of bounds and replaced.
        fallbacks: 1 if the policy failed and LRU took over.
        decision_seconds: Wall time of choosing victims and freeing them; None if it was not measured.
        ttft: Seconds from arrival to first token, queue included, float64 of shape [requests]; None
            without a queue.
        tree: True for a replay through the tree that serves, False for one page by page.
    """

    matched: NDArray[np.int64]
    evictions: int
    shortfall: int
    evicted: int
    trimmed: int | None
    oversized: int
    seconds: float
    policy: str
    clamped: int = 0
    fallbacks: int = 0
    decision_seconds: float | None = None
    ttft: NDArray[np.float64] | None = None
    tree: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one policy at one capacity.

    Rates and times are of the requests after the warm-up; evictions are of all requests.

    Attributes:
        policy: The policy that was asked for.
        policy_in_force: The policy in force at the end: the one that ``costcache`` stands for, or ``lru``
            after a fallback.
        plugin: The architecture plugin that serves the model.
        capacity: The capacity as it was written.
        capacity_tokens: Tokens in the pool; None for no limit.
        requests: Requests replayed.
        input_tokens: Prompt tokens of the requests after the warm-up.
        hit_tokens: Those that hit.
        token_hit_rate: Share of the prompt tokens that hit.
        flops_saved_rate: Share of the prefill FLOPs that hits saved; a token deep in a context
            counts more.
        kv_bytes_avoided: Bytes of KV, on one rank, that did not have to be computed thanks to hits.
        ttft_mean: Seconds to the first token, mean.
        ttft_p50: The same, median.
        ttft_p90: The same, 90th percentile.
        ttft_p99: The same, 99th percentile.
        ttft_queued: True if the times include waiting for other requests.
        evictions: Evictions that had a shortfall.
        shortfall_tokens: Tokens that evictions were asked to free.
        evicted_tokens: Tokens evicted.
        trimmed: Victims evicted in part, from the tail; None if the run counted pages.
        oversized_requests: Requests longer than the pool: they reused what matched, and their head was
            cached as far as it fits.
        clamped: Answers of plugins that were out of bounds and replaced.
        fallbacks: 1 if the policy failed and LRU took over.
        tree: True for a replay through the tree that serves; False for its equivalent page by page.
        seconds: Wall time of the replay, parsing excluded.
        requests_per_second: Requests over ``seconds``; None for a pass page by page, part of which other runs
            share: its time is not the policy's own.
        decision_microseconds: Wall time per eviction, mean; None if it was not measured.
    """

    policy: str
    policy_in_force: str
    plugin: str
    capacity: str
    capacity_tokens: int | None
    requests: int
    input_tokens: int
    hit_tokens: int
    token_hit_rate: float
    flops_saved_rate: float
    kv_bytes_avoided: int
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    ttft_queued: bool
    evictions: int
    shortfall_tokens: int
    evicted_tokens: int
    trimmed: int | None
    oversized_requests: int
    clamped: int
    fallbacks: int
    tree: bool
    seconds: float
    requests_per_second: float | None
    decision_microseconds: float | None


TIMING = ("seconds", "requests_per_second", "decision_microseconds")
"""Fields of a run that differ from rerun to rerun."""


def make_run(
    outcome: Outcome,
    trace: Trace,
    cost: CostModel,
    prefill: PrefillModel,
    *,
    policy: str,
    plugin: str,
    capacity: str,
    capacity_tokens: int | None,
    warmup: int = 0,
) -> Run:
    """Compute the figures of one outcome.

    Args:
        outcome: The outcome.
        trace: The requests.
        cost: FLOPs and bytes.
        prefill: Seconds of a prefill, for an outcome without times of its own.
        policy: The policy that was asked for.
        plugin: The architecture plugin.
        capacity: The capacity as it was written.
        capacity_tokens: Tokens in the pool.
        warmup: Requests at the start that rates and times leave out.
    """
    asked, matched = trace.input_tokens[warmup:], outcome.matched[warmup:]
    total, hit = int(asked.sum()), int(matched.sum())
    none = np.zeros_like(asked)
    flops = float(np.sum(cost.recompute_flops(none, asked)))
    saved = float(np.sum(cost.recompute_flops(none, matched)))
    ttft = first_token_seconds(outcome, trace, prefill, warmup)
    p50, p90, p99 = np.percentile(ttft, (50, 90, 99)).tolist() if ttft.size else (0.0, 0.0, 0.0)
    decisions = outcome.decision_seconds
    return Run(
        policy=policy,
        policy_in_force=outcome.policy,
        plugin=plugin,
        capacity=capacity,
        capacity_tokens=capacity_tokens,
        requests=len(trace),
        input_tokens=total,
        hit_tokens=hit,
        token_hit_rate=hit / total if total else 0.0,
        flops_saved_rate=saved / flops if flops else 0.0,
        kv_bytes_avoided=hit * (cost.token.kv_bytes + cost.token.swa_bytes),
        ttft_mean=float(ttft.mean()) if ttft.size else 0.0,
        ttft_p50=p50,
        ttft_p90=p90,
        ttft_p99=p99,
        ttft_queued=outcome.ttft is not None,
        evictions=outcome.evictions,
        shortfall_tokens=outcome.shortfall,
        evicted_tokens=outcome.evicted,
        trimmed=outcome.trimmed,
        oversized_requests=outcome.oversized,
        clamped=outcome.clamped,
        fallbacks=outcome.fallbacks,
        tree=outcome.tree,
        seconds=outcome.seconds,
        requests_per_second=len(trace) / outcome.seconds if outcome.tree and outcome.seconds else None,
        decision_microseconds=(
            None if decisions is None or not outcome.evictions else decisions / outcome.evictions * 1e6
        ),
    )


def first_token_seconds(
    outcome: Outcome, trace: Trace, prefill: PrefillModel, warmup: int = 0
) -> NDArray[np.float64]:
    """Seconds to the first token of each request after the warm-up, float64 of shape [requests].

    Args:
        outcome: The outcome.
        trace: The requests.
        prefill: Seconds of a prefill, for an outcome without times of its own.
        warmup: Requests at the start that are left out.
    """
    if outcome.ttft is not None:
        return outcome.ttft[warmup:]
    asked, matched = trace.input_tokens[warmup:], outcome.matched[warmup:]
    # A prompt's last token is always computed: its logits give the first output token.
    new = np.maximum(asked - matched, np.minimum(asked, 1))
    return prefill.seconds(new, asked - new)


def gap_closed(run: Run, runs: Sequence[Run]) -> float | None:
    """Share of the gap between the token hit rates of LRU and the optimum that ``run`` closes.

    Negative below LRU. None unless both were run at its capacity, and the optimum hits more.
    """
    size = run.capacity, run.capacity_tokens
    rates = {r.policy: r.token_hit_rate for r in runs if (r.capacity, r.capacity_tokens) == size}
    if "lru" not in rates or "optimum" not in rates or rates["optimum"] <= rates["lru"]:
        return None
    return (run.token_hit_rate - rates["lru"]) / (rates["optimum"] - rates["lru"])
