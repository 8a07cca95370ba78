"""Hit rates of every policy and of the offline optimum, on recorded and generated workloads.

    python benchmarks/policies.py [--quick] [--policies NAME ...] [--workloads NAME ...] [--pools PERCENT ...]
        [--whole] [--held-out] [--jobs 1] [--rows FILE] > benchmarks/results/policies.md

Plain replay: prompts are cached, generated tokens are not, one request at a time. Pools are in % of the
distinct whole pages, of 512 tokens for Mooncake and Weka, 64 for RAGPulse, 16 for the rest. Recorded traces
are looked for in $COSTCACHE_TRACES, else in ../shared/traces; missing ones are named and skipped. Two shifts
of traffic are replayed too: one trace after another, and two at once.

``--whole`` adds the whole of Weka v6 at 1 and 2 % under ``lru`` and ``hazard``, with session starts of five
seeds, of which the median seed counts. ``--held-out`` replays workloads that no policy here was tuned on
instead. ``--rows`` saves each row to a file, and an interrupted run resumes from it.

Everything takes an hour and a half on one core. ``--quick`` takes two minutes: the first 2,000 requests of
each workload at 2 and 10 %, under four policies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _report import check, recorded_traces, table

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies import BUILTIN
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.results import Run
from costcache.sim.sweep import Cell, sweep
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import WORKLOADS, generate

MODEL = ModelSpec.preset("llama-3-8b")
POOLS = (1, 2, 5, 10, 20, 50)
SEEDS = range(5)
ALLOWED = 0.3
"""Points of hit rate that ``hazard`` may lose to LRU."""
QUICK_POLICIES = ("lru", "lfu", "lhd", "hazard")
WEKA_V6 = "weka_cc_v6_global.jsonl.xz"

FILES = {
    "mooncake conversation": ("mooncake_conversation.jsonl.gz", 512),
    "mooncake synthetic": ("mooncake_synthetic.jsonl.gz", 512),
    "weka v6, 57 sessions": ("weka_cc_v6_global_57sessions.jsonl.gz", 512),
    "weka v8, 60 sessions": ("weka_cc_v8_local_60sessions.jsonl.gz", 512),
    "ragpulse": ("ragpulse_0_trace.jsonl.gz", 64),
    "sharegpt": ("sharegpt_turn_lengths.jsonl.gz", 16),
}

HELD_OUT_FILES = {
    "mooncake arxiv": ("mooncake_arxiv_first1000.jsonl.gz", 512),
    "mini-swe agents": ("lmcache_miniswe.jsonl.gz", 16),
    "bbh": ("bbh_original.tar.gz", 16),
    "gsm8k": ("gsm8k_original.tar.gz", 16),
}
HELD_OUT_SEED = 20
"""Seed of generated workloads, and of session starts."""

LEAST_HITS = {
    ("mooncake conversation", 2): 14.8,
    ("mooncake conversation", 5): 22.5,
    ("mooncake conversation", 10): 29.8,
    ("mooncake synthetic", 10): 27.2,
}
"""Hit rates of an earlier study in %; ``hazard`` may be lower by at most ``ALLOWED``."""
LEAST_GAP = {
    ("weka v6", 1): 45.0,
    ("weka v6", 2): 12.0,
    ("chat", 5): 50.0,
    ("few-shot", 5): 40.0,
    ("multi-turn", 5): 20.0,
}
"""Share of the gap between LRU and the optimum, in %, that ``hazard`` should close."""


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one pool size: rates in % by policy, of tokens hit and of FLOPs saved."""

    workload: str
    pool: int
    tokens: int
    hits: dict[str, float]
    flops: dict[str, float]

    def gain(self, policy: str) -> float:
        """Points of token hit rate over LRU."""
        return self.hits[policy] - self.hits["lru"]

    def gap(self, policy: str) -> float:
        """Share of the gap between LRU and the optimum that a policy closes, in %; NaN if there is no gap."""
        room = self.hits["optimum"] - self.hits["lru"]
        return 100 * self.gain(policy) / room if room > 0.05 else float("nan")


