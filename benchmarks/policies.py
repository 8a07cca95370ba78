"""Hit rates of every policy and of the offline optimum, on recorded and generated workloads.

    python benchmarks/policies.py [--quick] [--policies NAME ...] [--workloads NAME ...] [--pools PERCENT ...]
        [--starts 5] [--whole] [--held-out] [--jobs 1] [--rows FILE] > benchmarks/results/policies.md

Plain replay: prompts are cached, generated tokens are not, one request at a time. Pools are in % of the
distinct whole pages, of 512 tokens for Mooncake and Weka, 64 for RAGPulse, 16 for the rest. Recorded traces
are looked for in $COSTCACHE_TRACES, else in ../shared/traces; missing ones are named and skipped. Two shifts
of traffic are replayed too: one trace after another, and two at once.

``lru``, ``hazard`` with and without its guard, and the optimum are replayed from several starts: seeds of
generated workloads and of session starts, and places in traces with a clock, each a tenth of the requests
later than the one before. A cell is its mean over the starts. Other policies are replayed from the first
start alone.

``--whole`` adds the whole of Weka v6 at 1 and 2 % under ``lru`` and ``hazard``, of which the median start
counts. ``--held-out`` replays workloads that no policy here was tuned on instead. ``--rows`` saves each row
to a file, and an interrupted run resumes from it.

Everything takes five hours on one core. ``--quick`` takes three minutes: the first 2,000 requests of one
start of each workload at 2 and 10 %, under four policies.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from _report import check, recorded_traces, table
from _workloads import FILES, GENERATED, Workload, held_out, workloads

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies import BUILTIN
from costcache.settings import Settings
from costcache.sim.cell import Cell
from costcache.sim.engine import Simulator
from costcache.sim.results import Outcome
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace

MODEL = ModelSpec.preset("llama-3-8b")
POOLS = (1, 2, 5, 10, 20, 50)
STARTS = 5
ALLOWED = 0.3
"""Points of hit rate that ``hazard`` may lose to LRU."""
LEAST_UNGUARDED = 90.0
"""Share of the hits that it finds without a guard, in %, that ``hazard`` should find with it."""
QUICK_POLICIES = ("lru", "lfu", "lhd", "hazard")
WEKA_V6 = "weka_cc_v6_global.jsonl.xz"
UNGUARDED = "hazard, no guard"
GENERATORS = ("in-turn", "drift", "tenants", "agents-documents")
"""Generated workloads made to find faults in the guard."""

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
    """One workload from one start at one pool size: rates in % by policy, of tokens hit and of FLOPs saved.

    Attributes:
        workload: The workload.
        pool: Size of the pool in % of the distinct whole pages.
        start: Number of the start.
        tokens: Tokens in the pool.
        hits: Token hit rate in % by policy.
        flops: Share of the FLOPs saved in % by policy.
        step_ins: How often LRU stepped in for ``hazard``.
        false_step_ins: How often of these the policy would have hit as much meanwhile without a guard.
    """

    workload: str
    pool: int
    start: int
    tokens: int
    hits: dict[str, float]
    flops: dict[str, float]
    step_ins: int = 0
    false_step_ins: int = 0

    def gain(self, policy: str) -> float:
        """Points of token hit rate over LRU."""
        return self.hits[policy] - self.hits["lru"]


@dataclass(frozen=True, slots=True)
class Mean:
    """One workload at one pool size, from all its starts."""

    rows: list[Row] = field(default_factory=list)

    @property
    def first(self) -> Row:
        """The row of the first start."""
        return self.rows[0]

    @property
    def where(self) -> str:
        """The cell in words."""
        return f"{self.first.workload} at {self.first.pool} %"

    def hits(self, policy: str) -> float:
        """Token hit rate in %."""
        return statistics.mean(row.hits[policy] for row in self.rows)

    def gain(self, policy: str) -> float:
        """Points of token hit rate over LRU."""
        return self.hits(policy) - self.hits("lru")

    def gap(self, policy: str) -> float:
        """Share of the gap between LRU and the optimum that a policy closes, in %; NaN if there is no gap."""
        room = self.hits("optimum") - self.hits("lru")
        return 100 * self.gain(policy) / room if room > 0.05 else math.nan


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does at a time: one workload from one start at one pool size."""

    held_out: bool
    workload: str
    start: int
    pool: int
    policies: tuple[str, ...]
    longest: int | None

    def run(self) -> Row | None:
        """Replay under every policy; None if the pool would be smaller than a page."""
        simulator = prepared(self.held_out, self.workload, self.start, self.longest)
        page = simulator.keys.page_size
        distinct = simulator.trace.distinct_pages(page)
        tokens = distinct * self.pool // 100 * page
        if tokens < page:
            return None
        settings = {name: Settings(policy=name) for name in (*self.policies, "optimum")}
        if "hazard" in settings and not self.start:
            settings["hazard, flops"] = Settings(policy="hazard", policy_settings={"objective": "flops"})
        found: dict[str, Outcome] = {}
        stretches = Stretches()
        for name, chosen in settings.items():
            with stretches if name == "hazard" else Stretches():
                found[name] = simulator.outcome(chosen, tokens)
        if "hazard" in settings:  # without a step-in it is the same without a guard
            settings[UNGUARDED] = Settings(policy="hazard", policy_settings={"doubt": 1e-300})
            found[UNGUARDED] = (
                simulator.outcome(settings[UNGUARDED], tokens) if stretches.found else found["hazard"]
            )
        runs = {
            name: Cell(settings[name], "", tokens).figures(simulator, outcome)
            for name, outcome in found.items()
        }
        hits = {name: 100 * run.token_hit_rate for name, run in runs.items()}
        check(all(rate <= hits["optimum"] + 1e-9 for rate in hits.values()), "no policy above the optimum")
        false = 0
        if stretches.found:
            lru, alone = found["lru"].matched, found[UNGUARDED].matched
            false = sum(int(alone[at:end].sum()) >= int(lru[at:end].sum()) for at, end in stretches.found)
        return Row(
            self.workload,
            self.pool,
            self.start,
            tokens,
            hits,
            {name: 100 * run.flops_saved_rate for name, run in runs.items()},
            len(stretches.found),
            false,
        )


