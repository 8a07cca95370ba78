"""The overhead of a policy inside SGLang: match, insert and evict on a full pool, caches taking turns.

    python benchmarks/sglang_policies.py [--policies lru,hazard] [--requests 3000] [--cpu] [--markdown]

The prompts are interleaved chats that share system prompts, each turn the chat so far and 200 tokens more,
and prompts in between that are sent once. They run through SGLang's real pools, allocators, ``Req`` and
scheduler functions, without the model. Every cache serves each request before the next one begins.

"Cache" is the time spent in the cache's own ``match_prefix``, ``insert`` and ``evict_for_alloc``, including
SGLang's part of them. "Request" is the time of a whole request, from its first match to its release. Ratios
are to costcache's LRU on the same (Python) tree core, of the means and of the medians. Caches hit different
prefixes, and so have different work; "hit" is the token hit rate. SGLang's own cache on the Rust core is
listed too, though most policies cannot run on that core.

Requests count once eight times as many tokens have been evicted as the pool has slots. hazard remembers six
times as many, and is cheaper while it remembers fewer.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sglang_core
from _report import calibrate, load

PER_CHAT = 1638
"""Slots per concurrent chat: too few to cache them all."""
TURNOVERS = 8
"""Requests begin to count when the pool's slots have been evicted this many times."""
STOCK = "SGLang, Rust core"


def stream(at_a_time: int) -> Iterator[list[int]]:
    """Yield prompts without end: of ``at_a_time`` chats, half of them busier, and some that are sent once."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 100_000) for _ in range(count)]

    systems = [words(600) for _ in range(4)]
    # Chats of all ages from the start.
    chats = [rng.choice(systems) + words(200 * rng.randrange(17)) for _ in range(at_a_time)]
    while True:
        if rng.random() < 0.2:
            yield words(1500)
            continue
        chat = rng.choice(chats[-at_a_time // 2 :] if rng.random() < 0.7 else chats)
        chat += words(200)
        yield list(chat)
        if len(chat) > 4000:
            chats.remove(chat)
            chats.append(list(rng.choice(systems)))


@dataclass
class Served:
    """One cache, and the times of its requests in microseconds."""

    server: Any
    inside: int = 0
    within: bool = False
    cache: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)
    hit: int = 0

    def __post_init__(self) -> None:
        for name in ("match_prefix", "insert", "evict_for_alloc"):
            setattr(self.server.cache, name, self._counted(getattr(self.server.cache, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.within:
                return call(*args, **kwargs)
            self.within = True
            start = sglang_core.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside += sglang_core.clock() - start
                self.within = False

        return counted

    def serve(self, prompt: list[int]) -> None:
        """Serve one request from start to end."""
        req = self.server.request(prompt)
        self.inside = 0
        start = sglang_core.clock()
        self.hit += self.server.start(req)
        self.server.finish(req)
        self.request.append((sglang_core.clock() - start) / 1000)
        self.cache.append(self.inside / 1000)

    def forget(self) -> None:
        """Forget everything measured so far."""
        self.cache.clear()
        self.request.clear()
        self.hit = 0


def serve(prompt: list[int], caches: dict[str, Served]) -> int:
    """Serve one request from every cache; returns its tokens."""
    for cache in caches.values():
        cache.serve(prompt)
    return len(prompt)


def servers(policies: list[str], page_size: int, slots: int) -> dict[str, Served]:
    """Build a server for each cache."""
    from tests.sglang.pools import Shape, cost_cache, stock_cache

    def shape(core: str) -> Any:
        return Shape("mha", page_size, tokens=slots, core=core)

    made = {STOCK: Served(sglang_core.serving(stock_cache(shape("rust")), shape("rust")))}
    for policy in policies:
        python = shape("python")
        made[policy] = Served(sglang_core.serving(cost_cache(python, policy=policy), python))
    return made


def measure(policies: list[str], page_size: int, slots: int, requests: int) -> list[list[str]]:
    """Measure one pool size and page size; returns rows of the table."""
    caches = servers(policies, page_size, slots)
    prompts = stream(slots // PER_CHAT)
    counts = caches["lru"].server.cache.pools.kv.counters
    gc.collect()
    gc.freeze()  # as SGLang's scheduler does after its start
    while counts.evicted < TURNOVERS * slots:
        serve(next(prompts), caches)
    for cache in caches.values():
        cache.forget()
    tokens = sum(serve(next(prompts), caches) for _ in range(requests))
    gc.unfreeze()
    rows = []
    for name, cache in caches.items():
        row = [f"{name}, page {page_size}, {slots:,} slots", f"{100 * cache.hit / tokens:.1f}"]
        for times, of_lru in ((cache.cache, caches["lru"].cache), (cache.request, caches["lru"].request)):
            for average in (statistics.mean, statistics.median):
                own, lru = average(times), average(of_lru)
                row += [f"{own:,.0f}", f"{own / lru:.2f}"]
        rows.append(row)
        if name != STOCK:
            cache.server.drain()
    return rows


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description="The overhead of a policy inside SGLang.")
    parser.add_argument("--policies", default="lru,hazard", help="lru and others, with commas")
    parser.add_argument("--requests", type=int, default=3000, help="requests that count")
    parser.add_argument("--slots", default="65536,524288", help="pool sizes, with commas")
    parser.add_argument("--cpu", action="store_true", help="count processor time")
    parser.add_argument("--markdown", action="store_true", help="print the title of a page too")
    options = parser.parse_args()
    policies = options.policies.split(",")
    if "lru" not in policies:
        parser.error("--policies must include lru, with which the others are compared")
    if options.cpu:
        sglang_core.clock = sglang_core.thread_time_ns
    before, loops = load(), [calibrate()]
    sglang_core.prepare()
    logging.disable(logging.WARNING)
    rows = []
    for slots in map(int, options.slots.split(",")):
        for page_size in (1, 64):
            rows += measure(policies, page_size, slots, options.requests)
            loops.append(calibrate())
    if options.markdown:
        print("# Overhead of a policy inside SGLang\n\n    python benchmarks/sglang_policies.py --markdown\n")
    print(f"{sglang_core.machine(before, loops)}.\n")
    averages = "mean | to LRU | median | to LRU"
    print(f"| µs | hit, % | cache, {averages} | request, {averages} |\n|---|" + "---:|" * 9)
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
