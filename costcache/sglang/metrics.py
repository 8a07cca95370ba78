"""Prometheus metrics of evictions, in SGLang's own registry and with its labels.

SGLang exposes at ``/metrics`` whatever its processes register with prometheus_client once
``--enable-metrics`` is given. Names:

    costcache:evictions_total           evictions that had a shortfall
    costcache:shortfall_units_total     units asked for (tokens; states in the pool "state")
    costcache:evicted_units_total       units freed
    costcache:victims_total             nodes evicted, whole or in part
    costcache:trimmed_total             victims evicted in part, from the tail
    costcache:deferred_total            victims that could not be evicted when they were named
    costcache:clamped_total             answers of a plugin that were out of bounds and replaced
    costcache:short_evictions_total     evictions that freed less than their shortfall: no more was evictable
    costcache:fallbacks_total           orders dropped for LRU
    costcache:step_ins_total            times that LRU stepped in, by the verdict of the policy
    costcache:lru_in_force              1 while it is in force by that verdict, else 0
    costcache:resets_total              times that all that was cached was dropped at once
    costcache:victims_by_uses_total     victims by the requests that had used them; label uses, from 1 to 17+
    costcache:slow_decisions_total      decisions for which a plugin's policy took longer than its time budget
    costcache:policy_info               1; labels policy, core, build and lru (yes or no) say what is in force
    costcache:policy_entries            entries that a plugin's policy keeps in collections of its own
    costcache:gained_tokens_total       tokens found that LRU would not have found
    costcache:lost_tokens_total         tokens that LRU would have found, and the policy did not
    costcache:excess_units              per eviction, units freed beyond the shortfall
    costcache:decision_seconds          per eviction, time to choose the victims, without freeing them

Each has the labels of SGLang's cache metrics (cache_type, ranks) and ``pool``. All are there from the
start, at 0, so that an alert on an increase sees the first one; those of a verdict only if the policy
compares itself with LRU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costcache.counts import (
    BY_USES,
    BY_USES_LABEL,
    COUNTERS,
    ENTRIES,
    EXCESS,
    FALLBACKS,
    IN_FORCE,
    INFO,
    INFO_LABELS,
    SECONDS,
    VERDICT,
    info_of,
)
from costcache.eviction import USES
from costcache.pool import Pool
from costcache.stopwatch import Stopwatch

__all__ = ["CostMetrics"]


class CostMetrics:
    """Publishes the counts of a cache's pools."""

    def __init__(self, collector: Any, policy: str, core: str) -> None:
        """Register the metrics.

        Args:
            collector: SGLang's ``RadixCacheMetricsCollector``: gives the labels, and the metric classes if
                they are replaced.
            policy: Name of the policy that was asked for.
            core: The tree core.
        """
        self._policy = policy
        self._core = core
        # Only now: SGLang sets the environment that prometheus_client reads when it is imported.
        import prometheus_client

        counter = collector._counter_cls or prometheus_client.Counter
        gauge = getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge
        histogram = collector._histogram_cls or prometheus_client.Histogram
        self._labels = dict(collector.labels)
        names = [*self._labels, "pool"]
        self._counters = {
            field: counter(f"costcache:{name}", text, labelnames=names)
            for field, (name, text) in COUNTERS.items()
        }
        self._by_uses = counter(f"costcache:{BY_USES[0]}", BY_USES[1], labelnames=[*names, BY_USES_LABEL])
        self._fallbacks = counter(f"costcache:{FALLBACKS[0]}", FALLBACKS[1], labelnames=names)
        self._verdict = {
            field: counter(f"costcache:{name}", text, labelnames=names)
            for field, (name, text) in VERDICT.items()
        }
        self._in_force = gauge(
            f"costcache:{IN_FORCE[0]}",
            IN_FORCE[1],
            labelnames=names,
            multiprocess_mode="mostrecent",
        )
        self._excess, self._seconds = (
            histogram(f"costcache:{name}", text, labelnames=names, buckets=buckets)
            for name, text, buckets in (EXCESS, SECONDS)
        )
        self._info = gauge(
            f"costcache:{INFO[0]}",
            INFO[1],
            labelnames=[*names, *INFO_LABELS],
            multiprocess_mode="mostrecent",
        )
        self._entries = gauge(
            f"costcache:{ENTRIES[0]}",
            ENTRIES[1],
            labelnames=names,
            multiprocess_mode="mostrecent",
        )
        self._of: dict[str, _OfPool] = {}
        self._stopwatch = Stopwatch()

    def timed(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``take`` to measure its time, which is subtracted from a decision's."""
        return self._stopwatch.timed(take)

    def evict(self, pool: Pool, evict: Callable[[Pool, int], int], shortfall: int) -> None:
        """Run an eviction and observe it; ``evict(pool, shortfall)`` returns the units freed."""
        freed, seconds = self._stopwatch.measure(lambda: evict(pool, shortfall))
        of = self._of_pool(pool.name)
        of.child(self._seconds).observe(seconds)
        if freed >= shortfall:
            of.child(self._excess).observe(freed - shortfall)

    def publish(self, pools: dict[str, Pool]) -> None:
        """Add the counts since the last call."""
        for name, pool in pools.items():
            of, counters = self._of_pool(name), pool.counters
            for field, metric in self._counters.items():
                of.add(metric, field, getattr(counters, field))
            if of.victims != counters.victims:
                of.victims = counters.victims
                for uses, count in zip(USES, counters.by_uses, strict=True):
                    of.add(self._by_uses, uses, count, **{BY_USES_LABEL: uses})
            of.add(self._fallbacks, "fallbacks", pool.fallbacks)
            of.inform(self._info, info_of(pool, self._policy, self._core))
            kept = pool.kept_entries
            if kept is not None:
                of.child(self._entries).set(kept)
            verdict = pool.order.against_lru()
            if verdict is not None:
                for field, metric in self._verdict.items():
                    of.add(metric, field, getattr(verdict, field))
                of.child(self._in_force).set(int(verdict.behind))

    def _of_pool(self, name: str) -> _OfPool:
        of = self._of.get(name)
        if of is None:
            of = self._of[name] = _OfPool({**self._labels, "pool": name})
            for metric in (self._excess, self._seconds):
                of.child(metric)
        return of


class _OfPool:
    """The metrics of one pool, kept because looking one up by its labels takes longer than adding to it.

    Attributes:
        victims: Victims that are published by their uses; -1 before these are exposed.
    """

    def __init__(self, labels: dict[str, Any]) -> None:
        self.victims = -1
        self._labels = labels
        self._children: dict[Any, Any] = {}
        self._published: dict[str, int] = {}
        self._informed: tuple[dict[str, str], Any] | None = None

    def inform(self, metric: Any, labels: dict[str, str]) -> None:
        """Set the info with these labels to 1, and the one before to 0."""
        if self._informed is not None:
            before, child = self._informed
            if before == labels:
                return
            child.set(0)
        child = metric.labels(**self._labels, **labels)
        child.set(1)
        self._informed = labels, child

    def child(self, metric: Any, **more: str) -> Any:
        """A metric with the pool's labels, and more, which is exposed from now on."""
        key = (metric, *more.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(**self._labels, **more)
        return child

    def add(self, metric: Any, name: str, count: int, **more: str) -> None:
        """Raise a counter to a count; ``name`` tells it from all others of the pool."""
        published = self._published.get(name)
        if published is None:  # exposed from now on, at 0 too
            self.child(metric, **more)
            published = 0
            self._published[name] = 0
        if count != published:
            self._published[name] = count
            # A count of an order begins anew after a reset.
            self.child(metric, **more).inc(count - published if count > published else count)
