"""The Python core with fast walks and leaves cut in place decides as it does on SGLang's own walks."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)

from costcache.sglang.build import make_cache
from costcache.sglang.cache import CostCache
from costcache.sglang.fastcore import FastTreeCore
from costcache.sglang.patches import slot_freer
from costcache.sglang.pycore import CostTreeCore
from tests.sglang.mirror import check_records
from tests.sglang.pools import Shape, bind, cost_cache, init_params, pools, publish_args

PLAIN = "costcache-test-plain"
if get_tree_core_factory(PLAIN) is None:
    register_tree_core_backend(PLAIN, CostTreeCore)


def plain_cache(shape: Shape, **settings: Any) -> CostCache:
    """Our cache on SGLang's own walks."""
    publish_args(shape)
    params = init_params(shape)
    make = make_cache(params, bind(shape, **settings))
    params.tree_core_backend = PLAIN
    cache: CostCache = make(params)
    return cache


def tree(cache: CostCache) -> list[Any]:
    """Each node: its prefix, its slots, and what its record says; without ids and serials."""
    core = cache.tree_core
    found = []
    for node in core._collect_all_nodes():
        if node is core.root_node:
            continue
        path, above = [], node
        while above is not core.root_node:
            path.append((above.key.extra_key, above.key.token_ids.tolist()))
            above = above.parent
        r = node.kv
        data = node.component_data[0]
        record = (r.tokens, r.depth, r.uses, r.recency, r.created, r.priority, r.live_children, r.locks)
        found.append((repr(path), data.value.tolist(), data.lock_ref, record))
    return sorted(found)


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("policy", ["lru", "lfu", "mru", "tlru"])
def test_the_same_records_and_victims(policy: str, page_size: int, eagle: bool) -> None:
    rng = random.Random(f"{policy} {page_size} {eagle}")
    pool = 60 * page_size
    settings: dict[str, Any] = {"policy": policy}
    if policy == "tlru":
        settings["policy_settings"] = {"threshold": 3 * page_size}
    shape = Shape(page_size=page_size, tokens=pool, params={"is_eagle": eagle})
    caches = (plain_cache(shape, **settings), cost_cache(shape, **settings))
    assert [type(cache.tree_core) for cache in caches] == [CostTreeCore, FastTreeCore]

    def match(cache: CostCache, tokens: list[int], space: str | None) -> Any:
        return cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), space)))

    def insert(cache: CostCache, tokens: list[int], space: str | None, priority: int) -> Any:
        allocator = cache.token_to_kv_pool_allocator
        size = max(0, len(tokens) - eagle) // page_size * page_size
        found = match(cache, tokens, space)
        lock = cache.inc_lock_ref(found.last_device_node).to_dec_params()
        known = found.device_prefix_len
        short = size - known - allocator.available_size()
        if short > 0:
            cache.evict_for_alloc(EvictParams(num_tokens=short))
        result = None
        if size > known and size - known <= allocator.available_size():
            prefix = cache.path_device_indices(found.last_device_node)[:known]
            value = torch.cat([prefix, allocator.alloc(size - known)])
            key = RadixKey(array("q", tokens), space)
            params = InsertParams(key=key, value=value, prev_prefix_len=known, priority=priority)
            result = cache.insert(params).prefix_len
        cache.dec_lock_ref(found.last_device_node, lock)
        return known, short, result

    for _ in range(120):
        action, base, size = rng.random(), rng.randrange(3) * 1000, rng.randrange(1, 12 * page_size + 2)
        tokens = list(range(base, base + size))
        if rng.random() < 0.6:
            cut = rng.randrange(4) * 3 * page_size + rng.choice((0, page_size // 3))
            tokens[cut:] = [base + 100_000 * rng.randrange(1, 3) + i for i in range(cut, size)]
        space, priority = rng.choice((None, None, "a")), rng.randrange(3)
        count = rng.randrange(1, 4 * page_size)
        results = []
        for cache in caches:
            if action < 0.5:
                results.append(insert(cache, tokens, space, priority))
            elif action < 0.7:
                results.append(match(cache, tokens, space).device_prefix_len)
            else:
                results.append(cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted)
            cache.sanity_check()
            check_records(cache)
        core = caches[1].tree_core
        for node in set(core._collect_all_nodes()) - {core.root_node}:
            slots = node.component_data[0].value
            assert slots.untyped_storage().nbytes() <= 2 * slots.nbytes
        assert results[0] == results[1]
        assert tree(caches[0]) == tree(caches[1])
    plain, fast = (cache.pools.kv.counters for cache in caches)
    assert plain == fast
    assert fast.trimmed > 5
    for cache in caches:
        cache.evict(EvictParams(num_tokens=1 << 40))
        assert cache.token_to_kv_pool_allocator.available_size() == pool
        check_records(cache)


def test_leaves_that_others_hear_of_are_split_as_in_stock() -> None:
    """KV events name pages of nodes: a leaf is then split, and its tail evicted with its event."""
    shape = Shape(page_size=4, tokens=400, params={"enable_kv_cache_events": True})
    cache = cost_cache(shape)
    value = cache.token_to_kv_pool_allocator.alloc(40)
    cache.insert(InsertParams(key=RadixKey(array("q", range(40))), value=value))
    cache.take_events()
    assert cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    (event,) = cache.take_events()
    assert len(event.block_hashes) == 1
    check_records(cache)
    cache.sanity_check()


def test_a_trimmed_leaf_does_not_share_memory() -> None:
    cache = cost_cache(Shape(tokens=4000))
    value = cache.token_to_kv_pool_allocator.alloc(3000)
    cache.insert(InsertParams(key=RadixKey(array("q", range(3000))), value=value))
    cache.evict(EvictParams(num_tokens=2990))
    records: list[Any] = cache.pools.kv.records()
    (record,) = records
    kept = record.node.component_data[0].value
    assert kept.tolist() == value[:10].tolist()
    assert kept.untyped_storage().nbytes() == 80
    assert len(record.node.key.token_ids) == 10


def test_page_names_equal_sglangs() -> None:
    """SGLang's own walks look children up by their first page: after splits, trims and removals too."""
    rng = random.Random(0)
    shape = Shape("mha", 4, tokens=512)
    cache = cost_cache(shape)
    allocator, core = cache.token_to_kv_pool_allocator, cache.tree_core
    names = 0
    for step in range(200):
        tokens = array("q", [rng.randrange(2) for _ in range(4 * rng.randrange(1, 12))])
        key = RadixKey(tokens, rng.choice([None, "lora"]))
        found = cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        cache.evict(EvictParams(num_tokens=max(0, len(tokens) - allocator.available_size())))
        slots = allocator.alloc(len(tokens))
        cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=0))
        if step % 5 == 0:
            cache.evict(EvictParams(num_tokens=rng.randrange(1, 20)))
        cache.sanity_check()
        assert found <= len(tokens)
        for node in core._collect_all_nodes():
            for name, child in node.children.items():
                names += 1
                own = child.key.child_key(4)
                assert node.children[own] is child
                assert name == own
                assert hash(name) == hash(own)
                assert child.name.key is child.key, "no tokens are kept that have gone"
                assert own[::-1] not in node.children or own[::-1] in {
                    other.key.child_key(4) for other in node.children.values()
                }
    assert names > 1000


