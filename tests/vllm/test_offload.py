"""Policies in vLLM's CPU offload tier, on its real manager."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from costcache.cost import CostModel
from costcache.deployment import Deployment
from costcache.errors import CostcacheError, SettingsError
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.policies.keyed import LRU
from costcache.records import NodeRecord, RequestInfo, Victim
from costcache.vllm import build
from costcache.vllm.worth import WorthwhileManager, shortest_worth
from tests.property.kit import manager as plugins
from tests.property.kit import policy as offering
from tests.vllm.recorded import PAGE, recorded_prompts
from tests.vllm.tier import MODULE, Request, check, config, keys_of, ours, prompts, stock

pytestmark = pytest.mark.skipif(
    not hasattr(CachePolicy, "on_request_access"), reason="vLLM's offload tier tells too little before 0.33"
)

# -- the victims of LRU -----------------------------------------------------------------------


def fuzz(managers: list[Any], seed: int, steps: int, *, overlap: int = 4) -> list[list[Any]]:
    """The same requests for all managers, of which several run at once; returns the victims of each.

    A request waits for transfers of its own prefix, as vLLM's scheduler lets it.
    """
    rng, stream = random.Random(seed), prompts(seed)
    running: list[list[Request]] = []
    ended: list[list[Request]] = []
    victims: list[list[Any]] = [[] for _ in managers]

    def same(answers: list[Any]) -> Any:
        assert answers == answers[:1] * len(managers)
        return answers[0]

    def complete(several: list[Request]) -> None:
        success = rng.random() > 0.05
        for each in several:
            each.complete(success=success)

    def wait_for(keys: list[Any]) -> None:
        for several in running + ended:
            while any(not set(keys).isdisjoint(their) for _, their in several[0].transfers):
                complete(several)

    for step in range(steps):
        if len(running) < overlap and rng.random() < 0.5:
            keys = keys_of(next(stream))
            wait_for(keys)
            running.append([Request(manager, str(step), keys) for manager in managers])
            same([each.find() for each in running[-1]])
        elif running:
            several = rng.choice(running)
            if several[0].transfers and rng.random() < 0.5:
                complete(several)
            elif several[0].stored < len(several[0].keys):
                wait_for(several[0].keys)
                count = rng.randrange(1, 8)
                same([each.store(count) for each in several])
            else:
                for each in several:
                    each.finish()
                running.remove(several)
                ended.append(several)
        for several in [each for each in ended if rng.random() < 0.3]:
            while several[0].transfers:
                complete(several)
            ended.remove(several)
        for several in running:
            same([each.evicted for each in several])
            for at, each in enumerate(several):
                victims[at] += each.evicted
                each.evicted = []
    return victims


@pytest.mark.parametrize("seed", range(8))
def test_the_victims_of_our_lru_are_those_of_vllms(seed: int) -> None:
    managers = [stock(150), ours(150, "lru")]
    victims = fuzz(managers, seed, 6000, overlap=1 + seed % 4)
    assert victims[0] == victims[1]
    assert len(victims[0]) > 1000
    check(managers[1])
    assert managers[1]._policy.chunks.pool.policy == "lru"


@pytest.mark.traces
def test_the_victims_of_our_lru_are_those_of_vllms_on_a_recorded_trace(traces_dir: Path) -> None:
    file = traces_dir / "mooncake_conversation.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"{file} is missing")
    managers = [stock(3417), ours(3417, "lru", PAGE)]
    victims: list[list[Any]] = [[], []]
    for number, pages in enumerate(itertools.islice(recorded_prompts(file), 2000)):
        keys = keys_of(pages)[:3417]
        for at, manager in enumerate(managers):
            served = Request(manager, str(number), keys, PAGE)
            served.serve()
            victims[at] += served.evicted
    assert victims[0] == victims[1]
    assert len(victims[0]) > 30_000


# -- any policy, any use -----------------------------------------------------------------------

POLICIES = ("lru", "hazard", "arc", "mru", "lfu", "priority", "s3fifo", "wtinylfu", "lhd", "gdsf", "lru2")


class Naive:
    """What a manager must do, whatever the policy: a dict of chunks and their readers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.readers: dict[Any, int] = {}

    def idle(self, protected: set[Any]) -> int:
        return sum(not count and key not in protected for key, count in self.readers.items())


