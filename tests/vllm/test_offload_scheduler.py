"""The CPU offload tier behind vLLM's real scheduler and connector; transfers end as a worker reports them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from costcache.records import Asker
from costcache.vllm import clients
from costcache.vllm.registration import scheduler_class
from tests.vllm.tier import MODULE, check, config

pytestmark = pytest.mark.skipif(
    not hasattr(CachePolicy, "on_request_access"), reason="vLLM's offload tier tells too little before 0.33"
)

kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(16, sha256)


class Engine:
    """A scheduler with the offloading connector, a small GPU pool and a tier of 60 chunks."""

    def __init__(self, extra: dict[str, Any], additional: Any = None, blocks: int = 40) -> None:
        made = config({"cpu_bytes_to_use": 60 * 4096, **extra}, additional)
        made.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
        groups = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler: Any = scheduler_class(Scheduler)(
            made, groups, StructuredOutputManager(made), block_size=16
        )
        self.manager = self.scheduler.connector.connector_scheduler.manager
        self.loaded = 0
        self.evicted: list[Any] = []
        prepare = self.manager.prepare_store

        def prepare_store(keys: Any, context: Any) -> Any:
            output = prepare(keys, context)
            if output is not None:
                self.evicted += output.evicted_keys
            return output

        self.manager.prepare_store = prepare_store

    def add(self, name: str, prompt: list[int], *, hints: Any = None, **more: Any) -> None:
        params = SamplingParams(max_tokens=3, extra_args=None if hints is None else {"costcache": hints})
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=HASHER, **more))

    def step(self) -> None:
        """Schedule, let a model answer 7 to everything, and complete all transfers."""
        scheduled = self.scheduler.schedule()
        meta = scheduled.kv_connector_metadata
        done = OffloadingWorkerMetadata()
        for job in [*meta.load_jobs, *meta.store_jobs]:
            done.mark_completed(job)
        loads = meta.load_jobs.values()
        self.loaded += sum(len(job.dst_spec.block_ids) for job in loads)
        names = list(scheduled.num_scheduled_tokens)
        running = {request.request_id: request for request in self.scheduler.running}
        tokens = [
            [7] if running[name].num_computed_tokens >= running[name].num_tokens else [] for name in names
        ]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(
                finished_recving={job.req_id for job in loads}, kv_connector_worker_meta=done
            ),
        )
        self.scheduler.update_from_output(scheduled, output)

    def drain(self) -> None:
        for _ in range(200):
            if not self.scheduler.has_requests() and not self.scheduler.has_finished_requests():
                return
            self.step()


def serve(engine: Engine, seed: int, requests: int) -> None:
    """Conversations that share system prompts, some at once."""
    rng, chats = random.Random(seed), [[page] * 32 for page in range(8)]
    for number in range(requests):
        chat = rng.choice(chats)
        if len(chat) > 250:
            del chat[32:]
        chat += [rng.randrange(1000) for _ in range(rng.randrange(10, 40))]
        engine.add(str(number), list(chat))
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.drain()


OURS = {"cache_policy_module_path": MODULE, "eviction_policy": "costcache"}


@pytest.mark.parametrize("policy", ["lru", "hazard", "arc"])
@pytest.mark.parametrize("both", [False, True], ids=["the tier alone", "the GPU's blocks too"])
def test_a_server_with_our_policy_loads_and_stores(policy: str, both: bool) -> None:
    engine = Engine({**OURS, "costcache": {"policy": policy}}, {"costcache": policy} if both else None)
    serve(engine, 1, 200)
    check(engine.manager)
    chosen = engine.manager._policy
    assert chosen.chunks.pool.policy == policy
    assert chosen.chunks.pool.fallbacks == 0
    assert not hasattr(chosen, "lru")
    assert engine.loaded > 20
    assert len(engine.evicted) > 100
    assert not chosen.chunks._busy
    assert engine.scheduler.reset_connector_cache()
    assert not chosen.chunks.held


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("tier", ["example", "fs"])
def test_the_primary_tier_of_vllms_tiering_spec_has_our_policy(
    tier: str, policy: str, tmp_path: Path
) -> None:
    """Chunks go on to a second tier, one of files among them, and come back through the first one."""
    second = {"type": tier, **({"root_dir": str(tmp_path)} if tier == "fs" else {})}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [second]}
    engine = Engine({**OURS, **extra, "costcache": {"policy": policy}})
    try:
        serve(engine, 1, 120)
        chosen = engine.manager.primary_tier._policy
        assert chosen.chunks.pool.policy == policy
        assert chosen.chunks.pool.fallbacks == 0
        assert not hasattr(chosen, "lru")
        assert engine.loaded > 20
        assert len(engine.evicted) > 50
        check(engine.manager.primary_tier)
    finally:
        engine.manager.shutdown()


def test_vllm_has_no_other_spec_than_these_two() -> None:
    """A third one would have to be tested, or refused."""
    assert set(OffloadingSpecFactory._registry) == {"CPUOffloadingSpec", "TieringOffloadingSpec"}


@pytest.mark.parametrize("both", [False, True], ids=["the tier alone", "the GPU's blocks too"])
def test_a_policy_of_the_tier_knows_who_asked(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hands the tier the id of a request and its ``kv_hints``; the scheduler's request has the rest."""
    engine = Engine({**OURS, "costcache": {"policy": "lru"}}, {"costcache": "lru"} if both else None)
    pool, ends = engine.manager._policy.chunks.pool, []
    monkeypatch.setattr(pool, "_finish", lambda request, info: ends.append((request.asker, info)))
    engine.add("a", [1] * 64, session_id="chat", cache_salt="shop", priority=-2)
    engine.drain()
    engine.add("b", [1] * 64, hints={"user": "ann", "tenant": "bank", "session": "s", "session_ends": True})
    engine.drain()
    envelope = KvHintsEnvelope("1", "1", [KvHintAction("1", "costcache", "1", {"user": "bob"})])
    engine.add("c", [2] * 64, kv_hints=envelope)
    engine.drain()
    engine.add("d", [3] * 64)
    engine.drain()
    askers = [asker for asker, _ in ends]
    assert askers == [Asker("chat", "shop"), Asker("s", "bank", "ann"), Asker(user="bob"), None]
    told = [info for _, info in ends]
    assert (told[0].session, told[0].priority) == ("chat", 2)
    assert (told[1].session, told[1].tenant, told[1].user, told[1].session_ends) == ("s", "bank", "ann", True)
    made = {(record.made_by, record.used_by) for record in pool.live.values()}
    assert (Asker("chat", "shop"), Asker("chat", "shop")) in made  # a cache salt keeps its prefixes apart
    assert (None, None) in made
    assert len(engine.scheduler._costcache_clients) == 0  # nothing is kept of requests that ended


def test_senders_are_forgotten_at_an_abort_and_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST", 3)
    engine = Engine({**OURS, "costcache": {"policy": "lru"}})
    known = engine.scheduler._costcache_clients
    for number in range(5):
        engine.add(str(number), [number] * 64, session_id=f"chat {number}")
    assert len(known) == 3
    assert known.of(ReqContext("4"))[0] == Asker("chat 4")
    assert known.of(ReqContext("0"))[0] is None
    engine.scheduler.finish_requests([str(number) for number in range(5)], RequestStatus.FINISHED_ABORTED)
    assert len(known) == 0


def test_senders_are_not_kept_if_no_tier_asks() -> None:
    engine = Engine({}, {"costcache": "lru"})  # the tier is vLLM's own
    engine.add("a", [1] * 64, session_id="chat")
    assert len(engine.scheduler._costcache_clients) == 0
