"""Median times of the generic cache's operations, on int64 arrays, through the public ``RadixCache``.

    python benchmarks/radix.py [--json | --markdown] [--quick] [--policies NAME ...]

An eviction of one token frees one page.

- "One after another": nothing else happens between evictions, and the victims are leaves of many pages. The
  target of 10 µs is for these.
- "Between requests": a leaf is touched before each pair of evictions and a new one inserted after it, so the
  order has stale entries to correct and memory is cold. One eviction of a pair trims a leaf of two pages, the
  other removes the rest of it.
- "The order alone" is the policy's part of that, from the call of the order to its return. A policy may defer
  the work of a touch until the next victim, so the first victim after a touch is listed separately too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
from _report import Report, check
from numpy.typing import NDArray

from costcache import RadixCache, Victim, VictimOrder
from costcache.policies import BUILTIN

MODEL = "deepseek-v3"
NODES = 20
Tokens = NDArray[np.int64]


def timed(operation: Callable[[], object], repeats: int) -> list[int]:
    """Time many calls, in nanoseconds each."""
    times = []
    for _ in range(repeats):
        start = perf_counter_ns()
        operation()
        times.append(perf_counter_ns() - start)
    return times


def noting(call: Callable[..., Any], times: list[int], *, to_last: bool = False) -> Callable[..., Any]:
    """Wrap ``call``: its nanoseconds are appended to ``times``, or added to the last entry."""

    def timed_call(*arguments: Any) -> Any:
        start = perf_counter_ns()
        answer = call(*arguments)
        taken = perf_counter_ns() - start
        if to_last:
            times[-1] += taken
        else:
            times.append(taken)
        return answer

    return timed_call


class Timed(VictimOrder):
    """An order that names victims through a timed call."""

    def __init__(self, next_victim: Callable[[str], Victim | None]) -> None:
        self._next_victim = next_victim

    def next_victim(self, pool: str) -> Victim | None:
        """Name the victim of the timed order."""
        return self._next_victim(pool)


def path_of(nodes: int, tokens: int, page_size: int) -> tuple[RadixCache, Tokens]:
    """Build a cache with ``tokens`` tokens on a path of ``nodes`` nodes; returns it and the tokens."""
    cache = RadixCache(MODEL, tokens * 2, page_size, "lru")
    prompt = np.random.default_rng(0).integers(0, 128_000, tokens)
    for node in range(1, nodes + 1):
        end = tokens * node // nodes // page_size * page_size
        cache.insert(prompt[:end], np.arange(end))
    check(cache.stats().nodes == nodes, f"{nodes} nodes")
    return cache, prompt


def match(report: Report, page_size: int, repeats: int) -> None:
    """Measure matches that hit all of 2k and 32k tokens, on one node and on many."""
    for tokens, wanted in ((2048, 10.0), (32_768, 20.0)):
        times = {}
        for nodes in (1, NODES):
            cache, prompt = path_of(nodes, tokens, page_size)
            check(cache.match_prefix(prompt).matched_len == tokens // page_size * page_size, "a full hit")
            times[nodes] = timed(lambda c=cache, p=prompt: c.match_prefix(p), repeats)  # type: ignore[misc] # defaults bind now
            name = f"match {tokens:,} tokens, {nodes} node{'s' * (nodes > 1)}, page {page_size}"
            report.add_times(name, times[nodes], wanted if nodes == 1 else None)
            with_slots = timed(lambda c=cache, p=prompt: c.match_prefix(p).slots, repeats)  # type: ignore[misc] # as above
            report.add_times(f"{name}, and its slots", with_slots)
        if tokens == 2048:
            many, one = statistics.median(times[NODES]), statistics.median(times[1])
            report.add(f"one node more on the path, page {page_size}", (many - one) / (NODES - 1) / 1000)


def insert(report: Report, policy: str, page_size: int, repeats: int) -> None:
    """Measure inserts of 2k tokens: all new, into a full or a fresh cache, and all but one page cached."""
    tokens, room = 2048, 100
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 128_000, tokens) for _ in range(room + repeats)]
    for i, prompt in enumerate(prompts):
        prompt[0] = 200_000 + i
    # As a server does it: allocate slots, which evicts old prompts, then insert.
    cache = RadixCache(MODEL, room * tokens, page_size, policy)
    times = []
    for prompt in prompts:
        slots = cache.allocate(tokens)
        start = perf_counter_ns()
        cache.insert(prompt, slots)
        times.append(perf_counter_ns() - start)
    check(cache.cached == room * tokens, "a full cache")
    report.add_times(
        f"insert {tokens:,} new tokens in a full cache, page {page_size}, {policy}", times[room:], 20.0
    )

    cache = RadixCache(MODEL, (room + repeats) * tokens + repeats * page_size, page_size, policy)
    times = []
    for i, prompt in enumerate(prompts):
        slots = np.arange(i * tokens, (i + 1) * tokens)
        start = perf_counter_ns()
        cache.insert(prompt, slots)
        times.append(perf_counter_ns() - start)
    report.add_times(f"insert {tokens:,} new tokens in fresh memory, page {page_size}, {policy}", times)
    times = []
    for i, prompt in enumerate(prompts[:repeats]):
        longer = np.concatenate((prompt, rng.integers(0, 128_000, page_size)))
        first = (room + repeats) * tokens + i * page_size
        slots = np.concatenate((np.arange(i * tokens, (i + 1) * tokens), np.arange(first, first + page_size)))
        start = perf_counter_ns()
        cache.insert(longer, slots)
        times.append(perf_counter_ns() - start)
    check(cache.free == 0, "every page inserted")
    report.add_times(f"insert a page after {tokens:,} cached tokens, page {page_size}, {policy}", times)


def evict(report: Report, policy: str, leaves: int, page_size: int, repeats: int) -> None:
    """Measure one-page evictions from a cache of many leaves, one after another."""
    length = (64 if leaves < 100_000 else 8) * page_size
    cache = RadixCache(MODEL, leaves * length, page_size, policy)
    prompt = np.arange(length)
    for number in range(leaves):
        prompt[0] = number
        cache.insert(prompt, priority=number % 3)
    check(cache.free == 0, "a full cache")
    cache.evict(1)
    times = []
    for _ in range(repeats):
        start = perf_counter_ns()
        cache.evict(1)
        times.append(perf_counter_ns() - start)
    check(cache.free == (repeats + 1) * page_size, "one page freed by each eviction")
    name = f"evict 1 token, one after another, {leaves:,} leaves, page {page_size}, {policy}"
    report.add_times(name, times, 10.0)


def evict_between_requests(report: Report, policy: str, leaves: int, page_size: int, repeats: int) -> None:
    """Measure one-page evictions from a cache of many leaves, in a steady state of touches and inserts."""
    length = 2 * page_size
    cache = RadixCache(MODEL, (leaves + 8) * length, page_size, policy)
    rng = random.Random(0)
    rest = np.arange(1, length + 1)

    def add(number: int) -> None:
        prompt = rest.copy()
        prompt[0] = number
        slots = cache.allocate(length)
        cache.insert(prompt, slots, priority=number % 3)

    def touch(number: int) -> int:
        prompt = rest.copy()
        prompt[0] = number
        start = perf_counter_ns()
        cache.match_prefix(prompt)
        return perf_counter_ns() - start

    pool = cache._pool
    by_order: dict[str, list[int]] = {"touch": [], "victim": []}
    if pool._use is not None:
        pool._use = noting(pool._use, by_order["touch"])
    if pool._touch is not None:
        pool._touch = noting(pool._touch, by_order["touch"], to_last=pool._use is not None)
    pool._guard.order = Timed(noting(pool.order.next_victim, by_order["victim"]))
    for number in range(leaves):
        add(number)
    for _ in range(leaves // 2):
        touch(rng.randrange(leaves))
    for _ in range(64):  # the first eviction pays for all touches since the start
        cache.evict(page_size)
    for taken_before in by_order.values():
        taken_before.clear()
    touches: list[int] = []
    firsts: list[int] = []
    trims: list[int] = []
    removes: list[int] = []
    for number in range(leaves, leaves + repeats):
        touches.append(touch(rng.randrange(leaves)))
        named = len(by_order["victim"])
        for _ in range(2):
            start = perf_counter_ns()
            eviction = cache.evict(1)
            taken = perf_counter_ns() - start
            check(eviction.freed == page_size, "one page freed by each eviction")
            (trims if eviction.trimmed else removes).append(taken)
        firsts.append(by_order["victim"][named])
        add(number)
    check(len(trims) + len(removes) == 2 * repeats, "a time for every eviction")
    counts = f"between requests, {leaves:,} leaves, page {page_size}, {policy}"
    for what, times in (("evict 1 token, trims", trims), ("evict 1 token, removes", removes)):
        if len(times) > repeats // 2:  # some policies rank a trimmed leaf higher, so it is not evicted next
            report.add_times(f"{what}, {counts}", times)
    report.add_times(f"touch by a match, {counts}", touches)
    for what, wanted in (("touch", 3.0), ("victim", 10.0)):
        if by_order[what]:
            report.add_times(f"{what}, the order alone, {counts}", by_order[what], wanted)
    report.add_times(f"first victim after a touch, the order alone, {counts}", firsts)


def main() -> None:
    """Run all measurements and print the report."""
    parser = argparse.ArgumentParser(description="Median times of the cache's operations.")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, at most 10,000 leaves")
    parser.add_argument(
        "--policies", nargs="+", default=None, metavar="NAME", help="only evictions and touches, of these"
    )
    options = parser.parse_args()
    repeats = 100 if options.quick else 1000
    report = Report("Radix cache: median times", "µs")
    for page_size in () if options.policies else (1, 64):
        match(report, page_size, repeats)
        for policy in ("lru", "hazard"):
            insert(report, policy, page_size, min(repeats, 300))
    for policy in options.policies or BUILTIN:
        for leaves in (1000, 10_000) if options.quick else (1000, 10_000, 100_000):
            evict(report, policy, leaves, 1, repeats)
            evict_between_requests(report, policy, leaves, 1, repeats)
    for leaves in () if options.policies else (1000, 10_000):
        evict(report, "lru", leaves, 64, repeats)
        evict_between_requests(report, "lru", leaves, 64, repeats)
    report.show(options.form)


if __name__ == "__main__":
    main()
