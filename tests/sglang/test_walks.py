"""The fast walks leave exactly the tree that SGLang's own walks leave."""

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
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from costcache.sglang.walks import FastWalks
from tests.sglang import hicache
from tests.sglang.pools import Shape, stock_cache
from tests.sglang.serving import Server

CORE = "costcache-test-walks"
SPACES: tuple[dict[str, Any], ...] = ({}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "s"})


class Watched(FastWalks):
    """Fails where a walk falls back to SGLang's, if set so, and keeps the locks reported to it."""

    allow_stock = True

    def reset(self) -> None:
        super().reset()
        self.walks = self.splits = 0
        self.locked: set[int] = set()

    def path_walked(self, path: list[Any], inserting: bool) -> None:
        assert path
        above = self.root_node
        for node in path:
            assert node.parent is above
            above = node
        self.walks += 1

    def nodes_locked(self, nodes: list[Any]) -> None:
        ids = {node.id for node in nodes}
        assert ids
        assert not ids & self.locked
        self.locked |= ids

    def nodes_unlocked(self, nodes: list[Any]) -> None:
        ids = {node.id for node in nodes}
        assert ids
        assert ids <= self.locked
        self.locked -= ids

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        prefix, action = super()._split_node(key, child, split_len)
        self.splits += 1
        if child.id in self.locked:
            self.locked.add(prefix.id)
        return prefix, action

    def _match_prefix_helper(self, *args: Any) -> Any:
        assert self.allow_stock
        return super()._match_prefix_helper(*args)

    def _insert_walk_step(self, state: Any) -> None:
        assert self.allow_stock
        super()._insert_walk_step(state)


class Strict(Watched):
    allow_stock = False


for name, core in ((CORE, Watched), (CORE + "-strict", Strict)):
    if get_tree_core_factory(name) is None:
        register_tree_core_backend(name, core)


def edges_agree(core: FastWalks) -> None:
    for node in core._collect_all_nodes():
        assert sorted(child.id for child in node.edges.values()) == sorted(
            child.id for child in node.children.values()
        )
        for edge, child in node.edges.items():
            assert child.edge == edge
    held = {n.id for n in core._collect_all_nodes() if n.component_data[0].lock_ref} - {core.root_node.id}
    assert held == core.locked


def picture(core: UnifiedTreeCore) -> list[Any]:
    """The whole content of a tree, without node ids and clock readings; nodes by recency."""
    nodes = [n for n in core._collect_all_nodes() if n is not core.root_node]
    ages = {t: i for i, t in enumerate(sorted(n.last_access_time for n in nodes))}
    order = {t: i for i, t in enumerate(sorted(n.creation_time for n in nodes))}
    leaves = core.evictable_device_leaves
    found = []
    for node in nodes:
        data = node.component_data[0]
        path, above = [], node
        while above is not core.root_node:
            path.append((above.key.extra_key, above.key.cache_salt, above.key.token_ids.tolist()))
            above = above.parent
        found.append(
            (
                repr(path),
                data.value.tolist(),
                data.lock_ref,
                node.hit_count,
                node.priority,
                node in leaves,
                # Interior nodes cannot be compared by age: SGLang leaves the prefix of a split that an
                # insert made one reading older than its tail.
                ages[node.last_access_time] if node in leaves else None,
                order[node.creation_time],
            )
        )
    return sorted(found, key=lambda item: item[0])


