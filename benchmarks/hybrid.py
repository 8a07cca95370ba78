"""Hit rates of orders of states and KV on hybrid models, in one run.

    python benchmarks/hybrid.py [--seeds 0,1,2,3,4] [--requests N] [--traces DIR] [--gaps recorded]
                                [--only chat,agentic] [--shares 1,2] [--jobs 1]
                                > benchmarks/results/hybrid.md

Qwen3-Next (24,576 bytes of KV a token, 77 MB a state), pages of 512 tokens, prompts only, one request at a
time. Memory is a share of the KV bytes of all distinct whole pages. "Separate" gives 47 % of it to states, as
SGLang does by default; all others use one shared pool, priced in bytes. "refresh consumed" is `consumed-lru`.
"clairvoyant" knows the future and is greedy: a bound in practice, not the optimum. A cell is the mean over
the seeds: of generated workloads, of Weka's session starts, and of where a part of a longer Mooncake trace
begins.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
from _report import recorded_traces

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.trace import Trace
from costcache.sim.traces.reading import load_trace
from costcache.sim.workloads import generate, workload_settings

PAGE = 512
STATES = 0.47
SHARES = (1, 2, 5, 10)
MODEL = ModelSpec.preset("qwen3-next")
COLUMNS: tuple[tuple[str, str, dict[str, float], float | None], ...] = (
    ("separate LRU", "lru", {}, STATES),
    ("separate seglen 0.3", "seglen", {"seglen_eff_weight": 0.3}, STATES),
    ("separate hazard", "hazard", {}, STATES),
    ("joint LRU", "lru", {}, None),
    ("refresh consumed", "consumed-lru", {}, None),
    ("seglen 0.15", "seglen", {"seglen_eff_weight": 0.15}, None),
    ("seglen 0.3", "seglen", {"seglen_eff_weight": 0.3}, None),
    ("seglen 0.85", "seglen", {"seglen_eff_weight": 0.85}, None),
    ("marconi", "marconi", {}, None),
    ("hazard", "hazard", {}, None),
    ("clairvoyant, greedy", "optimum", {}, None),
)
NAMES = [column[0] for column in COLUMNS]
AGAINST = {"one pool": ("hazard", "joint LRU", "seglen 0.3")}
AGAINST["separate"] = ("separate hazard", "separate LRU", "separate seglen 0.3")
"""For each kind of pool the columns of hazard, of LRU and of seglen."""
WEKA = "weka v6"


def traces(
    folder: Path, seeds: list[int], requests: int, gaps: Literal["answers", "recorded"]
) -> Iterator[tuple[str, list[Callable[[], Trace]]]]:
    """Yield each trace's name with its builders, one per seed unless a recorded trace is used whole."""
    for kind in ("conversation", "synthetic"):
        path = folder / f"mooncake_{kind}.jsonl.gz"
        spare = max(0, len(load_trace(path)) - requests)
        starts = sorted({spare * at // max(1, len(seeds) - 1) for at in range(len(seeds))})
        yield f"mooncake {kind}", [partial(from_place, path, start, requests) for start in starts]
    for name, file in (
        (WEKA, "weka_cc_v6_global.jsonl.xz"),
        ("weka v8", "weka_cc_v8_local_60sessions.jsonl.gz"),
    ):
        yield name, [partial(load, folder / file, seed, requests, gaps) for seed in seeds]
    for name in ("chat", "few-shot", "multi-turn", "agentic"):
        fewer = min(requests, 16_000) if name == "agentic" else requests
        made = [workload_settings(name, {"requests": fewer, "seed": seed}) for seed in seeds]
        yield name, [partial(generate, name, each) for each in made]


def from_place(path: Path, start: int, requests: int) -> Trace:
    """Load the requests of a trace from one on."""
    return part(load_trace(path).in_time_order(), start, requests)


def part(trace: Trace, start: int, requests: int) -> Trace:
    """Take the requests from one on."""
    return trace.take(np.arange(start, min(start + requests, len(trace))))


def load(path: Path, seed: int, requests: int, gaps: Literal["answers", "recorded"]) -> Trace:
    """Load the first requests of a trace of sessions whose starts are drawn."""
    return part(load_trace(path, seed=seed, gaps=gaps).in_time_order(), 0, requests)


def rates(make: Callable[[], Trace], shares: list[int]) -> list[dict[str, float]]:
    """Measure the token hit rate in % by column, for each share of memory."""
    trace = make().in_time_order()
    return [dict(zip(NAMES, rates_of(trace, share), strict=True)) for share in shares]


def rates_of(trace: Trace, share: int) -> list[float]:
    """Measure the token hit rate in % of each column."""
    found = []
    served = Deployment(page_size=PAGE)
    capacity = trace.distinct_pages(PAGE) * PAGE * share // 100
    for _, policy, settings, states in COLUMNS:
        simulator = Simulator(trace, MODEL, served, state_share=states)
        outcome = simulator.outcome(Settings(policy=policy, policy_settings=settings), capacity)
        found.append(100 * int(outcome.matched.sum()) / int(trace.input_tokens.sum()))
    return found


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Orders of states and KV.")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of workloads and session starts, with commas")
    parser.add_argument("--traces", type=Path, default=recorded_traces())
    parser.add_argument("--requests", type=int, default=20_000, help="of each trace, at most")
    parser.add_argument(
        "--gaps", choices=("answers", "recorded"), default="answers", help="for Weka; as in a replay"
    )
    parser.add_argument("--only", help="workloads, separated by commas; all by default")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="memory in %%, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    options = parser.parse_args()
    shares = [int(share) for share in options.shares.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    about = (__doc__ or "").split("benchmarks/results/hybrid.md")[1].strip()
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# Hit rates of hybrid models\n\n    {command}\n\n{about}\n")
    print("| % of tokens found | memory | " + " | ".join(NAMES) + " |")
    print("|---|---:" + "|---:" * len(COLUMNS) + "|")
    cells: dict[tuple[str, int], list[dict[str, float]]] = {}
    wanted = options.only.split(",") if options.only else None
    tasks = [
        (name, make)
        for name, makers in traces(options.traces, seeds, options.requests, options.gaps)
        if wanted is None or name in wanted
        for make in makers
    ]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        running = [(name, pool.submit(rates, make, shares)) for name, make in tasks]
        for name, each in running:
            for share, rate in zip(shares, each.result(), strict=True):
                cells.setdefault((name, share), []).append(rate)
            print(name, file=sys.stderr, flush=True)
    for (name, share), found in cells.items():
        row = (f"{fmean(rate[column] for rate in found):.2f}" for column in NAMES)
        print(f"| {name} | {share} % | " + " | ".join(row) + " |")
    print("\nHazard against LRU and seglen in the same pools, mean and range over the seeds:\n")
    print("| | memory | pools | over LRU | from | to | over seglen |\n|---|---:|---|---:|---:|---:|---:|")
    over: dict[str, list[tuple[float, float]]] = {pools: [] for pools in AGAINST}
    for (name, share), found in cells.items():
        for pools, (hazard, lru, seglen) in AGAINST.items():
            gains = [rate[hazard] - rate[lru] for rate in found]
            mean, other = fmean(gains), fmean(rate[hazard] - rate[seglen] for rate in found)
            over[pools].append((mean, other))
            figures = (mean, min(gains), max(gains), other)
            print(
                f"| {name} | {share} % | {pools} | " + " | ".join(f"{gain:+.2f}" for gain in figures) + " |"
            )
    print("\n| demand | found | wanted | |\n|---|---:|---:|---|")
    if (WEKA, 2) in cells:
        found = cells[WEKA, 2]
        joint = fmean(rate["joint LRU"] for rate in found)
        demand(
            "joint over separate, weka v6 at 2 %", joint - fmean(rate["separate LRU"] for rate in found), 20.0
        )
        demand("hazard over joint, weka v6 at 2 %", fmean(rate["hazard"] for rate in found) - joint, 3.0)
    for pools, gains in over.items():
        demand(f"hazard over LRU, worst of {len(gains)} cells, {pools}", min(gain for gain, _ in gains), -0.3)
        demand(f"hazard over seglen, mean, {pools}", fmean(other for _, other in gains), 0.0)


def demand(what: str, found: float, wanted: float) -> None:
    """Print one line of the table of demands."""
    print(f"| {what} | {found:+.2f} | ≥ {wanted:+g} | {'' if found >= wanted else 'missed'} |")


if __name__ == "__main__":
    main()
