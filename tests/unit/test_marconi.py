"""Marconi's tuning: the weight under which recent requests would have hit the most."""

from __future__ import annotations

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies.marconi import ALPHAS, Checkpoint, Marconi, ShadowStates, best_alpha
from costcache.radix import StateCache
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.workloads import generate, workload_settings

KV, STATE = 1, 100


def flops(start: int, stop: int) -> float:
    return float(stop - start)


def path(*ends: tuple[int, int]) -> list[Checkpoint]:
    return [Checkpoint(name, end) for name, end in ends]


def shadow(capacity: int, alpha: float = 0.0) -> ShadowStates:
    return ShadowStates(capacity, KV, STATE, flops, alpha)


def test_a_shadow_hits_the_deepest_state_and_adds_one_where_prompts_diverge() -> None:
    one = shadow(10_000)
    one.serve(path((1, 500)))
    one.serve(path((1, 500), (2, 800)))
    assert one.found == 500
    one.serve(path((3, 300), (4, 900)))  # nothing was kept at 300
    one.serve(path((3, 300), (5, 700)))
    assert one.found == 500, "seen before, not kept"
    one.serve(path((3, 300), (6, 600)))
    assert one.found == 800, "kept now, by the second that came by"


def test_a_shadow_never_exceeds_its_memory() -> None:
    one = shadow(1000)
    for number in range(50):
        one.serve(path((number, 300)))
        assert one._used <= 1000
    assert one._used == sum(held for _, _, held in one._live.values())


def test_without_weight_it_is_lru_and_with_weight_long_prompts_are_kept() -> None:
    long, short = path((1, 700)), [path((number, 10)) for number in range(2, 30)]
    for alpha, found in ((0.0, 0), (4.0, 700)):
        one = shadow(1500, alpha)
        one.serve(long)
        for request in short:
            one.serve(request)
        one.serve(long)
        assert one.found == found


def test_the_best_weight_is_the_one_that_finds_most_and_the_smallest_of_equals() -> None:
    long, short = path((1, 700)), [path((number, 10)) for number in range(2, 30)]
    requests = [long, *short, long]
    best = best_alpha(requests, 1500, KV, STATE, flops)
    assert best > 0
    assert best_alpha([long], 1500, KV, STATE, flops) == min(ALPHAS)


def test_it_tunes_from_the_first_eviction_on_and_not_where_the_weight_is_set() -> None:
    trace = generate("agentic", workload_settings("agentic", {"requests": 600}))
    model, found = ModelSpec.preset("qwen3-next"), {}
    simulator = Simulator(trace, model, Deployment(page_size=512), state_share=None)
    tokens = trace.distinct_pages(512) * 512 // 20
    for settings in ({"window": 100}, {"alpha": 0.0}, {"alpha": 4.0}):
        run = simulator.run(Settings(policy="marconi", policy_settings=settings), tokens)
        assert run.fallbacks == 0
        found[str(settings)] = run.hit_tokens
    assert len(set(found.values())) > 1, "the weight matters here"


def test_the_order_takes_the_weight_that_was_found() -> None:
    cache = StateCache("qwen3-next", 3 * 77_266_944, 512, "marconi", policy_settings={"window": 20})
    order = cache._pool.order
    assert isinstance(order, Marconi)
    for number in range(40):
        tokens = [number % 7] * 512
        cache.match_prefix(tokens, number)
        state = cache.allocate_state()
        assert state is not None
        done = cache.insert(tokens, request=number, state=state)
        if done.node.state is None or done.node.state.slot != state:
            cache.release_state(state)
        cache.finish(number)
    assert order._recent is not None
    assert len(order._recent) < 20, "a window was used up"
    assert order.alpha in ALPHAS
    assert cache.stats().fallbacks == 0
