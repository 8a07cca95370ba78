"""Metrics of evictions, from the engine core's figures to vLLM's registry."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from costcache.vllm import metrics
from tests.vllm.serving import Server, manager

MODEL = "tests/metrics"
LABELS = {"model_name": MODEL, "engine": "0", "pool": "kv"}


class Recorder:
    """Stands where vLLM's other loggers are, and notes what they would be given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []

    def record(self, stats: Any, iteration: Any, **_: Any) -> None:
        self.seen.append(dict(stats.num_kv_fetch_reqs_by_stage))


@pytest.fixture
def loggers() -> Any:
    metrics.install()
    prometheus = PrometheusStatLogger.__new__(PrometheusStatLogger)
    prometheus.vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name=MODEL))
    prometheus.record = lambda *args, **kwargs: None
    loggers = StatLoggerManager.__new__(StatLoggerManager)
    loggers.stat_loggers = [Recorder(), prometheus]
    yield loggers
    for metric in metrics._metrics.values():
        prometheus_client.REGISTRY.unregister(metric)
    metrics._metrics.clear()


def value(name: str) -> float | None:
    found: float | None = prometheus_client.REGISTRY.get_sample_value(f"costcache:{name}", LABELS)
    return found


def send(server: Server, loggers: Any) -> None:
    stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"pending": 3})
    server.pool.costcache.sent.add_to(stats)
    loggers.record(stats, None, engine_idx=0)


def test_counts_arrive_once_and_vllms_loggers_do_not_see_them(loggers: Any) -> None:
    server = Server(manager(100), "hazard")
    for number in range(10):
        server.serve(str(number), [number] * 16 * 20)
        send(server, loggers)
    counters = server.pool.costcache.runs.pool.counters
    assert counters.evictions == 5
    assert value("evictions_total") == 5
    assert value("shortfall_units_total") == value("evicted_units_total") == counters.evicted == 5 * 320
    assert value("victims_total") == counters.victims
    assert value("lru_in_force") == 0
    assert not value("fallbacks_total")
    assert loggers.stat_loggers[0].seen == [{"pending": 3}] * 10


def test_the_account_against_lru_is_that_of_the_two(loggers: Any) -> None:
    servers = Server(manager(100), "hazard"), Server(manager(100))
    draw = random.Random(6)
    prompts: list[list[int]] = []
    for number in range(250):
        old = draw.choice(prompts[-30:]) if prompts and draw.random() < 0.7 else []
        prompt = old[: draw.randint(0, len(old))] + [number] * draw.randint(20, 120)
        prompts.append(prompt[:600])
        for server in servers:
            server.serve(str(number), prompts[-1])
        send(servers[0], loggers)
    account = (value("gained_tokens_total") or 0) - (value("lost_tokens_total") or 0)
    assert account == servers[0].hits - servers[1].hits > 0


def test_a_fallback_of_the_policy_and_one_of_ours_are_counted(loggers: Any) -> None:
    server = Server(manager(100), "lfu")
    for number in range(10):
        server.serve(str(number), [number] * 16 * 20)
    server.pool.costcache.runs.pool._guard.drop("a test says so")
    send(server, loggers)
    assert value("fallbacks_total") == 1
    server.pool.costcache.give_up("a test", ValueError("no reason"))
    send(server, loggers)
    assert value("fallbacks_total") == 2
