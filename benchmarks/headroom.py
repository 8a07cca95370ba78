"""The cost of headroom: token hit rates at several free targets, beside a published claim.

    python benchmarks/headroom.py [--requests 20000] [--seed 0] [--jobs 1] > benchmarks/results/headroom.md

Four generated workloads with their defaults, LRU, pages of 16 tokens, prompts only, one request at a time.
Two models get each free target through their own plugins: DeepSeek-V3 as
``max(floor, headroom / compression_ratio)`` and Llama-3-8B as ``headroom``. The script fails if the two
models do not hit and evict the same tokens, if a pool that always keeps a share free does not hit what a pool
smaller by that share hits, or if a watermark hits less than that. Takes five minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from _report import check, table

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.results import Run
from costcache.sim.sweep import Cell, sweep
from costcache.sim.trace import Trace
from costcache.sim.workloads import generate, workload_settings

PAGE = 16
POOLS = (2, 5, 10, 20)
MLA = ModelSpec.preset("deepseek-v3")
MHA = ModelSpec.preset("llama-3-8b")
HEADROOM = 0.20

CLAIMED = {"chat": (82.1, 93.2), "few-shot": (88.7, 96.3), "multi-turn": (90.3, 97.8), "random": (6.1, 6.8)}
"""Claimed hit rates in %, before and after: https://github.com/Billy1900/RadixMLA, README.md, "Results"."""


@dataclass(frozen=True, slots=True)
class Target:
    """A share of the pool to leave free, and the settings that ask each model's plugin for it."""

    name: str
    share: float
    mla: Settings
    mha: Settings


