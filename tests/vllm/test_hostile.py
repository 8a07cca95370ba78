"""Every policy of the hostile list serves on under vLLM's real classes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from costcache.vllm import build
from tests.hostile import HOSTILE, falls_back, plugins_with, settings_for
from tests.vllm.ends import full, mixed, window
from tests.vllm.fuzz import Fuzz
from tests.vllm.serving import Server, bind, manager
from tests.vllm.test_offload import misuse
from tests.vllm.tier import check, ours

LIMIT = 60.0  # seconds; each takes one or two
MANAGERS: dict[str, Callable[[], Any]] = {
    "one group": lambda: manager(150),
    "windows": lambda: mixed(300, full(), window(64)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("model", MANAGERS)
def test_it_serves_on(model: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    began = time.perf_counter()
    server = Server(MANAGERS[model](), bind("hostile", plugins=plugins_with(name), **settings_for(name)))
    blocks = len(server.free_list())
    fuzz = Fuzz(server, seed=3)
    for step in range(250):
        fuzz.step()
        if step % 25 == 0:
            server.check()
            assert len(list(server.pool.costcache.runs.ranked())) <= blocks
    fuzz.close()
    server.check()
    assert len(server.free_list()) == blocks
    pool = server.pool.costcache.runs.pool
    assert pool.policy == ("lru" if pool.fallbacks else "hostile")
    assert falls_back(name) in {None, pool.fallbacks == 1}
    assert time.perf_counter() - began < LIMIT


@pytest.mark.parametrize("name", HOSTILE)
def test_it_serves_on_in_the_offload_tier(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    own, plugins = build.bind, plugins_with(name)
    monkeypatch.setattr(build, "bind", lambda *args: own(*args, plugins=plugins))
    tier = ours(40, "hostile", settings=settings_for(name))
    began = time.perf_counter()
    misuse(tier, 40, seed=3, steps=1500, clears=False)  # a new order would come with a cleared tier
    check(tier)
    assert not hasattr(tier._policy, "lru"), "nothing of ours failed"
    pool = tier._policy.chunks.pool
    assert pool.policy == ("lru" if pool.fallbacks else "hostile")
    assert falls_back(name) in {None, pool.fallbacks == 1}
    assert time.perf_counter() - began < LIMIT
