"""Sweeps on Ray give what one process gives."""

from __future__ import annotations

import sys

import pytest

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.sweep import Cell, outcomes
from costcache.sim.workloads import generate, workload_settings

CELLS = [
    Cell(Settings(policy=policy), str(tokens), tokens)
    for tokens in (16_000, 64_000)
    for policy in ("lru", "slru", "optimum")
]


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    trace = generate("chat", workload_settings("chat", {"requests": 200}))
    return Simulator(trace, ModelSpec.preset("deepseek-v3"), Deployment(page_size=16))


def test_without_ray_it_is_said_how_to_get_it(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"--ray needs the package ray: pip install 'costcache\[ray\]'"):
        outcomes(simulator, CELLS, ray=True)


# Ray's own processes and sockets outlive it a little, and it warns of settings to come.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cluster_gives_the_outcomes_of_one_process(simulator: Simulator) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        heard: list[tuple[Cell, int]] = []
        there = outcomes(simulator, CELLS, ray=True, progress=lambda cell, done: heard.append((cell, done)))
        here = outcomes(simulator, CELLS)
        assert [each.matched.tolist() for each in there] == [each.matched.tolist() for each in here]
        assert [each.evicted for each in there] == [each.evicted for each in here]
        assert heard == [(cell, 200) for cell in CELLS]
        bad = Cell(Settings(policy="optimum"), "x", 16_000, serving=ServingSettings())
        with pytest.raises(SettingsError, match="'optimum' is for the plain mode"):
            outcomes(simulator, [bad], ray=True)
        assert ray.is_initialized()  # somebody else's cluster is left as it is
    finally:
        ray.shutdown()
