"""The pipeline: shortfall, headroom, adjusted count, victims, and what plugins may do to it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from costcache import NodeRecord, RadixCache, Victim, VictimOrder
from costcache.eviction import Eviction
from costcache.plugins import PluginManager
from costcache.policies.keyed import LRU
from tests.property.kit import (
    MODEL,
    Plugin,
    cache_with,
    check_structure,
    claiming,
    drain,
    insert_all,
    manager,
    seen,
)


class Hostile:
    """Cannot be compared, printed, counted or tested for truth."""

    def _no(self, *others: Any) -> Any:
        raise RuntimeError("hostile")

    __bool__ = __index__ = __int__ = __float__ = __repr__ = __str__ = _no
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __mul__ = _no

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("hostile")

    __hash__ = None  # type: ignore[assignment] # as a list has none


def raises() -> Any:
    raise ZeroDivisionError("the hook is broken")


class Raises:
    """Stands for a hook that raises."""


NONSENSE = [
    -1,
    -1.5,
    math.nan,
    math.inf,
    -math.inf,
    10**18,
    10**400,
    "7",
    "",
    b"7",
    None,
    True,
    [],
    [7],
    {},
    (),
    1j,
    np.float64("nan"),
    np.int64(-1),
    np.array([7, 7]),
    np.array([]),
    np.zeros(3),
    Decimal("NaN"),
    object(),
    int,
    Hostile(),
    Raises(),
]
NAMES = [f"{index} {type(value).__name__}" for index, value in enumerate(NONSENSE)]


def hooks(hook: str, value: Any) -> PluginManager:
    """A plugin with one hook, which answers ``value``."""
    broken = isinstance(value, Raises)
    return claiming(**{hook: raises if broken else lambda: value})


@pytest.mark.parametrize("value", NONSENSE, ids=NAMES)
@pytest.mark.parametrize("hook", ["free_target", "adjust_eviction_count"])
def test_nonsense_never_breaks_an_eviction(hook: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = hooks(hook, value)
    cache = RadixCache(MODEL, 100, plugins=made)
    insert_all(cache, ([n] * 20 for n in range(5)))
    for times in range(1, 4):
        eviction = cache.evict(7)
        assert (eviction.headroom, eviction.goal, eviction.freed) == (0, 7, 7)
        assert cache.counters.clamped == cache.stats().clamped == times
        check_structure(cache)
    cache.insert(range(200, 230))  # an eviction of the cache's own
    assert cache.counters.clamped == 4
    assert len(cache.allocate(10)) == 10
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    text = record.getMessage()
    assert "'hostile'" in text
    assert hook in text
    assert len(text) < 400
    if isinstance(value, Raises):
        assert record.exc_info is not None
        assert "the hook is broken" in str(record.exc_info[1])
    drain(cache)


@pytest.mark.parametrize("value", [1.0, 1.5, 1, 2, np.float64(1.0), Fraction(3, 2)])
def test_a_free_target_of_the_whole_pool_counts_as_none(value: Any) -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(free_target=lambda: value))
    cache.insert(range(100))
    assert (cache.evict(3).freed, cache.counters.clamped) == (3, 1)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, np.float64(0.0)])
def test_a_free_target_of_zero_is_no_headroom(value: Any) -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(free_target=lambda: value))
    cache.insert(range(100))
    assert (cache.evict(3).freed, cache.counters.clamped) == (3, 0)


@pytest.mark.parametrize("value", [0.25, np.float64(0.25), 0.2401])
def test_a_share_is_rounded_up(value: Any) -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(free_target=lambda: value))
    cache.insert(range(100))
    eviction = cache.evict(3)
    assert (eviction.headroom, eviction.freed, cache.counters.clamped) == (25, 28, 0)


@pytest.mark.parametrize("value", [0, 1, 6, 101, 10**6, 7.0, 8.5, np.float64(8)])
def test_a_count_under_the_request_or_over_the_pool_counts_as_the_request(value: Any) -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(adjust_eviction_count=lambda: value))
    cache.insert(range(100))
    assert (cache.evict(7).freed, cache.counters.clamped) == (7, 1)


@pytest.mark.parametrize("value", [7, 8, 40, 100, np.int64(40), np.uint8(8), np.int32(7)])
def test_a_count_from_the_request_to_the_pool_is_taken(value: Any) -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(adjust_eviction_count=lambda: value))
    cache.insert(range(100))
    eviction = cache.evict(7)
    assert eviction.freed == int(value)
    assert type(eviction.freed) is int
    assert cache.counters.clamped == 0


def test_each_broken_hook_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(free_target=raises, adjust_eviction_count=raises))
    cache.insert(range(100))
    for _ in range(5):
        assert cache.evict(2).freed == 2
    assert cache.counters.clamped == 10
    assert len(caplog.records) == 2
    cache.reset()
    cache.insert(range(100))
    cache.evict(2)
    assert len(caplog.records) == 2, "a reset is no reason to say it again"


@pytest.mark.parametrize(
    ("answer", "goal"),
    [(None, 16), (lambda requested: requested, 16), (lambda: 17, 32), (lambda: 95, 96), (lambda: 96, 96)],
)
def test_a_goal_is_whole_pages_whatever_the_plugin_answers(answer: Any, goal: int) -> None:
    hooks = {} if answer is None else {"adjust_eviction_count": answer}
    for trim in ("auto", "off"):
        cache = RadixCache(MODEL, 96, 16, plugins=claiming(**hooks), trim=trim)
        cache.insert(range(96))
        eviction = cache.evict(1)
        assert (eviction.goal, eviction.freed) == (goal, goal if trim == "auto" else 96)
        assert cache.counters.clamped == 0


def test_a_plugin_is_asked_for_whole_pages_and_the_partial_page_of_a_pool_does_not_count() -> None:
    asked: list[int] = []

    def count(requested: int) -> int:
        asked.append(requested)
        return requested

    cache = RadixCache(MODEL, 100, 16, plugins=claiming(adjust_eviction_count=count), headroom=0.1)
    cache.insert(range(96))
    assert cache.evict(9).goal == 32  # 9 and a tenth of 96, rounded up
    assert cache.evict(1000).goal == 64  # what was left
    assert asked == [32, 1010]


def test_a_goal_is_cut_to_what_is_evictable() -> None:
    cache = RadixCache(MODEL, 100, plugins=claiming(adjust_eviction_count=lambda: 100))
    cache.lock(cache.insert(range(60)).node)
    cache.insert(range(100, 120))
    eviction = cache.evict(5)
    assert (eviction.goal, eviction.freed, cache.evictable) == (20, 20, 0)
    assert cache.counters.short == 0


# -- headroom ---------------------------------------------------------------------------------


def test_a_watermark_is_left_free_only_when_something_is_evicted() -> None:
    cache = RadixCache(MODEL, 100, plugins=manager(), headroom=0.2)
    cache.insert(range(95))
    assert cache.free == 5, "no shortfall, no eviction: the target alone frees nothing"
    assert cache.evict(0).freed == 0
    cache.insert(range(200, 210))  # 10 needed, 5 free: 5 short
    assert (cache.free, cache.cached) == (20, 80)
    assert cache.counters.shortfall == 5
    cache.insert(range(300, 320))  # exactly what is free
    assert (cache.free, cache.counters.evictions) == (0, 1)


def test_missing_headroom_alone_is_not_a_short_eviction() -> None:
    cache = RadixCache(MODEL, 100, plugins=manager(), headroom=0.5)
    cache.lock(cache.insert(range(90)).node)
    cache.insert(range(200, 210))
    eviction = cache.evict(5)
    assert (eviction.headroom, eviction.freed, cache.counters.short) == (50, 10, 0)
    assert cache.evict(5).freed == 0
    assert cache.counters.short == 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_headroom_never_frees_under_the_shortfall(page_size: int) -> None:
    for headroom in (0.0, 0.01, 0.33, 0.99):
        cache = RadixCache(MODEL, 160, page_size, plugins=manager(), headroom=headroom)
        insert_all(cache, ([n] * 32 for n in range(5)))
        eviction = cache.evict(5)
        goal = min(5 + math.ceil(headroom * 160), 160)
        assert eviction.freed == -(-goal // page_size) * page_size


# -- victims ----------------------------------------------------------------------------------


def test_the_last_victim_alone_is_trimmed() -> None:
    cache = RadixCache(MODEL, 100, plugins=manager(), policy="lru")
    insert_all(cache, ([n] * 10 for n in range(5)))
    eviction = cache.evict(23)
    assert seen(eviction) == [(0, 10, False), (0, 10, False), (7, 3, True)]
    assert (eviction.trimmed, cache.counters.trimmed, cache.counters.victims) == (1, 1, 3)
    assert cache.match_prefix([2] * 10).matched_len == 7


@pytest.mark.parametrize(("trim", "freed"), [("auto", 4), ("exact", 4), ("off", 24), ("chunk", 8)])
def test_how_a_leaf_is_cut(trim: str, freed: int) -> None:
    # 24 tokens, 3 to free, pages of 4; chunks of 6 tokens are rounded up to 8.
    cache = RadixCache(MODEL, 100, 4, plugins=manager(), trim=trim, trim_chunk=6)
    cache.insert(range(24))
    eviction = cache.evict(3)
    assert eviction.freed == freed
    assert cache.match_prefix(range(24)).matched_len == 24 - freed


@pytest.mark.parametrize("trim", ["exact", "chunk", "off"])
def test_a_leaf_that_just_fits_is_evicted_whole(trim: str) -> None:
    cache = RadixCache(MODEL, 100, 4, plugins=manager(), trim=trim, trim_chunk=8)
    insert_all(cache, ([1] * 12, [2] * 12))
    assert seen(cache.evict(12)) == [(0, 12, False)]
    assert seen(cache.evict(9 if trim != "exact" else 12))[0][1] == 12


def test_a_trimmed_leaf_keeps_its_rank() -> None:
    cache = RadixCache(MODEL, 100, plugins=manager(), policy="lru")
    insert_all(cache, ([1] * 10, [2] * 10))
    sizes = [cache.evict(3).victims for _ in range(4)]
    assert [[(v.start, v.tokens) for v in victims] for victims in sizes] == [
        [(7, 3)],
        [(4, 3)],
        [(1, 3)],
        [(0, 1), (8, 2)],
    ]


def test_an_eviction_explains_itself() -> None:
    cache = RadixCache(MODEL, 100, plugins=manager(), headroom=0.1, policy="lru")
    insert_all(cache, ([n] * 8 for n in range(10)))
    cache.match_prefix([3] * 8)
    eviction = cache.evict(2)
    assert isinstance(eviction, Eviction)
    assert eviction.explain() == (
        "freed 12 of pool 'kv' for shortfall 2 + headroom 10: 2 victims by 'lru', 1 trimmed"
    )
    first, second = eviction.victims
    assert (first.start, first.tokens, first.trimmed, first.uses, first.recency) == (0, 8, False, 1, 1)
    assert (second.start, second.tokens, second.trimmed) == (4, 4, True)
    assert first.serial < second.serial
    assert len(eviction.slots) == 12


def test_counters_add_up() -> None:
    cache = RadixCache(MODEL, 50, plugins=manager(), policy="lru")
    freed, inserted = [], 0
    for step in range(40):
        inserted += cache.insert([step, *range(step % 13)]).inserted_len
        freed.append(cache.evict(step % 5).freed)
    counters, stats = cache.counters, cache.stats()
    assert counters.evicted >= sum(freed)
    assert (stats.evicted, stats.evictions, stats.trimmed) == (
        counters.evicted,
        counters.evictions,
        counters.trimmed,
    )
    assert inserted - counters.evicted == stats.cached > 0
    assert counters.clamped == counters.deferred == 0


def test_an_eviction_of_nothing_calls_no_plugin() -> None:
    asked: list[int] = []

    def count(requested: int) -> int:
        asked.append(requested)
        return requested

    cache = RadixCache(MODEL, 100, plugins=claiming(adjust_eviction_count=count))
    cache.insert(range(10))
    assert cache.evict(0).freed == 0
    assert (asked, cache.counters.evictions) == ([], 0)
    assert cache.evict(1).freed == 1
    assert asked == [1]


@pytest.mark.parametrize("value", [-1, -(10**18), np.int64(-3)])
def test_a_negative_count_is_refused(value: int) -> None:
    cache = RadixCache(MODEL, 20, plugins=manager())
    cache.insert(range(10))
    for call in (cache.evict, cache.allocate):
        with pytest.raises(ValueError, match="give 0 or more"):
            call(value)
    check_structure(cache)
    assert sorted(cache.allocate(20).tolist()) == list(range(20))


@pytest.mark.parametrize("value", [2.5, 2.0, "3", None, [1], math.nan])
def test_a_fractional_count_is_refused(value: Any) -> None:
    cache = RadixCache(MODEL, 20, plugins=manager())
    cache.insert(range(10))
    calls: list[Callable[[Any], Any]] = [cache.evict, cache.allocate]
    for call in calls:
        with pytest.raises(TypeError, match="whole number"):
            call(value)
    assert cache.cached == 10
    check_structure(cache)


def test_numpy_counts_are_counts() -> None:
    cache = RadixCache(MODEL, 20, plugins=manager())
    cache.insert(range(20))
    three: Any = np.int64(3)
    five: Any = np.int32(5)
    assert cache.evict(three).freed == 3
    assert len(cache.allocate(five)) == 5
    check_structure(cache)


# -- MLA and MHA ------------------------------------------------------------------------------


def test_headroom_scales_with_the_plugin_and_the_shortfall_does_not() -> None:
    import costcache_mha.plugin
    import costcache_mla.plugin

    made = manager(mla=costcache_mla.plugin, mha=costcache_mha.plugin)
    freed = {}
    for name in ("deepseek-v3", MODEL):
        for headroom in (0.0, 0.2):
            cache = RadixCache(name, 10_000, plugins=made, headroom=headroom)
            cache.insert(range(10_000))
            freed[cache.plugin, headroom] = cache.evict(200).freed
    assert freed == {
        ("mla", 0.0): 200,
        ("mha", 0.0): 200,
        ("mla", 0.2): 200 + math.ceil(0.2 / (40_960 / 576) * 10_000),
        ("mha", 0.2): 2200,
    }


# -- orders that meet the pipeline ------------------------------------------------------------


def test_a_deferred_victim_is_offered_again() -> None:
    """An order that hears no lock names a locked leaf; it gets it back when the eviction is over."""

    class Deaf(VictimOrder):
        def __init__(self) -> None:
            self.queue: list[NodeRecord] = []
            self.deferred: list[int] = []

        def insert(self, record: NodeRecord) -> None:
            self.queue.append(record)

        def next_victim(self, pool: str) -> Victim | None:
            return Victim(self.queue.pop(0)) if self.queue else None

        def defer(self, victim: Victim) -> None:
            self.deferred.append(victim.record.serial)
            self.queue.append(victim.record)

    orders: list[Deaf] = []

    def make() -> Deaf:
        orders.append(Deaf())
        return orders[-1]

    cache = cache_with(make)
    insert_all(cache, ([1] * 5, [2] * 5))
    found = cache.match_prefix([1] * 5)
    cache.lock(found.node)
    assert cache.evict(10).freed == 5
    assert orders[0].deferred == [found.node.serial]
    assert cache.counters.deferred == 1
    cache.unlock(found.node)
    assert cache.evict(10).freed == 5
    assert cache.policy == "tested"


def test_evictions_while_a_prefix_is_being_inserted_spare_that_prefix() -> None:
    cache = cache_with(LRU, 10)
    insert_all(cache, ([1, 2, 3, 4], [5, 6, 7, 8]))
    done = cache.insert([1, 2, 3, 4, 9, 9, 9, 9])  # [1, 2, 3, 4] is oldest, and reused
    assert (done.matched_len, done.inserted_len) == (4, 4)
    assert cache.match_prefix([5, 6, 7, 8]).matched_len == 2
    assert cache.evictable == cache.cached == 10, "its lock is gone"


def test_a_hook_that_is_not_asked_for_a_full_pool_of_locks() -> None:
    cache = RadixCache(MODEL, 10, plugins=manager(own=Plugin(match_model=lambda: 1)))
    cache.lock(cache.insert(range(10)).node)
    assert cache.allocate(1) is None
    assert cache.counters.evictions == 0
    done = cache.insert([99])
    assert done.inserted_len == 0
    assert (cache.counters.evictions, cache.counters.short) == (1, 1)