class Stretches(logging.Handler):
    """Collects, from the log, the stretches of requests in which LRU is in force; a context manager."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[tuple[int, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take in one line of the log."""
        if "LRU steps in" in record.msg and isinstance(record.args, tuple):
            at, pause, *_ = record.args
            self.found.append((int(str(at)), int(str(at)) + int(str(pause))))

    def __enter__(self) -> Stretches:
        logger = logging.getLogger("costcache")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("costcache").removeHandler(self)


@functools.lru_cache(maxsize=1)
def prepared(from_held_out: bool, name: str, start: int, longest: int | None) -> Simulator:
    """A simulator of a workload from a start."""
    [workload] = [each for each in chosen(from_held_out) if each.name == name]
    trace = workload.build(start)
    if longest is not None:
        trace = trace.take(np.arange(min(longest, len(trace))))
    return Simulator(trace, MODEL, Deployment(page_size=workload.page))


@functools.cache
def chosen(from_held_out: bool) -> list[Workload]:
    """The workloads to choose from."""
    found = held_out() if from_held_out else workloads()
    path = recorded_traces() / WEKA_V6
    if not from_held_out and path.is_file():
        found.append(Workload("weka v6", 512, functools.partial(whole_weka, path)))
    return found


def whole_weka(path: Path, start: int) -> Trace:
    """The whole of Weka v6."""
    return load_trace(path, seed=start)


class SavedRows:
    """Rows in a file, so that an interrupted run can resume."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[tuple[str, int, int], Row] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                row = Row(**json.loads(line))
                self._rows[row.workload, row.pool, row.start] = row

    def find(self, task: Task) -> Row | None:
        """Return the saved row of a task, if it has all these policies."""
        row = self._rows.get((task.workload, task.pool, task.start))
        return row if row is not None and set(task.policies) <= set(row.hits) else None

    def add(self, row: Row) -> None:
        """Save a row."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def measure(tasks: Sequence[Task], jobs: int, saved: SavedRows) -> list[Mean]:
    """Run all tasks in some processes; returns the cells in the order of the tasks."""
    rows: dict[Task, Row | None] = {task: row for task in tasks if (row := saved.find(task)) is not None}
    open_tasks = [task for task in tasks if task not in rows]
    if jobs == 1:
        for task in open_tasks:
            rows[task] = note(task.run(), saved)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, max(1, len(open_tasks))), context) as pool:
            running = {pool.submit(task.run): task for task in reversed(open_tasks)}  # the longest are last
            for done in as_completed(running):
                rows[running[done]] = note(done.result(), saved)
    cells: dict[tuple[str, int], Mean] = {}
    for task in tasks:
        row = rows[task]
        if row is not None:
            cells.setdefault((row.workload, row.pool), Mean()).rows.append(row)
    return list(cells.values())


