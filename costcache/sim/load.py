"""Arrival processes of a serving replay: an open loop by the trace's clock, or closed loops of sessions.

``open``: every request arrives at its time in the trace, whatever the state of the server.
``sessions``: sessions start at their times in the trace; each further request arrives once its predecessor
has ended on this server and its think time has passed. ``clients``: as many clients as the server's
concurrency run one session after another, think times included; the trace's clock only gives the order of the
sessions.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.sim.settings import ServingSettings
    from costcache.sim.trace import Trace

__all__ = ["Load", "load_kind", "load_of", "spread_ties"]

Kind = Literal["open", "sessions", "clients"]


def load_kind(kind: Kind | Literal["auto"], trace: Trace) -> Kind:
    """Resolve ``auto``: ``sessions`` if the trace has sessions and think times, else ``open``.

    Raises:
        SettingsError: If ``kind`` is ``sessions`` and the trace has no think times.
    """
    thinks = trace.think_seconds is not None and (trace.sessions is not None or trace.follows is not None)
    if kind == "auto":
        return "sessions" if thinks else "open"
    if kind == "sessions" and not thinks:
        raise SettingsError(
            f"load is 'sessions', and {trace.name} has no sessions with think times: choose open or clients"
        )
    return kind


class Load:
    """The arrival process: upcoming requests in the order of their arrival.

    Args:
        trace: The requests.
        kind: Kind of process; see the module.
        clients: Number of clients of kind ``clients``.
        rate: Speed of the trace's clock: 0.5 is half as fast. Think times are not scaled.
        spread: Kind ``open`` only: spread requests with equal timestamps evenly up to the next timestamp.

    Attributes:
        arrivals: Arrival time of each request, in seconds, as soon as it is known.
    """

    def __init__(
        self,
        trace: Trace,
        kind: Kind,
        *,
        clients: int,
        rate: float,
        spread: bool,
    ) -> None:
        times = spread_ties(trace.timestamps) if spread and kind == "open" else trace.timestamps
        self.arrivals: list[float] = (times / rate).tolist()
        self._upcoming: list[tuple[float, int]] = []
        self._after: dict[int, list[int]] = {}
        self._think = np.zeros(len(trace)) if trace.think_seconds is None else trace.think_seconds
        self._sessions: list[list[int]] = []
        self._remaining: list[int] = []
        self._session_of: list[int] = []
        if kind == "open":
            self._upcoming = list(zip(self.arrivals, range(len(trace)), strict=True))
            heapq.heapify(self._upcoming)
            return
        roots = []
        for request, before in enumerate(trace.predecessors().tolist()):
            if before < 0:
                roots.append(request)
            else:
                self._after.setdefault(before, []).append(request)
        if kind == "sessions":
            for request in roots:
                self._schedule(self.arrivals[request], request)
            return
        sessions = np.arange(len(trace)) if trace.sessions is None else trace.sessions
        numbers, of = np.unique(sessions, return_inverse=True)
        self._session_of = of.tolist()
        self._remaining = np.bincount(of, minlength=len(numbers)).tolist()
        by_session: list[list[int]] = [[] for _ in numbers]
        for request in roots:
            by_session[self._session_of[request]].append(request)
        # A stack: the earliest session on top.
        self._sessions = sorted(by_session, key=lambda each: (self.arrivals[each[0]], each[0]), reverse=True)
        for _ in range(clients):
            self._next_session(0.0)

    def next_time(self) -> float | None:
        """Arrival time of the next request; None if none is upcoming."""
        return self._upcoming[0][0] if self._upcoming else None

    def take(self) -> int:
        """Remove the next request and return its number."""
        return heapq.heappop(self._upcoming)[1]

    def ended(self, request: int, seconds: float) -> None:
        """Schedule the requests that wait for one that has ended."""
        for each in self._after.get(request, ()):
            self._schedule(seconds + float(self._think[each]), each)
        if self._session_of:
            session = self._session_of[request]
            self._remaining[session] -= 1
            if not self._remaining[session]:
                self._next_session(seconds)

    def _next_session(self, seconds: float) -> None:
        if self._sessions:
            roots = self._sessions.pop()
            start = self.arrivals[roots[0]]
            for request in roots:
                self._schedule(seconds + (self.arrivals[request] - start), request)

    def _schedule(self, seconds: float, request: int) -> None:
        self.arrivals[request] = seconds
        heapq.heappush(self._upcoming, (seconds, request))


def load_of(settings: ServingSettings, trace: Trace) -> Load:
    """The arrivals of a trace's requests at a server.

    Raises:
        SettingsError: If the trace lacks the fields that ``settings`` needs.
    """
    return Load(
        trace,
        load_kind(settings.load, trace),
        clients=settings.concurrency,
        rate=settings.rate,
        spread=settings.spread_bursts,
    )


def spread_ties(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spread requests of equal times evenly up to the next time; the last ones over the gap before them."""
    distinct, first, counts = np.unique(times, return_index=True, return_counts=True)
    if distinct.size < 2:
        return times
    gaps = np.diff(distinct, append=2 * distinct[-1] - distinct[-2])
    rank = np.arange(times.size) - np.repeat(first, counts)
    return times + rank * np.repeat(gaps / counts, counts)
