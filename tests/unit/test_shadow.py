"""The shadow of LRU against LRU itself, and what it is for: stepping in."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from costcache import Deployment, ModelSpec, RadixCache, RequestInfo, Settings
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.depths import Depths
from costcache.policies.hazard.judge import Judge
from costcache.policies.hazard.learner import Learner
from costcache.policies.hazard.shadow import ShadowLRU
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings, serve
from costcache.sim.workloads import generate, workload_settings
from tests.property.kit import MODEL, manager

PLUGINS = manager()


def ask(cache: RadixCache, tokens: list[int], output: int = 10) -> int:
    """One request, whole; how many tokens it found."""
    name = object()
    found = cache.match_prefix(tokens, name).matched_len
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo(output_tokens=output))
    return found


def of(cache: RadixCache) -> Hazard:
    order = cache._pool.order
    assert isinstance(order, Hazard)
    return order


def remembered(shadow: ShadowLRU) -> int:
    """Tokens that were evicted and that LRU may hold."""
    return sum(parts[0][1] - parts[-1][0] for parts in shadow.remnants.values())


def evict(cache: RadixCache, order: Hazard, prompt: int) -> None:
    """Evict a prompt of one token repeated, whatever the policy thinks of it."""
    root = cache._tree.root((None, None))
    node = next(each for each in root.children.values() if int.from_bytes(each.edge[:8], "little") == prompt)
    order.intake.catch_up()
    cache._tree.remove(node)
    cache._collect()
    order.learner.shadow.room = cache.pool_size  # nobody needed the room


def test_a_prompt_that_lru_would_hold_is_lost() -> None:
    cache = RadixCache(MODEL, 100, policy="hazard", plugins=PLUGINS)
    ask(cache, [1] * 40)
    ask(cache, [2] * 40)
    evict(cache, of(cache), 1)
    shadow = of(cache).learner.shadow
    assert remembered(shadow) == 40
    shadow.room = 70  # LRU evicts 10 of the older prompt
    ask(cache, [1] * 30)
    assert (shadow.gained, shadow.lost, shadow.tokens) == (0, 30, 70)


@pytest.mark.parametrize("shared", [0, 10, 25, 40])
def test_a_prompt_that_shares_a_part_of_an_evicted_one_is_told_apart(shared: int) -> None:
    cache = RadixCache(MODEL, 200, policy="hazard", plugins=PLUGINS)
    ask(cache, [1] * 40)
    evict(cache, of(cache), 1)
    account = of(cache).against_lru
    ask(cache, [1] * shared + [2] * 10)
    assert account().lost == shared
    ask(cache, [1] * 40 + [3] * 5)  # the rest of the first is known still
    assert (account().gained, account().lost) == (0, 40)


def test_remnants_are_bounded_by_what_lru_holds() -> None:
    cache = RadixCache(MODEL, 500, policy="hazard", plugins=PLUGINS, policy_settings={"refresh": 5})
    draw = random.Random(4)
    shadow = of(cache).learner.shadow
    for n in range(3000):
        cache.clock.advance(float(n))
        prompt = int(draw.paretovariate(0.5))
        ask(cache, [prompt] * draw.randint(1, 30), output=prompt % 700)
        assert remembered(shadow) <= 3 * 500 + 30
        assert len(shadow._line) + len(shadow._heap) <= 2 * 500 + 1024 + 1
        assert shadow.tokens <= 500


def told(judge: Judge, regrets: Iterable[float], asked: float = 100.0) -> int | None:
    """Feed a judge; the request at which LRU stepped in."""
    for number, regret in enumerate(regrets, 1):
        judge.add(regret, asked)
        if judge.behind:
            return number
    return None


@pytest.mark.parametrize("size", [10.0, 100.0])
def test_false_step_ins_are_as_rare_as_is_said(size: float) -> None:
    """Fair differences, large and small: the worst that the hypothesis allows, but for its tolerance."""
    draw = random.Random(6)
    doubt = 0.2
    fell = sum(
        told(Judge(doubt), (draw.choice((-size, 0.0, size)) for _ in range(4000))) is not None
        for _ in range(50)
    )
    assert fell <= 50 * doubt


def test_a_loss_is_noticed_sooner_the_larger_it_is() -> None:
    draw = random.Random(7)
    delays = []
    for chance in (1.0, 0.5, 0.3, 0.1):
        delay = told(Judge(0.01), (100.0 if draw.random() < chance else 0.0 for _ in range(3000)))
        assert delay is not None
        delays.append(delay)
    assert delays == sorted(delays)
    assert delays[0] <= 50
    assert delays[-1] < 1500


def test_what_came_before_a_change_does_not_delay_the_verdict() -> None:
    draw = random.Random(8)

    def losses() -> Iterable[float]:
        return (draw.choice((100.0, 0.0, 0.0, -20.0)) for _ in range(2000))

    at_once, later = Judge(0.01), Judge(0.01)
    first = told(at_once, losses())
    assert told(later, [-80.0] * 5000) is None
    assert first is not None
    assert (told(later, losses()) or 2000) < 2 * first


def test_a_loss_within_the_tolerance_has_no_consequence() -> None:
    assert told(Judge(0.01), [0.29] * 50_000) is None


def test_lru_is_in_force_as_long_as_it_took_and_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    judge = Judge(0.01)
    pauses = []
    with caplog.at_level("INFO", "costcache"):
        for _ in range(3):
            assert told(judge, [40.0] * 1000) is not None
            began = judge.requests
            assert judge.turned
            assert judge.regret == pytest.approx(judge.run * (40.0 - 0.3))
            while judge.behind:
                judge.add(0.0, 100.0)
            pauses.append(judge.requests - began)
    runs = judge.run
    assert pauses == [max(50, runs), 2 * max(50, runs), 4 * max(50, runs)]
    assert judge.falls == 3
    assert len(caplog.messages) == 6
    assert caplog.messages[0].startswith(f"hazard: LRU steps in after request {runs}, for {pauses[0]} more")
    told(judge, [0.0] * 5000)
    assert told(judge, [40.0] * 1000) is not None
    assert judge.until - judge.requests == max(50, judge.run)  # it has held its own for long


@pytest.mark.parametrize(
    ("requests", "run", "before", "kept"),
    [
        (100, 100, 0.0, 1.0),  # behind from the start: there is nothing older to forget
        (3000, 150, 0.0, 0.1),
        (100, 100, 1900.0, 0.1),  # tables that mislead
    ],
)
def test_what_is_forgotten_follows_the_evidence(requests: int, run: int, before: float, kept: float) -> None:
    learner = Learner(Depths(), 5.0, 1.0, 0.01)
    learner.table.add_class(0)
    learner.table.used[0] = 1000.0
    learner.watched_before = before
    judge = learner.judge
    judge.requests, judge.run, judge.behind, judge.turned = requests, run, True, True
    learner.estimate(float(requests), requests + before)
    assert learner.table.used[0] == pytest.approx(1000.0 * kept)
    assert not judge.turned
    learner.estimate(float(requests), requests + before)
    assert learner.table.used[0] == pytest.approx(1000.0 * kept)  # once


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
    account = order.snapshot().against_lru
    assert abs(account.gained - account.lost - (found - by_lru)) < 0.1 * point
    assert not account.falls
