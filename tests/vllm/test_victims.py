"""The victims in vLLM's real KV cache manager: under ``lru`` they are vLLM's own, block by block."""

from __future__ import annotations

import itertools
import logging
import os
import runpy
from pathlib import Path

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager

from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache.policies import BUILTIN
from tests.vllm.fuzz import Fuzz
from tests.vllm.recorded import PAGE, recorded_prompts, replay
from tests.vllm.serving import Server, bind, colliding, manager

SERVED = [name for name in BUILTIN if get_plugins().refusal(name, ModelSpec.preset("llama-3-8b")) is None]


@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("seed", range(8))
def test_lru_evicts_what_vllm_would(seed: int, defer: bool) -> None:
    """Chunked prompts, answers, copies of prefixes, preemption, aborts, resets, and hashes that collide."""
    hashing = colliding if seed % 2 else sha256
    servers = [Server(manager(200), policy, defer=defer, hashing=hashing) for policy in (None, "lru")]
    fuzz = Fuzz(*servers, seed=seed)
    for step in range(1500):
        fuzz.step()
        if step % 100 == 0:
            servers[1].check()
            assert servers[0].free_list() == servers[1].free_list()
    fuzz.close()
    servers[1].check()
    assert servers[0].free_list() == servers[1].free_list()
    assert servers[0].hits == servers[1].hits > 0
    pool = servers[1].pool.costcache.runs.pool
    assert pool.counters.evictions > 100
    assert pool.counters.short == pool.fallbacks == 0
    assert {"preempt", "abort", "finish", "resume"} <= fuzz.counts.keys()


@pytest.mark.parametrize("size", [16, 32])
def test_lru_reports_the_events_that_vllm_would(size: int) -> None:
    servers = [Server(manager(100, size=size, events=True), policy) for policy in (None, "lru")]
    fuzz = Fuzz(*servers, seed=1)
    seen = 0
    for _ in range(600):
        fuzz.step()
        events = [server.manager.take_events() for server in servers]
        assert events[0] == events[1]
        seen += len(events[0])
    assert seen > 500


@pytest.mark.traces
def test_lru_evicts_what_vllm_would_on_a_recorded_trace(traces_dir: Path) -> None:
    requests = itertools.islice(recorded_prompts(traces_dir / "mooncake_conversation.jsonl.gz"), 2500)
    servers = [Server(manager(2000, size=PAGE), policy) for policy in (None, "lru")]
    assert sum(replay(requests, servers, 1900)) > 10_000
    assert servers[1].pool.costcache.runs.pool.counters.victims > 1000


@pytest.mark.parametrize("policy", SERVED)
def test_every_policy_serves_under_pressure(policy: str) -> None:
    server = Server(manager(150), policy)
    fuzz = Fuzz(server, seed=3)
    for step in range(700):
        fuzz.step()
        if step % 50 == 0:
            server.check()
    fuzz.close()
    server.check()
    pool = server.pool.costcache.runs.pool
    assert pool.policy == policy
    assert pool.fallbacks == pool.counters.short == 0
    assert pool.counters.evictions > 20
    assert len(server.free_list()) == 150


@pytest.mark.parametrize("mla", [False, True])
def test_hazard_keeps_a_prefix_that_comes_back(mla: bool) -> None:
    """A system prompt that every fourth request uses, among documents that nobody asks about again."""
    found = {}
    for policy in (None, "hazard"):
        server = Server(manager(60, mla=mla), policy)
        for number in range(400):
            head = [1] * 160 if number % 4 == 0 else []
            server.serve(str(number), head + [number + 10] * 400)
        found[policy] = server.hits
    assert found["hazard"] > 2 * found[None] + 1000


def test_blocks_that_are_evicted_beyond_the_need_are_next() -> None:
    """Headroom, and victims that are freed whole, leave free blocks without contents."""
    for settings in ({"headroom": 0.2}, {"trim": "off"}):
        server = Server(manager(100), bind("lru", **settings))
        for number in range(20):
            server.serve(str(number), [number] * 300)
        server.check()
        empty = [b for b in server.pool.blocks if not (b.ref_cnt or b.is_null or b.block_hash)]
        assert len(empty) > 1
        first = server.free_list()[: len(empty)]
        assert set(first) == {block.block_id for block in empty}


