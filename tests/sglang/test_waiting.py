"""Prefixes of waiting requests outlast others, on both tree cores."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import (
    WAITING_PREFIX_REFRESH_INTERVAL,
    SchedulePolicy,
)
from sglang.srt.plugins import load_plugins

from tests.sglang.pools import Shape, cost_cache
from tests.sglang.serving import Server

CORES = ("python", "rust")


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_plugins()


def wait_through(server: Server, *, told: bool, scheduling: str = "fcfs") -> int:
    """Tokens that a request finds which waits while twelve others go past it."""
    server.serve(range(300))
    for n in range(1, 4):  # three more fill the pool
        server.serve(range(1000 * n, 1000 * n + 200))
    waiting = server.request(range(300))
    policy = SchedulePolicy(scheduling, server.cache, False, False, False)
    for n in range(10, 22):
        if told:
            for _ in range(WAITING_PREFIX_REFRESH_INTERVAL):  # the scheduler's rounds between two requests
                policy.calc_priority([waiting])
        server.serve(range(1000 * n, 1000 * n + 200))
    found = server.start(waiting)
    server.finish(waiting)
    assert server.cache.pools.kv.fallbacks == 0
    server.check()
    return found


def server_of(core: Any, **settings: Any) -> Server:
    shape = Shape("mha", 1, tokens=1000, core=core)
    return Server(cost_cache(shape, policy="hazard", trim="off", **settings), shape)


@pytest.mark.parametrize("scheduling", ["fcfs", "lpm"])
@pytest.mark.parametrize("core", CORES)
def test_a_waiting_requests_prefix_is_kept(core: Any, scheduling: str) -> None:
    assert wait_through(server_of(core), told=False) == 0
    assert wait_through(server_of(core), told=True, scheduling=scheduling) == 299


@pytest.mark.parametrize("core", CORES)
def test_it_is_evicted_when_nothing_else_is_left(core: Any) -> None:
    server = server_of(core)
    server.serve(range(300))
    policy = SchedulePolicy("fcfs", server.cache, False, False, False)
    policy.calc_priority([server.request(range(300))])
    server.drain()  # all of it can be evicted


@pytest.mark.parametrize("core", CORES)
def test_it_is_evicted_once_no_request_has_waited_for_a_while(core: Any) -> None:
    server = server_of(core, policy_settings={"refresh": 4})
    server.serve(range(300))
    policy = SchedulePolicy("fcfs", server.cache, False, False, False)
    policy.calc_priority([server.request(range(300))])  # it leaves without being served
    for n in range(10, 30):
        server.serve(range(1000 * n, 1000 * n + 200))
    assert server.serve(range(300)) == 0
    server.drain()
