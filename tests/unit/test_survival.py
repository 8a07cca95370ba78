"""Survival curves against naive programs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.policies.hazard.bins import BINS, age_bin, edges
from costcache.policies.hazard.life_table import ALL, LifeTable
from costcache.policies.hazard.survival import gittins_index, survival

LIVES = st.lists(st.tuples(st.integers(0, 11), st.booleans(), st.integers(1, 50)), max_size=40)
SHARES = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=9)


@given(st.floats(0.0, 1e9))
def test_an_age_is_in_its_bin(age: float) -> None:
    starts = edges()
    at = age_bin(age)
    assert starts[at] <= age * (1 + 1e-12)
    assert age < starts[at + 1] * (1 + 1e-12) or at == BINS - 1


def test_bins_widen_by_the_root_of_two() -> None:
    starts = edges()
    assert starts[3:] / starts[2:-1] == pytest.approx(np.full(BINS - 2, math.sqrt(2)))
    assert (starts[0], starts[1], starts[13]) == (0.0, 2**-6, 1.0)


@given(LIVES, st.floats(0.01, 0.5), st.floats(0.01, 20.0))
def test_shares_are_those_of_kaplan_and_meier(
    lives: list[tuple[int, bool, int]], prior: float, weight: float
) -> None:
    used, censored = np.zeros(12), np.zeros(12)
    for at, reused, tokens in lives:
        (used if reused else censored)[at] += tokens
    found = survival(used, censored, prior, weight)
    for k in range(12):
        at_risk = sum(
            tokens * (0.5 if at == k and not reused else 1.0) for at, reused, tokens in lives if at >= k
        )
        events = sum(tokens for at, reused, tokens in lives if at == k and reused)
        if at_risk + weight > 0:
            assert found[k] == pytest.approx((events + weight * prior) / (at_risk + weight))
            assert 0.0 <= found[k] <= 1.0 + 1e-12


def test_without_censoring_survival_is_the_remaining_share() -> None:
    used = np.array([1.0, 2.0, 3.0, 4.0])
    alive = np.cumprod(1.0 - survival(used, np.zeros(4), 0.0, 0.0))
    assert alive == pytest.approx([0.9, 0.7, 0.4, 0.0])


def test_censored_intervals_do_not_count_as_unused() -> None:
    """Half is censored in the first bin; of the rest, half is used in the second, as the others would be."""
    alive = np.cumprod(1.0 - survival(np.array([0.0, 2.0, 0.0]), np.array([4.0, 0.0, 2.0]), 0.0, 0.0))
    assert alive == pytest.approx([1.0, 0.5, 0.5])


@given(SHARES)
def test_the_index_is_the_best_of_all_horizons(shares: list[float]) -> None:
    bins = len(shares)
    starts = np.concatenate(([0.0], 2.0 ** np.arange(bins)))
    alive = [1.0]
    for share in shares:
        alive.append(alive[-1] * (1.0 - share))
    found = gittins_index(np.array([shares]).T, starts)[:, 0]
    for a in range(bins):
        best = 0.0
        for b in range(a + 1, min(bins, a + 8) + 1):
            cost = sum((alive[k] + alive[k + 1]) / 2 * (starts[k + 1] - starts[k]) for k in range(a, b))
            if cost > 1e-6:
                best = max(best, (alive[a] - alive[b]) / cost)
        assert found[a] <= best * (1 + 1e-6) + 1e-9 or alive[a] < 1e-6
        assert found[a] >= best * (1 - 1e-2) - 1e-9 or alive[a] < 1e-6


@given(st.lists(st.floats(0.0, 0.9), min_size=44, max_size=44))
def test_the_horizons_that_are_left_out_cost_little(shares: list[float]) -> None:
    starts = edges()
    alive = np.concatenate(([1.0], np.cumprod(1.0 - np.array(shares)), np.zeros(20)))
    alive[45:] = alive[44]
    spent = np.concatenate(([0.0], np.cumsum((alive[1:] + alive[:-1]) / 2 * np.diff(starts))))
    found = gittins_index(np.array([shares + [0.0] * 20]).T, starts)[:, 0]
    for a in range(44):
        if alive[a] < 1e-3:
            break
        best = max((alive[a] - alive[b]) / (spent[b] - spent[a]) for b in range(a + 1, a + 17))
        assert 0.65 * best - 1e-6 <= found[a]  # the next longer horizon is at most √2 times as long
        best = max((alive[a] - alive[b]) / (spent[b] - spent[a]) for b in range(a + 1, BINS + 1))
        assert found[a] <= best * (1 + 1e-6)


def test_an_empty_table_is_lru() -> None:
    table = LifeTable([ALL], 5.0, 0.02)
    table.add_class(0)
    worth = gittins_index(table.shares(np.zeros((BINS, 1)), 1e9), edges())[:-1, 0]
    assert (np.diff(worth[1:-1]) < 0).all()


def test_classes_are_shrunk_to_their_family_and_leave_it_with_evidence() -> None:
    table = LifeTable([ALL, ALL], 5.0, 0.02)
    rich, poor, other = table.add_class(0), table.add_class(0), table.add_class(1)
    at = age_bin(10.0)
    for _ in range(1000):
        for _ in (rich, other):
            table.interval(1)
        table.used[rich * BINS + at] += 1
        table.censored[other * BINS + age_bin(100.0)] += 1
    shares = table.shares(np.zeros((BINS, 3)), 1e9).T
    assert shares[rich, at] > 0.4  # smoothing spreads it over five bins
    assert shares[poor, at] > 0.4  # nothing was seen of it, but its family is known
    assert shares[other, at] < 0.02
    for _ in range(1000):
        table.censored[poor * BINS + age_bin(100.0)] += 1
    assert table.shares(np.zeros((BINS, 3)), 1e9)[at, poor] < 0.05


@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_a_family_is_shrunk_to_the_most_similar_one(scale: float) -> None:
    """Of what is used for the ninth time nothing is known yet, but of the fifth, where most is used once."""
    at = age_bin(100.0)
    shares = []
    for like in (ALL, 1):
        table = LifeTable([ALL, ALL, like], 5.0, 0.02)
        once, fifth, ninth = table.add_class(0), table.add_class(1, scale), table.add_class(2, scale)
        for _ in range(1000):
            table.interval(1)
            table.used[fifth * BINS + at] += 1
        for _ in range(50_000):
            table.interval(1)
            table.censored[once * BINS + age_bin(1000.0)] += 1
        living = np.zeros((BINS, 3))
        living[age_bin(20.0), ninth] = 1000.0  # none of it has been used again, and none is older than that
        shares.append(table.shares(living, 1e9)[:, ninth])
    to_all, to_fifth = shares
    assert to_all[at - 2 : at + 3].max() < 0.2
    assert to_fifth[at - 2 : at + 3].max() > 0.3
    assert to_fifth[: age_bin(10.0)].max() < 0.02


def test_classes_with_a_scale_learn_from_each_other() -> None:
    """Nodes used every 8 seconds predict those used every 64: the same, eight times as slowly."""
    table = LifeTable([ALL], 5.0, 0.02)
    fast, slow = table.add_class(0, 8.0), table.add_class(0, 64.0)
    for _ in range(1000):
        table.interval(1)
        table.used[fast * BINS + age_bin(8.0)] += 1
    shares = table.shares(np.zeros((BINS, 2)), 1e9).T
    alive = np.cumprod(1.0 - shares, axis=1)
    assert alive[fast, age_bin(3.0)] > 0.9
    assert alive[fast, age_bin(24.0)] < 0.5
    assert shares[slow, age_bin(64.0) - 4 : age_bin(64.0) + 5].max() > 0.1  # nothing of it was seen
    assert shares[slow, : age_bin(8.0) - 4].max() < 0.02


def test_open_intervals_count_as_unused_so_far() -> None:
    table = LifeTable([ALL], 1.0, 0.02)
    table.add_class(0)
    for _ in range(10):
        table.interval(1)
        table.used[age_bin(10.0)] += 1
    living = np.zeros((BINS, 1))
    before = table.shares(living, 1e9)[age_bin(10.0), 0]
    living[age_bin(1000.0), 0] = 90
    assert table.shares(living, 1e9)[age_bin(10.0), 0] < before / 5


def test_faded_counts_weigh_less() -> None:
    table = LifeTable([ALL], 1.0, 0.02)
    table.add_class(0)
    table.used[3] = table.censored[5] = 8.0
    table.fade(0.25)
    assert (table.used[3], table.censored[5]) == (2.0, 2.0)
