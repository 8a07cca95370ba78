"""vLLM's real manager of the CPU tier, and requests that use it as vLLM's connector does."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from costcache.vllm import build
from costcache.vllm.chunks import Run
from tests.vllm.recorded import chained

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
MODULE = "costcache.vllm.offload"


@functools.cache
def model() -> ModelConfig:
    """vLLM's config of a Llama."""
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
    return ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=131072
    )


def config(extra: dict[str, Any] | None = None, additional: Any = None) -> VllmConfig:
    """vLLM's config of a server with the offloading connector, and blocks of 16 tokens."""
    return VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        model_config=model(),
        cache_config=CacheConfig(block_size=16),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra or {}
        ),
        additional_config=additional or {},
    )


def stock(chunks: int, policy: str = "lru", **more: Any) -> CPUOffloadingManager:
    """The manager with a policy of vLLM's own."""
    return CPUOffloadingManager(chunks, policy, **more)


def ours(
    chunks: int, policy: str, size: int = 16, *, settings: Any = None, **more: Any
) -> CPUOffloadingManager:
    """The manager with a policy of ours, as a scheduler makes it."""
    own = {"policy": policy, **(settings or {})}
    with build.serving(config({"block_size": size, "costcache": own})):
        return CPUOffloadingManager(chunks, "costcache", MODULE, **more)


def keys_of(pages: Sequence[int], group: int = 0) -> list[Any]:
    """Chained keys of a prompt's pages."""
    return [make_offload_key(each, group) for each in chained(pages)]


@dataclass
class Request:
    """A request as the connector drives it: what it found is loaded, the rest stored, batch by batch."""

    manager: Any
    name: str
    keys: list[Any]
    size: int = 16
    stored: int = 0
    evicted: list[Any] = field(default_factory=list)
    transfers: list[tuple[str, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = ReqContext(self.name)
        for at, key in enumerate(self.keys):
            self.context.set_offload_key_position(key, (at + 1) * self.size)
        self.manager.on_new_request(self.context)

    def find(self) -> int:
        """Load what is there, from the first chunk on; the transfer is under way then."""
        hits = 0
        while hits < len(self.keys):
            if self.manager.lookup(self.keys[hits], self.context) is not LookupResult.HIT:
                break
            hits += 1
        if hits:
            self.manager.prepare_load(self.keys[:hits], self.context)
            self.transfers.append(("load", self.keys[:hits]))
        self.stored = hits
        return hits

    def store(self, count: int | None = None) -> bool:
        """Begin to store the next chunks; False if there is no room."""
        end = len(self.keys) if count is None else min(len(self.keys), self.stored + count)
        batch = self.keys[self.stored : end]
        if not batch:
            return True
        output = self.manager.prepare_store(batch, self.context)
        if output is None:
            return False
        self.stored = end
        self.evicted += output.evicted_keys
        if output.keys_to_store:
            self.transfers.append(("store", output.keys_to_store))
        return True

    def complete(self, *, success: bool = True) -> None:
        """Complete the oldest transfer."""
        kind, keys = self.transfers.pop(0)
        if kind == "load":
            self.manager.complete_load(keys, self.context)
        else:
            self.manager.complete_store(keys, self.context, success)

    def finish(self) -> None:
        """End the request; its transfers may still be under way."""
        self.manager.on_request_finished(self.context)

    def serve(self) -> int:
        """All of it, alone; returns the chunks found."""
        hits = self.find()
        if hits:
            self.complete()
        self.store()
        while self.transfers:
            self.complete()
        self.finish()
        return hits


def prompts(seed: int, length: int = 12, branches: int = 3) -> Any:
    """Endless prompts that share much: pages of few kinds, some of them new ones."""
    rng = random.Random(seed)
    fresh = 1000
    while True:
        pages = [rng.randrange(branches) for _ in range(rng.randrange(1, length))]
        if rng.random() < 0.5:
            for _ in range(rng.randrange(length)):
                fresh += 1
                pages.append(fresh)
        yield pages


def check(manager: Any) -> None:
    """The pool has what the tier has; runs are whole, and each begins where the one before it ends."""
    policy = manager._policy
    chunks = policy.chunks
    held, pool = chunks.held, chunks.pool
    if hasattr(policy, "lru"):
        held = policy.lru.chunks
    else:
        chunks._flush() if chunks._new else None
        seen: dict[bytes, Run] = {}
        children: dict[int, int] = {}
        for run in pool.records():
            assert isinstance(run, Run)
            assert run.tokens == len(run.keys) * chunks.size > 0
            assert run.parent is not None
            busy = sum(held[key].ref_cnt != 0 for key in run.keys)
            assert run.busy == busy
            assert run.pins == bool(busy)
            assert not run.depth % chunks.size
            if run.parent is not pool.root:
                assert run.depth >= run.parent.depth + run.parent.tokens
                assert run.parent in pool.live.values()
            children[id(run.parent)] = children.get(id(run.parent), 0) + 1
            for key in run.keys:
                assert key not in seen
                seen[key] = run
        for run in pool.records():
            assert run.live_children == children.get(id(run), 0)
        assert seen.keys() == held.keys()
        assert all(chunks._where[key] is run for key, run in seen.items())
        assert len(chunks._where) == len(seen)
        assert pool.cached == len(held) * chunks.size
        assert pool.pinned == sum(run.tokens for run in pool.records() if run.locks)
    ids = [chunk.chunk_id for chunk in held.values()]
    free = manager._free_list
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(free)
    assert len(ids) + len(free) == manager._num_allocated_chunks <= manager._num_chunks
    assert sum(chunk.ref_cnt == 0 for chunk in held.values()) == manager._num_evictable_cache_chunks
