"""Prometheus metrics of our evictions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import prometheus_client
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel

from costcache._version import described
from costcache.counts import BY_USES, BY_USES_LABEL, COUNTERS, FALLBACKS, IN_FORCE, VERDICT
from costcache.eviction import USES
from tests.hostile import plugins_with
from tests.sglang import hicache
from tests.sglang.pools import Shape, bind, cost_cache
from tests.sglang.serving import Server
from tests.sglang.test_features import misbehaving


@contextmanager
def clean_registry() -> Iterator[None]:
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    with get_parallel().override(tp_rank=0, pp_rank=0):
        yield
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


@pytest.fixture(autouse=True)
def _one_rank_and_a_clean_registry() -> Iterator[None]:
    with clean_registry():
        yield


LABELS = {"cache_type": "CostCache", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


def value(name: str, pool: str = "kv") -> float | None:
    labels = {**LABELS, "pool": pool}
    found: float | None = prometheus_client.REGISTRY.get_sample_value(f"costcache:{name}", labels)
    return found


def by_uses(pool: str = "kv") -> dict[str, float | None]:
    """Victims by the requests that had used them."""
    labels = {**LABELS, "pool": pool}
    return {
        uses: prometheus_client.REGISTRY.get_sample_value(
            f"costcache:{BY_USES[0]}", {**labels, BY_USES_LABEL: uses}
        )
        for uses in USES
    }


def in_force(policy: str, core: str = "python", pool: str = "kv") -> dict[str, float]:
    """The info by its label ``lru``."""
    labels = {**LABELS, "pool": pool, "policy": policy, "core": core, "build": described()}
    found = {
        lru: prometheus_client.REGISTRY.get_sample_value("costcache:policy_info", {**labels, "lru": lru})
        for lru in ("no", "yes")
    }
    return {lru: number for lru, number in found.items() if number is not None}


def sglangs(name: str) -> float | None:
    found: float | None = prometheus_client.REGISTRY.get_sample_value(f"sglang:{name}", LABELS)
    return found


def test_evictions_are_counted_beside_sglangs_own() -> None:
    shape = Shape("mamba", params={"enable_metrics": True}, tokens=1000)
    server = Server(cost_cache(shape, headroom=0.1), shape)
    server.serve(range(300))
    server.serve(range(1000, 1300))
    server.cache.evict(EvictParams(num_tokens=100, mamba_num=1))
    assert value("evictions_total") == 1
    assert value("shortfall_units_total") == 100
    assert value("evicted_units_total") == 300  # whole leaves: states end there
    assert value("victims_total") == 1
    assert value("excess_units_sum") == 200
    assert value("decision_seconds_count") == 1
    assert 0 < (value("decision_seconds_sum") or 0) < 1
    assert value("trimmed_total") == 0
    # The leaf took its state with it.
    assert value("evictions_total", "state") == 0
    assert sglangs("evicted_tokens_total") == 300
    assert sglangs("eviction_duration_seconds_count") == 1


def test_trimmed_short_and_dropped() -> None:
    shape = Shape("mha", params={"enable_metrics": True})
    server = Server(cost_cache(shape, binding=misbehaving(shape, "moody")), shape)
    for start in range(0, 5000, 1000):
        server.serve(range(start, start + 100))
    server.cache.evict(EvictParams(num_tokens=30))
    assert value("trimmed_total") == 1
    assert value("fallbacks_total") == 0
    assert in_force("moody") == {"no": 1.0}
    server.cache.evict(EvictParams(num_tokens=10_000))
    assert value("fallbacks_total") == 1
    assert in_force("moody") == {"no": 0.0, "yes": 1.0}
    assert value("short_evictions_total") == 1
    assert value("evicted_units_total") == 500
    assert value("decision_seconds_count") == 2
    assert sglangs("evicted_tokens_total") == 500
    assert sglangs("eviction_duration_seconds_count") == 2
    assert value("evictions_total") == 2
    assert value("victims_total") == 6


@pytest.mark.parametrize("page", [1, 16])
def test_the_account_against_lru_is_that_of_the_two(page: int) -> None:
    """Some prompts continue older ones, and the pool holds a fifth of them."""
    servers = []
    for policy, params in (("hazard", {"enable_metrics": True}), ("lru", {})):
        shape = Shape("mha", page_size=page, tokens=1600, params=params)
        servers.append(Server(cost_cache(shape, policy=policy), shape))
    draw = random.Random(6)
    prompts: list[list[int]] = []
    found = [0, 0]
    for number in range(250):
        old = draw.choice(prompts[-30:]) if prompts and draw.random() < 0.7 else []
        prompt = old[: draw.randint(0, len(old))] + [number] * draw.randint(20, 120)
        prompts.append(prompt[:600])
        for at, server in enumerate(servers):
            found[at] += server.serve(prompts[-1], [7] * 3)
    servers[0].cache.evict(EvictParams(num_tokens=1))  # publishes
    account = (value("gained_tokens_total") or 0) - (value("lost_tokens_total") or 0)
    assert account == found[0] - found[1] > 0
    assert value("step_ins_total") == 0
    assert value("lru_in_force") == 0
    assert in_force("hazard") == {"no": 1.0}
    judge = servers[0].cache.pools.by_name["kv"].order.learner.judge
    while not judge.behind:
        judge.add(50.0, 100.0)
    servers[0].cache.evict(EvictParams(num_tokens=1))
    assert value("step_ins_total") == 1
    assert value("lru_in_force") == 1
    assert in_force("hazard") == {"no": 0.0, "yes": 1.0}


def test_without_metrics_nothing_is_registered() -> None:
    server = Server(cost_cache(Shape("mha")), Shape("mha"))
    server.serve(range(100))
    server.cache.evict(EvictParams(num_tokens=10))
    assert server.cache.cost_metrics is None
    assert value("evictions_total") is None


@pytest.mark.parametrize(
    ("shape", "pools"),
    [
        (Shape("mha", params={"enable_metrics": True}), ("kv",)),
        (Shape("mha", core="rust", params={"enable_metrics": True}), ("kv",)),
        (Shape("swa", params={"enable_metrics": True}), ("kv", "swa")),
        (Shape("mamba", params={"enable_metrics": True}), ("kv", "state")),
        (Shape("mha", hicache="write_through", params={"enable_metrics": True}), ("kv", "host")),
    ],
)
@pytest.mark.parametrize("policy", ["hazard", "slru"])
def test_every_metric_is_there_before_the_first_request(
    shape: Shape, pools: tuple[str, ...], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An increase of a counter that appears with its first event is never seen by an alert."""
    if shape.hicache:
        hicache.patch(monkeypatch)
    if shape.core == "rust" and policy == "hazard":
        pytest.skip("it looks at more than leaves")
    cost_cache(shape, policy=policy)
    for pool in pools:
        for name, _ in (*COUNTERS.values(), FALLBACKS):
            assert value(name, pool) == 0, (name, pool)
        assert by_uses(pool) == dict.fromkeys(USES, 0)
        assert value("excess_units_count", pool) == value("decision_seconds_count", pool) == 0
        assert in_force(policy, shape.core or "python", pool) == {"no": 1.0}
    compares = policy == "hazard" and "state" not in pools
    for name, _ in (*VERDICT.values(), IN_FORCE):
        assert value(name) == (0 if compares else None)
    assert value("policy_entries") is None


