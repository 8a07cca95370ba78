"""Victims of each built-in policy, on hand-made examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from costcache import Deployment, ModelSpec, PluginError, RadixCache, RequestInfo, Settings
from costcache.orders import KeyedOrder
from costcache.plugins import serves
from costcache.policies import BUILTIN, NoSettings, PolicySpec, supports_every_model
from costcache.radix import StateCache
from costcache.sim.engine import Simulator
from costcache.sim.workloads import generate, workload_settings
from tests.property.kit import MODEL, drain, insert_all, manager

PLUGINS = manager()


def new(policy: str, pool_size: int = 100, **settings: int) -> RadixCache:
    return RadixCache(MODEL, pool_size, policy=policy, plugins=PLUGINS, policy_settings=settings)


def order_of(cache: RadixCache, prompts: dict[str, list[int]]) -> str:
    """Evict everything, one node at a time; names of the prompts in order of eviction."""
    evicted = ""
    starts = {name: tokens[0] for name, tokens in prompts.items()}
    left = dict(starts)
    while cache.evictable:
        cache.evict(1)
        roots = {
            int.from_bytes(edge[:8], "little")
            for root in cache._tree.roots.values()
            for edge in root.children
        }
        for name, first in list(left.items()):
            if first not in roots:
                evicted += name
                del left[name]
    return evicted


def three(policy: str, **settings: int) -> tuple[RadixCache, dict[str, list[int]]]:
    """a, b and c, made in this order; then used: c once, a three times, b twice, in this order."""
    cache = new(policy, **settings)
    prompts = {"a": [1, 1], "b": [2, 2], "c": [3, 3]}
    for tokens in prompts.values():
        cache.insert(tokens)
    for name in "caaabb":
        cache.match_prefix(prompts[name])
    return cache, prompts


@pytest.mark.parametrize(
    ("policy", "settings", "expected"),
    [
        ("lru", {}, "cab"),
        ("lfu", {}, "cba"),
        ("fifo", {}, "abc"),
        ("mru", {}, "bac"),
        ("filo", {}, "cba"),
        ("priority", {}, "cab"),  # all alike: least recent first
        ("slru", {}, "cab"),  # all protected
        ("slru", {"protected_threshold": 1}, "cab"),
        ("slru", {"protected_threshold": 3}, "cab"),  # c on probation
        ("slru", {"protected_threshold": 4}, "cba"),  # c and b on probation
        ("slru", {"protected_threshold": 99}, "cab"),  # all on probation
    ],
)
def test_order_of_eviction(policy: str, settings: dict[str, int], expected: str) -> None:
    cache, prompts = three(policy, **settings)
    assert order_of(cache, prompts) == expected


def test_lfu_breaks_ties_by_recency() -> None:
    cache = new("lfu")
    prompts = {"a": [1], "b": [2], "c": [3]}
    for name in "abc":
        cache.insert(prompts[name])
    for name in "bca":
        cache.match_prefix(prompts[name])
    assert order_of(cache, prompts) == "bca"


def test_lfu_does_not_count_one_request_twice() -> None:
    cache = new("lfu")
    prompts = {"a": [1, 1], "b": [2, 2]}
    for _ in range(9):
        cache.insert(prompts["a"], request="chunks")
    cache.insert(prompts["b"])
    cache.match_prefix(prompts["b"])
    assert order_of(cache, prompts) == "ab"


def test_lfu_and_slru_do_not_count_a_waiting_request() -> None:
    for policy in ("lfu", "slru"):
        cache = new(policy)
        prompts = {"a": [1, 1], "b": [2, 2]}
        node = cache.insert(prompts["a"]).node
        cache.insert(prompts["b"])
        cache.match_prefix(prompts["b"])
        for _ in range(5):
            cache.refresh(node)
        assert order_of(cache, prompts) == "ab"


def test_lru_keeps_nodes_that_a_waiting_request_needs() -> None:
    cache = new("lru")
    prompts = {"a": [1, 1], "b": [2, 2]}
    node = cache.insert(prompts["a"]).node
    cache.insert(prompts["b"])
    cache.refresh(node)
    assert order_of(cache, prompts) == "ba"


def test_mru_hears_a_refresh() -> None:
    cache = new("mru")
    prompts = {"a": [1, 1], "b": [2, 2]}
    node = cache.insert(prompts["a"]).node
    cache.insert(prompts["b"])
    cache.refresh(node)
    assert order_of(cache, prompts) == "ab"


def test_fifo_and_filo_do_not_see_uses_or_splits() -> None:
    for policy, expected in (("fifo", "abc"), ("filo", "cba")):
        cache = new(policy)
        prompts = {"a": [1, 1, 1], "b": [2, 2, 2], "c": [3, 3, 3]}
        for tokens in prompts.values():
            cache.insert(tokens)
        cache.match_prefix([1, 1])  # a's prefix is new as a node, and as old as a
        cache.match_prefix([3])
        assert order_of(cache, prompts) == expected


def test_a_tail_that_a_split_left_is_as_old_as_before() -> None:
    cache = new("lru")
    insert_all(cache, ([1, 1, 1, 1], [2, 2]))
    cache.match_prefix([1, 1])
    (victim,) = cache.evict(2).victims
    assert (victim.start, victim.tokens) == (2, 2), "the part that was not used"
    cache.evict(2)
    assert cache.match_prefix([1, 1]).matched_len == 2


def test_priority_goes_before_recency() -> None:
    cache = new("priority")
    prompts = {"a": [1], "b": [2], "c": [3], "d": [4]}
    for name, priority in (("a", 2), ("b", -1), ("c", 2), ("d", 0)):
        cache.insert(prompts[name], priority=priority)
    cache.match_prefix(prompts["b"])
    assert order_of(cache, prompts) == "bdac"


def test_priority_is_raised_by_later_requests_and_by_finish() -> None:
    cache = new("priority")
    prompts = {"a": [1], "b": [2], "c": [3]}
    cache.insert(prompts["a"], request="r")
    cache.insert(prompts["b"], priority=1)
    cache.insert(prompts["c"], priority=-3)
    cache.insert(prompts["c"], priority=5)
    cache.finish("r", RequestInfo(priority=3))
    assert order_of(cache, prompts) == "bac"


def test_slru_protects_for_good() -> None:
    cache = new("slru")
    prompts = {chr(97 + n): [n, n] for n in range(6)}
    cache.insert(prompts["a"])
    cache.match_prefix(prompts["a"])
    for name in "bcdef":
        cache.insert(prompts[name])
    assert order_of(cache, prompts) == "bcdefa"


def test_tlru_is_lru_unless_its_threshold_separates_prompts() -> None:
    prompts = {"a": [1] * 6, "b": [2, 2]}
    for threshold, expected in ((0, "ab"), (100, "ab"), (3, "ba")):  # none is safe, both are, b alone is
        cache = new("tlru", threshold=threshold)
        for tokens in prompts.values():
            cache.insert(tokens)
        assert order_of(cache, prompts) == expected


def test_tlru_evicts_the_safe_tails_first() -> None:
    """Next turns add 2 tokens and may prefill 6: tails that start 4 or less before the end are safe."""
    cache = new("tlru", threshold=6, next_prompt_estimate=2)
    cache.insert(range(10))
    cache.match_prefix(range(6))  # [6, 10) starts where 4 are left: safe
    cache.insert(range(100, 110))
    cache.match_prefix(range(100, 105))  # [105, 110) starts where 5 are left: not safe
    cache.insert([50, 51, 52])  # 3 tokens in all: safe, and newest
    victims = [(v.start, v.tokens) for v in drain(cache).victims]
    assert victims[:2] == [(6, 4), (0, 3)]
    assert victims[2:] == [(0, 6), (5, 5), (0, 5)], "then least recent first"


def test_tlru_remembers_the_longest_prefix_after_its_tail_was_evicted() -> None:
    cache = new("tlru", threshold=3, next_prompt_estimate=0)
    cache.insert(range(10))
    cache.match_prefix(range(8))
    cache.insert([50, 51, 52, 53, 54])
    first, second, third = drain(cache).victims
    assert (first.start, first.tokens) == (8, 2)
    # [0, 8) starts 10 before the longest end it has seen; [50..54] starts 5 before: neither is safe.
    assert (second.start, second.tokens, second.recency) == (0, 8, 2)
    assert (third.start, third.tokens) == (0, 5)


FOR_STATES = {"consumed-lru", "marconi"}
SEES = {
    "leaves": {"fifo", "filo", "lfu", "lru", "mru", "priority", "slru"},
    "nodes": set(BUILTIN) - {"fifo", "filo", "lfu", "lru", "mru", "priority", "slru"},
    "states": {"hazard", *FOR_STATES},
}


def test_the_builtin_policies_are_one_plugin() -> None:
    made = manager()
    assert set(made.policies()) == {*BUILTIN, *FOR_STATES}
    described = made.describe()["policies"]
    assert {item["plugin"] for item in described} == {"builtin"}
    assert {item["name"] for item in described if item["explains"]} == {"hazard"}
    for word, names in SEES.items():
        assert {item["name"] for item in described if word in item["sees"]} == names
    for name, spec in made.policies().items():
        assert spec.settings() is not None, name  # made without arguments
        assert spec.summary.endswith(".")
        assert "\n" not in spec.summary


def test_those_that_sglang_has_too_are_keys() -> None:
    policies = manager().policies()
    for name in ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru"):
        spec = policies[name]
        order = spec.make_order(None, (), spec.settings())  # type: ignore[arg-type] # not read
        assert isinstance(order, KeyedOrder), name
        assert spec.supports is supports_every_model
        assert spec.leaves_only == (name != "tlru"), name


def test_each_cache_has_its_own_order() -> None:
    for name in BUILTIN:
        first, second = new(name), new(name)
        first.insert([1, 2, 3])
        assert second.evict(5).freed == 0
        assert first.evict(5).freed == 3


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-next", "jamba-v0.1", "llama-3-8b"])
@pytest.mark.parametrize("policy", sorted({*BUILTIN, *FOR_STATES}))
def test_a_policy_serves_the_models_that_it_declares_in_every_host(policy: str, model: str) -> None:
    spec = ModelSpec.preset(model)
    served = serves(PLUGINS.policies()[policy], spec)
    assert served == (
        policy in SEES["leaves"] | SEES["states"] if spec.has_states else policy not in FOR_STATES
    )
    trace = generate("chat", workload_settings("chat", {"requests": 2}))
    simulator = Simulator(trace, spec, Deployment(page_size=16), plugins=PLUGINS)
    hosts: list[Callable[[], object]] = [
        lambda: simulator.check(Settings(policy=policy), None),
        lambda: RadixCache(model, 20, policy=policy, plugins=PLUGINS),
    ]
    if spec.has_states:
        hosts.append(lambda: StateCache(model, 10**9, policy=policy, plugins=PLUGINS))
        hosts.append(lambda: StateCache(model, 10**9, policy=policy, plugins=PLUGINS, state_share=0.5))
    for host in hosts:
        if served:
            host()
            continue
        with pytest.raises(PluginError, match=rf"policy '{policy}' does not serve model '{model}': .*hazard"):
            host()
    if served:
        cache = RadixCache(model, 20, policy=policy, plugins=PLUGINS)
        insert_all(cache, (range(10), range(50, 70)))
        assert cache.cached == 20
        assert drain(cache).freed == 20
        assert cache.stats().fallbacks == 0


def test_a_policy_spec_has_sensible_defaults() -> None:
    def make(*arguments: Any) -> Any:
        return None

    spec = PolicySpec(make, "what goes first")
    assert spec.settings is NoSettings
    assert spec.supports(None) is None  # type: ignore[arg-type] # not read
    assert spec.sees == {"nodes"}
    assert not spec.explains
