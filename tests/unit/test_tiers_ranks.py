"""Tensor-parallel ranks over tiers: the same victims on each, whatever their copies do."""

from __future__ import annotations

import pytest

from tests.tiers_ranks import run

pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.torch


def test_ranks_choose_the_same_victims_and_never_wait_for_ever() -> None:
    first, second = run("mla", "by_cost", "hazard", 150)
    assert first == second
    assert first["evictions"] > 30
    assert first["ahead"] > 100, "tokens of room that was made ahead"
    assert first["fallbacks"] == [0, 0, 0]
    assert first["found"] > 0