def misuse(manager: Any, capacity: int, seed: int, steps: int, *, clears: bool = True) -> None:
    """Calls in any order that the manager allows: ranges from the middle, two groups, failures, clears."""
    rng, stream, naive = random.Random(seed), prompts(seed, 10), Naive(capacity)
    contexts: list[tuple[ReqContext, list[Any]]] = []
    loads: list[tuple[ReqContext, list[Any]]] = []
    stores: list[tuple[ReqContext, list[Any]]] = []

    def begin() -> None:
        pages, group = next(stream), rng.randrange(2)
        context, keys = ReqContext(str(rng.random())), keys_of(pages, group)
        for at, key in enumerate(keys):
            if rng.random() < 0.98:
                context.set_offload_key_position(key, (at + 1) * 16 * (group + 1))
        manager.on_new_request(context)
        contexts.append((context, keys))

    for _ in range(steps):
        action = rng.random()
        if action < 0.2 or not contexts:
            begin()
            continue
        context, keys = rng.choice(contexts)
        start = rng.randrange(len(keys)) if rng.random() < 0.3 else 0
        some = keys[start : start + rng.randrange(1, 10)]
        if rng.random() < 0.1:
            rng.shuffle(some)
        if action < 0.4:
            ready = [key for key in some if naive.readers.get(key, -1) >= 0]
            manager.prepare_load(ready, context)
            for key in ready:
                naive.readers[key] += 1
            loads.append((context, ready))
        elif action < 0.7:
            before, missing = dict(naive.readers), [key for key in some if key not in naive.readers]
            free = capacity - len(naive.readers)
            output = manager.prepare_store(some, context)
            if output is None:
                assert len(missing) - free > 0, "there was room"
                assert {k: c.ref_cnt for k, c in manager._policy.chunks.held.items()} == before
            else:
                assert output.keys_to_store == missing
                assert len(output.evicted_keys) == max(0, len(missing) - free)
                for key in output.evicted_keys:
                    assert key not in some
                    assert naive.readers.pop(key) == 0
                naive.readers |= dict.fromkeys(missing, -1)
                stores.append((context, missing))
        elif action < 0.8 and loads:
            context, keys = loads.pop(rng.randrange(len(loads)))
            manager.complete_load(keys, context)
            for key in keys:
                naive.readers[key] -= 1
        elif action < 0.9 and stores:
            context, keys = stores.pop(rng.randrange(len(stores)))
            success = rng.random() < 0.8
            manager.complete_store(keys, context, success)
            for key in keys:
                if success:
                    naive.readers[key] = 0
                else:
                    del naive.readers[key]
        elif action < 0.95:
            manager.on_request_finished(context)
            contexts.remove((context, keys))
        elif action < 0.955:
            if clears:
                manager.reset_cache()
                naive.readers.clear()
                loads.clear()
                stores.clear()
        elif action < 0.98:
            manager.touch([key for key in keys if rng.random() < 0.9], context)
        assert all((manager._policy.get(key) is None) == (key not in naive.readers) for key in keys)
        if rng.random() < 0.1:
            check(manager)
            held = manager._policy.chunks.held
            assert {key: chunk.ref_cnt for key, chunk in held.items()} == naive.readers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_the_tier_has_what_it_says(policy: str, seed: int) -> None:
    manager = ours(40, policy)
    misuse(manager, 40, seed, 4000)
    check(manager)
    assert manager._policy.chunks.pool.policy == policy
    assert not hasattr(manager._policy, "lru"), "nothing failed"
    assert manager._policy.chunks.pool.fallbacks == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_eviction_is_all_or_nothing(policy: str) -> None:
    manager = ours(20, policy)
    for page in range(3):
        Request(manager, str(page), keys_of([page, *range(100 * page + 10, 100 * page + 15)])).serve()
    busy = Request(manager, "busy", keys_of([7, 8]))
    busy.store()
    held = dict(manager._policy.chunks.held)
    asks = Request(manager, "asks", keys_of(range(1000, 1020)))
    assert not asks.store(), "two chunks are in transfer"
    assert manager._policy.chunks.held == held
    check(manager)
    loads = Request(manager, "loads", keys_of([0, *range(10, 15)]))
    loads.find()
    more = Request(manager, "more", keys_of(range(2000, 2015)))
    assert manager._policy.evict(14, set()) is None
    check(manager)
    assert manager._policy.chunks.held == held
    loads.complete()
    assert more.store()
    check(manager)


