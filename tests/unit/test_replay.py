"""Replay against a naive reference, the recorded trace's published rates, and across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import hookimpl
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.orders import VictimOrder
from costcache.plugins import PluginManager, get_plugins
from costcache.policies import BUILTIN, PolicySpec
from costcache.policies.keyed import LRU
from costcache.records import NodeRecord, RequestInfo, RequestRecord
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.requests import Known, RequestInfos, finish_reason
from costcache.sim.results import TIMING, Run
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace
from costcache.sim.workloads import generate, workload_settings

MODEL = ModelSpec.preset("llama-3-8b")

Page = tuple[int, ...]


@dataclass
class Reference:
    """A cache of single pages, each named by its whole path of tokens; all costs are linear."""

    capacity: int | None
    page_size: int

    def __post_init__(self) -> None:
        self.last: dict[Page, int] = {}
        self.step = 0
        self.evicted = 0
        self.oversized = 0

    def request(self, tokens: list[int]) -> int:
        """Tokens found; then the whole pages are cached, for which others go, leaf by leaf, by LRU."""
        self.step += 1
        size, last = self.page_size, self.last
        whole = len(tokens) // size
        paths = [tuple(tokens[: (i + 1) * size]) for i in range(whole)]
        found = 0
        while found < whole and paths[found] in last:
            last[paths[found]] = self.step
            found += 1
        if self.capacity is not None:
            self.oversized += whole > self.capacity
            for _ in range(whole - found - (self.capacity - len(last))):
                parents = {path[:-size] for path in last}
                leaves = [path for path in last if path not in parents and path not in paths]
                if not leaves:
                    break
                del last[min(leaves, key=last.__getitem__)]
                self.evicted += size
        room = whole if self.capacity is None else self.capacity - len(last) + found
        for path in paths[found:room]:
            last[path] = self.step
        return found * size


def token_lists(trace: Trace) -> list[list[int]]:
    """The prompts as tokens: the j-th token of block b is b * 1000 + j."""
    size, prompts = trace.block_size, []
    for (start, stop), tokens in zip(
        pairwise(trace.offsets.tolist()), trace.input_tokens.tolist(), strict=True
    ):
        ids = trace.ids[start:stop].tolist()
        prompts.append([ids[i // size] * 1000 + i % size for i in range(tokens)])
    return prompts


def run(
    trace: Trace,
    page_size: int,
    capacity: int | None,
    policy: str = "lru",
    plugins: PluginManager | None = None,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> Run:
    simulator = Simulator(trace, MODEL, Deployment(page_size=page_size), plugins=plugins)
    return simulator.run(Settings(policy=policy, **settings), capacity, tree=True, progress=progress)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Short prompts of few ids, so that they share a lot and diverge everywhere."""
    size = draw(st.integers(1, 4))
    prompts = draw(
        st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=draw(st.integers(1, 40)), max_size=40)
    )
    cut = [draw(st.integers(0, size - 1)) if ids else 0 for ids in prompts]
    return Trace(
        name="drawn",
        block_size=size,
        timestamps=np.arange(len(prompts), dtype=np.float64),
        input_tokens=np.array([len(p) * size - c for p, c in zip(prompts, cut, strict=True)], np.int64),
        output_tokens=np.ones(len(prompts), np.int64),
        ids=np.array([i for p in prompts for i in p], np.int64),
        offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int64),
    )


@given(trace=traces(), page_size=st.integers(1, 6), pages=st.integers(1, 12))
def test_lru_hits_equal_those_of_a_cache_of_single_pages(trace: Trace, page_size: int, pages: int) -> None:
    reference = Reference(pages, page_size)
    hits = [reference.request(tokens) for tokens in token_lists(trace)]
    result = run(trace, page_size, pages * page_size)
    assert result.hit_tokens == sum(hits)
    assert result.evicted_tokens == reference.evicted
    assert result.oversized_requests == reference.oversized
    total = int(trace.input_tokens.sum())
    assert result.token_hit_rate == (sum(hits) / total if total else 0.0)
    # c0 * [n + n**2 / (2 L)] FLOPs for n tokens; c0 is in both and cancels.
    crossover = get_plugins().match(MODEL).cost(Deployment()).crossover_tokens

    def flops(lengths: list[int]) -> float:
        return sum(n + n * n / (2 * crossover) for n in lengths)

    asked = flops(trace.input_tokens.tolist())
    assert result.flops_saved_rate == pytest.approx(flops(hits) / asked if asked else 0.0)


