"""The clock of ages: what it reads, and what that is for."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import RadixCache
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.pace import Pace
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace

MODEL = ModelSpec.preset("llama-3-8b")
GAPS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50)


@given(GAPS)
def test_it_is_the_time_while_requests_come_one_at_a_time(gaps: list[float]) -> None:
    pace = Pace(5.0)
    for time in accumulate(gaps, initial=5.0):
        assert pace.begin(time, 0) == pytest.approx(time)
    assert not pace.overlaps


@given(GAPS)
def test_it_never_runs_backwards(gaps: list[float]) -> None:
    pace = Pace(0.0)
    readings = [pace.begin(time, 1) for time in accumulate(gaps)]
    assert readings == sorted(readings)


@pytest.mark.parametrize("times", [0.01, 1.0, 100.0])
def test_once_requests_overlap_each_counts_as_much_however_slow_they_are(times: float) -> None:
    pace = Pace(0.0)
    gaps = [2.0] * 100 + [2.0 * times] * 100
    readings = np.array([pace.begin(time, 1) for time in accumulate(gaps)])
    assert pace.overlaps
    assert np.diff(readings) == pytest.approx(2.0)


def test_a_host_that_counts_requests_keeps_its_own_count() -> None:
    cache = RadixCache(MODEL, 64, 1, policy="hazard")
    for number in range(40):
        cache.match_prefix([number], number)  # overlaps with the one before
        cache.insert([number], request=number)
        if number:
            cache.finish(number - 1)
    order = cache._pool.order
    assert isinstance(order, Hazard)
    assert order.snapshot().now == 40.0
    assert order.intake.pace is None


def closed_loop(sessions: int, turns: int, pages: int, *, thinks: tuple[float, float], seed: int) -> Trace:
    """Equal sessions that begin within a minute, and whose contexts grow by a page a turn."""
    rng = np.random.default_rng(seed)
    prompts, owners = [], []
    for turn in range(turns):
        for session in range(sessions):
            first = session << 20
            prompts.append(np.arange(first, first + pages + turn))
            owners.append(session)
    lengths = np.array([len(prompt) for prompt in prompts])
    count = len(prompts)
    # The first half of them comes back soon after each answer, the other half late: the queue differs.
    middle = np.repeat(thinks, [count // 2, count - count // 2])
    return Trace(
        name="closed loop",
        block_size=512,
        timestamps=np.sort(rng.uniform(0.0, 60.0, count)),
        input_tokens=lengths * 512,
        output_tokens=rng.integers(20, 200, count),
        ids=np.concatenate(prompts),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        sessions=np.array(owners),
        think_seconds=rng.lognormal(np.log(middle), 0.5),
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("fit", "thinks"), [(8, (2.0, 2.0)), (12, (2.0, 2.0)), (12, (2.0, 100.0))])
def test_of_equal_sessions_that_do_not_fit_some_are_kept(
    fit: int, thinks: tuple[float, float], seed: int
) -> None:
    sessions, turns, pages = 24, 40, 100
    trace = closed_loop(sessions, turns, pages, thinks=thinks, seed=seed)
    simulator = Simulator(trace, MODEL, Deployment(page_size=512))
    pool = fit * (pages + turns // 2) * 512

    def rate(policy: str) -> float:
        server = ServingSettings(load="sessions")
        return simulator.run(Settings(policy=policy), pool, serving=server).token_hit_rate

    # Under LRU each evicts the next one. Of a static choice, all but the few that run at once would be kept.
    assert rate("lru") < 0.1
    assert rate("hazard") > 0.6 * (fit - 2) / sessions


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_what_was_learned_holds_when_the_server_gets_faster_or_slower(times: float) -> None:
    """Equal sessions take turns, and overlap; the time between requests changes, and their order does not."""
    cache = RadixCache(MODEL, 10 * 20, 1, policy="hazard")
    found, time = [], 0.0
    for number in range(1000):
        time += 1.0 if number < 600 else times
        cache.clock.advance(time)
        prompt = [1000 * (number % 24) + token for token in range(20)]
        found.append(cache.match_prefix(prompt, number).matched_len)
        cache.insert(prompt, request=number)
        if number:
            cache.finish(number - 1)
    before, after = sum(found[300:600]) / 300, sum(found[600:]) / 400
    assert before > 5.0  # of 20 tokens; LRU finds none
    assert after > 0.8 * before
