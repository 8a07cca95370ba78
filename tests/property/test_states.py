"""States and KV under pressure: every count against a naive one, after every request."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.binding import Binding
from costcache.cost import CostModel
from costcache.deployment import Deployment
from costcache.errors import PluginError, SettingsError
from costcache.eviction import Refused
from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache.policies.hazard.states import HazardStates, reach
from costcache.policies.marconi import Marconi
from costcache.policies.states import ConsumedLRU, StateOrder, make_state_order, state_lru
from costcache.radix.node import Node
from costcache.radix.states import StateTree
from costcache.records import Action, NodeRecord, RequestInfo, Victim
from costcache.settings import Settings

MODEL = ModelSpec.preset("qwen3-next")
KV, STATE = 24_576, 77_266_944
POLICIES = ("lru", "lfu", "consumed-lru", "marconi", "hazard")
PAGE = 1024


def new(policy: str, tokens: int, states: int, *, joint: bool) -> StateTree:
    """A tree with room for so many tokens and states; either's room is everybody's when joint."""
    kv, state = tokens * KV, states * STATE
    made = StateTree(
        Binding.of(MODEL, Deployment(page_size=PAGE), Settings(policy=policy)),
        kv + state,
        state_share=None if joint else state / (kv + state),
        page_bytes=8,
    )
    assert made.capacity >= tokens - PAGE
    return made


def key(pages: list[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") for page in pages)


def check(tree: StateTree) -> None:
    """Counts and flags against the tree itself."""
    pool = tree.pool
    nodes = list(tree.walk())
    assert pool.cached == sum(node.tokens for node in nodes)
    assert pool.states == sum(node.state is not None for node in nodes)
    assert pool.pinned_states == sum(node.state is not None and node.state.locks > 0 for node in nodes)
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
    order = pool.order
    if isinstance(order, HazardStates):
        assert order.learner.lives.keys() <= pool.live.keys()
        for node in nodes:
            life = order.learner.lives.get(node.serial)
            assert (life is not None and not life.evicted) == (node.state is not None)
            if life is not None and node.state is not None and life.superseded and life.stands_for is None:
                assert is_followed(node), "nobody can branch off at it, and a longer state is there"
    assert all(each.free >= 0 for each in tree.pools.values())
    if tree.state_capacity is not None:
        assert pool.states <= tree.state_capacity
        assert pool.cached <= tree.capacity


def is_followed(node: Node) -> bool:
    """Whether the only way on from a node leads to another state, with no branch in between."""
    while len(node.children) == 1:
        (node,) = node.children.values()
        if node.state is not None:
            return True
    return False


class Server:
    """Requests one after the other, some of which keep what they used locked for a while."""

    def __init__(self, tree: StateTree) -> None:
        self.tree = tree
        self.slot = 0
        self.held: list[Node] = []
        self.seen: set[tuple[int, ...]] = set()

    def serve(self, pages: list[int], hold: bool) -> None:
        tree, pool = self.tree, self.tree.pool
        data = key(pages)
        request = pool.begin()
        node = tree.match(tree.root(()), data, request)
        usable = tree.usable(node)
        # No match past a live state.
        assert usable.parent is None or usable.state is not None
        assert tuple(pages[: usable.end // PAGE]) in self.seen or not usable.end
        if usable.end:
            pool.consume(usable)
        reached, end = node.end, len(pages) * PAGE
        branch = 0 < reached < end and node.state is None
        added, states = end - reached, branch + (reached < end or node.state is None)
        got_tokens, got_states = tree.make_room((usable, node) if reached else (), added, states)
        if (got_tokens, got_states) != (added, states):
            # Never under-free: what is missing is nowhere to be had.
            for current in (usable, node):
                pool.pin(current)
            if tree.state_capacity is None:
                assert not pool.evictable
            else:
                assert got_states == states or not tree.pools["state"].evictable
                assert got_tokens == added or not pool.evictable
            for current in (usable, node):
                pool.unpin(current)
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
        if hold and node.parent is not None:
            pool.pin(node)
            self.held.append(node)
        pool.finish(request, RequestInfo(output_tokens=10))

    def _attach(self, node: Node, pages: list[int]) -> None:
        self.slot += 1
        self.tree.attach(node, self.slot)
        self.seen.add(tuple(pages[: node.end // PAGE]))


streams = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=8), st.booleans(), st.booleans(), st.booleans()
    ),
    max_size=40,
)


@given(
    stream=streams,
    policy=st.sampled_from(POLICIES),
    joint=st.booleans(),
    pages=st.integers(4, 20),
    states=st.integers(1, 6),
    merge_from=st.sampled_from([1, 64]),
)
def test_counts_and_matches(
    stream: list[tuple[list[int], bool, bool, bool]],
    policy: str,
    joint: bool,
    pages: int,
    states: int,
    merge_from: int,
) -> None:
    server = Server(new(policy, pages * PAGE, states, joint=joint))
    server.tree.merge_from = server.tree.merge_alike = merge_from
    for prompt, hold, release, grows in stream:
        if release and server.held:
            server.tree.pool.unpin(server.held.pop(0))
        for size in range(1, len(prompt)) if grows else ():  # a chain of nodes, which are merged
            server.serve(prompt[:size], False)
        server.serve(prompt, hold)
        check(server.tree)
        assert not server.tree.pool.fallbacks
    for node in server.held:
        server.tree.pool.unpin(node)
    # Everything can go.
    for pool in server.tree.pools.values():
        evictable = pool.state().evictable
        assert pool.evict(evictable).freed == evictable
        check(server.tree)
    server.tree.pool.evict(1)
    assert not server.tree.pool.fallbacks


ORDERS: dict[str, Callable[[], StateOrder]] = {
    "lru": state_lru,
    "consumed": ConsumedLRU,
    "hazard": lambda: HazardStates(KV, STATE),
}


@pytest.mark.parametrize("make", ORDERS.values(), ids=list(ORDERS))
def test_dead_leaves_go_before_all_others_and_the_oldest_first(make: Callable[[], StateOrder]) -> None:
    made = new("lru", 64 * PAGE, 8, joint=True)
    made.pool.rank_by("it", make())
    server = Server(made)
    server.serve([1, 1], False)
    for first in (2, 3):
        request = made.pool.begin()
        made.match(made.root(()), b"", request)
        made.append(made.root(()), key([first]), None, request)
    server.serve([4], False)
    gone: list[NodeRecord] = []
    while made.pool.live:
        victim = made.pool.next_victim({})
        assert victim is not None
        gone.append(victim.record)
        assert made.pool.take(victim, 1) != Refused.NOT_A_LEAF
    assert [record.serial for record in gone[:2]] == sorted(record.serial for record in gone[:2])
    assert [record.state for record in gone] == [None] * 4


def test_a_tombstone_keeps_what_is_behind_it_and_a_leaf_takes_its_kv_along() -> None:
    made = new("lru", 64 * PAGE, 8, joint=False)
    server = Server(made)
    server.serve([1, 2], False)
    server.serve([1, 2, 3, 4], False)
    inner, leaf = made.walk()
    kv, states = made.pools.values()
    freed: list[int] = []
    made.on_free_state = freed.append
    assert kv.take(Victim(inner, Action.TOMBSTONE), 1) is Refused.NOT_A_LEAF
    assert states.take(Victim(inner), 1) is Refused.NOT_A_LEAF
    assert states.take(Victim(inner, Action.TOMBSTONE), 1) == 1
    assert states.take(Victim(inner, Action.TOMBSTONE), 1) is Refused.NOT_A_LEAF  # no state any more
    assert made.usable(leaf) is leaf
    assert leaf.replay == 4 * PAGE
    kv.pin(leaf)
    assert states.take(Victim(leaf), 1) is Refused.LOCKED
    kv.unpin(leaf)
    assert states.take(Victim(leaf, Action.TOMBSTONE), 1) == 1
    assert len(kv.live) == 1
    assert inner.is_dead
    assert sorted(freed) == [1, 2]


def test_hazard_tells_a_chat_that_has_gone_on_from_a_prompt_that_is_new() -> None:
    """Both have a state that nobody went on from yet, after the same answer; only chats come back."""
    made = new("hazard", 24 * PAGE, 6, joint=False)
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
    tree, states = made, made.pools["state"]
    newest = tree.match(tree.root(()), key([*chat, 1]), tree.pool.begin())
    assert newest.end == len(chat) * PAGE
    assert newest.state is not None
    asked_once = {node.serial for node in tree.walk() if node.state is not None and not node.depth}
    asked_once -= {node.serial for node in tree.walk() if node.children}
    assert len(asked_once) > 1
    while (victim := states.next_victim({})) is not None and victim.record is not newest:
        asked_once.discard(victim.record.serial)
        assert states.take(victim, 1) == 1
    assert victim is not None
    assert not asked_once, "they go first, though younger"


def test_a_state_gets_another_class_when_its_node_gains_or_loses_children() -> None:
    """Children come and go without a use of the state. It is classed anew only then, and as from scratch."""
    made = new("hazard", 40 * PAGE, 12, joint=False)
    order = made.pool.order
    assert isinstance(order, HazardStates)
    server, draw, moved = Server(made), random.Random(3), 0
    learner = order.learner
    for turn in range(400):
        system, chat = draw.randrange(3), draw.randrange(8)
        server.serve([system, 10 + chat, 100 + draw.randrange(3), 1000 + turn][: draw.randint(1, 4)], False)
        before = {serial: life.group for serial, life in learner.lives.items()}
        learner.reclassify(order._known.values())
        after = {serial: life.group for serial, life in learner.lives.items()}
        moved += before != after
        for serial, record in order._known.items():
            learner.classify(record, learner.lives[serial])
        assert after == {serial: life.group for serial, life in learner.lives.items()}
    assert moved > 20


def test_hazard_estimates_a_new_class_when_states_are_ranked_next() -> None:
    """Else the first requests of a server go by the estimate of another class."""
    made = new("hazard", 64 * PAGE, 16, joint=False)
    server = Server(made)
    order = made.pool.order
    assert isinstance(order, HazardStates)
    for turn in range(12):  # a few uses, before which nothing is estimated
        server.serve([99, *range(turn)], False)
    for turns in (1, 2, 3):
        for first in range(2):
            for turn in range(turns, turns + 3):
                server.serve([first, *range(10, 10 + turn)], False)
        made.pools["state"].next_victim({})
        classes = order.snapshot().classes
        assert all(each.shares for each in classes)
        assert len(classes) > turns


def test_states_that_were_never_used_are_evicted_oldest_first() -> None:
    """All that is known of the young ones is that they have not been used yet: they are no worse for that."""
    made = new("hazard", 128 * PAGE, 40, joint=False)
    server = Server(made)
    for number in range(40):
        server.serve([number, 100 + number], False)
    states = made.pools["state"]
    for number in range(40):
        victim = states.next_victim({})
        assert victim is not None
        assert victim.record.created == number + 1
        assert states.take(victim, 1) == 1


def test_a_prompt_that_parts_from_an_evicted_one_is_no_use_of_its_state() -> None:
    """The evicted one's first page came back, and its end did not. It is a use once that does."""
    made = new("hazard", 64 * PAGE, 8, joint=False)
    server = Server(made)
    order = made.pool.order
    assert isinstance(order, HazardStates)
    server.serve([1, 2, 3, 4], False)
    (life,) = order.learner.lives.values()
    (node,) = [node for node in made.walk() if node.state is not None]
    made.pool.take(Victim(node), 4 * PAGE)
    assert not list(made.walk())
    server.serve([1, 2, 5, 6], False)
    assert life.uses == 1
    server.serve([1, 2, 3, 4], False)
    assert life.uses == 2
    assert life in order.learner.lives.values()


