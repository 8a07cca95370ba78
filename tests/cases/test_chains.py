"""Prompts that grow by a token, a node each: in every tree, the chain costs what its tokens cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from costcache import ModelSpec, RadixCache
from costcache.policies.hazard.states import HazardStates
from costcache.radix import Node, StateCache
from costcache.radix.cache import PrefixCache
from costcache.radix.windows import WindowTree
from tests.property.kit import MODEL, manager
from tests.property.test_windows_machine import model_with_window

PLUGINS = manager()
HYBRID = ModelSpec.preset("qwen3-next")
KV, STATE = 24_576, 77_266_944  # bytes of a token and of a state
WINDOW = 128
TOKENS = 4000


def plain(policy: str) -> PrefixCache:
    return RadixCache(MODEL, 2 * TOKENS, 1, policy, plugins=PLUGINS)


def states(policy: str) -> PrefixCache:
    """Room for twenty states."""
    return StateCache(HYBRID, 2 * TOKENS * KV + 20 * STATE, 1, policy)


def windows(policy: str) -> PrefixCache:
    """Room for five windows."""
    return RadixCache(
        model_with_window(WINDOW), 2 * TOKENS, 1, policy, window_pool_size=5 * WINDOW, plugins=PLUGINS
    )


def all_windows(policy: str) -> PrefixCache:
    """Room for the windows of all tokens."""
    return RadixCache(
        model_with_window(WINDOW), 2 * TOKENS, 1, policy, window_pool_size=2 * TOKENS, plugins=PLUGINS
    )


TREES: list[Callable[[str], PrefixCache]] = [plain, states, windows, all_windows]


class Bill:
    """Serves prompts that grow by a token each, and counts what they cost.

    Attributes:
        walked: Nodes that walks have passed.
        most: Nodes of the longest walk.
        copied: Tokens whose slots were copied into a longer node.
        found: Tokens that matched.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.walked = self.most = self.copied = self.found = 0
        self._slots: dict[int, Any] = {}

    def serve(self, prompts: int) -> None:
        tokens = list(range(prompts))
        for n in range(1, prompts + 1):
            self._serve(tokens[:n], n)

    def _serve(self, prompt: list[int], n: int) -> None:
        cache = self.cache
        self.found += cache.match_prefix(prompt[:-1], n).matched_len
        if isinstance(cache, StateCache):
            state = cache.allocate_state()
            done = cache.insert(prompt, request=n, state=state)
            if state is not None and (done.node.state is None or done.node.state.slot != state):
                cache.release_state(state)
        else:
            done = cache.insert(prompt, request=n)
        assert done.matched_len + done.inserted_len == n
        cache.finish(n)
        self._count(done.node)

    def _count(self, node: Node) -> None:
        path = node.path()
        self.walked += len(path)
        self.most = max(self.most, len(path))
        slots = {id(part.slots): part.slots for part in path if part.slots is not None}
        self.copied += sum(each.size for name, each in slots.items() if name not in self._slots)
        self._slots = slots  # kept, so that no other array gets the same id


@pytest.mark.parametrize("make", TREES)
def test_a_prompt_of_thousands_of_requests_costs_what_its_tokens_cost(
    make: Callable[[str], PrefixCache],
) -> None:
    bill = Bill(make("lru"))
    bill.serve(TOKENS)
    assert bill.most < TOKENS / 16
    assert len(list(bill.cache._tree.walk())) < TOKENS / 20
    # The prompts have TOKENS ** 2 / 2 tokens together, and without merging walks would pass as many nodes.
    assert bill.walked < 128 * TOKENS
    assert bill.copied < 16 * TOKENS
    assert bill.found == TOKENS * (TOKENS - 1) // 2
    assert bill.cache.policy == "lru"


@pytest.mark.parametrize("policy", ["hazard", "lfu", "consumed-lru", "marconi", "seglen"])
def test_every_policy_of_states_takes_it(policy: str) -> None:
    cache = states(policy)
    bill = Bill(cache)
    bill.serve(600)
    assert len(list(cache._tree.walk())) < 150
    assert cache.policy == policy
    assert isinstance(cache, StateCache)
    kept = cache.states
    assert sum(node.state is not None for node in cache._tree.walk()) == kept > 5
    order = cache._pool.order
    if isinstance(order, HazardStates):
        assert order.learner.lives.keys() <= cache._pool.live.keys()


@pytest.mark.parametrize("policy", ["hazard", "lfu", "lhd", "tlru", "s3fifo", "gdsf", "wild", "lru2"])
@pytest.mark.parametrize("make", [plain, windows])
def test_every_policy_of_tokens_takes_it(make: Callable[[str], PrefixCache], policy: str) -> None:
    cache = make(policy)
    bill = Bill(cache)
    bill.serve(600)
    assert len(list(cache._tree.walk())) < 200
    assert cache.policy == policy
    tree = cache._tree
    if isinstance(tree, WindowTree):
        assert not tree.windows.fell_back
        assert all(node.tokens <= WINDOW for node in tree.walk() if node.window is not None)
    assert cache.evict(300).freed >= 300
    assert not cache.stats().fallbacks


def test_locked_windows_are_merged_and_unlocked_as_one() -> None:
    cache = RadixCache(model_with_window(8), 100, 1, "lru", window_pool_size=60, plugins=PLUGINS)
    tree = cache._tree
    assert isinstance(tree, WindowTree)
    tree.merge_from = tree.merge_alike = 1
    cache.insert([1, 2])
    held = cache.insert([1, 2, 3, 4]).node
    cache.lock(held)
    pool = tree.windows
    assert (pool.pinned, pool.root.locks) == (4, 2)
    cache.insert([1, 2, 3, 4, 5])
    assert held.tokens == 4
    assert (pool.pinned, pool.root.locks) == (4, 1)
    cache.unlock(held)
    assert (pool.pinned, pool.root.locks) == (0, 0)
    assert cache.evict(5).freed == 5


def test_tlru_evicts_of_a_merged_node_what_it_would_of_its_parts() -> None:
    """The last 100 tokens of a prompt are not needed; then the prompt that was used least recently goes."""
    cache = RadixCache(MODEL, 2 * TOKENS, 1, "tlru", plugins=PLUGINS, policy_settings={"threshold": 100})
    cache._tree.merge_from = cache._tree.merge_alike = 1
    cache.insert([-1] * 300)
    Bill(cache).serve(500)
    assert max(node.tokens for node in cache._tree.walk()) > 400
    cache.evict(150)
    assert cache.match_prefix(list(range(500))).matched_len == 400
    assert cache.match_prefix([-1] * 300).matched_len == 250


def test_a_state_is_kept_at_the_end_that_its_node_had() -> None:
    """The node has been merged into a longer one since, from whose state nothing shorter can resume."""
    cache = states("lru")
    assert isinstance(cache, StateCache)
    cache._tree.merge_from = cache._tree.merge_alike = 1
    short = cache.insert([1, 2]).node
    state = cache.allocate_state()
    cache.insert([1, 2, 3, 4], state=state)
    assert cache.match_prefix([1, 2, 3, 4, 5]).matched_len == 4
    assert short.into is not None
    with pytest.raises(ValueError, match="has no state"):
        cache.fork(short)
    cache.lock(short)
    assert cache.stats().protected == 2
    other = cache.allocate_state()
    assert other is not None
    cache.attach(short, other)
    cache.unlock(short)
    assert cache.stats().protected == 0
    assert (cache.match_prefix([1, 2, 9]).state, cache.match_prefix([1, 2, 3, 4]).state) == (other, state)
