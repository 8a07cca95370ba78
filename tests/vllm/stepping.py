"""vLLM's real schedulers, sync and async, step by step; a stand-in for the model answers at random."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from costcache.vllm.registration import scheduler_class
from tests.vllm.tier import model

SIZE = 16
kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(SIZE, sha256)


class Stepper:
    """One scheduler, what it scheduled, and a model that answers.

    Args:
        policy: The policy among its blocks; None for vLLM's own.
        asynchronous: Schedule a step before the one before it has been answered.
        drafts: Tokens that are drafted ahead; a random number of them is accepted.
        eagle: The drafter is one that needs the last block of a prefix computed again.
        connector: A KV connector and its extra config.
        blocks: Blocks of the pool.
        budget: Tokens of a step: longer prompts are computed in chunks.
        seed: Same seed, same answers.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        asynchronous: bool = False,
        drafts: int = 0,
        eagle: bool = False,
        connector: tuple[str, dict[str, Any]] | None = None,
        blocks: int = 45,
        budget: int = 200,
        seed: int = 0,
    ) -> None:
        speculative: Any = None
        if drafts:
            speculative = SpeculativeConfig(model="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3)
        transfer: Any = None
        if connector is not None:
            transfer = KVTransferConfig(
                kv_connector=connector[0], kv_role="kv_both", kv_connector_extra_config=connector[1]
            )
        config = VllmConfig(
            model_config=model(),
            cache_config=CacheConfig(block_size=SIZE),
            scheduler_config=SchedulerConfig.default_factory(
                max_model_len=2048,
                is_encoder_decoder=False,
                max_num_seqs=6,
                max_num_batched_tokens=budget,
            ),
            device_config=DeviceConfig(device="cpu"),
            speculative_config=speculative,
            kv_transfer_config=transfer,
            additional_config={} if policy is None else {"costcache": policy},
        )
        config.cache_config.num_gpu_blocks = blocks
        if eagle:
            config.speculative_config.use_eagle_block_drop = lambda: True
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler: Any = scheduler_class(AsyncScheduler if asynchronous else Scheduler)(
            config,
            KVCacheConfig(blocks, self.tensors(blocks), [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=SIZE,
            log_stats=True,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.scheduled: list[Any] = []
        self.found = 0
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self._rng = random.Random(seed)
        self._ahead = int(asynchronous)
        self._drafts = drafts
        self._steps: deque[tuple[Any, set[str]]] = deque()

    def add(self, name: str, prompt: list[int], output: int) -> None:
        """A request arrives."""
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=HASHER))

    def abort(self, name: str) -> None:
        """A client goes away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule one step, and let the model answer one; returns what was scheduled."""
        out = self.scheduler.schedule()
        cached = out.scheduled_cached_reqs
        self.scheduled.append(
            (
                [(new.req_id, new.block_ids, new.num_computed_tokens) for new in out.scheduled_new_reqs],
                list(zip(cached.req_ids, cached.new_block_ids, strict=True)),
                dict(out.num_scheduled_tokens),
            )
        )
        self.found += sum(new.num_computed_tokens for new in out.scheduled_new_reqs)
        requests = self.scheduler.requests
        answered = {name for name in out.num_scheduled_tokens if not requests[name].is_prefill_chunk}
        self._steps.append((out, answered))
        while len(self._steps) > self._ahead:
            self._answer(*self._steps.popleft())
        return out

    def drain(self) -> None:
        """Step until nothing is left."""
        for _ in range(5000):
            if not self.scheduler.has_requests():
                break
            self.step()
        while self._steps:
            self._answer(*self._steps.popleft())
        self.step()  # in which it hears of the last ones that ended
        while self._steps:
            self._answer(*self._steps.popleft())

    def tensors(self, blocks: int) -> list[Any]:  # for those with a connector
        """The memory of the blocks, by which a connector sizes its own."""
        return []

    def transferred(self, out: Any) -> KVConnectorOutput | None:  # for those with a connector
        """What the workers' connector reports of a step."""
        return None

    def _answer(self, out: Any, answered: set[str]) -> None:
        names = list(out.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for name in names:
            if name not in answered:
                tokens.append([])
                continue
            drafted = out.scheduled_spec_decode_tokens.get(name, [])
            accepted = self._rng.randrange(len(drafted) + 1) if drafted else 0
            tokens.append([self._rng.randrange(50) for _ in range(accepted + 1)])
        self.scheduler.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=tokens,
                kv_connector_output=self.transferred(out),
            ),
        )
        if self._drafts and not self._ahead:
            drafting = [name for name in names if name in answered and name in self.scheduler.requests]
            drafts = [[self._rng.randrange(50) for _ in range(self._drafts)] for _ in drafting]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafting, drafts))


def serve(*steppers: Stepper, seed: int, requests: int = 150, resets: bool = False) -> None:
    """Give all the same conversations, of which some are aborted; they must schedule the same."""
    rng = random.Random(seed)
    heads = [[rng.randrange(50) for _ in range(rng.randrange(20, 120))] for _ in range(6)]
    for number in range(requests):
        head = rng.choice(heads)
        if len(head) > 300:
            del head[100:]
        if rng.random() < 0.6:
            head += [rng.randrange(50) for _ in range(rng.randrange(60))]
        prompt = head + [1000 + number] * rng.randrange(1, 80)
        output, name, aborted = rng.randrange(1, 40), str(number), rng.random()
        turns, reset, evicted = rng.randrange(4), rng.random(), rng.randrange(1, 50)
        for each in steppers:
            each.add(name, list(prompt), output)
            for _ in range(turns):
                each.step()
            if aborted < 0.05:
                each.abort(name)
            if resets and reset < 0.03:
                each.scheduler.reset_prefix_cache(reset_running_requests=True)
            elif resets and reset < 0.1:
                each.scheduler.reset_prefix_cache()
            elif resets and reset < 0.2:
                each.manager.evict_blocks({evicted, evicted + 1})
    for each in steppers:
        each.drain()


def check(stepper: Stepper) -> None:
    """Nothing is in use at the end, no block is lost, and nothing of costcache has failed."""
    pool = stepper.pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(set(free)) == len(free) == pool.free_block_queue.num_free_blocks == len(pool.blocks) - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    ours = getattr(pool, "costcache", None)
    if ours is not None:
        assert ours.runs is not None
        assert ours.runs.pool.fallbacks == 0
        assert ours.runs.pool.pinned == 0
        assert not ours.runs._held
        assert not ours.leaving
        assert not ours.runs.stray
