"""SGLang's own prefix caches and ours on both tree cores: times of evict, match and a whole request.

    python benchmarks/sglang_core.py [--json | --markdown] [--quick] [--evict] [--cpu]

Needs SGLang (see CONTRIBUTING.md, ``make test-sglang``) and builds its real pools, allocators and caches on
CPU. The caches of a comparison exist at once and take turns, so that disturbances of the machine affect all
of them alike. A ratio is the median over the turns.

For each eviction a leaf was touched and a new one of 64 tokens inserted: five of each before five evictions
"one after another", and one before an eviction "between requests", which finds the processor's caches cold.

A request has a real ``Req``: match, lock, insert, unlock. It inserts what it matched, or one leaf more. That
insert is on behalf of no request, so our caches have to look up the ancestors of the new leaf. A server does
not insert like that, so no limit is set for it. "As served" is what SGLang's scheduler does: match, lock,
allocate, checkpoint and release, without the model.

On a busy machine, what takes milliseconds is interrupted and what takes microseconds is not, so the Rust
core's eviction at 100,000 leaves looks two or three times as slow as it is. ``--cpu`` counts processor time
instead of wall time, which leaves interruptions out.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

from _report import calibrate, check, load

from costcache._version import described

ROOT = Path(__file__).resolve().parent.parent
LEAF = 64
BURST = 5
CACHES = ("radix", "python", "rust", "costcache python", "costcache rust")
TITLES = {
    "radix": "RadixCache",
    "python": "Python core",
    "rust": "Rust core",
    "costcache python": "costcache, Python",
    "costcache rust": "costcache, Rust",
}


Operation = Callable[[], Any]

clock: Callable[[], int] = perf_counter_ns
"""The clock of all timed operations; ``--cpu`` sets another."""


@dataclass
class Row:
    """Times of one operation on several caches: for each turn, the median in microseconds."""

    name: str
    turns: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    """Times of the Rust core beside each cache that took turns with it alone."""

    def median(self, cache: str) -> float | None:
        """Median over all turns; None if the cache was not measured."""
        return statistics.median(self.turns[cache]) if cache in self.turns else None

    def ratio(self, cache: str, to: str) -> float:
        """Time of ``cache`` over the time of ``to``: the median over the turns."""
        pairs = zip(self.turns[cache], self.beside.get(cache, self.turns[to]), strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


@dataclass(frozen=True)
class Demand:
    """A limit that a figure must meet."""

    what: str
    found: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the figure meets the limit."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def prepare() -> None:
    """Import SGLang once, with what it needs on CPU."""
    sys.path.append(str(ROOT))
    warnings.simplefilter("ignore")
    import torch

    import tests.sglang.shims.torchvision_ops  # noqa: F401  # must come before SGLang

    torch.set_num_threads(1)


def build(name: str, page_size: int, tokens: int) -> Any:
    """Build one of the caches, with LRU."""
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from tests.sglang.pools import Shape, cost_cache, init_params, publish_args, stock_cache

    core = "rust" if name.endswith("rust") else "python"
    shape = Shape("mha", page_size, tokens=tokens // page_size * page_size, core=core)
    if name == "radix":
        publish_args(shape)
        return RadixCache(init_params(shape))
    return cost_cache(shape) if name.startswith("costcache") else stock_cache(shape)


def key(tokens: list[int] | range) -> Any:
    """Make the cache's key for these tokens."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens))


def timed(operation: Operation) -> float:
    """Time one call, in microseconds."""
    start = clock()
    operation()
    return (clock() - start) / 1000


# ---- evict ------------------------------------------------------------------------------------


