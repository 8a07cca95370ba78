"""One of several API servers, as far as metrics go: vLLM's loggers, which get what two engines have sent.

A process of its own, with the folder of the metrics that all of them share in ``PROMETHEUS_MULTIPROC_DIR``.
"""

from __future__ import annotations

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from costcache.vllm import metrics
from tests.vllm.serving import Server, manager
from tests.vllm.tier import config

EVICTIONS = (3, 5)
"""Evictions of each engine."""


def main() -> None:
    metrics.install()
    served = config(additional={"costcache": "lru"})
    served.model_config.served_model_name = "llama"  # each process has a folder of its own for it
    loggers = StatLoggerManager(served, [0, 1], enable_default_loggers=False)
    for engine, evictions in enumerate(EVICTIONS):
        server = Server(manager(100), "lru")
        for number in range(5 + evictions):  # five prompts of 20 blocks fill the pool
            server.serve(str(number), [number] * 16 * 20)
        stats = SchedulerStats()
        server.pool.costcache.sent.add_to(stats)
        loggers.record(stats, None, engine_idx=engine)


if __name__ == "__main__":
    main()
