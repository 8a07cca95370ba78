"""A node that follows another copy of its prefix from now on: locks and leaves go with it."""

from __future__ import annotations

import pytest

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.eviction import Refused
from costcache.model import ModelSpec
from costcache.pool import Pool
from costcache.records import NodeRecord, Victim
from costcache.settings import Settings


def make(policy: str = "lru") -> tuple[Pool, NodeRecord, NodeRecord, NodeRecord]:
    """Two copies of a prefix of 10 tokens, and 5 tokens after the first copy."""

    def take(victim: Victim, needed: int) -> int | Refused:
        tokens = victim.record.tokens
        pool.remove(victim.record)
        return tokens

    binding = Binding.of(ModelSpec.preset("llama-3-8b"), Deployment(), Settings(policy=policy))
    pool = binding.pool("kv", take, capacity=100)
    records: list[NodeRecord] = []
    for parent, tokens, depth in ((None, 10, 0), (None, 10, 0), (0, 5, 10)):
        pool.clock.accesses += 1
        request = pool.begin()
        above = None if parent is None else records[parent]
        records.append(NodeRecord(0, above, tokens, depth))
        pool.insert(records[-1], request)
    first, second, tail = records
    return pool, first, second, tail


@pytest.mark.parametrize("policy", ["lru", "hazard", "s3fifo", "sieve"])
def test_the_old_parent_becomes_a_leaf_and_the_new_one_is_none(policy: str) -> None:
    pool, first, second, tail = make(policy)
    pool.move(tail, second)
    assert (first.live_children, second.live_children, tail.parent) == (0, 1, second)
    assert first.is_evictable
    assert not second.is_evictable
    assert pool.evict(25).freed == 25
    assert pool.fallbacks == 0


def test_lru_names_the_old_parent_when_its_turn_comes() -> None:
    pool, first, second, tail = make()
    pool.move(tail, second)
    assert [victim.serial for victim in pool.evict(10).victims] == [first.serial]
    assert tail.parent is second


def test_a_lock_goes_with_the_node() -> None:
    pool, first, second, tail = make()
    pool.pin(tail)
    pool.pin(second)
    assert pool.pinned == 25
    pool.move(tail, second)
    assert (first.locks, second.locks, second.pins) == (0, 2, 1)
    assert pool.pinned == 15
    assert pool.evict(100).freed == 10  # the first
    pool.unpin(second)
    assert (second.locks, pool.pinned) == (1, 15)
    pool.unpin(tail)
    assert (second.locks, pool.pinned) == (0, 0)
    assert pool.evict(100).freed == 15


def test_a_move_to_where_it_is_changes_nothing() -> None:
    pool, first, _, tail = make()
    pool.move(tail, first)
    pool.move(pool.root, first)
    assert (first.live_children, tail.parent, pool.root.parent) == (1, first, None)
