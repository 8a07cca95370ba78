"""Our cache on SGLang's Python tree core: records, exact evictions, trimming, requests."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from costcache.records import RequestInfo, RequestRecord
from costcache.sglang.requests import info as request_info
from costcache.sglang.requests import life_of
from tests.property.kit import Finishing
from tests.sglang.mirror import check_records
from tests.sglang.pools import KINDS, Kind, Shape, cost_cache
from tests.sglang.serving import Server

PAGES = (1, 64)
POLICIES = ("lru", "lfu", "slru", "mru", "fifo", "filo", "priority", "hazard", "tlru")
SERVED = [(k, p) for k in KINDS for p in POLICIES if p != "tlru" or not Shape(k).has_states]


def make(kind: Kind = "mha", page_size: int = 1, tokens: int = 2048, **settings: Any) -> Server:
    shape = Shape(kind, page_size, tokens=tokens, states=20, context=32_768)
    return Server(cost_cache(shape, **settings), shape)


def cached(server: Server) -> int:
    return int(server.cache.full_evictable_size() + server.cache.full_protected_size())


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_under_pressure(kind: Kind, page_size: int) -> None:
    server = make(kind, page_size)
    rng = random.Random(1)
    for step in range(120):
        start = rng.randrange(8) * 1000
        server.serve(
            [*range(start, start + rng.choice((70, 200, 400))), 9000 + step],
            output=range(rng.randrange(4)),
            priority=rng.randrange(3),
        )
        server.check()
        check_records(server.cache)
    assert server.cache.pools.kv.counters.evictions
    server.drain()
    check_records(server.cache)
    assert not server.cache.pools.kv.live


@pytest.mark.parametrize(("kind", "policy"), SERVED)
def test_every_policy_serves_every_kind(kind: Kind, policy: str) -> None:
    server = make(kind, 64, policy=policy)
    rng = random.Random(5)
    running: list[Any] = []
    for step in range(80):
        if len(running) == 4 or (running and rng.random() < 0.4):
            req = running.pop(rng.randrange(len(running)))
            server.decode(req, range(3))
            server.finish(req)
        else:
            start = rng.randrange(9) * 1000
            req = server.request([*range(start, start + rng.choice((70, 200, 330))), 9000 + step])
            server.start(req)
            running.append(req)
        check_records(server.cache)
    server.drain()
    pool = server.cache.pools.kv
    assert (pool.policy, pool.fallbacks) == (policy, 0)
    assert pool.counters.evictions > 0


def test_a_giant_leaf_loses_one_page_for_one_token() -> None:
    for page_size in PAGES:
        server = make(page_size=page_size, tokens=32_000)
        server.serve(range(30_016))
        server.cache.evict_for_alloc(EvictParams(num_tokens=1))
        assert cached(server) == 30_016 - page_size
        assert server.serve(range(30_016)) == 30_016 - page_size
        server.drain()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_exactly_the_shortfall_is_evicted(kind: Kind) -> None:
    server = make(kind, tokens=1000)
    for start in range(0, 7000, 1000):
        server.serve(range(start, start + 100))
    assert cached(server) == 700
    server.allocator.evict_to_free_tokens(server.cache, 400)
    assert cached(server) == 600
    assert server.allocator.available_size() == 400


def test_evict_frees_what_it_reports() -> None:
    server = make(tokens=1000)
    server.serve(range(500))
    result = server.cache.evict(EvictParams(num_tokens=33))
    assert result.num_tokens_evicted == 33
    assert cached(server) == 467
    assert server.cache.evict(EvictParams(num_tokens=10_000)).num_tokens_evicted == 467


def test_trimming_by_chunk_and_off() -> None:
    for settings, kept in (({"trim": "chunk", "trim_chunk": 128}, 384), ({"trim": "off"}, 0)):
        server = make(tokens=1000, **settings)
        server.serve(range(500))
        server.cache.evict(EvictParams(num_tokens=1))
        assert cached(server) == kept


def test_headroom_is_kept_free_beyond_the_shortfall() -> None:
    server = make(tokens=1000, headroom=0.2)
    server.serve(range(900))
    server.allocator.evict_to_free_tokens(server.cache, 150)
    assert cached(server) == 900 - 50 - 200


def test_a_trimmed_leaf_keeps_its_history() -> None:
    server = make(tokens=1000)
    for _ in range(3):
        server.serve(range(500))
    head = next(record for record in server.cache.pools.kv.records() if not record.depth)
    assert (head.tokens, head.uses) == (499, 3)  # a server computes the last token again
    serial, recency = head.serial, head.recency
    server.cache.evict(EvictParams(num_tokens=100))
    (left,) = server.cache.pools.kv.records()
    assert left is head
    assert (left.uses, left.serial, left.recency, left.tokens) == (3, serial, recency, 400)


def test_a_use_is_counted_once_per_request_and_node() -> None:
    server = make()
    server.serve(range(300), output=[1, 2, 3])
    prompt, output = sorted(server.cache.pools.kv.records(), key=lambda record: record.depth)
    assert (prompt.tokens, prompt.uses, output.uses) == (300, 1, 1)
    waiting = server.request(range(300))
    for _ in range(5):  # a waiting request is matched again and again
        waiting.init_next_round_input(server.cache)
    head, last = sorted(server.cache.pools.kv.records(), key=lambda record: record.depth)[:2]
    assert (head.tokens, head.uses) == (299, 2)
    assert (last.tokens, last.uses) == (1, 1)  # the last token of a prompt is always computed again
    server.start(waiting)
    server.finish(waiting)
    assert head.uses == 2
    assert last.uses == 2


def test_a_refresh_changes_only_recency() -> None:
    server = make()
    server.serve(range(300))
    server.serve(range(1000, 1300))
    old = next(record for record in server.cache.pools.kv.records() if record.serial == 1)
    uses, recency = old.uses, old.recency
    server.cache.touch_prefix(RadixKey(array("q", range(300)), None))
    assert old.uses == uses
    assert old.recency > recency
    server.cache.evict(EvictParams(num_tokens=300))
    assert server.serve(range(300)) == 299


def test_the_unused_tail_of_a_split_keeps_its_age() -> None:
    server = make()
    server.serve(range(300))
    server.serve(range(1000, 1300))
    server.serve([*range(100), 7, 8, 9])
    server.cache.evict(EvictParams(num_tokens=200))
    # The tail [100, 300) was used by the first request alone.
    assert server.serve(range(300)) == 100


def test_orders_hear_of_the_end_of_a_request() -> None:
    server = make()
    heard: list[tuple[RequestRecord, RequestInfo]] = []
    server.cache.pools.kv.rank_by("lru", Finishing(lambda request, info: heard.append((request, info))))
    server.serve(range(300))
    server.serve([*range(300), *range(500, 560)], output=[1, 2, 3, 4], priority=2)
    (_, first), (request, info) = heard
    assert first == RequestInfo(0, 300, "length", 0, None)
    assert info == RequestInfo(4, 60, "length", 2, None)
    assert request.matched == 300
    assert request.number == 2
    assert request.end is not None
    assert request.end.creator == 2
    assert request.end.end == 363  # the last token generated is never computed


def stopped(
    server: Server, tokens: Iterable[int], output: Sequence[int], params: object = None
) -> RequestInfo:
    """One request that ends with its last token; returns what orders hear of it."""
    heard: list[RequestInfo] = []
    server.cache.pools.kv.rank_by("lru", Finishing(lambda request, info: heard.append(info)))
    req = server.request(tokens)
    req.sampling_params.custom_params = params
    server.start(req)
    server.decode(req, output)
    req.finished_reason = FINISH_MATCHED_TOKEN(output[-1])
    req.finished_len = len(output)
    info = request_info(req, life_of(req, server.cache.pools))
    server.finish(req)
    return info


def test_orders_hear_in_which_tokens_a_request_ended() -> None:
    info = stopped(make(), range(300), [1, 2, 3, 4, 5, 6])
    assert (info.finish_reason, info.output_tokens, info.ending) == ("stop", 6, (3, 4, 5, 6))


def test_orders_hear_what_a_client_says_of_itself() -> None:
    hints = {"tenant": "acme", "session": "s1", "returns_after": "search", "keep_seconds": 60}
    info = stopped(make(), range(300), [1, 2], {"thinking_budget": 9, "costcache": hints})
    assert info[4:] == ("s1", (1, 2), "acme", False, "search", 60.0, None)
    info = stopped(make(), range(300), [2], {"costcache": {"session_ends": True, "returns_after": 2.5}})
    assert info[4:] == (None, (2,), None, True, 2.5, None, None)


@pytest.mark.parametrize(
    "given", [3, [1], {"returns_after": -1.0}, {"returns_after": [3]}, {"tenant": 5}, {"output_tokens": 3}]
)
def test_hints_that_cannot_be_read_are_left_out_and_logged_once(
    given: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("costcache.hints._warned", [])
    for _ in range(2):
        info = stopped(make(), range(300), [1, 2], {"costcache": given})
        assert info == RequestInfo(2, 300, "stop", 0, None, (1, 2))
    assert [record.message for record in caplog.records].count(caplog.records[-1].message) == 1
    assert "hints are ignored (said once)" in caplog.text


def test_a_retracted_request_has_not_finished() -> None:
    server = make()
    heard: list[RequestInfo] = []
    server.cache.pools.kv.rank_by("lru", Finishing(lambda request, info: heard.append(info)))
    req = server.request(range(300))
    server.start(req)
    req.finished_reason = None
    server.cache.on_release(req, checkpointed=True)
    assert not heard
    server.finish(req)
    assert len(heard) == 1


def test_reset_forgets_everything() -> None:
    server = make()
    server.serve(range(300))
    server.cache.reset()
    server.allocator.clear()
    assert not server.cache.pools.kv.live
    assert server.serve(range(300)) == 0
    check_records(server.cache)


def test_namespaces_do_not_mix() -> None:
    server = make()
    server.serve(range(300), extra_key="adapter")
    assert server.serve(range(300)) == 0
    assert server.serve(range(300), extra_key="adapter") == 299
    server.serve(range(300), cache_salt="salt")
    assert server.serve(range(300), cache_salt="salt") == 299
    check_records(server.cache)
    server.drain()


def test_stock_walks_use_our_order() -> None:
    server = make(policy="mru", trim="off")
    for start in range(0, 5000, 1000):
        server.serve(range(start, start + 100))
    done = iter([False, False, True])
    server.cache.evict_for_alloc(
        EvictParams(num_tokens=10_000), allocation_reclaim_satisfied=lambda: next(done)
    )
    assert cached(server) == 300  # asked once before the walk, and after each of two victims
    assert [server.match(range(start, start + 100)).device_prefix_len for start in range(0, 5000, 1000)] == [
        100,
        100,
        100,
        0,
        0,
    ]
    check_records(server.cache)
    server.drain()
