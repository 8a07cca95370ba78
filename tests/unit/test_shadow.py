"""The shadow of LRU against LRU itself, and what it is for: stepping in."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from costcache import Deployment, ModelSpec, RadixCache, RequestInfo, Settings
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.shadow import ShadowLRU, Span
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings, serve
from costcache.sim.workloads import generate, workload_settings
from tests.property.kit import MODEL, manager

PLUGINS = manager()


@pytest.mark.parametrize("seed", range(3))
def test_tells_what_lru_would_have_found(seed: int) -> None:
    draw = random.Random(seed)
    shadow = ShadowLRU()
    spans: dict[int, Span] = {}
    lru: OrderedDict[int, None] = OrderedDict()
    wrong = 0
    for _ in range(3000):
        number = int(draw.paretovariate(0.6))
        by_lru = number in lru
        lru[number] = None
        lru.move_to_end(number)
        if len(lru) > 50:
            lru.popitem(last=False)
        before = shadow.lost
        spans[number] = shadow.release(shadow.use(spans.get(number), 1, found=False), 1)
        wrong += (shadow.lost > before) != by_lru
        shadow.end_request()
        shadow.end_span()
        shadow.fit(50)
    assert wrong == 0


@pytest.mark.parametrize("seed", range(3))
def test_tells_what_lru_would_have_found_where_requests_pin_what_they_use(seed: int) -> None:
    """Requests end in any order, and what they pin is evictable neither in LRU nor in the shadow."""
    draw = random.Random(seed)
    shadow = ShadowLRU()
    spans: dict[int, Span] = {}
    lru: OrderedDict[int, None] = OrderedDict()
    running: dict[int, None] = {}
    wrong = missed = 0
    for _ in range(3000):
        number = int(draw.paretovariate(0.6))
        locked, by_lru = number in running, number in lru
        lru[number] = running[number] = None
        lru.move_to_end(number)
        if len(lru) > 50:
            del lru[next(other for other in lru if other not in running)]
        before = shadow.lost
        spans[number] = shadow.use(spans.get(number), 1, found=False, released=not locked, locked=locked)
        wrong += (shadow.lost > before) != (by_lru)
        missed += not by_lru
        shadow.end_request()
        shadow.end_span()
        shadow.fit(50)
        if len(running) > 40:
            ends = draw.choice(list(running))
            del running[ends]
            spans[ends] = shadow.release(spans[ends], 1)
    assert missed > 300
    assert wrong <= 0.02 * missed  # what is released after its time is evicted next, in an order of its own


def test_a_span_that_is_evicted_in_part_counts_in_part() -> None:
    shadow = ShadowLRU()
    first = shadow.release(shadow.use(None, 100, found=False), 100)
    shadow.end_span()
    shadow.use(None, 100, found=False)
    shadow.fit(140)
    shadow.use(first, 50, found=True)
    assert (shadow.gained, shadow.lost) == (30, 0)  # 60 of the 100 have been evicted


def test_what_is_worth_more_weighs_more() -> None:
    shadow = ShadowLRU()
    for _ in range(20):  # more tokens are lost than gained, but those gained are worth more
        lost = shadow.release(shadow.use(None, 10, found=False), 10)
        shadow.use(lost, 10, found=False)
        evicted = Span()
        evicted.evicted = True
        shadow.use(evicted, 5, found=True, value=4.0)
        shadow.end_request()
    assert shadow.lost > shadow.gained > 0
    assert not shadow.judge()


def test_what_is_forgotten_takes_no_room() -> None:
    shadow = ShadowLRU()
    kept = shadow.release(shadow.use(None, 10, found=False), 10)
    shadow.end_span()
    other = shadow.release(shadow.use(None, 90, found=False), 90)
    shadow.forget(other, 90)
    shadow.forget(shadow.use(None, 90, found=False), 90, released=False)
    shadow.fit(50)
    shadow.use(kept, 10, found=False)
    assert shadow.lost == 10


def test_verdicts() -> None:
    shadow = ShadowLRU()
    for _ in range(20):
        span = shadow.release(shadow.use(None, 10, found=False), 10)
        shadow.use(span, 10, found=False)
        shadow.end_request()
    assert shadow.judge()
    assert shadow.behind
    assert [shadow.judge() for _ in range(8)] == [False] * 7 + [True]
    assert not shadow.behind
    assert shadow.falls == 1


class Turncoat:
    """Prompts with short answers come back after a while; those with long ones do not. Then the other way."""

    def __init__(self, policy: str) -> None:
        self.cache = RadixCache(MODEL, 4000, policy=policy, plugins=PLUGINS)
        self.draw = random.Random(1)
        self.number = 0
        self.waiting: list[int] = []

    def serve(self, requests: int, returning: int, other: int) -> float:
        """Share of the tokens that was found; answers of ``returning`` tokens bring a prompt back."""
        found = 0
        for _ in range(requests):
            self.number += 1
            self.cache.clock.advance(float(self.number))
            again = len(self.waiting) > 12
            if again:
                prompt, answer = self.waiting.pop(0), other
            else:
                prompt = self.number
                answer = returning if self.draw.random() < 0.5 else other
            found += self.cache.match_prefix([prompt] * 100, self.number).matched_len
            self.cache.insert([prompt] * 100, request=self.number)
            self.cache.finish(self.number, RequestInfo(output_tokens=answer))
            if answer == returning and not again:
                self.waiting.append(prompt)
        return found / (100 * requests)


def test_a_change_made_to_fool_it_is_noticed() -> None:
    hazard, lru = Turncoat("hazard"), Turncoat("lru")
    for regime in (hazard, lru):
        regime.serve(3000, returning=10, other=600)
    order = hazard.cache._pool.order
    assert isinstance(order, Hazard)
    falls = order.snapshot().against_lru.falls
    delay = 0
    worst = 0.0
    while order.snapshot().against_lru.falls == falls and delay < 3000:
        found, by_lru = (regime.serve(50, returning=600, other=10) for regime in (hazard, lru))
        worst = min(worst, found - by_lru)
        delay += 50
    assert worst < -0.1, "it was not fooled"
    assert delay <= 250
    later = [regime.serve(1500, returning=600, other=10) for regime in (hazard, lru)]
    assert later[0] > later[1] - 0.01


def test_a_busy_server_is_no_reason_to_step_in() -> None:
    """Most of the pool is locked, for LRU as well: it would not find more than it does."""
    trace = generate("agentic", workload_settings("agentic", {"requests": 1500}))
    simulator = Simulator(trace, ModelSpec.preset(MODEL), Deployment(page_size=16))
    tokens = trace.distinct_pages(16) // 10 * 16
    server = ServingSettings(rate=0.75)
    by_lru = int(simulator.outcome(Settings(policy="lru"), tokens, serving=server).matched.sum())
    tree = simulator._empty_tree(Settings(policy="hazard"), tokens)
    order = tree.pool.order
    assert isinstance(order, Hazard)
    found = int(serve(trace, simulator.keys, tree, simulator.prefill, server).matched.sum())
    point = trace.input_tokens.sum() / 100
    assert found > by_lru + 0.8 * point
    gained, lost, _, falls = order.snapshot().against_lru
    assert abs(gained - lost - (found - by_lru)) < 1.2 * point
    assert not falls