class Twin:
    """One cache of a pair that gets the same operations."""

    def __init__(self, shape: Shape) -> None:
        self.cache = stock_cache(shape)
        self.core = self.cache.tree_core
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.page = shape.page_size
        self.locks: list[Any] = []

    def key(self, tokens: list[int], space: dict[str, Any], limit: int | None = None) -> Any:
        return RadixKey(array("q", tokens), limit=limit, **space)

    def match(self, tokens: list[int], space: dict[str, Any], limit: int | None) -> Any:
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, space, limit)))
        slots = self.cache.path_device_indices(found.last_device_node).tolist()
        assert len(slots) == found.device_prefix_len == found.full_kv_hit_length
        return slots, found.last_device_node

    def insert(
        self, tokens: list[int], space: dict[str, Any], stale: bool, priority: int, inserted: int
    ) -> Any:
        """``stale`` inserts what the tree has too, as a request does that did not see it in time."""
        slots, _ = self.match(tokens, space, None)
        known = 0 if stale else len(slots)
        size = (len(tokens) - self.core.is_eagle) // self.page * self.page
        if size <= 0:
            return None
        lacking = size - known
        if lacking > self.allocator.available_size():
            self.cache.evict(EvictParams(num_tokens=lacking - self.allocator.available_size()))
        if lacking > self.allocator.available_size():
            return None
        slots, _ = self.match(tokens, space, None)  # the eviction may have taken some of it
        known = 0 if stale else min(known, len(slots))
        if size - known > self.allocator.available_size():
            return None
        fresh = self.allocator.alloc(size - known) if size > known else torch.empty(0, dtype=torch.int64)
        value = torch.cat([torch.tensor(slots[:known], dtype=torch.int64), fresh])
        result = self.cache.insert(
            InsertParams(
                key=self.key(tokens, space),
                value=value,
                prev_prefix_len=known,
                priority=priority,
                inserted_len=inserted,
                track_adopted_ranges=True,
            )
        )
        held = self.cache.path_device_indices(result.last_device_node).tolist()
        return result.prefix_len, result.adopted_ranges, held

    def lock(self, tokens: list[int], space: dict[str, Any]) -> Any:
        slots, node = self.match(tokens, space, None)
        if slots:
            receipt = self.cache.inc_lock_ref(node)
            self.locks.append((node, receipt.to_dec_params()))
            return receipt.delta
        return 0

    def unlock(self, number: int) -> int:
        node, receipt = self.locks.pop(number)
        self.cache.dec_lock_ref(node, receipt)
        return int(self.cache.full_protected_size())

    def evict(self, tokens: int) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


