"""A real engine on the CPU: the answers are stock's, token for token, and more of the prompts is cached."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.monitor.figures import figures
from costcache.monitor.reasons import reasons
from costcache.monitor.samples import parse
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings
from costcache.sim.traces.files import open_source
from costcache.sim.traces.recording import read_recorded
from tests.vllm import replicas
from tests.vllm.engine import MODEL, WINDOWS, run_engine

pytestmark = pytest.mark.engine

ROUNDS = 50
"""Of eight prompts each."""


def test_the_answers_are_stocks_and_more_is_cached(tmp_path: Path) -> None:
    stock, log = run_engine(tmp_path, rounds=ROUNDS)
    assert stock.get("reset"), log
    assert stock["metrics"] == {}

    hazard, log = run_engine(tmp_path, {"policy": "hazard"}, rounds=ROUNDS)
    assert hazard.get("reset"), log  # no block is in use at the end
    assert "policy 'hazard', pool 'kv' of 100 blocks of 32 tokens" in log
    assert "LRU takes over" not in log
    assert hazard["answers"] == stock["answers"]
    assert hazard["cached"] > 1.2 * stock["cached"]
    # The engine core is a process of its own: its counts arrive in this one's registry.
    assert hazard["metrics"]["costcache:evictions_total"] > 100
    assert hazard["metrics"]["costcache:lru_in_force"] == 0
    assert (
        hazard["metrics"]["costcache:gained_tokens_total"] > hazard["metrics"]["costcache:lost_tokens_total"]
    )
    assert hazard["metrics"]["costcache:fallbacks_total"] == 0
    evictions = hazard["metrics"]["costcache:evictions_total"]
    assert hazard["metrics"]["costcache:decision_seconds_count"] == evictions
    assert hazard["metrics"]["costcache:excess_units_count"] == evictions
    assert hazard["metrics"]["costcache:policy_info"] == 1

    lru, log = run_engine(tmp_path, environment={"COSTCACHE_VLLM": "lru"}, rounds=ROUNDS)
    assert lru.get("reset"), log
    assert lru["answers"] == stock["answers"]
    # But for a few blocks: which prompts of a round share its first step depends on when they arrive.
    assert abs(lru["cached"] - stock["cached"]) <= 0.02 * stock["cached"]


def test_the_answers_are_stocks_on_a_model_with_windows(tmp_path: Path) -> None:
    stock, log = run_engine(tmp_path, config=WINDOWS, rounds=60, num_gpu_blocks_override=201)
    assert stock.get("reset"), log
    hazard, log = run_engine(
        tmp_path, {"policy": "hazard"}, config=WINDOWS, rounds=60, num_gpu_blocks_override=201
    )
    assert hazard.get("reset"), log  # no block is in use at the end
    assert "policy 'hazard', pool 'memory' of 200 blocks of 32 tokens" in log
    assert "shared by 3 KV cache groups" in log
    assert "LRU takes over" not in log
    assert hazard["answers"] == stock["answers"]
    assert hazard["cached"] > stock["cached"]
    assert hazard["metrics"]["costcache:evictions_total"] > 20
    assert hazard["metrics"]["costcache:fallbacks_total"] == 0


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_recording_replayed_has_the_engines_hit_rate(policy: str, tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    result, log = run_engine(
        tmp_path,
        {"policy": policy},
        {"COSTCACHE_RECORD": str(folder)},
        rounds=12,
        at_once=1,
        num_gpu_blocks_override=201,
    )
    assert result.get("reset"), log
    (path,) = folder.iterdir()
    with open_source(path) as source:
        recorded = read_recorded(source)
    (header,) = recorded.headers
    assert len(recorded.trace) == 12 * 8
    assert int(recorded.cached.sum()) == result["cached"]
    assert (header.policy, header.page_size, header.capacity) == (policy, 32, 200 * 32)
    simulator = Simulator(recorded.trace, ModelSpec.from_config(MODEL), Deployment(page_size=32))
    run = simulator.run(Settings(policy=policy), header.capacity, serving=ServingSettings(concurrency=1))
    assert 0.05 < recorded.hit_rate < 0.9
    assert abs(run.token_hit_rate - recorded.hit_rate) < 0.005

    watched = figures(parse(result["page"], 0.0, "the engine"))
    assert (watched.server, watched.policy, watched.lru) == ("vllm", policy, policy == "lru")
    assert (watched.capacity, watched.page_size, watched.requests) == (header.capacity, 32, 12 * 8)
    assert watched.prompt_tokens == int(recorded.trace.input_tokens.sum())
    assert watched.found_tokens == result["cached"]
    assert watched.evicted > 0
    assert "evicted" in [reason.name for reason in reasons(watched)]


def test_a_wrong_setting_stops_the_engine_and_names_it(tmp_path: Path) -> None:
    result, log = run_engine(tmp_path, {"polcy": "hazard"}, rounds=1)
    assert result.get("failed")
    assert "unknown setting 'costcache.polcy'" in log


def test_both_ranks_of_data_parallelism_have_the_policy(tmp_path: Path) -> None:
    """Two engine cores behind vLLM's coordinator; their counts come with the label ``engine``."""
    served, log = run_engine(tmp_path, {"policy": "hazard"}, script=replicas.__file__, rounds=14)
    assert served.get("reset"), log  # no block is in use at the end
    assert log.count("policy 'hazard', pool 'kv' of 100 blocks of 32 tokens") == 2
    assert "LRU takes over" not in log
    assert served["cached"] > 0
    found = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(served["page"])
        for sample in family.samples
        if "engine" in sample.labels
    }
    for engine in ("0", "1"):
        assert found["costcache:evictions_total", engine] > 5
        assert found["costcache:fallbacks_total", engine] == 0
        assert found["costcache:lru_in_force", engine] == 0
        assert found["costcache:policy_info", engine] == 1
        assert found["vllm:prompt_tokens_total", engine] > 10_000
