"""The adapter on SGLang's own classes, with the servers and random operations of ``tests/sglang``.

What is noted is SGLang's: tokens that requests find, and the free lists of its allocators after each
operation, which say what slots were freed and in which order. :func:`_counts` alone looks inside costcache.
"""

from __future__ import annotations

import functools
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _decisions.log import Case, Log
from _decisions.policies import policies

warnings.simplefilter("ignore")

import pytest  # noqa: E402  # its MonkeyPatch
import torch  # noqa: E402, TID253  # once warnings are off; all of this module is SGLang's, which needs it

import tests.sglang.shims.torchvision_ops  # noqa: E402, F401  # before SGLang is imported

# isort: split
from sglang.srt.mem_cache import registry  # noqa: E402, TID253  # as above
from sglang.srt.mem_cache.allocator import unified_sub_pool  # noqa: E402, TID253  # as above
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402, TID253  # as above
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore  # noqa: E402, TID253  # as above
from sglang.srt.plugins import load_plugins  # noqa: E402, TID253  # as above
from sglang_states import Streamed  # noqa: E402  # as above

from tests.sglang import hicache  # noqa: E402  # as above
from tests.sglang.fuzz import Fuzz  # noqa: E402  # as above
from tests.sglang.pools import Shape, cost_cache  # noqa: E402  # as above
from tests.sglang.serving import Server  # noqa: E402  # as above
from tests.sglang.streams import chats_and_scans  # noqa: E402  # as above
from tests.sglang.test_registration import context  # noqa: E402  # as above
from tests.sglang.test_unified_memory import OnCpu, UnifiedFuzz, UnifiedServer  # noqa: E402  # as above

__all__ = ["adapter_cases"]

RUST = ("fifo", "filo", "lfu", "lru", "mru", "priority", "slru")
"""Policies that SGLang's Rust core serves."""
SOME = ("hazard", "lru", "slru", "priority", "mru", "s3fifo", "lhd", "wild", "gdsf")
FEW = ("hazard", "lru", "consumed-lru", "seglen")
SESSIONS = {"enable_session_radix_cache": True}
EVENTS = {"enable_kv_cache_events": True}
MOST_RUNNING = 2


@dataclass(frozen=True, slots=True)
class Mix:
    """What to build, under which policies, and how long to use it.

    Attributes:
        shape: Pools and tree core.
        only: Policies; None for all.
        variants: Other settings of the policies, too.
        prompts: Prompts of chats and scans.
        steps: Random operations after that.
        settings: More settings of the cache.
        chunked: Prefill in chunks, which leave states (models with states).
    """

    shape: Shape
    only: tuple[str, ...] | None = None
    variants: bool = False
    prompts: int = 80
    steps: int = 60
    settings: dict[str, Any] | None = None
    chunked: bool = False


