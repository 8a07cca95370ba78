"""Policies from the literature on prefix trees: evictable nodes, returning ghosts, the cost of a victim."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import NodeRecord, RadixCache, Victim, VictimOrder
from costcache.policies.arc import ARC
from costcache.policies.lhd import LHD
from costcache.policies.queues import Entry, Queue, QueueOrder
from costcache.policies.s3fifo import S3FIFO
from costcache.policies.sieve import Sieve
from costcache.policies.wild import Wild
from costcache.policies.wtinylfu import WTinyLFU
from tests.property.kit import MODEL, cache_with, check_structure, drain, insert_all, manager, nodes_of

PLUGINS = manager()
LITERATURE = ("arc", "gdsf", "hits-per-token", "lhd", "lru2", "s3fifo", "sieve", "wild", "wtinylfu")
QUEUES = ("arc", "s3fifo", "sieve", "wild", "wtinylfu")
SETTINGS: dict[str, dict[str, Any]] = {
    "lhd": {"samples": 4, "refresh": 20, "explore": 0.3},
    "lru2": {"correlated_period": 2},
    "s3fifo": {"promote": 1},
    "wild": {"turns": 3, "refresh": 5},
    "wtinylfu": {"window": 0.2},
}


def new(
    policy: str, pool_size: int = 60, page_size: int = 1, *, own: bool = True, **settings: Any
) -> RadixCache:
    return RadixCache(
        MODEL,
        pool_size,
        page_size,
        policy,
        plugins=PLUGINS,
        policy_settings=SETTINGS.get(policy, {}) if own else {},
        **settings,
    )


def order_of(cache: RadixCache) -> Any:
    return cache._pool.order


def evictable(cache: RadixCache) -> set[int]:
    return {node.serial for node in nodes_of(cache) if node.is_evictable}


class Use:
    """Random use of a cache: shared prefixes, splits, repeats, priorities, locks, trims, refreshes."""

    def __init__(self, cache: RadixCache, seed: int) -> None:
        self.cache, self.rng = cache, random.Random(seed)
        self.locked: list[Any] = []

    def step(self) -> None:
        cache, rng = self.cache, self.rng
        salt = rng.choice([None, None, "other"])
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 14) * cache.page_size)]
        found = cache.match_prefix(prompt, cache_salt=salt)
        if rng.random() < 0.15 and found.matched_len:
            cache.lock(found.node)
            self.locked.append(found.node)
        if rng.random() < 0.7:
            cache.insert(prompt, priority=rng.randrange(2), cache_salt=salt)
        if rng.random() < 0.1 and found.matched_len and found.node.parent is not None:
            cache.refresh(found.node)
        if rng.random() < 0.4:
            cache.evict(rng.randrange(1, 8 * cache.page_size))
        if self.locked and rng.random() < 0.15:
            cache.unlock(self.locked.pop(rng.randrange(len(self.locked))))

    def rest(self) -> None:
        while self.locked:
            self.cache.unlock(self.locked.pop())


def check_queues(cache: RadixCache) -> None:
    """Evictable records are in a line, and queues count the tokens of all their records."""
    order = order_of(cache)
    tokens: dict[Queue, int] = {}
    for node in nodes_of(cache):
        entry: Entry = node.data
        assert entry.record is node
        tokens[entry.queue] = tokens.get(entry.queue, 0) + node.tokens
        if node.is_evictable:
            assert entry.newer is not None
    queues = {queue for queue in vars(order).values() if isinstance(queue, Queue)}
    queues |= {group.queue for group in getattr(order, "_classes", {}).values()}
    for queue in queues:
        assert queue.tokens == tokens.get(queue, 0)
    assert order._entries == sum(1 for _ in nodes_of(cache))


@pytest.mark.parametrize("policy", LITERATURE)
@given(
    seed=st.integers(0, 10**9),
    page_size=st.sampled_from([1, 3]),
    trim=st.sampled_from(["auto", "off", "chunk"]),
    headroom=st.sampled_from([0.0, 0.2]),
)
def test_any_use_of_a_cache_leaves_a_policy_in_force(
    policy: str, seed: int, page_size: int, trim: str, headroom: float
) -> None:
    cache = new(policy, 40 * page_size, page_size, trim=trim, trim_chunk=4, headroom=headroom)
    use = Use(cache, seed)
    for step in range(60):
        use.step()
        if step == 40:
            use.locked.clear()
            cache.reset(force=True)
    check_structure(cache)
    if policy in QUEUES:
        check_queues(cache)
    use.rest()
    drain(cache)
    assert cache.policy == policy
    assert cache.stats().fallbacks == 0
    assert cache.counters.deferred == 0, "it named nothing that could not go"


@pytest.mark.parametrize("policy", LITERATURE)
@pytest.mark.parametrize("seed", range(3))
def test_each_evictable_leaf_is_named_once_and_again_after_it_was_deferred(policy: str, seed: int) -> None:
    cache = new(policy, 80)
    use = Use(cache, seed)
    for _ in range(6):
        for _ in range(30):
            use.step()
        order, expected = order_of(cache), evictable(cache)
        assert expected
        for _ in range(2):
            told: list[Victim] = []
            while (victim := order.next_victim("kv")) is not None:
                told.append(victim)
                assert len(told) <= len(expected)
            assert {victim.record.serial for victim in told} == expected
            assert len(told) == len(expected)
            for victim in told:
                order.defer(victim)
    use.rest()
    drain(cache)
    assert cache.policy == policy


@pytest.mark.parametrize("policy", LITERATURE)
def test_an_order_can_start_from_a_cache_that_exists(policy: str) -> None:
    cache = new(policy, 80)
    use = Use(cache, 7)
    for _ in range(60):
        use.step()
    spec = PLUGINS.policies()[policy]
    late = spec.make_order(cache._tree.binding.cost, (cache._pool.state(),), spec.settings())
    late.load(cache._pool.records())
    told = set()
    while (victim := late.next_victim("kv")) is not None:
        told.add(victim.record.serial)
    assert told == evictable(cache)


@pytest.mark.parametrize("policy", LITERATURE)
def test_a_trimmed_node_and_one_that_lost_its_children_are_evictable(policy: str) -> None:
    cache = new(policy, 100)
    insert_all(cache, ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]))
    assert cache.cached == 9
    for left in range(8, -1, -1):
        eviction = cache.evict(1)
        assert eviction.freed == 1
        assert cache.cached == left
    assert cache.policy == policy


@pytest.mark.parametrize("policy", LITERATURE)
def test_a_locked_prefix_is_evicted_only_once_unlocked(policy: str) -> None:
    cache = new(policy, 12)
    node = cache.insert([1, 2, 3, 4]).node
    cache.lock(node)
    for n in range(10, 40):
        cache.insert([n, n, n])
    assert cache.match_prefix([1, 2, 3, 4]).matched_len == 4
    assert cache.evict(100).freed == cache.pool_size - 4
    cache.unlock(node)
    assert cache.evict(100).freed == 4


SCRIPT = """
from tests.unit.test_policies_literature_trees import LITERATURE, fingerprint
print([fingerprint(policy) for policy in LITERATURE])
"""


def fingerprint(policy: str) -> int:
    """A number made of every victim of a long use."""
    cache = new(policy, 50)
    use, went = Use(cache, 11), []
    order = order_of(cache)
    named = order.next_victim

    def next_victim(pool: str) -> Victim | None:
        victim: Victim | None = named(pool)
        if victim is not None:
            went.append((victim.record.serial, victim.record.depth, victim.record.tokens))
        return victim

    order.next_victim = next_victim
    for _ in range(400):
        use.step()
    assert cache.policy == policy
    assert len(went) > 200
    return zlib.crc32(repr(went).encode())


def test_every_process_chooses_the_same_victims() -> None:
    expected = repr([fingerprint(policy) for policy in LITERATURE])
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == expected


# -- names ------------------------------------------------------------------------------------


class Names(VictimOrder):
    """Evicts first in, first out, and records the names of nodes that are made and evicted."""

    def __init__(self) -> None:
        self.came: list[int | None] = []
        self.went: list[int | None] = []
        self.nodes: dict[int, NodeRecord] = {}

    def insert(self, record: NodeRecord) -> None:
        self.came.append(record.prefix_hash())
        self.nodes[record.serial] = record

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.nodes[prefix.serial] = prefix

    def remove(self, record: NodeRecord) -> None:
        self.went.append(record.prefix_hash())
        del self.nodes[record.serial]

    def next_victim(self, pool: str) -> Victim | None:
        return next((Victim(node) for node in self.nodes.values() if node.is_evictable), None)


def test_a_prefix_cached_again_keeps_its_name() -> None:
    cache = cache_with(Names)
    names = order_of(cache)
    cache.insert([1, 2, 3, 4])
    cache.insert([1, 2, 3, 4, 5, 6])
    deep = names.came[1]
    cache.match_prefix([1, 2])  # splits the prefix before it
    cache.evict(1)  # [5, 6] is only [5] now
    cache.evict(1)
    assert names.went == [deep]
    cache.insert([1, 2, 3, 4, 5, 9, 9])
    assert names.came[2] == deep, "the same page behind the same prefix"
    cache.insert([1, 2, 3, 4, 7])
    assert names.came[3] not in names.came[:3]
    for salt in ("a", "b"):
        cache.insert([1, 2, 3, 4], cache_salt=salt)
    assert len(set(names.came)) == len(names.came) - 1
    drain(cache)
    assert set(names.went) >= set(names.came)


def test_names_do_not_depend_on_where_nodes_are_cut() -> None:
    rng = random.Random(5)
    for page_size in (1, 4):
        names = set()
        for _ in range(20):
            cache = cache_with(Names, 1000, page_size)
            prompt = [n % 7 for n in range(20 * page_size)]
            for cut in sorted(rng.sample(range(1, 20), rng.randrange(6))):
                cache.insert(prompt[: cut * page_size])
            cache.insert(prompt)
            for cut in rng.sample(range(1, 20), rng.randrange(6)):
                cache.match_prefix(prompt[: cut * page_size])
            cache.insert([*prompt, *range(page_size)])
            names.add(order_of(cache).came[-1])
        assert len(names) == 1


def test_a_trimmed_node_changes_its_checksum_and_an_evicted_one_has_no_name() -> None:
    cache = cache_with(Names)
    names = order_of(cache)
    cache.insert([1, 2, 3, 4])
    cache.insert([1, 2, 3, 4, 5])
    cache.evict(1)
    cache.evict(1)  # [1, 2, 3] is left, whose checksum was that of [1, 2, 3, 4]
    cache.insert([1, 2, 3, 5])
    assert cache.cached == 4
    other = cache_with(Names)
    other.insert([1, 2, 3])
    other.insert([1, 2, 3, 5])
    assert order_of(other).came[-1] == names.came[-1]
    node = cache.match_prefix([1, 2, 3, 5]).node
    drain(cache)
    assert node.prefix_hash() is None
    assert NodeRecord(2, NodeRecord(1, None, 0, 0), 4, 0).prefix_hash() is None


def test_names_cost_nothing_until_asked_for() -> None:
    cache = new("lru", 100)
    insert_all(cache, ([1, 2, 3], [1, 2, 3, 4], [1, 5]))
    assert all(node.checksum is None for node in nodes_of(cache))


@pytest.mark.parametrize("policy", LITERATURE)
def test_a_cache_that_cannot_name_its_nodes_is_served_too(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from costcache.radix import Node

    monkeypatch.setattr(Node, "prefix_hash", NodeRecord.prefix_hash)
    cache = new(policy, 40)
    use = Use(cache, 3)
    for _ in range(200):
        use.step()
    use.rest()
    drain(cache)
    assert cache.policy == policy


# -- what a victim costs ----------------------------------------------------------------------


class Work:
    """Counts the steps of queues: places looked at, put into a line or taken out."""

    steps: ClassVar[int] = 0


def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            Work.steps += 1
            return method(*arguments)

        monkeypatch.setattr(owner, name, call)

    for name in ("_link", "unlink", "newer"):
        counted(Queue, name)
    for name in ("can_name", "rejoin"):
        counted(QueueOrder, name)


MAKE: dict[str, Callable[[int], VictimOrder]] = {
    "arc": ARC,
    "s3fifo": S3FIFO,
    "sieve": lambda capacity: Sieve(),
    "wild": lambda capacity: Wild(),
    "wtinylfu": WTinyLFU,
}


@pytest.mark.parametrize("policy", QUEUES)
@pytest.mark.parametrize("shape", ["leaves", "chain", "comb"])
def test_a_victim_of_a_queue_costs_the_same_in_a_large_cache(
    policy: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also among inner nodes, which are in the queues and not evictable."""
    counting(monkeypatch)
    cost = {}
    for size in (64, 512, 4096):
        cache = cache_with(lambda size=size: MAKE[policy](2 * size + 100), 2 * size + 100)  # type: ignore[misc] # size binds now
        if shape == "leaves":
            insert_all(cache, ([n, n] for n in range(size)))
        elif shape == "chain":  # one below the other
            chain = list(range(size))
            for end in range(8, size + 1, 8):
                cache.insert(chain[:end])
        else:  # a chain with a leaf at each of its nodes
            chain = list(range(size // 2))
            for end in range(8, size // 2 + 1, 8):
                cache.insert([*chain[:end], -end])
        while cache.free >= 2:
            cache.insert([10**6 + cache.free] * 2)
        Work.steps, victims = 0, 0
        fresh = 2 * 10**6
        for _ in range(size):
            fresh += 1
            before = cache.counters.victims
            cache.insert([fresh, fresh])
            victims += cache.counters.victims - before
        cost[size] = Work.steps / victims
    # Every node may have to step out of line, or to be passed with a hit, once.
    assert cost[4096] <= 2 * cost[64] + 2, cost
    assert cost[4096] <= 24, cost


@pytest.mark.parametrize("policy", ["gdsf", "hits-per-token", "lru2"])
def test_a_victim_of_a_heap_costs_a_few_keys(policy: str) -> None:
    for leaves in (64, 512, 4096):
        cache = new(policy, 4 * leaves, own=False)
        order, keys = order_of(cache), 0
        key = order.key

        def counted(record: NodeRecord, key: Any = key) -> Any:
            nonlocal keys
            keys += 1
            return key(record)

        order.key = counted
        insert_all(cache, ([n] * 4 for n in range(leaves)))
        rng = random.Random(1)
        for _ in range(leaves // 4):
            cache.match_prefix([rng.randrange(leaves)] * 4)
        keys = 0
        for n in range(40):
            cache.insert([leaves + n] * 4)
        assert keys <= 40 * 4 + leaves // 4  # each leaf that was used is corrected once


@pytest.mark.parametrize("shape", ["leaves", "comb"])
def test_a_victim_of_lhd_costs_its_samples(shape: str) -> None:
    for size in (64, 512, 4096):
        order = LHD(4 * size, samples=16, explore=0.0)
        drawn = 0
        draw = order._draw

        def counted(draw: Callable[[], float] = draw) -> float:
            nonlocal drawn
            drawn += 1
            return draw()

        order._draw = counted
        cache = cache_with(lambda order=order: order, 4 * size)  # type: ignore[misc] # order binds now
        for n in range(size):
            cache.insert([*range(n), -1] if shape == "comb" and n < 64 else [10**6 + n] * 2)
        cache.evict(1)
        drawn, before = 0, cache.counters.victims
        for n in range(200):
            cache.insert([2 * 10**6 + n] * 40)
        assert drawn <= 20 * (cache.counters.victims - before) + size


# -- what is particular to trees --------------------------------------------------------------


def test_wild_follows_conversations() -> None:
    cache = new("wild", 200, own=False)

    def turn(tokens: list[int]) -> int:
        cache.insert(tokens)
        node: Any = cache.match_prefix(tokens).node
        return int(node.data.turn)

    assert turn([1, 2]) == 1
    assert turn([1, 2, 3, 4]) == 2
    assert turn([1, 2, 3, 4, 5]) == 3
    assert turn([1, 2, 9]) == 1, "another branch begins a conversation"
    assert turn([1, 2, 9, 9]) == 2
    assert turn([7]) == 1
    long = [50]
    for n in range(12):
        long.append(n)
        assert turn(long) == min(n + 1, 8)


def test_lru2_recognises_a_prefix_cached_again() -> None:
    cache = new("lru2", 8, own=False)
    cache.insert([1, 1, 1, 1])
    cache.insert([2, 2, 2, 2])
    cache.insert([3, 3, 3, 3])  # in place of the first
    cache.insert([1, 1, 1, 1])  # used twice now; in place of the second
    cache.insert([4, 4, 4, 4])
    assert cache.match_prefix([1, 1, 1, 1]).matched_len == 4
    assert cache.match_prefix([3, 3, 3, 3]).matched_len == 0


def test_arc_keeps_what_two_requests_used_through_a_scan() -> None:
    cache = new("arc", 40)
    for _ in range(2):
        cache.insert([1, 2, 3, 4])
    for n in range(100, 130):
        cache.insert([n, n, n])
    assert cache.match_prefix([1, 2, 3, 4]).matched_len == 4
    assert cache.match_prefix([101, 101]).matched_len == 0


def test_arc_finds_the_ghost_of_a_node_that_was_trimmed_and_split() -> None:
    """However a run was cut and evicted, all its tokens move the share when it is cached again."""
    cache = new("arc", 20)
    order = order_of(cache)
    cache.insert(list(range(10)))
    cache.match_prefix(list(range(4)))  # splits: the first four have been used twice
    for missing in (1, 2):
        cache.evict(missing)
        assert order._ghosts_once.tokens == missing + (missing == 2)
    cache.evict(3)
    assert (order._ghosts_once.tokens, len(order._ghosts_once)) == (6, 1)
    cache.evict(4)
    assert (order._ghosts_again.tokens, len(order._ghosts_again)) == (4, 1)
    order._share = 12.0
    node: Any = cache.insert(list(range(12))).node
    assert order._ghosts_once.tokens == order._ghosts_again.tokens == 0
    assert order._share == pytest.approx(12 - 4 * 6 / 4 + 6)
    assert node.data.queue is order._again


def test_arc_knows_the_tail_of_a_node_that_stayed() -> None:
    cache = new("arc", 20)
    order = order_of(cache)
    cache.insert(list(range(10)))
    cache.evict(4)
    cache.insert(list(range(8)))
    assert order._share == 2
    assert order._ghosts_once.tokens == 0
    cache.insert([*range(6), 50])
    assert order._share == 2, "a second child is something else"


def test_arc_takes_over_a_cache_in_order_of_recency() -> None:
    cache = new("lru", 20)
    old: Any = cache.insert([1, 1]).node
    other: Any = cache.insert([2, 2]).node
    twice: Any = cache.insert([3, 3]).node
    for tokens in ([3, 3], [3, 3]):
        cache.insert(tokens)
    cache._pool.use([old], None)  # recent, and no use
    old.recency += 1
    late = ARC(20)
    late.load(cache._pool.records())
    told = []
    while (victim := late.next_victim("kv")) is not None:
        told.append(victim.record)
    assert told == [other, old, twice]


def test_the_tail_of_a_split_keeps_its_uses_in_the_sketch() -> None:
    cache = new("wtinylfu", 100)
    for _ in range(5):
        cache.insert([1, 2, 3, 4])
    cache.match_prefix([1, 2])
    tail: Any = cache.match_prefix([1, 2, 3, 4]).node
    sketch = order_of(cache)._sketch
    assert sketch.estimate(tail.data.cells) == 6
    assert sketch.estimate(tail.parent.data.cells) == 7
    assert tail.data.cells == sketch.cells(tail.prefix_hash())


def test_one_request_counts_once() -> None:
    for policy in ("arc", "s3fifo", "wtinylfu"):
        cache = new(policy, 100, own=False)
        for _ in range(9):
            cache.insert([1, 2], request="chunks")
        node: Any = cache.match_prefix([1, 2], "chunks").node
        if policy == "s3fifo":
            assert node.data.count() == 0
        elif policy == "arc":
            assert node.data.queue is order_of(cache)._once
        else:
            assert order_of(cache)._sketch.estimate(node.data.cells) == 1


def test_explorers_of_lhd_keep_their_budget_through_splits_and_trims() -> None:
    cache = new("lhd", 60)
    use, most = Use(cache, 9), 0
    for _ in range(600):
        use.step()
        held = sum(node.tokens for node in nodes_of(cache) if node.data.explores)
        assert held + order_of(cache)._budget == pytest.approx(0.3 * 60)
        most = max(most, held)
    assert most > 5


def test_a_queue_that_waits_is_not_a_hit_but_recent() -> None:
    cache = new("wtinylfu", 100)
    node: Any = cache.insert([1, 2]).node
    cache.insert([3, 4])
    entry = node.data
    cache.refresh(node)
    assert entry.queue.oldest is not entry
    assert order_of(cache)._sketch.estimate(entry.cells) == 1


def test_documents_asked_once_are_evicted_before_small_deep_chats() -> None:
    """The case that hits per token is made for: large nodes with one use against small ones with many."""
    cache = new("hits-per-token", 12_000, trim="off")
    chats = [[chat] for chat in range(20)]
    for turn in range(40):
        for chat in chats:
            chat.extend([10_000 + turn] * 10)
            cache.insert(chat)
        if turn % 10 == 9:
            cache.insert([-turn] * 3000)
    kept = [cache.match_prefix(chat).matched_len for chat in chats]
    assert kept == [len(chat) for chat in chats]


def test_the_loser_of_a_contest_stays_in_the_window_for_now() -> None:
    cache = new("wtinylfu", 40)  # a window of 8
    order = order_of(cache)
    cache.insert([1] * 28)
    node: Any = cache.insert([2] * 12).node
    cache.insert([3, 3])  # the window's oldest loses and is trimmed, and is still too much
    assert (node.tokens, node.data.queue) == (10, order._window)
    cache.evict(4)
    cache.insert([4])
    assert node.data.queue is order._window
    cache.insert([5])  # nothing had to go for it: what is too much passes
    assert node.data.queue is order._probation
