"""What LRU would have found in several KV cache groups, against a real ``lru`` in vLLM's real managers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from costcache.policies.hazard.state_learner import StateLearner
from costcache.policies.hazard.states import HazardStates
from costcache.records import RequestRecord
from costcache.vllm.ends import EndRuns
from costcache.vllm.ranking import EndsByKey
from tests.vllm.ends import full, mixed, states, window
from tests.vllm.serving import Server
from tests.vllm.test_group_cases import HYBRIDS, chats, gemma, seats
from tests.vllm.test_groups import MODELS

ENDS = [model for model in MODELS if model not in {"two of full attention", "a drafter"}]


def said(monkeypatch: pytest.MonkeyPatch) -> list[RequestRecord]:
    """Records of the requests that end from now on, in order."""
    ended: list[RequestRecord] = []
    release = EndRuns.release

    def noting(self: EndRuns, held: Any) -> None:
        ended.append(held.request)
        release(self, held)

    monkeypatch.setattr(EndRuns, "release", noting)
    return ended


def conversations(server: Server, seed: int, requests: int, chunk: int | None) -> tuple[int, int]:
    """Conversations, prompts with a common head and others, one at a time: tokens found, and asked for."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(count)]

    heads = [words(16 * rng.randrange(4, 20)) for _ in range(8)]
    histories = [list(head) for head in heads]
    found = asked = 0
    for number in range(requests):
        who, kind = min(int(rng.expovariate(0.4)), 7), rng.random()
        if kind < 0.3:
            prompt = words(rng.randrange(100, 900))
        elif kind < 0.6:
            prompt = heads[who] + words(rng.randrange(10, 200))
        else:
            prompt = histories[who] + words(rng.randrange(10, 150))
            if len(prompt) > 1300:
                prompt = [*heads[who], 1]
        answer = words(rng.randrange(1, 60))
        if kind >= 0.6:
            histories[who] = prompt + answer
        found += server.serve(str(number), prompt, answer, chunk=chunk)
        asked += len(prompt)
    server.check()
    return found, asked


@pytest.mark.parametrize(
    ("model", "retention"),
    [*((model, 0) for model in ENDS), ("one window", None), ("windows and states", None)],
)
def test_lru_is_told_what_it_finds(
    model: str, retention: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LRU in force, the shadow has the same room and the same running requests: it is checked alone."""
    monkeypatch.setattr(EndsByKey, "compares", lambda order: True)
    ended = said(monkeypatch)
    server = Server(MODELS[model](retention=retention), "lru")
    found, asked = conversations(server, 1, 250, 64)
    pairs = [(request.matched, request.lru_matched) for request in ended]
    assert sum(matched for matched, _ in pairs) == found > 0.2 * asked
    assert sum(first != second for first, second in pairs) < 0.03 * len(pairs)
    assert abs(sum(second or 0 for _, second in pairs) - found) < 0.01 * asked
    assert server.pool.costcache.runs.pool.counters.evictions > 50


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_hazard_is_told_what_lru_finds(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another policy's cache, whose running requests need other blocks than LRU's."""
    ended = said(monkeypatch)
    hazard = chats(HYBRIDS[hybrid](0), "hazard", requests=600)
    asked = sum(request.matched for request in ended) * 100 / hazard
    shadow = 100 * sum(request.lru_matched or 0 for request in ended) / asked
    lru = chats(HYBRIDS[hybrid](0), "lru", requests=600)
    assert hazard > lru + 2
    assert abs(shadow - lru) < 0.3


@pytest.mark.parametrize(("count", "head"), [(28, 2624), (32, 2624), (20, 4096)])
def test_hazard_does_not_lose_to_lru_or_stock(count: int, head: int) -> None:
    """Sessions that come strictly in turn and nearly fill the pool; 4,096 tokens end with a chunk."""
    stock, lru, hazard = (
        seats(gemma(0), policy, count, rounds=8, head=head) for policy in (None, "lru", "hazard")
    )
    assert hazard >= max(stock, lru) - 0.3
    assert max(lru, hazard) > 60


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_lru_steps_in_when_hazard_is_wrong(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StateLearner, "worth_at", lambda learner, group, age: 1.0 + age
    )  # the newest go first
    servers: list[Server] = []
    attached = Server.__post_init__

    def noting(server: Server) -> None:
        attached(server)
        servers.append(server)

    monkeypatch.setattr(Server, "__post_init__", noting)
    judged = chats(HYBRIDS[hybrid](0), "hazard", requests=700)
    verdict = servers[-1].pool.costcache.runs.pool.order.against_lru()
    assert verdict.falls > 0
    assert verdict.lost > verdict.gained
    monkeypatch.setattr(HazardStates, "compares", lambda order: False)
    assert judged > chats(HYBRIDS[hybrid](0), "hazard", requests=700) + 2
    assert servers[-1].pool.costcache.runs.pool.order.against_lru() is None


def test_the_verdict_begins_anew_after_a_reset() -> None:
    server = Server(mixed(300, full(), window(64), states()), "hazard")
    conversations(server, 0, 60, None)
    runs = server.pool.costcache.runs
    verdict = runs.pool.order.against_lru()
    assert verdict.gained + verdict.lost > 0
    assert server.manager.reset_prefix_cache()
    assert runs.pool.order.against_lru()[:2] == (0, 0)
    conversations(server, 0, 60, None)
    assert server.pool.costcache.runs is runs


def test_without_a_shadow_nothing_is_compared() -> None:
    server = Server(MODELS["a drafter"](), "hazard")
    conversations(server, 0, 40, None)
    assert server.pool.costcache.runs.pool.order.against_lru() is None


def test_policies_that_do_not_compare_themselves_cost_no_shadow() -> None:
    for policy in ("lru", "s3fifo"):
        assert Server(mixed(300, full(), window(64)), policy).pool.costcache.runs._shadow is None
