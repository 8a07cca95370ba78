"""What free space costs: token hit rates at several free targets, beside a published claim.

    python benchmarks/headroom.py [--requests 20000] [--seed 0] [--jobs 1] > benchmarks/results/headroom.md

Four generated workloads with their defaults, LRU, pages of 16 tokens, prompts only, one request at a time.
Each free target is asked of two models by their own plugins: of DeepSeek-V3 as
``max(floor, headroom / compression_ratio)`` and of Llama-3-8B as ``headroom``. The script ends with an error
where the two do not hit and evict the same tokens, where a pool that always keeps a share free does not find
what a pool smaller by that share finds, or where a watermark finds less than that. Five minutes on one core.
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
"""Hit rates in %, baseline and MLA-aware: https://github.com/Billy1900/RadixMLA, README.md, "Results"."""


@dataclass(frozen=True, slots=True)
class Target:
    """A share of the pool to leave free, and how each model's plugin is told of it."""

    name: str
    share: float
    mla: Settings
    mha: Settings


def targets() -> list[Target]:
    """20 %, the claim's formula, the claim's README."""

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
        pool: The pool, in % of the distinct whole pages.
        tokens: The pool in tokens.
        exact: Evicting the exact shortfall.
        always: By target, the target restored after every request.
        watermark: By target, freed down to the target by an eviction that has a shortfall.
        evictions: Evictions with a shortfall: at the exact shortfall, then with a watermark by target.
    """

    pool: int
    tokens: int
    exact: float
    always: list[float]
    watermark: list[float]
    evictions: list[int]


def measure(trace: Trace, jobs: int) -> list[Row]:
    """Replay one workload everywhere."""
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
            check(kept.hit_tokens == smaller.hit_tokens, f"{target.name} free as a pool smaller by that")
            check(watermark.hit_tokens >= kept.hit_tokens, "a watermark finding as much as always free")
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
    print(f"# Free space and token hit rates\n\n    {command}\n")
    print(
        "Token hit rates in % under LRU: generated workloads with their defaults, pages of 16 tokens, "
        "prompts only, one request at a time. The pool is in % of the distinct whole pages. "
        f"{MLA.name} and {MHA.name} gave the same hits and the same evicted tokens in every cell. For "
        f"{MLA.name} at headroom 0.20, 5 % free is floor 0.05 (the claim's formula) and 0.28 % is floor 0 "
        "(its README).\n"
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
        "and with its change. Measured: from 20 % to 5 % free at all times, its formula's difference, and "
        "from 20 % to none; points of token hit rate, smallest to largest over the four pools.\n"
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
    print("## Evictions with a shortfall: what headroom buys\n")
    table(
        ["workload", "pool", "none", *(f"{n} watermark" for n in names)],
        [
            [name, f"{row.pool} %", *(f"{count:,}" for count in row.evictions)]
            for name, (_, rows) in results.items()
            for row in rows
        ],
    )


def span(values: list[float]) -> str:
    """Smallest and largest."""
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> None:
    """Run all and print."""
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
