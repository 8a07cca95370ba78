"""The share of the memory for states, by replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from costcache.cli import cli
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.sim.ratio import DEFAULT_RATIO, RATIOS, fit_ratio
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import generate, workload_settings

MODEL = ModelSpec.preset("qwen3-next")
STATE, KV = 77_266_944, 24_576


def chat(requests: int = 300) -> Trace:
    return generate("chat", workload_settings("chat", {"requests": requests}))


def test_a_ratio_divides_the_memory() -> None:
    memory = 20 * 2**30
    fit = fit_ratio(chat(), MODEL, Deployment(page_size=16), memory)
    assert [run.ratio for run in fit.runs] == sorted(RATIOS)
    assert fit.page_size == 64
    for run in fit.runs:
        assert run.ratio is not None
        assert run.states * STATE == pytest.approx(memory * run.ratio / (1 + run.ratio), abs=STATE)
        assert run.tokens * KV == pytest.approx(memory / (1 + run.ratio), abs=64 * KV)
        assert run.states * STATE + run.tokens * KV <= memory
    assert fit.best.token_hit_rate == max(run.token_hit_rate for run in fit.runs)


def test_short_prompts_need_more_states_than_long_ones() -> None:
    best = {}
    for name in ("few-shot", "agentic"):
        trace = generate(name, workload_settings(name, {"requests": 800}))
        best[name] = fit_ratio(trace, MODEL, Deployment(page_size=64), 4 * 2**30).best.ratio
    assert best["few-shot"] is not None
    assert best["agentic"] is not None
    assert best["few-shot"] > best["agentic"]


def test_of_equal_ratios_the_servers_own_is_named() -> None:
    fit = fit_ratio(chat(), MODEL, Deployment(page_size=64), 2**42)  # all fits at any ratio
    assert len({run.token_hit_rate for run in fit.runs}) == 1
    assert fit.best.ratio == DEFAULT_RATIO


def test_ratios_without_room_are_left_out() -> None:
    fit = fit_ratio(chat(50), MODEL, Deployment(page_size=64), 2 * STATE, ratios=(0.01, 1.0))
    assert [run.ratio for run in fit.runs] == [1.0]


@pytest.mark.parametrize(
    ("model", "memory", "ratios", "message"),
    [
        ("llama-3-8b", 10**10, RATIOS, "keeps no states"),
        ("qwen3-next", 10**10, (0.0,), "ratio is 0.0"),
        ("qwen3-next", STATE + 10**7, (0.1,), "no ratio leaves room"),
    ],
)
def test_impossible_arguments_are_refused(
    model: str, memory: int, ratios: tuple[float, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        fit_ratio(chat(20), ModelSpec.preset(model), Deployment(page_size=64), memory, ratios=ratios)


def test_plan_names_the_ratio_that_fits_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    made = CliRunner().invoke(cli, ["workload", "chat", "--requests", "200", "--out", str(path)])
    assert made.exit_code == 0, made.output
    arguments = ["plan", "--model", "qwen3-next", "--memory", "10GiB", "--trace", str(path)]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    fit = fit_ratio(load_trace(path), MODEL, Deployment(), 10 * 2**30)
    line = next(line for line in shown.stdout.splitlines() if "<- best" in line)
    assert line.split()[0] == f"{fit.best.ratio:g}"
    assert f"{fit.best.token_hit_rate:.2%}" in line
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["ratios"]
    assert found["best"] == fit.best.ratio
    assert [run["token_hit_rate"] for run in found["runs"]] == [run.token_hit_rate for run in fit.runs]


def test_plan_with_a_trace_refuses_a_model_without_states() -> None:
    result = CliRunner().invoke(cli, ["plan", "--model", "llama-3-8b", "--memory", "10GiB", "--trace", "x"])
    assert result.exit_code == 1
    assert "--trace is for hybrid models, and 'llama-3-8b' has no states" in result.stderr
