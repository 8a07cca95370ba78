"""The start of a cache: what hazard gains over LRU soon after the pool first fills, and later.

    python benchmarks/start.py [--quick] [--workloads NAME ...] [--pools PERCENT ...] [--starts N ...]
        [--rows FILE] [--jobs 1] > benchmarks/results/start.md

Plain replay: prompts are cached, generated tokens are not, one request at a time, from an empty pool to 4,000
requests after it first fills (the first request at which a victim is asked for). A gain is in points of token
hit rate: *early* over the requests 50 to 250 after that, *later* over 1,000 to 4,000. Pools are in % of the
distinct whole pages of the whole trace. A cell is the mean over the seeds of a generated workload, or over
the places in a recorded one from which the replay begins (in tenths of its requests).

The prior of each workload is made as ``benchmarks/make_prior.py`` does, but without that workload and those
like it, since a user's own traffic is in no prior. The optimum is offline, and bounds what can be gained by
then: caches that begin alike need time to differ.

Recorded traces are looked for in $COSTCACHE_TRACES, else in ../shared/traces. ``--rows`` saves each replay to
a file, and an interrupted run resumes from it. Takes half an hour on one core; ``--quick`` two minutes: three
workloads at 2 and 5 %, two seeds, the shipped prior.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from statistics import mean
from unittest.mock import patch

from _openings import ALL_FILES, Opening, openings
from _report import table
from make_prior import OBSERVED, Observed, observe, pool

from costcache.policies.hazard.prior import Prior, shipped_prior
from costcache.settings import Settings
from costcache.sim.workloads import WORKLOADS

POOLS = (2, 5, 10, 20)
SEEDS = (20, 21, 22, 23, 24)
"""Nothing was chosen on these."""
PLACES = (1, 3, 5)
AIMED = ("chat", "few-shot", "agentic", "multi-turn", "mooncake conversation", "mooncake synthetic")
"""Workloads on which the early gain should be a share of the later one."""
SHARE = 0.7
ALLOWED = 0.3
"""Points that hazard may lose early."""
WINDOWS = {"early": (50, 250), "later": (1000, 4000)}
REQUESTS = 4000


@dataclass(frozen=True, slots=True)
class Row:
    """One replay: hit rates in % by policy, early, later, and over all of it; NaN where it ends before."""

    workload: str
    percent: int
    start: int
    fill: int
    early: dict[str, float]
    later: dict[str, float]
    whole: dict[str, float]


def measure(opening: Opening, prior: Prior) -> Row:
    """Replay one opening under LRU, the optimum, and hazard without and with a prior."""
    asked = opening.simulator.trace.input_tokens
    matched = {}
    for name, policy, settings in (
        ("lru", "lru", {}),
        ("optimum", "optimum", {}),
        ("without", "hazard", {"prior": False}),
        ("hazard", "hazard", {}),
    ):
        with patch("costcache.policies.hazard.order.shipped_prior", lambda: prior):
            chosen = Settings(policy=policy, policy_settings=settings)
            matched[name] = opening.simulator.outcome(chosen, opening.capacity).matched
    found: dict[str, dict[str, float]] = {}
    for window, (first, last) in (*WINDOWS.items(), ("whole", (-opening.fill, REQUESTS))):
        part = slice(opening.fill + first, opening.fill + last)
        tokens = int(asked[part].sum())
        found[window] = {
            name: 100 * int(hits[part].sum()) / tokens if tokens else float("nan")
            for name, hits in matched.items()
        }
    return Row(opening.workload, opening.percent, opening.start, opening.fill, **found)


def replay(name: str, start: int, pools: Sequence[int], prior: Prior) -> list[Row]:
    """Measure one workload from one start at some pool sizes."""
    return [measure(opening, prior) for opening in openings(name, [start], pools, REQUESTS)]


class Cell:
    """All replays of one workload at one pool size."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.name = f"{rows[0].workload} at {rows[0].percent} %"

    def gains(self, window: str, policy: str = "hazard") -> list[float]:
        """Points over LRU, of each replay that has the window."""
        rates = [getattr(row, window) for row in self.rows]
        return [rate[policy] - rate["lru"] for rate in rates if not isnan(rate["lru"])]

    def gain(self, window: str, policy: str = "hazard") -> float:
        """Mean points over LRU; NaN if no replay has the window."""
        gains = self.gains(window, policy)
        return mean(gains) if gains else float("nan")

    def ratio(self, policy: str = "hazard") -> float:
        """Early gain as a share of the later one; NaN if that is too small to be divided by."""
        later = self.gain("later", policy)
        return self.gain("early", policy) / later if later > 0.5 else float("nan")


def number(value: float, form: str = "+.2f") -> str:
    """Format a number; nothing if it is not one."""
    return "" if isnan(value) else format(value, form)


