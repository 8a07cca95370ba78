"""Prometheus metrics of evictions, at vLLM's own endpoint and with its labels.

vLLM's engine core has no registry: it sends its figures to an API server with each step, and that registers
them. Ours go along as further entries of one of vLLM's dicts, and are taken out again before vLLM's own
loggers see them. What is sent is what was added since the last time, so with several API servers each adds
its share.

The names are those of SGLang's adapter without the two histograms; each has vLLM's labels and ``pool``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.counts import COUNTERS, FALLBACKS, IN_FORCE, VERDICT, counts_of

if TYPE_CHECKING:
    from costcache.pool import Pool

__all__ = ["Sent", "install"]

PREFIX = "costcache:"
_MARK = "_costcache"
_metrics: dict[str, Any] = {}


class Sent:
    """What the engine core sends of a pool's counts.

    Attributes:
        pool: The pool.
        given_up: 1 once vLLM's own LRU has taken over for good, else 0.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._sent: dict[str, int] = {}
        self.given_up = 0

    def add_to(self, stats: Any) -> None:
        """Add what is new to vLLM's ``SchedulerStats``."""
        counts, sent = counts_of(self.pool), self._sent
        counts[FALLBACKS[0]] += self.given_up
        entries = stats.num_kv_fetch_reqs_by_stage
        for name, count in counts.items():
            before = sent.get(name, 0)
            if count != before or (name == IN_FORCE[0] and name not in sent):
                sent[name] = count
                new = count if name == IN_FORCE[0] or count < before else count - before
                entries[PREFIX + name] = new


def install() -> None:
    """Let vLLM's loggers of this process, an API server, take our counts out of what they are sent."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    original = StatLoggerManager.record
    if hasattr(original, _MARK):
        return

    def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        entries = getattr(scheduler_stats, "num_kv_fetch_reqs_by_stage", {})
        ours = {name: entries.pop(name) for name in list(entries) if name.startswith(PREFIX)}
        if ours:
            engine = kwargs.get("engine_idx") or 0
            for logger in self.stat_loggers:
                if isinstance(logger, PrometheusStatLogger):
                    _publish(ours, logger, str(engine))
        original(self, scheduler_stats, *args, **kwargs)

    setattr(record, _MARK, True)
    StatLoggerManager.record = record


def _publish(counts: dict[str, int], logger: Any, engine: str) -> None:
    labels = {
        "model_name": str(logger.vllm_config.model_config.served_model_name),
        "engine": engine,
        "pool": "kv",
    }
    if not _metrics:
        names = [*labels]
        for name, text in (*COUNTERS.values(), *VERDICT.values(), FALLBACKS):
            _metrics[name] = logger._counter_cls(PREFIX + name, text, labelnames=names)
        _metrics[IN_FORCE[0]] = logger._gauge_cls(
            PREFIX + IN_FORCE[0], IN_FORCE[1], labelnames=names, multiprocess_mode="mostrecent"
        )
    for name, count in counts.items():
        child = _metrics[name.removeprefix(PREFIX)].labels(**labels)
        if name == PREFIX + IN_FORCE[0]:
            child.set(count)
        else:
            child.inc(count)
