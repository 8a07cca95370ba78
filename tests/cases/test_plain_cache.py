"""Published failures of prefix caches, rebuilt: the rows that concern the plain cache.

Each row has its one known input, and a property that covers its whole kind. All at headroom 0 and
exact trimming, which are the defaults.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import costcache_mha.plugin
import costcache_mla.plugin
from costcache import ModelSpec, PoolState, RadixCache, hookimpl
from costcache.plugins import serves
from costcache.policies import BUILTIN
from tests.property.kit import MODEL, check_structure, manager

PLUGINS = manager(mla=costcache_mla.plugin, mha=costcache_mha.plugin)
MODELS = st.sampled_from(["deepseek-v3", "llama-3-8b", "qwen3-next"])
PAGES = st.sampled_from([1, 4, 16, 64])
POLICIES = st.sampled_from(sorted(BUILTIN))


# -- whole demand evicted (sglang 32016): only the shortfall is evicted -------------------------------


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3-8b"])
@pytest.mark.parametrize("page_size", [1, 20])
def test_only_the_shortfall_is_evicted(model: str, page_size: int) -> None:
    cache = RadixCache(model, 1000, page_size, plugins=PLUGINS)
    for n in range(7):
        cache.insert([n] * 100)
    assert (cache.cached, cache.free) == (700, 300)
    slots = cache.allocate(400)
    assert len(slots) == 400
    assert (cache.counters.evicted, cache.cached) == (100, 600)


def test_a_request_that_caches_its_own_evicts_only_the_shortfall() -> None:
    cache = RadixCache(MODEL, 1000, plugins=PLUGINS)
    for n in range(7):
        cache.insert([n] * 100)
    done = cache.insert(range(5000, 5400))
    assert (done.inserted_len, cache.counters.evicted, cache.free) == (400, 100, 0)


@given(
    model=MODELS,
    policy=POLICIES,
    page_size=PAGES,
    cached=st.lists(st.integers(1, 200), max_size=10),
    demand=st.integers(0, 1000),
)
def test_only_the_shortfall_is_evicted_whatever_is_cached(
    model: str, policy: str, page_size: int, cached: list[int], demand: int
) -> None:
    assume(serves(PLUGINS.policies()[policy], ModelSpec.preset(model)))
    cache = RadixCache(model, 1024, page_size, policy, plugins=PLUGINS)
    for n, size in enumerate(cached):
        cache.insert([n] * size)
    before, free = cache.cached, cache.free
    whole = -(-demand // page_size) * page_size
    evicted = cache.counters.evicted
    slots = cache.allocate(demand)
    assert len(slots) == whole
    assert cache.counters.evicted - evicted == max(0, whole - free)
    assert cache.cached == before - max(0, whole - free)
    check_structure(cache)


# -- one token, one giant leaf: the tail is evicted, the rest stays -----------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("policy", sorted(BUILTIN))
def test_one_token_of_a_giant_leaf(policy: str, page_size: int) -> None:
    tokens = 30_000 // page_size * page_size
    cache = RadixCache(MODEL, tokens, page_size, policy, plugins=PLUGINS)
    cache.insert(range(tokens))
    eviction = cache.evict(1)
    assert (eviction.freed, eviction.trimmed) == (page_size, 1)
    assert cache.match_prefix(range(tokens)).matched_len == tokens - page_size
    assert len(cache.allocate(1)) == page_size


@given(
    policy=POLICIES,
    page_size=PAGES,
    pages=st.integers(1, 300),
    shortfalls=st.lists(st.integers(1, 500), min_size=1, max_size=6),
)
def test_a_giant_leaf_shrinks_page_by_page(
    policy: str, page_size: int, pages: int, shortfalls: list[int]
) -> None:
    tokens = pages * page_size
    cache = RadixCache(MODEL, tokens, page_size, policy, plugins=PLUGINS)
    cache.insert(range(tokens))
    left = tokens
    for shortfall in shortfalls:
        left = max(0, left - -(-shortfall // page_size) * page_size)
        cache.evict(shortfall)
        assert cache.match_prefix(range(tokens)).matched_len == left
        check_structure(cache)


# -- same prompt, n-1 match (sglang 22935): never 0 ---------------------------------------------


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3-8b", "qwen3-next"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 1000])
def test_the_same_prompt_again_reuses_all_but_its_last_token(model: str, page_size: int, length: int) -> None:
    cache = RadixCache(model, 4096, page_size, plugins=PLUGINS)
    prompt = range(length)
    for turn in range(4):
        found = cache.match_prefix(prompt[:-1], turn)
        assert found.matched_len == ((length - 1) // page_size * page_size if turn else 0)
        cache.insert(prompt, request=turn)
        cache.finish(turn)
    assert cache.cached == length // page_size * page_size, "and nothing is cached twice"


@given(
    model=MODELS,
    page_size=PAGES,
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=400),
    others=st.lists(st.lists(st.integers(0, 2), max_size=200), max_size=5),
)
def test_n_minus_1_whatever_else_is_cached(
    model: str, page_size: int, tokens: list[int], others: list[list[int]]
) -> None:
    cache = RadixCache(model, 4096, page_size, plugins=PLUGINS)
    cache.insert(tokens)
    for other in others:
        cache.match_prefix(other)
        cache.insert(other)
    whole = (len(tokens) - 1) // page_size * page_size
    assert cache.match_prefix(tokens[:-1]).matched_len == whole
    cache.insert(tokens)
    assert cache.match_prefix(tokens).matched_len == len(tokens) // page_size * page_size


# -- partial blocks (vllm 42656): they never push out full ones ---------------------------------


def test_prompts_of_less_than_a_page_push_nothing_out() -> None:
    cache = RadixCache(MODEL, 64, 16, plugins=PLUGINS)
    cache.insert(range(64))
    for n in range(200):
        cache.match_prefix([1000 + n] * 15)
        done = cache.insert([1000 + n] * 15)
        assert (done.matched_len, done.inserted_len) == (0, 0)
    assert cache.counters.evictions == 0
    assert cache.match_prefix(range(64)).matched_len == 64


@given(
    policy=POLICIES,
    page_size=st.sampled_from([4, 16, 64]),
    tails=st.lists(st.integers(0, 63), min_size=1, max_size=30),
)
def test_partial_last_pages_push_nothing_out(policy: str, page_size: int, tails: list[int]) -> None:
    """Many prompts share whole pages that fill the pool, and differ in the part of a page at the end."""
    shared = list(range(4 * page_size))
    cache = RadixCache(MODEL, 4 * page_size, page_size, policy, plugins=PLUGINS)
    cache.insert(shared)
    for n, tail in enumerate(tails):
        prompt = shared + [10_000 + n] * (tail % page_size)
        assert cache.match_prefix(prompt, n).matched_len == len(shared)
        done = cache.insert(prompt, request=n)
        assert (done.matched_len, done.inserted_len) == (len(shared), 0)
        cache.finish(n)
    assert (cache.counters.evictions, cache.cached) == (0, len(shared))
    assert [node.tokens % page_size for node in cache._tree.walk()] == [0]


def test_a_partial_page_of_the_callers_stays_the_callers() -> None:
    cache = RadixCache(MODEL, 64, 16, plugins=PLUGINS)
    slots = cache.allocate(40)
    done = cache.insert(range(40), slots[:40])
    assert done.unused.tolist() == slots[32:40].tolist()
    cache.release(slots[32:])
    assert (cache.free, cache.reserved, cache.cached) == (32, 0, 32)
    assert len(cache.allocate(32)) == 32, "in whole pages"


# -- under-free (MLA-aware RadixAttention): never less than is needed ---------------------------


class UnderFree:
    """Rule of that project: the excess over a target that the compression ratio scales, at least a bit."""

    @hookimpl
    def match_model(self) -> int | None:
        return 50

    @hookimpl
    def adjust_eviction_count(self, pool: PoolState, requested: int) -> int:
        return 129 if (requested, pool.evictable, pool.free) == (200, 600, 400) else requested * 129 // 200


def test_a_rule_that_answers_too_little_is_overruled() -> None:
    cache = RadixCache("deepseek-v3", 1000, plugins=manager(under=UnderFree()))
    cache.insert(range(600))
    assert (cache.plugin, cache.free, cache.evictable) == ("under", 400, 600)
    eviction = cache.evict(200)
    assert (eviction.freed, cache.counters.clamped) == (200, 1)


def test_the_mla_plugin_itself_frees_what_is_needed() -> None:
    cache = RadixCache("deepseek-v3", 1000, plugins=PLUGINS)
    assert cache.plugin == "mla"
    assert math.isclose(cache.model.compression_ratio, 71.1, abs_tol=0.05)
    cache.insert(range(600))
    assert cache.evict(200).freed == 200
    assert cache.counters.clamped == 0
    assert len(cache.allocate(600)) == 600


@given(
    model=MODELS,
    headroom=st.floats(0, 0.99),
    floor=st.floats(0, 0.99),
    cached=st.integers(0, 1000),
    shortfall=st.integers(0, 1200),
    page_size=st.sampled_from([1, 8]),
)
def test_no_headroom_or_ratio_frees_too_little(
    model: str, headroom: float, floor: float, cached: int, shortfall: int, page_size: int
) -> None:
    settings: dict[str, Any] = {"architecture": {"floor": floor}} if model == "deepseek-v3" else {}
    cache = RadixCache(model, 1000, page_size, plugins=PLUGINS, headroom=headroom, **settings)
    cache.insert(range(cached))
    evictable = cache.evictable
    freed = cache.evict(shortfall).freed
    assert min(shortfall, evictable) <= freed <= evictable
    assert cache.counters.clamped == 0


# -- growing by one token: a chain of as many nodes as requests ----------------------------------------


def grown(cache: RadixCache, prompts: int) -> list[int]:
    """Serve prompts that grow by one token each; returns the slots of the last one."""
    tokens = list(range(prompts))
    for n in range(1, prompts + 1):
        assert cache.match_prefix(tokens[:n], n).matched_len == n - 1
        done = cache.insert(tokens[:n], request=n)
        assert (done.matched_len, done.inserted_len) == (n - 1, 1)
        cache.finish(n)
    return list(cache.match_prefix(tokens).slots)


@pytest.mark.parametrize(
    "policy", ["lru", "hazard", "lfu", "lru2", "gdsf", "sieve", "s3fifo", "arc", "wtinylfu"]
)
def test_a_prompt_that_grows_by_a_token_costs_few_nodes(policy: str) -> None:
    cache = RadixCache(MODEL, 2000, 1, policy)
    slots = grown(cache, 1000)
    assert len(set(slots)) == 1000
    assert cache.stats().nodes < 100
    check_structure(cache)
    assert cache.policy == policy
    assert cache.evict(400).freed == 400
    assert list(cache.match_prefix(list(range(1000))).slots) == slots[:600]


def test_what_hazard_knows_of_a_chain_is_as_long_as_the_chain() -> None:
    cache = RadixCache(MODEL, 2000, 1, "hazard")
    grown(cache, 1000)
    order: Any = cache._pool.order
    pieces = [piece for node in cache._tree.walk() for piece in order.history(node)]
    assert len(pieces) < 150
    assert order.snapshot().against_lru.gained == order.snapshot().against_lru.lost == 0


def test_nodes_that_were_merged_are_still_good_to_lock() -> None:
    cache = RadixCache(MODEL, 2000, 1)
    tokens = list(range(500))
    nodes = [cache.insert(tokens[:n]).node for n in range(1, 501)]
    merged = [node for node in nodes if node.into is not None]
    assert len(merged) > 300
    for node in merged:
        cache.lock(node)
        cache.refresh(node)
    assert cache.evict(500).freed == 500 - merged[-1].current().end
    cache.match_prefix(tokens)
    for node in merged:
        cache.unlock(node)
    assert cache.evictable == cache.cached > 0
    check_structure(cache)


def test_a_hot_prefix_is_not_merged_with_what_follows_it_once() -> None:
    """Else the tail would be kept as if it had been used as often."""
    cache = RadixCache(MODEL, 5000, 1, "lfu")
    cache._tree.merge_from = 1
    hot = list(range(100))
    for _ in range(50):
        cache.insert(hot)
    cache.insert(hot + [7] * 1000)
    cache.insert([9] * 10)
    cache.insert([9] * 10)
    assert [(v.start, v.tokens) for v in cache.evict(1000).victims] == [(100, 1000)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(0, 2)), max_size=80))
def test_merging_changes_nothing_under_lru(stream: list[tuple[int, int, int]]) -> None:
    caches = [RadixCache(MODEL, 30, 1, "lru") for _ in range(2)]
    caches[1]._tree.merge_from = caches[1]._tree.merge_alike = 1
    prompts: list[list[int]] = [[]]
    for name, (after, shares, more) in enumerate(stream):
        prompts.append([*prompts[-1 - after % len(prompts)][:shares], more])
        found = [cache.match_prefix(prompts[-1], name) for cache in caches]
        assert found[0].matched_len == found[1].matched_len
        for cache in caches:
            cache.insert(prompts[-1], request=name)
            cache.finish(name)
        assert caches[0].cached == caches[1].cached
