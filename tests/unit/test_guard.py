"""A policy that fails in any way is dropped for LRU, and the eviction is exact all the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from costcache import Deployment, KeyedOrder, ModelSpec, NodeRecord, RadixCache, Victim, VictimOrder
from costcache.binding import Binding
from costcache.eviction import Refused
from costcache.policies.keyed import FIFO, LRU, MRU
from costcache.radix import Node
from costcache.records import Action, RequestInfo
from costcache.settings import Settings
from tests.property.kit import MODEL, cache_with, check_structure, drain, manager, nodes_of

EVENTS = ("insert", "touch", "refresh", "split", "trim", "remove", "unlock", "finish")


def stream(cache: RadixCache, seed: int = 0, steps: int = 60) -> list[tuple[int, int, bool]]:
    """A stream that raises every event; returns the victims of its evictions."""
    rng = random.Random(seed)
    went = []
    for step in range(steps):
        prompt = [rng.randrange(3)] + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        name = f"request {step}"
        found = cache.match_prefix(prompt[:-1], name)
        cache.refresh(found.node)
        cache.lock(found.node)
        done = cache.insert(prompt, request=name)
        cache.unlock(found.node)
        cache.lock(done.node)
        cache.unlock(done.node)
        cache.finish(name, RequestInfo(output_tokens=1))
        if step % 4 == 3:
            eviction = cache.evict(rng.randrange(1, 6))
            assert eviction.freed == min(eviction.shortfall, eviction.goal)
            went += [(v.start, v.tokens, v.trimmed) for v in eviction.victims]
        check_structure(cache)
    return went


class Named(VictimOrder):
    """Gives the answers that the test sets."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer

    def next_victim(self, pool: str) -> Victim | None:
        answer: Victim | None = self.answer(pool)
        return answer


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def raises(pool: str) -> Any:
    raise RuntimeError("next_victim is broken")


def node_where(cache: RadixCache, right: Callable[[Node], bool]) -> Node:
    return next(node for node in nodes_of(cache) if right(node))


def a_leaf(cache: RadixCache) -> Node:
    return node_where(cache, lambda node: node.is_evictable)


GARBAGE: dict[str, Callable[[RadixCache], Any]] = {
    "a string": lambda cache: "node",
    "a number": lambda cache: 7,
    "a record without a Victim": lambda cache: node_where(cache, lambda node: node.is_leaf),
    "a plain tuple": lambda cache: (node_where(cache, lambda node: node.is_leaf), Action.DELETE),
    "a Victim of a string": lambda cache: Victim("node"),  # type: ignore[arg-type] # the point
    "a Victim of None": lambda cache: Victim(None),  # type: ignore[arg-type] # the point
    "a Victim of what cannot be printed": lambda cache: Victim(BadRepr()),  # type: ignore[arg-type] # the point
    "what cannot be printed": lambda cache: BadRepr(),
    "a record of its own": lambda cache: Victim(NodeRecord(3, NodeRecord(1, None, 0, 0), 5, 0)),
    "an interior node": lambda cache: Victim(node_where(cache, lambda node: bool(node.children))),
    "a locked node": lambda cache: Victim(node_where(cache, lambda node: node.locks > 0)),
    "a leaf and half a token": lambda cache: Victim(a_leaf(cache), tokens=0.5),  # type: ignore[arg-type] # the point
    "a leaf and no number": lambda cache: Victim(a_leaf(cache), tokens=float("nan")),  # type: ignore[arg-type] # the point
    "a leaf and tokens in words": lambda cache: Victim(a_leaf(cache), tokens="two"),  # type: ignore[arg-type] # the point
    "a leaf and a truth": lambda cache: Victim(a_leaf(cache), tokens=True),
    "a leaf and an action in words": lambda cache: Victim(a_leaf(cache), "delete"),  # type: ignore[arg-type] # the point
    "a root": lambda cache: Victim(next(iter(cache._tree.roots.values()))),
    "nothing": lambda cache: None,
}


def grown(make: Callable[[], VictimOrder]) -> RadixCache:
    """A cache with a shared prefix, a locked prompt and several leaves."""
    cache = cache_with(make)
    cache.insert([1, 2, 3, 4, 5])
    cache.insert([1, 2, 3, 7, 8, 9])
    cache.lock(cache.insert([4, 4, 4, 4]).node)
    cache.insert([5, 5])
    cache.match_prefix([1, 2, 3, 4, 5])
    return cache


def reference(cache: RadixCache) -> list[tuple[int, int, bool]]:
    """Victims of a cache under ``lru`` from the start, used like :func:`grown` and drained."""
    same = grown(LRU)
    return [(v.start, v.tokens, v.trimmed) for v in same.evict(cache.evictable).victims]


