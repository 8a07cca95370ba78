"""Helpers of the loops over a trace's requests: progress reports, and a pause of garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["PER_REPORT", "no_collector", "numbered"]

N = TypeVar("N")
T = TypeVar("T")

PER_REPORT = 512
"""Requests between two calls of a ``progress``."""


def numbered(
    requests: Iterable[T], count: int, progress: Callable[[int], None] | None
) -> Iterable[tuple[int, T]]:
    """Number requests from 0, as :func:`enumerate` does, and report progress.

    Args:
        requests: One item per request.
        count: How many there are.
        progress: Called every :data:`PER_REPORT` requests, and at the end, with the number of requests
            done since the last call.
    """
    each = enumerate(requests)
    if progress is None:
        return each
    # Batches, chained: resuming a generator for every request would cost more than the numbering.
    return chain.from_iterable(_batches(each, count, progress))


def _batches(each: Iterator[N], count: int, progress: Callable[[int], None]) -> Iterator[Iterator[N]]:
    for start in range(0, count, PER_REPORT):
        yield islice(each, PER_REPORT)
        progress(min(PER_REPORT, count - start))


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable Python's cycle collector, which would take half of the time, rescanning all nodes."""
    collect = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collect:
            gc.enable()
