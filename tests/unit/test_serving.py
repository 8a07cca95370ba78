"""Serving replay: slots, locks, waiting and times, against recounts and examples worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.policies import BUILTIN
from costcache.radix.node import Node
from costcache.radix.tree import RadixTree
from costcache.records import RequestInfo, RequestRecord
from costcache.settings import Settings, read_settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import Running, Server, ServingSettings, serve
from costcache.sim.trace import RecordedServer, Trace
from costcache.sim.ttft import PrefillModel
from tests.property.kit import Finishing

MODEL = ModelSpec.preset("llama-3-8b")


def trace_of(
    prompts: Sequence[Sequence[int]], times: Sequence[float], outputs: Sequence[int], block: int = 1
) -> Trace:
    """Prompts as whole blocks of ids."""
    return Trace(
        name="made",
        block_size=block,
        timestamps=np.array(times, np.float64),
        input_tokens=np.array([len(p) * block for p in prompts], np.int64),
        output_tokens=np.array(outputs, np.int64),
        ids=np.array([i for p in prompts for i in p], np.int64),
        offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int64),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Short prompts of few ids, in bursts, with outputs."""
    count = draw(st.integers(1, 25))
    prompts = draw(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=count, max_size=count))
    times = sorted(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count)))
    outputs = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    return trace_of(prompts, times, outputs, draw(st.integers(1, 3)))


