"""Pace: the clock by which ages are counted: the host's seconds, or requests on a server that is shared."""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

_SETTLED: Final = 64
"""Requests from which the mean time between requests is known."""


class Pace:
    """Clock of ages, for a host that tells the time in seconds.

    A reuse interval has two parts. A person or a tool takes seconds, however busy the server is. The queue
    takes requests: a session gets its turn after those of the others, which are quick if they hit and slow if
    they miss. When sessions do not fit, the queue is the longer part. Counted in seconds, the same interval
    is then many times as long in a bad quarter of an hour as in a good one. What was learned in one is wrong
    in the other, and the sessions that have waited longest are taken for abandoned just before their turn.

    So once requests have overlapped, each advances the clock by as much, whatever the time: the mean time
    between the first of them, so that readings are about seconds. As long as requests come one at a time,
    there is no queue, and the clock is the time.

    Attributes:
        now: The reading.
        overlaps: Whether a request has begun while another one was running.
    """

    __slots__ = ("_began", "_gap", "_requests", "_time", "now", "overlaps")

    def __init__(self, time: float) -> None:
        """Start at a time.

        Args:
            time: The host's clock, in seconds.
        """
        self.now = self._began = self._time = time
        self.overlaps = False
        self._requests = 0
        self._gap = 0.0

    def begin(self, time: float, running: int) -> float:
        """Begin a request, and return the reading.

        Args:
            time: The host's clock, in seconds.
            running: Requests that have begun before and have not ended.
        """
        if running > 0:
            self.overlaps = True
        passed = max(0.0, time - self._time)
        self._time += passed
        self._requests += 1
        if self._requests <= _SETTLED:
            self._gap = (self._time - self._began) / self._requests
        self.now += self._gap if self.overlaps else passed
        return self.now
