"""The hazard policy: its ranking, its bookkeeping on nodes, and what it learns."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import RadixCache, RequestInfo
from costcache.cost import CostModel
from costcache.errors import SettingsError
from costcache.orders import VictimOrder
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.bins import BINS, age_bin
from costcache.policies.hazard.classes import FAMILIES, SPANS, Classes, Ending
from costcache.policies.hazard.depths import Depths
from costcache.policies.hazard.frequent import Frequent
from costcache.policies.hazard.history import Tracked
from costcache.policies.hazard.life_table import ALL, LifeTable
from costcache.policies.hazard.snapshot import CohortSnapshot
from costcache.policies.hazard.state_learner import StateLearner
from costcache.policies.hazard.worth import Worth
from costcache.radix import Node
from costcache.records import NodeRecord, Victim
from tests.property.kit import MODEL, check_structure, drain, manager, nodes_of

PLUGINS = manager()


def new(pool_size: int = 1000, page_size: int = 1, **settings: Any) -> RadixCache:
    return RadixCache(MODEL, pool_size, page_size, policy="hazard", plugins=PLUGINS, policy_settings=settings)


def order_of(cache: RadixCache) -> Hazard:
    order = cache._pool.order
    order = getattr(order, "watched", order)
    assert isinstance(order, Hazard)
    return order


def ask(cache: RadixCache, tokens: list[int], output: int = 0, **info: Any) -> int:
    """One request, whole; how many tokens it found."""
    name = object()
    found = cache.match_prefix(tokens, name).matched_len
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo(output_tokens=output, **info))
    return found


def stream(seed: int, requests: int) -> list[list[int]]:
    """Prompts that share heads, come back longer, and end anywhere."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(requests):
        if prompts and draw.random() < 0.6:
            old = draw.choice(prompts[-30:])
            head = old[: draw.randint(1, len(old))] if draw.random() < 0.4 else old
        else:
            head = []
        prompts.append(head + [draw.randint(0, 9) for _ in range(draw.randint(1, 30))])
    return prompts


def worth_of(order: Hazard, record: NodeRecord) -> tuple[float, float]:
    """Rank of a leaf, found without the ranking."""
    cohort, cohorts, ranker = record.data.pieces[-1].cohort.whole(), order.learner.cohorts, order.ranker
    first = cohorts.first[cohort.slot]
    age = ranker.now - (first + cohorts.last[cohort.slot]) / 2
    return ranker.worth.at(cohort.stratum, age), first


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool_size", [400, 5000])
def test_the_victim_is_the_one_that_a_look_at_all_leaves_finds(seed: int, pool_size: int) -> None:
    cache = new(pool_size, refresh=7)
    order = order_of(cache)
    looked, most = 0, 0

    class Watched(VictimOrder):
        watched = order

        def next_victim(self, pool: str) -> Victim | None:
            nonlocal looked, most
            victim = order.next_victim(pool)
            most = max(most, sum(map(bool, order.learner.cohorts.listed)))
            leaves = [node for node in nodes_of(cache) if node.is_evictable]
            if victim is None:
                assert not leaves
                return None
            looked += 1
            worth, first = worth_of(order, victim.record)
            least = min(worth_of(order, leaf) for leaf in leaves)
            assert (worth, first) == least
            cohort = victim.record.data.pieces[-1].cohort.whole()
            same = [leaf for leaf in leaves if leaf.data.pieces[-1].cohort.whole() is cohort]
            assert victim.record.recency == min(leaf.recency for leaf in same)
            return victim

    cache._pool._guard.order = Watched()  # its events still go to the order
    for n, prompt in enumerate(stream(seed, 400 if pool_size < 1000 else 1000)):
        cache.clock.advance(n * 1.7)
        ask(cache, prompt, output=n % 700)
        if pool_size < 1000 or n % 8 == 0:  # a look at every node
            check_books(cache)
    assert looked > 100
    assert (most > 48) == (pool_size > 1000)  # cohorts are ranked one by one, or with arrays
    drain(cache)