MIXES: dict[str, Mix] = {
    "mha-1": Mix(Shape("mha", 1, tokens=2048), variants=True, prompts=160),
    "mla-64": Mix(Shape("mla", 64, tokens=4096), prompts=120, settings={"headroom": 0.03}),
    "mha-64-off": Mix(Shape("mha", 64, tokens=4096), prompts=120, steps=0, settings={"trim": "off"}),
    "mha-1-chunk": Mix(Shape("mha", 1, tokens=2048), settings={"trim": "chunk", "trim_chunk": 48}),
    "rust-1": Mix(Shape("mha", 1, tokens=2048, core="rust"), RUST, prompts=160, settings={"trim": "off"}),
    "rust-64": Mix(Shape("mla", 64, tokens=4096, core="rust"), RUST, settings={"headroom": 0.03}),
    "rust-1-chunk": Mix(
        Shape("mha", 1, tokens=2048, core="rust"), RUST, settings={"trim": "chunk", "trim_chunk": 48}
    ),
    "swa-1": Mix(Shape("swa", 1, tokens=3072, window_tokens=1200), prompts=100),
    "swa-64": Mix(Shape("swa", 64, tokens=6144, window_tokens=2048), prompts=100, steps=0),
    "mamba-1": Mix(Shape("mamba", 1, tokens=2048, states=20), prompts=100),
    "mamba-64": Mix(
        Shape("mamba", 64, tokens=4096, states=16, requests=4), chunked=True, steps=0, prompts=120
    ),
    "mla-mamba-64": Mix(Shape("mla_mamba", 64, tokens=4096, states=20), variants=True),
    "sessions-mha": Mix(Shape("mha", tokens=2048, params=SESSIONS), prompts=0, steps=150),
    "sessions-mamba": Mix(
        Shape("mamba", tokens=2048, states=20, params=SESSIONS), (*SOME, *FEW[2:]), prompts=0, steps=150
    ),
    "sessions-swa": Mix(
        Shape("swa", tokens=2048, window_tokens=1024, params=SESSIONS), SOME, prompts=0, steps=120
    ),
    "eagle-64": Mix(Shape("mha", 64, tokens=4096, params={"is_eagle": True}), SOME),
    "events-1": Mix(Shape("mha", 1, tokens=2048, params=EVENTS), SOME[:2]),
    **{
        f"{write}-{kind}-{page}": Mix(
            Shape(kind, page, tokens=2048 * (1 + (page > 1)), states=20, hicache=write),
            SOME if kind == "mha" else (*FEW, "gdsf"),
            prompts=60,
        )
        for write in ("write_through", "write_through_selective", "write_back")
        for kind, page in (("mha", 1), ("mla", 64), ("mamba", 64))
    },
    "unified-64": Mix(Shape("mamba", 64, tokens=2048, states=20, unified=True), (*FEW, "slru")),
}


def _counts(cache: Any) -> dict[str, Any]:
    """Evictions, units evicted, trims and fallbacks of each pool."""
    return {
        name: {
            "evictions": pool.counters.evictions,
            "evicted": pool.counters.evicted,
            "trimmed": pool.counters.trimmed,
            "fallbacks": pool.fallbacks,
        }
        for name, pool in cache.pools.by_name.items()
    }


def _note_slots(server: Any, log: Log) -> None:
    """The free lists of all pools, and events where they are on."""
    allocator, shape = server.allocator, server.shape
    if shape.params.get("enable_kv_cache_events"):
        for event in server.cache.take_events():
            log("event", str(event))
    if shape.unified:
        log("free", sorted(server.free().items()), allocator.get_all_free_pages())
        return
    pools = [allocator]
    if shape.kind == "swa":
        pools = [allocator.full_attn_allocator, allocator.swa_attn_allocator]
    lists = [pool.get_all_free_pages() for pool in pools]
    if shape.has_states:
        lists.append(server.rows.mamba_allocator.free_slots)
    if shape.hicache is not None:
        host = server.cache.host_pool_group
        names = (PoolName.KV, PoolName.MAMBA) if shape.has_states else (PoolName.KV,)
        hosts = map(host.get_pool, names)
        lists += [torch.cat([pool.free_slots, *pool.release_slots]) for pool in hosts]
    log("free", *(slots.numpy() for slots in lists))


