"""The hooks for keys and values per head: claims, bytes, free target, counts."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import costcache
from costcache import RadixCache
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.plugins import PluginManager, get_plugins
from costcache.policies import BUILTIN
from costcache.records import PoolState
from costcache.settings import DEFAULT_POLICY, PoolSettings
from costcache_mha import __version__, plugin
from costcache_mha.plugin import SPECIFICITY

LLAMA = ModelSpec.preset("llama-3-8b")
# Layers x KV heads x (keys and values of head_dim 128) in two bytes, from the models' own configs.
PER_HEAD = {
    "llama-3-8b": 32 * 8 * 256 * 2,
    "llama-3-70b": 80 * 8 * 256 * 2,
    "qwen3-8b": 36 * 8 * 256 * 2,
    "qwen3-32b": 64 * 8 * 256 * 2,
    "qwen3-30b-a3b": 48 * 4 * 256 * 2,
}
BASE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}


def config(**fields: Any) -> ModelSpec:
    return ModelSpec.from_config({"architectures": ["MistralForCausalLM"], **BASE, **fields})


def pool(capacity: int, page_size: int = 1) -> PoolState:
    return PoolState("kv", "tokens", capacity, 0, capacity, 0, page_size)


@pytest.mark.parametrize("name", PER_HEAD)
def test_it_claims_and_serves_models_with_keys_and_values_per_head(name: str) -> None:
    model = ModelSpec.preset(name)
    assert plugin.match_model(model) == SPECIFICITY
    architecture = get_plugins().match(model)
    assert (architecture.name, architecture.specificity) == ("mha", SPECIFICITY)
    cost = architecture.cost(Deployment()).token
    assert (cost.kv_bytes, cost.swa_bytes, cost.state_bytes) == (PER_HEAD[name], 0, 0)
    assert cost.compression_ratio == 1.0
    assert cost.decompressed_kv_bytes == cost.kv_bytes


@pytest.mark.parametrize("name", ModelSpec.presets())
def test_it_declines_every_preset_with_latents_or_states(name: str) -> None:
    model = ModelSpec.preset(name)
    claimed = plugin.match_model(model) is not None
    assert claimed == (get_plugins().match(model).name == "mha")
    assert claimed != (model.has_latent or model.has_states)


def test_it_claims_multi_head_multi_query_and_sliding_windows() -> None:
    many, one = config(num_key_value_heads=32), config(num_key_value_heads=1)
    sliding = config(num_key_value_heads=8, sliding_window=4096)
    for model in (many, one, sliding):
        assert get_plugins().match(model).name == "mha"
    assert plugin.token_cost(many, Deployment()).kv_bytes == 32 * 32 * 256 * 2
    assert plugin.token_cost(one, Deployment()).kv_bytes == 32 * 256 * 2
    # One head is not divided any further: each rank stores it.
    assert plugin.token_cost(one, Deployment(tp=8)).kv_bytes == 32 * 256 * 2
    cost = plugin.token_cost(sliding, Deployment())
    assert (cost.kv_bytes, cost.swa_bytes) == (0, 32 * 8 * 256 * 2)


@pytest.mark.parametrize(
    ("served", "divisor"),
    [
        ({}, 1),
        ({"tp": 8}, 8),
        ({"tp": 16}, 8),
        ({"tp": 8, "dp_attention": 4}, 2),
        ({"kv_dtype": "fp8_e5m2"}, 2),
    ],
)
def test_ranks_share_the_heads(served: dict[str, Any], divisor: int) -> None:
    cost = plugin.token_cost(LLAMA, Deployment(**served))
    assert (cost.swa_bytes, cost.state_bytes, cost.compression_ratio) == (0, 0, 1.0)
    assert cost.decompressed_kv_bytes == sum(term.bytes for term in cost.terms) == cost.kv_bytes
    assert cost.kv_bytes == PER_HEAD["llama-3-8b"] // divisor


@given(st.floats(0, 1, exclude_max=True))
def test_the_free_target_is_the_headroom(headroom: float) -> None:
    assert get_plugins().match(LLAMA).free_target(LLAMA, pool(1000), PoolSettings(headroom)) == headroom


def test_by_default_nothing_is_left_free() -> None:
    cache = RadixCache(LLAMA, 100)
    cache.insert(range(100))
    assert cache.evict(7).freed == 7
    with_headroom = RadixCache(LLAMA, 100, headroom=0.2)
    with_headroom.insert(range(100))
    eviction = with_headroom.evict(7)
    assert (eviction.headroom, eviction.freed) == (20, 27)


@given(pages=st.integers(1, 10**6), page_size=st.sampled_from([1, 2, 16, 64, 512]), share=st.floats(0, 1))
def test_the_count_is_never_under_the_request_and_never_over_the_pool(
    pages: int, page_size: int, share: float
) -> None:
    state = pool(pages * page_size, page_size)
    requested = max(1, math.ceil(share * state.capacity))
    count = get_plugins().match(LLAMA).adjust_eviction_count(LLAMA, state, requested, PoolSettings(0.0))
    assert count == requested, "exact: the pipeline makes whole pages of it"
    whole = state.in_pages(count)
    assert requested <= whole <= state.capacity
    assert whole % page_size == 0
    assert whole < requested + page_size


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    shortfalls=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    headroom=st.sampled_from([0.0, 0.2, 0.9]),
    policy=st.sampled_from(BUILTIN),
)
def test_a_cache_frees_what_is_needed_plus_the_headroom_and_trusts_every_answer(
    lengths: list[int], shortfalls: list[int], page_size: int, headroom: float, policy: str
) -> None:
    cache = RadixCache(LLAMA, 640, page_size, policy, headroom=headroom)
    for i, length in enumerate(lengths):
        cache.insert(range(i * 1000, i * 1000 + length))
    for shortfall in shortfalls:
        evictable = cache.evictable
        wanted = shortfall + math.ceil(headroom * 640)
        assert cache.evict(shortfall).freed == min(wanted + -wanted % page_size, evictable)
    assert cache.counters.clamped == 0
    assert cache.stats().fallbacks == 0


def test_bound_hooks_answer_what_pluggy_answers() -> None:
    manager = PluginManager()
    manager.register(plugin, "mha", plugin.__name__)
    bound, hook = manager.match(LLAMA), manager.pm.hook
    settings, served, state = PoolSettings(0.2), Deployment(tp=8, page_size=64), pool(6400, 64)
    assert bound.name == "mha"
    # Last registered first, so the plugin's answer comes before generic's.
    assert bound.token_cost(LLAMA, served) == hook.token_cost(model=LLAMA, deployment=served)[0]
    assert (
        bound.free_target(LLAMA, state, settings)
        == hook.free_target(model=LLAMA, pool=state, settings=settings)[0]
        == 0.2
    )
    for requested in (1, 63, 64, 65, 6399, 6400, 7000):
        asked = {"model": LLAMA, "pool": state, "requested": requested, "settings": settings}
        answer = bound.adjust_eviction_count(LLAMA, state, requested, settings)
        assert answer == hook.adjust_eviction_count(**asked)[0] == requested
    assert bound.default_policy(LLAMA) is None
    assert hook.default_policy(model=LLAMA) == []
    assert manager.policy_name("costcache", bound) == DEFAULT_POLICY
    assert bound.settings_model() is None


def test_it_has_no_settings_of_its_own() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'architecture.floor': known settings are none"):
        RadixCache(LLAMA, 100, architecture={"floor": 0.1})


def test_the_distribution_says_the_cores_version_and_every_hook_is_documented() -> None:
    assert __version__ == costcache.__version__
    hooks = [f for _, f in inspect.getmembers(plugin, inspect.isfunction) if hasattr(f, "costcache_impl")]
    assert {hook.__name__ for hook in hooks} == {"match_model", "token_cost"}
    assert all(inspect.getdoc(hook) for hook in hooks)
