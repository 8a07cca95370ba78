"""Sweeps: the same runs from one process and from two, in the order of the cells."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.results import TIMING, Run
from costcache.sim.serving import ServingSettings
from costcache.sim.sweep import Cell, outcomes, sweep
from costcache.sim.workloads import generate, workload_settings

SERVER = ServingSettings(concurrency=8)


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    trace = generate("multi-turn", workload_settings("multi-turn", {"requests": 200}))
    return Simulator(trace, ModelSpec.preset("deepseek-v3"), Deployment(page_size=16), warmup=20)


def cell(policy: str, capacity: str, tokens: int | None, **options: Any) -> Cell:
    headroom = options.pop("headroom", 0.0)
    return Cell(Settings(policy=policy, headroom=headroom), capacity, tokens, **options)


def untimed(run: Run) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name not in TIMING}


def test_two_processes_give_the_runs_of_one(simulator: Simulator) -> None:
    cells = [
        cell("slru", "big", 64_000),
        cell("optimum", "small", 16_000),
        cell("lru", "small", 16_000),
        cell("lru", "small", 16_000, serving=SERVER),
        cell("lru", "small", 16_000, always_free=True, headroom=0.5),
        cell("infinite", "small", 16_000),
        cell("lru", "unlimited", None, tree=True),
    ]
    heard: list[tuple[Cell, int]] = []
    one = sweep(simulator, cells)
    two = sweep(simulator, cells, jobs=2, progress=lambda cell, done: heard.append((cell, done)))
    assert [untimed(run) for run in one] == [untimed(run) for run in two]
    assert [(run.policy, run.capacity) for run in two] == [(c.settings.policy, c.capacity) for c in cells]
    assert heard == [(cell, 200) for cell in cells]
    assert len({(run.hit_tokens, run.evicted_tokens) for run in two}) >= 5, "the cells differ"
    assert two[3].ttft_queued


def test_an_error_in_a_process_is_the_users(simulator: Simulator) -> None:
    cells = [cell("lru", "small", 16_000), cell("optimum", "small", 16_000, serving=SERVER)]
    for jobs in (1, 2):
        with pytest.raises(SettingsError, match="'optimum' is for the plain mode"):
            sweep(simulator, cells, jobs=jobs)


@pytest.mark.parametrize("jobs", [0, -2])
def test_a_sweep_needs_a_process(simulator: Simulator, jobs: int) -> None:
    with pytest.raises(SettingsError, match=f"jobs is {jobs}"):
        outcomes(simulator, [cell("lru", "small", 16_000)], jobs=jobs)


def test_no_cells_are_no_runs(simulator: Simulator) -> None:
    assert sweep(simulator, [], jobs=2) == []


def test_one_process_reports_progress_by_cell(simulator: Simulator) -> None:
    cells = [cell("lru", "small", 16_000), cell("lfu", "small", 16_000)]
    heard: dict[str, int] = {}

    def progress(cell: Cell, done: int) -> None:
        heard[cell.settings.policy] = heard.get(cell.settings.policy, 0) + done

    sweep(simulator, cells, progress=progress)
    assert heard == {"lru": 200, "lfu": 200}
