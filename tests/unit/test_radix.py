"""The radix cache: tokens and slots as callers have them, pages, namespaces, locks, requests, resets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from costcache import Action, KeyedOrder, NodeRecord, RadixCache, RequestInfo, Victim
from costcache.policies.keyed import LRU
from costcache.radix import Cleared, Event, Removed, Stored
from tests.property.kit import MODEL, cache_with, cached_slots, check_structure, insert_all, manager, nodes_of

PLUGINS = manager()


def new(pool_size: int = 100, page_size: int = 1, policy: str = "lru", **settings: Any) -> RadixCache:
    return RadixCache(MODEL, pool_size, page_size, policy, plugins=PLUGINS, **settings)


# -- tokens and slots -------------------------------------------------------------------------


class Tensor:
    """As much of a torch tensor as the cache uses, so that torch is not needed here."""

    device = "cpu"

    def __init__(self, values: list[int]) -> None:
        self.values = np.asarray(values, np.int32)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self.values


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "range": lambda values: range(values[0], values[-1] + 1),
    "int64": lambda values: np.asarray(values, np.int64),
    "int32": lambda values: np.asarray(values, np.int32),
    "uint16": lambda values: np.asarray(values, np.uint16),
    "big-endian": lambda values: np.asarray(values, ">i8"),
    "strided": lambda values: np.repeat(np.asarray(values, np.int64), 2)[::2],
    "reversed view": lambda values: np.asarray(values[::-1], np.int64)[::-1],
    "tensor": Tensor,
}


@pytest.mark.parametrize("inserted", KINDS)
@pytest.mark.parametrize("matched", KINDS)
def test_tokens_of_any_kind_are_the_same_tokens(inserted: str, matched: str) -> None:
    cache = new()
    cache.insert(KINDS[inserted](list(range(50, 70))))
    assert cache.match_prefix(KINDS[matched](list(range(50, 70)))).matched_len == 20


@pytest.mark.parametrize("policy", ["lru", "hazard", "priority", "lhd"])
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_may_be_of_any_kind(kind: Any, policy: str) -> None:
    caches = []
    for number in (int, kind):
        cache = RadixCache(MODEL, number(100), number(2), policy, plugins=PLUGINS)
        for at in range(40):
            cache.clock.advance(number(at))
            prompt = [at % 7, at % 5, *range(at % 11)]
            slots = cache.allocate(number(4))
            cache.release(slots)
            cache.match_prefix(prompt, request=at)
            cache.insert(prompt, request=at, priority=number(at % 3))
            info = RequestInfo(number(at), number(3), "stop", number(at % 2))
            cache.finish(at, info)
            cache.evict(number(at % 4))
        assert cache.policy == policy
        caches.append(cache)
    plain, other = caches
    assert [repr(node) for node in nodes_of(plain)] == [repr(node) for node in nodes_of(other)]
    assert plain.stats() == other.stats()


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("pool_size", lambda cache: RadixCache(MODEL, 10.5)),  # type: ignore[arg-type] # wrong
        ("page_size", lambda cache: RadixCache(MODEL, 10, "2")),  # type: ignore[arg-type] # wrong
        ("priority", lambda cache: cache.insert([1], priority=0.5)),
        ("output_tokens", lambda cache: cache.finish("a", RequestInfo(output_tokens="7"))),  # type: ignore[arg-type] # wrong
        ("new_tokens", lambda cache: cache.finish("a", RequestInfo(new_tokens=1.0))),  # type: ignore[arg-type] # wrong
        ("priority", lambda cache: cache.finish("a", RequestInfo(priority=None))),  # type: ignore[arg-type] # wrong
        ("num_tokens", lambda cache: cache.evict(2.0)),
    ],
)
def test_fractions_are_refused(what: str, call: Callable[[RadixCache], object]) -> None:
    cache = new()
    cache.match_prefix([1, 2], request="a")
    with pytest.raises(TypeError, match=rf"^{what} is .*: give a whole number$"):
        call(cache)
    assert cache.cached == 0
    cache.finish("a")  # it still runs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finish_reason", ["stop"]),
        ("finish_reason", 3),
        ("session", 17),
        ("tenant", b"acme"),
        ("ending", [1, 2]),
        ("ending", (1, 2, 3, 4, 5)),
        ("ending", (1.5,)),
        ("session_ends", 1),
        ("returns_after", (3,)),
        ("returns_after", True),
        ("returns_after", -1.0),
        ("returns_after", float("nan")),
        ("keep_seconds", "long"),
        ("keep_seconds", float("inf")),
        ("output_tokens", -1),
    ],
)
def test_a_wrong_fact_of_a_request_is_refused_by_name(field: str, value: object) -> None:
    cache = new()
    cache.match_prefix([1, 2], request="a")
    with pytest.raises((TypeError, ValueError), match=rf"^{field} is .*: give "):
        cache.finish("a", RequestInfo(**{field: value}))  # type: ignore[arg-type] # wrong
    assert not cache.stats().fallbacks
    cache.finish("a")  # it still runs


def test_the_callers_arrays_are_neither_kept_nor_changed() -> None:
    cache = new()
    tokens, slots = np.arange(20), np.arange(40, 60)
    cache.insert(tokens, slots)
    tokens += 1
    slots += 1
    found = cache.match_prefix(range(20))
    assert found.matched_len == 20
    assert found.slots.tolist() == list(range(40, 60))


def test_read_only_arrays_are_fine() -> None:
    cache = new()
    tokens, slots = np.arange(20), np.arange(20)
    tokens.flags.writeable = slots.flags.writeable = False
    cache.insert(tokens, slots)
    assert cache.match_prefix(tokens).matched_len == 20
    cache.evict(3)
    check_structure(cache)


@pytest.mark.parametrize(
    "tokens", [[1.0, 2.0], ["a"], "abc", [True, False], [None], np.ones(3), np.array([1 + 0j])]
)
def test_tokens_that_are_no_integers_are_refused(tokens: Any) -> None:
    cache = new()
    for call in (cache.match_prefix, cache.insert):
        with pytest.raises((TypeError, ValueError), match="tokens"):
            call(tokens)
    assert (cache.clock.requests, cache.cached) == (0, 0)


@pytest.mark.parametrize("tokens", [[[1, 2]], np.zeros((2, 2), np.int64), 5, np.int64(3)])
def test_tokens_of_another_shape_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens have shape"):
        new().insert(tokens)


@pytest.mark.parametrize("nothing", [[], (), np.array([], np.int64), range(0)])
def test_no_tokens_match_nothing(nothing: Any) -> None:
    cache = new()
    cache.insert([1, 2])
    found = cache.match_prefix(nothing)
    assert (found.matched_len, found.slots.tolist(), found.slots.dtype) == (0, [], np.int64)
    done = cache.insert(nothing, nothing)
    assert (done.matched_len, done.inserted_len) == (0, 0)
    assert done.duplicates.tolist() == done.unused.tolist() == []
    cache.lock(found.node)
    cache.unlock(found.node)
    check_structure(cache)


def test_negative_and_huge_tokens_are_tokens() -> None:
    cache = new()
    odd = [-1, -(2**63), 2**63 - 1, 0]
    cache.insert(odd)
    assert cache.match_prefix(odd).matched_len == 4
    assert cache.match_prefix([-1, -(2**63), 2**63 - 2]).matched_len == 2


def test_tokens_that_share_bytes_are_different() -> None:
    cache = new()
    cache.insert([256, 0, 1])
    assert cache.match_prefix([1, 0, 0]).matched_len == 0
    assert cache.match_prefix([0, 256]).matched_len == 0


BAD_SLOTS: dict[str, tuple[Any, type[Exception], str]] = {
    "too few": ([50, 51], ValueError, "2 slots for 6 tokens"),
    "too many": (list(range(50, 57)), ValueError, "7 slots for 6 tokens"),
    "none": ([], ValueError, "0 slots for 6 tokens"),
    "over the pool": ([50, 51, 52, 100, 54, 55], ValueError, "slot 100 .* 0 to 99"),
    "negative": ([50, 51, 52, -1, 54, 55], ValueError, "slot -1 .* 0 to 99"),
    "far": ([50, 51, 52, 2**62, 54, 55], ValueError, "slot 4611686018427387904"),
    "cached": ([50, 51, 52, 53, 3, 55], ValueError, "slot 3 is in the cache already"),
    "twice": ([50, 51, 52, 54, 54, 55], ValueError, "slot 54 is named twice"),
    "floats": ([50.0] * 6, TypeError, "slots have type float64"),
    "rows": ([[50, 51, 52], [53, 54, 55]], ValueError, "slots have shape"),
}


@pytest.mark.parametrize("what", BAD_SLOTS)
def test_bad_slots_are_refused_and_nothing_is_cached(what: str) -> None:
    slots, error, said = BAD_SLOTS[what]
    cache = new()
    cache.insert([1, 2, 3, 4], [0, 1, 2, 3])
    held = cache.allocate(4)
    before = cached_slots(cache), cache.free, cache.reserved
    with pytest.raises(error, match=said):
        cache.insert([1, 2, 7, 8, 9, 10], slots)
    assert (cached_slots(cache), cache.free, cache.reserved) == before
    check_structure(cache)
    assert cache.insert([1, 2, 7, 8, 9, 10], [50, 51, 52, 53, 54, 55]).inserted_len == 4
    cache.release(held)
    check_structure(cache)


@pytest.mark.parametrize("slots", [[100], [-1], [50], [0], [2**62]])
def test_slots_that_are_not_reserved_cannot_be_released(slots: list[int]) -> None:
    cache = new()
    cache.insert([1, 2, 3, 4], [0, 1, 2, 3])
    held = cache.allocate(4).tolist()
    with pytest.raises(ValueError, match=f"slot {slots[0]} "):
        cache.release([*held, *slots])
    assert cache.reserved == 4
    cache.release(held)
    cache.release([])
    with pytest.raises(ValueError, match="is free"):
        cache.release(held[:1])
    check_structure(cache)


def test_duplicates_are_the_slots_that_the_cache_left_to_the_caller() -> None:
    cache = new()
    cache.insert(range(6), range(10, 16))
    done = cache.insert(range(9), [10, 11, 12, 50, 51, 52, 60, 61, 62])  # three its own already
    assert (done.matched_len, done.inserted_len) == (6, 3)
    assert done.duplicates.tolist() == [50, 51, 52]
    assert done.unused.tolist() == []
    assert cache.match_prefix(range(9)).slots.tolist() == [*range(10, 16), 60, 61, 62]


def test_a_request_frees_reserved_slots_that_it_did_not_use() -> None:
    cache = new(64, 4)
    cache.insert(range(8))
    slots = cache.allocate(14)
    assert len(slots) == 16
    done = cache.insert(range(14), slots[:14], "r")
    assert (done.matched_len, done.inserted_len) == (8, 4)
    assert done.duplicates.tolist() == slots[:8].tolist()
    assert done.unused.tolist() == slots[12:14].tolist()
    cache.release(done.duplicates)
    cache.release(done.unused)
    cache.release(slots[14:])
    assert (cache.free, cache.reserved, cache.cached) == (52, 0, 12)
    assert len(cache.allocate(52)) == 52
    check_structure(cache)


def test_a_match_does_not_change_with_the_tree() -> None:
    cache = new()
    cache.insert(range(20), range(20))
    found = cache.match_prefix(range(20))
    cache.match_prefix(range(5))
    cache.evict(18)
    assert found.matched_len == 20
    assert found.slots.tolist() == list(range(20))


def test_slots_that_were_handed_out_are_the_callers_to_change() -> None:
    cache = new()
    cache.insert(range(20), range(20))
    for _ in range(2):
        found = cache.match_prefix(range(20))
        found.slots[:] = 0
        assert found.slots.tolist() == list(range(20))
        cache.match_prefix(range(5))  # then over two nodes
    cache.evict(3).slots[:] = 0
    held = cache.allocate(4)
    cache.insert(range(100, 104), held)
    held[:] = 0
    check_structure(cache)
    assert cache.evict(21).freed == 21


def test_pages_are_whole_in_the_pool_too() -> None:
    cache = new(32, 4)
    slots = cache.allocate(5)
    assert len(slots) == 8
    assert all(slots[n] % 4 == 0 for n in (0, 4))
    # A caller that scatters its slots may leave no whole page free, which must not crash.
    cache.release(slots)
    cache.insert(range(8), [0, 4, 8, 12, 16, 20, 24, 28])
    assert cache.free == 24
    assert cache.allocate(4) is None
    assert cache.insert(range(100, 108)).inserted_len == 0
    cache.evict(8)
    assert len(cache.allocate(32)) == 32
    check_structure(cache)


# -- pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
def test_only_whole_pages_are_cached_and_matched(page_size: int) -> None:
    cache = new(640, page_size)
    for length in (page_size - 1, page_size, 2 * page_size + 1, 5 * page_size - 1):
        whole = length // page_size * page_size
        cache.reset()
        done = cache.insert(range(length), range(length))
        assert done.inserted_len == whole
        assert done.unused.tolist() == list(range(whole, length))
        assert cache.match_prefix(range(length)).matched_len == whole
        if whole:
            other = [*range(whole - 1), -5, *range(10)]  # differs in the last token of a page
            assert cache.match_prefix(other).matched_len == whole - page_size
        check_structure(cache)


def test_a_pool_of_part_of_a_page_is_rounded_down() -> None:
    cache = new(35, 4)
    assert (cache.pool_size, cache.free) == (32, 32)
    assert len(cache.allocate(32)) == 32
    assert cache.allocate(1) is None
    with pytest.raises(ValueError, match="0 to 31"):
        cache.release([33])


def test_pages_with_the_same_start_are_siblings() -> None:
    cache = new(64, 4)
    insert_all(cache, ([1, 1, 1, n] for n in range(8)))
    assert [node.depth for node in nodes_of(cache)] == [0] * 8
    assert all(cache.match_prefix([1, 1, 1, n]).matched_len == 4 for n in range(8))


# -- namespaces -------------------------------------------------------------------------------

SPACES = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a", "b"), ("b", "a"), ("ab", "")]


def test_namespaces_never_match_each_other() -> None:
    cache = new(100)
    for n, (extra, salt) in enumerate(SPACES):
        done = cache.insert([1, 2, 3], range(3 * n, 3 * n + 3), extra_key=extra, cache_salt=salt)
        assert (done.matched_len, done.inserted_len) == (0, 3)
    for n, (extra, salt) in enumerate(SPACES):
        found = cache.match_prefix([1, 2, 3], extra_key=extra, cache_salt=salt)
        assert found.slots.tolist() == [3 * n, 3 * n + 1, 3 * n + 2]
    assert cache.match_prefix([1, 2, 3], extra_key="c").matched_len == 0
    check_structure(cache)
    assert cache.evict(24).freed == 24
    assert cache._tree.roots == {}, "one root per salt would grow without end"


def test_namespaces_share_one_order_of_eviction() -> None:
    cache = new(9)
    for salt in ("x", "y", "z"):
        cache.insert([1, 2, 3], cache_salt=salt)
    cache.match_prefix([1, 2, 3], cache_salt="x")
    cache.insert([7, 7, 7], cache_salt="w")
    assert [cache.match_prefix([1, 2, 3], cache_salt=salt).matched_len for salt in "xyz"] == [3, 0, 3]


def test_a_node_of_an_emptied_namespace_still_works() -> None:
    cache = new()
    nothing = cache.match_prefix([1, 2, 3], cache_salt="s")
    cache.lock(nothing.node)
    cache.insert([1, 2, 3], cache_salt="s")
    cache.evict(3)
    cache.insert([1, 2, 4], cache_salt="s")
    cache.unlock(nothing.node)
    assert cache.match_prefix([1, 2, 3], cache_salt="s").matched_len == 2
    check_structure(cache)


# -- locks ------------------------------------------------------------------------------------


def test_locks_protect_the_prefix_and_nothing_else() -> None:
    cache = new()
    insert_all(cache, ([1, 2, 3, 4, 5], [1, 2, 9], [7]))
    held = cache.match_prefix([1, 2, 3])
    cache.lock(held.node)
    assert cache.evictable == 4
    assert cache.evict(100).freed == 4
    assert cache.match_prefix([1, 2, 3, 4, 5]).matched_len == 3
    cache.unlock(held.node)
    assert cache.evictable == 3
    assert cache.evict(100).freed == 3


@pytest.mark.parametrize("locked", [False, True])
def test_an_eviction_spares_the_kept_record_and_its_prefix(locked: bool) -> None:
    cache = new()
    insert_all(cache, ([1, 2, 3, 4, 5], [1, 2, 9], [7], [8, 8]))
    if locked:
        cache.lock(cache.match_prefix([8]).node)
    node = cache.match_prefix([1, 2, 3]).node
    before = cache.evictable
    eviction = cache._pool.evict(100, keep=node)
    cache._collect()
    assert eviction.goal == eviction.freed == before - 3
    assert cache.evictable == 3
    check_structure(cache)
    assert cache.evict(100).freed == 3  # the order has it again


def test_locks_are_counted() -> None:
    cache = new()
    node = cache.insert([1, 2, 3]).node
    for _ in range(3):
        cache.lock(node)
    for left in (2, 1, 0):
        cache.unlock(node)
        assert cache.evictable == (0 if left else 3)
    with pytest.raises(ValueError, match="not locked: unlock as often as you lock"):
        cache.unlock(node)


def test_a_parent_is_not_unlocked_through_its_child() -> None:
    cache = new()
    child = cache.insert([1, 2, 3]).node
    parent = cache.match_prefix([1, 2]).node
    cache.lock(child)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(parent)
    cache.lock(parent)
    cache.unlock(child)
    assert cache.evict(9).freed == 1
    cache.unlock(parent)
    assert cache.evict(9).freed == 2


def test_splits_keep_locks_on_the_locked_prefix() -> None:
    cache = new()
    node = cache.insert([1, 2, 3, 4, 5, 6]).node
    cache.lock(node)
    cache.match_prefix([1, 2])
    cache.insert([1, 2, 3, 4, 9])
    assert (cache.cached, cache.evictable) == (7, 1)
    check_structure(cache)
    assert cache.evict(9).freed == 1
    cache.unlock(node)
    assert cache.evict(9).freed == 6


def test_an_evicted_node_cannot_be_locked() -> None:
    cache = new()
    node = cache.insert([1, 2, 3]).node
    cache.evict(3)
    with pytest.raises(ValueError, match="has been evicted: match its prefix again"):
        cache.lock(node)
    cache.refresh(node)
    cache.unlock(node)
    check_structure(cache)


# -- requests, uses and time ------------------------------------------------------------------


def history(cache: RadixCache) -> list[tuple[int, int, int, int]]:
    """Start, tokens, uses and recency of each node."""
    return [(node.depth, node.tokens, node.uses, node.recency) for node in nodes_of(cache)]


def test_a_use_is_counted_once_per_request_and_node() -> None:
    cache = new()
    cache.match_prefix([1, 2, 3, 4], "r")
    cache.insert([1, 2], request="r")
    cache.insert([1, 2, 3, 4], request="r")  # a prefill in chunks
    cache.match_prefix([1, 2, 3, 4], "r")
    cache.insert([1, 2, 3, 4, 5], request="r")
    cache.finish("r")
    assert [(depth, uses) for depth, _, uses, _ in history(cache)] == [(0, 1), (2, 1), (4, 1)]
    cache.match_prefix([1, 2, 3, 4], "s")
    cache.match_prefix([1, 2, 3, 4], "s")
    assert [(depth, uses) for depth, _, uses, _ in history(cache)] == [(0, 2), (2, 2), (4, 1)]
    cache.match_prefix([1, 2])
    cache.match_prefix([1, 2])  # without a name each call is a separate request
    assert [(depth, uses) for depth, _, uses, _ in history(cache)] == [(0, 4), (2, 2), (4, 1)]


def test_a_name_can_be_reused_after_finish() -> None:
    cache = new()
    cache.insert([1, 2], request="r")
    cache.finish("r")
    cache.match_prefix([1, 2], "r")
    assert history(cache) == [(0, 2, 2, 2)]
    with pytest.raises(ValueError, match="request 'q' is not running"):
        cache.finish("q")
    cache.finish("r")
    with pytest.raises(ValueError, match="finish each request once"):
        cache.finish("r")


def test_a_split_is_not_a_use_and_its_prefix_inherits() -> None:
    cache = new()
    cache.clock.advance(5.0)
    cache.insert([1, 2, 3, 4], priority=3)
    cache.match_prefix([1, 2, 3, 4])
    cache.clock.advance(9.0)
    cache.match_prefix([7, 7])
    cache.match_prefix([1, 2])
    prefix, tail = nodes_of(cache)
    assert (prefix.tokens, prefix.uses, prefix.last_use, prefix.recency) == (2, 3, 9.0, 4)
    assert (tail.tokens, tail.uses, tail.last_use, tail.recency) == (2, 2, 5.0, 2)
    assert (prefix.created, prefix.creator, prefix.priority) == (1, 1, 3)
    assert (tail.created, tail.creator, tail.priority) == (1, 1, 3)
    assert prefix.serial > tail.serial, "the tail keeps its identity"


def test_a_refresh_changes_only_recency() -> None:
    cache = new()
    cache.insert([1, 2, 3, 4])
    cache.insert([1, 2, 9])
    node = cache.match_prefix([1, 2, 3, 4]).node
    cache.match_prefix([5])
    before = [(n.uses, n.last_use, n.created) for n in node.path()]
    requests = cache.clock.requests
    cache.refresh(node)
    assert [(n.uses, n.last_use, n.created) for n in node.path()] == before
    assert [n.recency for n in node.path()] == [5, 5]
    assert (cache.clock.requests, cache.clock.accesses) == (requests, 5)
    assert cache.evict(1).victims[0].recency == 2, "the branch beside it was not refreshed"


def test_the_clock_counts_requests_until_it_gets_seconds() -> None:
    cache = new()
    cache.insert([1])
    cache.insert([2], request="r")
    cache.insert([2, 3], request="r")
    assert (cache.clock.now, cache.clock.requests, cache.clock.accesses) == (2, 2, 3)
    cache.clock.advance(0.5)
    assert cache.clock.now == 0.5
    node = cache.insert([4]).node
    assert (node.last_use, cache.clock.requests) == (0.5, 3)
    cache.clock.advance(0.25)
    assert cache.clock.now == 0.5, "time does not go back"
    cache.clock.advance(7)
    cache.match_prefix([4])
    assert (node.last_use, node.recency) == (7, 5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_clock_that_does_not_tick_is_refused(value: float) -> None:
    cache = new()
    with pytest.raises(ValueError, match="finite"):
        cache.clock.advance(value)
    cache.clock.advance(1.5)
    assert cache.clock.now == 1.5


def test_a_node_has_the_highest_priority_of_its_requests() -> None:
    cache = new()
    cache.insert([1, 2, 3, 4], priority=-5)
    assert [node.priority for node in nodes_of(cache)] == [-5]
    cache.insert([1, 2], priority=-7)
    assert [node.priority for node in nodes_of(cache)] == [-5, -5]
    cache.insert([1, 2])
    assert [node.priority for node in nodes_of(cache)] == [0, -5], "a request without one has 0"
    cache.insert([1, 2, 9], priority=4)
    assert sorted(node.priority for node in nodes_of(cache)) == [-5, 4, 4]
    cache.match_prefix([1, 2, 3, 4], "r")
    cache.finish("r", RequestInfo(priority=6))
    assert sorted(node.priority for node in nodes_of(cache)) == [4, 6, 6]


def test_hits_of_a_request_exclude_its_own_nodes() -> None:
    cache = new()
    cache.insert([1, 2])
    cache.match_prefix([1, 2, 3, 4], "r")
    cache.insert([1, 2, 3], request="r")
    cache.match_prefix([1, 2, 3, 4], "r")
    assert cache._requests["r"].matched == 2


def test_finish_identifies_the_nodes_that_the_request_made() -> None:
    cache = new()
    cache.insert([1, 2])
    cache.match_prefix([1, 2, 3, 4], "r")
    node = cache.insert([1, 2, 3, 4], request="r").node
    running = cache._requests["r"]
    assert (running.end, running.number, running.matched, running.counted) == (node, 2, 2, 4)
    assert [part.creator for part in node.path()] == [1, 2]


# -- requests longer than the pool ------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_longer_than_the_pool_keeps_its_head(page_size: int) -> None:
    cache = new(40, page_size)
    insert_all(cache, ([n] * 8 for n in range(5)))
    done = cache.insert(range(100, 200))
    assert (done.matched_len, done.inserted_len) == (0, 40)
    assert cache.match_prefix(range(100, 200)).matched_len == 40
    again = cache.insert(range(100, 200))
    assert (again.matched_len, again.inserted_len) == (40, 0)
    assert cache.stats().oversized == 2
    check_structure(cache)


def test_a_request_longer_than_the_unlocked_room_keeps_its_head() -> None:
    cache = new(40)
    cache.lock(cache.insert(range(10)).node)
    held = cache.allocate(5)
    done = cache.insert([*range(10), *range(50, 80)])
    assert (done.matched_len, done.inserted_len) == (10, 25)
    assert cache.stats().oversized == 0
    cache.release(held)
    check_structure(cache)


def test_a_long_request_is_counted_once() -> None:
    cache = new(10)
    cache.insert(range(20), request="r")
    cache.insert(range(25), request="r")
    cache.finish("r")
    assert cache.stats().oversized == 1


def test_the_callers_slots_cannot_be_more_than_the_pool() -> None:
    cache = new(10)
    with pytest.raises(ValueError, match="slots"):
        cache.insert(range(20), range(20))
    check_structure(cache)


# -- reset, events, printing ------------------------------------------------------------------


def test_a_reset_frees_cached_slots_and_keeps_reserved_ones() -> None:
    cache = new(50)
    insert_all(cache, (range(10), [*range(5), 99], range(20, 30)))
    held = cache.allocate(7)
    cache.reset()
    assert (cache.cached, cache.reserved, cache.free, cache.stats().nodes) == (0, 7, 43, 0)
    assert cache.match_prefix(range(10)).matched_len == 0
    cache.release(held)
    assert len(cache.allocate(50)) == 50


def test_a_reset_of_locked_prefixes_needs_force() -> None:
    cache = new(50)
    node = cache.insert(range(10)).node
    cache.lock(node)
    cache.lock(node)
    with pytest.raises(ValueError, match=r"10 cached tokens are locked.*force=True"):
        cache.reset()
    assert cache.cached == 10
    cache.reset(force=True)
    cache.insert(range(10))
    assert cache.evictable == 10
    cache.unlock(node)  # ignored
    cache.unlock(node)
    check_structure(cache)
    assert cache.evict(10).freed == 10


def test_running_requests_continue_after_a_reset() -> None:
    cache = new(50)
    cache.insert(range(10), request="r")
    cache.reset()
    node = cache.insert(range(12), request="r").node
    assert (node.uses, node.tokens) == (1, 12)
    cache.finish("r", RequestInfo(priority=2))
    assert node.priority == 2


def test_after_a_reset_a_running_request_counts_its_uses_again() -> None:
    cache = new(50)
    cache.insert(range(10), request="r")
    cache.reset()
    node = cache.insert(range(10), request="s").node
    cache.match_prefix(range(10), "r")
    assert node.uses == 2


def test_a_slot_named_twice_in_a_release_is_freed_once() -> None:
    cache = new(50)
    held = cache.allocate(3).tolist()
    cache.release([*held, *held])
    assert (cache.free, cache.reserved) == (50, 0)
    check_structure(cache)
    assert len(set(cache.allocate(50).tolist())) == 50


def test_events_report_stored_and_removed_pages() -> None:
    cache = new(12, 2)
    events: list[Event] = []
    stop = cache.subscribe(events.append)
    cache.insert([1, 2, 3, 4], extra_key="lora", cache_salt="salt")
    (stored,) = events
    assert isinstance(stored, Stored)
    assert (stored.namespace, stored.parent, stored.page_size) == (("lora", "salt"), None, 2)
    assert stored.tokens.tolist() == [1, 2, 3, 4]
    assert len(stored.hashes) == 2
    cache.match_prefix([1, 2], extra_key="lora", cache_salt="salt")  # a split is not an event
    cache.insert([1, 2, 5, 6], extra_key="lora", cache_salt="salt")
    _, second = events
    assert isinstance(second, Stored)
    assert second.parent == stored.hashes[0]
    cache.evict(2)
    gone = events[2]
    assert isinstance(gone, Removed)
    assert (gone.namespace, gone.hashes) == (("lora", "salt"), stored.hashes[1:])
    cache.reset()
    assert isinstance(events[3], Cleared)
    cache.insert([1, 2, 3, 4])
    last = events[4]
    assert isinstance(last, Stored)
    assert last.hashes[0] != stored.hashes[0], "another namespace, another name"
    stop()
    cache.insert([9, 9])
    assert len(events) == 5


def test_names_of_pages_are_the_same_in_every_cache() -> None:
    told = []
    for page in (1, 2):
        events: list[Any] = []
        cache = new(12, 2, policy="lru" if page == 1 else "lfu")
        cache.subscribe(events.append)
        cache.insert([1, 2, 3, 4])
        told.append(events[0].hashes)
    assert told[0] == told[1]


def test_an_observer_that_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    cache = new()
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("observer is broken")

    def leaves(event: Event) -> None:
        stop[0]()
        raise RuntimeError("and says no goodbye")

    cache.subscribe(broken)
    stop = [cache.subscribe(leaves)]
    cache.subscribe(heard.append)
    cache.insert([1, 2])
    cache.insert([3, 4])
    assert len(heard) == 2
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 2
    check_structure(cache)


def test_the_tree_is_printed_for_people() -> None:
    cache = new(20)
    cache.lock(cache.insert([1, 2, 3, 4], extra_key="lora").node)
    cache.insert([1, 2, 9], extra_key="lora")
    cache.insert([5])
    cache.allocate(2)
    text = cache.pretty()
    assert text.splitlines() == [
        "RadixCache(llama-3-8b, plugin generic, policy lru): 6 cached + 2 reserved + 12 free = 20 slots",
        "lora/-",
        "  [0:2] 1, 2  uses=2 recency=2 locks=1",
        "    [2:4] 3, 4  uses=1 recency=1 locks=1",
        "    [2:3] 9  uses=1 recency=2",
        "-/-",
        "  [0:1] 5  uses=1 recency=3",
    ]
    assert str(cache) == text


def test_stats_count_matches() -> None:
    cache = new(20)
    cache.insert(range(6))
    for tokens in (range(4), range(10), [9], []):
        cache.match_prefix(tokens)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.hit_tokens, stats.asked_tokens) == (2, 2, 10, 15)
    assert (stats.cached, stats.free, stats.reserved, stats.protected, stats.nodes) == (6, 14, 0, 0, 2)
    assert (stats.policy, stats.fallbacks, stats.clamped, stats.oversized) == ("lru", 0, 0, 0)


@pytest.mark.torch
def test_tensors_in_tensors_out() -> None:
    torch = pytest.importorskip("torch")
    cache = new(200)
    done = cache.insert(list(range(100)), torch.arange(100))
    assert done.inserted_len == 100
    found = cache.match_prefix([*range(50), 999])
    assert found.matched_len == 50
    assert torch.equal(found.slots, torch.arange(50))
    again = cache.insert(torch.arange(60), torch.arange(100, 160))
    assert torch.equal(again.duplicates, torch.arange(100, 160))
    assert torch.is_tensor(cache.evict(3).slots)
    assert torch.is_tensor(cache.allocate(3))
    cache.release(cache.allocate(2))
    check_structure(cache)


class Important(KeyedOrder):
    """A key that a higher priority lowers."""

    rises = False

    def key(self, record: NodeRecord) -> tuple[int, int]:
        return (-record.priority, record.recency)


@pytest.mark.parametrize("by", ["insert", "finish"])
def test_a_priority_that_rises_is_heard_of(by: str) -> None:
    cache = cache_with(Important, pool_size=8)
    cache.insert([1, 1], request="a")
    cache.insert([2, 2], request="b", priority=1)
    if by == "insert":
        cache.insert([1, 1], request="a", priority=5)
    else:
        cache.finish("a", RequestInfo(priority=5))
    cache.evict(2)
    assert cache.match_prefix([2, 2]).matched_len == 2
    assert cache.match_prefix([1, 1]).matched_len == 0
    assert cache.stats().fallbacks == 0


def test_a_tombstone_where_there_are_no_states_is_refused() -> None:
    class Stones(LRU):
        def next_victim(self, pool: str) -> Victim | None:
            victim = super().next_victim(pool)
            return victim and victim._replace(action=Action.TOMBSTONE)

    cache = cache_with(Stones, pool_size=8)
    cache.insert([1, 2, 3])
    assert cache.evict(2).freed == 2
    assert cache.stats().fallbacks == 1
