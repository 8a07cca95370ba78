"""Every hook: documented, called as documented, and bound to the function that pluggy would call."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

import costcache_mamba_seglen.plugin
import costcache_mamba_seglen.seglen
import costcache_mha.plugin
import costcache_mla.plugin
from costcache import ModelSpec, PoolState, RadixCache, Settings, generic, hookspecs
from costcache.deployment import Deployment
from costcache.model.presets import PRESETS
from costcache.plugins import HOOKS, PluginManager
from costcache.settings import PoolSettings
from tests.property.kit import MODEL, Plugin, claiming, manager

PLUGINS = {
    "mla": costcache_mla.plugin,
    "mha": costcache_mha.plugin,
    "mamba_seglen": costcache_mamba_seglen.plugin,
    "seglen": costcache_mamba_seglen.seglen,
}
OFFERS = ("policies", "storage_backend", "trace_formats")
"""Hooks that offer something by name; the core has no default for them."""
POOL = PoolState("kv", "tokens", 1000, 10, 800, 100, 16)


def everything() -> PluginManager:
    return manager(**PLUGINS)


def arguments(made: PluginManager, plugin: str, model: ModelSpec) -> dict[str, Any]:
    """Something for each argument that any hook has."""
    settings = made._bound(plugin, "settings_model", generic.settings_model)()
    return {
        "model": model,
        "config": {"model_type": "llama"},
        "deployment": Deployment(tp=2, page_size=16),
        "pool": POOL,
        "requested": 37,
        "settings": PoolSettings(0.2, settings() if settings is not None else None),
    }


def test_the_hooks_are_these() -> None:
    assert set(HOOKS) == {
        "adjust_eviction_count",
        "default_policy",
        "free_target",
        "match_model",
        "policies",
        "read_config",
        "settings_model",
        "storage_backend",
        "token_cost",
        "trace_formats",
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented(hook: str) -> None:
    spec = getattr(hookspecs, hook)
    text = inspect.getdoc(spec) or ""
    parameters = inspect.signature(spec).parameters
    assert "Called " in text, "when it is called"
    assert "Returns:" in text, "what it answers"
    assert ("Args:" in text) == bool(parameters)
    for name in parameters:
        assert re.search(rf"^ +{name}: \S", text, re.MULTILINE), f"{name} is not described"
    assert spec.__annotations__["return"]
    if {"pool", "requested"} & set(parameters):
        assert "unit" in text, "counts need a unit"


@pytest.mark.parametrize("plugin", ["generic", *PLUGINS])
@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in OFFERS])
def test_the_bound_and_the_pluggy_path_agree(plugin: str, hook: str) -> None:
    made = everything()
    others = [own for name, own in made.pm.list_name_plugin() if name != plugin]
    caller = made.pm.subset_hook_caller(hook, others)
    names = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    compared = 0
    for preset in PRESETS:
        model = ModelSpec.preset(preset)
        values = arguments(made, plugin, model)
        answers = caller(**{name: values[name] for name in names})
        default = getattr(generic, hook) if hook != "match_model" else lambda model: None
        bound = made._bound(plugin, hook, default)(*(values[name] for name in names))
        if not caller.get_hookimpls():
            assert bound == default(*(values[name] for name in names))
        else:
            assert [bound] == (answers or [None])  # pluggy leaves None out
            compared += 1
    if plugin == "generic":
        assert compared == len(PRESETS)


@pytest.mark.parametrize("plugin", ["builtin", "seglen"])
def test_the_bound_and_the_pluggy_path_agree_on_policies(plugin: str) -> None:
    made = everything()
    others = [own for name, own in made.pm.list_name_plugin() if name != plugin]
    (offer,) = made.pm.subset_hook_caller("policies", others)()
    bound = made._bound(plugin, "policies", dict)()
    owners = {item["name"]: item["plugin"] for item in made.describe()["policies"]}
    assert sorted(offer) == sorted(bound) == [name for name, owner in owners.items() if owner == plugin]
    for name in offer:
        kept = made.policies()[name]
        for spec in (offer[name], bound[name]):
            assert (spec.summary, spec.settings) == (kept.summary, kept.settings)
            assert (spec.sees, spec.explains) == (kept.sees, kept.explains)
            assert spec.make_order.__code__ is kept.make_order.__code__  # a new closure of the same code
            assert spec.supports.__code__ is kept.supports.__code__


def test_the_match_gives_the_winners_own_functions() -> None:
    found = everything().match(ModelSpec.preset(MODEL))
    assert found.name == "mha"
    assert found.token_cost is costcache_mha.plugin.token_cost, "all arguments: called without a detour"
    assert found.settings_model is generic.settings_model, "left out: the core's"


FULL = ("model", "pool", "requested", "settings")


@pytest.mark.parametrize("taken", [c for n in range(len(FULL) + 1) for c in itertools.permutations(FULL, n)])
def test_an_implementation_may_leave_out_arguments_and_order_them_freely(taken: tuple[str, ...]) -> None:
    told: dict[str, Any] = {}
    namespace: dict[str, Any] = {"told": told}
    body = ", ".join(f"{name}={name}" for name in taken)
    exec(f"def hook({', '.join(taken)}): told.update(dict({body})); return 37", namespace)  # a signature each
    made = manager(own=Plugin(match_model=lambda: 5, adjust_eviction_count=namespace["hook"]))
    found = made.match(ModelSpec.preset(MODEL))
    values: dict[str, Any] = {
        "model": found.model,
        "pool": POOL,
        "requested": 37,
        "settings": PoolSettings(0.0),
    }
    assert found.adjust_eviction_count(found.model, POOL, 37, values["settings"]) == 37
    assert told == {name: values[name] for name in taken}


def test_methods_are_hooks_too() -> None:
    class Own:
        answer = 0.25

        @hookspecs.hookimpl
        def match_model(self) -> int | None:
            return 9

        @hookspecs.hookimpl
        def free_target(self, settings: PoolSettings) -> float:
            return self.answer + settings.headroom

        @hookspecs.hookimpl(specname="adjust_eviction_count")
        def round_up(self, requested: int, pool: PoolState) -> int:
            return min(requested + 5, pool.capacity)

    cache = RadixCache(MODEL, 40, plugins=manager(own=Own()), headroom=0.25)
    cache.insert(range(40))
    eviction = cache.evict(2)
    assert (eviction.headroom, eviction.goal, eviction.freed) == (20, 27, 27)
    assert "adjusted to 27" in eviction.explain()


def test_each_hook_is_called_as_often_as_documented() -> None:
    calls: list[str] = []

    def counting(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        spec = inspect.signature(getattr(hookspecs, name))
        namespace: dict[str, Any] = {"calls": calls, "answer": answer}
        taken = ", ".join(spec.parameters)
        exec(f"def hook({taken}): calls.append({name!r}); return answer({taken})", namespace)  # as specified
        hook: Callable[..., Any] = namespace["hook"]
        return hook

    hooks = {name: counting(name, getattr(generic, name)) for name in HOOKS if name not in OFFERS}
    hooks["match_model"] = counting("match_model", lambda model: 3)
    hooks |= {name: counting(name, dict) for name in OFFERS}
    made = claiming(**hooks)
    assert sorted(calls) == ["policies", "storage_backend"]  # trace formats, when a trace is read
    calls.clear()
    cache = RadixCache(MODEL, 20, plugins=made)
    assert sorted(calls) == ["default_policy", "match_model", "settings_model", "token_cost"]
    calls.clear()
    cache.insert(range(20))
    cache.evict(0)
    cache.match_prefix(range(5))
    assert calls == [], "no shortfall: nobody is asked"
    cache.evict(1)
    assert calls == ["free_target", "adjust_eviction_count"]
    calls.clear()
    cache.insert(range(100, 105))  # 1 is free: a shortfall of 4
    assert calls == ["free_target", "adjust_eviction_count"]


def test_hooks_are_not_called_through_pluggy_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    made = everything()
    caches = [RadixCache(name, 100, plugins=made) for name in (MODEL, "deepseek-v3", "qwen3-next")]

    def forbidden(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a pluggy call on the hot path")

    monkeypatch.setattr(made.pm, "_inner_hookexec", forbidden)
    with pytest.raises(AssertionError, match="hot path"):
        made.pm.hook.policies()  # so a call would be noticed
    for cache in caches:
        cache.insert(range(90))
        cache.insert(range(1000, 1050))
        assert cache.evict(7).freed == 7
        assert cache.counters.clamped == 0


def test_free_target_without_a_hook_is_the_headroom() -> None:
    made = manager(own=Plugin(match_model=lambda: 3))
    cache = RadixCache(MODEL, 100, plugins=made, headroom=0.2)
    assert cache.plugin == "own"
    cache.insert(range(100))
    assert cache.evict(1).freed == 21


def test_settings_are_one_object() -> None:
    assert Settings().model_dump() == {
        "policy": "costcache",
        "headroom": 0.0,
        "trim": "auto",
        "trim_chunk": 2048,
        "core": "auto",
        "time_budget": 1.0,
        "architecture": {},
        "policy_settings": {},
    }
