"""Random use of a cache with states, compared with a naive one after every step.

The naive cache is a set of prefixes and a dictionary of states by prefix. It does not choose victims: after
an eviction it takes over what is left, once it has seen that all that went was allowed to go, in the
right order, and that it was enough.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from costcache.model import ModelSpec
from costcache.radix import Node
from costcache.radix.statecache import StateCache

PAGE = 512
MODEL = ModelSpec.preset("qwen3-next")
KV, STATE = 24_576, 77_266_944  # bytes of a token and of a state
POLICIES = ("lru", "lfu", "mru", "consumed-lru", "marconi", "seglen", "hazard")

Prefix = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def tokens_of(prompt: Prefix) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A page of equal tokens for each number."""
    return np.repeat(np.array(prompt, np.int64), PAGE)


def prefix_of(node: Node) -> Prefix:
    pages = b"".join(bytes(part.key) for part in node.path())
    return tuple(np.frombuffer(pages, np.int64)[::PAGE].tolist())


class StateMachine(RuleBasedStateMachine):
    """Calls of a server in any order, on pools of a few pages and states."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        states=st.integers(1, 4),
        pages=st.integers(2, 12),
        joint=st.booleans(),
        merge_from=st.sampled_from([1, 2, 64]),
        merge_alike=st.sampled_from([1, 2, 8]),
    )
    def make(
        self, policy: str, states: int, pages: int, joint: bool, merge_from: int, merge_alike: int
    ) -> None:
        memory = states * STATE + pages * PAGE * KV
        share = None if joint else (states * STATE + 1000) / memory
        self.cache = StateCache(MODEL, memory, PAGE, policy, state_share=share)
        tree = self.cache._tree
        tree.merge_from, tree.merge_alike = merge_from, merge_alike
        self.branches: list[tuple[Prefix, Node]] = []
        self.joint = joint
        self.capacity = {pool.pool: pool.capacity for pool in self.cache.pools}
        self.pages: set[Prefix] = set()
        self.states: dict[Prefix, int] = {}
        self.ends: dict[Prefix, Node] = {}
        self.pins: Counter[Prefix] = Counter()
        self.state_holds: Counter[Prefix] = Counter()
        self.locked: list[tuple[Prefix, Node]] = []
        self.reserved: list[int] = []
        self.slots: list[Any] = []

    # -- the naive cache ---------------------------------------------------------------------

    def usable(self, prompt: Prefix) -> Prefix:
        best: Prefix = ()
        for n in range(1, len(prompt) + 1):
            if prompt[:n] not in self.pages:
                break
            if prompt[:n] in self.states:
                best = prompt[:n]
        return best

    def matched(self, prompt: Prefix) -> Prefix:
        n = 0
        while n < len(prompt) and prompt[: n + 1] in self.pages:
            n += 1
        return prompt[:n]

    def protected(self) -> set[Prefix]:
        return {p[:n] for p, count in self.pins.items() if count for n in range(1, len(p) + 1)}

    def dead(self) -> set[Prefix]:
        """Pages that no state is behind, or at the end of: what no request can use."""
        alive = {p[:n] for p in self.states for n in range(1, len(p) + 1)}
        return self.pages - alive - self.protected()

    def found(self) -> tuple[set[Prefix], dict[Prefix, int]]:
        """What the real cache holds."""
        pages: set[Prefix] = set()
        states: dict[Prefix, int] = {}
        self.ends = {}
        for node in self.cache._tree.walk():
            prefix = prefix_of(node)
            self.ends[prefix] = node
            pages.update(prefix[:n] for n in range(node.depth // PAGE + 1, len(prefix) + 1))
            if node.state is not None:
                states[prefix] = node.state.slot
        return pages, states

    def units(self, pages: int, states: int) -> dict[str, int]:
        if self.joint:
            return {"memory": pages * PAGE * KV + states * STATE}
        return {"kv": pages * PAGE, "state": states}

    def evictable(self) -> dict[str, int]:
        pages = len(self.pages - self.protected())
        return self.units(pages, sum(not self.state_holds[p] for p in self.states))

    def after_eviction(self, kept: Prefix = (), *, of_states: bool = False) -> dict[str, int]:
        """Check what went, take over what is left, and return how much of each pool went."""
        pages, states = self.found()
        gone, gone_states = self.pages - pages, self.states.keys() - states.keys()
        assert pages <= self.pages
        assert states.items() <= self.states.items()
        safe = self.protected() | {kept[:n] for n in range(1, len(kept) + 1)}
        assert not gone & safe, "KV under a lock, or of the request itself, went"
        assert not any(self.state_holds[p] for p in gone_states), "a locked state went"
        for prefix in gone:
            assert not any(p[: len(prefix)] == prefix for p in pages), "KV behind it stays"
        # In a pool of their own states take the KV of their leaf along, whatever else is dead.
        dead_before = self.dead()
        if (gone - dead_before or gone_states) and (self.joint or not of_states):
            left = {p for p in dead_before if p in pages and p not in safe}
            assert not left, "KV that nobody could use outlived what somebody could"
        freed = self.units(len(gone), len(gone_states))
        self.pages, self.states = pages, states
        return freed

    def room(self) -> dict[str, int]:
        used = self.units(
            len(self.pages) + sum(len(s) // PAGE for s in self.slots), len(self.states) + len(self.reserved)
        )
        return {pool: self.capacity[pool] - used[pool] for pool in used}

    # -- what servers do ---------------------------------------------------------------------

    @rule(prompt=prompts)
    def match(self, prompt: Prefix) -> None:
        match = self.cache.match_prefix(tokens_of(prompt))
        usable, reached = self.usable(prompt), self.matched(prompt)
        assert match.matched_len == len(usable) * PAGE, "a match ends at the deepest live state"
        assert match.state == self.states.get(usable)
        assert match.beyond == (len(reached) - len(usable)) * PAGE
        assert len(match.slots) == match.matched_len
        assert (match.branch is None) == (reached == usable)
        if match.branch is not None:
            assert prefix_of(match.branch) == reached
            assert match.branch.state is None

    @rule(prompt=prompts, with_state=st.booleans())
    def insert(self, prompt: Prefix, with_state: bool) -> None:
        state = self.reserved[-1] if with_state and self.reserved else None
        reached = self.matched(prompt)
        room, evictable = self.room(), self.evictable()
        inserted = self.cache.insert(tokens_of(prompt), state=state)
        assert inserted.matched_len == len(reached) * PAGE
        added = inserted.inserted_len // PAGE
        pages, states = self.found()
        end = prompt[: len(reached) + added]
        new = {end[:n] for n in range(len(reached) + 1, len(end) + 1)}
        assert new <= pages
        given = end == prompt and state is not None and end not in self.states
        assert (states.get(end) == state) == given or state is None
        # What went, seen without what came.
        real = self.found
        self.found = lambda: (pages - new, {p: s for p, s in states.items() if p != end or not given})  # type: ignore[method-assign]  # replaced for a while
        try:
            self.after_eviction(reached)
        finally:
            self.found = real  # type: ignore[method-assign]  # replaced for a while
        self.pages, self.states = self.found()
        if given:
            self.reserved.pop()
        if end != prompt:  # all that could go did, and it was not enough
            need = self.units(len(prompt) - len(reached), 0)
            pool = "memory" if self.joint else "kv"
            kept = {reached[:n] for n in range(1, len(reached) + 1)} - self.protected()
            possible = evictable[pool] - self.units(len(kept), 0)[pool] - self.joint * STATE
            assert room[pool] + possible < need[pool] + PAGE * KV * self.joint

    @rule(prompt=prompts)
    def serve(self, prompt: Prefix) -> None:
        """A whole request."""
        self.match(prompt)
        if not self.reserved:
            self.take_state()
        self.insert(prompt, True)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=3, max_size=8), states=st.lists(st.booleans()))
    def grow(self, prompt: list[int], states: list[bool]) -> None:
        """A prompt that grows page by page: a chain of nodes, of which those without a state are merged."""
        for page, _ in enumerate(prompt):
            if page < len(states) and states[page]:
                self.serve(tuple(prompt[: page + 1]))
            else:
                self.insert(tuple(prompt[: page + 1]), False)

    @rule()
    def take_state(self) -> None:
        room, evictable = self.room(), self.evictable()
        slot = self.cache.allocate_state()
        pool, need = ("memory", STATE) if self.joint else ("state", 1)
        freed = self.after_eviction(of_states=True)
        if slot is None:
            assert room[pool] + evictable[pool] < need
            assert not any(freed.values())
        else:
            assert room[pool] + freed[pool] >= need
            if room[pool] >= need:
                assert not any(freed.values())
            self.reserved.append(slot)

    @precondition(lambda self: self.reserved)
    @rule()
    def drop_state(self) -> None:
        self.cache.release_state(self.reserved.pop(0))

    @precondition(lambda self: self.reserved)
    @rule(prompt=prompts)
    def keep_at_the_branch(self, prompt: Prefix) -> None:
        branch = self.cache.match_prefix(tokens_of(prompt)).branch
        if branch is not None:
            self.cache.attach(branch, self.reserved[-1])
            self.states[prefix_of(branch)] = self.reserved.pop()

    @rule(prompt=prompts)
    def note_the_branch(self, prompt: Prefix) -> None:
        branch = self.cache.match_prefix(tokens_of(prompt)).branch
        if branch is not None:
            self.branches.append((prefix_of(branch), branch))

    @precondition(lambda self: self.reserved and self.branches)
    @rule(which=st.integers(0, 9))
    def keep_at_an_earlier_branch(self, which: int) -> None:
        """Its node may have been merged into a longer one since, and that one split elsewhere."""
        prefix, branch = self.branches.pop(which % len(self.branches))
        try:
            self.cache.attach(branch, self.reserved[-1])
        except ValueError as error:
            assert ("evicted" in str(error)) or prefix in self.states  # noqa: PT017 # either is right
            return
        self.states[prefix] = self.reserved.pop()

    @rule(prompt=prompts)
    def fork(self, prompt: Prefix) -> None:
        match = self.cache.match_prefix(tokens_of(prompt))
        if match.state is None:
            return
        usable = self.usable(prompt)
        self.pins[usable] += 1
        self.state_holds[usable] += 1
        pair = self.cache.fork(match.node)
        self.after_eviction(of_states=True)
        self.pins[usable] -= 1
        self.state_holds[usable] -= 1
        assert self.states[usable] == match.state, "what is copied stays"
        if pair is not None:
            assert pair[0] == match.state != pair[1]
            self.reserved.append(pair[1])

    @rule(pages=st.integers(1, 8))
    def take_slots(self, pages: int) -> None:
        room, evictable = self.room(), self.evictable()
        slots = self.cache.allocate(pages * PAGE)
        pool = "memory" if self.joint else "kv"
        need = self.units(pages, 0)[pool]
        freed = self.after_eviction()
        if slots is None:
            assert room[pool] + evictable[pool] < need
        else:
            assert room[pool] + freed[pool] >= need, "never too little"
            self.slots.append(slots)

    @precondition(lambda self: self.slots)
    @rule()
    def drop_slots(self) -> None:
        self.cache.release(self.slots.pop())

    @rule(prompt=prompts, branch=st.booleans())
    def lock(self, prompt: Prefix, branch: bool) -> None:
        match = self.cache.match_prefix(tokens_of(prompt))
        node = match.branch if branch and match.branch is not None else match.node
        if node.parent is not None:
            prefix = prefix_of(node)
            self.cache.lock(node)
            self.pins[prefix] += 1
            self.state_holds[prefix] += 1
            self.locked.append((prefix, node))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 9))
    def unlock(self, which: int) -> None:
        prefix, node = self.locked.pop(which % len(self.locked))
        self.cache.unlock(node)
        self.pins[prefix] -= 1
        self.state_holds[prefix] -= 1

    @rule(pages=st.integers(1, 6))
    def evict(self, pages: int) -> None:
        evictable = self.evictable()
        eviction = self.cache.evict(pages * PAGE)
        freed = self.after_eviction()
        pool = "memory" if self.joint else "kv"
        assert eviction.freed == freed[pool]
        assert min(self.units(pages, 0)[pool], evictable[pool]) <= freed[pool] <= evictable[pool]

    @rule(states=st.integers(1, 3))
    def evict_states(self, states: int) -> None:
        evictable = self.evictable()
        eviction = self.cache.evict_states(states)
        freed = self.after_eviction(of_states=True)
        pool = "memory" if self.joint else "state"
        assert eviction.freed == freed[pool]
        assert min(self.units(0, states)[pool], evictable[pool]) <= freed[pool] <= evictable[pool]

    @precondition(lambda self: not any(self.pins.values()))
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.pages, self.states = set(), {}

    # -- what is always so -------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        pages, states = self.found()
        assert (pages, states) == (self.pages, self.states)
        assert self.cache.stats().fallbacks == 0
        kv, evictable = self.cache._pool, self.evictable()
        assert kv.states == len(states)
        assert kv.pinned_states == sum(self.state_holds[p] > 0 for p in states)
        for pool in self.cache.pools:
            used = self.units(len(pages), len(states))[pool.pool]
            assert pool.free + used + pool.reserved == pool.capacity, "nothing is lost, nothing made up"
            assert pool.free >= 0
            assert pool.evictable == evictable[pool.pool]
        slots = [*states.values(), *self.reserved, *self.cache._free_slots]
        assert len(slots) == len(set(slots)) == self.cache._state_slots
        for prefix, node in self.ends.items():
            above = max((len(p) for p in states if p == prefix[: len(p)] and len(p) < len(prefix)), default=0)
            assert node.replay == (len(prefix) - above) * PAGE
            if node.is_dead:
                assert prefix not in states


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [None, 0.5])
def test_agents_under_pressure_hit_their_last_states(policy: str, share: float | None) -> None:
    # Three conversations take turns; each turn is one page longer, and the memory holds two of them.
    memory = 8 * STATE + 16 * PAGE * KV
    cache = StateCache(MODEL, memory, PAGE, policy, state_share=share)
    hits = 0
    for turn in range(1, 5):
        for who in range(3):
            prompt = tokens_of((who,) * turn)
            hits += cache.match_prefix(prompt[:-1], (who, turn)).matched_len
            state = cache.allocate_state()
            if state is not None:
                done = cache.insert(prompt, request=(who, turn), state=state)
                if done.node.state is None or done.node.state.slot != state:
                    cache.release_state(state)
            cache.finish((who, turn))
    assert cache.reserved_states == 0
    assert cache.stats().fallbacks == 0
    assert hits > 0
    assert math.isfinite(hits)