def check_books(cache: RadixCache) -> None:
    """Pieces cover their nodes, and cohorts have the tokens of their pieces at risk."""
    order = order_of(cache)
    at_risk: dict[int, int] = {}
    pieces = []
    for node in nodes_of(cache):
        tracked: Tracked = node.data
        at = node.depth
        for piece in tracked.pieces:
            assert piece.start == at
            assert piece.tokens > 0
            at = piece.end
        assert tracked.pieces[-1].start < node.end <= at
        for piece in tracked.trimmed:
            assert piece.start == at
            at = piece.end
        pieces += tracked.pieces + tracked.trimmed
    remembered = [memory for memory, _ in order.intake.ghosts._memories.values()]
    for ghost in remembered:
        pieces += ghost
    for piece in pieces:
        if piece.cohort is not None:
            slot = piece.cohort.whole().slot
            at_risk[slot] = at_risk.get(slot, 0) + piece.tokens
    cohorts = order.learner.cohorts
    assert at_risk.keys() <= {cohort.slot for cohort in cohorts.all()}
    for cohort in cohorts.all():
        assert cohorts.at_risk[cohort.slot] == at_risk.get(cohort.slot, 0)


def test_the_same_stream_gives_the_same_victims() -> None:
    runs = []
    for _ in range(2):
        cache = new(300, refresh=5)
        run = []
        for n, prompt in enumerate(stream(9, 300)):
            before = cache.counters.evicted
            run.append((ask(cache, prompt, output=n % 300, finish_reason="stop"), before))
        runs.append(run)
    assert runs[0] == runs[1]


def test_starts_as_lru() -> None:
    hazard, lru = new(200, refresh=10_000, prior=False), RadixCache(MODEL, 200, policy="lru", plugins=PLUGINS)
    found = [(ask(hazard, prompt), ask(lru, prompt)) for prompt in stream(3, 400)]
    by_hazard, by_lru = map(sum, zip(*found, strict=True))
    assert by_lru > 2000
    assert abs(by_hazard - by_lru) < 0.05 * by_lru  # leaves of a few requests share a cohort


def test_a_split_leaves_both_parts_the_history() -> None:
    cache = new()
    ask(cache, [1] * 10, output=10)
    ask(cache, [1] * 10, output=10)
    ask(cache, [1] * 4 + [2] * 3, output=10)
    front, back, own = (
        next(n for n in nodes_of(cache) if (n.depth, n.tokens) == at) for at in ((0, 4), (4, 6), (4, 3))
    )
    history = order_of(cache).history
    assert [piece.uses for piece in history(front)] == [3]
    assert [piece.uses for piece in history(back)] == [2]
    assert [piece.uses for piece in history(own)] == [1]


def node_at(cache: RadixCache, depth: int, first: int = 1) -> Node:
    """The node that begins with token ``first`` at a depth."""
    return next(
        node
        for node in nodes_of(cache)
        if node.depth == depth and int.from_bytes(node.edge[:8], "little") == first
    )


def history_at(cache: RadixCache, depth: int) -> list[tuple[int, int, int]]:
    """Start, tokens and uses of each piece of the node at a depth."""
    pieces = order_of(cache).history(node_at(cache, depth))
    return [(piece.start, piece.tokens, piece.uses) for piece in pieces]


def test_tokens_that_return_have_their_history_and_new_ones_have_none() -> None:
    cache = new(100)
    ask(cache, [1] * 40)
    ask(cache, [1] * 40)
    ask(cache, [2] * 100)  # evicts everything
    assert cache.stats().nodes == 1
    ask(cache, [1] * 40 + [3] * 10)
    assert history_at(cache, 0) == [(0, 40, 3), (40, 10, 1)]


def test_nodes_that_were_evicted_one_by_one_return_as_one() -> None:
    cache = new(100)
    ask(cache, [1] * 20)
    ask(cache, [1] * 20 + [2] * 20)
    ask(cache, [1] * 20 + [2] * 20 + [3] * 10)
    ask(cache, [9] * 100)
    ask(cache, [1] * 20 + [2] * 20 + [3] * 10)
    assert history_at(cache, 0) == [(0, 40, 3), (40, 10, 2)]  # 3 and 4 uses are one class


def test_a_trimmed_tail_returns() -> None:
    cache = new(100)
    ask(cache, [1] * 60)
    cache.evict(25)
    assert node_at(cache, 0).tokens == 35
    ask(cache, [1] * 60 + [2] * 5)
    assert history_at(cache, 35) == [(35, 25, 2), (60, 5, 1)]
    check_books(cache)


