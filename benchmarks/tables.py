"""Gain of hazard from tables learned earlier, on requests that it has not seen.

    python benchmarks/tables.py [--workloads NAME ...] [--pools PERCENT ...] > benchmarks/results/tables.md

One half of a workload is replayed and its tables are saved; the other half is replayed without and with
them, each time from an empty cache. The halves are alternate sessions if sessions are known, else the earlier
and the later requests. Plain replay: prompts are cached, generated tokens are not, one request at a time.
Pools are in % of the half's distinct whole pages. Two more comparisons: tables converted from seconds to
counts of requests, and tables of another workload. Recorded traces are looked for in $COSTCACHE_TRACES, else
in ../shared/traces; missing ones are named and skipped. Takes five minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _report import table
from policies import FILES, MODEL, workloads

from costcache.deployment import Deployment
from costcache.policies.hazard.tables import read_tables
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.explain import explain
from costcache.sim.trace import Trace
from costcache.sim.workloads import WORKLOADS

POOLS = (2, 5, 10)
NAMES = (
    "mooncake conversation",
    "mooncake synthetic",
    "weka v6, 57 sessions",
    "chat",
    "few-shot",
    "multi-turn",
)
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


def own_tables(name: str, first: Half, last: Half, pools: Sequence[int], folder: Path) -> list[list[str]]:
    """Measure tables of the workload's own other half."""
    rows = []
    by_count = counted(last)
    for percent in pools:
        path = first.learn(percent, folder / f"{name} {percent}.json")
        lru, empty = last.rate(percent, "lru"), last.rate(percent, "hazard")
        loaded = last.rate(percent, "hazard", path)
        counting = by_count.rate(percent, "hazard")
        converted = by_count.rate(percent, "hazard", in_requests(path))
        rows.append(
            [
                name,
                f"{percent} %",
                *(f"{rate:.2f}" for rate in (lru, empty, loaded)),
                f"{loaded - empty:+.2f}",
                f"{counting:.2f}",
                f"{converted - counting:+.2f}",
            ]
        )
        print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def strange_tables(ready: dict[str, tuple[Half, Half]], folder: Path) -> list[list[str]]:
    """Measure the tables of each workload on each other workload."""
    rows = []
    for to, (_, last) in ready.items():
        empty = last.rate(STRANGE, "hazard")
        row = [to, f"{empty:.2f}"]
        for other in ready:
            path = folder / f"{other} {STRANGE}.json"
            row.append(f"{last.rate(STRANGE, 'hazard', path) - empty:+.2f}")
        rows.append(row)
        print(*row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run all replays and print the tables."""
    every = [*FILES, *(name for name in WORKLOADS if name != "random")]
    parser = argparse.ArgumentParser(description="Gain of hazard from tables learned earlier.")
    parser.add_argument("--workloads", nargs="+", default=NAMES, choices=every, metavar="NAME")
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, metavar="PERCENT")
    options = parser.parse_args()
    ready: dict[str, tuple[Half, Half]] = {}
    found: list[list[str]] = []
    make: Callable[[], Trace]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for workload, make, page in workloads(options.workloads):
            ready[workload] = halves(make(), page)
            found += own_tables(workload, *ready[workload], options.pools, folder)
        strange = strange_tables(ready, folder) if STRANGE in options.pools else []
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# Starting from learned tables\n\n    {command}\n")
    print(
        "Token hit rates in % on one half of each workload, from an empty cache, and the points gained by "
        "starting from tables learned on the other half.\n"
    )
    table(["workload", "pool", "lru", "hazard", "with tables", "gain", "counting requests", "gain"], found, 2)
    gains = [float(row[5]) for row in found]
    print(
        f"Gain {min(gains):+.2f} at worst, {sum(gains) / len(gains):+.2f} on average, {max(gains):+.2f} at "
        "best. The last two columns have a clock that counts requests, and tables converted to it.\n"
    )
    if strange:
        print(f"## Tables of another workload\n\nPoints gained from them, at pools of {STRANGE} %.\n")
        table(["requests of", "hazard", *(f"tables of {other}" for other in ready)], strange)


if __name__ == "__main__":
    main()
