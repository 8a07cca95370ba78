"""Sweeps on Ray give what one process gives, and what several do, even if a worker dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.sweep import Cell, outcomes
from costcache.sim.workloads import generate, workload_settings
from tests.unit.commands import answer

CELLS = [
    Cell(Settings(policy=policy), str(tokens), tokens)
    for tokens in (16_000, 64_000)
    for policy in ("lru", "slru", "optimum")
]
# Ray's own processes and sockets outlive it a little, and it warns of settings to come.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    trace = generate("chat", workload_settings("chat", {"requests": 200}))
    return Simulator(trace, ModelSpec.preset("deepseek-v3"), Deployment(page_size=16))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster on this machine, which all tests share: it takes its time to start."""
    found = pytest.importorskip("ray", reason="needs the extra 'ray'")
    found.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield found
    found.shutdown()


def workers() -> list[int]:
    """Processes that replay on this machine."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if b"ray::_Worker" in (folder / "cmdline").read_bytes():
                    pids.append(int(folder.name))
            except OSError:  # it has ended
                continue
    return pids


def test_without_ray_it_is_said_how_to_get_it(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"--ray needs the package ray: pip install 'costcache\[ray\]'"):
        outcomes(simulator, CELLS, ray=True)


def test_a_cluster_gives_the_outcomes_of_one_process(simulator: Simulator, ray: Any) -> None:
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


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.usefixtures("ray")
def test_a_worker_that_dies_is_replaced(simulator: Simulator) -> None:
    before = set(workers())
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:  # as soon as one runs, long before all is done
            for pid in set(workers()) - before:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                break

    killer = threading.Thread(target=kill)
    killer.start()
    there = outcomes(simulator, CELLS, ray=True)
    killer.join()
    assert killed
    here = outcomes(simulator, CELLS)
    assert [each.matched.tolist() for each in there] == [each.matched.tolist() for each in here]


@pytest.mark.usefixtures("ray")
def test_the_table_is_that_of_several_processes(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    answer("workload", "chat", "--requests", "150", "--out", trace)
    line = ("simulate", trace, "--model", "llama-3-8b", "--policy", "lru,hazard,optimum", "--json")
    there, here = (json.loads(answer(*line, *how)) for how in (("--ray",), ("--jobs", "2")))
    assert there == here
    assert len(there["runs"]) == 9