@pytest.mark.parametrize("what", GARBAGE)
def test_an_order_that_answers_nonsense_is_dropped(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caches: list[RadixCache] = []
    cache = grown(lambda: Named(lambda pool: GARBAGE[what](caches[0])))
    caches.append(cache)
    locked = node_where(cache, lambda node: node.pins > 0)
    expected = reference(cache)
    eviction = cache.evict(3)
    assert eviction.freed == 3
    assert (cache.policy, eviction.policy, cache.stats().fallbacks) == ("lru", "lru", 1)
    rest = drain(cache)
    went = [(v.start, v.tokens, v.trimmed) for v in eviction.victims] + [
        (v.start, v.tokens, v.trimmed) for v in rest.victims
    ]
    assert covered(went) == covered(expected)
    assert locked.parent is not None
    assert cache.match_prefix([4, 4, 4, 4]).matched_len == 4
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "'tested'" in errors[0].getMessage()
    assert "'lru'" in errors[0].getMessage()


def test_tokens_may_be_an_integer_of_numpy() -> None:
    caches: list[RadixCache] = []
    cache = grown(lambda: Named(lambda pool: Victim(a_leaf(caches[0]), tokens=np.int64(1))))  # type: ignore[arg-type] # the point
    caches.append(cache)
    eviction = cache.evict(3)
    assert [victim.tokens for victim in eviction.victims] == [1, 1, 1]
    assert all(type(victim.tokens) is int for victim in eviction.victims)
    assert cache.policy == "tested"


def covered(went: list[tuple[int, int, bool]]) -> list[int]:
    """Positions of the evicted tokens, in order of going; a trim frees from the end."""
    return [position for start, tokens, _ in went for position in range(start + tokens - 1, start - 1, -1)]


def test_an_order_that_raises_is_dropped_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    cache = grown(lambda: Named(raises))
    expected = reference(cache)
    eviction = cache.evict(cache.evictable)
    assert [(v.start, v.tokens, v.trimmed) for v in eviction.victims] == expected
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "next_victim is broken" in str(record.exc_info[1])
    cache.insert([6, 6, 6])
    drain(cache)
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


def test_an_order_that_names_an_evicted_node_is_dropped() -> None:
    gone: list[Victim] = []

    class Again(LRU):
        def next_victim(self, pool: str) -> Victim | None:
            victim = gone[0] if gone else super().next_victim(pool)
            if victim is not None:
                gone.append(victim)
            return victim

    cache = grown(Again)
    expected = reference(cache)
    eviction = cache.evict(cache.evictable)
    assert [(v.start, v.tokens, v.trimmed) for v in eviction.victims] == expected
    assert cache.policy == "lru"
    check_structure(cache)


@pytest.mark.parametrize("by_host", [False, True], ids=["evict", "a host's own walk"])
def test_lru_passes_what_was_deferred_before_it_took_over(by_host: bool) -> None:
    """It starts afresh, so it names the deferred node first; that does not end the eviction."""
    stuck: list[NodeRecord] = []

    def take(victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        if record in stuck:
            return Refused.NOT_NOW
        pool.remove(record)
        return record.tokens

    binding = Binding.of(ModelSpec.preset(MODEL), Deployment(), Settings(policy="lru"), plugins=manager())
    pool = binding.pool("kv", take, capacity=100)
    pool.rank_by("again", Named(lambda _: Victim(records[0])))
    records = [NodeRecord(0, None, 10, 0) for _ in range(4)]
    for record in records:
        pool.clock.accesses += 1
        pool.insert(record)
    stuck.append(records[0])
    if not by_host:
        assert pool.evict(30).freed == 30
        assert (pool.policy, pool.cached) == ("lru", 10)
        return
    deferred: dict[int, Victim] = {}
    named = []
    while (victim := pool.next_victim(deferred)) is not None:
        named.append(victim.record)
        if victim.record in stuck:
            deferred[victim.record.serial] = victim
        else:
            pool.remove(victim.record)
    assert named == records
    assert pool.policy == "lru"


def test_an_order_that_names_the_same_locked_node_forever_is_dropped() -> None:
    """An order may name a locked node once (its unlock may be pending), but not twice."""
    caches: list[RadixCache] = []
    asked: list[str] = []

    def locked(pool: str) -> Victim:
        asked.append(pool)
        return Victim(node_where(caches[0], lambda node: node.pins > 0))

    cache = grown(lambda: Named(locked))
    caches.append(cache)
    assert cache.evict(4).freed == 4
    assert asked == ["kv", "kv"]
    assert cache.counters.deferred == 1
    check_structure(cache)


def test_an_order_that_stops_too_early_is_dropped() -> None:
    class Short(LRU):
        left = 2

        def next_victim(self, pool: str) -> Victim | None:
            self.left -= 1
            return super().next_victim(pool) if self.left >= 0 else None

    cache = grown(Short)
    expected = reference(cache)
    eviction = cache.evict(cache.evictable)
    assert [(v.start, v.tokens, v.trimmed) for v in eviction.victims] == expected
    assert cache.stats().fallbacks == 1


def test_an_order_that_has_nothing_to_name_is_kept() -> None:
    cache = cache_with(LRU)
    cache.lock(cache.insert([1, 2, 3]).node)
    eviction = cache.evict(2)
    assert (eviction.freed, cache.policy, cache.counters.short) == (0, "tested", 1)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_order_whose_handler_raises_is_dropped(
    event: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    class Fails(LRU):
        pass

    def handler(self: VictimOrder, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError(f"{event} is broken")
        getattr(LRU, event)(self, *arguments)

    setattr(Fails, event, handler)
    cache = cache_with(Fails, 30)
    plain = RadixCache(MODEL, 30, policy="lru", plugins=manager())
    assert stream(cache) == stream(plain)
    assert [r.message for r in caplog.records] != []
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"{event} raised" in errors[0].getMessage()
    assert errors[0].exc_info is not None
    assert cache.stats().fallbacks == 1
    assert calls == after + 1, "a dropped order hears nothing more"
    drain(cache)


@pytest.mark.parametrize("event", EVENTS)
def test_a_dropped_order_writes_no_more_data(event: str) -> None:
    """An order that fails once, in the middle of a walk, must not spoil LRU's data in the rest of it."""
    failed = armed = False

    class Once(LRU):
        pass

    def handler(self: VictimOrder, record: Any, *arguments: Any) -> None:
        nonlocal failed
        if armed and not failed:
            failed = True
            raise RuntimeError(f"{event} is broken")
        if not failed:
            getattr(LRU, event)(self, record, *arguments)
        elif isinstance(record, NodeRecord):
            record.data = "mine"

    setattr(Once, event, handler)
    cache = cache_with(Once)
    for prompt in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 4]):  # a path of four nodes
        cache.insert(prompt)
    armed = True
    found = cache.match_prefix([1, 2, 3, 4, 4])
    cache.refresh(found.node)
    cache.lock(found.node)
    cache.unlock(found.node)
    cache.match_prefix([1, 2, 3, 4, 4], "last")
    cache.finish("last")
    cache.insert([5, 6, 7])
    cache.match_prefix([5, 6])
    cache.evict(1)
    drain(cache)
    assert cache.cached == 0
    assert failed


@pytest.mark.parametrize("other", [FIFO, MRU])
def test_after_a_fallback_victims_are_those_of_lru_from_the_start(other: type[KeyedOrder]) -> None:
    """Records keep what LRU needs, however long another order was in force."""

    class Breaks(other):  # type: ignore[misc, valid-type] # a base class that is a parameter
        def next_victim(self, pool: str) -> Victim | None:
            raise RuntimeError("broken")

    for seed in range(10):
        cache = cache_with(Breaks, 40)
        plain = RadixCache(MODEL, 40, policy="lru", plugins=manager())
        assert stream(cache, seed) == stream(plain, seed)


@pytest.mark.parametrize("key", ["nan", "mixed", "array", "raises"])
def test_a_key_that_cannot_be_ordered_ends_in_lru(key: str) -> None:
    class Odd(KeyedOrder):
        def key(self, record: NodeRecord) -> Any:
            if key == "nan":
                return float("nan")
            if key == "mixed":
                return record.serial if record.serial % 2 else str(record.serial)
            if key == "array":
                import numpy as np

                return np.array([record.serial, record.uses])
            raise KeyError(record.serial)

    cache = cache_with(Odd, 30)
    plain = RadixCache(MODEL, 30, policy="lru", plugins=manager())
    assert stream(cache) == stream(plain)
    drain(cache)
    assert cache.stats().fallbacks == 1


def test_a_reset_restores_the_policy() -> None:
    cache = grown(lambda: Named(raises))
    cache.evict(1)
    assert cache.policy == "lru"
    cache.reset(force=True)
    assert (cache.policy, cache.stats().fallbacks) == ("tested", 0)
    cache.insert([1, 2, 3])
    cache.evict(1)
    assert (cache.policy, cache.stats().fallbacks) == ("lru", 1)


def test_interrupts_are_not_swallowed() -> None:
    def interrupted(pool: str) -> Any:
        raise KeyboardInterrupt

    cache = grown(lambda: Named(interrupted))
    with pytest.raises(KeyboardInterrupt):
        cache.evict(1)
    assert cache.policy == "tested"
