"""When requests reach the server of a serving replay: on a clock, or in answer to what it has answered.

``open``: every request comes at its time in the trace, whatever the server has done by then.
``sessions``: sessions start at their times in the trace; each further request comes when the one that it
waits for has ended on this server and its think time has passed. ``clients``: as many clients as may
run at once take one session after the other, think times included; the trace's clock says no more
than the order of the sessions.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["Load", "load_kind", "spread_ties"]

Kind = Literal["open", "sessions", "clients"]


def load_kind(kind: Kind | Literal["auto"], trace: Trace) -> Kind:
    """The way meant by ``auto``: ``sessions`` where the trace has sessions and think times, else ``open``.

    Raises:
        SettingsError: ``sessions`` is asked for and the trace has no think times.
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
    """Requests on their way, in the order of their arrival.

    Args:
        trace: The requests.
        kind: What brings requests; see the module.
        clients: Clients of kind ``clients``.
        rate: Speed of the trace's clock: 0.5 is half as fast. Think times stay as they are.
        spread: Of kind ``open``: spread requests of one timestamp evenly up to the next.

    Attributes:
        arrivals: When each request came, in seconds; of those that are on their way, when they will.
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
        self._coming: list[tuple[float, int]] = []
        self._after: dict[int, list[int]] = {}
        self._think = np.zeros(len(trace)) if trace.think_seconds is None else trace.think_seconds
        self._sessions: list[list[int]] = []
        self._left: list[int] = []
        self._of: list[int] = []
        if kind == "open":
            self._coming = list(zip(self.arrivals, range(len(trace)), strict=True))
            heapq.heapify(self._coming)
            return
        roots = []
        for request, before in enumerate(trace.predecessors().tolist()):
            if before < 0:
                roots.append(request)
            else:
                self._after.setdefault(before, []).append(request)
        if kind == "sessions":
            for request in roots:
                self._come(self.arrivals[request], request)
            return
        sessions = np.arange(len(trace)) if trace.sessions is None else trace.sessions
        numbers, of = np.unique(sessions, return_inverse=True)
        self._of = of.tolist()
        self._left = np.bincount(of, minlength=len(numbers)).tolist()
        by_session: list[list[int]] = [[] for _ in numbers]
        for request in roots:
            by_session[self._of[request]].append(request)
        # The earliest is taken first; a stack gives it last.
        self._sessions = sorted(by_session, key=lambda each: (self.arrivals[each[0]], each[0]), reverse=True)
        for _ in range(clients):
            self._next_session(0.0)

    def next_time(self) -> float | None:
        """When the next request comes; None where none is on its way."""
        return self._coming[0][0] if self._coming else None

    def take(self) -> int:
        """The number of the request that comes next."""
        return heapq.heappop(self._coming)[1]

    def ended(self, request: int, seconds: float) -> None:
        """A request ended: those that wait for it are on their way now."""
        for each in self._after.get(request, ()):
            self._come(seconds + float(self._think[each]), each)
        if self._of:
            session = self._of[request]
            self._left[session] -= 1
            if not self._left[session]:
                self._next_session(seconds)

    def _next_session(self, seconds: float) -> None:
        if self._sessions:
            roots = self._sessions.pop()
            start = self.arrivals[roots[0]]
            for request in roots:
                self._come(seconds + (self.arrivals[request] - start), request)

    def _come(self, seconds: float, request: int) -> None:
        self.arrivals[request] = seconds
        heapq.heappush(self._coming, (seconds, request))


def spread_ties(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Requests of one timestamp, evenly up to the next; the last ones over the gap before them."""
    distinct, first, counts = np.unique(times, return_index=True, return_counts=True)
    if distinct.size < 2:
        return times
    gaps = np.diff(distinct, append=2 * distinct[-1] - distinct[-2])
    place = np.arange(times.size) - np.repeat(first, counts)
    return times + place * np.repeat(gaps / counts, counts)
