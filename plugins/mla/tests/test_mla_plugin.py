"""The hooks for latent attention: claims, bytes, free target, counts."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import numpy as np
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
from costcache.settings import DEFAULT_POLICY, PoolSettings, Settings
from costcache_mla import __version__, plugin
from costcache_mla.plugin import SPECIFICITY, MLASettings

V3 = ModelSpec.preset("deepseek-v3")
# Bytes per token of the whole model in bf16, from the models' own configs; decompressed over latent.
LATENT = {
    "deepseek-v2": (60 * 576 * 2, 128 * 320 / 576),
    "deepseek-v2-lite": (27 * 576 * 2, 16 * 320 / 576),
    "deepseek-v3": (61 * 576 * 2, 128 * 320 / 576),
    "deepseek-r1": (61 * 576 * 2, 128 * 320 / 576),
    "deepseek-v3.2": (61 * (576 * 2 + 132), 128 * 320 / 576),
    "kimi-k2": (61 * 576 * 2, 64 * 320 / 576),
    "glm-5": (78 * (576 * 2 + 132), 64 * (192 + 64 + 256) / 576),
    "minicpm3-4b": (62 * (256 + 32) * 2, 40 * (64 + 32 + 64) / 288),
}


def pool(capacity: int, page_size: int = 1, free: int = 0) -> PoolState:
    return PoolState("kv", "tokens", capacity, free, capacity - free, 0, page_size)


def target(headroom: float, floor: float = 0.0, model: ModelSpec = V3) -> float:
    return plugin.free_target(model, pool(1000), PoolSettings(headroom, MLASettings(floor=floor)))


@pytest.mark.parametrize("name", LATENT)
def test_it_claims_and_serves_models_of_latent_attention(name: str) -> None:
    model = ModelSpec.preset(name)
    assert plugin.match_model(model) == SPECIFICITY
    architecture = get_plugins().match(model)
    assert (architecture.name, architecture.specificity) == ("mla", SPECIFICITY)
    cost = architecture.cost(Deployment()).token
    size, ratio = LATENT[name]
    assert (cost.kv_bytes, cost.swa_bytes, cost.state_bytes) == (size, 0, 0)
    assert cost.compression_ratio == pytest.approx(ratio)


@pytest.mark.parametrize("name", ModelSpec.presets())
def test_it_claims_the_presets_whose_attention_is_all_latent(name: str) -> None:
    model = ModelSpec.preset(name)
    claimed = plugin.match_model(model) is not None
    assert claimed == (get_plugins().match(model).name == "mla")
    assert claimed == (model.is_latent and not model.has_states)


def test_it_serves_compressed_attention_with_its_window() -> None:
    cost = get_plugins().match(ModelSpec.preset("deepseek-v4-flash")).cost(Deployment(tp=8)).token
    assert (cost.kv_bytes, cost.swa_bytes) == (21 * (256 + 33) + 20 * 8, 43 * 1024)
    assert cost.compression_ratio > 100


def test_a_hybrid_of_latents_and_states_is_declined() -> None:
    model = ModelSpec.preset("kimi-linear")
    assert (model.is_latent, model.has_states) == (True, True)
    assert plugin.match_model(model) is None
    assert get_plugins().match(model).name == "mamba_seglen"


@pytest.mark.parametrize(
    "served", [{}, {"tp": 8}, {"tp": 8, "dp_attention": 8}, {"tp": 2, "dp_attention": 2}]
)
def test_every_rank_stores_the_whole_latent(served: dict[str, Any]) -> None:
    cost = plugin.token_cost(V3, Deployment(**served))
    # Keys and values of every head would be divided over the ranks.
    assert cost.decompressed_kv_bytes == 61 * 40_960 * 2 // Deployment(**served).attention_tp
    assert cost.compression_ratio == pytest.approx(40_960 / 576)
    assert cost.kv_bytes == 70_272
    assert plugin.token_cost(V3, Deployment(kv_dtype="fp8_e4m3", **served)).kv_bytes == 35_136


@pytest.mark.parametrize(
    ("headroom", "floor", "expected"),
    [
        (0.0, 0.0, 0.0),
        (0.20, 0.05, 0.05),  # the source project's formula
        (0.20, 0.0, 0.0028125),  # its README's 0.3 %
        (0.0, 0.05, 0.05),
        (0.99, 0.0, 0.99 * 576 / 40_960),
    ],
)
def test_the_free_target_of_deepseek_v3(headroom: float, floor: float, expected: float) -> None:
    assert target(headroom, floor) == pytest.approx(expected, rel=1e-12)


@given(
    headroom=st.floats(0, 1, exclude_max=True),
    floor=st.floats(0, 1, exclude_max=True),
    name=st.sampled_from(sorted(LATENT)),
)
def test_the_free_target_is_a_share_between_floor_and_headroom(
    headroom: float, floor: float, name: str
) -> None:
    share = target(headroom, floor, ModelSpec.preset(name))
    assert floor <= share < 1
    assert share <= max(headroom, floor)
    assert share == floor or math.isclose(share * ModelSpec.preset(name).compression_ratio, headroom)


def test_without_settings_of_its_own_the_floor_is_zero() -> None:
    assert plugin.free_target(V3, pool(1000), PoolSettings(0.2)) == pytest.approx(0.0028125)


@given(
    pages=st.integers(1, 10**6),
    page_size=st.sampled_from([1, 2, 16, 64, 512]),
    share=st.floats(0, 1),
    floor=st.floats(0, 1, exclude_max=True),
)
def test_the_count_is_never_under_the_request_and_never_over_the_pool(
    pages: int, page_size: int, share: float, floor: float
) -> None:
    state = pool(pages * page_size, page_size)
    requested = max(1, math.ceil(share * state.capacity))
    adjust = get_plugins().match(V3).adjust_eviction_count
    count = adjust(V3, state, requested, PoolSettings(0.2, MLASettings(floor=floor)))
    assert count == requested, "exact: the pipeline makes whole pages of it"
    whole = state.in_pages(count)
    assert requested <= whole <= state.capacity
    assert whole % page_size == 0
    assert whole < requested + page_size


def test_evictions_are_exact_unless_headroom_or_floor_is_set() -> None:
    found = get_plugins().match(V3)
    assert found.evicts_exactly(Settings())
    assert found.evicts_exactly(Settings(architecture={"floor": 0.0}))
    assert not found.evicts_exactly(Settings(architecture={"floor": 0.05}))
    assert not found.evicts_exactly(Settings(headroom=0.2))


def test_the_case_in_which_scaling_by_the_ratio_frees_too_little() -> None:
    # 1,000 slots, 600 cached, 400 free; 600 are needed. The rule that scales the count answers 129.
    state = pool(1000, free=400)
    adjust = get_plugins().match(V3).adjust_eviction_count
    assert adjust(V3, state, 200, PoolSettings(0.2, MLASettings(floor=0.05))) == 200
    cache = RadixCache(V3, 1000, headroom=0.2, architecture={"floor": 0.05})
    cache.insert(range(600), np.arange(600))
    slots = cache.allocate(600)
    assert slots is not None
    assert len(slots) == 600
    assert cache.counters.clamped == 0


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    shortfalls=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    headroom=st.sampled_from([0.0, 0.2, 0.9]),
    floor=st.sampled_from([0.0, 0.05, 0.5]),
    policy=st.sampled_from(BUILTIN),
)
def test_a_cache_frees_what_is_needed_plus_the_target_and_trusts_every_answer(
    lengths: list[int],
    shortfalls: list[int],
    page_size: int,
    headroom: float,
    floor: float,
    policy: str,
) -> None:
    cache = RadixCache(V3, 640, page_size, policy, headroom=headroom, architecture={"floor": floor})
    for i, length in enumerate(lengths):
        cache.insert(range(i * 1000, i * 1000 + length))
    share = max(floor, headroom / V3.compression_ratio)
    for shortfall in shortfalls:
        evictable = cache.evictable
        wanted = shortfall + math.ceil(share * 640)
        eviction = cache.evict(shortfall)
        assert eviction.freed == min(wanted + -wanted % page_size, evictable)
    assert cache.counters.clamped == 0
    assert cache.stats().fallbacks == 0


@given(
    tokens=st.lists(st.integers(1, 80), min_size=1, max_size=10),
    shortfall=st.integers(1, 400),
    page_size=st.sampled_from([1, 8]),
)
def test_a_uniform_pool_evicts_the_same_tokens_for_latents_as_for_heads(
    tokens: list[int], shortfall: int, page_size: int
) -> None:
    freed = []
    for name in ("deepseek-v3", "llama-3-8b"):
        cache = RadixCache(name, 1600, page_size)
        for i, length in enumerate(tokens):
            cache.insert(range(i * 1000, i * 1000 + length))
        eviction = cache.evict(shortfall)
        freed.append((eviction.freed, eviction.victims))
    assert freed[0] == freed[1]


def test_bound_hooks_answer_what_pluggy_answers() -> None:
    manager = PluginManager()
    manager.register(plugin, "mla", plugin.__name__)
    bound, hook = manager.match(V3), manager.pm.hook
    settings = PoolSettings(0.2, MLASettings(floor=0.05))
    served = Deployment(tp=8, page_size=64)
    state = pool(6400, 64)
    assert bound.name == "mla"
    # Last registered first, so the plugin's answer comes before generic's.
    assert bound.token_cost(V3, served) == hook.token_cost(model=V3, deployment=served)[0]
    assert (
        bound.free_target(V3, state, settings)
        == hook.free_target(model=V3, pool=state, settings=settings)[0]
        == 0.05
    )
    for requested in (1, 63, 64, 65, 6399, 6400, 7000):
        asked = {"model": V3, "pool": state, "requested": requested, "settings": settings}
        answer = bound.adjust_eviction_count(V3, state, requested, settings)
        assert answer == hook.adjust_eviction_count(**asked)[0] == requested
    assert bound.default_policy(V3) is None
    assert hook.default_policy(model=V3) == []
    assert bound.settings_model() is hook.settings_model()[0] is MLASettings


def test_costcache_means_a_policy_that_exists() -> None:
    architecture = get_plugins().match(V3)
    assert get_plugins().policy_name("costcache", architecture) in get_plugins().policies()
    assert RadixCache(V3, 100).policy == DEFAULT_POLICY


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"floor": 1.0}, "'architecture.floor' is 1.0: input should be less than 1"),
        ({"floor": -0.1}, "'architecture.floor' is -0.1"),
        ({"floor": math.nan}, "'architecture.floor' is nan"),
        ({"flor": 0.1}, "unknown setting 'architecture.flor': known settings are architecture.floor"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        RadixCache(V3, 100, architecture=values)


def test_every_setting_is_described_and_can_be_left_out() -> None:
    assert MLASettings().model_dump() == {"floor": 0.0}
    schema = MLASettings.model_json_schema()
    assert all(field["description"] for field in schema["properties"].values())
    json.dumps(schema)


def test_the_distribution_says_the_cores_version_and_every_hook_is_documented() -> None:
    assert __version__ == costcache.__version__
    hooks = [f for _, f in inspect.getmembers(plugin, inspect.isfunction) if hasattr(f, "costcache_impl")]
    assert {hook.__name__ for hook in hooks} == {"match_model", "token_cost", "free_target", "settings_model"}
    assert all(inspect.getdoc(hook) for hook in hooks)