@given(trace=traces(), page_size=st.integers(1, 6))
def test_without_a_limit_every_page_misses_once(trace: Trace, page_size: int) -> None:
    reference = Reference(None, page_size)
    hits = sum(reference.request(tokens) for tokens in token_lists(trace))
    for policy in ("lru", "mru", "tlru"):
        result = run(trace, page_size, None, policy)
        assert result.capacity_tokens is None
        assert result.hit_tokens == hits
        assert result.token_hit_rate == pytest.approx(trace.ideal_hit_rate(page_size))
        assert (result.evicted_tokens, result.evictions, result.oversized_requests) == (0, 0, 0)
    enough = trace.distinct_pages(page_size) * page_size
    if enough:
        assert run(trace, page_size, enough).hit_tokens == hits
        assert run(trace, page_size, enough).evicted_tokens == 0


@given(trace=traces(), page_size=st.integers(1, 3), pages=st.integers(1, 12), policy=st.sampled_from(BUILTIN))
def test_no_policy_finds_more_than_the_ideal(trace: Trace, page_size: int, pages: int, policy: str) -> None:
    result = run(trace, page_size, pages * page_size, policy)
    assert result.token_hit_rate <= trace.ideal_hit_rate(page_size) + 1e-12
    assert (result.fallbacks, result.clamped) == (0, 0)
    assert 0 <= result.flops_saved_rate <= 1
    # Evicted and cached tokens add up to those inserted: nothing is evicted twice.
    assert result.evicted_tokens + pages * page_size >= trace.distinct_pages(page_size) * page_size - sum(
        max(0, tokens // page_size - pages) * page_size for tokens in trace.input_tokens.tolist()
    )


def test_a_request_longer_than_the_pool_caches_its_head() -> None:
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [1, 2]]
    trace = Trace(
        name="long",
        block_size=4,
        timestamps=np.arange(4.0),
        input_tokens=np.array([12, 24, 20, 8], np.int64),
        output_tokens=np.ones(4, np.int64),
        ids=np.array([i for p in prompts for i in p], np.int64),
        offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int64),
    )
    result = run(trace, 4, 16)
    assert result.oversized_requests == 2
    # The third finds the four pages that the second could keep; the fourth finds nothing.
    assert result.hit_tokens == 16
    assert result.evicted_tokens == 12 + 8


def test_a_pool_of_half_pages_is_rounded_down() -> None:
    trace = generate("chat", workload_settings("chat", {"requests": 60}))
    assert asdict_untimed(run(trace, 16, 1615)) == {
        **asdict_untimed(run(trace, 16, 1600)),
        "capacity_tokens": 1615,
    }


def asdict_untimed(result: Run) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in TIMING}


