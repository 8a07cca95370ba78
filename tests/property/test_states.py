"""States and KV under pressure: every count against a naive one, after every request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.cost import CostModel
from costcache.deployment import Deployment
from costcache.errors import PluginError, SettingsError
from costcache.eviction import LOCKED, NOT_A_LEAF
from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache.policies.hazard_states import HazardStates, reach
from costcache.policies.marconi import Marconi
from costcache.policies.states import ConsumedLRU, StateOrder, make_state_order, state_lru
from costcache.radix.hybrid import HybridStore
from costcache.radix.node import Node
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim
from costcache.settings import Settings

MODEL = ModelSpec.preset("qwen3-next")
KV, STATE = 24_576, 77_266_944
POLICIES = ("lru", "lfu", "consumed-lru", "marconi", "hazard")
PAGE = 1024


def store(policy: str, tokens: int, states: int, *, joint: bool) -> HybridStore:
    """A store with room for so many tokens and states; either's room is everybody's when joint."""
    kv, state = tokens * KV, states * STATE
    made = HybridStore(
        MODEL,
        kv + state,
        Settings(policy=policy),
        Deployment(page_size=PAGE),
        state_share=None if joint else state / (kv + state),
        page_bytes=8,
    )
    assert made.capacity >= tokens - PAGE
    return made


def key(pages: list[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") for page in pages)


def check(store: HybridStore) -> None:
    """Counts and flags against the tree itself."""
    tree = store.tree
    nodes = list(tree.walk())
    assert tree.cached == sum(node.tokens for node in nodes)
    assert tree.states == sum(node.state is not None for node in nodes)
    assert tree.protected_states == sum(node.state is not None and node.state.locks > 0 for node in nodes)
    for node in nodes:
        assert node.live_children == len(node.children)
        assert node.is_dead == (node.state is None and not node.children)
        above, ancestors = node.parent, []
        while above is not None:
            ancestors.append(above)
            above = above.parent
        live = next((a.end for a in ancestors if a.state is not None), 0)
        assert node.replay == node.end - live
        assert reach(node)[0] == node.replay
    assert store._free_bytes >= 0
    if store.state_capacity is not None:
        assert tree.states <= store.state_capacity
        assert tree.cached <= store.capacity


class Server:
    """Requests one after the other, some of which keep what they used locked for a while."""

    def __init__(self, store: HybridStore) -> None:
        self.store = store
        self.slot = 0
        self.held: list[Node] = []
        self.seen: set[tuple[int, ...]] = set()

    def serve(self, pages: list[int], hold: bool) -> None:
        store, tree = self.store, self.store.tree
        data = key(pages)
        request = RequestRecord(tree.clock.begin(), tree.clock.now)
        node = tree.match(tree.root(()), data, request)
        usable = tree.usable(node)
        # No match past a live state.
        assert usable.parent is None or usable.state is not None
        assert tuple(pages[: usable.end // PAGE]) in self.seen or not usable.end
        if usable.end:
            tree.consume(usable)
        reached, end = node.end, len(pages) * PAGE
        branch = 0 < reached < end and node.state is None
        added, states = end - reached, branch + (reached < end or node.state is None)
        before = tree.evictable, tree.evictable_states
        got_tokens, got_states = store.make_room((usable, node) if reached else (), added, states)
        if (got_tokens, got_states) != (added, states):
            # Never under-free: what is missing is nowhere to be had.
            for current in (usable, node):
                tree.lock(current)
            if store.state_capacity is None:
                assert not tree.evictable
                assert not tree.evictable_states
            else:
                assert got_states == states or not tree.evictable_states
                assert got_tokens == added or not tree.evictable
            for current in (usable, node):
                tree.unlock(current)
            assert before is not None
        if branch and got_states:
            got_states -= 1
            self._attach(node, pages)
        if got_states and (got_tokens or reached == end):
            if got_tokens:
                node = tree.append(
                    node, data[reached // PAGE * 8 : (reached + got_tokens) // PAGE * 8], None, request
                )
            self._attach(node, pages)
        elif got_tokens:
            node = tree.append(
                node, data[reached // PAGE * 8 : (reached + got_tokens) // PAGE * 8], None, request
            )
        tree.freed_states.clear()
        if hold and node.parent is not None:
            tree.lock(node)
            self.held.append(node)
        if store.guard.finish is not None:
            store.guard.finish(request, RequestInfo(output_tokens=10))

    def _attach(self, node: Node, pages: list[int]) -> None:
        self.slot += 1
        self.store.tree.attach(node, self.slot)
        self.seen.add(tuple(pages[: node.end // PAGE]))


streams = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.booleans(), st.booleans()), max_size=40
)


@given(
    stream=streams,
    policy=st.sampled_from(POLICIES),
    joint=st.booleans(),
    pages=st.integers(4, 20),
    states=st.integers(1, 6),
)
def test_counts_and_matches(
    stream: list[tuple[list[int], bool, bool]], policy: str, joint: bool, pages: int, states: int
) -> None:
    server = Server(store(policy, pages * PAGE, states, joint=joint))
    for prompt, hold, release in stream:
        if release and server.held:
            server.store.tree.unlock(server.held.pop(0))
        server.serve(prompt, hold)
        check(server.store)
        assert server.store.guard.fallbacks == 0
    for node in server.held:
        server.store.tree.unlock(node)
    # Everything can go.
    for name, pipeline in server.store.pipelines.items():
        state = server.store.pool_state(name)
        assert pipeline.evict(state.evictable).freed == state.evictable
        check(server.store)
    server.store.pipelines[server.store.pool_names[0]].evict(1)
    assert server.store.guard.fallbacks == 0


ORDERS: dict[str, Callable[[], StateOrder]] = {
    "lru": state_lru,
    "consumed": ConsumedLRU,
    "hazard": lambda: HazardStates(KV, STATE),
}


@pytest.mark.parametrize("make", ORDERS.values(), ids=list(ORDERS))
def test_dead_leaves_go_before_all_others_and_the_oldest_first(make: Callable[[], StateOrder]) -> None:
    made = store("lru", 64 * PAGE, 8, joint=True)
    made.use("it", make())
    server = Server(made)
    server.serve([1, 1], False)
    for first in (2, 3):
        request = RequestRecord(made.tree.clock.begin(), 0)
        made.tree.match(made.tree.root(()), b"", request)
        made.tree.append(made.tree.root(()), key([first]), None, request)
    server.serve([4], False)
    gone: list[NodeRecord] = []
    while made.tree.nodes:
        victim = made.guard.next_victim("memory")
        assert victim is not None
        gone.append(victim.record)
        assert made.take_from("memory", victim) > 0
    assert [record.serial for record in gone[:2]] == sorted(record.serial for record in gone[:2])
    assert [record.state for record in gone] == [None] * 4


def test_a_tombstone_keeps_what_is_behind_it_and_a_leaf_takes_its_kv_along() -> None:
    made = store("lru", 64 * PAGE, 8, joint=False)
    server = Server(made)
    server.serve([1, 2], False)
    server.serve([1, 2, 3, 4], False)
    inner, leaf = made.tree.records()
    assert made.take_from("kv", Victim(inner, Action.TOMBSTONE)) == NOT_A_LEAF
    assert made.take_from("state", Victim(inner)) == NOT_A_LEAF
    assert made.take_from("state", Victim(inner, Action.TOMBSTONE)) == 1
    assert made.take_from("state", Victim(inner, Action.TOMBSTONE)) == NOT_A_LEAF  # no state any more
    assert made.tree.usable(leaf) is leaf
    assert leaf.replay == 4 * PAGE
    made.tree.lock(leaf)
    assert made.take_from("state", Victim(leaf)) == LOCKED
    made.tree.unlock(leaf)
    assert made.take_from("state", Victim(leaf, Action.TOMBSTONE)) == 1
    assert made.tree.nodes == 1
    assert inner.is_dead
    assert sorted(made.tree.freed_states) == [1, 2]


def test_hazard_tells_a_chat_that_has_gone_on_from_a_prompt_that_is_new() -> None:
    """Both have a state that nobody went on from yet, after the same answer; only chats come back."""
    made = store("hazard", 24 * PAGE, 6, joint=False)
    server = Server(made)
    chat: list[int] = []
    for turn in range(198):  # in the middle of a chat
        if turn % 5 == 0:
            chat = [1000 + turn]
        chat = [*chat, 2000 + turn]
        server.serve(chat, False)
        server.serve([10_000 + 2 * turn, 10_001 + 2 * turn], False)
    # The chat's next turn is due, and younger prompts wait beside it.
    for late in range(2):
        server.serve([20_000 + late, 30_000], False)
    tree = made.tree
    newest = tree.match(tree.root(()), key([*chat, 1]), RequestRecord(tree.clock.begin(), tree.clock.now))
    assert newest.end == len(chat) * PAGE
    assert newest.state is not None
    asked_once = {node.serial for node in tree.records() if node.state is not None and not node.depth}
    asked_once -= {node.serial for node in tree.records() if node.children}
    assert len(asked_once) > 1
    while (victim := made.guard.next_victim("state")) is not None and victim.record is not newest:
        asked_once.discard(victim.record.serial)
        assert made.take_from("state", victim) == 1
    assert victim is not None
    assert not asked_once, "they go first, though younger"


def test_hazard_estimates_a_new_class_when_states_are_ranked_next() -> None:
    """Else the first requests of a server go by the estimate of another class."""
    made = store("hazard", 64 * PAGE, 16, joint=False)
    server = Server(made)
    order = made.guard.order
    assert isinstance(order, HazardStates)
    for turns in (1, 2, 3):
        for first in range(2):
            for turn in range(turns, turns + 3):
                server.serve([first, *range(10, 10 + turn)], False)
        made.guard.next_victim("state")
        assert order._shares is not None
        assert len(order._shares) == len(order._classes) > turns


def test_only_orders_that_can_know_states_serve_hybrids() -> None:
    with pytest.raises(PluginError, match=r"'lhd' does not serve model .*: it does not rank state"):
        store("lhd", 64 * PAGE, 8, joint=True)
    made = Marconi(_cost(), 10**9, 1.0, 50)
    assert make_state_order(made) is made
    with pytest.raises(SettingsError, match=r"memory is 1,000 bytes: a page of 1024 tokens takes"):
        HybridStore(MODEL, 1000, Settings(), Deployment(page_size=PAGE), page_bytes=8)


def _cost() -> CostModel:
    return get_plugins().match(MODEL).cost(Deployment(page_size=PAGE))


def test_states_belong_to_prefixes_and_there_is_one_at_a_time() -> None:
    made = store("lru", 64 * PAGE, 8, joint=True)
    Server(made).serve([1], False)
    (node,) = made.tree.records()
    with pytest.raises(ValueError, match="has a state already"):
        made.tree.attach(node, 9)
    with pytest.raises(ValueError, match="is a root"):
        made.tree.attach(made.tree.root(()), 9)
    made.tree.detach(node)
    for act in (made.tree.detach, made.tree.consume):
        with pytest.raises(ValueError, match="has no state"):
            act(node)
