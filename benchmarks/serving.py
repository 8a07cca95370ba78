"""Hit rates of hazard and LRU on a server: requests queue, run concurrently, and lock and reserve tokens.

    python benchmarks/serving.py [--workloads NAME ...] [--pools PERCENT ...] [--starts 5] [--jobs 1]
        [--rows FILE] > benchmarks/results/serving.md

The workloads are those of ``policies.py``, including its held-out traces (at most the first 12,500 requests
of each), in the plain replay and at three loads. A cell is its mean over several starts, as there.

*light* and *near full* scale the speed of the trace's clock. They make the busier of two resources, the
prefills (those that LRU leaves in the plain replay) or the limit of 64 running requests, busy for 30 % and
for 90 % of the trace's time; *light* never exceeds the trace's own speed. Think times are not scaled, so a
fast clock means many sessions at once. Small pools fit fewer than 64 requests: then requests wait for tokens
at any load. *8 clients* send one request at a time each, and pause for think times only.

Takes forty minutes on one core. ``--rows`` saves each row to a file, and an interrupted run resumes from it.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _report import check, table
from _workloads import FILES, GENERATED, HELD_OUT_FILES, Workload, recorded, workloads
from policies import MODEL

from costcache.deployment import Deployment
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace

POOLS = (2, 5, 10, 20)
STARTS = 5
POLICIES = ("lru", "hazard")
ALLOWED = 0.3
MAX_RUNNING = 64
CLIENTS = 8
LIGHT, NEAR_FULL = 0.3, 0.9
LONGEST = 12_500
"""At most this many requests of a workload are replayed."""


class Server(NamedTuple):
    """A load by name, and the simulator's settings for it."""

    load: str
    settings: ServingSettings | None


