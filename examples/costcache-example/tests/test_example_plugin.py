"""The policy on small caches, and in the simulator."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from costcache_example import plugin

from costcache import Asker, Deployment, ModelSpec, RadixCache, RequestInfo, Settings, SettingsError
from costcache.plugins import PluginManager
from costcache.sim.engine import Simulator
from costcache.sim.workloads import generate, workload_settings
from costcache.testing import PolicyContract

LLAMA = ModelSpec.preset("llama-3-8b")
GOLD, TIN = Asker(tenant="gold"), Asker(tenant="tin")


class TestRetention(PolicyContract):
    """What every policy must pass."""

    policy = "retention"
    plugin = plugin


class TestRetentionWithWeights(PolicyContract):
    """The same with settings."""

    policy = "retention"
    plugin = plugin
    settings: ClassVar[dict[str, Any]] = {"weights": {"a": 0, "": 5, "chat 1": 100}, "period": 7, "live": 3}


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    """The built-in plugins and this one."""
    manager = PluginManager()
    manager.register(plugin, "example", plugin.__name__)
    return manager


def cache(plugins: PluginManager, **settings: Any) -> RadixCache:
    return RadixCache(LLAMA, 400, policy="retention", plugins=plugins, policy_settings=settings)


def kept(cache: RadixCache, *prompts: range) -> list[int]:
    return [cache.match_prefix(prompt).matched_len for prompt in prompts]


def test_a_tenant_of_more_weight_is_kept_for_longer(plugins: PluginManager) -> None:
    gold, tin = range(100), range(1000, 1100)
    for weight, expected in ((1.0, [0, 100]), (2.0, [100, 0]), (0.0, [0, 100])):
        cached = cache(plugins, weights={"gold": weight})
        cached.insert(gold, asker=GOLD)
        cached.insert(tin, asker=TIN)
        cached.evict(100)
        assert kept(cached, gold, tin) == expected


def test_the_weight_is_worth_a_period(plugins: PluginManager) -> None:
    gold, tin = range(100), range(1000, 1100)
    for walks, expected in ((5, [100, 0]), (50, [0, 100])):
        cached = cache(plugins, weights={"gold": 2}, period=20)
        cached.insert(gold, asker=GOLD)
        for _ in range(walks):
            cached.insert(tin, asker=TIN)
        cached.evict(100)
        assert kept(cached, gold, tin) == expected


def test_the_last_tenant_counts(plugins: PluginManager) -> None:
    shared, tin = range(100), range(1000, 1100)
    cached = cache(plugins, weights={"gold": 5})
    cached.insert(shared, asker=TIN)
    cached.match_prefix(shared, asker=GOLD)
    cached.insert(tin, asker=TIN)
    cached.evict(100)
    assert kept(cached, shared, tin) == [100, 0]


def test_a_live_session_is_kept_and_one_that_ended_goes_first(plugins: PluginManager) -> None:
    live, once, over = range(100), range(1000, 1100), range(2000, 2100)
    for ends, expected in ((False, [100, 0, 100]), (True, [100, 100, 0])):
        cached = cache(plugins)
        cached.insert(live, request="a", asker=Asker("a"))
        cached.finish("a", RequestInfo())
        cached.insert(once)
        cached.insert(over, request="b", asker=Asker("b"))
        cached.finish("b", RequestInfo(session_ends=ends))
        cached.evict(100)
        assert kept(cached, live, once, over) == expected


def test_what_another_session_uses_again_is_not_over(plugins: PluginManager) -> None:
    over, once = range(100), range(1000, 1100)
    cached = cache(plugins)
    cached.insert(over, request="b", asker=Asker("b"))
    cached.finish("b", RequestInfo(session_ends=True))
    cached.match_prefix(over, asker=Asker("c"))
    cached.insert(once)
    cached.evict(100)
    assert kept(cached, over, once) == [100, 0]


def test_wrong_settings_are_named(plugins: PluginManager) -> None:
    with pytest.raises(SettingsError, match=r"'policy_settings\.weights\.gold' is -1"):
        cache(plugins, weights={"gold": -1})


def test_in_the_simulator_a_weighted_tenant_gets_the_hits(plugins: PluginManager) -> None:
    trace = generate("tenants", workload_settings("tenants", {"requests": 3000}))
    simulator = Simulator(trace, LLAMA, Deployment(page_size=16), plugins=plugins)
    assert trace.tenants is not None
    gold = np.flatnonzero(trace.tenants == trace.tenant_names.index("tenant-9"))

    def hit_rate(**settings: Any) -> float:
        asked = Settings(policy="retention", policy_settings=settings)
        matched = simulator.outcome(asked, 100_000).matched
        return float(matched[gold].sum() / trace.input_tokens[gold].sum())

    alone, weighted = hit_rate(), hit_rate(weights={"tenant-9": 20})
    assert alone < 0.8 * weighted
