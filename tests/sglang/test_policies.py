"""Every built-in policy serves inside SGLang, and frees what is asked for without a fallback."""

from __future__ import annotations

import random

import pytest

from costcache.errors import PluginError, SettingsError
from costcache.policies import BUILTIN, FOR_STATES
from tests.sglang.pools import Kind, Shape, cost_cache
from tests.sglang.serving import Server


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("policy", BUILTIN)
def test_it_serves_under_pressure(policy: str, page_size: int) -> None:
    shape = Shape("mha", page_size, tokens=64 * page_size)
    cache = cost_cache(shape, policy=policy)
    server = Server(cache, shape)
    rng = random.Random(policy)
    heads = [[rng.randrange(1000) for _ in range(10 * page_size)] for _ in range(6)]
    for _ in range(60):
        tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 8 * page_size))]
        server.serve([*rng.choice(heads), *tail], [rng.randrange(1000) for _ in range(rng.choice((1, 5)))])
    server.check()
    counters = cache.pools.kv.counters
    assert counters.evictions
    assert counters.short == 0
    assert cache.pools.kv.fallbacks == 0
    assert cache.pools.kv.guard.name == policy
    server.drain()


@pytest.mark.parametrize("policy", [*FOR_STATES, "seglen"])
@pytest.mark.parametrize(("kind", "error"), [("mha", PluginError), ("mamba", SettingsError)])
def test_orders_of_states_are_refused_at_the_start(policy: str, kind: Kind, error: type[Exception]) -> None:
    why = "this model has none" if kind == "mha" else "each pool has an order of its own"
    with pytest.raises(error, match=f"{policy}.*{why}") as refused:
        cost_cache(Shape(kind), policy=policy)
    assert "\n" not in str(refused.value)
