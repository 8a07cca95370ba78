"""Policies that rank states: one order for KV and states, on real SGLang classes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import EvictLayer

from costcache.errors import PluginError
from tests.sglang import hicache
from tests.sglang.fuzz import Fuzz
from tests.sglang.mirror import check_records
from tests.sglang.pools import Kind, Shape, bind, cost_cache
from tests.sglang.serving import Server
from tests.sglang.test_cases import check_states

SESSIONS = {"enable_session_radix_cache": True}
POLICIES = ("consumed-lru", "hazard", "marconi", "seglen")
HYBRIDS: tuple[Kind, ...] = ("mamba", "mla_mamba")
MAMBA = ComponentType.MAMBA

MIXES: dict[str, Shape] = {
    **{f"{kind}-{page}": Shape(kind, page) for kind in HYBRIDS for page in (1, 64)},
    "sessions": Shape("mamba", params=SESSIONS),
    **{
        f"{write}-{page}": Shape("mamba", page, hicache=write)
        for write in ("write_through", "write_through_selective", "write_back")
        for page in (1, 64)
    },
}


def states(server: Server) -> list[int]:
    """Ends of the prefixes whose states are on the device."""
    return sorted(r.end for r in server.cache.pools.kv.records() if r.state is not None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("cap", [-1, 2])
def test_random_operations(name: str, policy: str, cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, states and locks are what SGLang's tree has, whatever is done; no slot is lost."""
    if MIXES[name].hicache:
        hicache.patch(monkeypatch)
    shape = Shape(**{**MIXES[name].__dict__, "tokens": 2048, "states": 20})
    server = Server(cost_cache(shape, policy=policy), shape)
    server.cache.components[MAMBA].mamba_max_states_per_path = cap
    fuzz = Fuzz(server, list(MIXES).index(name) + 100 * cap, sessions=name == "sessions")
    for _ in range(120):
        fuzz.step()
        check_records(server.cache)
    fuzz.end()
    check_records(server.cache)
    pools = server.cache.pools
    assert pools.kv.counters.evictions
    assert pools.by_name["state"].counters.evictions
    assert pools.kv.policy == policy
    assert not states(server)


def make(policy: str) -> Server:
    shape = Shape("mamba", 64, tokens=8192, states=30)
    return Server(cost_cache(shape, policy=policy), shape)


def test_a_state_is_evicted_alone() -> None:
    """The state least recently resumed from is evicted, and its KV still serves the next one."""
    server = make("consumed-lru")
    prompt = list(range(1000))
    server.serve(prompt[:330])
    server.serve(prompt[:650])  # resumes from 320, and leaves its own at 640
    server.serve(range(5000, 5650))
    assert server.serve(prompt[:650]) == 640
    assert states(server) == [320, 640, 640]
    free = server.free()
    assert server.cache.evict(EvictParams(num_tokens=0, mamba_num=1)).mamba_num_evicted == 1
    assert server.free() == {"kv": free["kv"], "state": free["state"] + 1}
    assert server.match(prompt[:650]).device_prefix_len == 640, "the state behind the tombstone serves"
    assert server.match(prompt[:330]).device_prefix_len == 0, "no match ends at a tombstone"
    check_records(server.cache)
    assert server.serve(prompt[:330]) == 0
    assert states(server) == [320, 640, 640], "the place has a state again"
    check_records(server.cache)


def test_only_going_on_from_a_state_is_a_use() -> None:
    """Earlier states on its path are neither used nor refreshed, and a waiting request counts once."""
    server = make("consumed-lru")
    prompt = list(range(1000))
    server.serve(prompt[:330])
    server.serve(prompt[:650])
    front, behind = (
        next(r.state for r in server.cache.pools.kv.records() if r.end == end) for end in (320, 640)
    )
    assert (front.uses, behind.uses) == (2, 1)
    recency = front.recency
    request = server.request(prompt[:700])
    for _ in range(3):
        request.init_next_round_input(server.cache)
    assert (front.uses, behind.uses) == (2, 2)
    assert front.recency == recency < behind.recency
    recency = behind.recency
    server.match(prompt[:650])
    assert (front.uses, behind.uses) == (2, 2)
    assert behind.recency > recency, "a look makes recent, and is no use"


