"""Every policy of the hostile list serves on: in the generic caches and in replays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from costcache import RadixCache
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies.states import StateOrder
from costcache.records import NodeRecord, RequestInfo
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from tests.hostile import HOSTILE, KEYS, falls_back, plugins_with, settings_for
from tests.property.kit import check_structure, drain, manager, policy
from tests.unit.test_serving import trace_of
from tests.unit.test_statecache import cache_of, serve

LIMIT = 20.0  # seconds; none takes one


def stream(cache: Any, seed: int, steps: int = 80) -> None:
    """Requests under pressure, with locks, splits and waiting requests."""
    rng = random.Random(seed)
    held = []
    for step in range(steps):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        found = cache.match_prefix(prompt, step)
        cache.refresh(found.node)
        cache.lock(found.node)
        held.append(found.node)
        cache.insert(prompt, request=step)
        cache.finish(step, RequestInfo(output_tokens=1))
        if len(held) > 3:
            cache.unlock(held.pop(0))
        evictable = cache.evictable
        eviction = cache.evict(rng.randrange(8))
        assert eviction.freed >= min(eviction.shortfall, evictable)
        check_structure(cache)
    for node in held:
        cache.unlock(node)
    check_structure(cache)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_generic_cache_serves_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    began = time.perf_counter()
    cache = RadixCache("llama-3-8b", 60, policy="hostile", plugins=plugins_with(name), **settings_for(name))
    for seed in range(3):
        stream(cache, seed)
    drain(cache)
    assert cache.cached == 0
    assert time.perf_counter() - began < LIMIT
    errors = [r.getMessage() for r in caplog.records if "is dropped for 'lru'" in r.getMessage()]
    assert len(errors) == cache.stats().fallbacks <= 1
    assert falls_back(name) in {None, cache.policy == "lru"}


@pytest.mark.parametrize("name", KEYS)
def test_a_cache_of_states_serves_on(name: str) -> None:
    plugins = plugins_with(name)
    cache = cache_of(6, 24, "hostile", plugins=plugins, **settings_for(name))
    rng = random.Random(1)
    for _ in range(100):
        serve(cache, *(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
    assert falls_back(name) in {None, cache.policy == "lru"}
    freed = cache.evict(cache.cached).freed
    assert (cache.cached, freed > 0) == (0, True)


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_replay_serves_on_and_says_so(name: str, serving: bool) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(4)] * 24 + [rng.randrange(99)] * rng.randrange(40) for _ in range(60)]
    trace = trace_of(prompts, range(60), [3] * 60)
    model = ModelSpec.preset("llama-3-8b")
    simulator = Simulator(trace, model, Deployment(page_size=1), plugins=plugins_with(name))
    settings = Settings(policy="hostile", **settings_for(name))
    run = simulator.run(settings, 160, serving=ServingSettings(concurrency=2) if serving else None)
    sleeps = name == "sleep before a victim"  # a result must not depend on the machine's speed
    assert (False if sleeps else falls_back(name)) in {None, run.fallbacks == 1}
    assert run.policy_in_force == ("lru" if run.fallbacks else "hostile")
    assert run.evictions


SCORES: dict[str, Callable[[NodeRecord], Any]] = {
    "NaN": lambda record: float("nan"),
    "NaN in a tuple": lambda record: (float("nan"), record.serial),
    "a random number": lambda record: random.random(),
    "a clock": lambda record: time.perf_counter_ns(),
    "words": lambda record: str(record.serial) if record.serial % 2 else record.serial,
}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("period", [0, 5])
@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_does_not_hold_still_stalls_no_cache_of_states(
    name: str, period: int, joint: bool
) -> None:
    class Restless(StateOrder):
        def __init__(self) -> None:
            self.period = period
            super().__init__()
            self.score = SCORES[name]  # type: ignore[method-assign, assignment] # a function without self

    plugins = manager(own=policy("tested", Restless, sees=frozenset({"states"})))
    cache = cache_of(6, 24, "tested", joint=joint, plugins=plugins)
    rng = random.Random(3)
    for _ in range(100):
        serve(cache, *(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
    assert cache.policy == "lru"
    cache.evict(1 << 40)
    assert (cache.cached, cache.states) == (0, 0)