class Full:
    """A cache of many leaves of 64 tokens, with some free slots."""

    def __init__(self, name: str, page_size: int, leaves: int, room: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams

        self.insert_params, self.match_params = InsertParams, MatchPrefixParams
        self.one_token = EvictParams(num_tokens=1)
        self.cache = build(name, page_size, (leaves + room) * LEAF)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.leaves = 0
        slots = self.allocator.alloc(leaves * LEAF)
        for number in range(leaves):
            self.insert(slots[number * LEAF : (number + 1) * LEAF])
        self.rng = random.Random(0)

    def insert(self, slots: Any) -> None:
        """Insert one more leaf."""
        tokens = range(self.leaves * 1000, self.leaves * 1000 + LEAF)
        self.cache.insert(self.insert_params(key=key(tokens), value=slots))
        self.leaves += 1

    def grow(self) -> None:
        """Touch a leaf and insert a new one."""
        number = self.rng.randrange(self.leaves)
        self.cache.match_prefix(self.match_params(key=key(range(number * 1000, number * 1000 + LEAF))))
        self.insert(self.allocator.alloc(LEAF))

    def evict(self) -> float:
        """Evict one token; returns the microseconds."""
        params, before = self.one_token, self.allocator.available_size()
        taken = timed(lambda: self.cache.evict(params))
        check(0 < self.allocator.available_size() - before <= LEAF, "an eviction of one leaf or less")
        return taken


def evict(page_size: int, leaves: int, turns: int) -> list[Row]:
    """Measure evictions of one token at a number of leaves: one after another, and between requests.

    A server has one cache. Five of 100,000 leaves in one process would only measure cold memory, so each of
    ours takes turns with the Rust core alone.
    """
    where = f"{leaves:,} leaves, page {page_size}"
    rows = [Row(f"evict 1 token, {where}"), Row(f"evict 1 token between requests, {where}")]
    for group in (("radix",), ("python",), ("rust", "costcache python"), ("rust", "costcache rust")):
        # The slow caches need no precision.
        times = _evict(group, page_size, leaves, turns if len(group) > 1 else max(5, turns // 4))
        for row, found in zip(rows, times, strict=True):
            ours = group[-1]
            row.turns[ours] = found[ours]
            if len(group) > 1:
                row.beside[ours] = found["rust"]
                row.turns["rust"] = row.turns.get("rust", []) + found["rust"]
        gc.collect()
    return rows


def _evict(group: tuple[str, ...], page_size: int, leaves: int, turns: int) -> list[dict[str, list[float]]]:
    caches = {name: Full(name, page_size, leaves, turns * (BURST + 1) + 100) for name in group}
    for full in caches.values():
        check(full.leaves == leaves, f"{leaves} leaves")
        for _ in range(3):
            full.grow()
            full.evict()  # the first also pays for work that the many inserts deferred
    gc.collect()
    gc.freeze()  # as SGLang's scheduler does after its start
    bursts: dict[str, list[float]] = {name: [] for name in group}
    singles: dict[str, list[float]] = {name: [] for name in group}
    for _ in range(turns):
        for name, full in caches.items():
            full.grow()
            singles[name].append(full.evict())
            for _ in range(BURST):
                full.grow()
            bursts[name].append(statistics.median([full.evict() for _ in range(BURST)]))
    gc.unfreeze()
    return [bursts, singles]


# ---- match and request ------------------------------------------------------------------------


class Line:
    """A cache with one path of several nodes, and requests that match it."""

    def __init__(self, name: str, page_size: int, tokens: int, nodes: int, room: int) -> None:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

        cache = self.cache = build(name, page_size, tokens + room * LEAF)
        self.allocator = cache.token_to_kv_pool_allocator
        self.tokens = [10**7 + i for i in range(tokens)]
        self.page_size = page_size
        self.match_params, self.insert_params = MatchPrefixParams, InsertParams
        self.slots = torch.empty(0, dtype=torch.int64)
        for node in range(1, nodes + 1):
            end = tokens * node // nodes // page_size * page_size
            self.slots = torch.cat([self.slots, self.allocator.alloc(end - len(self.slots))])
            have = cache.match_prefix(MatchPrefixParams(key=key(self.tokens[:end]))).device_prefix_len
            cache.insert(
                InsertParams(key=key(self.tokens[:end]), value=self.slots.clone(), prev_prefix_len=have)
            )
        self.end = len(self.slots)
        self.number = 0
        found = cache.match_prefix(MatchPrefixParams(key=key(self.tokens)))
        check(found.device_prefix_len == self.end, "a full hit")

    def request(self) -> Any:
        """Make a new request."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.number += 1
        return Req(f"r{self.number}", "", array("q", self.tokens), SamplingParams())

    def again(self) -> Operation:
        """Prepare a match without a request, with which the server refreshes prefixes of waiting requests."""
        params = self.match_params(key=key(self.tokens))
        return lambda: self.cache.match_prefix(params)

    def match(self) -> Operation:
        """Prepare the first match of a request."""
        params = self.match_params(key=key(self.tokens), req=self.request())
        return lambda: self.cache.match_prefix(params)

    def whole(self) -> Operation:
        """Prepare a whole request whose tokens are all cached."""
        return self._whole(self.tokens, self.slots.clone())

    def growing(self) -> Operation:
        """Prepare a whole request that adds a leaf of 64 tokens."""
        import torch

        first = 10**9 + self.number * LEAF
        value = torch.cat([self.slots, self.allocator.alloc(LEAF)])
        return self._whole([*self.tokens[: self.end], *range(first, first + LEAF)], value)

    def _whole(self, tokens: list[int], value: Any) -> Operation:
        cache = self.cache
        match = self.match_params(key=key(tokens), req=self.request())
        insert = self.insert_params(key=key(tokens[: len(value)]), value=value, prev_prefix_len=self.end)

        def run() -> None:
            node = cache.match_prefix(match).last_device_node
            lock = cache.inc_lock_ref(node)
            cache.insert(insert)
            cache.dec_lock_ref(node, lock.to_dec_params())

        return run


def serving(cache: Any, shape: Any) -> Any:
    """Build the tests' server on a cache, without the writes of a forward pass and their checks."""
    from tests.sglang.serving import Server

    class Serving(Server):
        """Writes and checks nothing."""

        def verify(self, slots: Any, tokens: Any) -> None:
            """Check nothing."""

        def _write(self, slots: Any, tokens: Any) -> None:
            pass

    return Serving(cache, shape)


def served(page_size: int, tokens: int, nodes: int, turns: int, repeats: int) -> Row:
    """Measure whole requests through the functions that SGLang's scheduler calls, without the model."""
    from tests.sglang.pools import Shape

    row = Row(f"request as served, {tokens:,} tokens on {nodes} nodes and {LEAF} new, page {page_size}")
    names = [name for name in CACHES if name != "radix"]
    room = turns * repeats
    servers = {}
    for name in names:
        line = Line(name, page_size, tokens, nodes, room)
        servers[name] = serving(line.cache, Shape("mha", page_size, tokens=tokens))
        prefix = line.tokens[: line.end]
        row.turns[name] = []
    gc.collect()
    gc.freeze()
    for turn in range(turns):
        for name, server in servers.items():
            times = []
            for number in range(turn * repeats, (turn + 1) * repeats):
                first = 10**9 + number * LEAF
                req = server.request([*prefix, *range(first, first + LEAF)])
                start = clock()
                found = server.start(req)
                server.finish(req)
                times.append((clock() - start) / 1000)
                check(found == len(prefix), "a full hit of the prefix")
            row.turns[name].append(statistics.median(times))
    gc.unfreeze()
    return row


def walk(page_size: int, tokens: int, nodes: int, turns: int, repeats: int) -> list[Row]:
    """Measure match, whole request, and whole request with a new leaf, on one path."""
    where = f"{tokens:,} tokens on {nodes} nodes, page {page_size}"
    paths = {name: Line(name, page_size, tokens, nodes, turns * repeats) for name in CACHES}
    gc.collect()
    gc.freeze()
    rows = []
    for what, operation in (
        ("match", Line.again),
        ("match, the first of a request", Line.match),
        ("request", Line.whole),
        ("request with a new leaf", Line.growing),
    ):
        row = Row(f"{what}, {where}", {name: [] for name in CACHES})
        for _ in range(turns):
            for name, path in paths.items():
                # Prepared first, so that neither making a request nor its effect on the processor's
                # caches counts.
                made = [operation(path) for _ in range(repeats)]
                row.turns[name].append(statistics.median([timed(run) for run in made]))
        rows.append(row)
    gc.unfreeze()
    return rows


# ---- everything ---------------------------------------------------------------------------------


def demands(rows: dict[str, Row]) -> list[Demand]:
    """Check the limits that the adapter promises, on the rows that were measured."""
    found = []
    for name, row in rows.items():
        for ours, stock in (("costcache python", "python"), ("costcache rust", "rust")):
            what = f"{TITLES[ours]}: {name}"
            if name.startswith("evict 1 token") and "100,000" in name:
                least = 10.0 if name.endswith("page 1") else 20.0
                found.append(
                    Demand(
                        f"{what}, times faster than the Rust core", 1 / row.ratio(ours, "rust"), least, True
                    )
                )
                small = rows[name.replace("100,000", "1,000")].median(ours) or 0.0
                found.append(
                    Demand(f"{what}, over 1,000 leaves", (row.median(ours) or 0.0) / small, 3.0, False)
                )
            elif name.startswith("match"):
                found.append(Demand(f"{what}, over the {TITLES[stock]}", row.ratio(ours, stock), 1.1, False))
            elif name.startswith(("request, ", "request as served")):
                limit = 0.7 if stock == "python" else 1.1
                found.append(
                    Demand(f"{what}, over the {TITLES[stock]}", row.ratio(ours, stock), limit, False)
                )
    return found


def machine(before: float, loops: list[float]) -> str:
    """Describe what was counted, and the machine's load and speed."""
    busy = "; the machine was busy with other work" if before >= 0.7 else ""
    counted = "processor time; " if clock is thread_time_ns else ""
    return counted + (
        f"costcache {described()}; load {before:.2f} at the start and {load():.2f} at the end; "
        f"calibration loop from {min(loops):.1f} to {max(loops):.1f} µs{busy}"
    )


def show(form: str, rows: list[Row], limits: list[Demand], about: str) -> None:
    """Print all rows and limits."""
    if form == "json":
        print(
            json.dumps(
                {
                    "about": about,
                    "unit": "µs",
                    "rows": [
                        {"name": row.name, **{name: row.median(name) for name in CACHES}} for row in rows
                    ],
                    "demands": [
                        {
                            "what": d.what,
                            "found": d.found,
                            "limit": d.limit,
                            "at_least": d.at_least,
                            "holds": d.met,
                        }
                        for d in limits
                    ],
                },
                indent=2,
            )
        )
        return
    headings = ["µs, medians", *(TITLES[name] for name in CACHES)]
    table = [
        [row.name, *("" if row.median(c) is None else f"{row.median(c):,.1f}" for c in CACHES)]
        for row in rows
    ]
    asked = ["demand", "found", "wanted", ""]
    wanted = [
        [d.what, f"{d.found:.2f}", f"{'≥' if d.at_least else '≤'} {d.limit:g}", "" if d.met else "missed"]
        for d in limits
    ]
    if form == "markdown":
        command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
        print(f"# Tree cores: SGLang's and ours\n\n    {command}\n\n{about}.")
        for head, body in ((headings, table), (asked, wanted)):
            print("\n| " + " | ".join(head) + " |\n|---" + "|---:" * (len(head) - 1) + "|")
            for line in body:
                print("| " + " | ".join(line) + " |")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False, markup=False)
    out.width = max(out.width, 150)
    out.print(f"Tree cores: SGLang's and ours\n{about}\n")
    for head, body in ((headings, table), (asked, wanted)):
        shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for i, heading in enumerate(head):
            shown.add_column(heading, justify="left" if not i else "right")
        for line in body:
            shown.add_row(*line)
        out.print(shown)
        out.print()


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description="SGLang's own prefix caches and ours.")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table")
    parser.add_argument("--quick", action="store_true", help="fewer turns, at most 10,000 leaves")
    parser.add_argument("--evict", action="store_true", help="only the rows of evict")
    parser.add_argument(
        "--cpu", action="store_true", help="count processor time, which leaves out interruptions"
    )
    options = parser.parse_args()
    if options.cpu:
        global clock  # noqa: PLW0603  # read by every timed operation
        clock = thread_time_ns
    before, loops = load(), [calibrate()]
    prepare()
    turns = 9 if options.quick else 25
    rows: list[Row] = []
    for page_size in (1, 64):
        for tokens, nodes in () if options.evict else ((2048, 8), (8192, 50)):
            rows += walk(page_size, tokens, nodes, turns, 20)
            rows.append(served(page_size, tokens, nodes, turns, 10))
            loops.append(calibrate())
        for leaves in (1000, 10_000) if options.quick else (1000, 10_000, 100_000):
            rows += evict(page_size, leaves, turns)
            loops.append(calibrate())
    limits = demands({row.name: row for row in rows})
    show(options.form, rows, limits, machine(before, loops))


if __name__ == "__main__":
    main()
