"""The prior that hazard starts from: whole, in units that carry over, light, soon forgotten where it lies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import RadixCache, RequestInfo
from costcache.policies.hazard import Hazard
from costcache.policies.hazard import order as order_module
from costcache.policies.hazard.bins import BINS, age_bin
from costcache.policies.hazard.classes import FAMILIES
from costcache.policies.hazard.life_table import LifeTable
from costcache.policies.hazard.prior import Curve, Prior, shipped_prior
from tests.property.kit import MODEL, manager

PLUGINS = manager()
STRENGTH = 5.0


def new(pool_size: int, **settings: Any) -> RadixCache:
    return RadixCache(MODEL, pool_size, 1, policy="hazard", plugins=PLUGINS, policy_settings=settings)


def ask(cache: RadixCache, tokens: list[int]) -> int:
    """One request, whole; how many tokens it found."""
    name = object()
    found = cache.match_prefix(tokens, name).matched_len
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo(output_tokens=10))
    return found


def flat(*shares: float) -> Prior:
    """A prior of one share for each family, at all ages."""
    curves = [Curve(first=0, shares=[share]) for share in shares]
    return Prior(by_turnover=curves, by_interval=curves)


LIE = flat(0.5, 0.05, 0.02, 0.01, 0.005, 0.002)
"""Says that what was used once is used again soonest."""


def shared_heads(seed: int, requests: int) -> list[list[int]]:
    """Prompts with one of a few dozen heads, and a tail of their own."""
    draw = random.Random(seed)
    return [
        [head] * 20 + [1000 + n] * draw.randint(5, 30)
        for n, head in enumerate(draw.choices(range(60), [1 / (i + 1) for i in range(60)], k=requests))
    ]


def test_the_shipped_prior_is_whole() -> None:
    prior = shipped_prior()
    assert len(prior.by_turnover) == len(prior.by_interval) == len(FAMILIES)
    by_age, by_scale = prior.by_age(100.0), prior.by_scale()
    assert by_age.shape == (BINS, len(FAMILIES))
    assert by_scale.shape == (2 * BINS, len(FAMILIES))
    for shares in (by_age, by_scale):
        assert shares.min() > 0.0
        assert shares.max() < 1.0
    assert (by_age[:, 1:] > by_age[:, :1]).all()  # what was used twice is used again sooner
    assert by_scale[BINS - 10, 1] < by_scale[BINS, 1]  # and hardly long before its usual interval is over


@given(st.floats(1e-9, 1e12))
def test_ages_are_counted_in_turnovers(turnover: float) -> None:
    prior = shipped_prior()
    once, twice = prior.by_age(turnover), prior.by_age(2.0 * turnover)
    if age_bin(2.0 * turnover) == age_bin(turnover) + 2:  # two bins are a factor of two
        assert np.array_equal(once[:-2], twice[2:])
    unit = age_bin(turnover)
    curve = prior.by_turnover[0]
    if unit < BINS:
        assert once[unit, 0] == curve.at(range(1))[0]


def test_it_is_read_back_as_it_was_written() -> None:
    prior = shipped_prior()
    assert Prior.model_validate_json(prior.text()) == prior


@pytest.mark.parametrize(("intervals", "most"), [(5, 0.51), (50, 0.1), (500, 0.011)])
def test_it_weighs_a_few_intervals(intervals: int, most: float) -> None:
    """Two caches with opposite priors that saw the same differ by no more than the weight of a prior."""
    found = []
    for prior in (flat(*[0.9] * 6), flat(*[0.001] * 6)):
        table = LifeTable(FAMILIES, STRENGTH, 0.02)
        number = table.add_class(0)
        for _ in range(intervals):
            table.interval(100)
        at = age_bin(1.0)
        table.used[number * BINS + at] = 30.0 * intervals  # 30 % of the intervals end at this age
        table.censored[number * BINS + at + 20] = 70.0 * intervals
        expected = prior.by_age(1.0), prior.by_scale()
        found.append(table.estimate(np.zeros((BINS, 1)), 1e9, expected).shares()[at, 0])
    # The class is shrunk to its family and that to the prior, by as much.
    assert abs(found[0] - found[1]) <= most
    assert found[0] == pytest.approx(found[1] + (STRENGTH / (STRENGTH + intervals)) ** 2 * 0.899, abs=0.02)


def test_what_is_learned_of_a_family_moves_the_next() -> None:
    table = LifeTable(FAMILIES, STRENGTH, 0.02)
    once, twice = table.add_class(0), table.add_class(1)
    for _ in range(1000):
        table.interval(100)
    at = age_bin(8.0)
    for number in range(BINS):
        table.used[once * BINS + number] = 1e5
        table.censored[once * BINS + number] = 2e7
    prior = flat(0.04, 0.12, 0.2, 0.2, 0.2, 0.2)
    estimate = table.estimate(np.zeros((BINS, 2)), 1e9, (prior.by_age(1.0), prior.by_scale()))
    shares = estimate.shares()
    assert shares[at, once] < 0.01  # much less than expected
    assert shares[at, twice] == pytest.approx(3.0 * shares[at, once], rel=0.1)  # as everywhere


def test_families_stay_probabilities() -> None:
    table = LifeTable(FAMILIES, STRENGTH, 0.02)
    once = table.add_class(0)
    for _ in range(100):
        table.interval(100)
    table.used[once * BINS + 10] = 10_000.0  # all of them
    for family in range(1, len(FAMILIES)):
        table.add_class(family, 1.0)
    prior = flat(0.01, 0.02, 0.1, 0.3, 0.5, 0.8)
    shares = table.estimate(np.zeros((BINS, 6)), 1e9, (prior.by_age(1.0), prior.by_scale())).shares()
    assert 0.0 <= shares.min() <= shares.max() < 1.0


def hits(prior: Prior | None, prompts: list[list[int]], pool: int = 500) -> np.ndarray:
    """Tokens that each request finds."""
    with pytest.MonkeyPatch.context() as patch:
        if prior is not None:
            patch.setattr(order_module, "shipped_prior", lambda: prior)
        cache = new(pool, prior=prior is not None)
        return np.array([ask(cache, prompt) for prompt in prompts])


@pytest.mark.parametrize("seed", range(3))
def test_a_lie_costs_nothing_lasting(seed: int) -> None:
    prompts = shared_heads(seed, 2500)
    without, lied, told = (hits(prior, prompts) for prior in (None, LIE, shipped_prior()))
    early = slice(0, 150)
    assert told[early].sum() > lied[early].sum()  # it is believed at first
    late = slice(600, None)
    assert lied[late].sum() > 0.97 * without[late].sum()


def test_it_is_dropped_when_lru_steps_in() -> None:
    cache = new(500)
    order = cache._pool.order
    assert isinstance(order, Hazard)
    prompts = shared_heads(0, 400)
    for prompt in prompts:
        ask(cache, prompt)
    learner, now = order.learner, order.intake.now
    learner.judge.behind = learner.judge.turned = True
    dropped = learner.estimate(now, order.intake.watched)[0].shares()
    assert learner.filled(order.intake.watched)  # as if it had not been
    restored = learner.estimate(now, order.intake.watched)[0].shares()
    assert not np.allclose(dropped, restored)
    learner.prior = None
    assert not learner.filled(order.intake.watched)


@pytest.mark.parametrize("seed", range(3))
def test_it_helps_a_cache_that_has_seen_little(seed: int) -> None:
    prompts = shared_heads(seed, 300)
    early = slice(30, 300)
    assert hits(shipped_prior(), prompts)[early].sum() > hits(None, prompts)[early].sum()


@given(st.integers(0, 2**32), st.integers(100, 800))
def test_the_same_stream_gives_the_same_hits(seed: int, pool: int) -> None:
    prompts = shared_heads(seed, 150)
    assert np.array_equal(hits(shipped_prior(), prompts, pool), hits(shipped_prior(), prompts, pool))
