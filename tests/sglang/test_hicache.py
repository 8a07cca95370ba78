"""Our cache with SGLang's host tier: backups, demotions, reloads and the host's own evictions."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from costcache.policies.hazard.below import BelowHazard
from costcache.records import Victim
from costcache.sglang.admission import Admission
from costcache.sglang.patches import pre_alloc_host
from tests.sglang import hicache
from tests.sglang.mirror import check_records
from tests.sglang.pools import Kind, Shape, bind, cost_cache
from tests.sglang.serving import Server

WRITES = ("write_through", "write_through_selective", "write_back")
HOST_KINDS: tuple[Kind, ...] = ("mha", "mla", "mamba", "mla_mamba", "swa")


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
        server.serve(prompt, output=[5, 6])  # of which the last is never computed
    prompt += [5, 6]
    for other in range(1, 5):
        server.serve(range(10_000 * other, 10_000 * other + 300))
        check_records(server.cache)
    found = server.match(prompt)
    assert found.host_hit_length + found.mamba_host_hit_length + found.swa_host_hit_length > 0
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


def test_the_host_frees_the_shortfall_of_windows_and_states() -> None:
    """The host row of the cases: what is needed beyond what is free goes, not all that is asked for."""
    server = make("swa", 64, tokens=4096)
    for start in range(0, 20_000, 1000):
        server.serve(range(start, start + 128))
    server.cache.evict(EvictParams(num_tokens=4096, swa_num_tokens=4096))
    pool = server.cache.pools.by_name["host_swa"]
    held = pool.cached
    assert held == 20 * 128
    assert server.cache.evict_host(640, ComponentType.SWA) == 640
    assert pool.cached == held - 640
    host = server.cache.host_pool_group.get_entry(PoolName.SWA)
    taken = host.host_pool.alloc(host.host_pool.available_size() - 128)
    group = server.cache.host_pool_group
    more = group.alloc(256, pool=PoolName.SWA, reclaim=host.host_evict_fn)
    assert len(more) == 256
    assert pool.cached == held - 640 - 128
    group.free(more, pool=PoolName.SWA)
    group.free(taken, pool=PoolName.SWA)
    check_records(server.cache)

    server = make("mamba", 1, tokens=4096)
    for start in range(0, 15_000, 1000):
        server.serve(range(start, start + 20))
    server.cache.evict(EvictParams(num_tokens=0, mamba_num=20))
    pool = server.cache.pools.by_name["host_state"]
    held = pool.cached
    assert held > 4
    assert server.cache.evict_host(2, ComponentType.MAMBA) == 2
    assert pool.cached == held - 2
    check_records(server.cache)


@pytest.mark.parametrize("kind", ["mamba", "swa"])
def test_values_on_the_host_are_evicted_by_the_order(kind: Kind) -> None:
    server = make(kind, 1, policy="lfu", tokens=4096)
    component = ComponentType.MAMBA if kind == "mamba" else ComponentType.SWA
    for start, times in ((0, 3), (10_000, 1), (20_000, 2)):
        prompt = list(range(start, start + 64))
        for _ in range(times):
            server.serve(prompt, output=[1])
            prompt += [1] if len(prompt) == 64 else []
    server.drain()
    name = "host_state" if kind == "mamba" else "host_swa"
    pool = server.cache.pools.by_name[name]
    uses = sorted(record.uses for record in pool.records())
    assert uses[0] < uses[-1]
    evicted: list[int] = []
    take = pool.take

    def noted(victim: Victim, needed: int) -> Any:
        evicted.append(victim.record.uses)
        return take(victim, needed)

    pool.take = noted
    for _ in range(3):
        server.cache.evict_host(1, component)
        check_records(server.cache)
    assert evicted == sorted(evicted)
    assert evicted[0] == uses[0]


def test_a_node_that_cannot_fit_evicts_nothing_on_the_host() -> None:
    server = make(write="write_back", tokens=1024)
    host = server.cache.cache_controller.mem_pool_host
    server.serve(range(200))
    server.cache.evict(EvictParams(num_tokens=200))
    held = server.cache.pools.by_name["host"].cached
    assert held == 200
    taken = host.alloc(host.available_size())
    server.serve(range(5000, 5300))
    server.cache.evict(EvictParams(num_tokens=300))  # 300 do not fit where 200 are
    assert server.cache.pools.by_name["host"].cached == held
    host.free(taken)
    check_records(server.cache)
    server.check()


def test_a_copy_of_what_is_on_the_device_too_is_cut() -> None:
    server = make(write="write_back", tokens=1024)
    server.serve(range(600))
    server.cache.evict(EvictParams(num_tokens=600))
    server.serve([*range(600), 7])  # back on the device; its copy stays
    host = server.cache.cache_controller.mem_pool_host
    free = host.available_size()
    assert server.cache.evict_host(100) == 100
    assert host.available_size() == free + 100
    check_records(server.cache)
    assert server.serve([*range(600), 8]) == 600
    server.check()


def test_preallocation_of_a_decode_server_asks_for_the_shortfall() -> None:
    server = make(tokens=2048)
    for start in range(0, 12_000, 1000):
        server.serve(range(start, start + 150))
    server.drain()
    host = server.cache.cache_controller.mem_pool_host
    held, free = server.cache.pools.by_name["host"].cached, host.available_size()
    queue = SimpleNamespace(tree_cache=server.cache)
    asked = pre_alloc_host(lambda queue, _: queue.tree_cache.evict_host(free + 70), queue, None)
    assert asked == 70
    assert server.cache.pools.by_name["host"].cached == held - 70


@pytest.mark.parametrize("write", WRITES)
def test_by_cost_copies_and_loads_what_saves_time(write: str) -> None:
    def serve(**speeds: Any) -> tuple[Server, int]:
        server = make("mha", 64, write, host_tier="by_cost", policy="lru", **speeds)
        for _ in range(3):
            server.serve(range(320), output=[5])
        for other in range(1, 5):
            server.serve(range(10_000 * other, 10_000 * other + 300))
            check_records(server.cache)
        return server, server.match(range(320)).host_hit_length

    slow_link, found = serve(host_link_bytes_per_second=1.0)
    assert found == 0
    assert slow_link.cache.admission.refused["copies"]
    assert not slow_link.cache.pools.by_name["host"].live
    slow_link.check()
    slow_chip, found = serve(flops_per_second=1.0)
    assert found
    assert slow_chip.serve(range(320)) == 256  # the last token is computed anew
    assert not slow_chip.cache.admission.refused["loads"]
    slow_chip.check()


def test_by_cost_computes_what_takes_longer_to_load() -> None:
    server = make("mha", 64, host_tier="by_cost", flops_per_second=1.0)
    server.serve(range(320), output=[5])
    server.cache.evict(EvictParams(num_tokens=1024))
    assert server.match(range(320)).host_hit_length == 320
    server.cache.admission = Admission(
        bind(server.shape, host_link_bytes_per_second=1.0).cost, server.cache.pools
    )
    assert server.serve(range(320)) == 0
    assert server.cache.admission.refused == {"copies": 0, "loads": 1}
    check_records(server.cache)
    server.check()


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_without_a_forecast_no_copy_pays_for_what_it_displaces(write: str) -> None:
    """All prompts are worth the same by the prior, so the price would be that of the copy itself."""
    server = make("mha", 64, write, host_tier="by_cost", policy="lru", flops_per_second=1.0)
    for other in range(40):
        server.serve(range(10_000 * other, 10_000 * other + 320), output=[5])
        check_records(server.cache)
    assert server.cache.pools.by_name["host"].counters.evictions > 5
    assert server.cache.admission.refused["copies"] == 0
    server.check()


def test_what_the_device_learned_ranks_the_host() -> None:
    server = make("mha", 1, policy="hazard", tokens=2048)
    device, host = (server.cache.pools.by_name[name].order for name in ("kv", "host"))
    assert isinstance(host, BelowHazard)
    assert host.upper is device
    capacities = [server.cache.pools.by_name[name].state().capacity for name in ("kv", "host")]
    assert capacities[1] > 0
    assert device.intake.ghosts._room == 6.0 * sum(capacities), "what the host holds is remembered"
    rng = random.Random(3)
    for step in range(120):
        hot = rng.random() < 0.5
        start = rng.randrange(6) * 1000 if hot else 100_000 + 1000 * step
        server.serve([*range(start, start + 200), 90_000 + step], output=[1])
        check_records(server.cache)
    order = server.cache.pools.by_name["host"].order
    strata = {record.data.stratum for record in server.cache.pools.by_name["host"].records()}
    assert len(strata) > 1  # classes of the device, which the host alone would not know yet
    assert order.upper.learner.estimated is not None
    server.cache.reset()
    assert server.cache.pools.by_name["host"].order.upper is server.cache.pools.kv.order


def test_the_host_follows_a_device_whose_order_failed() -> None:
    server = make("mha", 1, policy="hazard", tokens=2048)
    for step in range(30):
        server.serve(range(1000 * step, 1000 * step + 200), output=[1])
    device, host = (server.cache.pools.by_name[name] for name in ("kv", "host"))
    before = host.counters.evicted
    assert before
    assert isinstance(host.order, BelowHazard)
    device._guard.drop("a bug of a test")
    for step in range(30, 60):
        server.serve(range(1000 * step, 1000 * step + 200), output=[1])
    assert host.counters.evicted > before
    assert host.policy == device.policy == "lru"
    assert not host.fallbacks
    server.check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_leaf_evicted_in_one_step_leaves_what_sglangs_steps_leave(
    policy: str, write: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests find the same tokens on the same tiers, and as much is free after each."""

    def replay() -> list[Any]:
        dice, server, found = random.Random(7), make("mha", page_size, write, policy=policy), []
        for _ in range(40):
            talk, turns = dice.randrange(6), dice.randrange(1, 9)
            prompt = [1000 * talk + token for token in range(37 * turns)] + [dice.randrange(10_000, 20_000)]
            match = server.match(prompt)
            device, host = match.device_prefix_len, match.host_hit_length
            found.append((server.serve(prompt, output=[1, 2]), device, host, server.free()))
            if dice.random() < 0.3:
                server.cache.evict(EvictParams(num_tokens=dice.randrange(1, 200)))
            found.append(server.cache.host_pool_group.available_size())
            check_records(server.cache)
            server.check()
        return found

    quick = replay()
    assert any(entry[2] for entry in quick if isinstance(entry, tuple)) or write == "write_through_selective"
    monkeypatch.setattr("costcache.sglang.hosted.HostedLeaves._has_short_steps", lambda core: False)
    assert replay() == quick