def test_only_the_part_with_the_last_history_is_evicted_by_itself() -> None:
    cache = new(100)
    for _ in range(3):
        ask(cache, [1] * 40)
    ask(cache, [2] * 100)
    ask(cache, [1] * 40 + [3] * 10)
    cache.evict(50)  # what is left of the other
    victim = order_of(cache).next_victim("kv")
    assert victim is not None
    assert (victim.record.depth, victim.record.tokens, victim.tokens) == (0, 50, 10)
    assert cache._pool.take(victim, 30) == 10


def test_memory_is_bounded() -> None:
    cache = new(300, refresh=5, ghosts=2.0)
    order = order_of(cache)
    for n, prompt in enumerate(stream(5, 1500)):
        cache.clock.advance(float(n))
        ask(cache, prompt, output=n % 900, finish_reason=f"reason {n % 50}", priority=n)
        assert order.intake.ghosts.tokens <= 600
        assert len(order.intake.ghosts) <= 600
        assert all(len(node.data.trimmed) <= 8 for node in nodes_of(cache))
    found = order.snapshot()
    assert len(found.classes) <= 768
    assert found.entries <= 2 * cache.stats().nodes + 1024 + 100
    assert found.dirty <= 100
    pieces = sum(len(order.history(node)) for node in nodes_of(cache))
    assert len(found.cohorts) <= pieces + found.ghosts * 9 + len(found.classes)


def test_a_waiting_request_pins_what_it_needs() -> None:
    cache = new(100)
    for n in range(4):
        ask(cache, [n] * 25)
    tree = cache._tree
    wanted = cache.match_prefix([0] * 25).node
    cache.match_prefix([1] * 25)
    tree.refresh(wanted)
    cache.evict(75)
    assert cache.match_prefix([0] * 25).matched_len == 25
    tree.refresh(node_at(cache, 0, first=0))
    assert drain(cache).freed == 25  # but it is evicted where nothing else is left


