"""Hostile inputs to every surface, the same in every run; and the driver finds what it is there to find."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.fuzz import driver, surfaces

INPUTS = 1000
SEED = 1

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_the_program_stands_hostile_inputs() -> None:
    failures, counts = driver.fuzz(SEED, INPUTS)
    assert not failures, f"python -m tests.fuzz.driver --seed {SEED} --only {failures[0].number}: {failures}"
    assert sum(counts.values()) == INPUTS
    assert set(counts) == set(surfaces.SURFACES)


def _raise() -> None:
    raise ZeroDivisionError("found")


def _sleep() -> None:
    time.sleep(60)


def _take() -> None:
    np.ones(30_000_000).sum()


def _end() -> None:
    os._exit(7)


def test_the_driver_finds_tracebacks_hangs_memory_and_death(monkeypatch: pytest.MonkeyPatch) -> None:
    acts = {2: _raise, 4: _sleep, 6: _take, 8: _end}

    def surface(number: int) -> Callable[[random.Random, surfaces.Folder], None]:
        return lambda rng, folder: acts.get(number, lambda: None)()

    monkeypatch.setattr(driver, "MEGABYTES", 100)
    monkeypatch.setattr(driver, "prepare", surfaces.Folder)
    monkeypatch.setattr(driver, "surface_of", lambda seed, number: str(number))
    monkeypatch.setattr(driver, "SURFACES", {str(n): (1, surface(n)) for n in range(10)})
    failures, counts = driver.fuzz(0, 10, seconds=4.0)
    assert [failure.number for failure in failures] == [2, 4, 6, 8]
    found, hang, memory, death = (failure.what for failure in failures)
    assert found.startswith("ZeroDivisionError: found (")
    assert hang == "hangs: not done after 4 s"
    assert memory.startswith("took 2")
    assert death == "ended the process, with 7"
    assert set(counts) == {str(n) for n in range(10) if n not in (4, 8)}
