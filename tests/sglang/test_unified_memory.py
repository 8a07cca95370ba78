"""KV and states in one buffer (SGLang's unified memory): its walk, over the nodes that our order names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import alloc_extend_naive, unified_sub_pool

from tests.sglang.fuzz import Fuzz
from tests.sglang.mirror import check_records
from tests.sglang.pools import Shape, cost_cache, stock_cache
from tests.sglang.serving import Server
from tests.sglang.streams import chats_and_scans

POLICIES = ("lru", "consumed-lru", "hazard", "marconi", "seglen")


class OnCpu:
    """In place of SGLang's CUDA kernels that lay requests' new tokens out in pages."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Any:
        return self._run


def extend(before: Any, after: Any, last: Any, pages: Any, out: Any, _: int, page_size: int) -> None:
    alloc_extend_naive(before, after, last, pages, out, page_size, "cpu")


def decode(after: Any, last: Any, pages: Any, out: Any, _: int, page_size: int) -> None:
    alloc_extend_naive(after - 1, after, last, pages, out, page_size, "cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unified_sub_pool, "alloc_extend_kernel", OnCpu(extend))
    monkeypatch.setattr(unified_sub_pool, "alloc_decode_kernel", OnCpu(decode))


class UnifiedServer(Server):
    """A free byte is free for KV and for states; slots are virtual, and the memory that they map to moves."""

    def check(self) -> None:
        if not self.running:
            self.cache.sanity_check()

    def verify(self, slots: torch.Tensor, tokens: Sequence[int]) -> None:
        super().verify(self.allocator.translate_kv_loc(slots), tokens)

    def _write(self, slots: torch.Tensor, tokens: Sequence[int]) -> None:
        super()._write(self.allocator.translate_kv_loc(slots), tokens)

    def _rows(self) -> torch.Tensor:
        rows: torch.Tensor = self.allocator.get_kvcache().full_kv_pool.k_buffer[0][:, 0, :]
        return rows


class UnifiedFuzz(Fuzz):
    def _fits(self, tokens: int) -> bool:
        server, cache = self.server, self.server.cache
        free, whole = server.free(), server.whole
        states = 6 * -(-whole["kv"] // whole["state"])  # tokens that six states take the room of
        return bool(free["kv"] + cache.full_evictable_size() >= tokens + 64 + states)

    def _count_slots(self) -> None:
        """Only the bytes are conserved: SGLang's own account of them has no complaint."""
        assert self.server.allocator.verify_byte_accounting() == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 64])
def test_random_operations(page_size: int, policy: str) -> None:
    """Records are what SGLang's tree has, every cached slot holds its token, and no byte leaks."""
    shape = Shape("mamba", page_size, tokens=2048, states=20, unified=True)
    server = UnifiedServer(cost_cache(shape, policy=policy), shape)
    fuzz = UnifiedFuzz(server, page_size)
    for _ in range(120):
        fuzz.step()
        check_records(server.cache)
    assert server.cache.full_evictable_size()
    fuzz.end()
    check_records(server.cache)
    assert server.cache.pools.kv.policy == policy


def test_our_order_names_the_victims() -> None:
    """Under pressure hazard keeps other prefixes than SGLang's own lists, and than LRU."""
    shape = Shape("mamba", 64, tokens=2048, states=16, requests=4, unified=True)
    found = {}
    for name in ("stock", "lru", "hazard"):
        cache = stock_cache(shape) if name == "stock" else cost_cache(shape, policy=name)
        server = UnifiedServer(cache, shape)
        found[name] = [server.serve(prompt, output=[1, 2]) for prompt in chats_and_scans(0, 60)]
        server.drain()
    assert sum(found["stock"]) > 0
    assert found["hazard"] not in (found["stock"], found["lru"])
