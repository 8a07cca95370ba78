"""Measures how long evictions take to choose their victims, without the time to free them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Stopwatch"]

T = TypeVar("T")


class Stopwatch:
    """The time of a host's evictions, of one at a time or one inside another."""

    def __init__(self) -> None:
        self._freeing = 0.0

    def timed(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a host's ``take``, whose time is left out of an eviction's."""

        def timed_take(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return take(*args)
            finally:
                self._freeing += time.perf_counter() - began

        return timed_take

    def measure(self, evict: Callable[[], T]) -> tuple[T, float]:
        """Run an eviction; returns its result, and the seconds that it took to choose victims."""
        outer, self._freeing = self._freeing, 0.0  # to free on a device may evict on its host first
        began = time.perf_counter()
        result = evict()
        seconds = time.perf_counter() - began - self._freeing
        self._freeing = outer
        return result, max(0.0, seconds)