def note(row: Row | None, saved: SavedRows) -> Row | None:
    """Save a row and say what it is."""
    if row is not None:
        saved.add(row)
        found = " ".join(f"{policy} {rate:.2f}" for policy, rate in row.hits.items())
        print(f"{row.workload} {row.start} at {row.pool} %: {found}", file=sys.stderr, flush=True)
    return row


def show(cells: list[Mean], policies: Sequence[str], *, aims: bool) -> None:
    """Print all tables in Markdown, with those of the aims if ``aims``."""
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    where = " on held-out workloads" if "--held-out" in sys.argv else " of policies"
    print(f"# Hit rates{where}\n\n    {command}\n")
    print(
        "Token hit rates in %, prompts only, one request at a time; pools in % of the distinct whole pages. "
        '"Gap closed" is the share of the gap between LRU and the offline optimum that hazard closes.\n'
    )
    if "hazard" in policies:
        against_lru(cells)
    others = [policy for policy in policies if policy != "lru"]
    if others != ["hazard"]:
        every_policy(cells, policies)
    if "hazard" in policies:
        objectives([cell.first for cell in cells])
        if aims:
            wanted(cells)


def against_lru(cells: list[Mean]) -> None:
    """Print LRU and hazard, means and ranges over the starts, and how often LRU stepped in."""
    starts = max(len(cell.rows) for cell in cells)
    print(
        f"## hazard against LRU, mean over {starts} starts\n\n"
        'Points over LRU are means, with the smallest and the largest of any start. "Without a guard" LRU '
        "never steps in. A step-in is false if the policy alone would have hit as much while LRU was in "
        "force, as a replay without a guard tells; step-ins are of all starts together.\n"
    )
    table(
        [
            "workload",
            "pool",
            "lru",
            "hazard",
            "points",
            "smallest",
            "largest",
            "without a guard",
            "step-ins",
            "false",
            "optimum",
            "gap closed in %",
        ],
        [
            [
                cell.first.workload,
                f"{cell.first.pool} %",
                f"{cell.hits('lru'):.2f}",
                f"{cell.hits('hazard'):.2f}",
                f"{cell.gain('hazard'):+.2f}",
                f"{min(row.gain('hazard') for row in cell.rows):+.2f}",
                f"{max(row.gain('hazard') for row in cell.rows):+.2f}",
                f"{cell.gain(UNGUARDED):+.2f}",
                str(sum(row.step_ins for row in cell.rows)),
                str(sum(row.false_step_ins for row in cell.rows)),
                f"{cell.hits('optimum'):.2f}",
                "" if math.isnan(gap := cell.gap("hazard")) else f"{gap:.0f}",
            ]
            for cell in cells
        ],
        2,
    )
    print(f"Cells that lose more than {ALLOWED} points: ", end="")
    lost = [cell for cell in cells if cell.gain("hazard") < -ALLOWED]
    print(", ".join(f"{cell.where} ({cell.gain('hazard'):+.2f})" for cell in lost) or "none", end=".\n\n")
    rows = [row for cell in cells for row in cell.rows]
    lost_rows = sum(row.gain("hazard") < -ALLOWED for row in rows)
    stepped, false = sum(row.step_ins for row in rows), sum(row.false_step_ins for row in rows)
    print(
        f"Of all {len(rows)} replays under hazard, {lost_rows} lose more. LRU stepped in {stepped} times in "
        f"{sum(row.step_ins > 0 for row in rows)} of them, {false} times falsely.\n"
    )


def every_policy(cells: list[Mean], policies: Sequence[str]) -> None:
    """Print all policies from the first start."""
    print("## Every policy, from the first start\n")
    rows = [cell.first for cell in cells]
    shown = [*policies, "optimum"]
    table(
        ["workload", "pool", *shown],
        [
            [
                row.workload,
                f"{row.pool} %",
                *(f"{row.hits[policy]:.2f}" if policy in row.hits else "" for policy in shown),
            ]
            for row in rows
        ],
        2,
    )
    losses_and_gains(rows, [policy for policy in policies if policy != "lru"])


def losses_and_gains(rows: list[Row], policies: Sequence[str]) -> None:
    """Print the worst, the mean and the best of each policy."""
    print("Points of token hit rate against LRU, over all rows above:\n")
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
            for policy in policies
            for those in [[row for row in rows if policy in row.hits]]
            for worst in [min(those, key=lambda row, policy=policy: row.gain(policy))]
        ],
    )


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


