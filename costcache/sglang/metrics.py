"""Prometheus metrics of our evictions, in SGLang's own registry and with its labels.

SGLang exposes at ``/metrics`` whatever its processes register with prometheus_client once
``--enable-metrics`` is given. Names:

    costcache:evictions_total           evictions that had a shortfall
    costcache:shortfall_units_total     units asked for (tokens; states in the pool "state")
    costcache:evicted_units_total       units freed
    costcache:victims_total             nodes that went, whole or in part
    costcache:trimmed_total             victims of which only the tail went
    costcache:deferred_total            victims that could not go when they were named
    costcache:clamped_total             answers of a plugin that were out of bounds and replaced
    costcache:short_evictions_total     evictions that freed less than their shortfall: no more could go
    costcache:fallbacks_total           orders dropped for LRU
    costcache:excess_units              per eviction, units freed beyond the shortfall
    costcache:decision_seconds          per eviction, time to choose the victims, without freeing them

Each has the labels of SGLang's cache metrics (cache_type, ranks) and ``pool``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any

from costcache.eviction import EvictionCounters
from costcache.sglang.pool import PoolEvents

__all__ = ["CostMetrics"]

NAMES = {
    "evictions": ("evictions_total", "Evictions that had a shortfall."),
    "shortfall": ("shortfall_units_total", "Units asked for."),
    "evicted": ("evicted_units_total", "Units freed."),
    "victims": ("victims_total", "Nodes that went, whole or in part."),
    "trimmed": ("trimmed_total", "Victims of which only the tail went."),
    "deferred": ("deferred_total", "Victims that could not go when they were named."),
    "clamped": ("clamped_total", "Answers of a plugin that were out of bounds and replaced."),
    "short": ("short_evictions_total", "Evictions that freed less than their shortfall."),
}
EXCESS = (0, 1, 16, 64, 256, 1024, 4096, 16384, 65536)
SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0)


class CostMetrics:
    """Publishes the counts of a cache's pools."""

    def __init__(self, collector: Any) -> None:
        """Register the metrics.

        Args:
            collector: SGLang's ``RadixCacheMetricsCollector``: gives the labels, and the metric classes where
                they are replaced.
        """
        # Only now: SGLang sets the environment that prometheus_client reads when it is imported.
        import prometheus_client

        counter = collector._counter_cls or prometheus_client.Counter
        histogram = collector._histogram_cls or prometheus_client.Histogram
        self._labels = dict(collector.labels)
        names = [*self._labels, "pool"]
        self._counters = {
            field: counter(f"costcache:{name}", text, labelnames=names)
            for field, (name, text) in NAMES.items()
        }
        self._fallbacks = counter("costcache:fallbacks_total", "Orders dropped for LRU.", labelnames=names)
        self._excess = histogram(
            "costcache:excess_units", "Units freed beyond the shortfall.", labelnames=names, buckets=EXCESS
        )
        self._seconds = histogram(
            "costcache:decision_seconds", "Time to choose victims.", labelnames=names, buckets=SECONDS
        )
        self._published: dict[str, tuple[int, ...]] = {}
        self._dropped: dict[str, int] = {}
        self._freeing = 0.0

    def timed(self, take: Callable[..., int]) -> Callable[..., int]:
        """``take``, with its time measured: it is not part of a decision's."""

        def timed_take(*args: Any) -> int:
            began = time.perf_counter()
            try:
                return take(*args)
            finally:
                self._freeing += time.perf_counter() - began

        return timed_take

    def evict(self, pool: PoolEvents, evict: Callable[[PoolEvents, int], int], shortfall: int) -> None:
        """Run an eviction and observe it; ``evict(pool, shortfall)`` returns the units freed."""
        self._freeing = 0.0
        began = time.perf_counter()
        freed = evict(pool, shortfall)
        seconds = time.perf_counter() - began - self._freeing
        labels = {**self._labels, "pool": pool.name}
        self._seconds.labels(**labels).observe(max(0.0, seconds))
        if freed >= shortfall:
            self._excess.labels(**labels).observe(freed - shortfall)

    def publish(self, pools: dict[str, PoolEvents]) -> None:
        """Add what has been counted since the last call."""
        for name, pool in pools.items():
            now = astuple(pool.counters)
            before = self._published.get(name, (0,) * len(now))
            if now == before and pool.fallbacks == self._dropped.get(name, 0):
                continue
            labels = {**self._labels, "pool": name}
            for field, new, old in zip(fields(EvictionCounters), now, before, strict=True):
                if new > old and field.name in self._counters:
                    self._counters[field.name].labels(**labels).inc(new - old)
            fallbacks = pool.fallbacks - self._dropped.get(name, 0)
            if fallbacks:
                self._fallbacks.labels(**labels).inc(fallbacks)
            self._published[name], self._dropped[name] = now, pool.fallbacks
