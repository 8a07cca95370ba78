"""A small scheduler over vLLM's real KV cache manager: requests start, grow, are preempted and end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.request import Request, RequestStatus

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.settings import Settings
from costcache.vllm.ends import WideRuns
from costcache.vllm.mixed import attach
from costcache.vllm.registration import tokens_per_block
from costcache.vllm.runs import Run
from tests.vllm.ends import check_ends

kv_cache_utils.init_none_hash(sha256)

SIZE = 16


def colliding(content: Any) -> bytes:
    """A hash of which all first eight bytes, those that tell evicted prefixes apart, are the same."""
    return bytes(8) + bytes(sha256(content))[8:]


def manager(blocks: int, *, size: int = SIZE, events: bool = False, mla: bool = False, **more: Any) -> Any:
    """vLLM's own manager of one group of full attention, with so many blocks for prompts."""
    kind = MLAAttentionSpec if mla else FullAttentionSpec
    spec = kind(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 22,
        scheduler_block_size=size,
        hash_block_size=size,
        enable_caching=True,
        enable_kv_cache_events=events,
        **more,
    )


def bind(policy: str, size: int = SIZE, *, plugins: PluginManager | None = None, **settings: Any) -> Binding:
    """A policy for Llama-3-8B."""
    return Binding.of(
        ModelSpec.preset("llama-3-8b"),
        Deployment(page_size=size),
        Settings(policy=policy, **settings),
        plugins=plugins,
    )


def _ids(*allocated: Any) -> list[int]:
    """Ids of blocks in all groups."""
    return [number for blocks in allocated for group in blocks.get_block_ids() for number in group]