def wanted(cells: list[Mean]) -> None:
    """Print the aims and what was reached."""
    print("## Aims\n")
    gains = [cell.gain("hazard") for cell in cells]
    lines = [
        ["never under LRU by more", f"{-ALLOWED:.1f}", f"{min(gains):+.2f}"],
        ["mean over LRU", "", f"{statistics.mean(gains):+.2f}"],
    ]
    lines += aims_of_generators([row for cell in cells for row in cell.rows])
    for cell in cells:
        key = (cell.first.workload, cell.first.pool)
        if key in LEAST_HITS:
            reached = cell.first.hits["hazard"]
            lines.append(
                [f"hit rate, {cell.where}, first start", f"{LEAST_HITS[key] - ALLOWED:.1f}", f"{reached:.2f}"]
            )
        if key in LEAST_GAP:
            lines.append([f"gap closed, {cell.where}", f"{LEAST_GAP[key]:.0f}", f"{cell.gap('hazard'):.1f}"])
    flops = [cell.first.flops["hazard, flops"] - cell.first.flops["lru"] for cell in cells]
    lines.append(["objective flops: FLOPs never under LRU by more", f"{-ALLOWED:.1f}", f"{min(flops):+.2f}"])
    table(
        ["aim", "at least", "reached", ""],
        [[*line, "" if not line[1] or float(line[2]) >= float(line[1]) else "missed"] for line in lines],
    )


def aims_of_generators(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the aims of the workloads that were made to find faults in the guard, over every start."""
    for name in GENERATORS:
        those = [row for row in rows if row.workload.partition(",")[0] == name]
        if those:
            least = min(row.gain("hazard") for row in those)
            # Where nothing is found either way, all of it is found.
            share = min(
                100 * row.hits["hazard"] / row.hits[UNGUARDED] if row.hits[UNGUARDED] else 100.0
                for row in those
            )
            yield [f"{name}, any start: under LRU by no more", f"{-ALLOWED:.1f}", f"{least:+.2f}"]
            yield [
                f"{name}, any start: share of the hits without a guard, %",
                f"{LEAST_UNGUARDED:.0f}",
                f"{share:.1f}",
            ]


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Hit rates of every policy and of the optimum.")
    every = [*FILES, *GENERATED, "few-shot, then chat", "multi-turn and chat at once"]
    parser.add_argument("--quick", action="store_true", help="2,000 requests, 2 and 10 %%, four policies")
    parser.add_argument("--policies", nargs="+", default=None, metavar="NAME", help="all by default")
    parser.add_argument("--workloads", nargs="+", default=None, metavar="NAME", help=", ".join(every))
    parser.add_argument("--pools", nargs="+", type=int, default=None, metavar="PERCENT")
    parser.add_argument(
        "--starts", type=int, default=None, help=f"starts of each workload; {STARTS} by default"
    )
    parser.add_argument("--whole", action="store_true", help="the whole of Weka v6 too")
    parser.add_argument("--held-out", action="store_true", help="workloads on which nothing was tuned")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    parser.add_argument(
        "--rows", type=Path, default=None, metavar="FILE", help="save rows, and resume from it"
    )
    options = parser.parse_args()
    every = [each.name for each in chosen(options.held_out)]
    wanted = options.workloads or every
    if unknown := set(wanted) - set(every):
        parser.error(f"no workload {', '.join(sorted(unknown))}; choose from {', '.join(every)}")
    policies = options.policies or (QUICK_POLICIES if options.quick else BUILTIN)
    policies = ["lru", *(name for name in policies if name != "lru")]
    repeated = tuple(name for name in policies if name in ("lru", "hazard"))
    pools = options.pools or ((2, 10) if options.quick else POOLS)
    starts = options.starts or (1 if options.quick else STARTS)
    tasks = [
        Task(
            options.held_out,
            name,
            start,
            pool,
            repeated if start else tuple(policies),
            2000 if options.quick else None,
        )
        for name in every
        if name in wanted
        for start in range(starts)
        for pool in pools
    ]
    if options.whole:
        tasks += [
            Task(False, "weka v6", start, pool, repeated, None)
            for start in range(starts)
            for pool in (1, 2)
            if "weka v6" in wanted
        ]
    show(measure(tasks, options.jobs, SavedRows(options.rows)), policies, aims=not options.quick)


if __name__ == "__main__":
    main()
