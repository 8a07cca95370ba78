"""The plugin for hybrid models: its claims, the bytes of tokens and states, and its policy."""

from __future__ import annotations

import pytest

import costcache
from costcache import NodeRecord, PluginError, PoolState, RadixCache, State
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache.records import Clock
from costcache.settings import PoolSettings, Settings
from costcache_mamba_seglen import __version__, plugin
from costcache_mamba_seglen.seglen import Seglen

# KV bytes per token and bytes per state, in bf16 with fp32 recurrent states.
HYBRIDS = {
    "falcon-h1-34b": (147_456, 304_201_728),
    "granite-4-small": (16_384, 152_819_712),
    "jamba-v0.1": (16_384, 16_056_320),
    "kimi-k3": (27_648, 449_372_160),
    "kimi-linear": (8_064, 43_417_600),
    "lfm2-1.2b": (12_288, 81_920),
    "nemotron-3-nano": (6_144, 49_082_368),
    "nemotron-h-8b": (16_384, 102_137_856),
    "qwen3-next": (24_576, 77_266_944),
    "qwen3.5-397b": (30_720, 192_061_440),
    "qwen3.5-9b": (32_768, 51_511_296),
    "zamba2-7b": (372_736, 152_243_712),
}


def test_it_has_the_version_of_the_framework() -> None:
    assert __version__ == costcache.__version__


@pytest.mark.parametrize("name", ModelSpec.presets())
def test_it_claims_models_with_states_and_no_others(name: str) -> None:
    model = ModelSpec.preset(name)
    assert (plugin.match_model(model) is not None) == model.has_states
    assert (get_plugins().match(model).name == "mamba_seglen") == model.has_states


def test_the_hybrids_are_all_the_presets_with_states() -> None:
    assert set(HYBRIDS) == {name for name in ModelSpec.presets() if ModelSpec.preset(name).has_states}


@pytest.mark.parametrize("name", HYBRIDS)
def test_bytes_of_tokens_and_states_are_exact(name: str) -> None:
    model = ModelSpec.preset(name)
    cost = get_plugins().match(model).cost(Deployment()).token
    assert (cost.kv_bytes, cost.state_bytes) == HYBRIDS[name]
    cache = RadixCache(model, 100)
    cache.insert(range(100))
    assert cache.match_prefix(range(60)).matched_len == 60
    assert cache.evict(7).freed == 7


@pytest.mark.parametrize(("unit", "expected"), [("tokens", 64), ("states", 3), ("bytes", 3)])
def test_only_token_counts_are_rounded_to_pages(unit: str, expected: int) -> None:
    model = ModelSpec.preset("qwen3-next")
    pool = PoolState("kv", unit, 1000, 0, 1000, 0, 64)
    found = get_plugins().match(model)
    assert pool.in_pages(found.adjust_eviction_count(model, pool, 3, PoolSettings(headroom=0.0))) == expected
    assert found.free_target(model, pool, PoolSettings(headroom=0.25)) == 0.25


def chain(*ends: int) -> list[NodeRecord]:
    """Records of one path, each with a state; made one access after the other."""
    clock = Clock()
    parent, records, start = NodeRecord(0, None, 0, 0), [], 0
    for serial, end in enumerate(ends, 1):
        clock.accesses += 1
        record = NodeRecord(serial, parent, end - start, start)
        record.state = State(serial, clock)
        record.recency = clock.accesses
        record.live_children = 0 if serial == len(ends) else 1
        records.append(record)
        parent, start = record, end
    return records


@pytest.mark.parametrize(("weight", "first"), [(0.0, 1), (1.0, 3)])
def test_seglen_ranks_by_recency_or_by_replay(weight: float, first: int) -> None:
    records = chain(100, 300, 310)  # 100, 200 and 10 tokens to recompute
    order = Seglen(weight, 1)
    for record in records:
        order.insert(record)
    order._requests = 1  # scores are due
    victim = order.next_victim("state")
    assert victim is not None
    assert victim.record.serial == first


def test_seglen_says_why_it_does_not_serve_a_model_without_states() -> None:
    with pytest.raises(PluginError, match=r"'seglen' does not serve model 'llama-3-8b': .* has none"):
        get_plugins().check_settings(
            Settings(policy="seglen"), get_plugins().match(ModelSpec.preset("llama-3-8b"))
        )
