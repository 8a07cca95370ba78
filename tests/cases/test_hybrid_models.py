"""What prefix caches of hybrid models got wrong in public: superseded states that push out newest ones.

Each row has its one known input, and a property that covers its whole kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costcache import RequestInfo
from costcache.policies.hazard.snapshot import ClassSnapshot
from costcache.policies.hazard.states import HazardStates
from costcache.radix.statecache import StateCache

PAGE = 64
KV, STATE = 24_576, 77_266_944  # bytes of a token and of a state, of Qwen3-Next


@dataclass
class Server:
    """Serves sessions whose turns grow by whole pages, and keeps states where SGLang keeps them.

    Attributes:
        states: Slots for states.
        pages: Pages of KV, ample by default.
        policy: The policy.
        asked: Tokens of earlier turns that requests repeated.
        found: Those of them that needed no prefill.
    """

    states: int
    pages: int = 20_000
    policy: str = "hazard"
    asked: int = 0
    found: int = 0
    prompts: dict[int, list[int]] = field(default_factory=dict)
    served: int = 0

    def __post_init__(self) -> None:
        memory = self.states * STATE + self.pages * PAGE * KV
        share = (self.states * STATE + 1000) / memory
        self.cache = StateCache("qwen3-next", memory, PAGE, self.policy, state_share=share)

    def turn(self, session: int, pages: int = 1, system: Sequence[int] = ()) -> int:
        """The next turn of a session; returns the tokens it found. ``system`` begins its first prompt."""
        before = self.prompts.get(session)
        prompt = list(system) if before is None else before
        prompt = self.prompts[session] = prompt + [1 + self.served * 10 + page for page in range(pages)]
        found = self.ask(prompt)
        if before is not None:
            self.asked += len(before) * PAGE
            self.found += found
        return found

    def ask(self, prompt: list[int]) -> int:
        """Serve one prompt, given by a number for each page; returns the tokens it found."""
        cache, name = self.cache, self.served
        self.served += 1
        tokens = np.repeat(np.array(prompt, np.int64), PAGE)
        match = cache.match_prefix(tokens[:-1], name)
        used = [node for node in (match.node, match.branch) if node is not None]
        for node in used:
            cache.lock(node)
        if match.branch is not None and (state := cache.allocate_state()) is not None:
            cache.attach(match.branch, state)
        state = cache.allocate_state()
        done = cache.insert(tokens, request=name, state=state)
        if state is not None and (done.node.state is None or done.node.state.slot != state):
            cache.release_state(state)
        for node in used:
            cache.unlock(node)
        cache.finish(name, RequestInfo(output_tokens=100))
        return match.matched_len

    def superseded(self) -> list[ClassSnapshot]:
        """The classes of superseded states."""
        order: Any = self.cache._pool.order
        assert isinstance(order, HazardStates)
        return [each for each in order.snapshot().classes if each.name.endswith("superseded")]


def randomly(turns: Iterable[int], seed: int) -> list[int]:
    """Sessions in random turn; session n has the n-th number of turns."""
    order = [session for session, count in enumerate(turns) for _ in range(count)]
    random.Random(seed).shuffle(order)
    return order


def in_rounds(turns: Sequence[int]) -> list[int]:
    """Sessions one after the other, round by round."""
    return [n for round_ in range(max(turns)) for n, count in enumerate(turns) if round_ < count]


# -- superseded states (sglang 24656): they go before the newest state of any session ------------


@pytest.mark.parametrize("slots", range(13, 25))
@pytest.mark.parametrize("seed", range(3))
def test_every_session_finds_its_newest_state(slots: int, seed: int) -> None:
    server = Server(slots)
    for session in randomly([12] * 12, seed):
        server.turn(session)
    assert server.found == server.asked > 0


def test_lru_does_not_find_them() -> None:
    server = Server(16, policy="lru")
    for session in randomly([12] * 12, 0):
        server.turn(session)
    assert server.found < 0.7 * server.asked


@pytest.mark.parametrize("slots", [10, 13, 16])
def test_one_busy_session_pushes_no_quiet_one_out(slots: int) -> None:
    server = Server(slots)
    for _ in range(12):
        for quiet in range(8):
            server.turn(quiet)
            server.turn(8)
    for quiet in range(8):
        for _ in range(12):
            server.turn(8)
        server.turn(quiet)
    assert server.found == server.asked > 0


@settings(max_examples=60)
@given(
    turns=st.lists(st.integers(1, 14), min_size=1, max_size=14),
    spare=st.integers(1, 6),
    systems=st.integers(0, 3),
    rounds=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_any_sessions_find_their_newest_states_and_their_system_prompts(
    turns: list[int], spare: int, systems: int, rounds: bool, seed: int
) -> None:
    """As long as there are slots for a state of each session and each system prompt, and for one more."""
    rng = random.Random(seed)
    server = Server(len(turns) + systems + spare)
    seen = [0] * systems
    for session in in_rounds(turns) if rounds else randomly(turns, seed):
        pages = rng.randint(1, 4)
        if not systems or session in server.prompts:
            server.turn(session, pages)
            continue
        which = session % systems
        found = server.turn(session, pages, [-1 - which] * 3)
        if seen[which] >= 2:
            assert found == 3 * PAGE, "two prompts have parted after it, so it has a state, which is kept"
        seen[which] += 1
    assert server.found == server.asked
    assert not any(each.reused for each in server.superseded())


# -- falling back to an older state is no use of its class ---------------------------------------


@settings(max_examples=60)
@given(
    turns=st.lists(st.integers(1, 12), min_size=2, max_size=12),
    slots=st.integers(2, 8),
    pages=st.sampled_from([12, 40, 400]),
    seed=st.integers(0, 10_000),
)
def test_falling_back_teaches_nothing_of_superseded_states(
    turns: list[int], slots: int, pages: int, seed: int
) -> None:
    """However short memory is: where no prompt branches off, no superseded state counts a use."""
    server = Server(slots, pages)
    for session in randomly(turns, seed):
        server.turn(session)
    assert not any(each.reused for each in server.superseded())


def test_prompts_that_branch_off_before_the_newest_state_raise_superseded_ones() -> None:
    """The last turn is asked anew, in other words: the state before it is of use, and hazard learns so."""
    server = Server(16)
    late = 0
    for turn in range(12):
        for session in range(6):
            server.turn(session)
            if turn:
                again = server.prompts[session] = [*server.prompts[session][:-1], -1 - server.served]
                found = server.ask(again)
                late += turn > 6 and found == (len(again) - 1) * PAGE
    classes = server.superseded()
    assert sum(each.reused for each in classes) > 6
    assert max(each.worth[0] for each in classes) > 1e-3
    assert late == 30
