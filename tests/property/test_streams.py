"""Long random streams: each policy against the naive cache, determinism, MLA against MHA."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import costcache_mha.plugin
import costcache_mla.plugin
from costcache import RadixCache
from costcache.policies import BUILTIN
from tests.property.kit import MODEL, check_structure, manager
from tests.property.naive import KEYS, NaiveCache

PLUGINS = manager(mla=costcache_mla.plugin, mha=costcache_mha.plugin)
ALONE = manager()
POLICIES = sorted(BUILTIN)
BY_COST = {"gdsf"}
"""Policies that look at FLOPs, which are a matter of the model."""


def prompt(rng: random.Random, page_size: int) -> list[int]:
    """A system prompt, a few turns, and part of a page: much is shared and much is not."""
    pages = [rng.randrange(2)] + [rng.randrange(3) for _ in range(rng.randrange(7))]
    tail = rng.randrange(page_size)
    return [page * 10 + n for page in pages for n in range(page_size)] + [7] * tail


@pytest.mark.parametrize("policy", sorted(KEYS))
@pytest.mark.parametrize("seed", range(3))
def test_victims_equal_those_of_sorting_all_leaves(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    page_size, slack = (1, 2, 4)[seed], 2 + 3 * seed
    settings = {
        "slru": {"protected_threshold": slack},
        "tlru": {"threshold": slack + 1, "next_prompt_estimate": 1},
    }.get(policy, {})
    capacity = 40 * page_size
    cache = RadixCache(MODEL, capacity, page_size, policy, plugins=ALONE, policy_settings=settings)
    naive = NaiveCache(capacity, page_size, policy, trim_step=page_size, slack=slack)
    victims = 0
    for step in range(400):
        tokens, name = prompt(rng, page_size), f"request {step}"
        priority = rng.randrange(-1, 2)
        found = cache.match_prefix(tokens[:-1], name)
        assert found.matched_len == naive.match((None, None), tokens[:-1], name)
        done = cache.insert(tokens, request=name, priority=priority)

        def took() -> list[int]:
            assert done.node.slots is not None  # noqa: B023  # called at once
            return [int(slot) for slot in done.node.slots]  # noqa: B023  # called at once

        matched, added, gone = naive.insert((None, None), tokens, name, priority, None, took)
        assert (done.matched_len, done.inserted_len) == (matched, added)
        cache.finish(name)
        naive.finish(name, 0)
        victims += len(gone)
        if step % 5 == 0:
            eviction = cache.evict(rng.randrange(3 * page_size))
            gone = naive.evict(eviction.shortfall)
            victims += len(gone)
            assert [(v.start, v.tokens, v.trimmed, v.uses, v.recency) for v in eviction.victims] == gone
        assert cache.cached == naive.cached
    assert victims > 100
    check_structure(cache)
    rest = naive.evict(naive.evictable)
    assert [
        (v.start, v.tokens, v.trimmed, v.uses, v.recency) for v in cache.evict(cache.evictable).victims
    ] == rest


def stream(cache: RadixCache, seed: int, steps: int = 200) -> list[tuple[int, ...]]:
    """Every eviction of one stream, with all that is said of it."""
    rng = random.Random(seed)
    went: list[tuple[int, ...]] = []
    for step in range(steps):
        salt = f"salt {rng.randrange(3)}"
        tokens = prompt(rng, cache.page_size)
        found = cache.match_prefix(tokens, salt if step % 2 else None, cache_salt=salt)
        cache.lock(found.node)
        cache.insert(tokens, priority=rng.randrange(2), cache_salt=salt)
        cache.unlock(found.node)
        if step % 3 == 0:
            eviction = cache.evict(rng.randrange(4 * cache.page_size))
            went += [tuple(victim) for victim in eviction.victims]
            went.append(tuple(eviction.slots.tolist()))
        if step % 50 == 49:
            cache.reset()
    return went


def digest() -> str:
    """A fingerprint of what all policies evict from one stream."""
    caches = [RadixCache(MODEL, 60, 2, policy, plugins=ALONE) for policy in POLICIES]
    return hashlib.sha256(repr([stream(cache, 3) for cache in caches]).encode()).hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 10**9), page_size=st.sampled_from([1, 2, 4]))
def test_two_caches_choose_the_same_victims(policy: str, seed: int, page_size: int) -> None:
    first, second = (RadixCache(MODEL, 30 * page_size, page_size, policy, plugins=ALONE) for _ in range(2))
    assert stream(first, seed, 30) == stream(second, seed, 30)


def test_two_processes_choose_the_same_victims() -> None:
    """Under tensor parallelism each rank evicts on its own, and Python's hashes differ between them."""
    code = "from tests.property.test_streams import digest; print(digest())"
    found = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        found.add(run.stdout.strip())
    assert found == {digest()}


MLA, MHA = ["deepseek-v3", "deepseek-v2-lite", "glm-5"], ["llama-3-8b", "qwen3-32b"]


@given(
    seed=st.integers(0, 10**9),
    policy=st.sampled_from(sorted(set(POLICIES) - BY_COST)),
    page_size=st.sampled_from([1, 4]),
    mla=st.sampled_from(MLA),
    mha=st.sampled_from(MHA),
)
def test_mla_and_mha_evict_the_same_from_one_uniform_pool(
    seed: int, policy: str, page_size: int, mla: str, mha: str
) -> None:
    """A slot is a token: what a token weighs changes nothing within one pool."""
    latent = RadixCache(mla, 40 * page_size, page_size, policy, plugins=PLUGINS)
    heads = RadixCache(mha, 40 * page_size, page_size, policy, plugins=PLUGINS)
    assert (latent.plugin, heads.plugin) == ("mla", "mha")
    assert stream(latent, seed, 40) == stream(heads, seed, 40)
    assert latent.counters == heads.counters
    assert latent.counters.clamped == 0