def test_what_an_eviction_put_back_has_its_history() -> None:
    """The victims after an eviction that failed are those without it."""
    managers = [ours(12, "lru"), ours(12, "lru")]
    for manager in managers:
        for page in range(4):
            Request(manager, str(page), keys_of([page, 10 + page, 20 + page])).serve()
    loads = Request(managers[0], "loads", keys_of([3, 13, 23]))
    loads.find()
    held = managers[0]._policy.chunks.held
    before = list(held)
    assert managers[0]._policy.evict(10, set(before[:1])) is None
    assert sorted(held) == sorted(before)
    loads.complete()
    Request(managers[1], "loads", keys_of([3, 13, 23])).serve()
    victims = [[key for key, _ in manager._policy.evict(11, set())] for manager in managers]
    assert victims[0] == victims[1]


def test_a_prefix_outlives_what_follows_it() -> None:
    """A head that requests found in GPU memory is not used here, and stays as long as it has a tail."""
    manager = ours(8, "lru")
    Request(manager, "first", keys_of([1, 2, 3, 4])).serve()
    Request(manager, "second", keys_of([5, 6, 7, 8])).serve()
    tail = Request(manager, "third", keys_of([1, 2, 3, 4]))
    manager.prepare_load(tail.keys[2:], tail.context)
    manager.complete_load(tail.keys[2:], tail.context)
    tail.finish()
    other = Request(manager, "other", keys_of([11, 12, 13, 14]))
    other.store()
    assert set(other.evicted) == set(keys_of([5, 6, 7, 8]))


# -- failures ----------------------------------------------------------------------------------


class Broken(LRU):
    """LRU until an event of its life raises, or lies."""

    def __init__(self, fails: str, at: int, what: Any) -> None:
        super().__init__()
        self.left, self.fails, self.what = at, fails, what

    def due(self, event: str) -> bool:
        if event == self.fails:
            self.left -= 1
        return self.left <= 0 and event == self.fails

    def insert(self, record: NodeRecord) -> None:
        if self.due("insert"):
            raise RuntimeError("insert")
        super().insert(record)

    def use(self, record: NodeRecord) -> None:
        if self.due("use"):
            raise RuntimeError("use")

    def remove(self, record: NodeRecord) -> None:
        if self.due("remove"):
            raise RuntimeError("remove")
        super().remove(record)

    def finish(self, request: Any, info: Any) -> None:
        if self.due("finish"):
            raise RuntimeError("finish")

    def next_victim(self, pool: str) -> Victim | None:
        if self.due("next_victim"):
            if self.what is RuntimeError:
                raise RuntimeError("next_victim")
            answer: Victim | None = self.what() if callable(self.what) else self.what
            return answer
        return super().next_victim(pool)


STRANGER = NodeRecord(99, NodeRecord(0, None, 0, 0), 16, 0)


def hostile(monkeypatch: pytest.MonkeyPatch, make: Any) -> PluginManager:
    """Offer the policy ``hostile`` to managers that are made from now on."""
    offers = plugins(own=offering("hostile", make))
    bind = build.bind
    monkeypatch.setattr(build, "bind", lambda *args: bind(*args, plugins=offers))
    return offers


