"""What the policy hears of vLLM's requests: uses, matches, ends and hints."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import RequestStatus

from costcache import hints
from costcache.records import RequestInfo, RequestRecord
from tests.vllm.serving import Server, manager


class Listener(Server):
    """A server whose pool's ends of requests are noted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends: list[tuple[RequestRecord, RequestInfo]] = []
        self.pool.costcache.runs.pool._finish = lambda record, info: self.ends.append((record, info))


def listener(**more: Any) -> Listener:
    return Listener(manager(100), "lru", **more)


def end(
    server: Listener, request: Any, status: Any = RequestStatus.FINISHED_STOPPED, words: Any = ()
) -> RequestInfo:
    server.start(request)
    server.generate(request, list(words))
    server.finish(request, status)
    server.drain()
    return server.ends[-1][1]


@pytest.mark.parametrize("defer", [False, True])
def test_the_facts_of_an_end(defer: bool) -> None:
    server = listener(defer=defer)
    request = server.request("a", [1] * 100, priority=-2, session_id="chat")
    assert end(server, request, words=range(50, 60)) == RequestInfo(
        output_tokens=10,
        new_tokens=100,
        finish_reason="stop",
        priority=2,
        session="chat",
        ending=(56, 57, 58, 59),
    )
    again = end(server, server.request("b", [1] * 100), RequestStatus.FINISHED_LENGTH_CAPPED, [5])
    assert again == RequestInfo(output_tokens=1, new_tokens=4, finish_reason="length")
    assert (
        end(server, server.request("c", [1] * 100), RequestStatus.FINISHED_ABORTED).finish_reason == "abort"
    )
    assert len(server.ends) == 3


def test_a_request_that_is_preempted_goes_on_and_ends_once() -> None:
    server = listener()
    request = server.request("a", [1] * 100)
    server.start(request)
    server.generate(request, [7] * 40)
    server.preempt(request)
    assert server.ends == []
    record = request._costcache.record
    assert end(server, request).output_tokens == 40
    assert len(server.ends) == 1
    assert server.ends[0][0] is record
    assert server.ends[0][1].new_tokens == 100  # what it found was its own
    assert all(run.uses == 1 for run in server.pool.costcache.runs.pool.live.values())
    assert server.hits == 128


def test_uses_are_counted_once_a_request() -> None:
    server = listener()
    for name in "abc":
        server.serve(name, [1] * 64 + [ord(name)] * 64)
    (shared,) = [run for run in server.pool.costcache.runs.pool.live.values() if not run.depth]
    assert (shared.tokens, shared.uses) == (64, 3)


def test_a_running_requests_answer_can_be_used_by_others() -> None:
    server = listener()
    request = server.request("a", [1] * 32)
    server.start(request)
    server.generate(request, [2] * 40)
    assert server.serve("b", [1] * 32 + [2] * 40) == 64
    server.check()
    server.finish(request)
    server.check()
    runs = sorted(server.pool.costcache.runs.pool.live.values(), key=lambda run: run.depth)
    assert [(run.depth, run.tokens, run.uses) for run in runs][:2] == [(0, 32, 2), (32, 32, 2)]
    assert runs[1].creator == 1  # the one that generated it


HINTS = {"returns_after": "run_tests", "tenant": "acme", "session_ends": True, "keep_seconds": 60.0}


@pytest.mark.parametrize("form", ["kv_hints", "extra_args", "JSON"])
def test_hints_of_a_client_arrive(form: str) -> None:
    server = listener()
    more: dict[str, Any]
    if form == "kv_hints":
        actions = [KvHintAction("1", "pin", "1", {"x": 1}), KvHintAction("2", "costcache", "1", HINTS)]
        more = {"kv_hints": KvHintsEnvelope("1", "m", actions)}
    else:
        more = {"extra_args": {"costcache": HINTS if form == "extra_args" else json.dumps(HINTS)}}
    info = end(server, server.request("a", [1] * 50, **more))
    assert info.returns_after == "run_tests"
    assert info.tenant == "acme"
    assert info.session_ends
    assert info.keep_seconds == 60.0


@pytest.mark.parametrize("given", [{"keep_seconds": -1}, {"color": "red"}, 7, "{", '{"tenant": 5}'])
def test_hints_that_cannot_be_read_are_left_out_and_said_once(
    given: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hints, "_warned", [])
    server = listener()
    for name in "ab":
        info = end(server, server.request(name, [1] * 50, extra_args={"costcache": given}))
        assert info._replace(new_tokens=50) == RequestInfo(new_tokens=50, finish_reason="stop")
    assert len(caplog.records) == 1
    assert server.pool.costcache.runs is not None


@pytest.mark.parametrize("policy", ["hazard", "lru2", "s3fifo", "wtinylfu"])
def test_hashes_that_share_their_first_bytes_are_harmless(policy: str) -> None:
    """An evicted prefix is recognised by eight bytes of its hash, and a cached one by vLLM alone."""
    server, draw = Server(manager(40), policy), random.Random(0)
    for number in range(300):
        request = server.request(str(number), [0] * (16 * 10 + 1))
        kind = draw.randrange(6)
        # The first eight bytes are always the same; the rest tells six prompts apart.
        request.block_hashes = [bytes(8) + bytes([kind, n]) + bytes(22) for n in range(10)]
        server.start(request)
        server.finish(request)
        server.check()
    assert server.hits > 0
    assert server.pool.costcache.runs is not None
    assert server.pool.costcache.runs.pool.fallbacks == 0
