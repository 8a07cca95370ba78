"""A pool of sliding windows in the generic cache, compared with SGLang's own tree token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from costcache import RadixCache
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.radix.windows import WindowTree
from tests.sglang.pools import CONFIG, CONFIGS, Shape, cost_cache, stock_cache
from tests.sglang.serving import Server
from tests.sglang.streams import chats_and_scans


class Ours:
    """The generic cache, driven step by step as SGLang's scheduler drives its own."""

    def __init__(self, shape: Shape, policy: str) -> None:
        config = CONFIGS["swa"] | CONFIG | {"sliding_window": shape.window}
        self.cache = RadixCache(
            ModelSpec.from_config(config),
            shape.tokens,
            shape.page_size,
            policy,
            window_pool_size=shape.window_tokens or shape.tokens,
            deployment=Deployment(page_size=shape.page_size),
            trim="off",  # stock evicts whole nodes
        )
        tree = self.cache._tree
        assert isinstance(tree, WindowTree)
        self.tree = tree

    def serve(self, tokens: list[int]) -> int:
        """One request without output; returns the tokens that the cache had."""
        cache, page = self.cache, self.cache.page_size
        found = cache.match_prefix(tokens[:-1], "it")
        cache.lock(found.node)
        size = len(tokens)
        computed = -(-size // page) * page - found.matched_len
        more = page if page > 1 else 0  # SGLang asks for a page more than it takes
        slots = cache.allocate(computed + more)
        assert slots is not None
        assert cache.reserve_windows(computed + more)
        cache.release(slots[computed:])
        cache.release_windows(computed + more)
        slots = slots[:computed]
        row = np.concatenate((found.slots, slots))[:size]
        done = cache.insert(tokens, row, "it")
        cache.unlock(found.node)
        mine = np.concatenate((done.duplicates, slots[size - found.matched_len :]))
        cache.release(mine[np.isin(mine, slots)])
        cache.finish("it")
        return found.matched_len


def shared_prefixes(seed: int, page: int) -> Iterator[list[int]]:
    """Prompts that branch at many depths, in whole pages, and return after a while."""
    rng = random.Random(seed)
    heads = [[rng.randrange(500) for _ in range(page * rng.choice((8, 40, 90)))] for _ in range(6)]
    for _ in range(160):
        head = rng.choice(heads)
        cut = rng.choice((len(head), len(head), len(head) // 2 // page * page))
        prompt = head[:cut] + [rng.randrange(500) for _ in range(page * rng.choice((1, 5, 30)))]
        yield prompt
        if rng.random() < 0.4:
            heads[rng.randrange(len(heads))] = prompt[: 120 * page]


Tree = dict[tuple[int, ...], tuple[int, bool]]
"""Each node's prefix: where the node starts, and whether its window KV is cached."""


def tree_of_server(server: Server) -> Tree:
    found: Tree = {}

    def walk(node: Any, before: tuple[int, ...]) -> None:
        for child in node.children.values():
            prefix = (*before, *child.key.raw_token_ids())
            found[prefix] = (len(before), child.component_data[ComponentType.SWA].value is not None)
            walk(child, prefix)

    walk(server.cache.tree_core.root_node, ())
    return found


def tree_of(cache: RadixCache) -> Tree:
    found: Tree = {}
    for root in cache._tree.roots.values():
        for node in root.walk():
            key = b"".join(bytes(each.key) for each in node.path())
            found[tuple(np.frombuffer(key, np.int64).tolist())] = (node.depth, node.window is not None)
    return found


def prompts(seed: int, page: int) -> list[list[int]]:
    chats = [prompt[: len(prompt) // page * page] for prompt in chats_and_scans(seed, 120)]
    return [prompt for prompt in (*chats, *shared_prefixes(seed, page)) if prompt]


@pytest.mark.parametrize(
    ("policy", "page", "tokens", "windows"),
    [("lru", 1, 2500, 1000), ("lru", 1, 2500, 2704), ("lru", 8, 8000, 1000), ("lfu", 8, 8000, 1000)],
)
def test_the_same_tree_as_sglangs_after_every_request(
    policy: str, page: int, tokens: int, windows: int
) -> None:
    """SGLang's own tree makes every change; the victims are named by the same order."""
    shape = Shape("swa", page, tokens=tokens, window=64, window_tokens=windows)
    theirs, ours = Server(cost_cache(shape, policy=policy, trim="off"), shape), Ours(shape, policy)
    hits = evicted = 0
    for prompt in prompts(1, page):
        found = theirs.serve(prompt)
        assert ours.serve(prompt) == found
        assert tree_of(ours.cache) == tree_of_server(theirs)
        pool = ours.cache.window_pool
        assert pool is not None
        assert theirs.free() == {"kv": ours.cache.free, "swa": pool.free}
        hits += found
    evicted = sum(pool.counters.evicted for pool in ours.tree.pools.values())
    assert hits > 5000
    assert evicted > 5000
    assert theirs.cache.pools.by_name["swa"].counters.evicted > 1000 or windows == 2704


@pytest.mark.parametrize(("seed", "windows"), [(1, 1000), (2, 2704)])
def test_nearly_the_hits_of_stock(seed: int, windows: int) -> None:
    """Stock's split of a node makes the part after it recent too, though nobody used it."""
    shape = Shape("swa", 1, tokens=2500, window=64, window_tokens=windows)
    stock, ours = Server(stock_cache(shape), shape), Ours(shape, "lru")
    found = [(stock.serve(prompt), ours.serve(prompt)) for prompt in prompts(seed, 1)]
    theirs, mine = (sum(each) for each in zip(*found, strict=True))
    assert mine == pytest.approx(theirs, rel=0.03)
    assert sum(a == b for a, b in found) > 0.9 * len(found)
