"""Random operations over all component mixes: SGLang's own check after each, no lost slot at the end."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from costcache.plugins import get_plugins
from tests.sglang import hicache
from tests.sglang.fuzz import Fuzz
from tests.sglang.mirror import check_records
from tests.sglang.pools import Shape, cost_cache
from tests.sglang.serving import Server
from tests.sglang.test_rustcore import check_records as check_rust_records

SESSIONS = {"enable_session_radix_cache": True}
EVENTS = {"enable_kv_cache_events": True}

MIXES: dict[str, Shape] = {
    **{
        f"{kind}-{page}": Shape(kind, page)
        for kind in ("mha", "mla", "mamba", "mla_mamba", "swa")
        for page in (1, 64)
    },
    **{f"rust-{page}": Shape("mha", page, core="rust") for page in (1, 64)},
    **{f"eagle-{page}": Shape("mha", page, params={"is_eagle": True}) for page in (1, 64)},
    **{f"sessions-{kind}": Shape(kind, params=SESSIONS) for kind in ("mha", "mamba", "swa")},
    **{f"events-{kind}": Shape(kind, params=EVENTS) for kind in ("mha", "mamba", "swa")},
    **{
        f"{write}-{kind}": Shape(kind, hicache=write)
        for write in ("write_through", "write_through_selective", "write_back")
        for kind in ("mha", "mla", "mamba", "swa")
    },
}
POLICIES = ("hazard", "lru", "slru", "priority", "mru")


def run(name: str, steps: int, seed: int, policy: str, **settings: Any) -> Fuzz:
    shape = MIXES[name]
    check = check_records
    if shape.core == "rust":
        check = check_rust_records
        policy = policy if get_plugins().policies()[policy].leaves_only else "lru"
    shape = Shape(**{**shape.__dict__, "tokens": 2048, "states": 20, "window_tokens": 1024})
    fuzz = Fuzz(
        Server(cost_cache(shape, policy=policy, **settings), shape), seed, sessions="sessions" in name
    )
    for _ in range(steps):
        fuzz.step()
        check(fuzz.server.cache)
        if "events" in name:
            fuzz.server.cache.take_events()
    fuzz.end()
    check(fuzz.server.cache)
    assert fuzz.server.cache.pools.kv.counters.evictions
    assert not any(pool.fallbacks for pool in fuzz.server.cache.pools.by_name.values())
    return fuzz


@pytest.mark.parametrize("name", MIXES)
def test_random_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if MIXES[name].hicache:
        hicache.patch(monkeypatch)
    seed = list(MIXES).index(name)
    run(name, 150, seed, POLICIES[seed % len(POLICIES)])


def test_both_parts_of_a_split_window_are_evictable() -> None:
    shape = Shape("swa", tokens=4096, window_tokens=4096)
    server = Server(cost_cache(shape), shape)
    server.serve(range(64))
    server.serve([*range(30), *range(500, 560)])  # splits the window's node
    freed = server.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=10_000)).swa_num_tokens_evicted
    assert freed == 64 + 60
    assert not server.cache.pools.by_name["swa"].live
    check_records(server.cache)