@pytest.mark.parametrize(
    ("fails", "what"),
    [
        ("insert", None),
        ("use", None),
        ("remove", None),
        ("finish", None),
        ("next_victim", RuntimeError),
        ("next_victim", None),
        ("next_victim", "nonsense"),
        ("next_victim", lambda: Victim(STRANGER)),
        ("next_victim", lambda: Victim(STRANGER, tokens="many")),  # type: ignore[arg-type]  # the fault
    ],
)
@pytest.mark.parametrize("at", [1, 60])
def test_a_policy_that_fails_leaves_lru_in_force(
    fails: str, what: Any, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hostile(monkeypatch, lambda: Broken(fails, at, what))
    managers = [stock(150), ours(150, "hostile")]
    assert managers[1]._policy.chunks.pool.policy == "hostile"
    with caplog.at_level(logging.CRITICAL, "costcache"):
        victims = fuzz(managers, 3, 4000, overlap=3)
    assert victims[0] == victims[1]
    pool = managers[1]._policy.chunks.pool
    assert (pool.policy, pool.fallbacks) == ("lru", 1)
    check(managers[1])


@pytest.mark.parametrize("method", ["name", "store", "end", "evict", "_walk", "_make"])
@pytest.mark.parametrize("at", [1, 100])
def test_if_all_else_fails_vllms_own_lru_takes_over(
    method: str, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    managers, left = [stock(60), ours(60, "lru")], [at]
    chunks = managers[1]._policy.chunks
    good = getattr(chunks, method)

    def bad(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("a mistake of ours")
        return good(*args)

    monkeypatch.setattr(chunks, method, bad)
    stream = prompts(5)
    victims: list[list[Any]] = [[], []]
    for number in range(300):
        keys = keys_of(next(stream))
        requests = [Request(manager, str(number), keys) for manager in managers]
        assert len({request.serve() for request in requests}) == 1
        for which, request in enumerate(requests):
            victims[which] += request.evicted
    assert left[0] <= 0
    assert victims[0] == victims[1]
    assert sum("takes over" in record.message for record in caplog.records) == 1
    check(managers[1])
    managers[1].reset_cache()
    assert managers[1]._policy.get(keys[0]) is None


# -- how it is asked for ------------------------------------------------------------------------


def made(name: str, extra: dict[str, Any] | None = None, additional: Any = None) -> Any:
    """The policy of a manager that a scheduler makes, of 10 chunks."""
    with build.serving(config(extra, additional)):
        return CPUOffloadingManager(10, name, MODULE)._policy


def test_eviction_policy_names_a_policy() -> None:
    assert made("costcache").chunks.pool.policy == "hazard"
    for name in ("hazard", "s3fifo", "hits-per-token"):
        assert made(name).chunks.pool.policy == name
    assert made("costcache", {"costcache": "lru"}).chunks.pool.policy == "lru"
    assert made("costcache", {"costcache": {"policy": "arc"}}).chunks.pool.policy == "arc"
    with pytest.raises(AttributeError, match=r"eviction_policy is 'lruu': costcache has arc, .*costcache, "):
        made("lruu")


def test_the_page_is_a_chunk() -> None:
    assert made("hazard").chunks.size == 16
    assert made("hazard", {"block_size": 64}).chunks.size == 64
    policy = made("hazard", {"blocks_per_chunk": 4})
    assert (policy.chunks.size, policy.chunks.pool.capacity) == (64, 640)


def test_the_tiers_settings_come_before_the_servers() -> None:
    server = {"costcache": {"policy": "s3fifo", "policy_settings": {"small": 0.3}}}
    assert made("costcache", None, server).settings.policy_settings == {"small": 0.3}
    own = {"costcache": {"policy_settings": {"small": 0.4}}}
    assert made("costcache", own, server).settings.policy_settings == {"small": 0.4}
    other = made("lru2", None, server)
    assert (other.settings.policy, other.settings.policy_settings) == ("lru2", {})
    assert made("costcache", {"costcache": {"policy": "lru"}}, server).settings.policy_settings == {}


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        (
            "hazard",
            {"policy": "lru"},
            "eviction_policy is 'hazard' and costcache.policy 'lru': name one policy",
        ),
        ("costcache", {"polcy": "lru"}, "unknown setting 'costcache.polcy': known settings are .*policy"),
        ("costcache", 7, "entry 'costcache' of kv_connector_extra_config is 7: give a JSON object"),
        ("s3fifo", {"policy_settings": {"small": 2}}, "setting 'policy_settings.small' is 2"),
        ("costcache", {"policy": "nonsense"}, "nonsense"),
        ("costcache", {"flops_per_second": -1}, "setting 'costcache.flops_per_second' is -1"),
    ],
)
def test_a_wrong_setting_stops_the_server_at_its_start(name: str, own: Any, message: str) -> None:
    with pytest.raises(CostcacheError, match=message):
        made(name, {"costcache": own})


def test_without_the_plugin_the_server_stops_at_its_start() -> None:
    with pytest.raises(SettingsError, match=r"its plugin is not loaded.*VLLM_PLUGINS"):
        CPUOffloadingManager(10, "hazard", MODULE)


def test_a_version_that_was_not_tested_is_refused_or_left_to_its_own_lru(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(CostcacheError, match=r"0\.99\.0"):
        ours(20, "hazard")
    managers = [stock(20), ours(20, "hazard", settings={"untested": "lru"})]
    victims = fuzz(managers, 1, 500, overlap=1)
    assert victims[0] == victims[1]
    check(managers[1])


def test_hints_of_a_client_reach_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RequestInfo] = []

    class Listening(LRU):
        def finish(self, request: Any, info: RequestInfo) -> None:
            told.append(info)

    hostile(monkeypatch, Listening)
    manager = ours(20, "hostile")
    request = Request(manager, "one", keys_of(range(5)))
    action = KvHintAction("1", "costcache", "1", {"session": "a", "session_ends": True})
    request.context.kv_hints = KvHintsEnvelope("1", "1", [action])
    request.serve()
    Request(manager, "two", keys_of(range(8))).serve()
    assert told == [RequestInfo(new_tokens=80, session="a", session_ends=True), RequestInfo(new_tokens=48)]


# -- what is worth storing ----------------------------------------------------------------------


def spec(own: dict[str, Any]) -> Any:
    """vLLM's offloading spec, made from its config of a Llama with chunks of 16 tokens."""
    extra = {
        "spec_name": "CostCacheOffloadingSpec",
        "spec_module_path": "costcache.vllm.worth",
        "cpu_bytes_to_use": 100 * 16 * 131072,
        "costcache": own,
    }
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    made = OffloadingSpecFactory.create_spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=16 * 131072,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id="one",
            model=OffloadingModelConfig("llama", "bfloat16", 131072),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
    )
    with build.serving(config(extra)):
        made.get_manager()
    return made


