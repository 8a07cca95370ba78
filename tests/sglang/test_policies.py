"""Every built-in policy serves inside SGLang, and frees what is asked for without a fallback."""

from __future__ import annotations

import random
import re

import pytest

from costcache.errors import PluginError
from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache.policies import BUILTIN
from tests.sglang.pools import CONFIG, CONFIGS, KINDS, Kind, Shape, bind, cost_cache
from tests.sglang.serving import Server


@pytest.mark.parametrize("kind", KINDS)
def test_it_accepts_and_refuses_what_every_host_does(kind: Kind) -> None:
    """The rule of models and policies is one: the generic caches and the simulator ask it too."""
    served = 0
    for policy in get_plugins().policies():
        shape = Shape(kind)
        model = ModelSpec.from_config(CONFIGS[kind] | CONFIG)
        refusal = get_plugins().refusal(policy, model)
        if refusal is None:
            cache = cost_cache(shape, policy=policy)
            assert cache.pools.kv.policy == policy
            served += 1
        else:
            with pytest.raises(PluginError, match=re.escape(refusal)):
                bind(shape, policy=policy)
    assert 0 < served < len(get_plugins().policies())


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("policy", BUILTIN)
def test_it_serves_under_pressure(policy: str, page_size: int) -> None:
    shape = Shape("mha", page_size, tokens=64 * page_size)
    cache = cost_cache(shape, policy=policy)
    server = Server(cache, shape)
    rng = random.Random(policy)
    heads = [[rng.randrange(1000) for _ in range(10 * page_size)] for _ in range(6)]
    for _ in range(35):
        tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 8 * page_size))]
        server.serve([*rng.choice(heads), *tail], [rng.randrange(1000) for _ in range(rng.choice((1, 5)))])
    server.check()
    counters = cache.pools.kv.counters
    assert counters.evictions
    assert counters.short == 0
    assert cache.pools.kv.fallbacks == 0
    assert cache.pools.kv.policy == policy
    server.drain()
