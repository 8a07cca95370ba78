"""Metrics of evictions, from the engine core's figures to vLLM's registry."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

from costcache._version import described
from costcache.counts import BY_USES, BY_USES_LABEL, COUNTERS, EXCESS, FALLBACKS, IN_FORCE, SECONDS, VERDICT
from costcache.eviction import USES
from costcache.vllm import metrics
from tests.vllm import api_server
from tests.vllm.ends import full, mixed, window
from tests.vllm.serving import Server, bind, manager
from tests.vllm.tier import config

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
    unregister()


def unregister() -> None:
    for made in metrics._metrics:
        for metric in made.all.values():
            prometheus_client.REGISTRY.unregister(metric)
    metrics._metrics.clear()


def value(name: str, **more: str) -> float | None:
    found: float | None = prometheus_client.REGISTRY.get_sample_value(f"costcache:{name}", LABELS | more)
    return found


def info(policy: str, lru: str = "no") -> float | None:
    return value("policy_info", policy=policy, build=described(), core="python", lru=lru)


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
    assert value("fallbacks_total") == 0
    assert info("hazard") == 1
    assert loggers.stat_loggers[0].seen == [{"pending": 3}] * 10


def test_victims_are_counted_by_their_uses_and_resets_at_once(loggers: Any) -> None:
    server = Server(manager(100), "lru")
    for number in (0, 1, 1, 1, *range(2, 8)):
        server.serve(f"{number}", [number] * 16 * 20)
    send(server, loggers)
    victims = {uses: value(BY_USES[0], **{BY_USES_LABEL: uses}) for uses in USES}
    counters = server.pool.costcache.runs.pool.counters
    assert list(victims.values()) == counters.by_uses
    assert (victims["1"] or 0) > 0
    assert (victims["3-4"] or 0) > 0
    assert sum(counters.by_uses) == value("victims_total")
    assert value("resets_total") == 0
    assert server.manager.reset_prefix_cache()
    send(server, loggers)
    assert value("resets_total") == 1


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
    send(server, loggers)
    assert info("lfu") == 1
    server.pool.costcache.runs.pool._guard.drop("a test says so")
    send(server, loggers)
    assert value("fallbacks_total") == 1
    assert (info("lfu"), info("lfu", "yes")) == (0, 1)
    server.pool.costcache.give_up("a test", ValueError("no reason"))
    send(server, loggers)
    assert value("fallbacks_total") == 2
    assert (info("lfu"), info("lfu", "yes")) == (0, 1)


def test_each_eviction_is_in_the_histograms_once(loggers: Any) -> None:
    server = Server(manager(100), bind("lru", headroom=0.1))
    blocks = server.pool.costcache
    blocks.sent.observe(blocks.runs)
    for number in range(12):
        server.serve(str(number), [number] * 16 * 20)
        if number % 3 == 0:
            send(server, loggers)
    send(server, loggers)
    counters = blocks.runs.pool.counters
    assert value("decision_seconds_count") == value("excess_units_count") == counters.evictions > 3
    assert value("excess_units_sum") == counters.evicted - counters.shortfall > 0
    assert 0 < (value("decision_seconds_sum") or 0) < 10
    assert (value("decision_seconds_bucket", le="1.0") or 0) == counters.evictions
    send(server, loggers)
    assert value("decision_seconds_count") == counters.evictions
    assert loggers.stat_loggers[0].seen == [{"pending": 3}] * 6


def test_the_time_of_a_decision_leaves_out_that_of_freeing(loggers: Any) -> None:
    server = Server(manager(100), "lru")
    blocks = server.pool.costcache
    take, pool = blocks.runs.pool.take, blocks.runs.pool

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return take(*args)

    pool.take = slow
    blocks.sent.observe(blocks.runs)
    for number in range(8):
        server.serve(str(number), [number] * 16 * 20)
    send(server, loggers)
    assert (value("decision_seconds_count") or 0) >= 3
    assert (value("decision_seconds_bucket", le="0.025") or 0) >= 3


def test_a_pool_of_several_kinds_counts_bytes_under_its_own_name(loggers: Any) -> None:
    made = mixed(200, full(), window(64), retention=None)
    server = Server(made, "hazard")
    blocks = server.pool.costcache
    blocks.sent.observe(blocks.runs)
    for number in range(12):
        server.serve(str(number), [number] * 16 * 20)
        send(server, loggers)
    counters = blocks.runs.pool.counters
    memory = {"pool": "memory"}
    page = made.kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert value("evictions_total", **memory) == counters.evictions > 3
    assert value("evicted_units_total", **memory) == counters.evicted
    assert counters.evicted % page == 0
    assert value("excess_units_count", **memory) == counters.evictions
    assert value("policy_info", policy="hazard", build=described(), core="python", lru="no", **memory) == 1
    assert value("evictions_total") is None, "nothing is under the label kv"


@pytest.fixture
def real_loggers() -> Iterator[Callable[[Any], StatLoggerManager]]:
    """Makes vLLM's loggers for two engines, as an API server does."""
    metrics.install()
    yield lambda config: StatLoggerManager(config, [0, 1], enable_default_loggers=False)
    unregister()
    unregister_vllm_metrics()