def test_smaller_pages_find_more_and_cost_no_accuracy() -> None:
    trace = generate("multi-turn", workload_settings("multi-turn", {"requests": 150}))
    rates = [run(trace, page, None).token_hit_rate for page in (1, 4, 16, 64, 256)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == rates[2]  # sharing is in whole blocks of 16, and partial ones are not shared


def test_trimming_whole_nodes_evicts_more() -> None:
    trace = generate("chat", workload_settings("chat", {"requests": 300}))
    exact, off = run(trace, 16, 16_000), run(trace, 16, 16_000, trim="off")
    assert exact.trimmed
    assert off.trimmed == 0
    assert off.evicted_tokens > exact.evicted_tokens


def test_headroom_evicts_more_and_keeps_less() -> None:
    trace = generate("chat", workload_settings("chat", {"requests": 300}))
    exact, headroom = run(trace, 16, 16_000), run(trace, 16, 16_000, headroom=0.2)
    assert headroom.evictions < exact.evictions
    assert headroom.token_hit_rate < exact.token_hit_rate


def offering(name: str, order: type[VictimOrder]) -> PluginManager:
    """The built-in plugins, and one that offers a policy."""

    class Plugin:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {name: PolicySpec(lambda cost, pools, settings: order(), "For this test.")}

    manager = PluginManager()
    manager.register(Plugin(), name)
    return manager


def listening() -> tuple[PluginManager, list[tuple[RequestRecord, RequestInfo]], list[float]]:
    """LRU as ``listening``, what it hears of the ends of requests, and the last uses of what they used."""
    heard: list[tuple[RequestRecord, RequestInfo]] = []
    used: list[float] = []

    class Listening(LRU):
        def finish(self, request: RequestRecord, info: RequestInfo) -> None:
            heard.append((request, info))
            if request.end is not None:
                used.append(request.end.last_use)

    return offering("listening", Listening), heard, used


@pytest.mark.parametrize("known", ["server", "all"])
@pytest.mark.parametrize("serving", [None, ServingSettings(concurrency=1, decode_seconds=0)])
def test_policies_are_told_what_a_server_would_know_or_all(
    serving: ServingSettings | None, known: Known
) -> None:
    manager, heard, used = listening()
    trace = Trace(
        name="told",
        block_size=2,
        timestamps=np.array([1.0, 20.0, 30.5, 40.0]),
        input_tokens=np.array([5, 6, 3, 0], np.int64),
        output_tokens=np.array([7, 1, 0, 2], np.int64),
        ids=np.array([1, 2, 3, 1, 2, 4, 8, 9], np.int64),
        offsets=np.array([0, 3, 6, 8, 8], np.int64),
        sessions=np.array([0, 0, 1, 2], np.int64),
        finish=np.array([1, 0, 2, -1], np.int64),
        finish_names=("end_turn", "tool_use", "refusal"),
        priorities=np.array([0, 3, 0, 0], np.int64),
    )
    simulator = Simulator(trace, MODEL, Deployment(page_size=2), plugins=manager, known=known)
    simulator.run(Settings(policy="listening"), None, serving=serving)
    assert [request.number for request, _ in heard] == [1, 2, 3, 4]
    infos = [info for _, info in heard]
    expected = [
        RequestInfo(output_tokens=7, new_tokens=5, finish_reason="tool_call", session="0"),
        RequestInfo(output_tokens=1, new_tokens=2, finish_reason="stop", session="0", priority=3),
        RequestInfo(output_tokens=0, new_tokens=3, finish_reason="refusal", session="1"),
        RequestInfo(output_tokens=2, new_tokens=0, finish_reason=None, session="2"),
    ]
    if known == "server":
        endings = [info.ending for info in infos]
        assert [len(ending) for ending in endings] == [1, 1, 1, 0]
        assert len({*endings}) == 4
        infos = [info._replace(ending=()) for info in infos]
        for at, info in enumerate(expected):
            reason = None if info.finish_reason is None else "stop"
            expected[at] = info._replace(finish_reason=reason, session=None)
    assert infos == expected
    ends = [(end.tokens, end.priority) for request, _ in heard if (end := request.end) is not None]
    assert ends[:3] == [(4, 3), (2, 3), (2, 0)]  # the first request's node has the second's priority now
    if serving is None:
        assert used[:3] == trace.timestamps.tolist()[:3]


def test_requests_cut_off_by_a_limit_end_in_any_token() -> None:
    trace = replace(
        generate("chat", workload_settings("chat", {"requests": 2})),
        finish=np.array([0, 1], np.int64),
        finish_names=("max_tokens", "cancelled"),
    )
    infos = RequestInfos(trace)
    told = [(infos.of(i, 0).finish_reason, infos.of(i, 0).ending) for i in range(2)]
    assert told == [("length", ()), ("abort", ())]


@pytest.mark.parametrize("known", ["server", "all"])
def test_hints_are_told_as_given(known: Known) -> None:
    trace = replace(
        generate("chat", workload_settings("chat", {"requests": 3})),
        sessions=np.array([0, 0, 1]),
        names_sessions=True,
        tenants=np.array([0, -1, 0]),
        tenant_names=("acme",),
        users=np.array([-1, 0, -1]),
        user_names=("eve",),
        session_ends=np.array([False, True, False]),
        returns_after=np.array([2.5, np.nan, np.nan]),
        labels=np.array([-1, -1, 0]),
        label_names=("search",),
        keep_seconds=np.array([np.nan, np.nan, 60.0]),
    )
    infos = RequestInfos(trace.take(np.array([0, 1, 2])), known)
    found = [infos.of(i, 0)[4:] for i in range(3)]
    assert found == [
        ("0", (), "acme", False, 2.5, None, None),
        ("0", (), None, True, None, None, "eve"),
        ("1", (), "acme", False, "search", 60.0, None),
    ]


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-next"])
def test_the_priority_order_keeps_the_prompts_of_a_traces_priorities(model: str) -> None:
    prompts = [1, 2, 3, 4, 5, 2]  # one page each, and room for three
    trace = Trace(
        name="ranked",
        block_size=16,
        timestamps=np.arange(6.0),
        input_tokens=np.full(6, 16, np.int64),
        output_tokens=np.ones(6, np.int64),
        ids=np.array(prompts, np.int64),
        offsets=np.arange(7),
        priorities=np.array([0, 3, 1, 2, 0, 0], np.int64),
    )
    simulator = Simulator(trace, ModelSpec.preset(model), Deployment(page_size=16))
    token = simulator.cost.token
    room = 3 * (16 * token.kv_bytes + token.state_bytes) // token.kv_bytes // 16 * 16
    outcome = simulator.outcome(Settings(policy="priority"), room + (16 if token.state_bytes else 0))
    # 1 made room for 4, and 3 for 5; LRU would have evicted 2.
    assert outcome.matched.tolist() == [0, 0, 0, 0, 0, 16]


def test_missing_trace_fields_are_not_passed_on() -> None:
    manager, heard, _ = listening()
    trace = replace(generate("chat", workload_settings("chat", {"requests": 50})), sessions=None)
    run(trace, 16, None, "listening", manager)
    assert [info.output_tokens for _, info in heard] == trace.output_tokens.tolist()
    assert all((info.finish_reason, info.session, info.priority) == (None, None, 0) for _, info in heard)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [("stop", "stop"), ("tool_calls", "tool_call"), ("max_tokens", "length"), ("abort", "abort"), ("x", "x")],
)
def test_stop_reasons_are_normalised(recorded: str, told: str) -> None:
    assert finish_reason(recorded) == told