def test_the_state_before_an_evicted_one_stands_in_for_it() -> None:
    """It is worth what the evicted one would be, for what it saves itself; before, it was the first to go."""
    made = new("hazard", 64 * PAGE, 8, joint=False)
    server = Server(made)
    order = made.pool.order
    assert isinstance(order, HazardStates)
    server.serve([1], False)
    server.serve([1, 2, 3], False)
    server.serve([1, 2, 3, 4], False)
    server.serve([9], False)
    first, second, third, other = made.walk()
    scores = [order.score(node) for node in (first, second, third, other)]
    assert max(scores[:2]) < 1e-6 * min(scores[2:])
    per_byte = reach(third)[0] / (STATE + reach(third)[1] * KV)
    assert made.pools["state"].take(Victim(third), 1) == 1
    tokens, alone = reach(second)
    expected = scores[2] * (tokens / (STATE + alone * KV) / per_byte) ** 0.5
    assert order.score(second) == pytest.approx(expected)
    assert order.score(first) == scores[0], "it still has a longer one after it"
    server.serve([1, 2, 3, 4, 5], False)
    assert order.score(second) < 1e-6 * scores[3]
    assert not any(each.reused for each in order.snapshot().classes if "superseded" in each.name)


def test_only_orders_that_can_know_states_serve_hybrids() -> None:
    with pytest.raises(PluginError, match=r"'lhd' does not serve model .*: it does not rank state"):
        new("lhd", 64 * PAGE, 8, joint=True)
    made = Marconi(_cost(), 10**9, 1.0, 50)
    assert make_state_order(made) is made
    with pytest.raises(SettingsError, match=r"memory is 1,000 bytes: a page of 1024 tokens takes"):
        StateTree(Binding.of(MODEL, Deployment(page_size=PAGE), Settings()), 1000, page_bytes=8)


def _cost() -> CostModel:
    return get_plugins().match(MODEL).cost(Deployment(page_size=PAGE))


def test_states_belong_to_prefixes_and_there_is_one_at_a_time() -> None:
    made = new("lru", 64 * PAGE, 8, joint=True)
    Server(made).serve([1], False)
    (node,) = made.walk()
    with pytest.raises(ValueError, match="has a state already"):
        made.attach(node, 9)
    with pytest.raises(ValueError, match="is a root"):
        made.attach(made.root(()), 9)
    made.pool.detach(node)
    with pytest.raises(ValueError, match="has no state"):
        made.pool.consume(node)
