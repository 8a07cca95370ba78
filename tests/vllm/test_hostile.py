"""Every policy of the hostile list serves on under vLLM's real classes."""

from __future__ import annotations

import logging
import time

import pytest

from tests.hostile import HOSTILE, falls_back, plugins_with, settings_for
from tests.vllm.fuzz import Fuzz
from tests.vllm.serving import Server, bind, manager

LIMIT = 60.0  # seconds; each takes one or two


@pytest.mark.parametrize("name", HOSTILE)
def test_it_serves_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    began = time.perf_counter()
    server = Server(manager(150), bind("hostile", plugins=plugins_with(name), **settings_for(name)))
    fuzz = Fuzz(server, seed=3)
    for step in range(250):
        fuzz.step()
        if step % 25 == 0:
            server.check()
            assert len(list(server.pool.costcache.runs.ranked())) <= 150
    fuzz.close()
    server.check()
    assert len(server.free_list()) == 150
    pool = server.pool.costcache.runs.pool
    assert pool.policy == ("lru" if pool.fallbacks else "hostile")
    assert falls_back(name) in {None, pool.fallbacks == 1}
    assert time.perf_counter() - began < LIMIT
