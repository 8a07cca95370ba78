"""Tiers of memory: by_cost with hazard against the classic policies of writing with LRU, on a server.

    python benchmarks/tiers.py [--workloads NAME ...] [--models NAME ...] [--tuned] [--starts 24] [--jobs 1]
        [--requests 2000] [--rows FILE] > benchmarks/results/tiers.md

A cell is a workload and a model, and the mean over several starts: later places in Mooncake's trace, other
session starts or seeds elsewhere. The device pool has 3 % of the trace's distinct pages, beside what running
requests need, and host memory 15 %, at 55 GB/s each way. The speed of the trace's clock is such that the
prefills that write-through with LRU leaves take 60 % of the time, and slower until its mean TTFT is at most
five times its mean prefill; think times are not scaled. Traces are shortened: at most so many requests are
replayed.

What was chosen (the room made ahead of need, over what the price of room is averaged, hazard's objective
``flops``, which copies the host gives up) was chosen on the first starts of every workload, which ``--tuned``
replays: those of Mooncake end where half of its requests are over. The results are of others.

``--rows`` saves each start of a cell to a file, and an interrupted run resumes from it: the whole can be run
in parts, and files of parts be put together with ``cat``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from _report import check, table
from _workloads import FILES, GENERATED, HELD_OUT_SEED, workloads

from costcache.deployment import Deployment
from costcache.plugins import get_plugins
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings, TiersBelow
from costcache.sim.tiered import TieredRun, make_tiered_run, tiered_bound

WORKLOADS = ("mooncake conversation", "weka v6, 57 sessions", "weka v8, 60 sessions", "chat", "agentic")
MODELS = {"deepseek-v3": 8, "llama-3-70b": 8, "qwen3-next": 4}
"""Models, each with its tensor-parallel ranks."""
CLASSIC = (("write_through", "lru"), ("write_through_selective", "lru"), ("write_back", "lru"))
OURS = ("by_cost", "hazard")
OBJECTIVE = {"objective": "flops"}
"""Of hazard: seconds are at stake, and a token deep in a prompt costs more of them."""
STARTS = 24
PLACES = {"mooncake conversation": 0.03}
"""Share of a trace with a clock by which each start is later than the one before."""
FIRST = {"mooncake conversation": 17}
"""The first start of the results; of the others, a held-out seed that no earlier table was of."""
LAST = {"mooncake conversation": 28}
"""The last start: the trace ends soon after it."""
_FRESH = HELD_OUT_SEED + 13
DEVICE, HOST = 0.03, 0.15
BUSY, QUEUED = 0.6, 5.0
_SLOWER, _SLOWEST = 0.7, 0.02
LINK = 55e9
PAGE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one cell: times in seconds, hit rates in %, bytes moved in GB.

    ``bound`` is what an offline optimum finds of the trace's tokens at most, in %; None if there are states.
    """

    workload: str
    model: str
    start: int
    rate: float
    requests: int
    write: str
    policy: str
    device: float
    host: float
    mean: float
    p50: float
    p99: float
    moved: float
    waits: float
    bound: float | None = None

    @property
    def found(self) -> float:
        """Hit rate of all tiers together."""
        return self.device + self.host

    @property
    def ours(self) -> bool:
        """Whether it is by_cost with hazard."""
        return (self.write, self.policy) == OURS


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does at a time: one cell under every policy."""

    workload: str
    model: str
    start: int
    requests: int

    def run(self) -> list[Row]:
        """Replay under every policy."""
        workload = next(each for each in workloads((*FILES, *GENERATED)) if each.name == self.workload)
        place = PLACES.get(self.workload)
        trace = workload.build(self.start if place is None else 0).in_time_order()
        if place is not None:
            trace = trace.take(np.arange(int(len(trace) * place * self.start), len(trace)))
        trace = trace.take(np.arange(min(self.requests, len(trace))))
        model = get_plugins().resolve(self.model)
        page = max(PAGE, workload.page)
        simulator = Simulator(trace, model, Deployment(page_size=page, tp=MODELS[self.model]))
        tokens = int(trace.distinct_pages(page) * DEVICE) * page
        host = int(trace.distinct_pages(page) * page * HOST * simulator.token_bytes)

        def replay(write: str, policy: str, rate: float) -> TieredRun:
            settings = Settings(policy=policy, policy_settings=OBJECTIVE if policy == OURS[1] else {})
            tiers = TiersBelow(host=host, link=LINK, write=write)  # type: ignore[arg-type] # one of them
            serving = ServingSettings(rate=rate, running="beside")
            outcome = simulator.tiered(settings, tokens, tiers, serving=serving)
            return make_tiered_run(outcome, simulator, settings, "", tokens, tiers)

        span = float(trace.timestamps[-1] - trace.timestamps[0])
        bound = tiered_bound(simulator, Settings(policy="lru"), tokens, TiersBelow(host=host, link=LINK))
        first = replay(*CLASSIC[0], 1.0)
        rate = float(f"{BUSY * span / first.recompute_seconds:.3g}")
        first = replay(*CLASSIC[0], rate)
        while rate > _SLOWEST and first.ttft_mean > QUEUED * first.recompute_seconds / len(trace):
            rate = float(f"{rate * _SLOWER:.3g}")
            first = replay(*CLASSIC[0], rate)
        rows = []
        for write, policy in (*CLASSIC, OURS):
            run = replay(write, policy, rate)
            rows.append(
                Row(
                    self.workload,
                    self.model,
                    self.start,
                    rate,
                    len(trace),
                    write,
                    policy,
                    100 * run.device_hit_rate,
                    100 * run.tier_hit_rate,
                    run.ttft_mean,
                    run.ttft_p50,
                    run.ttft_p99,
                    run.moved_bytes / 1e9,
                    run.write_wait_seconds,
                    None if bound is None else 100 * bound.hit_rate,
                )
            )
        return rows


def measure(tasks: Sequence[Task], jobs: int, path: Path | None) -> list[Row]:
    """Run all tasks whose rows are not in the file yet, in some processes; returns all rows."""
    rows = []
    if path is not None and path.is_file():
        rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    done = {(row.workload, row.model, row.start) for row in rows}
    left = [task for task in tasks if (task.workload, task.model, task.start) not in done]
    left.sort(key=lambda task: not task.workload.startswith("weka"))  # the longest first
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for each in as_completed([pool.submit(task.run) for task in left]):
            rows += (found := each.result())
            print(f"{found[0].workload}, {found[0].model}: done", file=sys.stderr)
            if path is not None:
                with path.open("a") as file:
                    file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    order = {(task.workload, task.model, task.start): at for at, task in enumerate(tasks)}
    rows = [row for row in rows if (row.workload, row.model, row.start) in order]
    return sorted(rows, key=lambda row: order[row.workload, row.model, row.start])


@dataclass(frozen=True, slots=True)
class Cell:
    """All policies in one cell, each the mean over its starts."""

    rows: list[Row]

    @classmethod
    def of(cls, rows: list[Row]) -> Cell:
        """Average the rows of all starts, policy by policy."""
        by_policy: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            by_policy.setdefault((row.write, row.policy), []).append(row)
        return cls([_mean(each) for each in by_policy.values()])

    @property
    def ours(self) -> Row:
        """by_cost with hazard."""
        return next(row for row in self.rows if row.ours)

    @property
    def best(self) -> Row:
        """The classic policy of the lowest mean TTFT."""
        return min((row for row in self.rows if not row.ours), key=lambda row: row.mean)

    @property
    def best_p99(self) -> float:
        """The lowest p99 of any classic policy."""
        return min(row.p99 for row in self.rows if not row.ours)

    @property
    def mean(self) -> float:
        """Change of the mean TTFT against the best classic policy, in %."""
        return 100 * (self.ours.mean / self.best.mean - 1)

    @property
    def p99(self) -> float:
        """Change of the p99 against the lowest of the classic policies, in %."""
        return 100 * (self.ours.p99 / self.best_p99 - 1)

    @property
    def moved(self) -> float:
        """Change of the bytes moved against the classic policy of the lowest mean, in %."""
        return 100 * (self.ours.moved / self.best.moved - 1)


def _mean(rows: list[Row]) -> Row:
    """The mean of some rows; what is no measurement is that of the first."""
    means = {}
    for name in (field.name for field in fields(Row)):
        values = [getattr(row, name) for row in rows]
        if all(isinstance(value, float) for value in values):
            means[name] = statistics.mean(values)
    return replace(rows[0], **means)


def show(rows: list[Row]) -> None:
    """Print all tables in Markdown."""
    by_cell: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row.workload, row.model), []).append(row)
    cells = [Cell.of(each) for each in by_cell.values()]
    given = sys.argv[1:]
    if "--rows" in given:  # where rows are kept changes none of them
        del given[given.index("--rows") : given.index("--rows") + 2]
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *given])
    print(f"# Tiers of memory\n\n    {command}\n")
    starts = max(len({row.start for row in each}) for each in by_cell.values())
    print(
        f"Each figure is a mean over {starts} starts. TTFT on a server, queue included, with a device pool "
        f"of {DEVICE:.0%} and host memory of {HOST:.0%} of the distinct pages, at {LINK / 1e9:g} GB/s each "
        "way. Simulated: the time of a prefill is a model, and no server was measured. Changes are those of "
        "`by_cost` with hazard (objective flops) against the best classic policy of writing with LRU in the "
        "same cell: the one of the lowest mean for the mean and the bytes, and the lowest p99 of any of "
        "them. Negative is better.\n"
    )
    lost_mean = [cell for cell in cells if cell.mean > 0.05]
    lost_p99 = [cell for cell in cells if cell.p99 > 0.05]
    more = [cell for cell in cells if cell.moved > 0.05]
    print("## In short\n")
    table(
        ["", "mean over cells", "worst", "best", "cells worse", "cells"],
        [
            [
                name,
                f"{statistics.mean(v):+.1f} %",
                f"{max(v):+.1f} %",
                f"{min(v):+.1f} %",
                str(len(lost)),
                str(len(v)),
            ]
            for name, v, lost in (
                ("mean TTFT", [cell.mean for cell in cells], lost_mean),
                ("p99 TTFT", [cell.p99 for cell in cells], lost_p99),
                ("bytes moved", [cell.moved for cell in cells], more),
            )
        ],
        1,
    )
    print("## Where it does not hold\n")
    for name, worse in (("mean TTFT", lost_mean), ("p99 TTFT", lost_p99), ("bytes moved", more)):
        where = ", ".join(f"{cell.ours.workload} under {cell.ours.model}" for cell in worse)
        print(f"- {name} is worse than the best classic policy's in: {where or 'no cell'}.")
    print(
        "\nThe aim was no cell worse, a mean TTFT lower by 10 % on average, and fewer bytes. *Found* is the "
        "token hit rate of all tiers together in %, of the best classic policy and of ours; *bound* is what "
        "an offline optimum that knows the future finds at most, in the trace's own order of requests, and "
        "none is known for models with states. *Starts worse* counts the starts in which the mean is worse "
        "than that of the cell's best classic policy.\n"
    )
    print("## By cell\n")
    table(
        [
            "workload",
            "model",
            "rate",
            "best classic",
            "mean",
            "ours",
            "change",
            "p99",
            "ours",
            "change",
            "bytes",
            "found",
            "ours",
            "bound",
            "starts worse",
        ],
        [
            [
                cell.ours.workload,
                cell.ours.model,
                f"{cell.ours.rate:g}",
                cell.best.write,
                f"{cell.best.mean:.3f}",
                f"{cell.ours.mean:.3f}",
                f"{cell.mean:+.1f} %",
                f"{cell.best_p99:.2f}",
                f"{cell.ours.p99:.2f}",
                f"{cell.p99:+.1f} %",
                f"{cell.moved:+.1f} %",
                f"{cell.best.found:.1f}",
                f"{cell.ours.found:.1f}",
                "" if cell.ours.bound is None else f"{cell.ours.bound:.1f}",
                _starts_worse(cell, by_cell[cell.ours.workload, cell.ours.model]),
            ]
            for cell in cells
        ],
        2,
    )
    print("## All\n")
    table(
        [
            "workload",
            "model",
            "writing",
            "order",
            "device %",
            "host %",
            "mean",
            "p50",
            "p99",
            "GB moved",
            "write waits",
        ],
        [
            [
                row.workload,
                row.model,
                row.write,
                row.policy,
                f"{row.device:.2f}",
                f"{row.host:.2f}",
                f"{row.mean:.3f}",
                f"{row.p50:.3f}",
                f"{row.p99:.2f}",
                f"{row.moved:,.0f}",
                f"{row.waits:.1f}",
            ]
            for cell in cells
            for row in cell.rows
        ],
        4,
    )


def _starts_worse(cell: Cell, rows: list[Row]) -> str:
    """How many starts of a cell are worse under ours than under the cell's best classic policy."""
    ours = {row.start: row.mean for row in rows if row.ours}
    best = {row.start: row.mean for row in rows if row.write == cell.best.write}
    return f"{sum(ours[start] > best[start] * 1.0005 for start in ours)} of {len(ours)}"


