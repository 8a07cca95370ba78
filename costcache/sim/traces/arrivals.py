"""Processes that start sessions, for a trace without a clock or to change its load."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costcache.errors import TraceError

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["DEFAULT_ARRIVALS", "Arrivals", "at_times"]

Float64 = NDArray[np.float64]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_FORMS = "uniform:6h (over that time), poisson:0.05 or even:0.25 (sessions a second), or together"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process that starts sessions.

    Args:
        kind: ``uniform``: each at a random time within a span. ``poisson``: in file order, with exponential
            gaps. ``even``: in file order, with equal gaps. ``together``: all at once.
        value: The span in seconds of ``uniform``; sessions per second of ``poisson`` and ``even``.
    """

    kind: str
    value: float = 0.0

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return self.kind in ("uniform", "poisson")

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Parse ``uniform:6h``, ``poisson:0.05``, ``even:0.25`` or ``together``.

        Raises:
            TraceError: If the text is none of these.
        """
        kind, _, amount = text.partition(":")
        value = -1.0
        if text == "together":
            value = 0.0
        elif kind == "uniform":
            span = _SPAN.fullmatch(amount)
            value = float(span[1]) * _UNITS[span[2]] if span else -1.0
        elif kind in ("poisson", "even"):
            try:
                value = float(amount)
            except ValueError:
                value = -1.0
        if not (0.0 < value <= 1e9 or text == "together"):
            raise TraceError(f"arrivals are {text!r}; give {_FORMS}")
        return cls(kind, value)

    def starts(self, sessions: int, seed: int) -> Float64:
        """Start of each session in seconds, float64 of shape [sessions]."""
        rng = np.random.default_rng(seed)
        if self.kind == "uniform":
            return rng.uniform(0.0, self.value, sessions)
        if self.kind == "poisson":
            return np.cumsum(rng.standard_exponential(sessions)) / self.value
        if self.kind == "even":
            return np.arange(sessions) / self.value
        return np.zeros(sessions)

    def spread(self, trace: Trace, seed: int, *, clock: bool, recorded: bool = False) -> Trace:
        """Start the trace's sessions by this process; requests are sorted by their new times.

        Within a session, a request arrives once its predecessor has ended (after ``service_seconds``) and
        its ``think_seconds`` have passed. If the trace has a clock and no think times, gaps stay as they
        are. A request without a session is a session of its own.

        Args:
            trace: The requests, those of a session in order.
            seed: Seed of the random processes.
            clock: Whether the trace's times are on one clock.
            recorded: Keep the gaps between a session's requests in any case.

        Raises:
            TraceError: If ``recorded``, and the trace has no times.
        """
        if recorded and not trace.timestamps.any():
            raise TraceError(f"{trace.name}: records no times, so its gaps cannot be kept: leave out --gaps")
        sessions = np.arange(len(trace)) if trace.sessions is None else trace.sessions
        if recorded or (clock and trace.think_seconds is None):
            elapsed = trace.timestamps
        else:
            elapsed = np.array(_elapsed(trace), np.float64)
        numbers, first, of = np.unique(sessions, return_index=True, return_inverse=True)
        starts = self.starts(int(numbers[-1]) + 1 if len(numbers) else 0, seed)
        times = starts[sessions] + (elapsed - elapsed[first][of])
        return replace(trace, timestamps=times).in_time_order()


DEFAULT_ARRIVALS = Arrivals("uniform", 6 * 3600.0)
"""The default for sessions without a common clock."""


def _elapsed(trace: Trace) -> list[float]:
    """Seconds from the start of its session to each request, if service takes as long as recorded."""
    before = trace.predecessors().tolist()
    zeros = np.zeros(len(trace))
    think = (zeros if trace.think_seconds is None else trace.think_seconds).tolist()
    service = (zeros if trace.service_seconds is None else np.nan_to_num(trace.service_seconds)).tolist()
    elapsed: list[float | None] = [None] * len(trace)
    for request in range(len(trace)):
        at, waiting = request, []
        while at >= 0 and elapsed[at] is None:  # a predecessor may come later in the trace
            waiting.append(at)
            at = before[at]
        for each in reversed(waiting):
            ahead = before[each]
            came = elapsed[ahead] if ahead >= 0 else 0.0
            elapsed[each] = (came or 0.0) + (service[ahead] if ahead >= 0 else 0.0) + think[each]
    return [each or 0.0 for each in elapsed]


def at_times(trace: Trace, times: Float64) -> Trace:
    """Give the requests, in order, the given times; think times no longer apply and are dropped.

    Args:
        trace: The requests.
        times: Ascending seconds from the first arrival, float64 of shape [arrivals]. If there are fewer
            than requests, they repeat, each round starting one mean gap after the previous one.
    """
    rounds = math.ceil(len(trace) / len(times)) if len(times) else 0
    period = float(times[-1]) * (1 + 1 / max(len(times) - 1, 1)) if rounds else 0.0
    repeated = (np.arange(rounds)[:, None] * period + times).ravel()[: len(trace)]
    return replace(trace.in_time_order(), timestamps=repeated, think_seconds=None, follows=None)