@pytest.mark.parametrize("policy", ["lru", "costcache"])
def test_all_counts_are_there_at_zero_before_the_first_request(policy: str, real_loggers: Any) -> None:
    real_loggers(config(additional={"costcache": policy}))
    name = config().model_config.served_model_name
    found = {
        (
            sample.name.removeprefix("costcache:") + sample.labels.get(BY_USES_LABEL, ""),
            sample.labels["engine"],
        ): sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("costcache:")
        and not sample.name.endswith(("_bucket", "_created"))
        and (sample.labels["model_name"], sample.labels["pool"]) == (name, "kv")
    }
    names = [name for name, _ in (*COUNTERS.values(), *VERDICT.values(), FALLBACKS, IN_FORCE)]
    names += [f"{name}_{part}" for name, *_ in (EXCESS, SECONDS) for part in ("count", "sum")]
    names += [BY_USES[0] + uses for uses in USES]
    assert found == {(each, engine): 0 for each in names for engine in "01"} | {
        ("policy_info", engine): 1 for engine in "01"
    }
    (policies,) = {
        sample.labels["policy"]
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "costcache:policy_info"
    }
    assert policies == ("hazard" if policy == "costcache" else policy)


def test_without_the_setting_there_are_no_metrics(real_loggers: Any) -> None:
    real_loggers(config())
    assert not [m for m in prometheus_client.REGISTRY.collect() if m.name.startswith("costcache")]


def test_where_no_policy_can_choose_the_metrics_say_so(real_loggers: Any) -> None:
    made = config(additional={"costcache": "lru"})
    loggers = real_loggers(made)
    stats = SchedulerStats()
    metrics.Sent(None).add_to(stats)
    loggers.record(stats, None, engine_idx=1)
    labels = {"model_name": made.model_config.served_model_name, "pool": "kv", "build": described()}

    def of(engine: str, policy: str) -> float | None:
        more = {"engine": engine, "policy": policy, "core": "python", "lru": "yes"}
        found: float | None = prometheus_client.REGISTRY.get_sample_value(
            "costcache:policy_info", labels | more
        )
        return found

    assert (of("0", "lru"), of("0", "vllm")) == (1, None)
    assert (of("1", "lru"), of("1", "vllm")) == (0, 1)


def test_several_api_servers_add_up_what_several_engines_send(tmp_path: Path) -> None:
    """Two processes with vLLM's loggers, as under --api-server-count 2 --data-parallel-size 2."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.vllm.api_server"]
    servers = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for server in servers:
        _, said = server.communicate(timeout=600)
        assert server.returncode == 0, said
    registry = prometheus_client.CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    found = {
        (sample.name, sample.labels["engine"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.labels.get("pool") == "kv"
    }
    for engine, evictions in enumerate(api_server.EVICTIONS):
        assert found["costcache:evictions_total", str(engine)] == 2 * evictions
        assert found["costcache:policy_info", str(engine)] == 1
        assert found["costcache:fallbacks_total", str(engine)] == 0