def main() -> None:
    """Run the cells and print the tables."""
    parser = argparse.ArgumentParser(description="Tiers of memory: by_cost against the classic policies.")
    parser.add_argument(
        "--workloads", nargs="+", default=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS)
    )
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--tuned", action="store_true", help="the starts that constants were chosen on")
    parser.add_argument(
        "--requests", type=int, default=2000, help="of each workload at most; 2000 by default"
    )
    parser.add_argument("--starts", type=int, default=STARTS, help=f"of each workload; {STARTS} by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    parser.add_argument(
        "--rows", type=Path, default=None, metavar="FILE", help="save rows, and resume from it"
    )
    options = parser.parse_args()
    unknown = set(options.workloads) - set(WORKLOADS) | set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"no {', '.join(sorted(unknown))}; choose from {', '.join((*WORKLOADS, *MODELS))}")
    tasks = [
        Task(name, model, start, options.requests)
        for name in options.workloads
        for model in options.models
        for start in starts_of(name, options.starts, tuned=options.tuned)
    ]
    rows = measure(tasks, options.jobs, options.rows)
    check(bool(rows), "at least one cell")
    show(rows)


def starts_of(workload: str, count: int, *, tuned: bool) -> range:
    """Starts of a workload: later places in a trace with a clock, other seeds elsewhere."""
    first = 0 if tuned else FIRST.get(workload, _FRESH)
    return range(first, min(first + count, LAST.get(workload, first + count) + 1))


if __name__ == "__main__":
    main()
