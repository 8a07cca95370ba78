"""Claude Code sessions (kv-cache-tester, all of release v6): hit rates by rule of arrival, and replay times.

    python benchmarks/sessions.py [FILE] [--seeds 5] > benchmarks/results/sessions.md

FILE defaults to weka_cc_v6_global.jsonl.xz in $COSTCACHE_TRACES, else in ../shared/traces. Session starts are
uniform over 6 hours. The first table has pages of 512 tokens and medians over the seeds. The second times a
whole replay from the file to the figures, in pages of 64 tokens, each in a separate process, against limits
of 5 minutes and 4 GiB. Takes ten minutes on one core.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
from _report import check, recorded_traces

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.optimum import optimum
from costcache.sim.paths import page_paths
from costcache.sim.stack import LRUCurve
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.traces.arrivals import Arrivals
from costcache.sim.traces.files import open_source
from costcache.sim.traces.weka import read_weka

PAGE, SHARES = 512, (0.01, 0.02)
MOST_SECONDS, MOST_MIB = 300.0, 4096.0
UNIFORM = Arrivals.parse("uniform:6h")


def _as_replayed(trace: Trace, seed: int) -> Trace:
    return UNIFORM.spread(trace, seed, clock=False)


def _recorded(trace: Trace, seed: int) -> Trace:
    return UNIFORM.spread(trace, seed, clock=False, recorded=True)


def _no_thought(trace: Trace, seed: int) -> Trace:
    return UNIFORM.spread(replace(trace, think_seconds=np.zeros(len(trace))), seed, clock=False)


def _no_service(trace: Trace, seed: int) -> Trace:
    return UNIFORM.spread(replace(trace, service_seconds=None), seed, clock=False)


RULES: dict[str, Callable[[Trace, int], Trace]] = {
    "answer, then think time (the default)": _as_replayed,
    "as recorded (`--gaps recorded`)": _recorded,
    "answer alone, no think times": _no_thought,
    "think times alone": _no_service,
}


def rates(trace: Trace) -> list[float]:
    """Measure token hit rates in %: LRU at each share, then the optimum."""
    paths = page_paths(trace.page_keys(PAGE))
    pools = [int(paths.distinct * share) for share in SHARES]
    curve = LRUCurve(paths)
    found = [int(curve.at(pool).matched.sum()) for pool in pools]
    found += [int(optimum(paths, pool).matched.sum()) for pool in pools]
    return [100 * pages * PAGE / int(trace.input_tokens.sum()) for pages in found]


def end_to_end(path: Path, policy: str) -> tuple[float, float, float]:
    """Replay at 2 %, starting from the file; returns seconds, peak MiB and token hit rate in %."""
    start = perf_counter()
    trace = load_trace(path)
    simulator = Simulator(trace, ModelSpec.preset("deepseek-v3"), Deployment(page_size=trace.block_size))
    distinct = trace.distinct_pages(trace.block_size)
    run = simulator.run(Settings(policy=policy), distinct * 2 // 100 * trace.block_size)
    seconds = perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return seconds, memory, 100 * run.token_hit_rate


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Hit rates of recorded sessions.")
    default = recorded_traces() / "weka_cc_v6_global.jsonl.xz"
    parser.add_argument("file", nargs="?", type=Path, default=default)
    parser.add_argument("--seeds", type=int, default=5, help="seeds of session starts; 5 by default")
    options = parser.parse_args()
    if not options.file.is_file():
        print(f"{options.file} is missing: nothing to measure")
        return
    # This comes first: the peak memory of a new process includes what its parent had used before.
    whole = {}
    for policy in ("lru", "slru", "lhd", "optimum"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            whole[policy] = seconds, memory, _ = alone.submit(end_to_end, options.file, policy).result()
        check(seconds < MOST_SECONDS and memory < MOST_MIB, "within 5 minutes and 4 GiB")
    with open_source(options.file) as source:
        trace = read_weka(source)
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# Claude Code sessions, by rule of arrival\n\n    {command}\n")
    print(
        f"{len(trace):,} requests, pages of {PAGE}; session starts uniform over 6 hours. Token hit rates in "
        f"%: the median over {options.seeds} seeds, in brackets the smallest and the largest. Pools are in % "
        "of the distinct whole pages. The rows are rules for when a session sends its next request.\n"
    )
    print("| | LRU 1 % | LRU 2 % | optimum 1 % | optimum 2 % |\n|---|---:|---:|---:|---:|")
    for name, rule in RULES.items():
        columns = zip(*(rates(rule(trace, seed)) for seed in range(options.seeds)), strict=True)
        cells = [f"{statistics.median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(
        "\n## From the file to the figures\n\nPages of 64, 2 %, one policy, one process.\n\n"
        "| | s | MiB | tokens hit, % |\n|---|---:|---:|---:|"
    )
    for policy, (seconds, memory, rate) in whole.items():
        print(f"| {policy} | {seconds:.0f} | {memory:,.0f} | {rate:.2f} |")


if __name__ == "__main__":
    main()
