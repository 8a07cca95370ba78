"""The cache for models with states, by example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costcache import RequestInfo
from costcache.errors import PluginError, SettingsError
from costcache.model import ModelSpec
from costcache.radix import Node
from costcache.radix.statecache import StateCache

PAGE = 512
KV, STATE = 24_576, 77_266_944  # bytes of a token and of a state of qwen3-next


def cache_of(states: int, pages: int, policy: str = "lru", *, joint: bool = False, **more: Any) -> StateCache:
    memory = states * STATE + pages * PAGE * KV
    share = None if joint else (states * STATE + 1000) / memory
    return StateCache("qwen3-next", memory, PAGE, policy, state_share=share, **more)


def prompt(*pages: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.repeat(np.array(pages, np.int64), PAGE)


def serve(cache: StateCache, *pages: int) -> int:
    """A whole request: match, run the rest, leave a state at the end. Returns the tokens found."""
    found = cache.match_prefix(prompt(*pages)).matched_len
    state = cache.allocate_state()
    assert state is not None
    node = cache.insert(prompt(*pages), state=state).node
    if slot_of(node) != state:
        cache.release_state(state)
    return found


def slot_of(node: Node) -> int | None:
    return None if node.state is None else node.state.slot


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
@pytest.mark.parametrize("joint", [False, True])
def test_numbers_may_be_of_any_kind(kind: Any, joint: bool) -> None:
    cache = cache_of(4, 8, "hazard", joint=joint)
    for page in range(12):
        slots = cache.allocate(kind(PAGE))
        state = cache.allocate_state()
        assert state is not None
        cache.insert(prompt(page), slots, state=kind(state), priority=kind(page))
    assert cache.policy == "hazard"
    before = cache.cached
    assert cache.evict(kind(PAGE)).freed > 0
    assert cache.cached < before
    assert cache.evict_states(kind(1)).freed > 0
    held = cache.allocate_state()
    assert held is not None
    cache.release_state(kind(held))


def test_a_prefix_is_worth_nothing_past_its_last_state() -> None:
    cache = cache_of(4, 20)
    serve(cache, 1, 2)
    cache.insert(prompt(1, 2, 3, 4))  # no state after it
    match = cache.match_prefix(prompt(1, 2, 3, 4, 5))
    assert (match.matched_len, match.beyond, match.state) == (2 * PAGE, 2 * PAGE, slot_of(match.node))
    assert len(match.slots) == 2 * PAGE
    assert match.branch is not None
    assert match.branch.end == 4 * PAGE


def test_where_two_prompts_part_a_state_helps_the_third() -> None:
    cache = cache_of(4, 20)
    serve(cache, 1, 2, 3)
    match = cache.match_prefix(prompt(1, 2, 4))
    assert (match.matched_len, match.state, match.beyond) == (0, None, 2 * PAGE)
    assert match.branch is not None
    state = cache.allocate_state()
    assert state is not None
    cache.attach(match.branch, state)
    assert cache.match_prefix(prompt(1, 2, 5)).matched_len == 2 * PAGE


def test_the_same_prompt_again_finds_its_state_and_one_page_less_finds_none() -> None:
    cache = cache_of(4, 20)
    assert serve(cache, 1, 2, 3) == 0
    assert [serve(cache, 1, 2, 3) for _ in range(4)] == [3 * PAGE] * 4
    assert cache.states == 1
    assert (
        cache.match_prefix(prompt(1, 2, 3)[:-1]).matched_len == 0
    )  # nothing was kept at its last page but one


def test_a_state_evicted_alone_leaves_a_tombstone() -> None:
    cache = cache_of(2, 20)
    serve(cache, 1, 2)
    serve(cache, 1, 2, 3)
    cache.match_prefix(prompt(1, 2, 3))
    eviction = cache.evict_states(1)
    assert eviction.freed == 1
    # LRU: both were used by the last request; the older node's is evicted first, and its KV still serves the
    # other.
    assert cache.match_prefix(prompt(1, 2)).matched_len == 0
    assert cache.match_prefix(prompt(1, 2, 3)).matched_len == 3 * PAGE
    assert cache.cached == 3 * PAGE


def test_a_leaf_with_a_state_is_never_trimmed() -> None:
    cache = cache_of(2, 20)
    serve(cache, *range(10))
    assert cache.evict(1).freed == 10 * PAGE
    assert (cache.cached, cache.states) == (0, 0)


def test_dead_kv_is_evicted_first_however_recent() -> None:
    cache = cache_of(4, 20, joint=True)
    serve(cache, 1, 2)
    cache.insert(prompt(7, 8))
    assert cache.evict(PAGE).freed == 2 * PAGE * KV
    assert cache.match_prefix(prompt(1, 2)).matched_len == 2 * PAGE
    assert cache.match_prefix(prompt(7, 8)).beyond == 0


@pytest.mark.parametrize("policy", ["lru", "mru", "consumed-lru", "marconi"])
def test_a_state_being_copied_is_not_evicted(policy: str) -> None:
    cache = cache_of(2, 20, policy)
    serve(cache, 1)
    serve(cache, 2)
    match = cache.match_prefix(prompt(2))  # under mru, the first to go
    pair = cache.fork(match.node)
    assert pair is not None
    assert pair[0] == match.state != pair[1]
    assert cache.match_prefix(prompt(2)).state == match.state
    assert cache.match_prefix(prompt(1)).matched_len == 0
    cache.release_state(pair[1])


def test_a_lock_protects_one_state_and_the_kv_before_it() -> None:
    cache = cache_of(3, 20)
    serve(cache, 1)
    serve(cache, 1, 2)
    serve(cache, 1, 2, 3)
    node = cache.match_prefix(prompt(1, 2, 3)).node
    cache.lock(node)
    assert cache.evict_states(3).freed == 2
    assert cache.evict(PAGE).freed == 0
    assert cache.match_prefix(prompt(1, 2, 3)).matched_len == 3 * PAGE
    cache.unlock(node)
    assert cache.evict_states(3).freed == 1


def test_running_requests_reserve_states() -> None:
    # 30 slots, and 6 requests that reserve 3 each: 12 are left for the cache.
    cache = cache_of(30, 200)
    held = [cache.allocate_state() for _ in range(18)]
    assert None not in held
    for number in range(40):
        state = cache.allocate_state()
        assert state is not None
        cache.insert(prompt(number), state=state)
    assert (cache.states, cache.reserved_states) == (12, 18)
    assert sum(cache.match_prefix(prompt(n)).matched_len > 0 for n in range(40)) == 12
    for state in held:
        assert state is not None
        cache.release_state(state)
    cache.reset()
    assert (cache.states, cache.reserved_states, cache.cached) == (0, 0, 0)
    assert all(cache.allocate_state() is not None for _ in range(30))
    assert cache.allocate_state() is None


def test_an_unneeded_state_stays_the_callers() -> None:
    cache = cache_of(3, 20)
    serve(cache, 1)
    state = cache.allocate_state()
    assert state is not None
    assert slot_of(cache.insert(prompt(1), state=state).node) != state
    assert cache.reserved_states == 1
    cache.release_state(state)


def test_one_pool_of_bytes_trades_states_for_tokens() -> None:
    cache = cache_of(1, 13, joint=True)  # 13 pages take a little more than two states
    assert [pool.unit for pool in cache.pools] == ["bytes"]
    for number in range(3):
        serve(cache, number)
    assert cache.states == 2
    slots = cache.allocate(12 * PAGE)
    assert slots is not None
    assert cache.states <= 1
    cache.release(slots)
    assert cache.pools[0].reserved == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.insert(prompt(1)[:-1], state=c.allocate_state()),
            "is one of 511 tokens, not whole pages",
        ),
        (lambda c: c.insert(prompt(1), state=99), "state slot 99 is not in the pool"),
        (lambda c: c.release_state(0), "state slot 0 is in the cache or free"),
        (lambda c: c.fork(c.match_prefix(prompt(1)).node), "has no state"),
        (lambda c: c.attach(c.match_prefix(prompt(1)).node, c.allocate_state()), "is a root"),
    ],
)
def test_misuse_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(cache_of(2, 20))


def test_two_states_at_one_node_are_refused() -> None:
    cache = cache_of(2, 20)
    serve(cache, 1)
    node = cache.match_prefix(prompt(1)).node
    state = cache.allocate_state()
    assert state is not None
    with pytest.raises(ValueError, match="has a state already"):
        cache.attach(node, state)
    cache.release_state(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "llama-3-8b", "memory": 10**9}, "keeps no states: use RadixCache"),
        ({"model": "qwen3-next", "memory": 10**6}, "a page of 512 tokens takes"),
        ({"model": "qwen3-next", "memory": 10**10, "state_share": 1.5}, "state_share is 1.5"),
        ({"model": "qwen3-next", "memory": 10**10, "headrom": 0.1}, "headrom"),
    ],
)
def test_wrong_settings_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        StateCache(page_size=PAGE, **arguments)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(PluginError, match="no policy 'lruu'"):
        StateCache(ModelSpec.preset("qwen3-next"), 10**10, PAGE, "lruu")


def ask(cache: StateCache, *pages: int) -> None:
    """A whole request that ends, so that the policy learns of it."""
    name = object()
    cache.match_prefix(prompt(*pages), name)
    state = cache.allocate_state()
    assert state is not None
    node = cache.insert(prompt(*pages), state=state, request=name).node
    if slot_of(node) != state:
        cache.release_state(state)
    cache.finish(name, RequestInfo())


def test_hazard_forecasts_which_states_are_resumed_from() -> None:
    """Prompts that return every few requests, and prompts that never do."""
    cache = cache_of(30, 200, "hazard")
    for number in range(200):
        ask(cache, 1, number % 5)
        ask(cache, 2, 1000 + number)
    pool = cache._tree.pool
    assert pool.order.forecasts
    states = [record for record in pool.live.values() if record.state is not None]
    again = [pool.reuse_chance(record) for record in states if record.uses > 3 and not record.live_children]
    once = [pool.reuse_chance(record) for record in states if record.uses == 1]
    assert again
    assert once
    assert min(again) > 0.5 > max(once)
    for record in states:
        chances = [pool.reuse_chance(record, within) for within in (0.0, 1.0, 10.0, 100.0)]
        assert chances[0] == 0.0
        assert chances == sorted(chances)
    ghosts = [name for name, ghost in pool.order._ghosts.items() if ghost[1] is not None]  # type: ignore[attr-defined]  # hazard's
    assert ghosts
    assert all(0.0 <= (pool.order.ghost_chance(name) or 0.0) <= 0.5 for name in ghosts)
    assert pool.order.ghost_chance(-1) is None
