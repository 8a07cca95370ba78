"""Prometheus metrics of evictions, at vLLM's own endpoint and with its labels.

vLLM's engine core has no registry: it sends its figures to an API server with each step, and that registers
them. Ours go along as further entries of one of vLLM's dicts, and are taken out again before vLLM's own
loggers see them. What is sent is what was added since the last time, so with several API servers each adds
its share.

An API server makes all metrics as soon as it makes vLLM's, so that each count is there at 0 before the first
request. The names are those of SGLang's adapter; each has vLLM's labels and ``pool``: ``kv``, in tokens, or
``memory``, in bytes, where blocks of several kinds share it. An entry is named ``costcache:POOL:NAME``; what
follows after one more colon tells entries of one name apart.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from costcache._version import described
from costcache.counts import (
    BY_USES,
    BY_USES_LABEL,
    COUNTERS,
    EXCESS,
    FALLBACKS,
    IN_FORCE,
    INFO,
    INFO_LABELS,
    SECONDS,
    VERDICT,
    counts_of,
)
from costcache.eviction import USES
from costcache.stopwatch import Stopwatch
from costcache.vllm import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.model import ModelSpec
    from costcache.pool import Pool
    from costcache.vllm.runs import Runs

__all__ = ["VLLMS_OWN", "Sent", "install"]

logger = logging.getLogger("costcache")

PREFIX = "costcache:"
VLLMS_OWN = "vllm"
"""Policy of the metric ``policy_info`` where a policy was asked for and none can choose."""
CORE = "python"
"""Label ``core`` of the metric: vLLM's block pool is in Python; SGLang has a core in Rust, too."""
ONE_KIND, SEVERAL = "kv", "memory"
"""Labels ``pool``: blocks of full attention alone, counted in tokens; of several kinds, in bytes."""
BILLION = 1_000_000_000
_MARK = "_costcache"


class Sent:
    """The message of the engine core on a pool's counts.

    Attributes:
        pool: The pool; None where a policy was asked for and none can choose.
        given_up: 1 once vLLM's own LRU has taken over for good, else 0.
    """

    def __init__(self, pool: Pool | None) -> None:
        self.pool = pool
        self._sent: dict[str, int] = {}
        self.given_up = 0
        self._asked = VLLMS_OWN if pool is None else pool.policy
        self._said = ""
        self._seen: list[tuple[int, int]] = []
        self._stopwatch = Stopwatch()

    def observe(self, runs: Runs) -> None:
        """Measure each eviction from now on; what was measured waits until it is sent."""
        pool = runs.pool
        runs.evict = self._measured(pool.evict)
        pool.take = self._stopwatch.timed(pool.take)

    def _measured(self, evict: Callable[[int], Any]) -> Callable[[int], Any]:
        def measured(shortfall: int) -> Any:
            eviction, seconds = self._stopwatch.measure(lambda: evict(shortfall))
            self._seen.append((round(seconds * BILLION), eviction.freed - shortfall))
            return eviction

        return measured

    def add_to(self, stats: Any) -> None:
        """Add what is new to vLLM's ``SchedulerStats``."""
        entries = stats.num_kv_fetch_reqs_by_stage
        pool = self.pool
        prefix = f"{PREFIX}{ONE_KIND if pool is None else pool.name}:"
        counts = {} if pool is None else counts_of(pool)
        lru = pool is None or self.given_up or pool.policy == "lru" or counts.get(IN_FORCE[0])
        said = f"{prefix}{INFO[0]}:{self._asked}:{'yes' if lru else 'no'}"
        if said != self._said:
            self._said = said
            entries[said] = 1
        if pool is None:
            return
        sent = self._sent
        counts[FALLBACKS[0]] += self.given_up
        for name, count in counts.items():
            before = sent.get(name, 0)
            if count != before or (name == IN_FORCE[0] and name not in sent):
                sent[name] = count
                new = count if name == IN_FORCE[0] or count < before else count - before
                entries[prefix + name] = new
        if self._seen:
            seen, self._seen = self._seen, []
            for number, (nanoseconds, excess) in enumerate(seen):
                entries[f"{prefix}{SECONDS[0]}:{number}"] = nanoseconds
                if excess >= 0:
                    entries[f"{prefix}{EXCESS[0]}:{number}"] = excess