def _fits(server: Any, tokens: int) -> bool:
    """Whether a scheduler would admit a request."""
    free, cache = server.free(), server.cache
    if server.shape.unified:
        tokens += 8 * -(-server.whole["kv"] // server.whole["state"])
    elif "state" in free and free["state"] + cache.mamba_evictable_size() < 6:
        return False
    if "swa" in free and free["swa"] + cache.swa_evictable_size() < tokens:
        return False
    return bool(free["kv"] + cache.full_evictable_size() >= tokens)


def _chat(server: Any, prompts: list[list[int]], log: Log) -> None:
    """Serve prompts, some at once."""
    rng = random.Random(len(prompts))
    waiting: list[tuple[Any, list[int]]] = []

    def finish() -> None:
        req, output = waiting.pop(rng.randrange(len(waiting)))
        server.decode(req, output)
        server.finish(req)
        log("finished")
        _note_slots(server, log)

    for prompt in prompts:
        if rng.random() < 0.1:
            log("looked", server.match(prompt).device_prefix_len)
            continue
        room = len(prompt) + 64 + 3 * server.shape.page_size
        while waiting and not _fits(server, room):
            finish()
        if not _fits(server, room):
            log("no room")
            continue
        output = [rng.randrange(3, 500) for _ in range(rng.choice((0, 1, 4, 20)))]
        req = server.request(
            prompt, priority=rng.choice((-3, 0, 0, 2)), extra_key=rng.choice((None, None, None, "lora"))
        )
        server.start(req)
        _note_slots(server, log)
        waiting.append((req, output))
        while len(waiting) > MOST_RUNNING or (waiting and rng.random() < 0.5):
            finish()
    while waiting:
        finish()


def _noting(start: Callable[[Any], int], found: list[int], log: Log) -> Callable[[Any], int]:
    """A server's ``start``, which notes what requests find."""

    def noted(req: Any) -> int:
        tokens = start(req)
        found.append(tokens)
        log("found", tokens)
        return tokens

    return noted


def _run(mix: Mix, policy: str, settings: dict[str, Any], log: Log) -> Mapping[str, Any]:
    shape = mix.shape
    cache = cost_cache(shape, policy=policy, policy_settings=settings, **(mix.settings or {}))
    kind = UnifiedServer if shape.unified else Streamed if mix.chunked else Server
    server: Any = kind(cache, shape)
    found: list[int] = []
    server.start = _noting(server.start, found, log)
    _chat(server, chats_and_scans(3, mix.prompts), log)
    log("counts", sorted((name, *each.values()) for name, each in _counts(cache).items()))
    sessions = bool(shape.params.get("enable_session_radix_cache"))
    if mix.steps:
        fuzz = (UnifiedFuzz if shape.unified else Fuzz)(server, 11, sessions=sessions)
        for number in range(mix.steps):
            log(f"{number} {fuzz.step()}")
            _note_slots(server, log)
        fuzz.end()
    else:
        server.drain()
    _note_slots(server, log)
    counts = _counts(cache)
    log("counts", sorted((name, *each.values()) for name, each in counts.items()))
    fallbacks = sum(each["fallbacks"] for each in counts.values())
    return {"found": sum(found), "fallbacks": fallbacks, **counts}


def _core(kind: Any, policy: str, log: Log) -> Mapping[str, Any]:
    """Build the cache as SGLang does, and see which tree core holds it."""
    with tempfile.TemporaryDirectory() as folder:
        cache = registry.create_tree_cache(context(Shape(kind, 64), Path(folder), f"costcache:{policy}"))
    core = "rust" if isinstance(cache.tree_core, RustUnifiedTreeCore) else "python"
    server = Server(cache, Shape(kind, 64))
    log("found", [server.serve(range(300)) for _ in range(2)])
    return {"core": core}


def adapter_cases() -> Iterator[tuple[str, Case]]:
    """Cases of the adapter."""
    torch.set_num_threads(1)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    load_plugins()
    monkeypatch = pytest.MonkeyPatch()
    hicache.patch(monkeypatch)
    monkeypatch.setattr(unified_sub_pool, "alloc_extend_kernel", OnCpu())
    for kind in ("mha", "mla", "swa", "mamba"):
        for policy, _, _ in policies(variants=False):
            yield f"core/{policy}/{kind}", functools.partial(_core, kind, policy)
    for name, mix in MIXES.items():
        for policy, variant, settings in policies(variants=mix.variants):
            if mix.only is None or policy in mix.only:
                key = "/".join(filter(None, (policy, variant, name)))
                yield key, functools.partial(_run, mix, policy, settings)
