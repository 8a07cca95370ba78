"""The steps in which servers make room: against a server that computes token by token, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.sim.steps import Step, Steps


def test_an_unknown_server_makes_room_at_once() -> None:
    assert list(Steps(16).of(32, 100, 20)) == [Step(100, 128, 96)]
    assert Steps(16).most(100, 28) == 128


def test_a_chunk_makes_an_unknown_server_compute_in_steps() -> None:
    assert list(Steps(16, chunk=40).of(32, 100, 29)) == [
        Step(72, 80, 48),
        Step(100, 112, 32),
        Step(100, 128, 16),
        Step(100, 144, 16),
    ]


def test_vllm_takes_blocks_as_it_needs_them() -> None:
    assert list(Steps(16, "vllm", 40).of(32, 100, 30)) == [
        Step(72, 80, 48),
        Step(100, 112, 32),
        Step(100, 128, 16),
        Step(100, 144, 16),
    ]
    assert list(Steps(16, "vllm").of(0, 16, 1)) == [Step(16, 16, 16)]


def test_sglang_wants_a_page_free_besides() -> None:
    assert list(Steps(16, "sglang", 40).of(32, 100, 15)) == [
        Step(64, 64, 48),
        Step(96, 96, 48),
        Step(100, 112, 32),
        Step(100, 128, 16),
        Step(100, 128, 16),
    ]
    # The last token that is computed takes the page, and none wants another.
    assert list(Steps(16, "sglang").of(0, 16, 2)) == [Step(16, 16, 32), Step(16, 32, 16)]
    assert list(Steps(1, "sglang").of(0, 3, 3)) == [Step(3, 3, 3), Step(3, 4, 1), Step(3, 5, 1)]


def pages(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def by_token(server: str, page: int, chunk: int, found: int, prompt: int, output: int) -> list[Any]:
    """What a server asks of its pool, call by call: slots owned after the call, and slots free before it."""
    owned, calls, at = found, [], found
    if server == "sglang" and chunk:
        chunk = max(page, chunk // page * page)
    while at < prompt:
        at = min(prompt, at + (chunk or prompt))
        # SGLang's alloc_paged_token_slots_extend: a page more than the tokens, which is one too many at most.
        free = pages(at, page) - owned + (page if server == "sglang" and page > 1 else 0)
        owned = pages(at, page)
        calls.append((owned, free))
    for token in range(prompt + 1, prompt + output):  # the last one generated is never computed
        new = pages(token, page) - owned
        # Its alloc_paged_token_slots_decode: a page, whether the token needs one or not.
        calls.append((owned + new, page if server == "sglang" and page > 1 else new))
        owned += new
    return calls


def frees(calls: list[Any], found: int) -> list[int]:
    """What a full pool evicts at each call that evicts at all."""
    free, owned, evicted = 0, found, []
    for after, needed in calls:
        if needed > free:
            evicted.append(needed - free)
            free = needed
        free -= after - owned
        owned = after
    return evicted


@given(
    server=st.sampled_from(["sglang", "vllm"]),
    page=st.sampled_from([1, 2, 4, 16]),
    chunk=st.integers(0, 40),
    found=st.integers(0, 3),
    rest=st.integers(1, 70),
    output=st.integers(0, 50),
)
def test_the_steps_evict_as_a_server_does_token_by_token(
    server: str, page: int, chunk: int, found: int, rest: int, output: int
) -> None:
    found, prompt = found * page, found * page + rest
    steps = list(Steps(page, server, chunk).of(found, prompt, output))
    calls = by_token(server, page, chunk, found, prompt, output)
    assert frees([(step.owned, step.free) for step in steps], found) == frees(calls, found)
    assert steps[-1].owned == calls[-1][0]
    assert max(prompt, steps[-1].computed) == prompt
    most = Steps(page, server, chunk).most(prompt, output)
    assert sum(frees(calls, found)) <= most - found <= sum(frees(calls, found)) + page


@pytest.mark.parametrize("server", ["", "sglang", "vllm"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_an_empty_prompt_has_a_step(server: str, chunk: int) -> None:
    assert list(Steps(4, server, chunk).of(0, 0, 0))[-1].computed == 0
