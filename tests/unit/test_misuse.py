"""Misuse of a cache is an error at the call, and the cache is as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from costcache import RadixCache, RequestInfo
from costcache.policies.keyed import LRU
from costcache.radix.cache import PrefixCache
from costcache.radix.statecache import StateCache
from tests.property.kit import MODEL, cache_with, check_structure, drain, manager
from tests.property.test_windows_machine import model_with_window
from tests.unit.test_statecache import PAGE, cache_of
from tests.unit.test_statecache import serve as serve_states

BIG = 2**63
Cache = TypeVar("Cache", bound=PrefixCache)


def grown() -> RadixCache:
    return filled(RadixCache(MODEL, 100, policy="lru", plugins=manager()))


def grown_windows() -> RadixCache:
    return filled(RadixCache(model_with_window(4), 100, policy="lru", window_pool_size=60, plugins=manager()))


def grown_states() -> StateCache:
    kv, state = 24_576, 77_266_944  # bytes of a token and of a state
    memory = 100 * kv + 5 * state
    cache = StateCache("qwen3-next", memory, policy="lru", state_share=(5 * state + 0.5) / memory)
    cache.insert(range(10), state=cache.allocate_state())
    return filled(cache)


def filled(cache: Cache) -> Cache:
    cache.insert(range(10))
    cache.insert([*range(5), 50, 51])
    cache.match_prefix(range(3), "running")
    return cache


GROWN: dict[str, Callable[[], Any]] = {
    "plain": grown,
    "windows": grown_windows,
    "states": grown_states,
}
"""Caches over each tree, with the same prompts in them."""


def look(cache: Any) -> Any:
    """All that a caller could see of a cache."""
    states = (cache.states, cache.reserved_states) if isinstance(cache, StateCache) else ()
    windows = getattr(cache, "window_pool", None)
    return cache.pretty(), cache.stats().cached, cache.free, cache.reserved, cache.evictable, states, windows


def foreign() -> Any:
    other = RadixCache(MODEL, 100, policy="lru", plugins=manager())
    return other.insert(range(8)).node


def slot_of(cache: Any) -> int:
    """A slot that is cached."""
    return next(int(node.slots[0]) for node in cache._tree.walk() if node.slots is not None)


def free_slot(cache: Any) -> int:
    """A slot that nobody has."""
    slots = cache.allocate(1)
    cache.release(slots)
    return int(slots[0])


MISUSE: dict[str, Callable[[Any], Any]] = {
    "lock a node of another cache": lambda cache: cache.lock(foreign()),
    "unlock a node of another cache": lambda cache: cache.unlock(foreign()),
    "refresh a node of another cache": lambda cache: cache.refresh(foreign()),
    "lock the root of another cache": lambda cache: cache.lock(foreign().parent),
    "unlock the root of another cache": lambda cache: cache.unlock(foreign().parent),
    "lock a string": lambda cache: cache.lock("node"),
    "lock None": lambda cache: cache.lock(None),
    "lock a match": lambda cache: cache.lock(cache.match_prefix(range(4))),
    "unlock a string": lambda cache: cache.unlock("node"),
    "unlock what is not locked": lambda cache: cache.unlock(cache.match_prefix(range(10)).node),
    "refresh a number": lambda cache: cache.refresh(3),
    "slots of words": lambda cache: cache.insert(range(200, 203), ["a", "b", "c"]),
    "slots of floats": lambda cache: cache.insert(range(200, 203), [1.0, 2.0, 3.0]),
    "slots of truths": lambda cache: cache.insert(range(200, 203), [True, False, True]),
    "slots in a square": lambda cache: cache.insert(range(200, 204), [[20, 21], [22, 23]]),
    "too few slots": lambda cache: cache.insert(range(200, 203), [20, 21]),
    "slots below none": lambda cache: cache.insert(range(200, 203), [20, 21, -1]),
    "slots beyond the pool": lambda cache: cache.insert(range(200, 203), [20, 21, cache.pool_size]),
    "slots twice": lambda cache: cache.insert(range(200, 203), [20, 21, 20]),
    "slots of the cache": lambda cache: cache.insert(range(200, 203), [20, 21, slot_of(cache)]),
    "huge slots": lambda cache: cache.insert([200], np.array([BIG], np.uint64)),
    "huge tokens": lambda cache: cache.insert(np.array([BIG + 3, 5], np.uint64)),
    "huge tokens in a list": lambda cache: cache.insert([BIG, 5]),
    "huger tokens": lambda cache: cache.insert([2**70, 5]),
    "huge tokens to match": lambda cache: cache.match_prefix(np.array([BIG], np.uint64)),
    "release what is free": lambda cache: cache.release([free_slot(cache)]),
    "release what is cached": lambda cache: cache.release([slot_of(cache)]),
    "release huge slots": lambda cache: cache.release(np.array([BIG], np.uint64)),
    "release words": lambda cache: cache.release(["a"]),
    "allocate words": lambda cache: cache.allocate("3"),
    "allocate less than none": lambda cache: cache.allocate(-1),
    "evict half a token": lambda cache: cache.evict(0.5),
    "a reason that is no string": lambda cache: cache.finish("running", RequestInfo(finish_reason=3)),  # type: ignore[arg-type] # the point
    "an info that is a dict": lambda cache: cache.finish("running", {"output_tokens": 3}),
    "an info that is a tuple": lambda cache: cache.finish("running", (3,)),
    "the end of nobody": lambda cache: cache.finish("nobody"),
    "a name that cannot be hashed": lambda cache: cache.match_prefix(range(3), []),
    "a priority in words": lambda cache: cache.insert(range(5), priority="high"),
}


@pytest.mark.parametrize("tree", GROWN)
@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_an_error_and_changes_nothing(what: str, tree: str) -> None:
    cache = GROWN[tree]()
    found = cache.match_prefix(range(10)).matched_len
    cache.match_prefix(range(4))  # what the misuse itself would split
    before = look(cache)[1:]
    with pytest.raises((ValueError, TypeError)) as error:
        MISUSE[what](cache)
    assert str(error.value)
    assert look(cache)[1:] == before
    check_structure(cache)
    cache.finish("running", RequestInfo(finish_reason="stop"))
    assert cache.match_prefix(range(10)).matched_len == found == 10
    cache.insert(range(300, 340))
    empty(cache)


def empty(cache: Any) -> None:
    """Evict all that is left, which an order can only do if it knows every node."""
    cache.evict(cache.evictable)
    assert (cache.cached, cache.evictable) == (0, 0)
    assert not cache.stats().fallbacks
    check_structure(cache)


STATE_MISUSE: dict[str, Callable[[Any], Any]] = {
    "attach to a node of another cache": lambda cache: cache.attach(foreign(), cache.allocate_state() or 0),
    "fork a node of another cache": lambda cache: cache.fork(foreign()),
    "attach to what was evicted": lambda cache: cache.attach(
        evicted_from(cache), cache.allocate_state() or 0
    ),
    "attach a state of truth": lambda cache: cache.attach(cache.match_prefix([1] * PAGE).node, "1"),
    "evict half a state": lambda cache: cache.evict_states(0.5),
    "fork a string": lambda cache: cache.fork("node"),
    "release a state that is free": lambda cache: cache.release_state(3),
    "release a state beyond the pool": lambda cache: cache.release_state(99),
    "release a state in words": lambda cache: cache.release_state("3"),
    "a state that is not reserved": lambda cache: cache.insert([1] * PAGE, state=3),
    "a state within a page": lambda cache: cache.insert([1] * 7, state=cache.allocate_state()),
}


def evicted_from(cache: StateCache) -> Any:
    node = cache.insert([77] * PAGE).node
    cache.evict(PAGE)  # what has no state is evicted first
    return node


@pytest.mark.parametrize("what", STATE_MISUSE)
def test_misuse_of_a_cache_of_states(what: str) -> None:
    cache = cache_of(6, 24)
    serve_states(cache, 1, 2)
    serve_states(cache, 1, 3)
    before = cache.states, cache.cached, cache.free
    with pytest.raises((ValueError, TypeError)):
        STATE_MISUSE[what](cache)
    assert (cache.states, cache.cached, cache.free) == before
    assert serve_states(cache, 1, 2, 4) == 2 * PAGE


WINDOW_MISUSE: dict[str, Callable[[Any], Any]] = {
    "reserve words": lambda cache: cache.reserve_windows("3"),
    "reserve less than none": lambda cache: cache.reserve_windows(-1),
    "release more than is reserved": lambda cache: cache.release_windows(1),
    "evict half a window": lambda cache: cache.evict_windows(0.5),
    "windows from a word": lambda cache: cache.insert(range(300, 310), window_from="3"),
    "windows from before the start": lambda cache: cache.insert(range(300, 310), window_from=-1),
}


@pytest.mark.parametrize("what", WINDOW_MISUSE)
def test_misuse_of_a_cache_of_windows(what: str) -> None:
    cache = grown_windows()
    before = look(cache)
    with pytest.raises((ValueError, TypeError)):
        WINDOW_MISUSE[what](cache)
    assert look(cache) == before
    empty(cache)


@pytest.mark.parametrize("tree", GROWN)
def test_a_double_unlock_is_named_even_while_others_hold_the_prefix(tree: str) -> None:
    cache = GROWN[tree]()
    outer, inner = cache.insert(range(5)).node, cache.insert(range(10)).node
    cache.lock(inner)
    with pytest.raises(ValueError, match="is not locked"):
        cache.unlock(outer)  # locked through its child only
    cache.unlock(inner)
    with pytest.raises(ValueError, match="is not locked"):
        cache.unlock(inner)
    empty(cache)


@pytest.mark.parametrize("tree", GROWN)
@pytest.mark.parametrize("call", ["reset", "evict", "insert", "match", "lock", "finish", "allocate"])
def test_an_observer_cannot_call_back(call: str, tree: str) -> None:
    cache = GROWN[tree]()
    node = cache.match_prefix(range(10)).node
    refused: list[str] = []
    calls: dict[str, Callable[[], Any]] = {
        "reset": lambda: cache.reset(force=True),
        "evict": lambda: cache.evict(3),
        "insert": lambda: cache.insert(range(900, 910)),
        "match": lambda: cache.match_prefix(range(10)),
        "lock": lambda: cache.lock(node),
        "finish": lambda: cache.finish("running"),
        "allocate": lambda: cache.allocate(3),
    }

    def observer(event: Any) -> None:
        with pytest.raises(RuntimeError, match="while another call is at work") as error:
            calls[call]()
        refused.append(str(error.value))

    cache.subscribe(observer)
    cache.insert(range(500, 550))
    cache.evict(20)
    assert len(refused) >= 2
    check_structure(cache)
    empty(cache)


def test_a_policy_cannot_call_back() -> None:
    class Calling(LRU):
        cache: RadixCache

        def next_victim(self, pool: str) -> Any:
            self.cache.reset(force=True)
            return super().next_victim(pool)

    cache = cache_with(Calling)
    cache._pool.order.cache = cache  # type: ignore[attr-defined] # the order's own
    cache.insert(range(50))
    assert cache.evict(10).freed == 10
    assert cache.policy == "lru"
    drain(cache)


def big_windows() -> RadixCache:
    return RadixCache(model_with_window(4), 400, policy="hazard", window_pool_size=200, plugins=manager())


def big_states() -> StateCache:
    return StateCache("qwen3-next", 400 * 24_576 + 5 * 77_266_944, policy="hazard")


THREADED: dict[str, Callable[[], Any]] = {
    "plain": lambda: RadixCache(MODEL, 400, policy="hazard", plugins=manager()),
    "windows": big_windows,
    "states": big_states,
}


@pytest.mark.parametrize("tree", THREADED)
def test_two_threads_are_refused_and_the_cache_is_whole(tree: str) -> None:
    """Whichever call comes second is refused, and none of them is half done."""
    cache = THREADED[tree]()

    def call(rng: np.random.Generator) -> None:
        prompt = rng.integers(0, 4, rng.integers(1, 60))
        cache.insert(prompt)
        cache.match_prefix(prompt)

    refused, done = at_once(call)
    assert refused
    assert all("not thread-safe" in said for said in refused)
    assert done
    check_structure(cache)
    assert cache.policy == "hazard"
    empty(cache)


def at_once(call: Callable[[np.random.Generator], Any]) -> tuple[list[str], int]:
    """Make calls from two threads; returns what the refused ones said, and how many were not refused.

    Until one was refused, for a while: on a busy machine the threads may take turns.
    """
    refused: list[str] = []
    done = [0]
    interval = sys.getswitchinterval()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for turn in range(20_000):
            if turn >= 500 and refused:
                return
            try:
                call(rng)
                done[0] += 1
            except Exception as error:
                refused.append(str(error))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return refused, done[0]


def test_a_call_that_fails_leaves_the_cache_open() -> None:
    cache = grown()
    for _ in range(2):
        with pytest.raises(TypeError):
            cache.insert(["a"])
    cache.insert([1, 2])