@dataclass
class Server:
    """One manager and its requests.

    Attributes:
        manager: The manager.
        policy: The policy in its place; None for vLLM's own LRU.
        defer: Free the blocks of a request when a later step ends.
        hashing: What hashes blocks.
        running: Requests that hold blocks, by id.
        deferred: Blocks of requests that ended while a step was under way.
        pinned: Blocks that a connector holds.
        connected: Whether a connector has ever held blocks.
        hits: Tokens found.
    """

    manager: Any
    policy: str | Binding | None = None
    defer: bool = False
    hashing: Callable[[Any], bytes] = sha256
    running: dict[str, Any] = field(default_factory=dict)
    deferred: deque[list[Any]] = field(default_factory=deque)
    pinned: list[list[Any]] = field(default_factory=list)
    connected: bool = False
    hits: int = 0

    def __post_init__(self) -> None:
        self.pool = self.manager.block_pool
        self.size = self.pool.hash_block_size
        self._hasher = kv_cache_utils.get_request_block_hasher(self.size, self.hashing)
        if self.policy is not None:
            size = tokens_per_block(self.manager)
            binding = self.policy if isinstance(self.policy, Binding) else bind(self.policy, size)
            attach(self.manager, binding)

    def request(self, name: str, prompt: list[int], output: int = 64, **more: Any) -> Any:
        """A new request, which waits."""
        sampling = SamplingParams(max_tokens=output, extra_args=more.pop("extra_args", None))
        return Request(name, prompt, sampling, None, block_hasher=self._hasher, **more)

    def start(self, request: Any, chunk: int | None = None) -> list[int] | None:
        """Give a waiting request blocks for its first chunk; returns their ids, None if there is no room."""
        self.manager.new_step_starts()
        blocks, found, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        count = request.num_tokens - found
        if chunk is not None:
            count = min(count, chunk)
        count = self._until_a_state(request, found, count)
        new = self.manager.allocate_slots(request, count, found, blocks)
        if new is None:
            return None
        self.hits += found
        request.num_computed_tokens = found + count
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        return _ids(blocks, new)

    def _until_a_state(self, request: Any, start: int, count: int) -> int:
        """How many tokens a chunk has in a model with states: it ends where the state can be cached."""
        states = [
            each.block_size
            for each in self.manager.coordinator.single_type_managers
            if isinstance(each.kv_cache_spec, MambaSpec)
        ]
        if not states or start >= request.num_prompt_tokens:
            return count
        size, end = states[0], start + count
        last = (request.num_tokens - 1) // size * size
        junction = start + (request.shared_prefix_boundary - start) // size * size
        if end < request.num_prompt_tokens and end // size * size > start:
            end = end // size * size
        ahead = (start // size + 1) * size if start % size else 0
        return min([end, *(stop for stop in (ahead, last, junction) if start < stop < end)]) - start

    def go_on(self, request: Any, chunk: int | None = None, ahead: int = 0) -> list[int] | None:
        """Blocks for the next chunk of a prompt, or for one more token and some ahead of it."""
        left = request.num_tokens - request.num_computed_tokens
        if not left:
            request.append_output_token_ids(7000 + request.num_tokens)
            left = 1
        count = left if chunk is None else min(left, chunk)
        self.manager.new_step_starts()
        count = self._until_a_state(request, request.num_computed_tokens, count)
        new = self.manager.allocate_slots(request, count, num_lookahead_tokens=ahead)
        if new is None:
            return None
        request.num_computed_tokens += count
        return _ids(new)

    def generate(self, request: Any, tokens: list[int]) -> bool:
        """Generate tokens one by one; False if there was no room."""
        for token in tokens:
            request.append_output_token_ids(token)
            if self.manager.allocate_slots(request, 1) is None:
                return False
            request.num_computed_tokens += 1
        return True

    def _free(self, request: Any) -> None:
        del self.running[request.request_id]
        if not self.defer:
            self.manager.free(request)
            return
        blocks = self.manager.pop_blocks_for_free(request)
        if blocks:
            self.deferred.append(blocks)

    def drain(self, count: int | None = None) -> None:
        """Free what was deferred, as when a step has ended."""
        for _ in range(len(self.deferred) if count is None else min(count, len(self.deferred))):
            self.pool.free_blocks(reversed(self.deferred.popleft()))

    def finish(self, request: Any, status: Any = RequestStatus.FINISHED_STOPPED) -> None:
        """End a request."""
        request.status = status
        self._free(request)

    def preempt(self, request: Any) -> None:
        """Take a request's blocks; it waits again."""
        self._free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def serve(self, name: str, prompt: list[int], output: Sequence[int] = (), **more: Any) -> int:
        """One request from its beginning to its end, alone; returns the tokens found."""
        chunk = more.pop("chunk", None)
        request, before = self.request(name, prompt, **more), self.hits
        if self.start(request, chunk) is None:
            raise AssertionError(f"no room for {len(prompt)} tokens")
        while request.num_computed_tokens < len(prompt):
            if self.go_on(request, chunk) is None:
                raise AssertionError(f"no room for {len(prompt)} tokens")
        if not self.generate(request, list(output)):
            raise AssertionError(f"no room for {len(output)} more tokens")
        self.finish(request)
        return self.hits - before

    # -- checks ------------------------------------------------------------------------------

    def free_list(self) -> list[int]:
        """Ids of the free blocks in vLLM's order."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def check(self) -> None:
        """Assert that no block is lost, and that the runs are what vLLM has."""
        pool, queue = self.pool, self.pool.free_block_queue
        free = self.free_list()
        assert len(free) == len(set(free)) == queue.num_free_blocks
        assert set(free) == {b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null}
        # vLLM's map of hashes has each hashed block, under its hash.
        for block in pool.blocks:
            if block.block_hash is not None:
                assert pool.cached_block_hash_to_block.contain(block.block_hash, block.block_id)
        runs = getattr(getattr(pool, "costcache", None), "runs", None)
        if runs is None:
            return
        if isinstance(runs, WideRuns):
            check_ends(self, runs)
        if self.connected and not self.pinned:
            runs._settle()  # while a connector holds a copy, a path may lead through it
        records = runs.pool.records()
        assert sum(record.tokens for record in records) == runs.pool.cached
        assert sum(record.tokens for record in records if record.locks) == runs.pool.pinned
        owned: dict[int, Run] = {}
        children: dict[int, int] = {}
        for run in records:
            assert isinstance(run, Run)
            assert run.tokens == len(run.blocks) * runs.size > 0
            assert run.parent is not None
            assert run.depth == run.parent.depth + run.parent.tokens
            children[id(run.parent)] = children.get(id(run.parent), 0) + 1
            for block in run.blocks:
                assert block.block_id not in owned
                owned[block.block_id] = run
        for run in records:
            assert run.live_children == children.get(id(run), 0)
        for block in pool.blocks:
            run = owned.get(block.block_id)
            if run is not None and run.blocks[0] is block:
                assert runs._first[block.block_id] is run
            elif run is None and block.ref_cnt == 0 and not isinstance(runs, WideRuns):
                assert block.block_hash is None or block.is_null
        # What a request holds is locked, and each free block that is cached can be evicted.
        for request in self.running.values():
            life = getattr(request, "_costcache", None)
            if life is not None and life.held is not None:
                assert life.held.run.locks
        for run in records:
            if run.locks and not self.pinned:
                assert all(block.ref_cnt for block in run.blocks), run

    def victims(self) -> Any:
        """Policy in force, for messages."""
        return self.pool.costcache.runs.pool.policy