def test_an_order_that_fails_is_replaced_and_counted() -> None:
    class Failing(LRU):
        def touch(self, record: NodeRecord) -> None:
            raise KeyError(record.serial)

    manager = offering("failing", Failing)
    trace = generate("chat", workload_settings("chat", {"requests": 200}))
    result, lru = run(trace, 16, 16_000, "failing", manager), run(trace, 16, 16_000)
    assert (result.policy, result.policy_in_force, result.fallbacks) == ("failing", "lru", 1)
    assert result.hit_tokens == lru.hit_tokens


def test_progress_reports_every_request() -> None:
    trace = generate("random", workload_settings("random", {"requests": 1500}))
    heard: list[int] = []
    run(trace, 16, 16_000, progress=heard.append)
    assert sum(heard) == 1500
    assert len(heard) > 1


SCRIPT = """
import json, sys
from dataclasses import asdict
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.workloads import generate, workload_settings
trace = generate("agentic", workload_settings("agentic", {"requests": 250}))
simulator = Simulator(trace, ModelSpec.preset("llama-3-8b"), Deployment(page_size=16))
for policy in sys.argv[1:]:
    run = simulator.run(Settings(policy=policy), 200_000, tree=True)
    print(json.dumps(asdict(run)))
"""


def test_every_policy_decides_the_same_in_every_process(repo_root: Path) -> None:
    outputs = []
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *BUILTIN],
            cwd=repo_root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        for entry in runs:
            assert entry["evicted_tokens"] > 0
            for name in TIMING:
                del entry[name]
        outputs.append(runs)
    assert len(outputs[0]) == len(BUILTIN)
    assert outputs[0] == outputs[1] == outputs[2]
