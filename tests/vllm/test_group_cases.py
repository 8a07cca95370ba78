"""Failures reported against vLLM's one free list for all KV cache groups: rebuilt, stock beside ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.ends import SIZE, chunked, full, mixed, states, window
from tests.vllm.serving import Server, bind

WORDS = 50_000


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(WORDS) for _ in range(count)]


def seats(manager: Any, policy: str | None, count: int, *, rounds: int = 4, head: int = 2624) -> float:
    """Sessions in turn, each with its own long prefix and a new short end: % found after the first round.

    vLLM 48435, at an eighth of its lengths: one group of full attention and five of windows of 1,024.
    """
    server, rng = Server(manager, policy), random.Random(0)
    heads = [words(rng, head) for _ in range(count)]
    found = asked = 0
    for turn in range(rounds):
        for seat in range(count):
            prompt = heads[seat] + words(rng, 64)
            got = server.serve(f"{turn} {seat}", prompt, [1] * 32, chunk=256)
            if turn:
                found += got
                asked += len(prompt)
    server.check()
    return 100 * found / asked


def gemma(retention: int | None) -> Any:
    return mixed(7200, full(), *[window(128)] * 5, retention=retention)


@pytest.mark.parametrize("count", [8, 12, 24])
def test_sessions_in_turn_on_a_model_with_windows(count: int) -> None:
    """vLLM 48435: "collapses to exactly zero for every request", far below the pool's size."""
    assert seats(gemma(None), None, count) < 1
    # Kept at the ends of prompts alone, vLLM's default since then, windows leave stock the room.
    stock = seats(gemma(0), None, count)
    for policy in ("lru", "hazard"):
        assert seats(gemma(None), policy, count) > 60
        assert seats(gemma(0), policy, count) >= stock > 60


def resent(manager: Any, policy: str | None, prompts: int, rounds: int = 3) -> float:
    """The same prompts in turn: % found after the first round."""
    server, rng = Server(manager, policy), random.Random(0)
    heads = [words(rng, 4096) for _ in range(prompts)]
    found = asked = 0
    for turn in range(rounds):
        for number, head in enumerate(heads):
            got = server.serve(f"{turn} {number}", [*head, 1, 2, 3], [1] * 3, chunk=1024)
            if turn:
                found += got
                asked += len(head)
    server.check()
    return 100 * found / asked


def deepseek_v4(retention: int | None) -> Any:
    groups = full(256), window(128, 64), window(128, 64), window(128, 4), window(128, 8)
    return mixed(5120, *groups, retention=retention)


@pytest.mark.parametrize("prompts", [8, 16])
def test_prompts_that_are_sent_again_on_five_groups(prompts: int) -> None:
    """vLLM 42948, at an eighth of its lengths: DeepSeek-V4-Flash, whose blocks have 4 to 256 tokens."""
    assert resent(deepseek_v4(None), None, prompts) == 0
    for policy in ("lru", "hazard"):
        assert resent(deepseek_v4(None), policy, prompts) == 100
    for kept in (None, "lru", "hazard"):
        assert resent(deepseek_v4(0), kept, prompts) == 100


def chats(manager: Any, policy: str | None, *, requests: int = 400, seed: int = 0) -> float:
    """Conversations that share a system prompt, and documents that are asked about once: % found."""
    server = Server(manager, policy if policy is None else bind(policy, SIZE))
    rng = random.Random(seed)
    system = words(rng, 20 * SIZE)
    histories = [list(system) for _ in range(12)]
    found = asked = 0
    for number in range(requests):
        if rng.random() < 0.5:
            document = words(rng, rng.randrange(20, 60) * SIZE)
            server.serve(str(number), [*document, 1], [2] * 20, chunk=512)
            asked += len(document)
            continue
        who = min(int(rng.expovariate(0.25)), 11)
        prompt = [*histories[who], *words(rng, rng.randrange(3, 10) * SIZE), 7]
        answer = words(rng, 2 * SIZE)
        found += server.serve(str(number), prompt, answer, chunk=512)
        asked += len(prompt)
        histories[who] = prompt + answer
        if len(histories[who]) > 60 * SIZE:
            histories[who] = list(system)
    server.check()
    return 100 * found / asked


HYBRIDS: dict[str, Callable[[int | None], Any]] = {
    "states": lambda kept: mixed(700, full(), states(), states(), states(), retention=kept),
    "a window": lambda kept: mixed(700, full(), window(128), retention=kept),
    "chunks": lambda kept: mixed(700, full(), chunked(256), retention=kept),
}


@pytest.mark.parametrize("kept", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_conversations_beside_documents(hybrid: str, kept: int | None) -> None:
    """States and KV push each other out, as on Qwen3-Next; windows, as on gpt-oss; chunks, as on Llama-4."""
    stock, lru, hazard = (chats(HYBRIDS[hybrid](kept), policy) for policy in (None, "lru", "hazard"))
    assert lru > stock - 0.5
    assert hazard > stock + 2