def targets() -> list[Target]:
    """Build the free targets: 20 %, the claim's formula, the claim's README."""

    def target(name: str, share: float, floor: float) -> Target:
        return Target(
            name,
            share,
            Settings(policy="lru", headroom=HEADROOM, architecture={"floor": floor}),
            Settings(policy="lru", headroom=share),
        )

    return [
        target("20 %", HEADROOM, HEADROOM),
        target("5 %", 0.05, 0.05),
        target("0.28 %", HEADROOM / MLA.compression_ratio, 0.0),
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one pool size; all rates in %.

    Attributes:
        pool: Pool in % of the distinct whole pages.
        tokens: Pool in tokens.
        exact: Hit rate if exactly the shortfall is evicted.
        always: Hit rate by target, if the target is restored after every request.
        watermark: Hit rate by target, if only an eviction with a shortfall frees up to the target.
        evictions: Evictions with a shortfall: exactly the shortfall, then by target with a watermark.
    """

    pool: int
    tokens: int
    exact: float
    always: list[float]
    watermark: list[float]
    evictions: list[int]


def measure(trace: Trace, jobs: int) -> list[Row]:
    """Replay one workload at every pool size and free target, on both models."""
    served = Deployment(page_size=PAGE)
    simulators = {model.name: Simulator(trace, model, served) for model in (MLA, MHA)}
    distinct = trace.distinct_pages(PAGE)
    wanted = targets()
    exact = Settings(policy="lru")
    rows = []
    for percent in POOLS:
        tokens = distinct * percent // 100 * PAGE
        runs: dict[str, list[Run]] = {}
        for name, simulator in simulators.items():
            of_model = [exact] + [t.mla if name == MLA.name else t.mha for t in wanted]
            cells = [
                Cell(settings, f"{percent}%", tokens, always_free=always, tree=True)
                for always in (False, True)
                for settings in (of_model if not always else of_model[1:])
            ]
            runs[name] = sweep(simulator, cells, jobs=jobs)
        mla, mha = runs[MLA.name], runs[MHA.name]
        for one, other in zip(mla, mha, strict=True):
            same = (one.hit_tokens, one.evicted_tokens) == (other.hit_tokens, other.evicted_tokens)
            check(same, f"the same hits and evicted tokens with MLA and MHA: {trace.name} at {percent} %")
        watermarks, always_free = mha[1 : 1 + len(wanted)], mha[1 + len(wanted) :]
        for target, kept, watermark in zip(wanted, always_free, watermarks, strict=True):
            smaller = simulators[MHA.name].run(exact, int(tokens * (1 - target.share)) // PAGE * PAGE)
            check(kept.hit_tokens == smaller.hit_tokens, f"the hits of a pool smaller by {target.name}")
            check(watermark.hit_tokens >= kept.hit_tokens, "a watermark to hit as much as always free")
        rows.append(
            Row(
                percent,
                tokens,
                rate(mha[0]),
                [rate(run) for run in always_free],
                [rate(run) for run in watermarks],
                [run.evictions for run in (mha[0], *watermarks)],
            )
        )
        print(f"{trace.name} at {percent} %", file=sys.stderr)
    return rows


def rate(run: Run) -> float:
    """Token hit rate in %."""
    return 100 * run.token_hit_rate


def show(results: dict[str, tuple[float, list[Row]]]) -> None:
    """Print all tables in Markdown."""
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    names = [target.name for target in targets()]
    print(f"# Headroom and token hit rates\n\n    {command}\n")
    print(
        "Token hit rates in % under LRU: generated workloads with their defaults, pages of 16 tokens, "
        "prompts only, one request at a time. Pools are in % of the distinct whole pages. "
        f"{MLA.name} and {MHA.name} gave the same hits and the same evicted tokens in every cell. For "
        f"{MLA.name} at headroom 0.20, 5 % free means floor 0.05 (the claim's formula), and 0.28 % means "
        "floor 0 (its README).\n"
    )
    table(
        ["workload", "pool", *(f"{n} always" for n in names), *(f"{n} watermark" for n in names), "none"],
        [
            [name, f"{row.pool} %", *(f"{r:.2f}" for r in (*row.always, *row.watermark, row.exact))]
            for name, (_, rows) in results.items()
            for row in rows
        ],
    )
    print("## Beside the claim\n")
    print(
        "Claimed: the table in the README of https://github.com/Billy1900/RadixMLA, hit rates in % without "
        "and with its change. Measured: points of token hit rate gained by keeping 5 % free at all times "
        "instead of 20 %, which is the difference that its formula makes, and by keeping none free instead "
        "of 20 %; smallest to largest over the four pools.\n"
    )
    table(
        ["workload", "claimed before", "claimed after", "claimed gain, points", "20 % to 5 %", "20 % to none",
         "unlimited pool finds, %"],
        [
            [
                name,
                f"{CLAIMED[name][0]}",
                f"{CLAIMED[name][1]}",
                f"{CLAIMED[name][1] - CLAIMED[name][0]:.1f}",
                span([row.always[1] - row.always[0] for row in rows]),
                span([row.exact - row.always[0] for row in rows]),
                f"{100 * ideal:.1f}",
            ]
            for name, (ideal, rows) in results.items()
        ],
    )  # fmt: skip
    print("## What headroom buys: fewer evictions with a shortfall\n")
    table(
        ["workload", "pool", "none", *(f"{n} watermark" for n in names)],
        [
            [name, f"{row.pool} %", *(f"{count:,}" for count in row.evictions)]
            for name, (_, rows) in results.items()
            for row in rows
        ],
    )


def span(values: list[float]) -> str:
    """Format the smallest and the largest value."""
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Token hit rates at several free targets.")
    parser.add_argument("--requests", type=int, default=20_000, help="per workload; 20,000 by default")
    parser.add_argument("--seed", type=int, default=0, help="of the workloads; 0 by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    options = parser.parse_args()
    results = {}
    for name in CLAIMED:
        settings = workload_settings(name, {"requests": options.requests, "seed": options.seed})
        trace = generate(name, settings)
        results[name] = (trace.ideal_hit_rate(PAGE), measure(trace, options.jobs))
    show(results)


if __name__ == "__main__":
    main()
