"""Streams on which a comparison with LRU that is not exact, or a verdict in haste, costs hits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import accumulate

import pytest

from costcache import RadixCache, RequestInfo
from costcache.policies.hazard import Hazard
from tests.property.kit import MODEL, manager

PLUGINS = manager()
PAGE = 16
Prompt = list[int]


def new(pages: int, policy: str = "hazard", **settings: float) -> RadixCache:
    return RadixCache(MODEL, pages * PAGE, PAGE, policy=policy, plugins=PLUGINS, policy_settings=settings)


def ask(cache: RadixCache, name: object, prompt: Prompt, output: int = 100) -> int:
    """One request, whole, for a prompt of one number a page; how many pages it found."""
    tokens = [number for number in prompt for _ in range(PAGE)]
    found = cache.match_prefix(tokens, name).matched_len
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo(output_tokens=output))
    return found // PAGE


def served(cache: RadixCache, prompts: Iterable[Prompt]) -> list[int]:
    return [ask(cache, name, prompt) for name, prompt in enumerate(prompts)]


def order_of(cache: RadixCache) -> Hazard:
    order = cache._pool.order
    assert isinstance(order, Hazard)
    return order


def in_turn(count: int, requests: int, *, grows: bool, one_shots: float) -> Iterator[Prompt]:
    """So many prompts of 16 pages, one after the other, again and again."""
    draw, fresh = random.Random(count), 1_000_000
    prompts = [[1000 * number + page for page in range(16)] for number in range(count)]
    at = 0
    for _ in range(requests):
        if draw.random() < one_shots:
            fresh += 1000
            yield [fresh + page for page in range(16)]
            continue
        prompt = prompts[at % count]
        if grows and draw.random() < 0.05:
            prompt.append(1000 * (at % count) + len(prompt))
        yield list(prompt)
        at += 1


@pytest.mark.parametrize("count", [12, 16, 20, 24, 30, 40])
@pytest.mark.parametrize(("grows", "one_shots"), [(False, 0.0), (True, 0.0), (False, 0.2)])
def test_prompts_in_turn_that_do_not_quite_fit(count: int, grows: bool, one_shots: float) -> None:
    """LRU evicts each just before it is asked again, and finds nothing: nothing that it could do better."""
    stream = list(in_turn(count, 600, grows=grows, one_shots=one_shots))
    cache, lru = new(150), new(150, "lru")
    found, by_lru = served(cache, stream), served(lru, stream)
    account = order_of(cache).against_lru()
    assert (account.gained - account.lost) // PAGE == sum(found) - sum(by_lru)
    assert account.falls == 0
    best = 150 / (16 * count)  # what a part of them kept for good would find
    assert sum(by_lru) == 0
    assert share(found, stream, slice(count, 200)) > (0.15 if one_shots else 0.4) * best
    assert share(found, stream, slice(400, 600)) > 0.65 * best


def share(found: list[int], stream: list[Prompt], part: slice) -> float:
    """Share of the pages of some requests that was found."""
    return sum(found[part]) / sum(map(len, stream[part]))


def agents(seed: int, requests: int) -> Iterator[Prompt]:
    """Sessions that grow by one or two pages a step, from one of three system prompts."""
    draw = random.Random(seed)
    sessions: list[Prompt] = []
    fresh = 10_000
    for _ in range(requests):
        if len(sessions) < 12 or draw.random() < 0.03:
            kind = draw.randrange(3)
            sessions.append([1000 * kind + page for page in range(10 + kind)])
        at = min(int(draw.expovariate(0.3)), len(sessions) - 1)
        session = sessions[-1 - at]
        for _ in range(draw.randint(1, 2)):
            fresh += 1
            session.append(fresh)
        yield list(session)
        if len(session) > 90:
            sessions.remove(session)


@pytest.mark.parametrize("percent", [1, 2, 5])
@pytest.mark.parametrize("seed", range(2))
def test_the_account_of_paths_of_many_pieces_is_exact(seed: int, percent: int) -> None:
    stream = list(agents(seed, 800))
    distinct = len({page for prompt in stream for page in prompt})
    pages = max(20, distinct * percent // 100)
    cache, lru = new(pages, refresh=20), new(pages, "lru")
    found, by_lru = served(cache, stream), served(lru, stream)
    account = order_of(cache).against_lru()
    assert account.gained > 0
    assert account.gained - account.lost == PAGE * (sum(found) - sum(by_lru))


def few_shot(draw: random.Random, weights: list[float], requests: int, base: int = 0) -> Iterator[Prompt]:
    """Questions after one of many prompts, by popularity."""
    total = list(accumulate(weights))
    sizes = [4 + 3 * number % 13 for number in range(len(weights))]
    for n in range(requests):
        number = draw.choices(range(len(weights)), cum_weights=total)[0]
        fresh = 10_000_000 + base + n
        yield [base + 100 * number + page for page in range(sizes[number])] + [fresh]


ZIPF = [(number + 1) ** -0.7 for number in range(60)]


@pytest.mark.parametrize("seed", range(2))
def test_early_evidence_costs_no_variant_its_gain(seed: int) -> None:
    """Pools of about the same size find about as much: none is thrown back by a verdict in haste."""
    stream = list(few_shot(random.Random(seed), ZIPF, 400))
    rates, falls = [], 0
    for pages in range(40, 110, 4):
        cache = new(pages)
        rates.append(share(served(cache, stream), stream, slice(0, 400)))
        falls += order_of(cache).against_lru().falls
    assert falls == 0
    for before, rate, after in zip(rates, rates[1:], rates[2:], strict=False):
        assert rate > (before + after) / 2 - 0.015


def test_drift_keeps_the_gain_that_there_is_without_a_guard() -> None:
    """Popularity moves from one set of prompts to another one every 150 requests."""
    draw = random.Random(3)
    stream = [prompt for base in range(6) for prompt in few_shot(draw, ZIPF, 150, 1_000_000 * base)]
    found = {}
    for name, cache in {
        "lru": new(60, "lru"),
        "guarded": new(60),
        "alone": new(60, doubt=1e-300),
    }.items():
        found[name] = share(served(cache, stream), stream, slice(0, len(stream)))
    assert found["guarded"] >= found["lru"] + 0.9 * (found["alone"] - found["lru"])