def test_the_spec_makes_vllms_own_manager_with_our_policy() -> None:
    manager = spec({"policy": "s3fifo"}).get_manager()
    assert type(manager) is CPUOffloadingManager
    assert manager._num_chunks == 100
    assert manager._policy.chunks.pool.policy == "s3fifo"


def test_the_shortest_prompt_worth_storing() -> None:
    slow = Deployment(page_size=16, host_link_bytes_per_second=2e9)
    cost = CostModel.of(ModelSpec.preset("llama-3-8b"), slow)
    shortest = shortest_worth(cost, 16, 1 << 20)
    assert shortest is not None
    assert shortest > 16
    assert shortest % 16 == 0
    assert cost.recompute_seconds(0, shortest) > cost.reload_seconds(shortest)
    assert cost.recompute_seconds(0, shortest - 16) <= cost.reload_seconds(shortest - 16)
    assert shortest_worth(cost, 16, shortest - 16) is None
    usual = CostModel.of(ModelSpec.preset("llama-3-8b"), Deployment(page_size=16))
    assert shortest_worth(usual, 16, 1 << 20) == 16


def test_prompts_that_are_not_worth_it_are_not_stored() -> None:
    # 131 KB a token over the link against 15 GFLOPs a token: about 1,300 tokens are worth it.
    speeds = {"worth": True, "flops_per_second": 1e15, "host_link_bytes_per_second": 8e9}
    manager = spec({"policy": "lru", **speeds}).get_manager()
    assert isinstance(manager, WorthwhileManager)
    shortest = manager.shortest
    assert shortest is not None
    manager.shortest = 160  # so that a short trace shows it
    Request(manager, "short", keys_of(range(9))).serve()
    assert not manager._policy.chunks.held
    Request(manager, "long", keys_of(range(10))).serve()
    assert len(manager._policy.chunks.held) == 10
    again = Request(manager, "again", keys_of([*range(5), 99]))
    assert again.serve() == 5
    assert len(manager._policy.chunks.held) == 10
    manager.shortest = None
    Request(manager, "any", keys_of(range(50, 99))).serve()
    assert len(manager._policy.chunks.held) == 10
    check(manager)