def show(rows: Sequence[Row]) -> None:
    """Print all tables in Markdown."""
    grouped = defaultdict(list)
    for row in rows:
        grouped[row.workload, row.percent].append(row)
    cells = [Cell(those) for those in grouped.values()]
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# The start of a cache\n\n    {command}\n")
    print(
        "Points of token hit rate that hazard gains over LRU: early (requests 50 to 250 after the pool first "
        "fills) and later (1,000 to 4,000), and over all requests up to then. The prior of each workload was "
        "made without it and those like it. "
        '"Optimum" is what the offline optimum gains in the same requests.\n'
    )
    for title, these in (
        ("Workloads with an aim", [cell for cell in cells if cell.rows[0].workload in AIMED]),
        ("Others", [cell for cell in cells if cell.rows[0].workload not in AIMED]),
    ):
        if these:
            print(f"## {title}\n")
            _cells(these)
    _aims(cells)


def _cells(cells: Sequence[Cell]) -> None:
    headings = ["workload", "pool", "replays", "full after", "early, without a prior", "early", "range"]
    headings += [
        "later",
        "early / later",
        "optimum, early",
        "optimum, early / later",
        "all, without a prior",
        "all",
    ]
    table(
        headings,
        [
            [
                cell.rows[0].workload,
                f"{cell.rows[0].percent} %",
                str(len(cell.rows)),
                f"{mean(row.fill for row in cell.rows):.0f}",
                number(cell.gain("early", "without")),
                number(cell.gain("early")),
                f"{min(cell.gains('early')):+.2f} to {max(cell.gains('early')):+.2f}",
                number(cell.gain("later")),
                number(cell.ratio(), ".0%"),
                number(cell.gain("early", "optimum")),
                number(cell.ratio("optimum"), ".0%"),
                number(cell.gain("whole", "without")),
                number(cell.gain("whole")),
            ]
            for cell in cells
        ],
        2,
    )


def _aims(cells: Sequence[Cell]) -> None:
    print("## Aims\n")
    aimed = [cell for cell in cells if cell.rows[0].workload in AIMED and not isnan(cell.ratio())]
    reached = [cell for cell in aimed if cell.ratio() >= SHARE]
    possible = [cell for cell in aimed if cell.ratio("optimum") >= SHARE]
    print(
        f"Early gain at least {SHARE:.0%} of the later one: in {len(reached)} of {len(aimed)} cells with a "
        f"later gain of half a point or more. The optimum's own is in {len(possible)}.\n"
    )
    for window in ("early", "whole"):
        for policy in ("without", "hazard"):
            lost = [cell for cell in cells if cell.gain(window, policy) < -ALLOWED]
            where = ", ".join(f"{cell.name} ({cell.gain(window, policy):+.2f})" for cell in lost) or "none"
            with_ = "with" if policy == "hazard" else "without"
            print(f"- Under LRU by more than {ALLOWED} points, {window}, {with_} a prior: {where}.")
    print()


def main() -> None:
    """Run all replays and print the tables."""
    every = list(dict.fromkeys((*AIMED, *WORKLOADS, *ALL_FILES)))
    parser = argparse.ArgumentParser(description="What hazard gains soon after the pool first fills.")
    parser.add_argument("--quick", action="store_true", help="three workloads, 2 and 5 %%, two seeds")
    parser.add_argument("--workloads", nargs="+", default=None, choices=every, metavar="NAME")
    parser.add_argument("--pools", nargs="+", type=int, default=None, metavar="PERCENT")
    parser.add_argument("--starts", nargs="+", type=int, default=None, help="seeds, and places in tenths")
    parser.add_argument("--rows", type=Path, default=None, metavar="FILE", help="save rows, and resume")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    options = parser.parse_args()
    names = options.workloads or (every if not options.quick else ["chat", "few-shot", "multi-turn"])
    pools = options.pools or ((2, 5) if options.quick else POOLS)
    path: Path | None = options.rows
    rows = (
        [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path and path.is_file() else []
    )
    known = {(row.workload, row.percent, row.start) for row in rows}
    tasks: list[tuple[str, int, list[int]]] = []
    for name in names:
        starts = options.starts or (SEEDS[: 2 if options.quick else None] if name in WORKLOADS else PLACES)
        for start in starts:
            left = [percent for percent in pools if (name, percent, start) not in known]
            if left:
                tasks.append((name, start, left))
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as processes:
        observed: list[Observed] = []
        if tasks and not options.quick:
            for each in processes.map(observe, ([name] for name in OBSERVED)):
                observed += each
        priors = {name: shipped_prior() if options.quick else pool(observed, without=name) for name in names}
        running = [processes.submit(replay, *task, priors[task[0]]) for task in tasks]
        for done in as_completed(running):
            for row in done.result():
                rows.append(row)
                gain = row.early["hazard"] - row.early["lru"]
                where = f"{row.workload} at {row.percent} %, start {row.start}"
                print(f"{where}: full after {row.fill}, early {gain:+.2f}", file=sys.stderr, flush=True)
                if path is not None:
                    with path.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
    order = {name: at for at, name in enumerate(names)}
    rows = [row for row in rows if row.workload in order and row.percent in pools]
    rows.sort(key=lambda row: (order[row.workload], row.percent, row.start))
    show(rows)


if __name__ == "__main__":
    main()
