"""Unfinished: it says so, claims nothing, and hybrids are served by the core all the same."""

from __future__ import annotations

import re
from importlib.metadata import metadata

import pytest

import costcache
from costcache import RadixCache
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache_mamba_seglen import __version__, plugin

# KV bytes per token and bytes per state, in bf16 with fp32 recurrent states.
HYBRIDS = {
    "jamba-v0.1": (16_384, 16_056_320),
    "kimi-linear": (8_064, 43_417_600),
    "nemotron-h-8b": (16_384, 102_137_856),
    "qwen3-next": (24_576, 77_266_944),
    "qwen3.5-9b": (32_768, 51_511_296),
}


def test_it_declares_itself_unfinished() -> None:
    assert plugin.FINISHED is False
    assert "unfinished" in (metadata("costcache-mamba-seglen")["Summary"] or "")
    assert re.search(r"\bunfinished\b", plugin.__doc__ or "", re.IGNORECASE)
    assert __version__ == costcache.__version__


@pytest.mark.parametrize("name", ModelSpec.presets())
def test_it_claims_nothing(name: str) -> None:
    assert plugin.match_model(ModelSpec.preset(name)) is None


def test_it_is_listed_without_failures() -> None:
    found = get_plugins().describe()
    entry = next(entry for entry in found["plugins"] if entry["name"] == "mamba_seglen")
    assert entry["hooks"] == ["match_model"]
    assert found["failures"] == []


def test_the_hybrids_are_all_the_presets_with_states() -> None:
    assert set(HYBRIDS) == {name for name in ModelSpec.presets() if ModelSpec.preset(name).has_states}


@pytest.mark.parametrize("name", HYBRIDS)
def test_generic_serves_hybrids_with_exact_bytes(name: str) -> None:
    model = ModelSpec.preset(name)
    architecture = get_plugins().match(model)
    assert (architecture.name, architecture.specificity) == ("generic", 0)
    cost = architecture.cost(Deployment()).token
    assert (cost.kv_bytes, cost.state_bytes) == HYBRIDS[name]
    cache = RadixCache(model, 100)
    cache.insert(range(100))
    assert cache.match_prefix(range(60)).matched_len == 60
    assert cache.evict(7).freed == 7
