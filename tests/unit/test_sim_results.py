"""Figures made from outcomes, worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costcache.cost import CostModel
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.sim.results import Outcome, Run, first_token_seconds, gap_closed, make_run
from costcache.sim.ttft import PrefillModel
from tests.unit.test_serving import trace_of

TRACE = trace_of([[1], [1], [1, 2], []], [0, 1, 2, 3], [1] * 4, block=100)
COST = CostModel.of(ModelSpec.preset("llama-3-8b"), Deployment())
PREFILL = PrefillModel(name="made", floor=0.0, fixed=1.0, per_token=0.01, per_pair=0.001)
OUTCOME = Outcome(
    matched=np.array([0, 100, 100, 0], np.int64),
    evictions=4,
    shortfall=20,
    evicted=32,
    trimmed=1,
    oversized=0,
    seconds=2.0,
    policy="lru",
    decision_seconds=0.002,
)


def figures(outcome: Outcome, warmup: int = 0, policy: str = "costcache") -> Run:
    return make_run(
        outcome,
        TRACE,
        COST,
        PREFILL,
        policy=policy,
        plugin="mha",
        capacity="5%",
        capacity_tokens=64,
        warmup=warmup,
    )


def test_rates_bytes_and_flops() -> None:
    run = figures(OUTCOME)
    assert (run.input_tokens, run.hit_tokens, run.token_hit_rate) == (400, 200, 0.5)
    assert run.kv_bytes_avoided == 200 * 131_072
    crossover = COST.crossover_tokens
    saved, asked = 2 * (100 + 100**2 / (2 * crossover)), 2 * 100 + 200 + 3 * 100**2 / crossover
    assert run.flops_saved_rate == pytest.approx(saved / asked)
    assert run.flops_saved_rate < run.token_hit_rate  # what was missed lay deeper
    assert (run.policy, run.policy_in_force, run.requests) == ("costcache", "lru", 4)
    assert run.requests_per_second == 2.0
    # A pass page by page is shared between capacities: its time is not this run's.
    assert figures(dataclasses.replace(OUTCOME, tree=False)).requests_per_second is None
    assert run.decision_microseconds == pytest.approx(500)


def test_times_without_a_queue_are_prefills_and_the_last_token_is_always_computed() -> None:
    # n new after d: 1 + 0.01 n + 0.001 n (d + n / 2); a full hit is one token after 99; no prompt, nothing.
    times = [1 + 1 + 5, 1 + 0.01 + 0.001 * 99.5, 1 + 1 + 0.1 * 150, 1]
    assert first_token_seconds(OUTCOME, TRACE, PREFILL).tolist() == pytest.approx(times)
    run = figures(OUTCOME)
    assert run.ttft_mean == pytest.approx(np.mean(times))
    assert (run.ttft_p50, run.ttft_p99) == pytest.approx(tuple(np.percentile(times, [50, 99])))
    assert not run.ttft_queued


def test_times_of_a_queue_are_taken_as_they_are() -> None:
    run = figures(dataclasses.replace(OUTCOME, ttft=np.array([9.0, 2.0, 4.0, 3.0])), warmup=1)
    assert (run.ttft_mean, run.ttft_p50, run.ttft_queued) == (3.0, 3.0, True)
    assert (run.input_tokens, run.hit_tokens) == (300, 200)


def test_nothing_measured_is_nothing_divided() -> None:
    empty = dataclasses.replace(OUTCOME, evictions=0, seconds=0.0)
    run = figures(empty, warmup=3)
    assert (run.token_hit_rate, run.flops_saved_rate, run.requests_per_second) == (0.0, 0.0, None)
    assert run.decision_microseconds is None
    assert figures(dataclasses.replace(OUTCOME, decision_seconds=None)).decision_microseconds is None


def rated(policy: str, rate: float, capacity: str = "5%", tokens: int | None = 64) -> Run:
    return dataclasses.replace(
        figures(OUTCOME, policy=policy), token_hit_rate=rate, capacity=capacity, capacity_tokens=tokens
    )


def test_the_gap_from_lru_to_the_optimum() -> None:
    lru, best, mine, worse = rated("lru", 0.2), rated("optimum", 0.6), rated("x", 0.3), rated("y", 0.1)
    runs = [mine, best, worse, lru]
    assert [gap_closed(run, runs) for run in runs] == pytest.approx([0.25, 1.0, -0.25, 0.0])


def test_no_gap_where_there_is_nothing_to_compare_with() -> None:
    lru, best = rated("lru", 0.2), rated("optimum", 0.6)
    assert gap_closed(lru, [lru]) is None
    assert gap_closed(best, [best]) is None
    assert gap_closed(lru, [lru, rated("optimum", 0.2)]) is None
    assert gap_closed(rated("x", 0.3, "10%"), [lru, best]) is None
    # Capacities without a text are distinguished by their tokens.
    unnamed = [rated("lru", 0.2, "", 64), rated("optimum", 0.6, "", 64), rated("lru", 0.5, "", 640)]
    assert gap_closed(unnamed[0], unnamed) == 0.0
    assert gap_closed(unnamed[2], unnamed) is None
    assert gap_closed(rated("infinite", 0.9, tokens=None), [lru, best]) is None
