"""The life of a request, as SGLang's scheduler drives it, without a model.

Each step calls the functions that the scheduler calls (match, load back, lock, allocate, checkpoint,
release) with real ``Req`` objects. The forward pass is left out: its tokens are given by the test, and
in place of keys and values it writes each token's id into its slot. A request that reuses a prefix
checks that every slot of it holds the right token: no slot was freed too early, given to two nodes, or
filled wrongly from the host tier.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import (
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_req_slots,
    alloc_token_slots,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.sglang.pools import Shape

EVERYTHING = 10**9
PATIENCE = 120.0  # seconds
DIGIT = 128  # a token id is written as three digits, each exact in bfloat16


def sign(tokens: Sequence[int]) -> list[int]:
    """Three digits that stand for a prefix, each exact in bfloat16."""
    checksum = zlib.crc32(array("q", tokens))
    return [checksum // DIGIT**place % DIGIT for place in range(3)]


class Server:
    """A cache and the requests that run on it.

    Args:
        cache: The cache.
        shape: The shape of its pools.
        chunk: Prompt tokens that are computed at once, as by ``--chunked-prefill-size``; None for all.
    """

    def __init__(self, cache: Any, shape: Shape, *, chunk: int | None = None) -> None:
        self.cache = cache
        self.shape = shape
        self.chunk = chunk
        self.rows = cache.req_to_token_pool
        self.allocator = cache.token_to_kv_pool_allocator
        self.running: list[Req] = []
        self._numbers = 0
        self.whole = self.free()

    # ---- what is free ---------------------------------------------------------------------

    def free(self) -> dict[str, int]:
        """Free slots of each pool."""
        allocator = self.allocator
        if self.shape.has_windows:
            return {"kv": allocator.full_available_size(), "swa": allocator.swa_available_size()}
        free = {"kv": allocator.available_size()}
        if self.shape.has_states:
            free["state"] = self.rows.mamba_allocator.available_size()
        return free

    def check(self) -> None:
        """Every slot is free, cached, or reserved by a running request; and SGLang's own check passes."""
        if self.running:
            return
        cached = {"kv": self.cache.full_evictable_size() + self.cache.full_protected_size()}
        if self.shape.has_windows:
            cached["swa"] = self.cache.swa_evictable_size() + self.cache.swa_protected_size()
        if self.shape.has_states:
            cached["state"] = self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        free = self.free()
        assert {pool: free[pool] + cached[pool] for pool in free} == self.whole
        self.cache.sanity_check()

    def drain(self) -> None:
        """Evict everything and see that no slot was lost."""
        while self.running:
            self.finish(self.running[0])
        self.check()
        self.cache.evict(
            EvictParams(
                num_tokens=EVERYTHING,
                swa_num_tokens=EVERYTHING if self.shape.has_windows else 0,
                mamba_num=EVERYTHING if self.shape.has_states else 0,
            )
        )
        assert self.free() == self.whole

    # ---- requests ------------------------------------------------------------------------

    def request(self, tokens: Iterable[int], **kwargs: Any) -> Req:
        """A new request; ``kwargs`` go to Req (priority, extra_key, cache_salt, lora_id, session_id)."""
        self._numbers += 1
        return Req(f"r{self._numbers}", "", array("q", tokens), SamplingParams(), **kwargs)

    def start(self, req: Req) -> int:
        """Prefill: match, lock, allocate, publish. Returns the tokens that the cache had."""
        cache = self.cache
        req.init_next_round_input(cache)
        self._load_back(req)
        cached = req.cached_tokens = req.prefix_len
        req.lock = cache.lock(req.last_node)
        prefix = cache.prefix_device_indices(req) if cached else torch.empty(0, dtype=torch.int64)
        tokens = req.full_untruncated_fill_ids
        self.verify(prefix, tokens[:cached])
        alloc_req_slots(self.rows, [req], cache)
        self._resume_state(req, tokens[:cached])
        for end in self._chunk_ends(cached, len(tokens)):
            slots = self._extend(prefix, end)
            self._write(slots, tokens[len(prefix) : end])
            row = torch.cat([prefix, slots])
            self.rows.write((req.kv.req_pool_idx, slice(0, end)), row.to(torch.int32))
            req.extend_end = req.kv.kv_committed_len = req.kv.kv_allocated_len = end
            self._track_state(req, end)
            self._write_state(req)
            checkpoint_kv_cache(req, cache)
            # The cache may have put others' slots of the same tokens in place of the request's own.
            prefix = self.rows.req_to_token[req.kv.req_pool_idx, :end].to(torch.int64)
        self.running.append(req)
        return int(cached)

    def _chunk_ends(self, start: int, size: int) -> list[int]:
        """Where the chunks of a prefill end: whole chunks in whole pages, then the rest."""
        if self.chunk is None:
            return [size]
        page = self.shape.page_size
        whole = range(start + self.chunk // page * page, size, self.chunk // page * page)
        return [*whole, size]

    def decode(self, req: Req, tokens: Sequence[int]) -> None:
        """Generate ``tokens``. The prefill gives the first; each further step computes the one before it.

        So the last token of an answer gets no slot.
        """
        for token in tokens:
            if req.output_ids:
                size = req.kv.kv_allocated_len
                slots = self._one_more(req, size)
                self._write(slots, [req.output_ids[-1]])
                self.rows.write((req.kv.req_pool_idx, slice(size, size + 1)), slots.to(torch.int32))
                req.kv.kv_committed_len = req.kv.kv_allocated_len = size + 1
                self._track_state(req, size + 1)
                self._write_state(req)
            req.output_ids.append(token)

    def finish(self, req: Req) -> None:
        """End the request and hand what it computed to the cache."""
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        req.finished_len = len(req.output_ids)
        self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=True)
        if self.shape.hicache is not None:
            self.settle()

    def serve(self, tokens: Iterable[int], output: Sequence[int] = (), **kwargs: Any) -> int:
        """One request from start to end. Returns the tokens that the cache had."""
        req = self.request(tokens, **kwargs)
        cached = self.start(req)
        self.decode(req, output)
        self.finish(req)
        return cached

    def match(self, tokens: Iterable[int], **kwargs: Any) -> MatchResult:
        """Look a prefix up, without a request."""
        key = RadixKey(array("q", tokens), kwargs.pop("extra_key", None), **kwargs)
        return self.cache.match_prefix(MatchPrefixParams(key=key))

    # ---- the forward pass -----------------------------------------------------------------

    def verify(self, slots: torch.Tensor, tokens: Sequence[int]) -> None:
        """Check that the slots contain these tokens."""
        held = self._rows()[slots, :3].to(torch.int64)
        ids = held[:, 0] + DIGIT * (held[:, 1] + DIGIT * held[:, 2])
        assert ids.tolist() == list(tokens), "a cached slot does not hold its token"

    def _write(self, slots: torch.Tensor, tokens: Sequence[int]) -> None:
        ids = torch.tensor(list(tokens), dtype=torch.int64)
        digits = torch.stack([ids % DIGIT, ids // DIGIT % DIGIT, ids // DIGIT**2], dim=1)
        rows = self._rows()
        rows[slots, :3] = digits.to(rows.dtype)

    def _rows(self) -> torch.Tensor:
        """The first full-attention layer's memory, a row a slot."""
        pool = self.allocator.get_kvcache()
        if self.shape.kind == "v4":  # whose latents stand for several tokens: a row a slot beside them
            if not hasattr(self, "_ids"):
                self._ids = torch.zeros((self.shape.tokens + self.shape.page_size, 3), dtype=torch.int64)
            return self._ids
        pool = getattr(pool, "full_kv_pool", pool)
        layer = pool.kv_buffer[0] if self.shape.kind in ("mla", "mla_mamba") else pool.k_buffer[0]
        return layer.view(layer.shape[0], -1)

    def _resume_state(self, req: Req, tokens: Sequence[int]) -> None:
        """Copy a cached state into the request's own slot, as the scheduler does, and check whose it is."""
        if not self.shape.has_states or self.shape.unified:
            return
        source, own = req.kv.mamba_cow_src_index, req.kv.mamba_pool_idx.unsqueeze(0)
        if source is not None:
            self.rows.mamba_pool.copy_from(source, own)
            req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False
        if tokens:
            assert self._states()[own[0], :3].tolist() == sign(tokens), "a state is not that of its prefix"

    def _write_state(self, req: Req) -> None:
        """Write what a state is of into the request's slots of states, in place of the state."""
        if not self.shape.has_states or self.shape.unified:
            return
        tokens = [*req.origin_input_ids, *req.output_ids][: req.kv.kv_committed_len]
        states = self._states()
        states[req.kv.mamba_pool_idx, :3] = torch.tensor(sign(tokens), dtype=states.dtype)
        tracked = req.kv.mamba_last_track_seqlen
        if self.shape.extra_buffer and tracked:
            for slot in req.kv.mamba_ping_pong_track_buffer.tolist():
                if slot >= 0:
                    states[slot, :3] = torch.tensor(sign(tokens[:tracked]), dtype=states.dtype)

    def _states(self) -> torch.Tensor:
        """The first linear layer's states, a row a slot."""
        states = self.rows.mamba_pool.mamba_cache.temporal[0]
        return states.view(states.shape[0], -1)

    def held_states(self) -> int:
        """States that running requests have outside the cache."""
        held = 0
        for req in self.running:
            held += req.kv.mamba_pool_idx is not None
            buffer = req.kv.mamba_ping_pong_track_buffer
            held += 0 if buffer is None else sum(slot >= 0 for slot in buffer.tolist())
        return held

    def _load_back(self, req: Req) -> None:
        """Bring what the host tier has of the prefix back to the device, and wait for it."""
        hit = req.host_hit_length
        if not (hit or req.mamba_host_hit_length):
            return
        loaded, req.last_node = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=hit, req=req)
        )
        req.prefix_len += loaded
        req.kv.cache_protected_len = req.prefix_len
        self.cache.ready_to_load_host_cache()
        self.settle()

    def prefetch(self, tokens: Iterable[int]) -> int:
        """Read what the storage behind the host tier has of a prompt, as the scheduler does while it waits.

        Returns:
            The tokens that are on the device or the host afterwards.
        """
        cache, req = self.cache, self.request(tokens)
        req.init_next_round_input(cache, cow_mamba=False)
        found = req.prefix_len + req.host_hit_length
        prompt = req.full_untruncated_fill_ids
        cache.prefetch_from_storage(
            req.cache_request_handle,
            req.last_host_node,
            prompt[found : req._compute_max_prefix_len(len(prompt))],
            cache.get_last_hash_value(req.last_host_node),
            matched_prefix_tokens=prompt[:found],
        )
        until = time.monotonic() + PATIENCE
        while not cache.check_prefetch_progress(req.cache_request_handle):
            cache.check_hicache_events()
            assert time.monotonic() < until, "a read from storage does not end"
            time.sleep(0.001)
        self.settle()
        match = self.match(prompt[:-1])
        return int(match.device_prefix_len + match.host_hit_length)

    def settle(self) -> None:
        """Let transfers between the tiers end."""
        cache = self.cache
        until = time.monotonic() + PATIENCE
        cache.check_hicache_events()
        while cache.ongoing_write_through or cache.ongoing_load_back or cache.ongoing_backup:
            cache.check_hicache_events()
            assert time.monotonic() < until, "a transfer does not end"

    def _extend(self, prefix: torch.Tensor, size: int) -> torch.Tensor:
        start = len(prefix)
        if self.shape.page_size == 1:
            return alloc_token_slots(self.cache, size - start).to(torch.int64)
        before, after = torch.tensor([start]), torch.tensor([size])
        last = prefix[-1:] if start else torch.tensor([-1])
        return alloc_paged_token_slots_extend(
            self.cache, before, before, after, after, last, size - start
        ).to(torch.int64)

    def _one_more(self, req: Req, size: int) -> torch.Tensor:
        if self.shape.page_size == 1:
            return alloc_token_slots(self.cache, 1).to(torch.int64)
        after = torch.tensor([size + 1])
        last = self.rows.req_to_token[req.kv.req_pool_idx, size - 1 : size].to(torch.int64)
        return alloc_paged_token_slots_decode(self.cache, after, after, last).to(torch.int64)

    def _track_state(self, req: Req, size: int) -> None:
        """Note the end of the kept state, as the forward pass does under ``extra_buffer``."""
        if ComponentType.MAMBA in self.cache.tree_components and self.shape.extra_buffer:
            grid = self.cache.components[ComponentType.MAMBA].mamba_checkpoint_grid
            if size // grid:
                req.kv.mamba_last_track_seqlen = size // grid * grid
