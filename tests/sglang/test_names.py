"""Names by which a policy recognises a prefix cached again: the same, whatever the tree looked like."""

from __future__ import annotations

import random
import zlib
from array import array
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from costcache.sglang.cache import CostCache
from tests.sglang.pools import Shape, cost_cache


def key(tokens: list[int], eagle: bool = False, salt: str | None = None) -> RadixKey:
    """A key as SGLang makes them."""
    made = RadixKey(array("q", tokens), cache_salt=salt)
    if eagle:
        made.maybe_to_bigram_view(True)
    return made


def insert(cache: CostCache, tokens: list[int], eagle: bool = False, salt: str | None = None) -> None:
    """Cache whole pages of a prompt."""
    length = (len(tokens) - eagle) // cache.page_size * cache.page_size
    found = cache.match_prefix(MatchPrefixParams(key=key(tokens, eagle, salt))).device_prefix_len
    slots = cache.token_to_kv_pool_allocator.alloc(length)
    cache.insert(
        InsertParams(key=key(tokens[: length + eagle], eagle, salt), value=slots, prev_prefix_len=found)
    )


def names(cache: CostCache) -> dict[tuple[str | None, int], int]:
    """The name of each page of a cache with one prompt per salt, by salt and depth."""
    found: dict[tuple[str | None, int], int] = {}
    records: list[Any] = cache.pools.kv.records()
    for record in records:
        node = record.node
        for offset in range(0, record.tokens, cache.page_size):
            name = record.prefix_hash(offset)
            assert name is not None
            found[node.key.cache_salt, record.depth + offset] = name
    return found


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_names_do_not_depend_on_where_nodes_begin(page_size: int, eagle: bool) -> None:
    shape = Shape("mha", page_size, params={"is_eagle": eagle})
    prompt = [random.Random(5).randrange(1000) for _ in range(16 * page_size + eagle)]
    whole, parts = cost_cache(shape), cost_cache(shape)
    insert(whole, prompt, eagle)
    expected = names(whole)
    assert len(expected) == 16
    assert len(set(expected.values())) == 16
    for pages in (3, 8, 9, 16):
        insert(parts, prompt[: pages * page_size + eagle], eagle)
    parts.match_prefix(MatchPrefixParams(key=key(prompt[: 12 * page_size + eagle], eagle)))  # splits
    assert len(parts.pools.kv.records()) == 5
    assert names(parts) == expected
    # Trimmed, and back again.
    parts.evict(EvictParams(num_tokens=page_size * 6))
    parts.evict(EvictParams(num_tokens=page_size))
    assert names(parts) == dict(sorted(expected.items(), key=lambda item: item[0][1])[: len(names(parts))])
    insert(parts, prompt, eagle)
    assert names(parts) == expected


def test_names_differ_between_namespaces() -> None:
    cache = cost_cache(Shape("mha"))
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 3], salt="mine")
    found = names(cache)
    assert len(found) == 6
    assert len(set(found.values())) == 6


def test_names_end_with_the_node_that_had_them_and_with_the_python_core() -> None:
    cache = cost_cache(Shape("mha"))
    insert(cache, [1, 2, 3])
    (record,) = cache.pools.kv.records()
    cache.evict(EvictParams(num_tokens=3))
    assert record.prefix_hash() is None
    rust = cost_cache(Shape("mha", core="rust"), policy="lru")
    rust.insert(InsertParams(key=key([1, 2, 3]), value=torch.arange(1, 4)))
    assert {record.prefix_hash() for record in rust.pools.kv.records()} == {None}


def test_names_are_checksums_of_the_prefix_and_so_the_same_in_every_process() -> None:
    cache = cost_cache(Shape("mha", 4))
    prompt = list(range(64))
    insert(cache, prompt, salt="s")
    start = zlib.crc32(repr((None, "s")).encode())
    expected = {
        ("s", at): at << 32 | zlib.crc32(array("q", prompt[: at + 4]).tobytes(), start)
        for at in range(0, 64, 4)
    }
    assert names(cache) == expected
