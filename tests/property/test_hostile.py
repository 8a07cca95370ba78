"""Whatever a plugin or a policy does: an eviction frees enough, never too much, and nothing locked."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import NodeRecord, RadixCache, Victim
from costcache.policies.keyed import LRU
from costcache.radix import Node
from tests.property.kit import MODEL, Plugin, check_structure, drain, manager, nodes_of, policy


@contextmanager
def quietly() -> Iterator[None]:
    """Hundreds of expected errors a run: keep them off the screen."""
    logger = logging.getLogger("costcache")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


ANSWERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-5, 150),
    st.sampled_from([10**18, -(10**18), 10**400]),
    st.floats(),
    st.floats(0, 1),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.dates(),
    st.sampled_from([np.float64("nan"), np.float32(0.1), np.int64(30), np.uint8(200), np.bool_(True)]),
    st.sampled_from([np.zeros(2), np.array(7), np.array([[3]])]),
    st.just(RuntimeError),
)


def answering(answers: list[Any]) -> Any:
    """A function that gives one answer after the other, again and again; an exception is raised."""
    at = [0]

    def answer() -> Any:
        value = answers[at[0] % len(answers)]
        at[0] += 1
        if value is RuntimeError:
            raise RuntimeError("the hook is broken")
        return value

    return answer


@given(
    targets=st.lists(ANSWERS, min_size=1, max_size=4),
    counts=st.lists(ANSWERS, min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 10**9),
    demands=st.lists(st.integers(0, 130), min_size=1, max_size=8),
)
def test_hooks_never_break_an_eviction(
    targets: list[Any], counts: list[Any], page_size: int, seed: int, demands: list[int]
) -> None:
    hostile = Plugin(
        match_model=lambda: 5,
        free_target=answering(targets),
        adjust_eviction_count=answering(counts),
    )
    cache = RadixCache(MODEL, 100, page_size, plugins=manager(hostile=hostile))
    rng = random.Random(seed)
    with quietly():
        for demand in demands:
            for _ in range(4):
                cache.insert([rng.randrange(3) for _ in range(rng.randrange(40))])
            found = cache.match_prefix([rng.randrange(3) for _ in range(20)])
            cache.lock(found.node)
            evictable = cache.evictable
            eviction = cache.evict(demand)
            assert min(demand, evictable) <= eviction.freed <= evictable
            assert eviction.freed == len(eviction.slots) == sum(v.tokens for v in eviction.victims)
            assert found.node.depth + found.node.tokens == found.matched_len
            assert cache.free >= min(demand, evictable)
            check_structure(cache)
            cache.unlock(found.node)
        drain(cache)


@given(
    counts=st.lists(ANSWERS, min_size=1, max_size=3),
    locked=st.integers(0, 60),
    wanted=st.integers(0, 100),
)
def test_an_allocation_that_can_succeed_succeeds(counts: list[Any], locked: int, wanted: int) -> None:
    hostile = Plugin(match_model=lambda: 5, adjust_eviction_count=answering(counts))
    cache = RadixCache(MODEL, 100, plugins=manager(hostile=hostile))
    with quietly():
        cache.lock(cache.insert(range(locked)).node)
        cache.insert(range(1000, 1100 - locked))
        slots = cache.allocate(wanted)
    if wanted <= 100 - locked:
        assert len(slots) == wanted
    else:
        assert slots is None
        assert cache.counters.evicted == 0
    assert cache.match_prefix(range(locked)).matched_len == locked
    check_structure(cache)


TRICKS = (
    "right",
    "right",
    "right",
    "any leaf",
    "none",
    "raise",
    "garbage",
    "no record",
    "no count",
    "no action",
    "locked",
    "inner",
    "root",
    "gone",
    "again",
    "stranger",
)


class Tricky(LRU):
    """Answers and events of its own; what it knows of the cache it looks up."""

    def __init__(self, tricks: list[str], broken: dict[str, int], rng: random.Random) -> None:
        super().__init__()
        self.tricks = tricks
        self.rng = rng
        self.cache: RadixCache
        self.gone: list[NodeRecord] = []
        self.last: Victim | None = None
        for event, after in broken.items():
            self._break(event, after)

    def _break(self, event: str, after: int) -> None:
        right = getattr(self, event)
        left = [after]

        def handler(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError(f"{event} is broken")
            right(*arguments)

        setattr(self, event, handler)

    def remove(self, record: NodeRecord) -> None:
        self.gone.append(record)
        super().remove(record)

    def next_victim(self, pool: str) -> Victim | None:
        trick = self.tricks[self.rng.randrange(len(self.tricks))]
        victim = self.play(trick, pool)
        if isinstance(victim, Victim):
            self.last = victim
        answer: Victim | None = victim
        return answer

    def play(self, trick: str, pool: str) -> Any:
        def one(nodes: list[Any]) -> Any:
            return Victim(self.rng.choice(nodes)) if nodes else super(Tricky, self).next_victim(pool)

        nodes = list(nodes_of(self.cache))
        match trick:
            case "none":
                return None
            case "raise":
                raise RuntimeError("next_victim is broken")
            case "garbage":
                return self.rng.choice(["x", 3, (), object(), nodes])
            case "no record":
                return Victim(self.rng.choice([None, "x", 7]))  # type: ignore[arg-type] # the point
            case "no count" | "no action":
                victim = one([node for node in nodes if node.is_evictable])
                wrong = self.rng.choice([0.5, float("nan"), "x", True, (), np.int64(3), -1, 10**400])
                if victim is None:
                    return None
                return victim._replace(**{"tokens" if trick == "no count" else "action": wrong})
            case "locked":
                return one([node for node in nodes if node.locks])
            case "inner":
                return one([node for node in nodes if node.children])
            case "root":
                return one(list(self.cache._tree.roots.values()))
            case "gone":
                return one(self.gone)
            case "again":
                return self.last or super().next_victim(pool)
            case "stranger":
                parent = Node(None, 0, 0, b"", bytearray(), None)
                return Victim(NodeRecord(2, parent, 5, 0))
            case "any leaf":
                return one([node for node in nodes if node.is_evictable])
        return super().next_victim(pool)


@given(
    tricks=st.lists(st.sampled_from(TRICKS), min_size=1, max_size=6),
    broken=st.dictionaries(
        st.sampled_from(
            ["insert", "touch", "refresh", "split", "trim", "remove", "unlock", "defer", "finish"]
        ),
        st.integers(0, 30),
        max_size=2,
    ),
    page_size=st.sampled_from([1, 2]),
    trim=st.sampled_from(["exact", "off"]),
    seed=st.integers(0, 10**9),
)
def test_orders_never_break_an_eviction(
    tricks: list[str], broken: dict[str, int], page_size: int, trim: str, seed: int
) -> None:
    rng = random.Random(seed)
    order = Tricky(tricks, broken, random.Random(seed + 1))
    made = manager(own=policy("tricky", lambda: order))
    cache = RadixCache(MODEL, 60, page_size, "tricky", plugins=made, trim=trim)
    order.cache = cache
    held = []
    with quietly():
        for step in range(25):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
            found = cache.match_prefix(tokens, step)
            if rng.random() < 0.3:
                cache.lock(found.node)
                held.append((found.node, tokens[: found.matched_len]))
            cache.refresh(found.node)
            cache.insert(tokens, request=step)
            cache.finish(step)
            evictable, demand = cache.evictable, rng.randrange(12)
            eviction = cache.evict(demand)
            goal = -(-min(demand, evictable) // page_size) * page_size
            assert eviction.freed >= goal
            assert eviction.freed == goal or trim == "off"
            assert eviction.freed == sum(v.tokens for v in eviction.victims) == len(eviction.slots)
            check_structure(cache)
            if held and rng.random() < 0.3:
                cache.unlock(held.pop(rng.randrange(len(held)))[0])
            for node, prefix in held:
                assert node.parent is not None or not prefix
                assert node.depth + node.tokens == len(prefix)
        drain(cache)
        for node, _ in held:
            cache.unlock(node)
        drain(cache)
    assert cache.cached == 0
    assert cache.stats().fallbacks <= 1


@given(
    shortfall=st.integers(0, 300),
    sizes=st.lists(st.integers(1, 40), max_size=8),
    headroom=st.floats(0, 0.99),
    page_size=st.sampled_from([1, 2, 16]),
    trim=st.sampled_from(["auto", "exact", "chunk", "off"]),
)
def test_evictions_free_the_shortfall_and_the_headroom(
    shortfall: int, sizes: list[int], headroom: float, page_size: int, trim: str
) -> None:
    cache = RadixCache(MODEL, 320, page_size, plugins=manager(), headroom=headroom, trim=trim, trim_chunk=5)
    for n, size in enumerate(sizes):
        cache.insert([n] * size)
    evictable = cache.evictable
    eviction = cache.evict(shortfall)
    goal = min(shortfall + math.ceil(headroom * cache.pool_size), evictable) if shortfall else 0
    whole = -(-goal // page_size) * page_size
    assert eviction.freed >= whole
    if trim in {"auto", "exact"}:
        assert eviction.freed == whole
    elif trim == "chunk":
        assert eviction.freed < goal + max(1, -(-5 // page_size) * page_size) or not goal
    else:
        assert all(not victim.trimmed for victim in eviction.victims)
        assert sum(victim.tokens for victim in eviction.victims[:-1]) < max(1, goal)


def test_the_logger_is_left_as_it_was() -> None:
    with quietly(), pytest.raises(RuntimeError):
        raise RuntimeError
    assert not logging.getLogger("costcache").disabled