@dataclass(frozen=True, slots=True)
class Row:
    """One workload from one start at one pool size and load: hit rates in % and mean TTFT in seconds."""

    workload: str
    pool: int
    load: str
    start: int
    rate: float
    requests: int
    hits: dict[str, float]
    ttft: dict[str, float]

    @property
    def gain(self) -> float:
        """Points of token hit rate over LRU."""
        return self.hits["hazard"] - self.hits["lru"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one pool size and load, from all its starts."""

    rows: list[Row]

    @property
    def first(self) -> Row:
        """The row of the first start."""
        return self.rows[0]

    @property
    def hits(self) -> float:
        """Token hit rate of hazard in %, mean over the starts."""
        return statistics.mean(row.hits["hazard"] for row in self.rows)

    @property
    def gain(self) -> float:
        """Points of token hit rate over LRU, mean over the starts."""
        return statistics.mean(row.gain for row in self.rows)

    @property
    def range(self) -> str:
        """The smallest and the largest gain of any start."""
        gains = [row.gain for row in self.rows]
        return f"{min(gains):+.2f} to {max(gains):+.2f}"

    @property
    def where(self) -> list[str]:
        """The cell in words."""
        return [self.first.workload, f"{self.first.pool} %", self.first.load]


@functools.cache
def chosen() -> dict[str, Workload]:
    """Each workload by name."""
    named = workloads((*FILES, *GENERATED))
    return {each.name: each for each in (*named, *recorded(HELD_OUT_FILES, 0, "words"))}


def busy(simulator: Simulator, trace: Trace, tokens: int) -> float:
    """Share of time that the busier of prefills and running requests is busy, at the trace's own speed."""
    lru = simulator.outcome(Settings(policy="lru"), tokens)
    new = np.maximum(trace.input_tokens - lru.matched, 1)
    prefills = simulator.prefill.seconds(new, lru.matched)
    running = prefills.sum() + trace.output_tokens.sum() * ServingSettings().decode_seconds
    seconds = float(trace.timestamps[-1] - trace.timestamps[0])
    return max(float(prefills.sum()), float(running) / MAX_RUNNING) / seconds


def servers(simulator: Simulator, trace: Trace, tokens: int) -> Iterator[Server]:
    """Yield the loads of a cell, first of all none: the plain replay."""
    yield Server("one at a time", None)
    share = busy(simulator, trace, tokens)
    for load, wanted in (("light", LIGHT), ("near full", NEAR_FULL)):
        rate = float(f"{wanted / share:.3g}")
        rate = min(rate, 1.0) if load == "light" else rate
        yield Server(load, ServingSettings(concurrency=MAX_RUNNING, rate=rate))
    yield Server(f"{CLIENTS} clients", ServingSettings(concurrency=CLIENTS, load="clients"))


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does at a time: one workload from one start at one pool size, at every load."""

    workload: str
    pool: int
    start: int

    def run(self) -> list[Row]:
        """Replay under both policies; no rows if the pool would be smaller than a page."""
        simulator = prepared(self.workload, self.start)
        trace, page = simulator.trace, chosen()[self.workload].page
        tokens = trace.distinct_pages(page) * self.pool // 100 * page
        if tokens < page:
            return []
        rows = []
        for load, serving in servers(simulator, trace, tokens):
            runs = {
                policy: simulator.run(Settings(policy=policy), tokens, serving=serving) for policy in POLICIES
            }
            rows.append(
                Row(
                    self.workload,
                    self.pool,
                    load,
                    self.start,
                    1.0 if serving is None else serving.rate,
                    len(trace),
                    {policy: 100 * run.token_hit_rate for policy, run in runs.items()},
                    {policy: run.ttft_mean for policy, run in runs.items()},
                )
            )
        return rows


@functools.lru_cache(maxsize=1)
def prepared(name: str, start: int) -> Simulator:
    """A simulator of a workload from a start."""
    workload = chosen()[name]
    trace = workload.build(start)
    trace = trace.take(np.arange(min(LONGEST, len(trace))))
    return Simulator(trace, MODEL, Deployment(page_size=workload.page))


def measure(tasks: Sequence[Task], jobs: int, path: Path | None) -> list[Row]:
    """Run all tasks whose rows are not in the file yet, in some processes; returns all rows."""
    rows = []
    if path is not None and path.is_file():
        rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    done = {Task(row.workload, row.pool, row.start) for row in rows}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for each in as_completed([pool.submit(task.run) for task in tasks if task not in done]):
            rows += (found := each.result())
            for row in found:
                print(f"{row.workload} {row.start} at {row.pool} %, {row.load}: {row.hits}", file=sys.stderr)
            if path is not None:
                with path.open("a") as file:
                    file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    order = {task: at for at, task in enumerate(tasks)}
    rows = [row for row in rows if Task(row.workload, row.pool, row.start) in order]
    return sorted(rows, key=lambda row: order[Task(row.workload, row.pool, row.start)])


def show(rows: list[Row]) -> None:
    """Print all tables in Markdown."""
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    by_cell: dict[tuple[str, int, str], Cell] = {}
    for row in rows:
        by_cell.setdefault((row.workload, row.pool, row.load), Cell([])).rows.append(row)
    cells = list(by_cell.values())
    print(f"# Hit rates on a server\n\n    {command}\n")
    print(
        "Token hit rates of hazard in %, and points over LRU, as means over "
        f"{max(len(cell.rows) for cell in cells)} starts: in the plain replay, one request at a time, as "
        "in [policies.md](policies.md); and on a server that is busy for 30 % (light) or 90 % (near full) of "
        f"the time, or has {CLIENTS} clients. Pools are in % of the distinct whole pages. Rates are the "
        "speeds of the trace's clock under light and near full from the first start; the script's docstring "
        "says how they are chosen.\n"
    )
    loads = list(dict.fromkeys(row.load for row in rows))
    print("## Points over LRU\n")
    lines = []
    for load in loads:
        gains = sorted((cell for cell in cells if cell.first.load == load), key=lambda cell: cell.gain)
        lines.append(
            [
                load,
                f"{gains[0].gain:+.2f}",
                f"{gains[0].first.workload} at {gains[0].first.pool} %",
                f"{statistics.mean(cell.gain for cell in gains):+.2f}",
                f"{gains[-1].gain:+.2f}",
                str(len(gains)),
                str(sum(cell.gain < 0 for cell in gains)),
                str(sum(cell.gain < -ALLOWED for cell in gains)),
                str(sum(row.gain < -ALLOWED for cell in gains for row in cell.rows)),
            ]
        )
    over = f"by over {ALLOWED}"
    headings = ["load", "worst", "where", "mean", "best", "cells", "under LRU", over]
    table([*headings, f"single replays {over}"], lines, 1)
    print(f"## Cells that lose more than {ALLOWED} points\n")
    lost = sorted((cell for cell in cells if cell.gain < -ALLOWED), key=lambda cell: cell.gain)
    if lost:
        found = [[*cell.where, f"{cell.gain:+.2f}", cell.range] for cell in lost]
        table(["workload", "pool", "load", "points", "any start"], found, 3)
    else:
        print("None.\n")
    print("## All\n")
    by_pool: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        by_pool.setdefault((cell.first.workload, cell.first.pool), []).append(cell)
    table(
        ["workload", "requests", "pool", *loads, "rates"],
        [
            [
                name,
                f"{same[0].first.requests:,}",
                f"{pool} %",
                *(f"{cell.hits:.2f} {cell.gain:+.2f}" for cell in same),
                ", ".join(
                    f"{cell.first.rate:g}" for cell in same if cell.first.load in ("light", "near full")
                ),
            ]
            for (name, pool), same in by_pool.items()
        ],
    )


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Hit rates of hazard and LRU on a server.")
    every = [*FILES, *HELD_OUT_FILES, *GENERATED]
    parser.add_argument("--workloads", nargs="+", default=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, metavar="PERCENT")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"{STARTS} by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    parser.add_argument(
        "--rows", type=Path, default=None, metavar="FILE", help="save rows, and resume from it"
    )
    options = parser.parse_args()
    unknown = set(options.workloads) - set(every)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; choose from {', '.join(every)}")
    tasks = [
        Task(name, pool, start)
        for name in chosen()
        if name in options.workloads
        for pool in options.pools
        for start in range(options.starts)
    ]
    rows = measure(tasks, options.jobs, options.rows)
    check(bool(rows), "at least one workload")
    show(rows)


if __name__ == "__main__":
    main()
