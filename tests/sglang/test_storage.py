"""SGLang's storage backend ``file`` behind the host tier: what was dropped from both comes back from disk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tests.sglang import hicache
from tests.sglang.mirror import check_records
from tests.sglang.pools import Kind, Shape, cost_cache
from tests.sglang.serving import EVERYTHING, Server

KINDS: tuple[Kind, ...] = ("mha", "mla", "mamba", "swa")


@pytest.fixture
def made() -> Iterator[list[Server]]:
    """Servers, whose storage threads are stopped in the end."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.cache.shutdown()


def make(
    made: list[Server], monkeypatch: pytest.MonkeyPatch, folder: Path, kind: Kind, policy: str = "hazard"
) -> Server:
    hicache.patch(monkeypatch)
    shape = Shape(kind, 64, tokens=1024, states=20, hicache="write_through", storage=str(folder))
    server = Server(cost_cache(shape, policy=policy), shape)
    for entry in server.cache.host_pool_group.entries:
        entry.host_pool.pin_memory = False  # there is none without a GPU
    made.append(server)
    return server


def drop_all(server: Server) -> None:
    """Empty the device and the host."""
    server.drain()
    for component in server.cache.tree_components:
        server.cache.evict_host(EVERYTHING, component)
    check_records(server.cache)
    assert not server.cache.pools.by_name["host"].live


@pytest.mark.parametrize("kind", KINDS)
def test_what_both_tiers_dropped_is_read_from_disk(
    kind: Kind, made: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make(made, monkeypatch, tmp_path, kind)
    prompt = list(range(320))
    server.serve(prompt, output=[5])
    server.settle()
    free = {name: entry.host_pool.available_size() for name, entry in entries(server).items()}
    drop_all(server)
    prompt += [5, 6]
    assert server.match(prompt).host_hit_length == 0
    assert server.prefetch(prompt) == 320
    check_records(server.cache)
    assert server.serve(prompt) == 320  # and every byte of it is right
    server.settle()
    check_records(server.cache)
    drop_all(server)
    for name, entry in entries(server).items():
        assert entry.host_pool.available_size() >= free[name]


def test_what_is_read_from_disk_has_the_class_that_the_node_before_it_tells(
    made: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without one it would rank as what a running request has just made, and be evicted first."""
    server = make(made, monkeypatch, tmp_path, "mha")
    prompt = list(range(640))
    server.serve(prompt, output=[5])
    server.settle()
    drop_all(server)
    server.serve(prompt[:320], output=[5])
    server.serve(prompt[:320], output=[5])
    server.settle()
    pools = server.cache.pools.by_name
    assert server.prefetch([*prompt, 6]) > 0
    (read,) = [record for record in pools["host"].live.values() if record.depth >= 320]
    assert read.data.stratum != pools["kv"].order.learner.classes.open


@pytest.mark.parametrize("kind", KINDS)
def test_pressure_on_three_tiers(
    kind: Kind, made: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make(made, monkeypatch, tmp_path, kind)
    rng, found = random.Random(4), 0
    for step in range(40):
        start = rng.randrange(14) * 1000
        prompt = [*range(start, start + rng.choice((128, 256, 384))), 90_000 + step]
        before = server.match(prompt[:-1])
        found += server.prefetch(prompt) - before.device_prefix_len - before.host_hit_length
        server.serve(prompt, output=[1, 2])
        server.settle()
        check_records(server.cache)
        server.check()
    assert found > 0
    pools = server.cache.pools.by_name
    assert pools["kv"].counters.evictions
    assert pools["host"].counters.evictions
    assert not any(pool.fallbacks for pool in pools.values())
    drop_all(server)


def test_room_for_what_is_read_is_the_shortfall(
    made: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make(made, monkeypatch, tmp_path, "swa", policy="lru")
    for start in range(0, 3000, 1000):
        server.serve(range(start, start + 256))
        server.settle()
    server.drain()
    entry = entries(server)["swa"]
    pool, windows = entry.host_pool, server.cache.pools.by_name["host_swa"]
    taken = pool.alloc(pool.available_size() - 64)
    held = windows.cached
    assert held >= 3 * 64
    staged = server.cache.components[ComponentType.SWA].alloc_prefetch_staging(128)
    assert len(staged) == 128
    # A value is evicted whole, and none beyond the shortfall of one page.
    assert held - windows.cached <= 256
    assert windows.counters.shortfall == 64
    pool.free(staged)
    pool.free(taken)


def entries(server: Server) -> dict[str, Any]:
    return {str(name.value): entry for name, entry in server.cache.host_pool_group.entry_map.items()}
