"""Generated workloads: exact sharing, determinism, the parameters' own statistics."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.errors import SettingsError
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace, write_trace
from costcache.sim.workloads import WORKLOADS, generate, workload_settings
from costcache.sim.workloads.build import Blocks, Context, Request, build_trace
from costcache.sim.workloads.settings import LogNormal, Steps, Uniform

NAMES = list(WORKLOADS)


def small(name: str, **overrides: Any) -> Trace:
    return generate(name, workload_settings(name, {"requests": 400, **overrides}))


def prompts(trace: Trace) -> list[list[int]]:
    edges = trace.offsets.tolist()
    return [trace.ids[a:b].tolist() for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_is_well_formed(name: str) -> None:
    trace = small(name)
    assert (trace.name, trace.block_size, len(trace)) == (name, 16, 400)
    assert (np.diff(trace.timestamps) >= 0).all()
    assert (trace.input_tokens >= 1).all()
    assert (trace.output_tokens >= 1).all()
    parent: dict[int, int] = {}
    uses: Counter[int] = Counter()
    for ids in prompts(trace):
        uses.update(ids)
        for before, block in zip([-1, *ids], ids, strict=False):
            # An id stands for its prefix: it never has two predecessors.
            assert parent.setdefault(block, before) == before
    # Numbered from 0 in the order in which they first occur.
    assert list(parent) == list(range(len(parent)))
    for tokens, ids in zip(trace.input_tokens.tolist(), prompts(trace), strict=True):
        if tokens % 16:
            assert uses[ids[-1]] == 1


@pytest.mark.parametrize("name", NAMES)
def test_equal_settings_give_equal_files_in_any_process(name: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl.gz", tmp_path / "there.jsonl.gz"
    write_trace(small(name), here)
    code = (
        "from costcache.sim.workloads import *; from costcache.sim.traces import write_trace;"
        f"write_trace(generate({name!r}, workload_settings({name!r}, {{'requests': 400}})), {str(there)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert here.read_bytes() == there.read_bytes()
    assert not np.array_equal(small(name, seed=1).input_tokens, small(name).input_tokens)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_workload_reads_back(name: str, tmp_path: Path) -> None:
    trace = small(name)
    write_trace(trace, tmp_path / f"{name}.jsonl")
    read = load_trace(tmp_path / f"{name}.jsonl")
    assert (read.name, read.block_size) == (name, 16)
    for column in ("timestamps", "input_tokens", "output_tokens", "ids", "offsets"):
        assert np.array_equal(getattr(read, column), getattr(trace, column))


@pytest.mark.parametrize("name", NAMES)
def test_fewer_requests_are_the_beginning_of_more(name: str) -> None:
    few, more = small(name, requests=100), small(name)
    assert few.input_tokens.tolist() == more.input_tokens[:100].tolist()
    assert few.timestamps.tolist() == more.timestamps[:100].tolist()
    assert few.ids.tolist() == more.ids[: few.offsets[-1]].tolist()


def test_random_prompts_share_nothing() -> None:
    trace = small("random")
    assert len(np.unique(trace.ids)) == len(trace.ids)
    assert trace.ideal_hit_rate(16) == 0
    assert trace.input_tokens.min() >= 20
    assert trace.input_tokens.max() <= 16_000
    assert np.median(trace.input_tokens) == pytest.approx(800, rel=0.2)


@pytest.mark.parametrize(
    ("name", "prompts_field", "own_field"),
    [("chat", "system", "user"), ("few-shot", "prompts", "question")],
)
def test_prompts_share_the_whole_blocks_of_their_system_prompt(
    name: str, prompts_field: str, own_field: str
) -> None:
    # One prompt of 1003 tokens has 62 whole blocks; the 63rd mixes it with the user's own text.
    one = {"count": 1, "tokens": {"low": 1003, "high": 1003}}
    trace = small(name, **{prompts_field: one, own_field: {"median": 40, "shape": 0}})
    assert set(trace.input_tokens.tolist()) == {1043}
    assert {len(set(column)) for column in list(zip(*prompts(trace), strict=True))[:62]} == {1}
    assert {len(set(column)) for column in list(zip(*prompts(trace), strict=True))[62:]} == {400}
    assert trace.distinct_pages(16) == 62 + 400 * (1043 // 16 - 62)


def test_chat_uses_its_prompts_unevenly_as_zipf_says() -> None:
    trace = small("chat", requests=20_000, **{"system.count": 4, "system.zipf": 1.0})
    first = Counter(ids[0] for ids in prompts(trace))
    shares = sorted((count / len(trace) for count in first.values()), reverse=True)
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.015)


def test_arrivals_come_at_the_rate_asked_for() -> None:
    trace = small("chat", requests=5000)
    assert len(trace) / trace.timestamps[-1] == pytest.approx(10, rel=0.06)
    gaps = np.diff(trace.timestamps)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential


def test_outputs_come_back_in_the_next_turn() -> None:
    overrides = {
        "requests": 6,
        "session_rate": 1e-9,  # one session
        "system.tokens": {"low": 64, "high": 64},
        "turns": {"first": 6, "mean": 0},
        "user": {"median": 10, "shape": 0},
        "output": {"median": 20, "shape": 0},
        "pause": {"median": 7, "shape": 0},
    }
    trace = small("multi-turn", **overrides)
    assert trace.input_tokens.tolist() == [74 + 30 * turn for turn in range(6)]
    assert np.diff(trace.timestamps) == pytest.approx([20 / 40 + 7] * 5, abs=0.0011)
    asked = prompts(trace)
    for before, after in pairwise(asked):
        whole = trace.input_tokens[asked.index(before)] // 16
        assert after[:whole] == before[:whole]
        assert set(before[whole:]).isdisjoint(after)


def test_turns_are_one_and_an_exponential_number_more() -> None:
    rng = np.random.default_rng(0)
    turns = [Steps(first=1, mean=4.5, most=30).draw(rng) for _ in range(20_000)]
    assert (min(turns), max(turns)) == (1, 30)
    # Rounded down, an exponential of mean m has the mean 1 / (e^(1/m) - 1).
    assert np.mean(turns) == pytest.approx(1 + 1 / np.expm1(1 / 4.5), rel=0.02)


def agents(**overrides: Any) -> Trace:
    """One run at a time, with everything of a fixed size."""
    fixed = {
        "run_rate": 1e-9,
        "system": {"count": 1, "tokens": {"low": 320, "high": 320}},
        "task": {"median": 32, "shape": 0},
        "steps": {"first": 3, "mean": 0},
        "output": {"median": 16, "shape": 0},
        "tool_result": {"median": 48, "shape": 0},
        "tool_pause": {"median": 3, "shape": 0},
        "person_pause": {"median": 100, "shape": 0},
        "sub_agents": {"low": 2, "high": 2},
        "sub_agent_system": {"count": 1, "tokens": {"low": 160, "high": 160}},
        "person_share": 0,
        "sub_agent_share": 0,
    }
    return generate("agentic", workload_settings("agentic", fixed | overrides))


def test_an_agent_keeps_its_outputs_and_tool_results() -> None:
    trace = agents(requests=3)
    assert trace.input_tokens.tolist() == [352, 416, 480]
    assert np.diff(trace.timestamps) == pytest.approx([16 / 40 + 3] * 2, abs=0.0011)
    first, second, third = prompts(trace)
    assert second[: len(first)] == first
    assert third[: len(second)] == second


def test_some_steps_wait_for_a_person() -> None:
    trace = agents(requests=3, person_share=1)
    assert np.diff(trace.timestamps) == pytest.approx([16 / 40 + 100] * 2, abs=0.0011)


@pytest.mark.parametrize("forks", [0, 1])
def test_sub_agents_run_side_by_side_and_the_parent_waits(forks: int) -> None:
    # Parent's step, then two sub-agents of 3 steps each, twice; then the parent's last step.
    trace = agents(requests=15, sub_agent_share=1, fork_share=forks)
    tokens = trace.input_tokens.tolist()
    step = 16 / 40 + 3
    times = (trace.timestamps - trace.timestamps[0]).tolist()
    child = 352 + 16 + 32 if forks else 160 + 32
    assert tokens[:8] == [352, child, child, child + 64, child + 64, child + 128, child + 128, 400]
    expected = [0, 0.4, 0.4, 0.4 + step, 0.4 + step, 0.4 + 2 * step, 0.4 + 2 * step, 0.8 + 2 * step]
    assert times[:8] == pytest.approx(expected, abs=0.0011)
    asked = prompts(trace)
    shared = 368 // 16 if forks else 160 // 16
    # The children share what they began with, nothing of their tasks.
    assert asked[1][:shared] == asked[2][:shared]
    assert set(asked[1][shared:]).isdisjoint(asked[2])
    assert asked[1][: 352 // 16] == asked[0] if forks else set(asked[1]).isdisjoint(asked[0])
    # The answers of both are appended to the parent's own output: 352 + 16 + 2 * 16.
    assert asked[7][: 352 // 16] == asked[0]
    assert set(asked[7][352 // 16 :]).isdisjoint(asked[1]) != bool(forks)
    assert len(trace) == 15


def test_an_agent_ends_when_its_context_is_full() -> None:
    # 352, 416, 480 tokens are asked for; the context then passes 500.
    trace = agents(requests=6, steps={"first": 80, "mean": 0, "most": 80}, most_tokens=500)
    assert trace.input_tokens.tolist() == [352, 416, 480] * 2


def test_agents_stay_within_the_context_by_default() -> None:
    trace = small("agentic", requests=3000)
    assert trace.input_tokens.max() <= 120_000
    assert trace.input_tokens.min() >= 2000


@given(st.lists(st.integers(0, 40), max_size=8), st.lists(st.integers(0, 40), max_size=8))
def test_forks_share_exactly_the_blocks_before_them(before: list[int], after: list[int]) -> None:
    blocks = Blocks()
    parent = Context(blocks)
    for tokens in before:
        parent.extend(tokens)
    shared = parent.tokens // 16
    child = parent.fork()
    assert child.tokens == parent.tokens
    for tokens in after:
        child.extend(tokens)
        parent.extend(tokens)
    session = [parent.request(0.0, 1), child.request(0.0, 1)]
    left, right = prompts(build_trace("forks", [(0.0, session)], blocks, 2))
    assert left[:shared] == right[:shared]
    assert set(left[shared:]).isdisjoint(right[shared:])


def test_sessions_are_merged_by_time_and_ties_keep_their_order() -> None:
    blocks = Blocks()

    def request(seconds: float, tokens: int) -> Request:
        return Context(blocks, tokens).request(seconds, 1)

    sessions = [
        (0.0, [request(0.0, 1), request(5.0, 2), request(9.0, 3)]),
        (1.0, [request(1.0, 4), request(5.0, 5)]),
        (7.0, [request(7.0, 6)]),
    ]
    trace = build_trace("merged", sessions, blocks, 100)
    assert trace.input_tokens.tolist() == [1, 4, 2, 5, 6, 3]
    trace = build_trace("merged", sessions, blocks, 3)
    assert trace.input_tokens.tolist() == [1, 4, 2]


def test_log_normals_have_their_median_and_stay_in_range() -> None:
    rng = np.random.default_rng(0)
    drawn = [LogNormal(median=150, shape=0.8, low=10, high=400).tokens(rng) for _ in range(20_000)]
    assert min(drawn) >= 10
    assert max(drawn) == 400
    assert np.median(drawn) == pytest.approx(150, rel=0.03)
    logs = np.log([LogNormal(median=45, shape=1.0).draw(rng) for _ in range(20_000)])
    assert logs.std() == pytest.approx(1.0, rel=0.03)
    assert LogNormal(median=0.01, shape=0).tokens(rng) == 1


def test_uniform_draws_reach_both_ends() -> None:
    rng = np.random.default_rng(0)
    assert {Uniform(low=2, high=4).tokens(rng) for _ in range(200)} == {2, 3, 4}


def test_overrides_leave_the_rest_as_it_was() -> None:
    dotted = workload_settings("chat", {"user.median": "300", "rate": 2})
    nested = workload_settings("chat", {"user": {"median": 300}, "rate": 2.0})
    assert dotted == nested
    user = dotted.model_dump()["user"]
    assert user == {"median": 300, "shape": 0.8, "low": 10, "high": 4000}
    assert workload_settings("agentic").requests == 16_000
    assert all(workload_settings(name).requests == 20_000 for name in NAMES if name != "agentic")


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("chat", {"rate": 0}, "'chat.rate' is 0: input should be greater than or equal to 0.000000001"),
        ("chat", {"rate": float("inf")}, "'chat.rate' is inf"),
        ("chat", {"requests": "many"}, "'chat.requests' is 'many'"),
        ("chat", {"seed": -1}, "'chat.seed' is -1"),
        ("chat", {"user.median": -3}, "'chat.user.median' is -3"),
        ("chat", {"user": {"mean": 3}}, r"unknown setting 'chat.user.mean': .* chat.user.median"),
        ("chat", {"user.median.x": 3}, "'chat.user.median' has no setting 'x'"),
        ("chat", {"colour": 3}, r"unknown setting 'chat.colour': .*chat.system"),
        ("chat", {"user.low": 5000}, r"'chat.user' is .*low is 5000.0, over high, 4000"),
        ("chat", {"system.tokens.low": 5000}, r"'chat.system.tokens' is .*low is 5000, over high"),
        ("agentic", {"person_share": 0.99}, "'agentic.sub_agent_share' is 0.06: .* more than 1"),
        ("agentic", {"fork_share": 1.5}, "'agentic.fork_share' is 1.5"),
        ("talk", {}, "no workload 'talk'; choose one of agentic, agents-documents, chat"),
    ],
)
def test_wrong_settings_are_named(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        workload_settings(name, overrides)


def test_settings_must_be_the_workloads_own() -> None:
    with pytest.raises(SettingsError, match="settings are ChatSettings; give AgenticSettings"):
        generate("agentic", workload_settings("chat"))
    with pytest.raises(SettingsError, match="no workload 'talk'"):
        generate("talk")


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_says_what_it_is(name: str) -> None:
    fields = WORKLOADS[name].settings.model_fields
    assert [field for field, info in fields.items() if not info.description] == []
    assert WORKLOADS[name].summary.endswith(".")


def in_turn(**overrides: Any) -> Trace:
    fixed = {"prompts": 3, "tokens": {"low": 64, "high": 64}, "output": {"median": 1, "shape": 0}}
    return small("in-turn", **fixed | overrides)


def test_prompts_in_turn_are_the_same_ones_again() -> None:
    asked = prompts(in_turn(requests=9))
    assert asked[:3] == asked[3:6] == asked[6:]
    assert len({block for prompt in asked for block in prompt}) == 3 * 4


def test_prompts_in_turn_grow_and_begin_anew() -> None:
    trace = in_turn(requests=12, growth=16, most_tokens=96)
    assert trace.input_tokens.tolist() == [64] * 3 + [80] * 3 + [96] * 3 + [64] * 3
    asked = prompts(trace)
    assert asked[3][:4] == asked[0]
    assert asked[6][:5] == asked[3]
    assert set(asked[9]).isdisjoint(asked[6])


def test_one_shots_leave_the_turn_as_it_is() -> None:
    trace = in_turn(one_shot_share=0.2, one_shot={"median": 320, "shape": 0})
    shots = [prompt for prompt in prompts(trace) if len(prompt) == 20]
    assert 0.15 < len(shots) / 400 < 0.25
    assert len({prompt[0] for prompt in shots}) == len(shots)
    rest = [prompt for prompt in prompts(trace) if len(prompt) == 4]
    assert all(prompt == rest[at % 3] for at, prompt in enumerate(rest))


def test_drift_moves_between_disjoint_sets_and_back() -> None:
    trace = small("drift", sets=2, period=50, prompts={"count": 3})
    firsts = [prompt[0] for prompt in prompts(trace)]
    sets = [set(firsts[start : start + 50]) for start in range(0, 400, 50)]
    assert sets[0].isdisjoint(sets[1])
    assert [found for found in sets[::2] if found <= sets[0]] == sets[::2]
    assert [found for found in sets[1::2] if found <= sets[1]] == sets[1::2]


def test_tenants_have_a_prompt_each_and_scan_behind_it() -> None:
    overrides = {
        "system": {"count": 4, "tokens": {"low": 160, "high": 160}},
        "user": {"median": 16, "shape": 0},
        "scan_share": 0.02,
        "scan": {"low": 30, "high": 30},
        "document": {"median": 800, "shape": 0},
    }
    trace = small("tenants", requests=4000, **overrides)
    asked = prompts(trace)
    by_tenant = Counter(prompt[0] for prompt in asked if len(prompt) == 11)
    assert len(by_tenant) == 4
    shares = sorted((count / by_tenant.total() for count in by_tenant.values()), reverse=True)
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.06)  # as Zipf says
    scanned = [prompt for prompt in asked if len(prompt) == 60]
    assert len(scanned) > 500
    assert {prompt[0] for prompt in scanned} <= set(by_tenant)
    assert len({prompt[10] for prompt in scanned}) == len(scanned)  # each document once
    at = trace.timestamps[trace.input_tokens == 960]
    assert np.median(np.diff(at)) < 0.12  # close together: ten a second, and the scans overlap


def test_agents_pause_and_documents_are_read_once() -> None:
    overrides = {
        "document": {"median": 800, "shape": 0},
        "system": {"count": 1, "tokens": {"low": 320, "high": 320}},
        "task": {"median": 32, "shape": 0},
    }
    trace = small("agents-documents", requests=3000, **overrides)
    documents = [prompt for prompt in prompts(trace) if len(prompt) == 50]
    starts = int((trace.input_tokens == 352).sum())
    assert len(documents) / (len(documents) + starts) == pytest.approx(0.9, abs=0.06)
    one = generate(
        "agents-documents",
        workload_settings(
            "agents-documents",
            {"requests": 3000, "rate": 1e-9, "document_share": 0, "steps": {"first": 3000, "most": 3000}}
            | {"output": {"median": 1, "shape": 0}, "tool_result": {"median": 1, "shape": 0}},
        ),
    )
    pauses = np.diff(one.timestamps)
    assert np.median(pauses) == pytest.approx(5, rel=0.15)
    assert (pauses > 300).mean() > 0.01  # the tail
    assert (pauses > 1000).any()
