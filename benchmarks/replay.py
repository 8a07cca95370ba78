"""Simulated requests per second, without parsing: LRU by pages, and each built-in policy through the tree.

    python benchmarks/replay.py [TRACE] [--json | --markdown] [--repeats N] [--policies NAME ...] [--cpu]

The LRU sweep counts the requests of all its capacities. The time of a pass by pages includes numbering the
pages, and its hits are checked against the tree's. Policies take turns, so that each replay has one of LRU
beside it. "LRU's time" is the median ratio of the two times, which a busy machine distorts less than the
rates.

TRACE defaults to the recorded Mooncake conversation in $COSTCACHE_TRACES, else in ../shared/traces, and to a
generated chat workload if that is missing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

from _report import Report, check, recorded_traces

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies import BUILTIN
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.sweep import Cell, outcomes
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import generate
from costcache.sizes import parse_capacity

MODEL = ModelSpec.preset("deepseek-v3")
CAPACITIES = ("unlimited", "14054pages", "5%")
SWEEP = 24
WANTED_SWEEP, WANTED_ONE, WANTED_TREE = 720_000.0, 143_000.0, 15_000.0
LRU = Settings(policy="lru")


def recorded() -> Path:
    """Path of the recorded conversation; it may not exist."""
    return recorded_traces() / "mooncake_conversation.jsonl.gz"


def trace_of(path: str | None) -> Trace:
    """Load the trace that was asked for, else the recorded one, else generate one."""
    if path is not None:
        return load_trace(path)
    return load_trace(recorded()) if recorded().exists() else generate("chat")


def by_pages(trace: Trace, served: Deployment, report: Report, repeats: int) -> None:
    """Measure LRU by pages at one capacity and at many, from a fresh start each time."""
    page, distinct = served.page_size, trace.distinct_pages(served.page_size)
    sizes = [page * max(1, distinct * (i + 1) // SWEEP) for i in range(SWEEP)]
    one = page * min(14_054, distinct)
    single, amortised = [], []
    for _ in range(repeats):
        simulator = Simulator(trace, MODEL, served)
        run = simulator.run(LRU, one)
        single.append(len(trace) / run.seconds)
        served_run = simulator.run(LRU, one, tree=True)
        same = (run.hit_tokens, run.evicted_tokens) == (served_run.hit_tokens, served_run.evicted_tokens)
        check(same, "the hits and evicted tokens of the tree")
        simulator = Simulator(trace, MODEL, served)
        started = perf_counter()
        for size in sizes:
            simulator.outcome(LRU, size)
        amortised.append(SWEEP * len(trace) / (perf_counter() - started))
    report.add(
        f"LRU, {SWEEP} capacities by pages", max(amortised), WANTED_SWEEP, median=statistics.median(amortised)
    )
    report.add("LRU, one capacity by pages", max(single), WANTED_ONE, median=statistics.median(single))


def through_tree(
    simulator: Simulator,
    text: str,
    size: int | None,
    policies: Sequence[str],
    report: Report,
    repeats: int,
    by_processor: bool,
) -> None:
    """Measure all policies at one capacity, in turns."""
    taken: dict[str, list[float]] = {policy: [] for policy in ("lru", *policies)}
    hits: dict[str, set[int]] = {policy: set() for policy in taken}
    for _ in range(repeats):
        for policy, seconds in taken.items():
            started = process_time()
            outcome = simulator.outcome(Settings(policy=policy), size, tree=True)
            seconds.append(process_time() - started if by_processor else outcome.seconds)
            hits[policy].add(int(outcome.matched.sum()))
    for policy in policies:
        check(len(hits[policy]) == 1, "the same hits every time")
        rates = [len(simulator.trace) / seconds for seconds in taken[policy]]
        longer = statistics.median(own / lru for own, lru in zip(taken[policy], taken["lru"], strict=True))
        more = {"median": statistics.median(rates), "LRU's time": longer}
        report.add(f"{text}, {policy}", max(rates), WANTED_TREE, **more)


def in_processes(trace: Trace, served: Deployment, report: Report) -> None:
    """Measure a sweep of the default policy over two processes, including their start."""
    simulator, distinct = Simulator(trace, MODEL, served), trace.distinct_pages(served.page_size)
    sizes = [served.page_size * max(1, distinct * (i + 1) // SWEEP) for i in range(SWEEP)]
    cells = [Cell(Settings(policy="hazard"), f"{size}", size) for size in sizes]
    started = perf_counter()
    outcomes(simulator, cells, jobs=2)
    rate = SWEEP * len(trace) / (perf_counter() - started)
    report.add(f"hazard, {SWEEP} capacities over 2 processes", rate, WANTED_TREE)


def main() -> None:
    """Run all replays and print the report."""
    parser = argparse.ArgumentParser(description="Requests per second of a replay.")
    parser.add_argument("trace", nargs="?", help="a file of Mooncake JSONL")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table")
    parser.add_argument("--repeats", type=int, default=5, help="replays of each; 5 by default")
    parser.add_argument(
        "--policies", nargs="+", default=None, metavar="NAME", help="only these, through the tree"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="through the tree: count processor time, which leaves out interruptions",
    )
    options = parser.parse_args()
    trace = trace_of(options.trace)
    served = Deployment(page_size=trace.block_size)
    distinct = trace.distinct_pages(served.page_size)
    simulator = Simulator(trace, MODEL, served)
    what = f"{trace.name}, {len(trace):,} requests, pages of {served.page_size}"
    report = Report(f"Replay of {what}, best of {options.repeats}", "requests/s", higher_is_better=True)
    if not options.policies:
        by_pages(trace, served, report, options.repeats)
        in_processes(trace, served, report)
    for text in CAPACITIES:
        size = parse_capacity(text).tokens(distinct_pages=distinct, page_size=served.page_size, token_bytes=1)
        through_tree(
            simulator,
            text,
            size,
            options.policies or BUILTIN,
            report,
            options.repeats,
            options.cpu,
        )
    report.show(options.form)


if __name__ == "__main__":
    main()