def recorded(
    files: Mapping[str, tuple[str, int]], tokenizer: str | None = None
) -> Iterator[tuple[str, Callable[[], Trace], int]]:
    """Yield name, reader and page size of each of these files that exists; texts need a tokenizer."""
    for name, (file, page) in files.items():
        path = recorded_traces() / file
        if path.is_file():
            by = tokenizer if page == 16 else None
            yield name, lambda path=path, by=by: load_trace(path, tokenizer=by), page
        else:
            print(f"{path} is missing: {name} is skipped", file=sys.stderr)


def workloads(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], Trace], int]]:
    """Yield name, builder and page size of each available workload."""
    yield from recorded({name: file for name, file in FILES.items() if name in names})
    for name in WORKLOADS:
        if name in names and name != "random":  # it shares no prefix: no policy hits anything
            yield name, lambda name=name: generate(name), 16
    for name, build in (("few-shot, then chat", after), ("multi-turn and chat at once", together)):
        if name in names:
            yield name, build, 16


def held_out() -> Iterator[tuple[str, Callable[[], Trace], int]]:
    """Yield name, builder and page size of each held-out workload."""
    yield from recorded(HELD_OUT_FILES, "words")
    for name, workload in WORKLOADS.items():
        if name != "random":
            settings = workload.settings(seed=HELD_OUT_SEED)
            yield f"{name}, another seed", lambda name=name, settings=settings: generate(name, settings), 16
    retimed = [recorded_traces() / name for name in ("mooncake_synthetic.jsonl.gz", "azure2023_conv.csv.gz")]
    if all(path.is_file() for path in retimed):
        yield "mooncake synthetic, azure's times", lambda: load_trace(retimed[0], retime=retimed[1]), 512
    weka = recorded_traces() / "weka_cc_v8_local_60sessions.jsonl.gz"
    if weka.is_file():
        yield (
            "weka v8, other starts, gaps as recorded",
            lambda: load_trace(weka, seed=HELD_OUT_SEED, arrivals="uniform:1h", gaps="recorded"),
            512,
        )


def after() -> Trace:
    """Build a trace of few-shot, then chat."""
    first, second = generate("few-shot"), generate("chat")
    return joined("few-shot, then chat", first, second, float(first.timestamps[-1]))


def together() -> Trace:
    """Build a trace of multi-turn and chat at once."""
    return joined(
        "multi-turn and chat at once", generate("multi-turn"), generate("chat"), 0.0
    ).in_time_order()


def joined(name: str, first: Trace, second: Trace, start: float) -> Trace:
    """Join two traces of one block size; the second begins at ``start`` and shares nothing with the first."""
    check(first.block_size == second.block_size, "two traces of one block size")
    apart = int(first.ids.max()) + 1 - int(second.ids.min())
    return Trace(
        name=name,
        block_size=first.block_size,
        timestamps=np.concatenate((first.timestamps, second.timestamps + start)),
        input_tokens=np.concatenate((first.input_tokens, second.input_tokens)),
        output_tokens=np.concatenate((first.output_tokens, second.output_tokens)),
        ids=np.concatenate((first.ids, second.ids + apart)),
        offsets=np.concatenate((first.offsets, second.offsets[1:] + first.offsets[-1])),
    )


