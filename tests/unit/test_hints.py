"""Hints of clients: what true ones are worth, and that lies cost nothing lasting."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from costcache import Deployment, ModelSpec, Settings
from costcache.sim.engine import Simulator
from costcache.sim.hints import Hinting, with_hints
from costcache.sim.trace import Trace
from costcache.sim.workloads import generate, workload_settings

SEEDS = range(5)
POOL = 0.05
REQUESTS = 1500


@cache
def workload(name: str, seed: int) -> Trace:
    return generate(name, workload_settings(name, {"requests": REQUESTS, "seed": seed}))


@cache
def hit_rate(name: str, seed: int, kind: Hinting | None) -> float:
    """Token hit rate of hazard, %."""
    trace = workload(name, seed)
    hinted = trace if kind is None else with_hints(trace, kind, seed)
    simulator = Simulator(hinted, ModelSpec.preset("deepseek-v3"), Deployment(page_size=16))
    pool = int(POOL * trace.distinct_pages(16)) * 16
    return 100 * simulator.run(Settings(policy="hazard"), pool).token_hit_rate


def gain(name: str, kind: Hinting) -> float:
    """Points that hints add, on average over the seeds."""
    return float(np.mean([hit_rate(name, seed, kind) - hit_rate(name, seed, None) for seed in SEEDS]))


def talk() -> Trace:
    """Sessions of three prompts and of two, and a prompt that forks from the first."""
    prompts = [[1, 2], [5], [1, 2, 3], [5, 6], [1, 2, 3, 4], [1, 2, 9]]
    blocks = [len(prompt) for prompt in prompts]
    return Trace(
        name="talk",
        block_size=16,
        timestamps=np.array([0.0, 1.0, 10.0, 31.0, 50.0, 90.0]),
        input_tokens=np.array(blocks) * 16 - 3,  # the last block is a partial one, and is not shared
        output_tokens=np.ones(6, np.int64),
        ids=np.array([block for prompt in prompts for block in prompt]),
        offsets=np.concatenate(([0], np.cumsum(blocks))),
    )


def told(trace: Trace) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Ends of sessions, and seconds."""
    assert trace.session_ends is not None
    assert trace.returns_after is not None
    return trace.session_ends, trace.returns_after


def test_true_hints_tell_the_time_to_the_next_use_of_all_whole_blocks() -> None:
    ends, seconds = told(with_hints(talk(), "right", 1))
    # Whole blocks of the prompts: 1; none; 1, 2; 5; 1, 2, 3; and 1, 2.
    true = np.array([10.0, np.nan, 40.0, np.nan, np.nan, np.nan])
    assert ends.tolist() == np.isnan(true).tolist() == np.isnan(seconds).tolist()
    ratio = seconds[~ends] / true[~ends]
    assert (np.abs(np.log(ratio)) <= np.log(3.0)).all()


def test_lies_are_of_their_kind() -> None:
    trace = workload("multi-turn", 0)
    true_ends, true = told(with_hints(trace, "right", 3))
    kinds: tuple[Hinting, Hinting] = ("reversed", "random")
    for kind in kinds:
        ends, seconds = told(with_hints(trace, kind, 3))
        assert ends.sum() == true_ends.sum()
        assert np.array_equal(np.isnan(seconds), ends)
        if kind == "reversed":  # what comes back first is said to have ended
            assert np.median(true[ends & ~true_ends]) < np.median(true[~ends & ~true_ends])
        else:
            assert (ends & true_ends).mean() == pytest.approx(true_ends.mean() ** 2, abs=0.05)
    ends, seconds = told(with_hints(trace, "half", 3))
    assert 0.45 < (ends | ~np.isnan(seconds)).mean() < 0.55
    assert not (ends & ~true_ends).any()


@pytest.mark.parametrize("name", ["agents-documents", "multi-turn"])
@pytest.mark.parametrize("kind", ["reversed", "random", "half"])
def test_hints_that_lie_cost_nothing_lasting(name: str, kind: Hinting) -> None:
    assert gain(name, kind) >= -0.3


@pytest.mark.parametrize("name", ["agents-documents", "multi-turn"])
def test_true_hints_are_worth_points(name: str) -> None:
    assert gain(name, "right") >= 0.3