def tokens_of(rng: random.Random, page_size: int) -> list[int]:
    """Prompts of up to 12 pages that branch at few places, inside pages too."""
    base, size = rng.randrange(3) * 1000, rng.randrange(1, 12 * page_size + 2)
    tokens = list(range(base, base + size))
    for _ in range(rng.randrange(3)):
        cut = rng.randrange(4) * 3 * page_size + rng.choice((0, 0, page_size // 3))
        tokens[cut:] = [base + 100_000 * rng.randrange(1, 3) + i for i in range(cut, size)]
    return tokens[:size]


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority"])
def test_the_same_tree_as_stock(policy: str, page_size: int, eagle: bool) -> None:
    rng = random.Random(f"{policy} {page_size} {eagle}")
    params = {"is_eagle": eagle, "eviction_policy": policy}
    pool = 40 * page_size
    stock, fast = (
        Twin(Shape(page_size=page_size, tokens=pool, core=core, params=params))
        for core in ("python", CORE + "-strict")
    )
    twins = (stock, fast)
    evicted = 0
    for step in range(400):
        action, tokens = rng.random(), tokens_of(rng, page_size)
        space = SPACES[0] if rng.random() < 0.7 else rng.choice(SPACES)
        if action < 0.4:
            extra = (rng.random() < 0.3, rng.randrange(3), rng.choice((0, 0, len(tokens) // 2)))
            results = [twin.insert(tokens, space, *extra) for twin in twins]
        elif action < 0.6:
            limit = rng.choice((None, len(tokens) // 2, len(tokens) + 5))
            results = [twin.match(tokens, space, limit)[0] for twin in twins]
        elif action < 0.72:
            results = [twin.lock(tokens, space) for twin in twins]
        elif action < 0.88 and stock.locks:
            number = rng.randrange(len(stock.locks))
            results = [twin.unlock(number) for twin in twins]
        else:
            count = rng.choice((1, 2, 5)) * page_size
            results = [twin.evict(count) for twin in twins]
            evicted += results[0]
        assert results[0] == results[1], step
        assert stock.allocator.available_size() == fast.allocator.available_size()
        if step % 10 == 0:
            assert picture(stock.core) == picture(fast.core), step
            edges_agree(fast.core)
            fast.core.sanity_check([], [])
    assert evicted > pool
    assert fast.core.walks > 150
    assert fast.core.splits > 10
    assert picture(stock.core) == picture(fast.core)
    for twin in twins:
        while twin.locks:
            twin.unlock(0)
        twin.cache.sanity_check()
        twin.evict(10**9)
        assert twin.allocator.available_size() == pool
    assert not fast.core.root_node.edges


@pytest.mark.parametrize("page_size", [1, 64])
def test_slots_contain_their_tokens(page_size: int) -> None:
    shape = Shape("mla", page_size, tokens=2048, core=CORE + "-strict")
    server = Server(stock_cache(shape), shape)
    rng = random.Random(3)
    hits = 0
    for _ in range(150):
        start = rng.randrange(6) * 1000
        prompt = list(range(start, start + rng.choice((70, 200, 400))))
        prompt[rng.randrange(1, len(prompt)) :] = [rng.randrange(90_000) for _ in range(rng.randrange(1, 90))]
        hits += server.serve(prompt, output=range(rng.randrange(4)), priority=rng.randrange(2))
        server.check()
        edges_agree(server.cache.tree_core)
    assert hits
    server.drain()


def test_requests_side_by_side_lose_no_slot() -> None:
    shape = Shape("mha", 1, tokens=4096, core=CORE + "-strict")
    server = Server(stock_cache(shape), shape)
    rng = random.Random(4)
    for step in range(200):
        start = rng.randrange(4) * 1000
        server.start(server.request([*range(start, start + rng.choice((50, 200, 300))), 50_000 + step % 7]))
        if len(server.running) > rng.randrange(1, 6):
            req = rng.choice(server.running)
            server.decode(req, [rng.randrange(9) for _ in range(3)])
            server.finish(req)
        server.cache.tree_core.sanity_check([], [])
        edges_agree(server.cache.tree_core)
    server.drain()


@pytest.mark.parametrize("kind", ["mamba", "swa"])
def test_other_trees_go_through_stock(kind: Any) -> None:
    shape = Shape(kind, 1, tokens=2048, core=CORE)
    server = Server(stock_cache(shape), shape)
    assert not server.cache.tree_core.has_fast_walks
    for i in range(20):
        server.serve(range(i % 3 * 1000, i % 3 * 1000 + 300), output=[1, 2])
        server.check()
    assert not server.cache.tree_core.walks
    server.drain()


def test_a_host_tier_goes_through_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    hicache.patch(monkeypatch)
    shape = Shape("mha", 1, tokens=1024, core=CORE, hicache="write_through")
    server = Server(stock_cache(shape), shape)
    assert not server.cache.tree_core.has_fast_walks
    for i in range(20):
        server.serve(range(i % 5 * 1000, i % 5 * 1000 + 300), output=[1, 2])
        server.check()
    assert not server.cache.tree_core.walks


def test_bad_calls_fail_as_in_stock() -> None:
    twin = Twin(Shape(core=CORE + "-strict"))
    twin.insert([1, 2, 3], {}, False, 0, 0)
    _, node = twin.match([1, 2, 3], {}, None)
    receipt = twin.cache.inc_lock_ref(node).to_dec_params()
    twin.cache.dec_lock_ref(node, receipt)
    with pytest.raises(AssertionError, match="was not locked"):
        twin.cache.dec_lock_ref(node, receipt)
    with pytest.raises(KeyError):
        twin.cache.inc_lock_ref(10**9)
    found = twin.cache.match_prefix(MatchPrefixParams(key=twin.key([], {})))
    assert found.device_prefix_len == 0
    assert found.last_device_node == twin.core.root_node.id
