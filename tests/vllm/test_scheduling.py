"""Policies behind vLLM's real schedulers: async scheduling, drafts, preemption, aborts, resets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.stepping import Stepper, check, serve

KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"asynchronous": True},
    "drafts": {"drafts": 3},
    "async drafts": {"asynchronous": True, "drafts": 3},
    "eagle": {"drafts": 3, "eagle": True},
    "async eagle": {"asynchronous": True, "drafts": 3, "eagle": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_lru_schedules_what_vllm_would(kind: str) -> None:
    """Every block of every step, every token that was found."""
    for seed in range(2):
        stock, ours = (Stepper(policy, **KINDS[kind], seed=seed) for policy in (None, "lru"))
        serve(stock, ours, seed=seed)
        assert ours.scheduled == stock.scheduled
        assert ours.found == stock.found > 1000
        assert ours.preemptions > 0
        for each in (stock, ours):
            check(each)
        assert ours.pool.costcache.runs.pool.counters.evicted > 10_000


@pytest.mark.parametrize("policy", ["lru", "hazard", "s3fifo"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_lost_under_resets_and_lost_blocks(kind: str, policy: str) -> None:
    """``reset_prefix_cache`` while requests run and while none do, and ``evict_blocks``."""
    stepper = Stepper(policy, **KINDS[kind])
    serve(stepper, seed=5, resets=True)
    check(stepper)
    assert stepper.found > 500
    assert stepper.pool.costcache.runs.pool.policy == policy