@pytest.mark.parametrize("tokens", [64, 65 * 64])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_slots_are_freed_as_by_the_allocator(
    tokens: int, page_size: int, grouped: bool, need_sort: bool, count: int
) -> None:
    free = []
    for ours in (True, False):
        _, allocator = pools(Shape("mha", page_size, tokens=4 * 65 * 64 + 128))
        allocator.need_sort = need_sort
        parts = [allocator.alloc(tokens)[page_size * at :] for at in range(count)]
        if grouped:
            allocator.free_group_begin()
        if ours:
            slot_freer(allocator)(parts)
        else:
            for part in parts:
                allocator.free_segment(part, start_pos=0)
        if grouped:
            allocator.free_group_end()
        if need_sort:
            allocator.merge_and_sort_free()
        free.append(allocator.free_pages)
    assert torch.equal(*free)
    assert free[0].dtype == torch.int64


def test_freed_slots_are_returned_if_an_eviction_fails() -> None:
    cache = cost_cache(Shape(tokens=64), policy="lru")
    allocator, core = cache.token_to_kv_pool_allocator, cache.tree_core
    for first in (0, 100, 200):
        key = RadixKey(array("q", range(first, first + 16)))
        cache.insert(InsertParams(key=key, value=allocator.alloc(16)))
    take_leaf = core.take_leaf
    taken: list[Any] = []

    def failing(record: Any, needed: int) -> Any:
        if len(taken) == 2:
            raise RuntimeError("no more")
        taken.append(record)
        return take_leaf(record, needed)

    core.take_leaf = failing
    with pytest.raises(RuntimeError, match="no more"):
        cache.evict(EvictParams(num_tokens=48))
    assert allocator.available_size() == 48
    cache.sanity_check()
    check_records(cache)
    core.take_leaf = take_leaf
    assert cache.evict(EvictParams(num_tokens=48)).num_tokens_evicted == 16
    assert allocator.available_size() == 64
