"""Every policy of the hostile list serves on inside SGLang's real classes."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.hostile import HOSTILE, KEYS, falls_back, plugins_with, settings_for
from tests.sglang import hicache
from tests.sglang.fuzz import Fuzz
from tests.sglang.pools import Kind, Shape, bind, cost_cache
from tests.sglang.serving import Server

STEPS = 90
LIMIT = 60.0  # seconds; each takes one or two

SMALL: dict[str, Any] = {"tokens": 2048, "states": 20, "window_tokens": 1024}
SHAPES = {
    "mha": Shape("mha", **SMALL),
    "swa": Shape("swa", **SMALL),
    "sessions": Shape("swa", params={"enable_session_radix_cache": True}, **SMALL),
    "host tier": Shape("mha", hicache="write_through", **SMALL),
    "host tier, windows": Shape("swa", hicache="write_back", **SMALL),
}
FOR_KEYS = {"rust": Shape("mha", core="rust", **SMALL), "mamba": Shape("mamba", **SMALL)}


def serve(shape: Shape, name: str) -> None:
    plugins = plugins_with(name)
    binding = bind(shape, plugins=plugins, policy="hostile", **settings_for(name))
    began = time.perf_counter()
    server = Server(cost_cache(shape, binding=binding), shape)
    fuzz = Fuzz(server, seed=5, sessions="enable_session_radix_cache" in shape.params)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end()
    assert time.perf_counter() - began < LIMIT
    pool = server.cache.pools.kv
    assert pool.fallbacks <= 1
    assert pool.policy == ("lru" if pool.fallbacks else "hostile")
    assert falls_back(name) in {None, pool.fallbacks == 1}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_serves_on(
    shape: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if SHAPES[shape].hicache:
        hicache.patch(monkeypatch)
    caplog.set_level(logging.CRITICAL)
    serve(SHAPES[shape], name)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("shape", FOR_KEYS)
def test_a_key_serves_on(shape: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    serve(FOR_KEYS[shape], name)


WALKS: list[tuple[Kind, str]] = [
    *[("mha", name) for name in HOSTILE],
    *[("swa", name) for name in HOSTILE],
    *[("mamba", name) for name in KEYS],
]


@pytest.mark.parametrize(("kind", "name"), WALKS)
def test_walks_that_stay_sglangs_serve_on(kind: Kind, name: str) -> None:
    """Where SGLang's own walk asks for each victim: pools that share memory, external reclaim."""
    shape = Shape(kind, **SMALL)
    cache = cost_cache(
        shape, binding=bind(shape, plugins=plugins_with(name), policy="hostile", **settings_for(name))
    )
    cache._shares_memory = True  # as under --enable-unified-memory
    server = Server(cache, shape)
    for start in range(0, 1200, 100):
        server.serve([*range(start, start + 100), *range(7)])
    for _ in range(30):
        cache.evict(
            EvictParams(
                num_tokens=40,
                swa_num_tokens=20 if kind == "swa" else 0,
                mamba_num=1 if kind == "mamba" else 0,
            )
        )
        cache.sanity_check()
    server.drain()
