"""Makes the material of a report from a table of token hit rates, without a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costcache.report.material import Material, Replay, TimeBins
from costcache.settings import Settings
from costcache.sim.results import Run

__all__ = ["material_from", "replay_at"]

PAGE = 16
BINS = TimeBins("s", tuple(float(i) for i in range(48)), 1.0)


def replay_at(policy: str, capacity: str, tokens: int | None, rate: float, *, failed: bool = False) -> Replay:
    """A replay whose other figures follow from its token hit rate."""
    asked, slow = 1_000_000, 0.1 + 10 * (1 - rate)
    run = Run(
        policy=policy,
        policy_in_force="lru" if failed else policy,
        plugin="mla",
        capacity=capacity,
        capacity_tokens=None if policy == "infinite" else tokens,
        requests=1000,
        input_tokens=asked,
        hit_tokens=int(asked * rate),
        token_hit_rate=rate,
        flops_saved_rate=rate * 0.9,
        kv_bytes_avoided=int(asked * rate) * 1000,
        ttft_mean=slow,
        ttft_p50=slow * 0.9,
        ttft_p90=slow * 2,
        ttft_p99=slow * 3,
        ttft_queued=False,
        evictions=10,
        shortfall_tokens=1000,
        evicted_tokens=4800,
        trimmed=None,
        oversized_requests=0,
        clamped=0,
        fallbacks=int(failed),
        tree=True,
        seconds=1.0,
        requests_per_second=1000.0,
        decision_microseconds=None,
    )
    return Replay(
        run=run,
        label=policy,
        settings=Settings(policy=policy),
        gap_closed=None if policy == "lru" else rate,
        ttft=(slow / 2, slow * 0.7, slow * 0.9, slow * 1.4, slow * 3),
        ttft_curve=tuple(slow * (0.3 + at / 33) for at in range(101)),
        regretted=tuple((at * 7919) % 9973 for at in range(48)),
        evicted=tuple((at * 104729) % 99991 for at in range(48)),
    )


def material_from(
    pools: Mapping[str, int | None],
    rates: Mapping[str, Sequence[float]],
    *,
    ceiling: float = 0.9,
    failed: Sequence[tuple[str, str]] = (),
) -> Material:
    """The material of a table.

    Args:
        pools: Tokens of each pool, by its name.
        rates: Token hit rates of each policy, in the order of the pools.
        ceiling: Token hit rate of an unlimited pool.
        failed: Policies and the pools at which they failed.
    """
    distinct = 10_000_000
    return Material(
        version="0.1.0",
        command="costcache simulate trace.jsonl --model deepseek-v3",
        seed=0,
        trace="trace",
        model="deepseek-v3",
        requests=1000,
        warmup=0,
        input_tokens=1_000_000,
        page_size=PAGE,
        deployment={"kv_dtype": "bf16", "tp": 1, "pp": 1, "dp_attention": 1},
        token_bytes=70_272,
        state_bytes=0,
        state_share=None,
        distinct_tokens=distinct,
        ceiling=ceiling,
        prefill="test",
        serving=False,
        always_free=False,
        capacities=tuple(
            sorted(
                ((name, distinct if tokens is None else tokens) for name, tokens in pools.items()),
                key=lambda item: item[1],
            )
        ),
        replays=tuple(
            replay_at(policy, name, tokens, row[at], failed=(policy, name) in failed)
            for at, (name, tokens) in enumerate(pools.items())
            for policy, row in rates.items()
        ),
        optimum=(),
        lru=(),
        bins=BINS,
    )
