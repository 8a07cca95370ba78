"""The figures of a replay over tiers, and how far an offline optimum could go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from costcache.settings import Settings
    from costcache.sim.engine import Simulator
    from costcache.sim.settings import TiersBelow
    from costcache.sim.tiers.outcome import TieredOutcome

__all__ = ["TierFigures", "TieredBound", "TieredRun", "make_tiered_run", "tiered_bound"]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The figures of one tier below the device, of all requests.

    Attributes:
        name: ``host`` or ``disk``.
        capacity_bytes: Its bytes, of one rank.
        hit_tokens: Prompt tokens that requests loaded from it.
        down_bytes: Bytes written to it.
        up_bytes: Bytes that passed its link upwards, those of the tier below it included.
        evicted_bytes: Bytes evicted from it.
        refused_bytes: Bytes that were to be written, and found no room.
        peak_bytes: Most bytes that it held.
    """

    name: str
    capacity_bytes: int
    hit_tokens: int
    down_bytes: int
    up_bytes: int
    evicted_bytes: int
    refused_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TieredRun:
    """The figures of one policy over tiers.

    Hit rates and times are of the requests after the warm-up; all else is of all requests.

    Attributes:
        policy: The policy that was asked for.
        policy_in_force: The policy in force on the device at the end.
        write: The policy of writing; empty without a tier below.
        capacity: The device's capacity as it was written.
        capacity_tokens: Tokens that fit on the device.
        requests: Requests replayed.
        device_hit_rate: Share of the prompt tokens found on the device.
        tier_hit_rate: Share of them loaded from the tiers below.
        ttft_mean: Seconds to the first token, queue included, mean.
        ttft_p50: The same, median.
        ttft_p99: The same, 99th percentile.
        reload_seconds: Seconds that links were busy with loads.
        recompute_seconds: Seconds of all prefills.
        write_wait_seconds: Seconds that requests waited until what they evicted had been written.
        memory_waits: Requests that waited, since they did not fit on the device beside those that ran.
        moved_bytes: Bytes that passed any link, in either direction.
        evicted_bytes: Bytes evicted from the device.
        fallbacks: Orders that failed and were replaced by LRU.
        tiers: The tiers below.
    """

    policy: str
    policy_in_force: str
    write: str
    capacity: str
    capacity_tokens: int
    requests: int
    device_hit_rate: float
    tier_hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    reload_seconds: float
    recompute_seconds: float
    write_wait_seconds: float
    memory_waits: int
    moved_bytes: int
    evicted_bytes: int
    fallbacks: int
    tiers: tuple[TierFigures, ...]


def make_tiered_run(
    outcome: TieredOutcome,
    simulator: Simulator,
    settings: Settings,
    capacity: str,
    capacity_tokens: int,
    tiers: TiersBelow | None,
) -> TieredRun:
    """Compute the figures of one outcome of these settings."""
    warmup, trace = simulator.warmup, simulator.trace
    asked = max(1, int(trace.input_tokens[warmup:].sum()))
    ttft = outcome.ttft[warmup:]
    p50, p99 = np.percentile(ttft, (50, 99)).tolist() if ttft.size else (0.0, 0.0)
    sizes = {"host": tiers.host, "disk": tiers.disk or 0} if tiers is not None else {}
    figures = tuple(
        TierFigures(
            name=name,
            capacity_bytes=sizes[name],
            hit_tokens=moved.hits,
            down_bytes=moved.down,
            up_bytes=moved.up,
            evicted_bytes=moved.evicted,
            refused_bytes=moved.refused,
            peak_bytes=moved.peak,
        )
        for name, moved in outcome.tiers.items()
    )
    return TieredRun(
        policy=settings.policy,
        policy_in_force=outcome.policy,
        write=tiers.write if tiers is not None else "",
        capacity=capacity,
        capacity_tokens=capacity_tokens,
        requests=len(trace),
        device_hit_rate=int(outcome.device[warmup:].sum()) / asked,
        tier_hit_rate=int(outcome.loaded[warmup:].sum()) / asked,
        ttft_mean=float(ttft.mean()) if ttft.size else 0.0,
        ttft_p50=p50,
        ttft_p99=p99,
        reload_seconds=outcome.reload_seconds,
        recompute_seconds=outcome.recompute_seconds,
        write_wait_seconds=outcome.write_wait_seconds,
        memory_waits=outcome.memory_waits,
        moved_bytes=sum(each.down_bytes + each.up_bytes for each in figures),
        evicted_bytes=outcome.evicted,
        fallbacks=outcome.fallbacks,
        tiers=figures,
    )


@dataclass(frozen=True, slots=True)
class TieredBound:
    """The bound of every policy that sees the requests in the order of the trace, whatever it knows of them.

    The tiers together hold no more than one pool of their total size, in which Belady's rule on the pages of
    the tree finds the most; and the device finds no more than that rule does on it alone. Times are not
    bounded, nor models with states. Where sessions wait for their answers, the order of requests depends on
    the policy, and the bound is that of the trace's own order.

    Attributes:
        device_hit_rate: Share of the prompt tokens that the device can find, at most.
        hit_rate: Share that all tiers together can find, at most.
    """

    device_hit_rate: float
    hit_rate: float


def tiered_bound(
    simulator: Simulator, settings: Settings, capacity_tokens: int, tiers: TiersBelow
) -> TieredBound | None:
    """Compute the bound; None for a model with states."""
    if simulator.cost.spec.has_states:
        return None
    best = settings.model_copy(update={"policy": "optimum", "policy_settings": {}})
    below = int((tiers.host + (tiers.disk or 0)) / simulator.token_bytes)
    warmup = simulator.warmup
    asked = max(1, int(simulator.trace.input_tokens[warmup:].sum()))
    rates = [
        int(simulator.outcome(best, tokens).matched[warmup:].sum()) / asked
        for tokens in (capacity_tokens, capacity_tokens + below)
    ]
    return TieredBound(*rates)