@st.composite
def sessions(draw: st.DrawFn) -> Trace:
    """The same with sessions, think times, named outputs, and requests that wait for earlier ones."""
    trace = draw(traces())
    n, size = len(trace), trace.block_size
    numbers = sorted(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    blocks = (-(-trace.output_tokens // size)).tolist()
    follows = None
    if draw(st.booleans()):  # within the session, anybody before
        first = [numbers.index(number) for number in numbers]
        follows = np.array([draw(st.integers(first[i], i)) - 1 for i in range(n)], np.int64)
        follows = np.where(follows < np.array(first), -1, follows)
    times = draw(st.lists(st.floats(0, 9), min_size=n, max_size=n))
    return replace(
        trace,
        sessions=np.array(numbers, np.int64),
        follows=follows,
        think_seconds=np.array(times, np.float64),
        service_seconds=np.array([np.nan if i % 3 == 0 else i % 7 for i in range(n)]),
        output_ids=np.array(
            draw(st.lists(st.integers(0, 2), min_size=sum(blocks), max_size=sum(blocks))), np.int64
        ),
        output_offsets=np.cumsum([0, *blocks]).astype(np.int64),
    )


def per_token(seconds: float) -> PrefillModel:
    return PrefillModel(name="by hand", floor=0, fixed=0, per_token=seconds, per_pair=0)


class Audited(Server):
    """Recounts everything after every event."""

    def __init__(
        self, trace: Trace, page: int, capacity: int, server: ServingSettings, **options: Any
    ) -> None:
        keys = trace.page_keys(page)
        always_free = options.pop("always_free", False)
        prefill = options.pop("prefill", per_token(0.1))
        settings = Settings(**{"policy": "lru", **options})
        binding = Binding.of(MODEL, Deployment(page_size=page), settings)
        tree = RadixTree(binding, capacity, page_bytes=keys.bytes_per_page)
        super().__init__(trace, keys, tree, prefill, server, always_free, None)
        self.attempts = 0
        self.ended: dict[int, float] = {}

    def start(self, index: int, now: float) -> float | None:
        self.attempts += 1
        alone = not self.running
        before = self.pool.counters.oversized
        started = super().start(index, now)
        if self.pool.counters.oversized > before:
            assert alone
            assert len(self.running) == 1
        self.recount()
        return started

    def finish(self, ended: Running) -> None:
        super().finish(ended)
        self.ended[ended.number] = ended.ends
        self.recount()

    def recount(self) -> None:
        pool, tree = self.pool, self.tree
        nodes = list(tree.walk())
        cached = sum(node.tokens for node in nodes if node.parent is not None)
        held = sum(run.reserved for run in self.running)
        assert (pool.cached, pool.reserved) == (cached, held)
        assert pool.free >= 0
        assert pool.free + cached + held == pool.capacity
        wanted: dict[int, int] = {}
        for run in self.running:
            node: Node | None = run.node
            while node is not None and node.parent is not None:
                wanted[node.serial] = node.tokens
                node = node.parent
        assert {node.serial for node in nodes if node.locks and node.parent is not None} == set(wanted)
        assert pool.pinned == sum(wanted.values())
        assert pool.free >= self.reserve or not pool.evictable
        assert len(self.running) <= self.settings.concurrency


@given(
    trace=traces(),
    page=st.integers(1, 3),
    pages=st.integers(1, 12),
    concurrency=st.integers(1, 5),
    policy=st.sampled_from(sorted(BUILTIN)),
    headroom=st.sampled_from([0.0, 0.3]),
    always_free=st.booleans(),
    spread=st.booleans(),
    name=st.sampled_from(["", "sglang", "vllm"]),
    chunk=st.integers(0, 5),
)
def test_no_slot_or_lock_leaks(
    trace: Trace,
    page: int,
    pages: int,
    concurrency: int,
    policy: str,
    headroom: float,
    always_free: bool,
    spread: bool,
    name: str,
    chunk: int,
) -> None:
    trace = replace(trace, server=RecordedServer(name, chunk=chunk))
    server = ServingSettings(concurrency=concurrency, decode_seconds=0.5, spread_bursts=spread)
    audited = Audited(
        trace, page, pages * page, server, policy=policy, headroom=headroom, always_free=always_free
    )
    outcome = audited.run()
    tree = audited.tree
    assert not audited.running
    assert (audited.pool.reserved, audited.pool.pinned) == (0, 0)
    assert not any(node.locks for node in tree.walk())
    # SGLang and vLLM do not compute the last token that a request generates.
    computed = np.maximum(trace.output_tokens - 1, 0) if name else trace.output_tokens
    total = -(-(trace.input_tokens + computed) // page) * page
    assert outcome.oversized == np.count_nonzero(total > pages * page)
    # The last prompt token is always computed, whole pages are found, and a prefill is waited for.
    assert (outcome.matched <= np.maximum(trace.input_tokens - 1, 0) // page * page).all()
    assert (outcome.matched % page == 0).all()
    assert outcome.ttft is not None
    assert (outcome.ttft >= 0.1 * (trace.input_tokens - outcome.matched) - 1e-9).all()
    assert (outcome.fallbacks, outcome.clamped) == (0, 0)


@given(
    trace=sessions(),
    page=st.integers(1, 3),
    pages=st.integers(1, 12),
    concurrency=st.integers(1, 4),
    policy=st.sampled_from(sorted(BUILTIN)),
    load=st.sampled_from(["open", "sessions", "clients"]),
    service=st.sampled_from(["modelled", "recorded"]),
    outputs=st.booleans(),
)
def test_sessions_wait_for_answers_and_lose_no_slot(
    trace: Trace,
    page: int,
    pages: int,
    concurrency: int,
    policy: str,
    load: Any,
    service: Any,
    outputs: bool,
) -> None:
    server = ServingSettings(
        concurrency=concurrency, decode_seconds=0.5, load=load, service=service, outputs=outputs
    )
    audited = Audited(trace, page, pages * page, server, policy=policy)
    outcome = audited.run()
    assert (audited.pool.reserved, audited.pool.pinned) == (0, 0)
    assert outcome.ttft is not None
    assert (outcome.ttft > -1e-9).all()
    assert sorted(audited.ended) == list(range(len(trace)))
    if load != "open":
        for request, before in enumerate(trace.predecessors().tolist()):
            if before >= 0:
                expected = audited.ended[before] + trace.think_seconds[request]  # type: ignore[index]  # this trace has them
                assert audited.load.arrivals[request] == pytest.approx(expected)
    if load == "clients":  # no client has more than one session under way
        assert trace.sessions is not None
        spans = [
            (min(audited.load.arrivals[i] for i in own), max(audited.ended[i] for i in own))
            for number in set(trace.sessions.tolist())
            if (own := np.flatnonzero(trace.sessions == number).tolist())
        ]
        for start, _ in spans:
            assert sum(low <= start < high for low, high in spans) <= concurrency
    assert (outcome.fallbacks, outcome.clamped) == (0, 0)


@given(trace=sessions(), page=st.integers(1, 4))
def test_without_a_limit_prompts_hit_all_earlier_prompts_and_outputs(trace: Trace, page: int) -> None:
    server = ServingSettings(concurrency=1, load="open")
    served = Simulator(trace, MODEL, Deployment(page_size=page)).outcome(
        Settings(policy="lru"), None, serving=server
    )
    left = trace.with_outputs(computed=True)
    assert left is not None
    known: set[tuple[int, ...]] = set()
    for i, found in enumerate(served.matched.tolist()):
        prompt, after = units(trace, i), units(left, i)
        assert len(after) == len(prompt) + max(0, int(trace.output_tokens[i]) - 1)
        usable = range(page, len(prompt), page)  # never the last token
        assert found == max((n for n in usable if tuple(prompt[:n]) in known), default=0)
        known |= {tuple(each[:n]) for each in (prompt, after) for n in range(page, len(each) + 1, page)}


def units(trace: Trace, request: int) -> list[int]:
    """A prompt as tokens: the j-th token of block b is b * 1000 + j."""
    ids = trace.ids[trace.offsets[request] : trace.offsets[request + 1]].tolist()
    size = trace.block_size
    return [ids[i // size] * 1000 + i % size for i in range(int(trace.input_tokens[request]))]


def test_a_turn_finds_the_answer_before_it_but_for_the_last_token() -> None:
    trace = replace(
        trace_of([[1, 2], [1, 2, 3, 4, 5, 6]], [0, 9], [3, 1]),
        output_ids=np.array([3, 4, 5, 9], np.int64),
        output_offsets=np.array([0, 3, 4], np.int64),
    )
    assert Audited(trace, 1, 100, ServingSettings()).run().matched.tolist() == [0, 4]
    assert Audited(trace, 1, 100, ServingSettings(outputs=False)).run().matched.tolist() == [0, 2]
    assert Audited(trace, 2, 100, ServingSettings()).run().matched.tolist() == [0, 4]
    # The server has room for both outputs; the second evicts what the first left.
    assert Audited(trace, 1, 7, ServingSettings(decode_seconds=0.1)).run().matched.tolist() == [0, 4]


def talk() -> Trace:
    """Two sessions: one of three turns, whose last two wait for the first; one of one turn."""
    return replace(
        trace_of([[1, 2], [1, 2], [1, 2], [8, 9]], [0, 1, 2, 50], [3, 3, 3, 3]),
        sessions=np.array([0, 0, 0, 1], np.int64),
        think_seconds=np.array([7.0, 10.0, 4.0, 1.0]),
        service_seconds=np.array([20.0, np.nan, 0.1, 1.0]),
    )


@pytest.mark.parametrize(
    ("options", "arrivals"),
    [
        # Prefill 1 s, then two tokens of 1 s; prefill of one token takes half a second.
        ({}, [0, 3 + 10, 15.5 + 4, 50]),
        ({"load": "open"}, [0, 1, 2, 50]),
        ({"load": "sessions", "rate": 2.0}, [0, 13, 19.5, 25]),
        ({"load": "clients", "concurrency": 1}, [0, 13, 19.5, 22]),
        ({"load": "clients"}, [0, 13, 19.5, 0]),
        # As recorded: 20 s, unknown, no shorter than its prefill.
        ({"service": "recorded"}, [0, 20 + 10, 32.5 + 4, 50]),
    ],
)
def test_arrival_processes(options: dict[str, Any], arrivals: list[float]) -> None:
    server = ServingSettings(**{"concurrency": 4, "decode_seconds": 1, "spread_bursts": False, **options})
    audited = Audited(talk(), 1, 100, server, prefill=per_token(0.5))
    audited.run()
    assert audited.load.arrivals == pytest.approx(arrivals)


def test_sub_agents_run_beside_the_agent_that_started_them() -> None:
    trace = replace(talk(), follows=np.array([-1, 0, 0, -1], np.int64))
    audited = Audited(trace, 1, 100, ServingSettings(decode_seconds=1), prefill=per_token(0.5))
    audited.run()
    assert audited.load.arrivals == pytest.approx([0, 13, 7, 50])


def test_missing_trace_fields_are_named() -> None:
    trace = trace_of([[1]], [0], [1])
    with pytest.raises(SettingsError, match="load is 'sessions', and made has no sessions with think times"):
        Audited(trace, 1, 9, ServingSettings(load="sessions"))
    with pytest.raises(SettingsError, match="service is 'recorded', and made does not say how long"):
        Audited(trace, 1, 9, ServingSettings(service="recorded"))
    assert Audited(trace, 1, 9, ServingSettings(load="clients")).run().matched.tolist() == [0]


@given(trace=traces(), page=st.integers(1, 3))
def test_one_at_a_time_without_a_limit_equals_the_plain_mode_but_for_the_last_token(
    trace: Trace, page: int
) -> None:
    simulator = Simulator(trace, MODEL, Deployment(page_size=page))
    settings = Settings(policy="lru")
    plain = simulator.outcome(settings, None, tree=True)
    served = simulator.outcome(settings, None, serving=ServingSettings(concurrency=1))
    most = np.maximum(trace.input_tokens - 1, 0) // page * page
    assert served.matched.tolist() == np.minimum(plain.matched, most).tolist()
    assert (served.evicted, served.oversized) == (0, 0)


def test_waiting_for_the_prefill_before_and_for_a_free_place() -> None:
    a, b, c = [1, 2, 3, 4], [11, 12, 13, 14, 15, 16, 17, 18], list(range(21, 33))
    trace = trace_of([a, b, a, c], [0, 0, 0.5, 10], [7, 3, 1, 1])
    server = ServingSettings(concurrency=2, decode_seconds=1, spread_bursts=False)
    outcome = Audited(trace, 1, 1000, server, prefill=per_token(0.25)).run()
    assert outcome.ttft is not None
    # a: prefill 0 to 1, ends at 7. b: 1 to 3, ends at 5. a again: has its place at 5, computes one token.
    # c: no request before it.
    assert outcome.ttft.tolist() == pytest.approx([1, 3, 5.25 - 0.5, 3])
    assert outcome.matched.tolist() == [0, 0, 3, 0]


def test_waiting_for_slots() -> None:
    trace = trace_of([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]], [0, 0, 0], [4, 1, 1])
    server = ServingSettings(decode_seconds=1, spread_bursts=False)
    outcome = Audited(trace, 1, 10, server, prefill=per_token(0.25)).run()
    assert outcome.ttft is not None
    # The first reserves 8 of 10 slots until 4. The second needs 5 and, at 5, so does the third, less the 3 it
    # finds; first come, first served, though the third would have fitted at 1.
    assert outcome.ttft.tolist() == pytest.approx([1, 5, 5.25])
    assert outcome.matched.tolist() == [0, 0, 3]
    assert outcome.oversized == 0


def test_a_waiting_head_counts_its_use_once() -> None:
    long, other, head = [1, 2, 3], [5, 6], [1, 2, 3, 4]
    trace = trace_of([long, other, head], [0, 0, 0], [4, 6, 8])
    server = ServingSettings(decode_seconds=1, spread_bursts=False)
    audited = Audited(trace, 1, 16, server, prefill=per_token(0.25))
    audited.run()
    assert audited.attempts > 3, "the head did not have to wait"
    uses = {bytes(node.key): node.uses for node in audited.tree.walk() if node.parent is not None}
    assert sorted(uses.values()) == [1, 1, 2]  # the shared prefix by two requests, and two tails by one
    assert audited.pool.clock.requests == 3


def test_a_request_larger_than_the_pool_runs_alone_and_caches_its_head() -> None:
    trace = trace_of([[1, 2], [3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7]], [0, 0, 0], [3, 1, 1])
    server = ServingSettings(decode_seconds=1, spread_bursts=False)
    outcome = Audited(trace, 1, 6, server, prefill=per_token(1)).run()
    assert outcome.ttft is not None
    # Alone from 4, when the first has ended, to 11; the third computes its last token.
    assert outcome.ttft.tolist() == pytest.approx([2, 11, 12])
    assert outcome.oversized == 1
    assert outcome.matched.tolist() == [0, 0, 4]


@pytest.mark.parametrize(
    ("spread", "rate", "ttft"),
    [(False, 1.0, [1, 2, 1]), (True, 1.0, [1, 1, 1]), (True, 4.0, [1, 1.5, 2]), (False, 0.5, [1, 2, 1])],
)
def test_bursts_are_spread_and_arrivals_sped_up(spread: bool, rate: float, ttft: list[float]) -> None:
    trace = trace_of([[1, 2], [3, 4], [5, 6]], [0, 0, 4], [1, 1, 1])
    outcome = Audited(
        trace, 1, 100, ServingSettings(spread_bursts=spread, rate=rate), prefill=per_token(0.5)
    ).run()
    assert outcome.ttft is not None
    assert outcome.ttft.tolist() == pytest.approx(ttft)


def test_a_burst_at_one_time_only_stays_a_burst() -> None:
    trace = trace_of([[1], [2]], [5, 5], [1, 1])
    outcome = Audited(trace, 1, 100, ServingSettings(), prefill=per_token(1)).run()
    assert outcome.ttft is not None
    assert outcome.ttft.tolist() == pytest.approx([1, 2])


def test_requests_finish_in_the_order_of_their_ends_and_all_are_reported() -> None:
    trace = trace_of([[i] for i in range(600)], list(range(600)), [5] + [2] * 599)
    keys = trace.page_keys(1)
    binding = Binding.of(MODEL, Deployment(page_size=1), Settings(policy="lru"))
    tree = RadixTree(binding, 2000, page_bytes=keys.bytes_per_page)
    ended: list[tuple[int, int]] = []
    heard: list[int] = []

    def finish(request: RequestRecord, info: RequestInfo) -> None:
        ended.append((request.number, info.output_tokens or 0))

    tree.pool.rank_by("lru", Finishing(finish))
    serve(
        trace,
        keys,
        tree,
        per_token(0.1),
        ServingSettings(decode_seconds=1.05, spread_bursts=False),
        progress=heard.append,
    )
    assert sum(heard) == len(trace)
    # The first ends at 4.3 s, between the fourth, at 4.15, and the fifth, at 5.15.
    assert ended[:6] == [(2, 2), (3, 2), (4, 2), (1, 5), (5, 2), (6, 2)]
    assert [number for number, _ in ended[4:]] == list(range(5, 601))


def test_an_empty_trace_is_served() -> None:
    outcome = Audited(trace_of([], [], []), 1, 4, ServingSettings()).run()
    assert outcome.matched.size == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("concurrency", 0), ("decode_seconds", -1), ("decode_seconds", float("nan")), ("rate", 0)],
)
def test_wrong_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(SettingsError, match=field):
        read_settings(ServingSettings, {field: value})


@pytest.mark.parametrize("chunk", [None, 0, 2])
def test_a_prompt_is_cached_chunk_by_chunk(chunk: int | None) -> None:
    """A chunk is a node of its own. A recorded server's chunk is used unless another is asked for."""
    trace = replace(trace_of([[1, 2, 3, 4, 5]], [0.0], [1]), server=RecordedServer("vllm", chunk=3))
    audited = Audited(trace, 1, 9, ServingSettings(chunk=chunk))
    audited.run()
    nodes = [node.tokens for node in audited.tree.walk() if node.parent is not None]
    assert sorted(nodes) == {None: [2, 3], 0: [5], 2: [1, 2, 2]}[chunk]


@pytest.mark.parametrize(("name", "evictions"), [("", 1), ("sglang", 1), ("vllm", 0)])
def test_a_server_evicts_what_its_steps_need(name: str, evictions: int) -> None:
    """Two prompts of two pages, each with an answer of one token, in a pool of four pages and of five.

    A slot for the answer needs a fifth page, and so does the page that SGLang wants free; vLLM needs neither.
    """
    trace = trace_of([[1, 2], [3, 4]], [0.0, 10.0], [1, 1], block=2)
    trace = replace(trace, server=RecordedServer(name))
    for pages, expected in ((4, evictions), (5, 0)):
        outcome = Audited(trace, 2, 2 * pages, ServingSettings(concurrency=1)).run()
        assert outcome.evictions == expected


def test_the_recorded_trimming_is_for_the_recorded_policy() -> None:
    """A victim of three pages, of which one is needed, is evicted whole if the server did so."""
    trace = trace_of([[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]], [0.0, 10.0, 20.0, 30.0], [0] * 4)
    cells = [("lru", "lru", "auto"), ("lru", "lru", "exact"), ("hazard", "lru", "auto")]
    found = []
    for recorded, policy, trim in cells:
        served = replace(trace, server=RecordedServer("vllm", policy=recorded, trim=0))
        simulator = Simulator(served, MODEL, Deployment(page_size=1))
        settings = Settings.model_validate({"policy": policy, "trim": trim})
        outcome = simulator.outcome(settings, 4, serving=ServingSettings(concurrency=1))
        found.append(outcome.matched.tolist())
    assert found == [[0, 0, 0, 0], [0, 0, 2, 1], [0, 0, 2, 1]]
