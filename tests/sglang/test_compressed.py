"""DeepSeek-V4 on its real pools: latents follow the slots of the full context, windows are evicted apart."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.sglang.build import refuse_pools
from costcache.sglang.readback import describe_pools, pool_bytes
from tests.sglang.fuzz import Fuzz
from tests.sglang.mirror import check_records
from tests.sglang.pools import Shape, bind, cost_cache, init_params, publish_args
from tests.sglang.serving import Server

SHAPE = Shape("v4", 256, tokens=256 * 24, window_tokens=256 * 16)


def test_the_pools_hold_what_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    publish_args(SHAPE)
    params, binding = init_params(SHAPE), bind(SHAPE)
    # Pages are padded to 576 bytes: 64 rows of 584 take 37,440; 2 take 1,728; 256 take 149,760.
    assert pool_bytes(params) == {"kv": 37_440 / 256 + 132 / 4 + 1_728 / 256, "swa": 3 * 585}
    assert (binding.cost.token.kv_bytes, binding.cost.token.swa_bytes) == (186, 3 * 585)
    assert "pool 'kv' (cost model: 186)" in describe_pools(params, binding)
    assert not caplog.records


@pytest.mark.parametrize("policy", ["lru", "hazard", "slru", "priority", "mru"])
def test_random_operations(policy: str) -> None:
    fuzz = Fuzz(Server(cost_cache(SHAPE, policy=policy), SHAPE), 7)
    for _ in range(200):
        fuzz.step()
        check_records(fuzz.server.cache)
    fuzz.end()
    check_records(fuzz.server.cache)
    assert fuzz.server.cache.pools.kv.counters.evictions
    assert not any(pool.fallbacks for pool in fuzz.server.cache.pools.by_name.values())


def test_reuse_is_that_of_ordinary_windows() -> None:
    """Pages of 256 and prompts four times as long: the same victims as those of windows in pages of 64."""
    found = [reuse(SHAPE, 256), reuse(Shape("swa", 64, tokens=64 * 24, window_tokens=64 * 16), 64)]
    assert sum(found[1])
    assert [pages // 256 for pages in found[0]] == [pages // 64 for pages in found[1]]


def reuse(shape: Shape, page: int) -> list[int]:
    """Cached tokens of each of 120 requests."""
    server = Server(cost_cache(shape), shape)
    rng = random.Random(3)
    cached = []
    for _ in range(120):
        start, pages = rng.randrange(12) * 3000, rng.choice((1, 2, 4))
        cached.append(server.serve(range(start, start + pages * page + page // 4), output=[1, 2]))
    assert server.cache.pools.kv.counters.evictions
    return cached


@pytest.mark.parametrize(
    ("host_tier", "ring", "window", "words"),
    [
        (True, False, None, "host tier. Drop --enable-hierarchical-cache"),
        (False, True, None, "rings of windows per request have not been tried"),
        (False, False, object(), "windows per request have not been tried"),
    ],
)
def test_pools_that_have_not_been_tried_are_refused(
    host_tier: bool, ring: bool, window: Any, words: str
) -> None:
    pool = SimpleNamespace(request_window=window)
    allocator = SimpleNamespace(swa_req_ring=ring, get_kvcache=lambda: pool)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    with pytest.raises(SettingsError, match=words):
        refuse_pools(ModelSpec.preset("deepseek-v4-flash"), params, host_tier=host_tier)
    refuse_pools(ModelSpec.preset("gemma-4-31b"), params, host_tier=host_tier)
