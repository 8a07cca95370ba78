"""Matching a plugin to a model, and checks of its hooks' answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from costcache import ModelSpec, PluginError, RadixCache, Settings, SettingsError, TokenCost, hookimpl
from costcache.deployment import Deployment
from costcache.errors import ConfigError
from costcache.plugins import PluginManager
from costcache.settings import DEFAULT_POLICY
from tests.property.kit import MODEL, Plugin, claiming, manager

SPEC = ModelSpec.preset(MODEL)


def claim(answer: Any) -> Plugin:
    return Plugin(match_model=lambda: answer)


def test_generic_serves_unclaimed_models() -> None:
    found = manager(none=claim(None)).match(SPEC)
    assert (found.name, found.specificity, found.model) == ("generic", 0, SPEC)


def test_the_highest_claim_wins_whatever_the_order() -> None:
    for names in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        claims = {"a": claim(1), "b": claim(30), "c": claim(4)}
        found = manager(**{name: claims[name] for name in names}).match(SPEC)
        assert (found.name, found.specificity) == ("b", 30)


def test_a_tie_names_both() -> None:
    with pytest.raises(PluginError, match=r"'one' and 'two' claim model 'llama-3-8b'.* 7"):
        manager(two=claim(7), low=claim(2), one=claim(7)).match(SPEC)


def test_a_tie_below_the_winner_is_no_tie() -> None:
    assert manager(one=claim(7), two=claim(7), three=claim(8)).match(SPEC).name == "three"


def test_a_tie_of_three_names_all() -> None:
    with pytest.raises(PluginError, match=r"'a' and 'b' and 'c'"):
        manager(c=claim(7), b=claim(7), a=claim(7)).match(SPEC)


@pytest.mark.parametrize("answer", ["5", 5.0, True, False, 0, -1, [1], float("nan"), np.int64(5)])
def test_a_claim_that_is_no_int_is_reported_and_passed_over(answer: Any) -> None:
    made = manager(odd=claim(answer), good=claim(1))
    assert made.match(SPEC).name == "good"
    (failure,) = made.failures
    assert failure.plugin == "odd"
    assert "match_model answered" in failure.reason


def test_a_claim_that_raises_is_reported_and_passed_over() -> None:
    def broken() -> int:
        raise KeyError("layers")

    made = manager(odd=Plugin(match_model=broken), good=claim(1))
    assert made.match(SPEC).name == "good"
    (failure,) = made.failures
    assert failure.plugin == "odd"
    assert "KeyError('layers')" in failure.reason


def test_a_failure_is_reported_once_however_many_caches_are_made() -> None:
    made = manager(odd=claim("yes"))
    for _ in range(5):
        RadixCache(MODEL, 10, plugins=made)
    assert len(made.failures) == 1


def test_every_preset_is_served_by_the_core_alone() -> None:
    from costcache.model.presets import PRESETS

    made = manager()
    for name in PRESETS:
        found = made.match(ModelSpec.preset(name))
        assert found.name == "generic"
        assert found.cost(Deployment()).token.kv_bytes > 0


# -- what the other hooks may answer -----------------------------------------------------------


@pytest.mark.parametrize("answer", [None, 5, {"kv_bytes": 3}])
def test_a_token_cost_of_the_wrong_type_is_named(answer: Any) -> None:
    with pytest.raises(PluginError, match=r"'hostile': token_cost returned .*, not a TokenCost"):
        RadixCache(MODEL, 10, plugins=claiming(token_cost=lambda: answer))


def _raises() -> Any:
    raise ZeroDivisionError("oh")


@pytest.mark.parametrize("hook", ["token_cost", "default_policy", "settings_model"])
def test_a_hook_that_raises_when_a_cache_is_made_is_named(hook: str) -> None:
    with pytest.raises(PluginError, match=rf"'hostile': {hook} raised .*oh"):
        RadixCache(MODEL, 10, plugins=claiming(**{hook: _raises}))


def test_the_token_cost_is_the_plugins_own() -> None:
    cache = RadixCache(MODEL, 10, plugins=claiming(token_cost=lambda: TokenCost(kv_bytes=7)))
    assert cache._tree.binding.cost.token.kv_bytes == 7


@pytest.mark.parametrize(
    ("hooks", "exact"),
    [
        ({}, True),
        ({"free_target": lambda settings: settings.headroom}, True),
        ({"free_target": lambda pool: 0.1 * (pool.free == 0)}, False),
        ({"free_target": lambda pool: 0.1 * (pool.free > 0)}, False),
        ({"free_target": lambda: float("nan")}, False),
        ({"free_target": lambda: 1 / 0}, False),
        ({"adjust_eviction_count": lambda requested: requested}, False),  # so its hooks cannot be predicted
    ],
)
def test_exact_evictions_follow_from_the_hooks(hooks: dict[str, Any], exact: bool) -> None:
    found = claiming(**hooks).match(SPEC)
    for page_size in (1, 16):
        assert found.evicts_exactly(Settings(), page_size) == exact
        assert not found.evicts_exactly(Settings(headroom=0.1), page_size)


def test_the_core_evicts_exactly_unless_there_is_headroom() -> None:
    found = manager().match(SPEC)
    assert found.evicts_exactly(Settings())
    assert not found.evicts_exactly(Settings(headroom=0.01))


def test_the_default_policy_is_the_plugins_own() -> None:
    assert RadixCache(MODEL, 10, plugins=claiming(default_policy=lambda: "lfu")).policy == "lfu"
    assert RadixCache(MODEL, 10, plugins=claiming(default_policy=lambda: None)).policy == DEFAULT_POLICY
    # It is a default: a policy that is named wins.
    asked = RadixCache(MODEL, 10, policy="fifo", plugins=claiming(default_policy=lambda: "lfu"))
    assert asked.policy == "fifo"


@pytest.mark.parametrize("answer", [7, ["lru"], "no such", "costcache"])
def test_a_default_policy_that_does_not_exist_is_the_plugins_error(answer: Any) -> None:
    with pytest.raises(PluginError, match="'hostile'"):
        RadixCache(MODEL, 10, plugins=claiming(default_policy=lambda: answer))
    # Who names a policy does not need the plugin's preference.
    assert (
        RadixCache(MODEL, 10, policy="lru", plugins=claiming(default_policy=lambda: answer)).policy == "lru"
    )


class Own(BaseModel):
    """Settings of a plugin."""

    model_config = ConfigDict(extra="forbid")

    floor: float = 0.25


@pytest.mark.parametrize("answer", [dict, Own(), "Own", 3])
def test_settings_that_are_no_model_are_named(answer: Any) -> None:
    with pytest.raises(PluginError, match=r"'hostile': settings_model returned"):
        RadixCache(MODEL, 10, plugins=claiming(settings_model=lambda: answer))


def test_architecture_settings_reach_the_hooks() -> None:
    told: list[Any] = []

    def free_target(model: ModelSpec, pool: Any, settings: Any) -> float:
        told.append((model, pool, settings))
        return float(settings.architecture.floor)

    made = claiming(settings_model=lambda: Own, free_target=free_target)
    cache = RadixCache(MODEL, 40, plugins=made, headroom=0.1, architecture={"floor": 0.5})
    cache.insert(range(30))
    eviction = cache.evict(3)
    assert (eviction.headroom, eviction.freed) == (20, 23)
    ((model, pool, settings),) = told
    assert (model.name, settings.headroom, settings.architecture) == (MODEL, 0.1, Own(floor=0.5))
    assert (pool.capacity, pool.free, pool.evictable, pool.reserved) == (40, 10, 30, 0)

    with pytest.raises(SettingsError, match=r"architecture\.floor.*'high'"):
        RadixCache(MODEL, 40, plugins=made, architecture={"floor": "high"})
    with pytest.raises(SettingsError, match=r"'architecture\.flor'.*architecture\.floor"):
        RadixCache(MODEL, 40, plugins=made, architecture={"flor": 0.1})


def test_architecture_settings_of_a_plugin_without_any_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"'architecture\.floor': known settings are none"):
        RadixCache(MODEL, 40, plugins=manager(), architecture={"floor": 0.1})


class Reading:
    """A plugin that reads configs of one model type, or answers what it is given."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    @hookimpl
    def read_config(self, config: Mapping[str, Any]) -> Any:
        if config.get("model_type") != "mine":
            return None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_plugin_reads_a_config_before_the_core_refuses_it(tmp_path: Path) -> None:
    plugins = PluginManager()
    own = ModelSpec.preset("llama-3-8b")
    plugins.register(Reading(own), "reading")
    assert plugins.read({"model_type": "mine"}).layers == own.layers
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    assert plugins.resolve(tmp_path).name == tmp_path.name
    assert RadixCache(str(tmp_path), 100, plugins=plugins).policy == "hazard"
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        plugins.read({"model_type": "other"})
    assert plugins.resolve("qwen3-8b") == ModelSpec.preset("qwen3-8b")


@pytest.mark.parametrize(
    ("answer", "reason"), [(3, "read_config answered 3"), (ValueError("no"), "read_config raised ValueError")]
)
def test_a_wrong_reading_is_reported_and_passed_over(answer: Any, reason: str) -> None:
    plugins = PluginManager()
    plugins.register(Reading(answer), "reading")
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        plugins.read({"model_type": "mine"})
    assert reason in plugins.failures[0].reason


def test_two_plugins_that_read_the_same_config_are_an_error() -> None:
    plugins = PluginManager()
    for name in ("one", "two"):
        plugins.register(Reading(ModelSpec.preset("llama-3-8b")), name)
    with pytest.raises(PluginError, match="plugins 'one' and 'two' read the same config"):
        plugins.read({"model_type": "mine"})
