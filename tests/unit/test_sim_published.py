"""Replays of recorded traces find what other programs have found in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.traces.convert import rounded_up
from costcache.sizes import parse_capacity

pytestmark = pytest.mark.traces

BLOCK = 512
LRU = Settings(policy="lru")

# Of an earlier study with another simulator, whole blocks of 512 tokens, exact shortfall: token hit
# rates in % at capacities in % of the distinct whole blocks.
STUDY = {
    ("conversation", "2%"): (7.8, 31.1),
    ("conversation", "5%"): (19.8, 37.3),
    ("conversation", "10%"): (28.2, 37.3),
    ("synthetic", "5%"): (15.3, 38.2),
    ("synthetic", "10%"): (25.4, 50.2),
}


@pytest.fixture(scope="module")
def mooncake(traces_dir: Path) -> dict[str, Trace]:
    """Mooncake's traces by their short names."""
    return {
        name: load_trace(traces_dir / f"mooncake_{name}.jsonl.gz") for name in ("conversation", "synthetic")
    }


def simulator_of(trace: Trace) -> Simulator:
    return Simulator(trace, ModelSpec.preset("deepseek-v3"), Deployment(page_size=BLOCK))


@pytest.mark.parametrize(("name", "capacity"), STUDY)
def test_lru_and_the_optimum_are_those_of_the_study(
    mooncake: dict[str, Trace], name: str, capacity: str
) -> None:
    simulator = simulator_of(mooncake[name])
    tokens = parse_capacity(capacity).tokens(
        distinct_pages=mooncake[name].distinct_pages(BLOCK), page_size=BLOCK, token_bytes=1
    )
    found = [
        100 * simulator.run(Settings(policy=policy), tokens).token_hit_rate for policy in ("lru", "optimum")
    ]
    assert found == pytest.approx(STUDY[name, capacity], abs=0.06)  # the study's are rounded to 0.1


@pytest.mark.parametrize("tree", [False, True])
def test_whole_blocks_alone(mooncake: dict[str, Trace], tree: bool) -> None:
    simulator = simulator_of(mooncake["conversation"])
    assert 100 * simulator.run(LRU, 14_054 * BLOCK, tree=tree).token_hit_rate == pytest.approx(
        25.86, abs=0.01
    )
    assert 100 * simulator.run(LRU, None, tree=tree).token_hit_rate == pytest.approx(37.34, abs=0.01)


@pytest.mark.parametrize("tree", [False, True])
def test_partial_blocks_as_two_published_simulators_keep_them(mooncake: dict[str, Trace], tree: bool) -> None:
    whole = mooncake["conversation"]
    trace = rounded_up(whole)
    assert int(trace.input_tokens.sum()) == BLOCK * len(whole.ids) == BLOCK * 288_500
    simulator = simulator_of(trace)
    limited = simulator.outcome(LRU, 14_054 * BLOCK, tree=tree)
    unlimited = simulator.outcome(LRU, None, tree=tree)
    blocks = int(trace.input_tokens.sum())
    assert 100 * limited.matched.sum() / blocks == pytest.approx(25.0, abs=0.05)
    assert 100 * unlimited.matched.sum() / blocks == pytest.approx(36.6, abs=0.05)
    # A partial block that is found is found for the tokens that it has.
    tokens = np.minimum(limited.matched, whole.input_tokens)
    assert 100 * tokens.sum() / whole.input_tokens.sum() == pytest.approx(25.5, abs=0.05)