@pytest.mark.parametrize("policy", ["lru", "hazard", "s3fifo"])
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_lose_no_block(policy: str, seed: int) -> None:
    """Blocks lose their contents, connectors hold some, hashes collide, resets; more with FUZZ_STEPS."""
    server = Server(manager(150), policy, defer=seed % 2 == 1, hashing=colliding if seed else sha256)
    fuzz = Fuzz(server, seed=seed, evictions=True)
    for step in range(int(os.environ.get("FUZZ_STEPS", "1500"))):
        fuzz.step()
        if step % 20 == 0:
            server.check()
    fuzz.close()
    server.check()
    assert len(server.free_list()) == 150
    assert server.pool.costcache.runs is not None  # nothing of ours failed
    assert server.pool.costcache.runs.pool.fallbacks == 0
    assert {"evict", "connect", "disconnect"} <= fuzz.counts.keys()


def test_the_order_that_a_reader_sees_is_the_policys() -> None:
    """A lazy offload copies the blocks that will be evicted first."""
    server = Server(manager(100), "mru")
    for number in range(4):
        server.serve(str(number), [number] * 16 * 20)
    queue = server.pool.free_block_queue
    order = [block.block_id for block in queue.iter_blocks_after(None)]
    assert len(order) == len(set(order)) == 100
    for count in (1, 7, 30):
        assert [block.block_id for block in queue.popleft_n(count)] == order[:count]
        order = order[count:]
    assert queue.num_free_blocks == 62


def test_blocks_that_were_unpinned_go_last() -> None:
    """Their contents are still being read until they are handed out again."""
    server = Server(manager(50), "mru")
    request = server.request("read", [1] * 16 * 10)
    server.start(request)
    blocks = server.manager.coordinator.single_type_managers[0].req_to_blocks["read"]
    read = list(blocks[3:6])
    server.pool.touch(read)  # the reader's own references
    server.finish(request)
    reused: list[int] = []
    server.pool.unpin_blocks(read, lambda block: reused.append(block.block_id))
    server.serve("more", [2] * 16 * 30)
    server.serve("too much", [3] * 16 * 47)
    assert reused == []
    server.check()
    server.serve("all", [4] * 16 * 50)
    assert sorted(reused) == sorted(block.block_id for block in read)
    assert server.pool.costcache.runs is not None
    server.check()


def test_a_request_whose_blocks_were_found_unseen_is_followed_all_the_same() -> None:
    """Should vLLM find blocks by another way than the one that is reported."""
    server = Server(manager(50), "lru")
    server.serve("first", [1] * 16 * 5)
    follow = server.pool.costcache.follow
    server.pool.costcache.follow = lambda *args, found=False, **more: None if found else follow(*args, **more)
    server.serve("second", [1] * 16 * 5 + [2] * 16 * 5)
    server.check()
    assert server.pool.costcache.runs is not None
    assert sorted(run.uses for run in server.pool.costcache.runs.pool.live.values()) == [1, 2]


def test_vllms_own_tests_run_with_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin for pytest that gives every manager of theirs one, see its own docstring."""
    tool = Path(__file__).resolve().parents[2] / "tools" / "vllm_own_tests.py"
    own = runpy.run_path(str(tool), {"__name__": "vllm_own_tests"})
    configure = own["pytest_configure"]
    monkeypatch.setitem(configure.__globals__, "POLICY", "hazard")
    monkeypatch.setattr(KVCacheManager, "__init__", KVCacheManager.__init__)
    handlers = logging.getLogger("costcache").handlers
    monkeypatch.setattr(logging.getLogger("costcache"), "handlers", list(handlers))
    configure()
    assert manager(20).block_pool.costcache.runs.pool.policy == "hazard"
    assert configure.__globals__["_counts"] == {"with a policy": 1, "without": 0}
