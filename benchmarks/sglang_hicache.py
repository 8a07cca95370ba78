"""Cost of an eviction under SGLang's host tier: SGLang's own cache and ours, in turns.

    python benchmarks/sglang_hicache.py [--turns 150] [--cpu] > benchmarks/results/sglang_hicache.md

SGLang's peer is its Python core: its Rust core serves no host tier. The caches are its real classes on CPU,
over pools in pages of 64, with copies between the tiers in plain torch. Before each eviction a prompt as long
as a leaf is served, which evicts as it needs. Then so many tokens are freed. Each eviction frees a leaf whole
in SGLang, and the tokens asked for in ours. The caches of a row exist at once and take turns.

``--cpu`` counts processor time, which leaves interruptions by other work out. It does not leave out that
other work empties the processor's caches, which slows ours and stock's by different amounts: so the ratios
are also given of the lower quartiles, of evictions that were disturbed less.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

from _report import calibrate, load, table

from costcache._version import described

PAGE = 64
WARM_UP = 40
LIMIT = 1.3
WRITES = ("write_through", "write_through_selective", "write_back")


class Cell(NamedTuple):
    """Leaves of so many tokens each, and the tokens that an eviction frees."""

    leaves: int
    leaf: int
    needed: int


CELLS = (Cell(20, 2048, 1024), Cell(40, 2048, 704), Cell(400, 512, 512), Cell(2000, 256, 256))
CACHES = ("stock", "lru", "hazard")


def prepare() -> None:
    """Import SGLang once, with copies that need no GPU."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import pytest
    import torch

    import tests.sglang.shims.torchvision_ops  # noqa: F401  # must come before SGLang
    from tests.sglang import hicache

    torch.set_num_threads(1)
    hicache.patch(pytest.MonkeyPatch())


def build(name: str, write: str, cell: Cell) -> Any:
    """Make a cache of many leaves, full but for a few pages."""
    from tests.sglang.pools import Shape, cost_cache, stock_cache
    from tests.sglang.serving import Server

    tokens = cell.leaves * cell.leaf + 4 * PAGE
    shape = Shape("mha", PAGE, tokens=tokens, hicache=write)
    server = Server(stock_cache(shape) if name == "stock" else cost_cache(shape, policy=name), shape)
    for leaf in range(cell.leaves):
        server.serve(range(leaf * cell.leaf, (leaf + 1) * cell.leaf))
    return server


def measure(write: str, cell: Cell, turns: int, clock: Callable[[], int]) -> dict[str, list[float]]:
    """Time evictions, in microseconds, of each cache in turn."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    servers = {name: build(name, write, cell) for name in CACHES}
    times: dict[str, list[float]] = {name: [] for name in CACHES}
    start = 1_000_000
    for turn in range(WARM_UP + turns):
        start += cell.leaf
        for name, server in servers.items():
            server.serve(range(start, start + cell.leaf))
            began = clock()
            server.cache.evict(EvictParams(num_tokens=cell.needed))
            if turn >= WARM_UP:
                times[name].append((clock() - began) / 1000)
            server.settle()
    return times


def main() -> None:
    """Measure all cells, and print a page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--cpu", action="store_true", help="count processor time")
    options = parser.parse_args()
    prepare()
    before, loop = load(), calibrate()
    rows: list[list[str]] = []
    over: list[str] = []
    over_quiet: list[str] = []
    for write in WRITES:
        for cell in CELLS:
            times = measure(write, cell, options.turns, thread_time_ns if options.cpu else perf_counter_ns)
            medians = {name: statistics.median(found) for name, found in times.items()}
            ratios = {name: medians[name] / medians["stock"] for name in CACHES[1:]}
            quarter = {name: statistics.quantiles(found, n=4)[0] for name, found in times.items()}
            quiet = {name: quarter[name] / quarter["stock"] for name in CACHES[1:]}
            for found, each in ((over, ratios), (over_quiet, quiet)):
                found += [f"{write}, {cell.leaves} leaves, {name}" for name, r in each.items() if r > LIMIT]
            rows.append(
                [write, f"{cell.leaves:,} of {cell.leaf:,}", f"{cell.needed:,}"]
                + [f"{medians[name]:,.0f}" for name in CACHES]
                + [f"{ratios[name]:.2f}" for name in CACHES[1:]]
                + [f"{quiet[name]:.2f}" for name in CACHES[1:]]
            )
    doc = (__doc__ or "").strip().split("\n")
    arguments = " ".join(["python benchmarks/sglang_hicache.py", *sys.argv[1:]])
    print(f"# Evictions under SGLang's host tier\n\n    {arguments}\n")
    print("\n".join(doc[4:]) + "\n")
    print(
        f"costcache {described()}; load {before:.2f} at the start and {load():.2f} at the end; calibration "
        f"loop {loop:.1f} µs. Medians of {options.turns} evictions, µs"
        f"{' of processor time' if options.cpu else ''}; the ratio is that of the medians.\n"
    )
    ratios_of = ["lru / stock", "hazard / stock", "lru, lower quartile", "hazard, lower quartile"]
    table(["write policy", "leaves", "freed", *CACHES, *ratios_of], rows, texts=2)
    print(f"Over {LIMIT} by medians: {'; '.join(over) or 'none'}.")
    print(f"Over {LIMIT} by lower quartiles: {'; '.join(over_quiet) or 'none'}.")


if __name__ == "__main__":
    main()
