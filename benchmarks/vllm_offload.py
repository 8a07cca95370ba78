"""Hit rates and times of policies in vLLM's CPU offload tier, on its real manager, vLLM's own beside ours.

    python benchmarks/vllm_offload.py [--cells NAME:PERCENT ...] [--requests N] [--policies NAME ...]
        [--parts N] > benchmarks/results/vllm_offload.md

Needs vLLM's classes, no accelerator. Recorded traces are looked for in $COSTCACHE_TRACES, else in
../shared/traces; missing ones are skipped. Each request is looked up, loaded, stored and ended in every
manager in turn, so load on the machine slows all of them alike. A chunk has 512 tokens, as the traces give no
finer hashes; with ``--parts`` each is taken for so many smaller chunks. vLLM's own policies have the name
``vllm`` before theirs.

Everything takes ten minutes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from _report import load, recorded_traces, table

from costcache._version import described

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.vllm.recorded import PAGE, recorded_prompts  # the path first
from tests.vllm.tier import Request, keys_of, ours, stock

POLICIES = ("vllm lru", "vllm arc", "lru", "arc", "hazard")
CELLS = ("conversation:2", "conversation:5", "conversation:10", "synthetic:2", "synthetic:5", "synthetic:10")
AIMS = {"conversation:2": 15.1, "conversation:5": 22.3, "conversation:10": 30.1, "synthetic:5": 15.95}
"""Hit rates of an earlier study in %, in which hazard heard of a request once it had ended."""


@dataclass
class Tier:
    """One manager.

    Attributes:
        manager: vLLM's.
        hits: Chunks found.
        refused: Stores for which there was no room.
        times: Nanoseconds of each request.
    """

    manager: Any
    hits: int = 0
    refused: int = 0
    times: list[int] = field(default_factory=list)


def make(policy: str, chunks: int, size: int = PAGE) -> Tier:
    """An empty tier of chunks of ``size`` tokens under a policy."""
    own = policy.removeprefix("vllm ")
    return Tier(stock(chunks, own) if own != policy else ours(chunks, policy, size))


def serve(tier: Tier, name: str, keys: list[Any], size: int = PAGE) -> None:
    """Serve one request, alone."""
    start = perf_counter_ns()
    request = Request(tier.manager, name, keys, size)
    tier.hits += request.find()
    if request.transfers:
        request.complete()
    tier.refused += not request.store()
    while request.transfers:
        request.complete()
    request.finish()
    tier.times.append(perf_counter_ns() - start)


def measure(
    trace: str, percent: float, policies: list[str], most: int | None, parts: int
) -> tuple[int, int, dict[str, Tier]]:
    """Replay one trace; returns the tier's chunks, the prompts' chunks and the tiers."""
    path = recorded_traces() / f"mooncake_{trace}.jsonl.gz"
    distinct: set[int] = set()
    for pages in recorded_prompts(path):
        distinct.update(pages)
    chunks, asked, size = int(len(distinct) * percent / 100) * parts, 0, PAGE // parts
    tiers = {policy: make(policy, chunks, size) for policy in policies}
    turns = itertools.cycle(range(len(policies)))
    gc.collect()
    gc.disable()
    for number, pages in enumerate(itertools.islice(recorded_prompts(path), most)):
        keys = keys_of([page * parts + part for page in pages for part in range(parts)])[:chunks]
        asked += len(keys)
        first = next(turns)
        for policy in policies[first:] + policies[:first]:
            serve(tiers[policy], str(number), keys, size)
        if not number % 1000:
            gc.collect()
    gc.enable()
    return chunks, asked, tiers


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description="Policies in vLLM's CPU offload tier.")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), metavar="TRACE:PERCENT")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME")
    parser.add_argument(
        "--requests", type=int, default=None, metavar="N", help="only the first N of each trace"
    )
    parser.add_argument("--parts", type=int, default=1, metavar="N", help="chunks for each hash of a trace")
    options = parser.parse_args()
    policies = list(dict.fromkeys(["vllm lru", *options.policies]))
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    rates, times, losses = [], [], []
    for cell in options.cells:
        trace, percent = cell.split(":")
        path = recorded_traces() / f"mooncake_{trace}.jsonl.gz"
        if not path.is_file():
            print(f"{path} is missing: {cell} is skipped", file=sys.stderr)
            continue
        chunks, asked, tiers = measure(trace, float(percent), policies, options.requests, options.parts)
        where = f"{trace} {percent} %"
        hits = {policy: 100 * tier.hits / asked for policy, tier in tiers.items()}
        rates.append([where, f"{chunks:,}", *(f"{hits[policy]:.2f}" for policy in policies)])
        stock_times = tiers["vllm lru"].times
        times.append(
            [
                where,
                *(f"{statistics.fmean(tier.times) / 1000:.0f}" for tier in tiers.values()),
                *(
                    f"{statistics.median(map(truediv, tier.times, stock_times)):.2f}"
                    for tier in tiers.values()
                ),
            ]
        )
        losses += [
            [policy, where, f"{hits[policy] - hits['vllm lru']:+.2f}"]
            for policy in policies
            if hits[policy] < hits["vllm lru"] - 0.005
        ]
        if cell in AIMS and "hazard" in hits and options.requests is None and hits["hazard"] < AIMS[cell]:
            losses.append(["hazard, against the study", where, f"{hits['hazard'] - AIMS[cell]:+.2f}"])
        for policy, tier in tiers.items():
            fell = not policy.startswith("vllm ") and tier.manager._policy.chunks.pool.fallbacks
            if tier.refused or fell:
                print(f"{where}, {policy}: {tier.refused} stores refused, {fell} fallbacks", file=sys.stderr)
        print(f"{where}: {hits}", file=sys.stderr, flush=True)
    import vllm

    print(f"# Policies in vLLM's CPU offload tier\n\n    {command}\n")
    print(
        f"costcache {described()}, vLLM {vllm.__version__}; load {load():.1f} at the end. Prompts in chunks "
        f"of {PAGE // options.parts} tokens, one request at a time; tiers in % of the distinct chunks.\n"
    )
    print("## Hit rates\n\nChunks found, in % of those of the prompts.\n")
    table(["cell", "chunks", *policies], rates)
    print(
        "## Time\n\nMean µs a request in vLLM's manager with its policy, and the median of each request's "
        "time divided by that under vLLM's LRU, taken in turns.\n"
    )
    table(["cell", *(f"{p}, µs" for p in policies), *(f"{p}, ratio" for p in policies)], times)
    print("## Losses\n\nPoints of hit rate under vLLM's LRU, and under those of an earlier study.\n")
    if losses:
        table(["policy", "cell", "points"], losses, 2)
    else:
        print("None.\n")


if __name__ == "__main__":
    main()