@pytest.mark.parametrize("core", ["python", "rust"])
def test_victims_are_counted_by_their_uses_and_resets_at_once(core: str) -> None:
    shape = Shape("mha", core=core, params={"enable_metrics": True})
    server = Server(cost_cache(shape), shape)
    for start in (0, 1000, 1000, 1000, 2000):
        server.serve(range(start, start + 100))
    server.cache.evict(EvictParams(num_tokens=10_000))
    # Of a prompt that is cached to its end the last token is computed again, in a node of its own.
    assert by_uses() == dict.fromkeys(USES, 0) | {"1": 2, "3-4": 2}
    assert value("victims_total") == 4
    assert value("resets_total") == 0
    server.cache.reset()  # nothing was cached
    assert value("resets_total") == 0
    server.serve(range(100))
    server.cache.reset()
    assert value("resets_total") == 1


def test_lru_itself_is_lru_in_force() -> None:
    cost_cache(Shape("mha", params={"enable_metrics": True}))
    assert in_force("lru") == {"yes": 1.0}


def test_a_policy_that_keeps_memory_is_seen() -> None:
    shape = Shape("mha", params={"enable_metrics": True}, tokens=1000)
    plugins = plugins_with("a memory of everything")
    server = Server(cost_cache(shape, binding=bind(shape, plugins=plugins, policy="hostile")), shape)
    seen = []
    for start in range(0, 20_000, 100):
        server.serve(range(start, start + 100))
        seen.append(value("policy_entries") or 0.0)
    assert seen[-1] > seen[100] + 90 > seen[0] + 180


def test_a_policy_that_sleeps_is_seen() -> None:
    shape = Shape("mha", params={"enable_metrics": True}, tokens=1000)
    plugins = plugins_with("sleep before a victim")
    binding = bind(shape, plugins=plugins, policy="hostile", time_budget=0.1)
    for alone in (True, False):
        # Ranks side by side count, and none of them may leave the others.
        with clean_registry():
            server = Server(cost_cache(shape, binding=replace(binding, drops_slow=alone)), shape)
            for start in range(0, 1500, 100):
                server.serve(range(start, start + 100))
            slow = value("slow_decisions_total") or 0
        assert server.cache.pools.kv.fallbacks == int(alone)
        assert slow == 3 if alone else slow > 3
