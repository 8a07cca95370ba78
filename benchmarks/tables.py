"""Gain of hazard from tables learned earlier, on requests that it has not seen.

    python benchmarks/tables.py [--workloads NAME ...] [--pools PERCENT ...] [--starts 5] [--jobs 1]
        > benchmarks/results/tables.md

One half of a workload is replayed and its tables are saved; the other half is replayed without and with
them, each time from an empty cache. The halves are alternate sessions if sessions are known, else the earlier
and the later requests. Plain replay: prompts are cached, generated tokens are not, one request at a time.
Pools are in % of the half's distinct whole pages; a cell is its mean over several starts. Two more
comparisons: tables converted from seconds to counts of requests, and tables of another workload, from the
first start alone. Recorded traces are looked for in $COSTCACHE_TRACES, else in ../shared/traces; missing ones
are named and skipped. Takes half an hour on one core.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _report import table
from _workloads import FILES, GENERATED, Workload, workloads
from policies import MODEL

from costcache.deployment import Deployment
from costcache.policies.hazard.tables import read_tables
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.explain import explain
from costcache.sim.trace import Trace

POOLS = (2, 5, 10)
NAMES = (
    "mooncake conversation",
    "mooncake synthetic",
    "weka v6, 57 sessions",
    "chat",
    "few-shot",
    "multi-turn",
)
STARTS = 5
STRANGE = 5
"""Pool in % for tables of another workload."""


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a workload, ready to replay."""

    simulator: Simulator
    page: int

    def pool(self, percent: int) -> int:
        """Size of a pool in tokens."""
        return self.simulator.trace.distinct_pages(self.page) * percent // 100 * self.page

    def rate(self, percent: int, policy: str, tables: Path | None = None) -> float:
        """Measure the token hit rate in %."""
        own = {"tables": tables} if tables is not None else {}
        settings = Settings(policy=policy, policy_settings=own)
        return 100 * self.simulator.run(settings, self.pool(percent)).token_hit_rate

    def learn(self, percent: int, path: Path) -> Path:
        """Replay this half and save the tables that hazard learned."""
        text = explain(self.simulator, Settings(policy="hazard"), self.pool(percent)).tables
        path.write_text(text or "")
        return path


def halves(trace: Trace, page: int) -> tuple[Half, Half]:
    """Split a trace by alternate sessions, or into the earlier and the later requests."""
    trace = trace.in_time_order()
    if trace.sessions is None:
        second = np.arange(len(trace)) >= len(trace) // 2
    else:
        second = np.unique(trace.sessions, return_inverse=True)[1] % 2 == 1
    first, last = (
        Half(Simulator(trace.take(np.flatnonzero(half)), MODEL, Deployment(page_size=page)), page)
        for half in (~second, second)
    )
    return first, last


def counted(half: Half) -> Half:
    """Return the same half with a clock that counts requests."""
    trace = half.simulator.trace
    counts = replace(trace, timestamps=np.arange(1.0, len(trace) + 1))
    return Half(Simulator(counts, MODEL, Deployment(page_size=half.page)), half.page)


def in_requests(path: Path) -> Path:
    """Write tables that loading converts to counts of requests.

    The replay's clock is nominally in seconds but counts requests, so the file claims the reverse conversion.
    """
    tables = read_tables(path)
    rate = 1.0 / (tables.seconds_per_request or 1.0)
    turned = tables.model_copy(update={"clock": "requests", "seconds_per_request": rate})
    other = path.with_suffix(".requests.json")
    other.write_text(turned.text())
    return other


@functools.cache
def named(name: str) -> Workload:
    """A workload by its name."""
    [found] = workloads((name,))
    return found


@functools.lru_cache(maxsize=1)
def ready(name: str, start: int) -> tuple[Half, Half]:
    """The halves of a workload from a start."""
    workload = named(name)
    return halves(workload.build(start), workload.page)


def own_tables(name: str, start: int, percent: int) -> list[float]:
    """Measure tables of the workload's own other half; gives the columns of the table, in %."""
    first, last = ready(name, start)
    by_count = counted(last)
    with tempfile.TemporaryDirectory() as folder:
        path = first.learn(percent, Path(folder) / "tables.json")
        return [
            last.rate(percent, "lru"),
            last.rate(percent, "hazard"),
            last.rate(percent, "hazard", path),
            by_count.rate(percent, "hazard"),
            by_count.rate(percent, "hazard", in_requests(path)),
        ]


def row(name: str, percent: int, starts: Sequence[list[float]]) -> list[str]:
    """One row of the table: the means of the starts, and the range of the gain."""
    lru, empty, loaded, counting, converted = (statistics.mean(rates) for rates in zip(*starts, strict=True))
    gains = [rates[2] - rates[1] for rates in starts]
    return [
        name,
        f"{percent} %",
        *(f"{rate:.2f}" for rate in (lru, empty, loaded)),
        f"{loaded - empty:+.2f}",
        f"{min(gains):+.2f} to {max(gains):+.2f}",
        f"{counting:.2f}",
        f"{converted - counting:+.2f}",
    ]


def strange_tables(to: str, names: Iterable[str]) -> list[str]:
    """Measure the tables of each workload on another workload."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [ready(name, 0)[0].learn(STRANGE, Path(folder) / f"{name}.json") for name in names]
        last = ready(to, 0)[1]
        empty = last.rate(STRANGE, "hazard")
        return [to, f"{empty:.2f}", *(f"{last.rate(STRANGE, 'hazard', path) - empty:+.2f}" for path in paths)]


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Gain of hazard from tables learned earlier.")
    every = [*FILES, *GENERATED]
    parser.add_argument("--workloads", nargs="+", default=NAMES, choices=every, metavar="NAME")
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, metavar="PERCENT")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"{STARTS} by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 by default")
    options = parser.parse_args()
    names = [each.name for each in workloads(tuple(options.workloads))]
    cells = [(name, percent) for name in names for percent in options.pools]
    tasks = [(name, start, percent) for name, percent in cells for start in range(options.starts)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        strange = [pool.submit(strange_tables, name, names) for name in names if STRANGE in options.pools]
        rates = dict(zip(tasks, pool.map(own_tables, *zip(*tasks, strict=True)), strict=True))
        of_others = [each.result() for each in strange]
    found = [
        row(name, percent, [rates[name, start, percent] for start in range(options.starts)])
        for name, percent in cells
    ]
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# Starting from learned tables\n\n    {command}\n")
    print(
        "Token hit rates in % on one half of each workload, from an empty cache, and the points gained by "
        f"starting from tables learned on the other half; means over {options.starts} starts.\n"
    )
    headings = ["workload", "pool", "lru", "hazard", "with tables", "gain", "any start"]
    table([*headings, "counting requests", "gain"], found, 2)
    gains = [float(line[5]) for line in found]
    print(
        f"Gain {min(gains):+.2f} at worst, {sum(gains) / len(gains):+.2f} on average, {max(gains):+.2f} at "
        "best. The last two columns have a clock that counts requests, and tables converted to it.\n"
    )
    if of_others:
        print(f"## Tables of another workload\n\nPoints gained from them, at pools of {STRANGE} %.\n")
        table(["requests of", "hazard", *(f"tables of {other}" for other in names)], of_others)


if __name__ == "__main__":
    main()