class _Metrics:
    """The metrics of this process, with the classes that vLLM's logger uses for its own.

    Attributes:
        all: Metrics by name, without the prefix.
    """

    def __init__(self, vllms: Any) -> None:
        labels = ("model_name", "engine", "pool")
        self.all: dict[str, Any] = {
            name: vllms._counter_cls(PREFIX + name, text, labelnames=labels)
            for name, text in (*COUNTERS.values(), *VERDICT.values(), FALLBACKS)
        }
        self.all[BY_USES[0]] = vllms._counter_cls(
            PREFIX + BY_USES[0], BY_USES[1], labelnames=(*labels, BY_USES_LABEL)
        )
        for name, text, buckets in (EXCESS, SECONDS):
            self.all[name] = vllms._histogram_cls(PREFIX + name, text, labelnames=labels, buckets=buckets)
        for (name, text), more in ((IN_FORCE, ()), (INFO, INFO_LABELS)):
            self.all[name] = vllms._gauge_cls(
                PREFIX + name, text, labelnames=(*labels, *more), multiprocess_mode="mostrecent"
            )
        self._informed: dict[tuple[str, str], tuple[str, ...]] = {}
        self._made: set[tuple[str, str, str]] = set()

    def begin(self, engine: tuple[str, str], pool: str, policy: str) -> None:
        """Let all metrics of an engine be there, at 0; its pool is the one that it will have, as a rule."""
        self._zero((*engine, pool))
        self._inform(engine, (pool, policy, CORE, described(), "yes" if policy == "lru" else "no"))

    def publish(self, entries: dict[str, int], engine: tuple[str, str]) -> None:
        """Add what an engine core has sent."""
        for entry, count in entries.items():
            pool, name, *more = entry.removeprefix(PREFIX).split(":", 2)
            labels = (*engine, pool)
            self._zero(labels)
            if name == INFO[0]:
                policy, _, lru = more[0].rpartition(":")
                self._inform(engine, (pool, policy, CORE, described(), lru))
                continue
            child = self.all[name].labels(*labels, *(more if name == BY_USES[0] else ()))
            if name == IN_FORCE[0]:
                child.set(count)
            elif name == SECONDS[0]:
                child.observe(count / BILLION)
            elif name == EXCESS[0]:
                child.observe(count)
            else:
                child.inc(count)

    def _zero(self, labels: tuple[str, str, str]) -> None:
        """Let all metrics of a pool be there."""
        if labels not in self._made:
            self._made.add(labels)
            for name, metric in self.all.items():
                if name == BY_USES[0]:
                    for uses in USES:
                        metric.labels(*labels, uses)
                elif name != INFO[0]:
                    metric.labels(*labels)

    def _inform(self, engine: tuple[str, str], now: tuple[str, ...]) -> None:
        """Say what is in force, by the pool and INFO_LABELS; what was before is there at 0."""
        before, self._informed[engine] = self._informed.get(engine), now
        for more, value in ((before, 0), (now, 1)):
            if more is not None:
                self.all[INFO[0]].labels(*engine, *more).set(value)


_metrics: list[_Metrics] = []


def install() -> None:
    """Let vLLM's loggers of this process, an API server, take our counts out of what they are sent."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    original, original_init = StatLoggerManager.record, PrometheusStatLogger.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        entries = getattr(scheduler_stats, "num_kv_fetch_reqs_by_stage", {})
        ours = {name: entries.pop(name) for name in list(entries) if name.startswith(PREFIX)}
        if ours:
            engine = kwargs.get("engine_idx") or 0
            for each in self.stat_loggers:
                if isinstance(each, PrometheusStatLogger):
                    _metrics_of(each).publish(ours, _engine(each, engine))
        original(self, scheduler_stats, *args, **kwargs)

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        try:
            settings = build.read_config(self.vllm_config)
            if settings is not None:
                config = self.vllm_config
                binding = build.bind(config, settings, config.cache_config.block_size or 1)
                pool = _pool_of(config, binding.architecture.model)
                for engine in self.engine_indexes:
                    _metrics_of(self).begin(_engine(self, engine), pool, binding.policy)
        except Exception as error:
            logger.exception("costcache: its metrics are not there before the first request: %s", error)

    setattr(record, _MARK, True)
    StatLoggerManager.record = record
    PrometheusStatLogger.__init__ = init


def _engine(vllms: Any, number: int) -> tuple[str, str]:
    """Labels of an engine, as vLLM's own metrics have them."""
    return str(vllms.vllm_config.model_config.served_model_name), str(number)


def _metrics_of(vllms: Any) -> _Metrics:
    if not _metrics:
        _metrics.append(_Metrics(vllms))
    return _metrics[0]


def _pool_of(vllm_config: Any, model: ModelSpec) -> str:
    """Name of the pool that a model will have. Only the engine core knows for certain."""
    alone = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    return SEVERAL if not alone and (model.has_states or model.has_sliding_window) else ONE_KIND