def test_learns_what_is_not_used_again() -> None:
    """Long answers end a conversation here, short ones do not: order of use says nothing."""
    cache = new(4_000)
    draw = random.Random(0)
    found = asked = 0
    waiting: list[list[int]] = []
    for n in range(1500):
        cache.clock.advance(float(n))
        if len(waiting) > 20:
            prompt = waiting.pop(0)
            hit = ask(cache, prompt, output=600)
            if n > 500:
                asked += 1
                found += hit == 100
        elif draw.random() < 0.5:
            prompt = [n] * 100
            ask(cache, prompt, output=10)
            waiting.append(prompt)
        else:
            ask(cache, [n] * 100, output=600)
    assert asked > 200
    assert found > 0.95 * asked


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "bytes"}, r"policy_settings.objective.* is 'bytes'.*'tokens' or 'flops'"),
        ({"refresh": 0}, r"policy_settings.refresh.* is 0"),
        ({"ghosts": -1}, r"policy_settings.ghosts.* is -1"),
        ({"strength": 0}, r"policy_settings.strength.* is 0"),
        ({"memory": 2}, r"policy_settings.memory.* is 2"),
        ({"unknown": 1}, r"unknown setting 'policy_settings.unknown'.*objective"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        new(**settings)


def test_flops_count_more_in_the_depth() -> None:
    cache = new(objective="flops")
    cost: CostModel = cache._tree.binding.cost
    first = cost.recompute_flops(0, 1)
    for n, depth in enumerate(Depths(cost).starts, 1):
        assert cost.recompute_flops(depth, depth + 1) / first == pytest.approx(2 ** (n / 2 - 0.25), rel=0.01)
    worth = order_of(cache).ranker.worth
    assert worth.at(3, 0.0) == pytest.approx(worth.at(1, 0.0) * 2)
    for prompt in stream(2, 200):
        ask(cache, prompt)
    drain(cache)
    check_structure(cache)


def test_classes_and_ages_that_were_left_out_are_worked_out_when_asked_for() -> None:
    table = LifeTable([ALL, ALL], 5.0, 0.02)
    for number in range(6):
        table.add_class(number % 2, 4.0 * (number % 3))
        table.used[number * BINS + 10 + number] = 100.0 * number
        table.interval(100)
    estimate = table.estimate(np.ones((BINS, 6)), 1000.0)
    whole, part = Worth(Depths()), Worth(Depths())
    whole.learn(estimate, np.arange(6))
    assert whole.is_complete
    ages = [0.0, 0.3, 7.0, 1e3, 1e9]
    for oldest in (0.0, 7.0, 1e3, 1e7):
        part.learn(estimate, np.arange(6), oldest)
        assert not part.is_complete
    for group in range(8):  # the last two are newer than the estimate
        part.learn(estimate, np.array([3, 5]))
        assert [part.at(group, age) for age in ages] == [whole.at(group, age) for age in ages]
        part.learn(estimate, np.array([3, 5]))
        found = part.of(np.full(len(ages), group), np.array(ages))
        assert found.tolist() == pytest.approx([whole.at(group, age) for age in ages], rel=1e-12)
        for oldest in (0.0, 7.0, 1e3, 1e7):
            part.learn(estimate, np.array([3, 5]), oldest)
            assert not part.is_complete
            assert [part.at(group, age) for age in ages] == [whole.at(group, age) for age in ages]
            part.learn(estimate, np.array([3, 5]), oldest)
            assert part.of(np.full(len(ages), group), np.array(ages)).tolist() == found.tolist()
    assert (part.table() == whole.table()).all()
    part = Worth(Depths())
    part.learn(estimate, np.array([3, 5]))
    asked = part.at(2, 7.0)
    assert not part.is_complete, "one class was asked for, and one is worked out"
    part.learn(estimate, np.array([3, 5]))
    assert part.at(2, 7.0) == asked == whole.at(2, 7.0)
    assert (part.table() == whole.table()).all()


def test_classes_in_words() -> None:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    classes = Classes(table)
    assert classes.label(classes.open) == "used once, by a request that has not ended"
    ending = classes.ending(RequestInfo(output_tokens=300, finish_reason="stop", priority=9))
    assert classes.endings == {Ending(2, "stop", 2): ending}
    fresh = classes.fresh(9000, ending)
    assert classes.label(fresh) == "used once, 8000+ new tokens, 200+ output, stop, priority 2"
    often = classes.reused(7, 12.0)
    assert classes.label(often) == "used 5+ times, every 8 to 16"
    assert classes.reused(5, 15.9) == often != classes.reused(5, 16.1)
    after = classes.after(often, ending)
    assert classes.label(after) == "used 5+ times, every 8 to 16, 200 or more output, stop, priority 2"
    assert table.kin(after) == table.kin(often)
    longer = classes.ending(RequestInfo(output_tokens=900, finish_reason="stop", priority=2))
    assert longer != ending
    assert classes.after(often, longer) == after


def test_reasons_beyond_the_first_are_not_told_apart() -> None:
    classes = Classes(LifeTable(FAMILIES, 5.0, 0.02))
    numbers = [classes.ending(RequestInfo(finish_reason=str(n))) for n in range(10)]
    assert numbers == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_frequent_endings_of_outputs_get_classes_of_their_own() -> None:
    classes = Classes(LifeTable(FAMILIES, 5.0, 0.02))

    def ending(*tokens: int) -> Ending:
        number = classes.ending(RequestInfo(output_tokens=9, finish_reason="stop", ending=tokens))
        return list(classes.endings)[number]

    for n in range(100):  # a tool call, an answer that ends in a full stop, and others of all kinds
        ending(5, 77, 2)
        ending(n, 13, 2)
        ending(n, 1000 + n, 2)
    call, answer, other = ending(9, 9, 77, 2), ending(13, 2), ending(4, 4)
    assert {call.last, answer.last} == {0, 1}
    assert other.last is None
    assert classes.label(classes.fresh(0, classes.endings[call])).endswith(", stop, ending 1")
    assert len({each.last for each in classes.endings}) == 3


@given(st.lists(st.integers(0, 60), max_size=400), st.integers(1, 8))
def test_what_is_frequent_gets_a_number_for_good(labels: list[int], limit: int) -> None:
    frequent = Frequent(limit)
    known: dict[int, int] = {}
    for at, label in enumerate(labels, 1):
        number = frequent.number(label)
        if label in known:
            assert number == known[label]
        elif number is not None:
            known[label] = number
        # Space-saving never counts too little: what is that frequent has a number, if any are left.
        count = labels[:at].count(label)
        if count >= 8 and 16 * count >= at:
            assert number is not None or len(frequent) == limit
    assert sorted(known.values()) == list(range(len(known)))
    assert len(known) <= limit


def test_hints_make_classes() -> None:
    classes = Classes(LifeTable(FAMILIES, 5.0, 0.02))

    def hint(**facts: Any) -> str | None:
        number = classes.ending(RequestInfo(**facts))
        return list(classes.endings)[number].hint

    assert hint(session="s", tenant="t") is None
    assert hint(returns_after=0.0) == "back in under 1 s"
    assert hint(returns_after=20.0) == hint(returns_after=31) == "back in 16 to 32 s"
    assert hint(returns_after=1e9) == "back in 16384+ s"
    assert hint(keep_seconds=300.0) == "to keep for 256 to 512 s"
    assert hint(session_ends=True, returns_after=3.0) == "session over"
    assert [hint(returns_after="search") for _ in range(8)] == [None] * 7 + ["back after search"]
    assert hint(returns_after="s" * 10_000) is None
    assert [hint(returns_after=f"{'s' * 64}{n}") for n in range(8)][-1] == "back after " + "s" * 64


def test_classes_of_hints_hang_on_plain_ones() -> None:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    classes = Classes(table)
    plain = classes.ending(RequestInfo(output_tokens=10))
    soon = classes.ending(RequestInfo(output_tokens=10, returns_after=3.0))
    late = classes.ending(RequestInfo(output_tokens=10, returns_after=90.0))
    often = classes.reused(3, 12.0)
    for first, make in ((100, classes.fresh), (often, classes.after)):
        numbers = [make(first, soon), make(first, late), make(first, plain)]
        assert len({*numbers}) == 3
        assert [make(first, soon), make(first, late)] == numbers[:2]
        assert {table.kin(number) for number in numbers} == {table.kin(numbers[2])}
        words = classes.label(numbers[2])
        assert classes.label(numbers[0]) == f"{words}, back in 2 to 4 s"
        kinds = classes.kinds()
        assert kinds[numbers[0]] == kinds[numbers[2]]  # tables know no hints


def seen(table: LifeTable, number: int, at: int, tokens: int, reused: float) -> None:
    """Count intervals of 1 token each that reach a bin of age, some of which are reused there."""
    for _ in range(tokens):
        table.interval(1)
    table.used[number * BINS + at] += tokens * reused
    table.censored[number * BINS + at] += tokens * (1 - reused)


@pytest.mark.parametrize(
    ("soon", "late", "trusted"),
    [((20, 1.0), (30, 1.0), True), ((30, 1.0), (20, 1.0), True), (None, None, False)],
)
def test_hints_count_once_they_have_foretold_something(
    soon: tuple[int, float] | None, late: tuple[int, float] | None, trusted: bool
) -> None:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    plain = table.add_class(0)
    hinted = [table.add_hinted(plain, 0), table.add_hinted(plain, 1)]
    draw = random.Random(3)
    for _ in range(12):
        for number, truth in zip(hinted, (soon, late), strict=True):
            at, reused = truth or draw.choice([(20, 1.0), (30, 1.0)])
            seen(table, number, at, 40, reused)
        estimate = table.estimate(np.zeros((BINS, 3)), 1e6)
    own, pooled = estimate.curves(np.array(hinted))
    shares = estimate.shares()[:, hinted]
    assert np.allclose(pooled[:, 0], pooled[:, 1])
    if trusted:
        assert np.allclose(shares, own, atol=0.02)
        first = 0 if soon == (20, 1.0) else 1
        assert shares[20, first] > 0.4
        assert shares[20, 1 - first] < 0.05
    else:
        assert abs(shares[20] - shares[20].mean()).max() < 0.1
    assert np.allclose(estimate.shares()[:, plain], pooled[:, 0])


def test_hints_that_begin_to_lie_are_found_out_and_tables_may_fade() -> None:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    plain = table.add_class(0)
    hinted = [table.add_hinted(plain, 0), table.add_hinted(plain, 1)]
    trust = []
    for time in range(40):
        table.fade(0.95)
        for at, number in enumerate(hinted):
            bin_of = 20 + 10 * at if time < 20 else 20 + 10 * ((at + time) % 2)
            seen(table, number, bin_of, 40, 1.0)
        shares = table.estimate(np.zeros((BINS, 3)), 1e6).shares()
        trust.append(shares[20, 1] - shares[20, 2])
    assert trust[19] > 0.3
    assert abs(trust[-1]) < 0.1


def test_without_trust_hints_change_nothing() -> None:
    """The curves of hinted classes are then those of a table that never heard of hints."""
    one, other = LifeTable(FAMILIES, 5.0, 0.02), LifeTable(FAMILIES, 5.0, 0.02)
    plain = one.add_class(1, 8.0), other.add_class(1, 8.0)
    hinted = one.add_hinted(plain[0], 0)
    seen(one, hinted, 20, 30, 0.5)
    seen(one, plain[0], 24, 30, 0.5)
    for at in (20, 24):
        seen(other, plain[1], at, 30, 0.5)
    found = one.estimate(np.zeros((BINS, 2)), 1e3)
    expected = other.shares(np.zeros((BINS, 1)), 1e3)
    assert np.allclose(found.shares()[:, :1], expected)
    assert np.allclose(found.curves(np.array([hinted]))[1], expected)


@pytest.mark.parametrize("what", ["hints", "endings"])
def test_hints_and_endings_of_all_kinds_are_bounded(what: str) -> None:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    classes = Classes(table)
    draw = random.Random(1)
    for n in range(5000):
        facts: dict[str, Any] = {"ending": (draw.choice((7, 8, 9, n)),)}
        if what == "hints":
            facts = {"returns_after": draw.choice((float(2 ** (n % 40)), str(n), str(n % 9)))}
        facts |= {"keep_seconds": draw.random() * 1e6} if n % 3 else {}
        ending = classes.ending(
            RequestInfo(draw.randrange(900), None, str(n % 20), draw.randrange(-9, 9), **facts)
        )
        classes.fresh(draw.randrange(50_000), ending)
        classes.after(classes.reused(draw.randrange(2, 99), draw.random() * 1e4), ending)
    assert len(classes.endings) <= 2 * 512 + 140
    assert len(table) == len(classes) <= 768 + len(FAMILIES) * (len(SPANS) + 1)


def test_ages_count_from_the_use() -> None:
    cache = new()

    def used(at: int | None = None) -> float:
        return sum(
            sum(each.used if at is None else [each.used[at]]) for each in order_of(cache).snapshot().classes
        )

    for again in (False, True):  # of what is new, and of what was found
        before = used()
        name = object()
        cache.match_prefix([1] * 10, name)
        cache.insert([1] * 10, request=name)
        use = order_of(cache).snapshot().now
        cache.clock.advance(cache.clock.now + 100.0)
        ask(cache, [2 + again] * 5)  # tells the order the time
        end = order_of(cache).snapshot().now
        cache.finish(name, RequestInfo(output_tokens=10))
        cache.clock.advance(cache.clock.now + 10.0)
        record = cache.match_prefix([1] * 10, object()).node
        assert record.last_use == cache.clock.now
        assert used() - before == 10 + 10 * again
        now = order_of(cache).snapshot().now  # by the clock of ages
        assert use < end < now
        assert age_bin(now - use) != age_bin(now - end)
        assert used(age_bin(now - use)) >= 10


@pytest.mark.parametrize("late", [True, False])
def test_what_a_long_request_used_is_as_old_as_its_use(late: bool) -> None:
    """As under LRU, by which it starts: a request that ends late does not make it young."""
    cache = new()
    long, short = [1] * 10, [2] * 10
    node = cache.insert(long, request="long").node
    cache.lock(node)
    if late:
        cache.clock.advance(20.0)
    ask(cache, short)  # used after the long request began, and over before that ends
    cache.clock.advance(100.0)
    ask(cache, [3] * 5)
    cache.unlock(node)
    cache.finish("long", RequestInfo(output_tokens=900))
    victim = order_of(cache).next_victim("kv")
    assert victim is not None
    assert victim.record is node


def test_cohorts_are_of_one_age_whenever_their_requests_end() -> None:
    cache = new(refresh=1)
    order = order_of(cache)
    times = [1.0, 2.0, 40.0, 90.0, 99.0, 99.9]
    for name, now in enumerate(times):
        cache.clock.advance(now)
        cache.insert([name] * 10, request=name)
    cache.clock.advance(100.0)
    ask(cache, [99] * 5)
    for name in (5, 0, 3, 1, 4, 2):
        cache.finish(name, RequestInfo(output_tokens=10))

    def cohorts() -> dict[float, CohortSnapshot]:
        known = {cohort.number: cohort for cohort in order.snapshot().cohorts}
        found = {}
        for node in nodes_of(cache):
            number = order.history(node)[0].cohort
            assert number is not None
            found[node.last_use] = known[number]
        return found

    before = cohorts()
    for now in times:
        assert before[now].first <= now <= before[now].last
    assert before[1.0] is before[2.0]  # about as old
    assert len({before[now].number for now in times}) == 5
    order.next_victim("kv")
    after = cohorts()
    assert order.snapshot().classes[0].shares, "an estimate has merged cohorts"
    for now in times:
        assert after[now].first <= now <= after[now].last


def test_leaves_are_told_apart_by_age_before_any_victim_is_asked_for() -> None:
    cache = new(100_000)
    order = order_of(cache)
    for n in range(400):
        cache.clock.advance(float(n))
        ask(cache, [n] * 10)
    assert not order.intake.full
    old = [cohort for cohort in order.snapshot().cohorts if cohort.first < 200.0]
    assert len(old) >= 5
    for cohort in old:  # they merge once that makes no difference to their age
        assert cohort.last - cohort.first <= max(0.25 * (399.0 - cohort.last), 50.0)


def test_tells_what_it_has_learned() -> None:
    cache = new(300, refresh=5)
    for n, prompt in enumerate(stream(4, 400)):
        cache.clock.advance(float(n))
        ask(cache, prompt, output=n % 300)
    found = order_of(cache).snapshot()
    classes = found.classes
    assert len({each.name for each in classes}) == len(classes) > 5
    assert all(0 <= each.reused <= each.ended for each in classes)
    learned = [each for each in classes if each.shares]
    assert learned
    assert all(len(each.shares) == BINS and len(each.worth) == BINS + 1 for each in learned)
    assert sum(each.reused for each in classes) > 0
    verdict = found.against_lru
    assert verdict.gained + verdict.lost > 0
    assert (found.clock, found.now, found.requests) == ("seconds", 399.0, 400)
    assert (found.watched, found.gap) == (399.0, 399.0 / 400)
    assert (found.nodes, found.resident) == (cache.stats().nodes, sum(n.tokens for n in nodes_of(cache)))
    # All open intervals are at risk in their classes.
    assert sum(sum(each.at_risk) for each in classes) == sum(cohort.at_risk for cohort in found.cohorts) > 0


def test_a_look_at_it_changes_nothing() -> None:
    plain, watched = new(300, refresh=7), new(300, refresh=7)
    for n, prompt in enumerate(stream(8, 400)):
        assert ask(plain, prompt, output=n % 300) == ask(watched, prompt, output=n % 300)
        order_of(watched).snapshot()
    assert order_of(plain).snapshot() == order_of(watched).snapshot()
    assert plain.counters.evicted == watched.counters.evicted > 0


def test_a_node_trimmed_while_a_request_for_it_waits() -> None:
    cache = new(200)
    ask(cache, [1] * 50)
    ask(cache, [2] * 200)
    ask(cache, [1] * 50 + [3] * 50)  # of two histories: 50 tokens that returned, and new ones
    waiting = object()
    assert cache.match_prefix([1] * 50 + [3] * 50, waiting).matched_len == 100
    cache.evict(160)  # what is left of the other, the last part, and 10 tokens of the first
    assert node_at(cache, 0).tokens == 40
    cache.match_prefix([1] * 50 + [3] * 50, waiting)
    cache.insert([1] * 50 + [3] * 50, request=waiting)
    check_books(cache)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_wait_while_others_evict(seed: int) -> None:
    cache = new(200, refresh=7)
    draw = random.Random(seed)
    waiting: list[tuple[object, list[int]]] = []
    for n, prompt in enumerate(stream(seed, 1200)):
        name = object()
        cache.match_prefix(prompt, name)
        waiting.append((name, prompt))
        while len(waiting) > draw.randint(0, 5):
            first, tokens = waiting.pop(draw.randrange(len(waiting)))
            cache.match_prefix(tokens, first)
            cache.insert(tokens, request=first)
            cache.finish(first, RequestInfo(output_tokens=n % 30))
        if n % 100 == 0:
            check_books(cache)
    assert not cache._pool.fell_back
    check_structure(cache)


def rankings(cache: RadixCache, *, finish: bool, at_once: int = 1) -> tuple[int, int]:
    """How often a full cache ranks when requests end, and when victims are needed."""
    order = order_of(cache)
    ended = asked = 0
    waiting: list[tuple[object, list[int]]] = []
    for n, prompt in enumerate(stream(3, 600)):
        waiting.append((object(), [*prompt, n]))
        if len(waiting) < at_once:
            continue
        for name, tokens in waiting:
            cache.match_prefix(tokens, name)
            before = order.rank_at
            cache.insert(tokens, request=name)  # evicts
            asked += order.intake.full and order.rank_at != before
        for name, tokens in waiting:
            before = order.rank_at
            if finish:
                cache.finish(name, RequestInfo(output_tokens=len(tokens)))
            ended += order.rank_at != before
            if finish and order.intake.full:
                assert order.intake.ghosts.tokens <= 2.0 * 300
                assert not order.ranker.dirty
        waiting.clear()
    return ended, asked


def test_what_victims_need_is_done_when_requests_end() -> None:
    ended, asked = rankings(new(300, refresh=7, ghosts=2.0), finish=True)
    assert ended > 80
    assert asked == 1  # the first of all


def test_a_host_that_does_not_say_when_requests_end_has_fresh_rankings_too() -> None:
    ended, asked = rankings(new(300, refresh=7, ghosts=2.0), finish=False)
    assert ended == 0
    assert asked > 80


def test_rankings_do_not_wait_for_many_requests_to_end() -> None:
    ended, asked = rankings(new(300, refresh=7, ghosts=2.0), finish=True, at_once=40)
    assert ended >= 5
    assert asked >= 28  # twice and more in each forty


@pytest.mark.parametrize("gap", [0.5, 8.0])
def test_leaves_are_ranked_for_the_time_when_victims_are_needed(gap: float) -> None:
    cache = new(2000)
    order = order_of(cache)
    ahead = set()
    for n in range(800):
        cache.clock.advance(n * gap)
        before = order.rank_at
        ask(cache, [n % 150, n] * 5)
        if order.intake.full and order.rank_at != before and n > 400:
            after = order.rank_at - order.intake.requests
            requests = min(0.35 * (1 + after), 3.0)
            assert order.ranker.now - order.intake.now == pytest.approx(gap * requests, rel=0.01)
            ahead.add(after)
    assert max(ahead) > 8


@pytest.mark.parametrize("seed", range(4))
def test_when_a_use_is_worked_off_changes_nothing(seed: int) -> None:
    draw = random.Random(seed)
    later, at_once = new(300, refresh=7), new(300, refresh=7)
    order = order_of(at_once)

    def use(record: NodeRecord) -> None:
        order.use(record)
        order.intake.catch_up()

    at_once._pool._use = use
    running: list[tuple[object, list[int]]] = []
    looked = waited = 0
    for prompt in stream(seed, 400):
        running.append((object(), prompt))
        for cache in (later, at_once):
            cache.match_prefix(prompt, running[-1][0])
        waited += bool(order_of(later).intake.pending)
        if draw.random() < 0.5:
            continue  # another one begins before this one goes on
        name, tokens = running.pop(draw.randrange(len(running)))
        for cache in (later, at_once):
            cache.insert(tokens, request=name)
            cache.finish(name, RequestInfo(output_tokens=len(tokens)))
        victims = [cache.evict(20).victims for cache in (later, at_once)]
        assert victims[0] == victims[1]
        looked += len(victims[0])
    assert looked > 100
    assert waited > 100
    # The shadow looks at the cache's records when it evicts, and others may have touched them meanwhile.
    found = order.snapshot()
    assert replace(order_of(later).snapshot(), against_lru=found.against_lru) == found


def test_uses_that_nothing_follows_are_worked_off() -> None:
    cache = new()
    ask(cache, [1, 2, 3])
    for _ in range(1000):
        cache.match_prefix([1, 2, 3])
    intake = order_of(cache).intake
    assert len(intake.pending) <= 257
    before = intake.requests
    assert order_of(cache).snapshot().requests > before
    assert not intake.pending


def test_of_states_of_which_nothing_is_known_the_older_is_worth_less() -> None:
    """However little: within a bin of age sizes would decide, and bins are half as long as the age."""
    learner = StateLearner(5.0)
    learner.classify(record := NodeRecord(1, None, 16, 0), learner.make(record))
    worths = [learner.worth_at(0, age) for age in range(1, 500)]
    assert all(older < newer for newer, older in itertools.pairwise(worths))
