"""The simulator: free targets, warm-up, offline policies and refusals."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.errors import PluginError, SettingsError
from costcache.model import ModelSpec
from costcache.radix.tree import RadixTree
from costcache.settings import Settings
from costcache.sim.engine import OFFLINE, Simulator
from costcache.sim.replay import replay
from costcache.sim.results import TIMING, Run
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace
from costcache.sim.workloads import generate, workload_settings
from tests.property.kit import Finishing, claiming
from tests.unit.test_replay import traces

MHA = ModelSpec.preset("llama-3-8b")
MLA = ModelSpec.preset("deepseek-v3")
LRU = Settings(policy="lru")


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", workload_settings("chat", {"requests": 400}))


@pytest.fixture(scope="module")
def simulator(chat: Trace) -> Simulator:
    return Simulator(chat, MHA, Deployment(page_size=16))


def untimed(run: Run) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name not in TIMING}


@given(
    trace=traces(),
    page=st.integers(1, 6),
    pages=st.integers(1, 20),
    headroom=st.floats(0.01, 0.95),
    mla=st.booleans(),
)
def test_a_pool_that_always_keeps_a_share_free_is_a_smaller_pool(
    trace: Trace, page: int, pages: int, headroom: float, mla: bool
) -> None:
    capacity = pages * page
    smaller = (capacity - math.ceil(headroom * capacity)) // page * page
    assume(smaller >= page)
    settings = (
        Settings(policy="lru", architecture={"floor": headroom})
        if mla
        else Settings(policy="lru", headroom=headroom)
    )
    simulator = Simulator(trace, MLA if mla else MHA, Deployment(page_size=page))
    kept = simulator.outcome(settings, capacity, always_free=True)
    assert kept.matched.tolist() == simulator.outcome(LRU, smaller).matched.tolist()


@given(trace=traces(), page=st.integers(1, 4), pages=st.integers(1, 20), headroom=st.floats(0.0, 0.95))
def test_the_target_is_free_after_every_request(trace: Trace, page: int, pages: int, headroom: float) -> None:
    keys = trace.page_keys(page)
    settings = Settings(policy="lru", headroom=headroom)
    binding = Binding.of(MHA, Deployment(page_size=page), settings)
    tree = RadixTree(binding, pages * page, page_bytes=keys.bytes_per_page)
    free: list[int] = []
    tree.pool.rank_by("lru", Finishing(lambda request, info: free.append(tree.pool.free)))
    replay(trace, keys, tree, always_free=True)
    assert len(free) == len(trace)
    assert min(free) >= headroom * tree.pool.capacity


def test_a_watermark_costs_less_than_always_free_and_nothing_costs_nothing(simulator: Simulator) -> None:
    capacity, settings = 32_000, Settings(policy="lru", headroom=0.2)
    exact = simulator.run(LRU, capacity, tree=True)
    watermark = simulator.run(settings, capacity)
    always = simulator.run(settings, capacity, always_free=True)
    assert exact.hit_tokens > watermark.hit_tokens > always.hit_tokens > 0
    assert exact.evicted_tokens < watermark.evicted_tokens < always.evicted_tokens
    assert watermark.evictions < exact.evictions
    # Without a target there is nothing to keep free.
    assert untimed(simulator.run(LRU, capacity, always_free=True, tree=True)) == untimed(exact)


def test_mla_and_mha_evict_the_same_tokens_at_the_exact_shortfall(chat: Trace) -> None:
    served = Deployment(page_size=16)
    runs = [Simulator(chat, model, served).outcome(LRU, 32_000, tree=True) for model in (MLA, MHA)]
    assert runs[0].matched.tolist() == runs[1].matched.tolist()
    assert runs[0].evicted == runs[1].evicted > 0


def test_pages_and_the_tree_give_the_same_run(simulator: Simulator) -> None:
    for capacity in (16, 4_000, 32_000, None):
        pages, tree = simulator.run(LRU, capacity), simulator.run(LRU, capacity, tree=True)
        assert (pages.tree, tree.tree) == (False, True)
        # Requests longer than the pool ask the tree for more than there is.
        apart = {"tree", "trimmed", *({"shortfall_tokens"} if tree.oversized_requests else ())}
        for name, value in untimed(tree).items():
            assert name in apart or getattr(pages, name) == value, name


def test_pages_serve_models_of_every_plugin_that_evicts_exactly(chat: Trace) -> None:
    served = Deployment(page_size=16)
    for plugins, model, by_pages in (
        (None, MLA, True),
        (claiming(), MHA, True),
        (claiming(adjust_eviction_count=lambda requested: requested), MHA, False),
        (claiming(free_target=lambda pool: 0.1 if pool.evictable else 0.0), MHA, False),
    ):
        simulator = Simulator(chat, model, served, plugins=plugins)
        pages, tree = simulator.outcome(LRU, 32_000), simulator.outcome(LRU, 32_000, tree=True)
        assert (pages.tree, tree.tree) == (not by_pages, True)
        assert pages.matched.tolist() == tree.matched.tolist()
        assert (simulator.lru_curve(LRU) is not None) == by_pages


@pytest.mark.parametrize(
    "settings",
    [
        Settings(policy="lru", headroom=0.1),
        Settings(policy="lru", trim="off"),
        Settings(policy="lfu"),
        Settings(policy="lru", trim="chunk"),
    ],
)
def test_results_that_pages_cannot_give_replay_the_tree(simulator: Simulator, settings: Settings) -> None:
    assert simulator.run(settings, 32_000).tree


def test_warm_up_leaves_out_the_first_requests(chat: Trace, simulator: Simulator) -> None:
    warm = Simulator(chat, MHA, Deployment(page_size=16), warmup=150)
    for tree, serving in ((False, None), (True, None), (True, ServingSettings(concurrency=4))):
        outcome = simulator.outcome(LRU, 32_000, tree=tree, serving=serving)
        run = warm.run(LRU, 32_000, tree=tree, serving=serving)
        whole = simulator.figures(outcome, LRU, 32_000)
        assert run.input_tokens == chat.input_tokens[150:].sum()
        assert run.hit_tokens == outcome.matched[150:].sum()
        assert run.token_hit_rate == run.hit_tokens / run.input_tokens > whole.token_hit_rate
        times = simulator.ttft(outcome)
        assert times.shape == (400,)
        assert run.ttft_mean == pytest.approx(times[150:].mean())
        assert run.ttft_p90 == pytest.approx(np.percentile(times[150:], 90))
        assert (run.requests, run.evicted_tokens) == (400, whole.evicted_tokens)


@pytest.mark.parametrize("warmup", [-1, 400, 1000])
def test_a_warm_up_that_leaves_nothing_is_refused(chat: Trace, warmup: int) -> None:
    with pytest.raises(SettingsError, match=f"warmup is {warmup} requests of 400"):
        Simulator(chat, MHA, Deployment(page_size=16), warmup=warmup)


def test_offline_policies(chat: Trace, simulator: Simulator) -> None:
    assert set(OFFLINE) == {"infinite", "optimum"}
    lru = simulator.run(LRU, 32_000, capacity="x")
    best = simulator.run(Settings(policy="optimum"), 32_000, capacity="x")
    infinite = simulator.run(Settings(policy="infinite"), 32_000, capacity="x")
    assert lru.hit_tokens < best.hit_tokens < infinite.hit_tokens
    assert infinite.token_hit_rate == pytest.approx(chat.ideal_hit_rate(16))
    assert (infinite.capacity, infinite.capacity_tokens, infinite.evicted_tokens) == ("x", None, 0)
    assert (best.policy, best.policy_in_force, best.capacity_tokens) == ("optimum", "optimum", 32_000)
    unlimited = simulator.run(Settings(policy="optimum"), None)
    assert unlimited.hit_tokens == infinite.hit_tokens


@pytest.mark.parametrize("policy", sorted(OFFLINE))
def test_offline_policies_have_no_settings(simulator: Simulator, policy: str) -> None:
    with pytest.raises(SettingsError, match=f"'{policy}' has no settings.*'depth'"):
        simulator.run(Settings(policy=policy, policy_settings={"depth": 3}), 32_000)


def test_a_server_may_be_unlimited_but_not_offline(simulator: Simulator) -> None:
    with pytest.raises(SettingsError, match="'optimum' is for the plain mode"):
        simulator.run(Settings(policy="optimum"), 32_000, serving=ServingSettings())
    run = simulator.run(Settings(policy="infinite"), 32_000, serving=ServingSettings())
    assert (run.policy_in_force, run.capacity_tokens, run.evictions) == ("infinite", None, 0)
    assert run.hit_tokens == simulator.run(LRU, None, serving=ServingSettings()).hit_tokens


@pytest.mark.parametrize("tree", [False, True])
def test_wrong_settings_are_refused_whichever_way_is_taken(simulator: Simulator, tree: bool) -> None:
    with pytest.raises(SettingsError, match="depth"):
        simulator.run(Settings(policy="lru", policy_settings={"depth": 3}), 32_000, tree=tree)
    with pytest.raises(SettingsError, match="ceiling"):
        simulator.run(Settings(policy="lru", architecture={"ceiling": 3}), 32_000, tree=tree)
    with pytest.raises(PluginError, match="nonesuch"):
        simulator.run(Settings(policy="nonesuch"), 32_000, tree=tree)
    for capacity in (15, 0, -16):
        with pytest.raises(SettingsError, match=f"capacity_tokens is {capacity}: give a page of 16"):
            simulator.run(LRU, capacity, tree=tree)


def test_a_wrong_prefill_model_is_refused(chat: Trace) -> None:
    with pytest.raises(SettingsError, match="no prefill model 'fast'"):
        Simulator(chat, MHA, Deployment(page_size=16), prefill="fast")


def test_progress_reports_every_request(simulator: Simulator) -> None:
    for settings in (LRU, Settings(policy="optimum"), Settings(policy="infinite"), Settings(policy="lfu")):
        for serving in (None, ServingSettings()):
            if serving is None or settings.policy not in OFFLINE:
                heard: list[int] = []
                simulator.run(settings, 32_000, serving=serving, progress=heard.append)
                assert sum(heard) == 400
