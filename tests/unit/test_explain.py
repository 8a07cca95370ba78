"""``costcache explain``: its sums are the replay's, on any trace; what it says of a policy; wrong use."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import hookimpl
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.explained import Part, Verdict
from costcache.model import ModelSpec
from costcache.orders import VictimOrder
from costcache.plugins import PluginManager
from costcache.policies import PolicySpec
from costcache.policies.keyed import FIFO
from costcache.records import NodeRecord, RequestInfo, RequestRecord
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.explain import ClassReport, Explanation, StepIn, explain
from costcache.sim.trace import Trace
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings
from tests.unit.commands import answer, costcache_, refusal

LLAMA = ModelSpec.preset("llama-3-8b")
HYBRID = ModelSpec.preset("qwen3-next")
PAGE = 16


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(generate("chat", workload_settings("chat", {"requests": 400})), path)
    return path


def trace_of(prompts: Sequence[Sequence[int]], gap: float = 1.0) -> Trace:
    """A trace of whole pages; block ids name the whole prefix up to their end."""
    names: dict[tuple[int, ...], int] = {}
    ids: list[int] = []
    offsets = [0]
    for prompt in prompts:
        ids += [names.setdefault(tuple(prompt[: at + 1]), len(names)) for at in range(len(prompt))]
        offsets.append(len(ids))
    lengths = np.diff(offsets) * PAGE
    return Trace(
        name="made",
        block_size=PAGE,
        timestamps=np.arange(len(prompts), dtype=np.float64) * gap,
        input_tokens=lengths.astype(np.int64),
        output_tokens=np.array([7 * n % 600 for n in range(len(prompts))], np.int64),
        ids=np.array(ids, np.int64),
        offsets=np.array(offsets, np.int64),
    )


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def simulator(trace: Trace, model: ModelSpec = LLAMA, **options: Any) -> Simulator:
    return Simulator(trace, model, Deployment(page_size=PAGE), **options)


def total(found: Explanation, field: str) -> int:
    return sum(getattr(account, field) for account in found.classes)


@given(
    asked=prompts,
    pages=st.integers(6, 14),
    trim=st.sampled_from(["exact", "off"]),
    refresh=st.integers(5, 15),
)
def test_the_sums_of_all_classes_are_the_replays(
    asked: list[list[int]], pages: int, trim: Literal["exact", "off"], refresh: int
) -> None:
    sim = simulator(trace_of(asked))
    settings = Settings(policy="hazard", trim=trim, policy_settings={"refresh": refresh})
    found = explain(sim, settings, pages * PAGE)
    plain = sim.outcome(settings, pages * PAGE)
    # To keep account changes no decision.
    assert found.outcome.matched.tolist() == plain.matched.tolist()
    assert total(found, "hit_tokens") == total(found, "used") == plain.matched.sum()
    assert total(found, "evicted_tokens") == total(found, "evicted") == plain.evicted
    assert total(found, "held") <= pages * PAGE
    # Each page was made by the miss of a request; it was evicted, or is cached.
    missed = int(sim.trace.input_tokens.sum() - plain.matched.sum())
    assert total(found, "evicted") + total(found, "held") == missed
    # What a request misses and one before it asked for has been evicted.
    before: set[tuple[int, ...]] = set()
    returned = 0
    for prompt, matched in zip(asked, plain.matched.tolist(), strict=True):
        heads = [tuple(prompt[: at + 1]) for at in range(len(prompt))]
        returned += sum(PAGE for head in heads[matched // PAGE :] if head in before)
        before.update(heads)
    assert total(found, "returned") == returned
    for account in found.classes:
        assert account.returned <= account.evicted
        assert 0.0 <= account.reused <= 1.0
        assert (account.eviction_age is None) == (not account.evicted)
        assert (account.worth is None) == (not account.held)
        assert all(a >= b for a, b in zip(account.unused, account.unused[1:], strict=False))
    decided = [account.used + account.evicted for account in found.classes]
    assert decided == sorted(decided, reverse=True)


@given(asked=prompts, states=st.integers(2, 6), share=st.sampled_from([None, 0.5]))
def test_the_sums_of_all_classes_of_states_are_the_replays(
    asked: list[list[int]], states: int, share: float | None
) -> None:
    sim = simulator(trace_of(asked), HYBRID, state_share=share)
    token = sim.cost.token
    memory = 2 * states * token.state_bytes // token.kv_bytes
    found = explain(sim, Settings(policy="hazard"), memory)
    plain = sim.outcome(Settings(policy="hazard"), memory)
    assert found.unit == "states"
    assert found.outcome.matched.tolist() == plain.matched.tolist()
    assert total(found, "hit_tokens") == plain.matched.sum()
    assert total(found, "used") == np.count_nonzero(plain.matched)
    bytes_gone = total(found, "evicted_tokens") * token.kv_bytes + total(found, "evicted") * token.state_bytes
    if share is None:
        assert bytes_gone // token.kv_bytes == plain.evicted
    else:  # a leaf evicted for its state counts one state there, and its KV with it here
        assert bytes_gone // token.kv_bytes >= plain.evicted
    assert all(account.returned <= account.evicted for account in found.classes)
    assert not found.compared


class Scripted(FIFO):
    """Two classes of leaves, by the parity of their pages; its comparison with LRU is scripted."""

    unit: Literal["tokens", "states"] = "tokens"
    ages = (1.0, 2.0)

    def __init__(self, story: Sequence[tuple[int, int, bool]]) -> None:
        super().__init__()
        self._story = story
        self._at = -1

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._at += 1

    def explained(self) -> Scripted:
        return self

    def parts(self, record: NodeRecord, start: int, stop: int) -> list[Part]:
        return [Part(start // PAGE % 2, stop - start, 2.5)]

    def name(self, group: int) -> str:
        return ("even", "odd")[group]

    def worth(self, group: int, age: float) -> float:
        return 0.25

    def unused(self, group: int) -> list[float]:
        return [0.5, 0.25]

    def against_lru(self) -> Verdict:
        return Verdict(*self._story[self._at])

    def tables(self) -> None:
        pass


def offering(make: Callable[[], VictimOrder]) -> PluginManager:
    class Offer:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {"scripted": PolicySpec(lambda *_: make(), "As told.", explains=True)}

    manager = PluginManager()
    manager.register(Offer(), "offer")
    return manager


def test_any_policy_with_classes_is_explained() -> None:
    story = [(9, 0, False), (9, 4, False), (9, 9, True), (9, 9, True), (9, 9, False), (9, 9, True)]
    sim = simulator(trace_of([[n] for n in (0, 1, 0, 2, 3, 1)]), plugins=offering(lambda: Scripted(story)))
    found = explain(sim, Settings(policy="scripted"), 2 * PAGE)
    assert found.classes == [
        ClassReport("even", PAGE, 3 * PAGE, 2 * PAGE, PAGE, PAGE, 3 * PAGE, 2.5, 0.25, [0.5, 0.25])
    ]
    assert found.classes[0].reused == 2 / 6
    assert (found.gained, found.lost) == (9, 9)
    assert found.step_ins == [StepIn(request=3, delay=2, back=5), StepIn(request=6, delay=1, back=None)]


def test_the_table_names_what_was_kept_and_dropped(chat: Path) -> None:
    shown = answer("explain", chat, "--model", "llama-3-8b", "--top", "3")
    lines = shown.splitlines()
    assert lines[0].startswith("chat: 400 requests")
    assert lines[1].startswith("hazard, pool of 5%, ")
    assert "regretted" in shown
    assert "used once, under" in shown
    assert "more classes" in shown
    assert "were requested again" in shown
    assert "against LRU: " in shown
    everything = answer("explain", chat, "--model", "llama-3-8b", "--top", "700")
    assert "more classes" not in everything


def test_json_has_all_classes_and_the_figures_of_simulate(chat: Path) -> None:
    options = (
        chat,
        "--model",
        "llama-3-8b",
        "--capacity",
        "10%",
        "--trim",
        "off",
        "--page-size",
        "32",
        "--json",
    )
    found = json.loads(answer("explain", *options))
    (run,) = json.loads(answer("simulate", *options, "--policy", "hazard"))["runs"]
    assert {**found["run"], "policy": "hazard"} == {k: v for k, v in run.items() if k in found["run"]}
    assert found["policy"] == "hazard"
    assert found["unit"] == "tokens"
    assert sum(each["evicted_tokens"] for each in found["classes"]) == run["evicted_tokens"] > 0
    assert sum(each["hit_tokens"] for each in found["classes"]) == run["hit_tokens"] > 0
    assert set(found["against_lru"]) == {"gained_tokens", "lost_tokens", "falls"}
    names = [each["name"] for each in found["classes"]]
    assert len(set(names)) == len(names)
    assert answer("explain", *options) == answer("explain", *options)


def test_states_of_a_hybrid_model(chat: Path) -> None:
    shown = answer("explain", chat, "--model", "qwen3-next", "--capacity", "50%")
    assert "states evicted, of which" in shown
    assert "does not compare itself with LRU" in shown
    found = json.loads(answer("explain", chat, "--model", "qwen3-next", "--capacity", "50%", "--json"))
    assert found["unit"] == "states"
    assert found["against_lru"] is None
    names = [each["name"] for each in found["classes"]]
    assert "used once, 200+ output, nothing after it" in names
    assert any(name.startswith("used 2 times, every ") for name in names)
    assert "used once, 200+ output, after a state, nothing after it" in names


def test_a_pool_without_limit_evicts_nothing(chat: Path) -> None:
    found = json.loads(answer("explain", chat, "--model", "llama-3-8b", "--capacity", "unlimited", "--json"))
    assert sum(each["evicted"] for each in found["classes"]) == 0
    assert sum(each["held"] for each in found["classes"]) > 0
    assert "0 tokens evicted, of which 0 were" in answer(
        "explain", chat, "--model", "llama-3-8b", "--capacity", "unlimited"
    )


def test_the_picture_has_curves_and_is_the_same_at_every_rerun(chat: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'plot'")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        shown = answer("explain", chat, "--model", "llama-3-8b", "--plot", path)
        assert shown.endswith(f"plot: {path}\n")
    assert first.read_bytes() == second.read_bytes()
    assert b"<svg" in first.read_bytes()
    roomy = (
        "explain",
        chat,
        "--model",
        "llama-3-8b",
        "--capacity",
        "unlimited",
        "--plot",
        tmp_path / "c.svg",
    )
    result = costcache_(*roomy)  # the figures are printed first
    assert result.exit_code == 1
    assert "has estimated nothing, since nothing had to be evicted" in result.stderr
    assert not (tmp_path / "c.svg").exists()
    assert "end the name with" in refusal(
        "explain", chat, "--model", "llama-3-8b", "--plot", tmp_path / "a.gif"
    )


@pytest.mark.parametrize("policy", ["lru", "lfu", "lhd", "optimum"])
def test_other_policies_are_refused_with_those_that_can_be_explained(chat: Path, policy: str) -> None:
    assert refusal("explain", chat, "--model", "llama-3-8b", "--policy", policy) == (
        f"policy {policy!r} does not tell classes apart and cannot be explained: of the policies that serve "
        "llama-3-8b, hazard can"
    )


def test_a_policy_that_declares_classes_and_has_none_is_refused() -> None:
    sim = simulator(trace_of([[0], [1]]), plugins=offering(FIFO))
    with pytest.raises(SettingsError, match="'scripted' does not tell classes apart"):
        explain(sim, Settings(policy="scripted"), 2 * PAGE)


def test_a_policy_that_does_not_serve_the_model_is_refused_before_the_trace_is_read() -> None:
    assert "policy 'seglen' does not serve model 'llama-3-8b'" in refusal(
        "explain", "none.jsonl", "--model", "llama-3-8b", "--policy", "seglen"
    )


def test_wrong_use_is_said_in_a_line(chat: Path, tmp_path: Path) -> None:
    model = ("--model", "llama-3-8b")
    assert "did you mean 'hazard'" in refusal("explain", chat, *model, "--policy", "hasard")
    assert "'policy_settings.ghosts'" in refusal("explain", chat, *model, "--set", "costcache.ghosts=-1")
    assert "--set 'lru.x=1'" in refusal("explain", chat, *model, "--set", "lru.x=1")
    assert "5 %%" in refusal("explain", chat, *model, "--capacity", "5 %%")
    assert "none.jsonl" in refusal("explain", tmp_path / "none.jsonl", *model)


class Failing(Scripted):
    def insert(self, record: NodeRecord) -> None:
        raise RuntimeError("no")


@pytest.mark.filterwarnings("ignore")
def test_a_policy_that_fails_leaves_nothing_to_explain() -> None:
    sim = simulator(trace_of([[0], [1]]), plugins=offering(lambda: Failing([(0, 0, False)] * 2)))
    with pytest.raises(Exception, match="failed and was replaced by lru"):
        explain(sim, Settings(policy="scripted"), 2 * PAGE)