class SavedRows:
    """Rows in a file, so that an interrupted run can resume."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[tuple[str, int], Row] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                row = Row(**json.loads(line))
                self._rows[row.workload, row.pool] = row

    def find(self, name: str, percent: int, policies: Sequence[str]) -> Row | None:
        """Return the saved row of a cell, if it has all these policies."""
        row = self._rows.get((name, percent))
        return row if row is not None and set(policies) <= set(row.hits) else None

    def add(self, row: Row) -> None:
        """Save a row."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def measure(
    name: str,
    trace: Trace,
    page: int,
    pools: Sequence[int],
    policies: Sequence[str],
    jobs: int,
    saved: SavedRows,
) -> list[Row]:
    """Replay one workload at every pool size under every policy."""
    simulator = Simulator(trace, MODEL, Deployment(page_size=page))
    distinct = trace.distinct_pages(page)
    settings = {policy: Settings(policy=policy) for policy in (*policies, "optimum")}
    if "hazard" in policies:
        settings["hazard, flops"] = Settings(policy="hazard", policy_settings={"objective": "flops"})
    rows = []
    for percent in pools:
        tokens = distinct * percent // 100 * page
        if tokens < page:
            continue
        row = saved.find(name, percent, policies)
        if row is not None:
            rows.append(row)
            continue
        cells = [Cell(chosen, f"{percent}%", tokens) for chosen in settings.values()]
        runs: dict[str, Run] = dict(zip(settings, sweep(simulator, cells, jobs=jobs), strict=True))
        hits = {policy: 100 * run.token_hit_rate for policy, run in runs.items()}
        flops = {policy: 100 * run.flops_saved_rate for policy, run in runs.items()}
        check(all(rate <= hits["optimum"] + 1e-9 for rate in hits.values()), "no policy above the optimum")
        rows.append(Row(name, percent, tokens, hits, flops))
        saved.add(rows[-1])
        found = " ".join(f"{policy} {rate:.2f}" for policy, rate in hits.items())
        print(f"{name} at {percent} %: {found}", file=sys.stderr, flush=True)
    return rows


