"""The policy on small caches, and the changes made by the architecture plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from costcache_example import plugin

from costcache import RadixCache
from costcache.deployment import Deployment
from costcache.errors import ConfigError, PluginError, SettingsError
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.testing import ArchitectureContract, PolicyContract

LLAMA = ModelSpec.preset("llama-3-8b")
ACME = LLAMA.model_copy(update={"name": "acme-chat-8b"})


class TestWorth(PolicyContract):
    """What every policy must pass."""

    policy = "worth"
    plugin = plugin


class TestAcme(ArchitectureContract):
    """What every architecture plugin must pass."""

    plugin = plugin
    serves = (ACME,)
    leaves = ("llama-3-8b", "deepseek-v3", "qwen3-next")


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    """The built-in plugins and this one."""
    manager = PluginManager()
    manager.register(plugin, "example", plugin.__name__)
    return manager


def cache(plugins: PluginManager, policy: str = "worth", **settings: Any) -> RadixCache:
    return RadixCache(LLAMA, 400, policy=policy, plugins=plugins, **settings)


def kept(cache: RadixCache, *prompts: range) -> list[int]:
    return [cache.match_prefix(prompt).matched_len for prompt in prompts]


def test_the_deep_end_of_a_context_outlives_a_shallow_prompt(plugins: PluginManager) -> None:
    short, long = range(1000, 1100), range(300)
    for policy, expected in (("worth", [0, 300]), ("lru", [100, 200])):
        cached = cache(plugins, policy)
        cached.insert(long[:200])
        cached.insert(long)  # the last 100 tokens are a node of their own, at depth 200
        cached.insert(short)
        cached.evict(100)
        assert kept(cached, short, long) == expected


def test_nodes_with_more_uses_are_kept(plugins: PluginManager) -> None:
    once, often = range(100), range(1000, 1100)
    cached = cache(plugins)
    cached.insert(often)
    for _ in range(3):
        cached.match_prefix(often)
    cached.insert(once)
    cached.evict(100)
    assert kept(cached, once, often) == [0, 100]


def test_uses_beyond_the_most_do_not_count(plugins: PluginManager) -> None:
    hot, warm = range(100), range(1000, 1100)
    for most, expected in ((1, [0, 100]), (8, [100, 0])):
        cached = cache(plugins, policy_settings={"most_uses": most})
        cached.insert(hot)
        for _ in range(5):
            cached.match_prefix(hot)
        cached.insert(warm)
        cached.match_prefix(warm)  # the more recent of the two
        cached.evict(100)
        assert kept(cached, hot, warm) == expected


def test_a_wrong_setting_is_named(plugins: PluginManager) -> None:
    with pytest.raises(
        SettingsError, match=r"'policy_settings\.most_uses' is 0: .* greater than or equal to 1"
    ):
        cache(plugins, policy_settings={"most_uses": 0})


def test_it_claims_the_models_of_one_vendor_and_changes_their_default_policy_alone(
    plugins: PluginManager,
) -> None:
    own, other = plugins.match(ACME), plugins.match(LLAMA)
    assert (own.name, own.specificity, other.name) == ("example", 20, "generic")
    assert own.cost(Deployment()).token == other.cost(Deployment()).token
    assert RadixCache(ACME, 100, plugins=plugins).policy == "worth"
    hybrid = ModelSpec.preset("qwen3-next").model_copy(update={"name": "acme-hybrid"})
    assert plugins.match(hybrid).name == "example"
    assert RadixCache(hybrid, 100, plugins=plugins).policy == "hazard"
    with pytest.raises(PluginError, match="'worth' does not serve model 'acme-hybrid'"):
        RadixCache(hybrid, 100, policy="worth", plugins=plugins)
    assert RadixCache(LLAMA, 100, plugins=plugins).policy == "hazard"
    assert RadixCache(ACME, 100, policy="lru", plugins=plugins).policy == "lru"


POOLED = {
    "model_type": "acme_pooled",
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "active_params": 10_000_000,
    "acme_pool": 8,
}


def test_it_reads_a_config_that_the_core_refuses(plugins: PluginManager, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        ModelSpec.from_config(POOLED)
    model = plugins.read(POOLED)
    assert model.extra == {"acme_pool": 8}
    assert plugins.match(model).cost(Deployment()).token.kv_bytes == 4 * 2 * 128 * 2 // 8
    (tmp_path / "config.json").write_text(json.dumps(POOLED))
    assert plugins.resolve(str(tmp_path)).layers == model.layers
    assert plugins.resolve("llama-3-8b") == LLAMA, "all others are the core's"