@pytest.mark.parametrize("states", [16, 20, 24])
@pytest.mark.parametrize("seed", [0, 1])
def test_superseded_states_go_before_the_newest_of_any_session(states: int, seed: int) -> None:
    """12 sessions of 8 turns in random turn; there are slots for their newest states and a request."""
    shape = Shape("mamba", 64, tokens=65_536, states=states)
    server = Server(cost_cache(shape, policy="hazard"), shape)
    order = [session for session in range(12) for _ in range(8)]
    random.Random(seed).shuffle(order)
    turns = dict.fromkeys(order, 0)
    for session in order:
        turn, start = turns[session], 10_000 * session
        assert server.serve(range(start, start + 100 + 128 * turn)) == (128 * turn - 64 if turn else 0)
        turns[session] += 1
    assert server.cache.pools.by_name["state"].counters.evictions
    check_records(server.cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_states_per_path_are_capped(policy: str) -> None:
    """Under --mamba-max-states-per-path a chat keeps its newest states, and the order forgets the others."""
    server = make(policy)
    server.cache.components[MAMBA].mamba_max_states_per_path = 2
    for turn in range(6):
        # The state before the newest is in use while that is made.
        assert server.serve(range(100 + 128 * turn)) == (128 * turn - 64 if turn else 0)
        check_records(server.cache)
    assert states(server) == [576, 704]
    order = server.cache.pools.kv.order
    assert [record.end for record in order._known.values()] == [576, 704]
    server.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_dead_kv_is_evicted_first(policy: str) -> None:
    """KV after the last state of its path is evicted before live KV, and no live leaf is evicted for it."""
    server = make(policy)
    live = list(range(10_000, 10_650))
    server.serve(live)
    for start in range(0, 3000, 1000):  # younger than the live one
        server.serve(range(start, start + 330))
        server.serve(range(start, start + 650))
    cache = server.cache
    walk = cache.components[MAMBA]
    leaves = [r.node for r in cache.pools.kv.records() if r.is_leaf and r.depth == 320]
    assert len(leaves) == 3
    for node in leaves:  # another walk of SGLang's takes the states of leaves, and leaves their KV
        frees: tuple[dict[Any, list[Any]], dict[Any, list[Any]]] = ({MAMBA: []}, {MAMBA: []})
        tracker = dict.fromkeys(cache.tree_components, 0)
        cache.tree_core._evict_component_and_detach_lru(
            node,
            walk,
            target=EvictLayer.DEVICE,
            tracker=tracker,
            device_frees=frees[0],
            host_frees=frees[1],
            cache_actions=[],
        )
        for slots in frees[0][MAMBA]:
            walk._free_mamba_value(slots)
    dead = [r for r in cache.pools.kv.records() if r.is_dead]
    assert len(dead) == 3
    cache.evict(EvictParams(num_tokens=3 * 320))
    assert not any(r.is_dead for r in cache.pools.kv.records())
    assert {r.end for r in cache.pools.kv.records()} == {320, 640}
    assert server.match(live).device_prefix_len == 640
    check_records(cache)


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_models_without_states_are_refused(kind: Kind) -> None:
    """One clear line, when the server starts."""
    for policy in ("consumed-lru", "marconi", "seglen"):
        with pytest.raises(
            PluginError, match=f"policy '{policy}' does not serve model .* has none"
        ) as caught:
            bind(Shape(kind), policy=policy)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_same_prompts_again(kind: Kind, policy: str) -> None:
    """n - 1 of n tokens are reused, down to the page; a long prompt hits from the second time on."""
    shape = Shape(kind, 64, tokens=8192, states=40)
    server = Server(cost_cache(shape, policy=policy), shape)
    for size in (64, 129, 330, 650):
        prompt = list(range(10_000 * size, 10_000 * size + size))
        server.serve(prompt)
        assert server.serve(prompt) == (size - 1) // 64 * 64
    assert [server.serve(range(4000), output=[1, 2, 3]) for _ in range(5)] == [0, 3968, 3968, 3968, 3968]
    check_records(server.cache)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_reserved_by_running_requests(kind: Kind, policy: str) -> None:
    """30 state slots, and 6 running requests reserve 3 each: 12 are left for the cache, and none leaks."""
    shape = Shape(kind, 64, tokens=16_384, states=30, requests=6)
    server = Server(cost_cache(shape, policy=policy), shape)
    rng = random.Random(0)
    for step in range(80):
        if len(server.running) == 6:
            server.finish(rng.choice(server.running))
        start = rng.randrange(10) * 1000
        server.start(server.request([*range(start, start + rng.choice((130, 200, 330))), 90_000 + step]))
        check_states(server)
        check_records(server.cache)
    assert server.cache.pools.by_name["state"].counters.evictions
    server.drain()
    assert server.free()["state"] == 30
