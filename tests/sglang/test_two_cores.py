"""The Python core and the Rust core choose the same victims on the same stream."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from costcache.sglang.records import PoolRecord
from tests.sglang.pools import Shape, cost_cache
from tests.sglang.serving import DIGIT, Server

CORES = ("python", "rust")
POLICIES = ("lru", "lfu", "fifo", "filo", "mru", "slru", "priority")
Span = tuple[int, tuple[int, ...]]


class Watched(Server):
    """A server that notes its victims: where in its prefix each one starts, and its tokens."""

    def __init__(self, shape: Shape, **settings: Any) -> None:
        super().__init__(cost_cache(shape, **settings), shape)
        self.gone: list[Span] = []
        core = self.cache.tree_core
        take_leaf = core.take_leaf

        def watched(record: PoolRecord, needed: int) -> Any:
            end = core.collect_path_info([getattr(record.node, "id", record.node)])[0][-1].path_end
            result = take_leaf(record, needed)
            rows = self._rows()
            for slots in result[1]:
                digits = rows[slots, :3].to(dtype=slots.dtype)
                tokens = digits[:, 0] + DIGIT * (digits[:, 1] + DIGIT * digits[:, 2])
                self.gone.append((end - len(tokens), tuple(tokens.tolist())))
            return result

        core.take_leaf = watched


def stream(rng: random.Random, page_size: int, requests: int) -> Iterator[dict[str, Any]]:
    """Requests that share prefixes, cut inside pages and nodes too, some with outputs and priorities."""
    scale = max(1, page_size // 8)
    heads = [[rng.randrange(1 << 20) for _ in range(rng.choice((20, 40, 90)) * scale)] for _ in range(5)]
    for _ in range(requests):
        head = rng.choice(heads)
        prompt = head[: rng.choice((len(head), len(head), len(head) // 2, rng.randrange(1, len(head))))]
        prompt = prompt + [rng.randrange(1 << 20) for _ in range(rng.choice((1, 10, 30)) * scale)]
        output = [rng.randrange(1 << 20) for _ in range(rng.choice((0, 1, 5, 20)))]
        yield {
            "prompt": prompt,
            "output": output,
            "priority": rng.choice((-3, 0, 0, 2)),
            "extra_key": rng.choice((None, None, "lora")),
            "touch": rng.random() < 0.2,
        }
        if rng.random() < 0.3:  # the next turn of it
            heads.append(prompt + output)


def run(server: Server, seed: str, page_size: int, requests: int) -> list[int]:
    """Serve the stream, up to three requests at once; returns what each found cached."""
    rng = random.Random(seed)
    found = []
    waiting: list[Any] = []
    for item in stream(rng, page_size, requests):
        if item["touch"]:
            server.match(item["prompt"], extra_key=item["extra_key"])
            continue
        if len(item["prompt"]) + 2 * page_size > server.shape.tokens // 3:
            continue
        req = server.request(item["prompt"], priority=item["priority"], extra_key=item["extra_key"])
        found.append(server.start(req))
        waiting.append((req, item["output"]))
        while len(waiting) > 2 or (waiting and rng.random() < 0.5):
            done, output = waiting.pop(rng.randrange(len(waiting)))
            server.decode(done, output)
            server.finish(done)
        server.cache.tree_core.sanity_check([], [])
    for done, output in waiting:
        server.decode(done, output)
        server.finish(done)
    server.check()
    return found


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_victims(policy: str, page_size: int) -> None:
    pool, requests = (1200, 100) if page_size == 1 else (4096, 40)
    servers = [
        Watched(Shape("mha", page_size, tokens=pool, core=core), policy=policy, trim="off") for core in CORES
    ]
    found = [run(server, f"{policy} {page_size}", page_size, requests) for server in servers]
    assert found[0] == found[1]
    assert servers[0].gone == servers[1].gone
    assert len(servers[0].gone) > 5
    assert sum(found[0]) > pool // 4
    for server in servers:
        server.drain()
        assert server.cache.pools.kv.fallbacks == 0
    assert servers[0].gone == servers[1].gone  # the last leaf, too
    assert servers[1].cache.tree_core.own_walks == servers[1].cache.tree_core.refused == 0


def joined(spans: list[Span]) -> list[Span]:
    """Pieces of one prefix that were evicted one after the other, as one."""
    whole: list[Span] = []
    for start, tokens in spans:
        if whole and whole[-1][0] == start + len(tokens):
            whole[-1] = (start, tokens + whole[-1][1])
        else:
            whole.append((start, tokens))
    return whole


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_the_same_tails_where_both_cut_chunks(policy: str, page_size: int) -> None:
    """All matches end at chunk ends: where one ends inside a chunk, later cuts of the two differ."""
    settings = {"policy": policy, "trim": "chunk", "trim_chunk": 2 * page_size}
    pool = 80 * page_size
    python, rust = (Watched(Shape("mla", page_size, tokens=pool, core=core), **settings) for core in CORES)
    for server in (python, rust):
        rng = random.Random(7)
        for step in range(60):
            number = rng.randrange(8)
            base, pages = number * 10_000, (8, 16, 22)[number % 3]
            server.serve(range(base, base + pages * page_size + 1), priority=step % 3)
            server.cache.evict(EvictParams(num_tokens=rng.randrange(4 * page_size)))
            server.check()
    assert joined(python.gone) == joined(rust.gone)
    assert len(joined(rust.gone)) > 10
    assert python.cache.pools.kv.counters.trimmed > 5
    assert len(rust.gone) > len(python.gone)
    for server in (python, rust):
        server.drain()


def trace(core: str, policy: str) -> str:
    """A digest of all victims of one stream."""
    server = Watched(Shape("mha", 1, tokens=1500, core=core), policy=policy, trim="off")
    run(server, "ranks", 1, 60)
    server.drain()
    return hashlib.sha256(repr(server.gone).encode()).hexdigest()


PROGRAM = """
import sys
sys.path.insert(0, '{root}')
import tests.sglang.shims.torchvision_ops
from tests.sglang.test_two_cores import CORES, trace
print(*(trace(core, policy) for core in CORES for policy in ("lru", "slru")))
"""


def test_ranks_agree_whatever_their_hash_seed() -> None:
    """Two processes, as two tensor-parallel ranks are: every victim is the same."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(root=Path(__file__).resolve().parents[2])],
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = done.stdout.split()[-4:]
    ours = [trace(core, policy) for core in CORES for policy in ("lru", "slru")]
    assert ours == theirs
    lru, slru, rust_lru, rust_slru = ours
    assert (lru, slru) == (rust_lru, rust_slru)
    assert lru != slru
