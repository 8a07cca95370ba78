"""Hit rates of hazard and LRU on a server: requests queue, run concurrently, and lock and reserve tokens.

    python benchmarks/serving.py [--workloads NAME ...] [--pools PERCENT ...] [--rows FILE]
        > benchmarks/results/serving.md

The workloads are those of ``policies.py``, including its held-out traces (at most the first 12,500 requests
of each), in the plain replay and at three loads.

*light* and *near full* scale the speed of the trace's clock. They make the busier of two resources, the
prefills (those that LRU leaves in the plain replay) or the limit of 64 running requests, busy for 30 % and
for 90 % of the trace's time; *light* never exceeds the trace's own speed. Think times are not scaled, so a
fast clock means many sessions at once. Small pools fit fewer than 64 requests: then requests wait for tokens
at any load. *8 clients* send one request at a time each, and pause for think times only.

Takes six minutes on one core. ``--rows`` saves each row to a file, and an interrupted run resumes from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _report import check, table
from policies import FILES, HELD_OUT_FILES, MODEL, recorded

from costcache.deployment import Deployment
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace
from costcache.sim.workloads import WORKLOADS, generate

POOLS = (2, 5, 10, 20)
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
    """One workload at one pool size and load: hit rates in % and mean TTFT in seconds, by policy."""

    workload: str
    pool: int
    load: str
    rate: float
    requests: int
    tokens: int
    hits: dict[str, float]
    ttft: dict[str, float]

    @property
    def gain(self) -> float:
        """Points of token hit rate over LRU."""
        return self.hits["hazard"] - self.hits["lru"]


def workloads(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], Trace], int]]:
    """Yield name, builder and page size of each available workload."""
    for files, tokenizer in ((FILES, None), (HELD_OUT_FILES, "words")):
        yield from recorded({name: file for name, file in files.items() if name in names}, tokenizer)
    for name in WORKLOADS:
        if name in names:
            yield name, lambda name=name: generate(name), 16


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


class SavedRows:
    """Rows in a file, so that an interrupted run can resume."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[tuple[str, int, str], Row] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                row = Row(**json.loads(line))
                self._rows[row.workload, row.pool, row.load] = row

    def find(self, name: str, percent: int, load: str) -> Row | None:
        """Return the saved row of a cell, if there is one."""
        return self._rows.get((name, percent, load))

    def add(self, row: Row) -> None:
        """Save a row."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def measure(name: str, trace: Trace, page: int, pools: Sequence[int], saved: SavedRows) -> list[Row]:
    """Replay one workload at every pool size and load."""
    simulator = Simulator(trace, MODEL, Deployment(page_size=page))
    distinct = trace.distinct_pages(page)
    rows = []
    for percent in pools:
        tokens = distinct * percent // 100 * page
        if tokens < page:
            continue
        for load, serving in servers(simulator, trace, tokens):
            row = saved.find(name, percent, load)
            if row is None:
                runs = {
                    policy: simulator.run(Settings(policy=policy), tokens, serving=serving)
                    for policy in POLICIES
                }
                row = Row(
                    name,
                    percent,
                    load,
                    1.0 if serving is None else serving.rate,
                    len(trace),
                    tokens,
                    {policy: 100 * run.token_hit_rate for policy, run in runs.items()},
                    {policy: run.ttft_mean for policy, run in runs.items()},
                )
                saved.add(row)
                took = sum(run.seconds for run in runs.values())
                where = f"{name} at {percent} %, {load} (rate {row.rate:g})"
                print(f"{where}: {row.hits} {row.gain:+.2f}, {took:.1f} s", file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def show(rows: list[Row]) -> None:
    """Print all tables in Markdown."""
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# Hit rates on a server\n\n    {command}\n")
    print(
        "Token hit rates of hazard in %, and points over LRU: in the plain replay, one request at a time, as "
        "in [policies.md](policies.md); and on a server that is busy for 30 % (light) or 90 % (near full) of "
        f"the time, or has {CLIENTS} clients. Pools are in % of the distinct whole pages. Rates are the "
        "speeds of the trace's clock under light and near full; the script's docstring says how they are "
        "chosen.\n"
    )
    loads = list(dict.fromkeys(row.load for row in rows))
    print("## Points over LRU\n")
    lines = []
    for load in loads:
        gains = sorted((row for row in rows if row.load == load), key=lambda row: row.gain)
        lines.append(
            [
                load,
                f"{gains[0].gain:+.2f}",
                f"{gains[0].workload} at {gains[0].pool} %",
                f"{statistics.mean(row.gain for row in gains):+.2f}",
                f"{gains[-1].gain:+.2f}",
                str(len(gains)),
                str(sum(row.gain < 0 for row in gains)),
                str(sum(row.gain < -ALLOWED for row in gains)),
            ]
        )
    headings = ["load", "worst", "where", "mean", "best", "cells", "under LRU", f"by over {ALLOWED}"]
    table(headings, lines, 1)
    print(f"## Cells that lose more than {ALLOWED} points\n")
    lost = sorted((row for row in rows if row.gain < -ALLOWED), key=lambda row: row.gain)
    if lost:
        table(["workload", "pool", "load", "points"], [[*where(row), f"{row.gain:+.2f}"] for row in lost], 3)
    else:
        print("None.\n")
    print("## All\n")
    by_cell: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row.workload, row.pool), []).append(row)
    table(
        ["workload", "requests", "pool", *loads, "rates"],
        [
            [
                name,
                f"{same[0].requests:,}",
                f"{pool} %",
                *(f"{row.hits['hazard']:.2f} {row.gain:+.2f}" for row in same),
                ", ".join(f"{row.rate:g}" for row in same if row.load in ("light", "near full")),
            ]
            for (name, pool), same in by_cell.items()
        ],
    )


def where(row: Row) -> list[str]:
    """Describe the cell of a row."""
    return [row.workload, f"{row.pool} %", row.load]


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Hit rates of hazard and LRU on a server.")
    every = [*FILES, *HELD_OUT_FILES, *(name for name in WORKLOADS if name != "random")]
    parser.add_argument("--workloads", nargs="+", default=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, metavar="PERCENT")
    parser.add_argument(
        "--rows", type=Path, default=None, metavar="FILE", help="save rows, and resume from it"
    )
    options = parser.parse_args()
    unknown = set(options.workloads) - set(every)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; choose from {', '.join(every)}")
    saved = SavedRows(options.rows)
    rows = []
    for name, build, page in workloads(options.workloads):
        trace = build()
        trace = trace.take(np.arange(min(LONGEST, len(trace))))
        rows += measure(name, trace, page, options.pools, saved)
    check(bool(rows), "at least one workload")
    show(rows)


if __name__ == "__main__":
    main()
