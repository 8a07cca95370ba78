"""Our cache with SGLang's host tier: backups, demotions, reloads and the host's own evictions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tests.sglang import hicache
from tests.sglang.mirror import check_records
from tests.sglang.pools import Kind, Shape, cost_cache
from tests.sglang.serving import Server

WRITES = ("write_through", "write_through_selective", "write_back")
HOST_KINDS: tuple[Kind, ...] = ("mha", "mla", "mamba", "mla_mamba")


@pytest.fixture(autouse=True)
def _copies(monkeypatch: pytest.MonkeyPatch) -> None:
    hicache.patch(monkeypatch)


def make(
    kind: Kind = "mha", page_size: int = 1, write: str = "write_through", tokens: int = 1024, **settings: Any
) -> Server:
    shape = Shape(kind, page_size, tokens=tokens, states=20, hicache=write)
    return Server(cost_cache(shape, **settings), shape)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_kv_demoted_to_the_host_is_loaded_back(kind: Kind, write: str, page_size: int) -> None:
    server = make(kind, page_size, write)
    prompt = list(range(320))
    for _ in range(2):  # the selective policy writes at the second use
        server.serve(prompt, output=[5])
    prompt += [5, 6]
    for other in range(1, 5):
        server.serve(range(10_000 * other, 10_000 * other + 300))
        check_records(server.cache)
    found = server.match(prompt)
    assert found.host_hit_length + found.mamba_host_hit_length > 0
    assert server.serve(prompt) == (321 if page_size == 1 else 320)  # and every byte of it is right
    check_records(server.cache)
    server.check()


@pytest.mark.parametrize("policy", ["lru", "slru", "mru"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_pressure_on_both_tiers(kind: Kind, write: str, policy: str) -> None:
    server = make(kind, 1, write, policy=policy)
    rng = random.Random(2)
    for step in range(60):
        start = rng.randrange(12) * 1000
        server.serve([*range(start, start + rng.choice((70, 200, 400))), 90_000 + step], output=[1, 2])
        server.check()
        check_records(server.cache)
    pools = server.cache.pools.by_name
    assert pools["kv"].counters.evictions
    if kind in ("mha", "mla") and write != "write_through_selective":
        assert pools["host"].counters.evictions


def test_uses_and_times_move_with_the_kv() -> None:
    server = make()
    for _ in range(3):
        server.serve(range(300), output=[1])
    node: Any = server.cache.tree_core.node_by_id(server.match(range(299)).last_device_node)
    uses = node.kv.uses
    assert uses == 3
    server.cache.evict(EvictParams(num_tokens=10_000))
    assert node.kv is None
    assert (node.host.uses, node.host.is_evictable or node.host.locks) == (3, True)
    server.serve(range(300))
    node = server.cache.tree_core.node_by_id(node.id)
    assert node.host is None
    assert node.kv.uses == 4


def test_host_leaves_are_evicted_by_the_order() -> None:
    server = make(policy="lfu")
    for start, times in ((0, 3), (10_000, 1), (20_000, 2)):
        for _ in range(times):
            server.serve(range(start, start + 300))
    server.cache.evict(EvictParams(num_tokens=10_000))
    assert server.cache.evict_host(301, ComponentType.FULL) == 301
    assert server.match(range(10_000, 10_300)).host_hit_length == 0
    assert server.match(range(20_000, 20_300)).host_hit_length == 299
    assert server.match(range(300)).host_hit_length == 300
    check_records(server.cache)
    assert server.cache.evict_host(10_000, ComponentType.FULL) == 599
    assert not server.cache.pools.by_name["host"].live


def test_a_trimmed_leaf_demotes_its_tail() -> None:
    server = make()
    server.serve(range(600))
    server.cache.evict(EvictParams(num_tokens=100))
    found = server.match(range(600))
    assert (found.device_prefix_len, found.host_hit_length) == (500, 100)
    check_records(server.cache)
    assert server.serve([*range(600), 7]) == 600


def test_the_host_frees_the_shortfall_and_no_more() -> None:
    server = make(tokens=12_288 + 4096)
    server.serve(range(12_288))
    server.cache.evict(EvictParams(num_tokens=12_288))
    assert server.cache.evict_host(4096) == 4096
    assert server.match(range(12_288)).host_hit_length == 12_288 - 4096
    check_records(server.cache)
    # A pool's own reclaim is asked for the whole demand, though part of it is free.
    group = server.cache.host_pool_group
    before, free = server.match(range(12_288)).host_hit_length, group.available_size()
    taken = group.alloc(free + 1000, reclaim=server.cache.evict_host)
    assert len(taken) == free + 1000
    assert server.match(range(12_288)).host_hit_length == before - 1000
    group.free(taken)
    check_records(server.cache)


def test_a_full_host_drops_what_cannot_be_written_back() -> None:
    server = make(write="write_back")
    host = server.cache.cache_controller.mem_pool_host
    server.serve(range(300))
    taken = host.alloc(host.available_size())
    assert server.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 100
    assert server.match(range(300)).device_prefix_len == 200
    check_records(server.cache)
    host.free(taken)
    server.check()
