"""The queue of a server: first come, first served, with one prefill at a time and many concurrent decodes."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from costcache.sim.loop import PER_REPORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.sim.load import Load

__all__ = ["serve_queue"]


class Running(Protocol):
    """A running request; the earliest end sorts first."""

    @property
    def ends(self) -> float:
        """Seconds at which it ends."""

    def __lt__(self, other: Any, /) -> bool: ...


R = TypeVar("R", bound=Running)


def serve_queue(
    load: Load,
    running: list[R],
    limit: int,
    start: Callable[[int, float], float | None],
    finish: Callable[[R], None],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Serve all requests of a load.

    Args:
        load: When they arrive.
        running: Heap of those that run, to which ``start`` adds.
        limit: Requests that run at once, at most.
        start: Called with the number of the first request that waits, and the time in seconds. Returns when
            its prefill ends, or None if it has to wait until a running one has ended.
        finish: Called with each request that has ended, which is no longer in ``running``.
        progress: Called every :data:`~costcache.sim.loop.PER_REPORT` requests, and at the end, with the
            number of requests started since the last call.
    """
    waiting: deque[int] = deque()
    free_at, now, done, reported = 0.0, 0.0, 0, 0  # free_at: end of the current prefill
    while True:
        if not waiting:
            event = _next_event(load, running)
            if event is None:
                break
            now = max(now, event)
        now = max(now, free_at)
        _until(now, load, running, waiting, finish)
        if not waiting:
            continue
        started = start(waiting[0], now) if len(running) < limit else None
        if started is None:
            now = max(now, running[0].ends)  # frees its memory, and its place among those that run
            continue
        free_at = started
        waiting.popleft()
        done += 1
        if progress is not None and done - reported >= PER_REPORT:
            progress(done - reported)
            reported = done
    if progress is not None:
        progress(done - reported)


def _next_event(load: Load, running: list[R]) -> float | None:
    """Time of the next arrival or end of a request; None when nothing is left."""
    arrives = load.next_time()
    ends = running[0].ends if running else None
    if arrives is None or ends is None:
        return ends if arrives is None else arrives
    return min(arrives, ends)


def _until(
    now: float, load: Load, running: list[R], waiting: deque[int], finish: Callable[[R], None]
) -> None:
    """Process all arrivals and ends up to ``now``, in order: an end may cause an arrival."""
    while True:
        arrives = load.next_time()
        if running and running[0].ends <= now and (arrives is None or running[0].ends <= arrives):
            finish(heapq.heappop(running))
        elif arrives is not None and arrives <= now:
            waiting.append(load.take())
        else:
            return
