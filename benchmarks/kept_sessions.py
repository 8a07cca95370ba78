"""Sessions that do not fit: how near hazard comes to keeping the best fixed choice of sessions whole.

    python benchmarks/kept_sessions.py [--workloads NAME ...] [--pools PERCENT ...] [--tries 100]
        [--rows FILE] > benchmarks/results/kept_sessions.md

The cells are those of ``serving.py`` near full, from the first start, for workloads with sessions that wait
for their answers. The *static choice* is an eviction policy that knows the whole trace: it evicts the tokens
of a fixed set of sessions only when nothing else is evictable, until the last request of each has ended;
everything else, and the set among itself, is under LRU. The set is the best of many, by replay. First greedy
ones: sessions by their number of requests, by their requests per second alone, and by their hits per token
and second in the cache if each request waits 5 or 60 s for the server, and of each order the first 1 to 40.
Then ``--tries`` random changes of the best of them, a session added, dropped or exchanged, each kept if it is
better.

Such a server is chaotic, and the best of many replays is lucky too. So the three policies are also compared
on average over five speeds of the trace's clock around that of the cell, with the set found for the cell's.

Takes twenty minutes on one core. ``--rows`` saves the sets found, and an interrupted run resumes from it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _report import check, table
from _workloads import workloads
from policies import MODEL
from serving import POOLS, servers

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.orders import KeyedOrder
from costcache.radix.tree import RadixTree
from costcache.records import NodeRecord, RequestInfo, RequestRecord
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings, serve
from costcache.sim.trace import Trace

WORKLOADS = ("weka v6, 57 sessions", "weka v8, 60 sessions")
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)
WAITS = (5.0, 60.0)
SPEEDS = (0.9, 0.95, 1.0, 1.05, 1.1)
WANTED = 60
"""Share of the way from LRU to the static choice, in %, that hazard should reach."""


class Kept(KeyedOrder):
    """LRU that evicts the tokens of chosen sessions last."""

    rises = False

    def __init__(self, users: dict[bytes, tuple[int, ...]], page_bytes: int, requests: Iterable[int]) -> None:
        """Keep nothing yet.

        Args:
            users: Sessions that use each page, by the bytes of its key.
            page_bytes: Bytes of a key per page.
            requests: Number of requests of each session.
        """
        super().__init__()
        self.kept: set[int] = set()
        self._users = users
        self._page_bytes = page_bytes
        self._left = list(requests)

    def key(self, record: NodeRecord) -> tuple[bool, int]:
        """Whether a kept session uses the record, then its recency."""
        return not self.kept.isdisjoint(self._sessions(record)), record.recency

    def _sessions(self, record: NodeRecord) -> tuple[int, ...]:
        key: bytes = record.key  # type: ignore[attr-defined] # the records of a radix tree are its nodes
        return self._users.get(bytes(key[-self._page_bytes :]), ())

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:  # noqa: ARG002 # an order's event
        """Keep a session no longer once its last request has ended."""
        end = request.end
        sessions = () if end is None or end.parent is None else self._sessions(end)
        if len(sessions) == 1:
            self._left[sessions[0]] -= 1
            if not self._left[sessions[0]]:
                self.kept.discard(sessions[0])


class Cell:
    """One workload at one pool size, near full."""

    def __init__(self, name: str, trace: Trace, page: int, percent: int) -> None:
        self.name, self.percent, self.trace = name, percent, trace
        self.deployment = Deployment(page_size=page)
        self.simulator = Simulator(trace, MODEL, self.deployment)
        self.tokens = trace.distinct_pages(page) * percent // 100 * page
        loads = {server.load: server.settings for server in servers(self.simulator, trace, self.tokens)}
        settings = loads["near full"]
        if settings is None or trace.sessions is None:
            raise ValueError(f"{name} has no sessions: choose from {', '.join(WORKLOADS)}")
        self.server: ServingSettings = settings
        self.of = np.unique(trace.sessions, return_inverse=True)[1]
        self.requests = np.bincount(self.of)
        keys = self.simulator.keys
        users: dict[bytes, set[int]] = {}
        for session, view in zip(self.of.tolist(), keys, strict=True):
            key = bytes(view)
            for at in range(0, len(key), keys.bytes_per_page):
                users.setdefault(key[at : at + keys.bytes_per_page], set()).add(session)
        self.users = {page: tuple(sorted(sessions)) for page, sessions in users.items()}

    def hits(self, policy: str, speed: float = 1.0, kept: Iterable[int] = ()) -> float:
        """Token hit rate in % of ``lru``, ``hazard``, or ``static`` with these sessions kept."""
        server = self.server.model_copy(update={"rate": self.server.rate * speed})
        if policy != "static":
            return (
                100 * self.simulator.run(Settings(policy=policy), self.tokens, serving=server).token_hit_rate
            )
        order = Kept(self.users, self.simulator.keys.bytes_per_page, self.requests.tolist())
        order.kept.update(kept)
        keys, deployment = self.simulator.keys, self.deployment
        binding = Binding.of(MODEL, deployment, Settings(policy="lru"))
        tree = RadixTree(binding, self.tokens, page_bytes=keys.bytes_per_page)
        tree.pool.rank_by("static", order)
        outcome = serve(self.trace, keys, tree, self.simulator.prefill, server)
        return 100 * int(outcome.matched.sum()) / int(self.trace.input_tokens.sum())

    def orders(self) -> list[list[int]]:
        """Orders of the sessions, those first that promise the most hits for their room."""
        own = np.zeros(len(self.trace)) if self.trace.think_seconds is None else self.trace.think_seconds
        own = own + self.trace.output_tokens * self.server.decode_seconds
        seconds = np.bincount(self.of, own)
        # Hits per token and second: a session finds its context at each request, and takes up as much room.
        ranks = [self.requests, self.requests / seconds]
        ranks += [self.requests / (seconds + wait * self.requests) for wait in WAITS]
        return [np.argsort(-rank, kind="stable").tolist() for rank in ranks]

    def search(self, tries: int) -> tuple[float, float, list[int]]:
        """Search for the best set; returns the hit rate of the best greedy one, of the best, and that."""
        rng = random.Random(0)
        best, kept = -1.0, set[int]()
        for order in self.orders():
            for size in SIZES:
                if size <= len(order) and (found := self.hits("static", kept=order[:size])) > best:
                    best, kept = found, set(order[:size])
        greedy, every = best, range(len(self.requests))
        for _ in range(tries):
            other = set(kept)
            if rng.random() < 0.5:
                other.discard(rng.choice(sorted(other)))
            if not other or rng.random() < 0.7:
                other.add(rng.choice([session for session in every if session not in other]))
            if other != kept and (found := self.hits("static", kept=other)) > best:
                best, kept = found, other
        return greedy, best, sorted(kept)


class Row(NamedTuple):
    """A cell: hit rates in %, at its own speed and on average over several."""

    workload: str
    pool: int
    lru: float
    hazard: float
    greedy: float
    static: float
    kept: str
    means: tuple[float, float, float]


def measure(cell: Cell, tries: int, saved: dict[str, tuple[float, float, list[int]]]) -> Row:
    """Measure a cell; the set is searched for if it has not been saved."""
    where = f"{cell.name} at {cell.percent} %"
    if where not in saved:
        saved[where] = cell.search(tries)
    greedy, static, kept = saved[where]
    means = [
        statistics.mean(cell.hits(policy, speed, kept) for speed in SPEEDS)
        for policy in ("lru", "hazard", "static")
    ]
    lru, hazard = cell.hits("lru"), cell.hits("hazard")
    print(f"{where}: {lru:.2f} {hazard:.2f} {greedy:.2f} {static:.2f} {means}", file=sys.stderr, flush=True)
    of = f"{len(kept)} of {len(cell.requests)}"
    return Row(cell.name, cell.percent, lru, hazard, greedy, static, of, (means[0], means[1], means[2]))


def way(lru: float, hazard: float, static: float) -> str:
    """Share of the way from LRU to the static choice in %; nothing where they are less than a point apart."""
    return f"{100 * (hazard - lru) / (static - lru):.0f}" if static - lru >= 1.0 else "–"


def show(rows: list[Row]) -> None:
    """Print the tables in Markdown."""
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    print(f"# Sessions that do not fit\n\n    {command}\n")
    print(
        "Token hit rates in % near full, as in [serving.md](serving.md), and the share of the way from LRU "
        f"to the best static choice of sessions that hazard goes, in % (wanted: {WANTED}); – where the two "
        "are less than a point apart. The static choice knows the whole trace. The script's docstring says "
        "how it is searched for.\n"
    )
    table(
        ["workload", "pool", "LRU", "hazard", "greedy", "static", "kept", "way"],
        [
            [
                row.workload,
                f"{row.pool} %",
                *(f"{value:.2f}" for value in (row.lru, row.hazard, row.greedy, row.static)),
                row.kept,
                way(row.lru, row.hazard, row.static),
            ]
            for row in rows
        ],
    )
    print(
        f"The same on average over {len(SPEEDS)} speeds, {min(SPEEDS):g} to {max(SPEEDS):g} of the cell's:\n"
    )
    table(
        ["workload", "pool", "LRU", "hazard", "static", "way"],
        [
            [row.workload, f"{row.pool} %", *(f"{value:.2f}" for value in row.means), way(*row.means)]
            for row in rows
        ],
    )


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Hazard beside the best static choice of sessions.")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--pools", nargs="+", type=int, default=POOLS, metavar="PERCENT")
    parser.add_argument("--tries", type=int, default=100, help="random changes of the best set; 100")
    parser.add_argument("--rows", type=Path, default=None, metavar="FILE", help="save the sets found")
    options = parser.parse_args()
    saved = {}
    if options.rows is not None and options.rows.is_file():
        saved = json.loads(options.rows.read_text())
    rows = []
    for workload in workloads(tuple(options.workloads)):
        trace = workload.build(0)
        for percent in options.pools:
            cell = Cell(workload.name, trace, workload.page, percent)
            rows.append(measure(cell, options.tries, saved))
            if options.rows is not None:
                options.rows.write_text(json.dumps(saved, indent=1))
    check(bool(rows), "at least one workload")
    show(rows)


if __name__ == "__main__":
    main()