def whole_weka(policies: Sequence[str], jobs: int, saved: SavedRows) -> list[Row]:
    """Replay the whole of Weka v6; the rows are those of the median seed of session starts."""
    path = recorded_traces() / WEKA_V6
    if not path.is_file():
        print(f"{path} is missing: weka v6 is skipped", file=sys.stderr)
        return []
    by_seed = [
        measure(f"weka v6, seed {seed}", load_trace(path, seed=seed), 512, (1, 2), policies, jobs, saved)
        for seed in SEEDS
    ]
    rows = []
    for same in zip(*by_seed, strict=True):
        middle = sorted(same, key=lambda row: row.gap("hazard" if "hazard" in policies else "lru"))
        rows.append(
            Row(
                "weka v6",
                same[0].pool,
                same[0].tokens,
                middle[len(same) // 2].hits,
                middle[len(same) // 2].flops,
            )
        )
        closed = ", ".join(f"{row.gap('hazard'):.0f}" for row in same) if "hazard" in policies else ""
        print(f"weka v6 at {same[0].pool} %: gap closed by seed {closed}", file=sys.stderr)
    return rows


def show(rows: list[Row], policies: Sequence[str], *, aims: bool) -> None:
    """Print all tables in Markdown, with those of the aims if ``aims``."""
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    where = " on held-out workloads" if "--held-out" in sys.argv else " of policies"
    print(f"# Hit rates{where}\n\n    {command}\n")
    print(
        "Token hit rates in %, prompts only, one request at a time; pools in % of the distinct whole pages. "
        '"Gap closed" is the share of the gap between LRU and the offline optimum that hazard closes.\n'
    )
    shown = [*policies, "optimum"]
    table(
        ["workload", "pool", *shown, "gap closed, %"],
        [
            [
                row.workload,
                f"{row.pool} %",
                *(f"{row.hits[policy]:.2f}" if policy in row.hits else "" for policy in shown),
                f"{row.gap('hazard'):.0f}"
                if "hazard" in policies and row.gap("hazard") == row.gap("hazard")
                else "",
            ]
            for row in rows
        ],
        2,
    )
    print("## Losses and gains against LRU\n\nPoints of token hit rate against LRU, over all rows above.\n")
    others = [policy for policy in policies if policy != "lru"]
    table(
        ["policy", "worst", "where", "mean", "best"],
        [
            [
                policy,
                f"{worst.gain(policy):+.2f}",
                f"{worst.workload} at {worst.pool} %",
                f"{statistics.mean(row.gain(policy) for row in those):+.2f}",
                f"{max(row.gain(policy) for row in those):+.2f}",
            ]
            for policy in others
            for those in [[row for row in rows if policy in row.hits]]
            for worst in [min(those, key=lambda row, policy=policy: row.gain(policy))]
        ],
    )
    if "hazard" in policies:
        objectives(rows)
        if aims:
            wanted(rows)


def objectives(rows: list[Row]) -> None:
    """Print the FLOPs that each of the two objectives saves."""
    print(
        "## FLOPs saved under either objective\n\n"
        "Percentage points of the FLOPs of all prefills that hazard saves beyond LRU.\n"
    )
    table(
        ["objective", "worst", "where", "mean"],
        [
            [
                name,
                f"{worst.flops[policy] - worst.flops['lru']:+.2f}",
                f"{worst.workload} at {worst.pool} %",
                f"{statistics.mean(row.flops[policy] - row.flops['lru'] for row in rows):+.2f}",
            ]
            for name, policy in (("tokens", "hazard"), ("flops", "hazard, flops"))
            for worst in [min(rows, key=lambda row, policy=policy: row.flops[policy] - row.flops["lru"])]
        ],
    )


def wanted(rows: list[Row]) -> None:
    """Print the aims and what was reached."""
    print("## Aims\n")
    lines = [
        ["never under LRU by more", f"{-ALLOWED:.1f}", f"{min(row.gain('hazard') for row in rows):+.2f}"]
    ]
    for row in rows:
        key = (row.workload, row.pool)
        where = f"{row.workload} at {row.pool} %"
        if key in LEAST_HITS:
            lines.append(
                [f"hit rate, {where}", f"{LEAST_HITS[key] - ALLOWED:.1f}", f"{row.hits['hazard']:.2f}"]
            )
        if key in LEAST_GAP:
            lines.append([f"gap closed, {where}", f"{LEAST_GAP[key]:.0f}", f"{row.gap('hazard'):.1f}"])
    flops = [row.flops["hazard, flops"] - row.flops["lru"] for row in rows]
    lines.append(["objective flops: FLOPs never under LRU by more", f"{-ALLOWED:.1f}", f"{min(flops):+.2f}"])
    table(
        ["aim", "at least", "reached", ""],
        [[*line, "" if float(line[2]) >= float(line[1]) else "missed"] for line in lines],
    )


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Hit rates of every policy and of the optimum.")
    every = [*FILES, *(name for name in WORKLOADS if name != "random")]
    every += ["few-shot, then chat", "multi-turn and chat at once"]
    parser.add_argument("--quick", action="store_true", help="2,000 requests, 2 and 10 %%, four policies")
    parser.add_argument("--policies", nargs="+", default=None, metavar="NAME", help="all by default")
    parser.add_argument("--workloads", nargs="+", default=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--pools", nargs="+", type=int, default=None, metavar="PERCENT")
    parser.add_argument("--whole", action="store_true", help="the whole of Weka v6 too, five seeds")
    parser.add_argument("--held-out", action="store_true", help="workloads on which nothing was tuned")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    parser.add_argument(
        "--rows", type=Path, default=None, metavar="FILE", help="save rows, and resume from it"
    )
    options = parser.parse_args()
    unknown = set(options.workloads) - set(every)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; choose from {', '.join(every)}")
    policies = options.policies or (QUICK_POLICIES if options.quick else BUILTIN)
    policies = ["lru", *(name for name in policies if name != "lru")]
    pools = options.pools or ((2, 10) if options.quick else POOLS)
    saved = SavedRows(options.rows)
    rows = []
    for name, build, page in held_out() if options.held_out else workloads(options.workloads):
        trace = build()
        if options.quick:
            trace = trace.take(np.arange(min(2000, len(trace))))
        rows += measure(name, trace, page, pools, policies, options.jobs, saved)
    if options.whole:
        rows += whole_weka([name for name in policies if name in ("lru", "hazard")], options.jobs, saved)
    show(rows, policies, aims=not options.quick)


if __name__ == "__main__":
    main()
