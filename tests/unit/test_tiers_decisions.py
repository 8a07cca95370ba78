"""Decisions about tiers of memory: links, policies of writing, and the forecasts that they use."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache import (
    CostModel,
    Deployment,
    KeyedOrder,
    ModelSpec,
    NodeRecord,
    PoolState,
    RadixCache,
    RequestInfo,
)
from costcache.errors import SettingsError
from costcache.guard import HookGuard
from costcache.orders import VictimOrder
from costcache.policies.hazard import Hazard, HazardSettings
from costcache.policies.hazard.below import BelowHazard, BelowHazardStates
from costcache.policies.hazard.states import HazardStates
from costcache.policies.keyed import LRU
from costcache.pool import Pool
from costcache.radix.statecache import StateCache
from costcache.tiers import WRITINGS, Link, Move, Price, make_writing
from tests.property.kit import MODEL, cache_with, manager, nodes_of


def test_transfers_queue() -> None:
    link = Link(100.0, latency=0.5)
    assert link.seconds(0, 7.0) == 0.0
    assert link.begin(100, 0.0) == 1.5
    assert link.waits(1.0) == 0.5
    assert link.seconds(200, 1.0) == pytest.approx(0.5 + 0.5 + 2.0)
    assert link.begin(200, 1.0) == pytest.approx(4.0)
    assert link.outstanding == 300
    assert link.seconds(100, 10.0) == 1.5


def test_the_speed_is_what_was_measured() -> None:
    link = Link(100.0)
    for at in range(60):
        link.begin(1000, float(at))
        link.ended(1000, 2.0, float(at))
    assert link.bytes_per_second == pytest.approx(500.0, rel=0.01)
    assert link.outstanding == 0
    assert link.waits(60.0) == 0.0


def test_a_cancelled_transfer_teaches_nothing() -> None:
    link = Link(100.0)
    link.begin(1000, 0.0)
    link.begin(500, 0.0)
    link.ended(1000, 0.0, 1.0)
    assert link.bytes_per_second == 100.0
    assert link.waits(1.0) == pytest.approx(5.0)  # the other one is all that is left


@pytest.mark.parametrize(("speed", "latency"), [(0.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, -1.0)])
def test_no_such_link(speed: float, latency: float) -> None:
    with pytest.raises(SettingsError, match="give"):
        Link(speed, latency)


def move(**facts: float) -> Move:
    base = {"tokens": 100, "size": 1000, "uses": 1, "recompute": 2.0, "reload": 1.0}
    return Move(**(base | facts))  # type: ignore[arg-type]  # counts are whole


@pytest.mark.parametrize(
    ("name", "copies", "demotes", "loads"),
    [
        ("write_through", [True, True, True], False, True),
        ("write_through_selective", [False, True, True], False, True),
        ("write_back", [False, False, False], True, True),
    ],
)
def test_classic_policies(name: str, copies: list[bool], demotes: bool, loads: bool) -> None:
    writing = make_writing(name)
    assert writing.name == name
    assert [writing.copies(move(uses=uses, chance=0.0)) for uses in (1, 2, 3)] == copies
    assert writing.demotes(move(chance=0.0)) is demotes
    assert writing.loads(move(reload=9.0)) is loads


def test_by_cost_weighs_what_a_load_saves() -> None:
    writing = make_writing("by_cost")
    assert writing.ahead
    assert writing.copies(move(chance=0.5))
    assert not writing.copies(move(chance=0.5, write=0.6))
    assert not writing.copies(move(chance=0.0, followed=True))
    assert writing.demotes(move(chance=0.5))
    assert not writing.demotes(move(chance=0.5, write=0.6))
    assert writing.demotes(move(chance=0.0, followed=True))
    assert not writing.demotes(move(chance=0.5, displaced=0.6))
    assert not writing.demotes(move(reload=2.5))
    assert writing.loads(move(reload=1.9))
    assert not writing.loads(move(reload=2.0))


@given(
    st.floats(0, 1e3),
    st.floats(0, 1e3),
    st.floats(0, 1),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
    st.floats(1, 10),
)
def test_by_cost_is_monotone(
    recompute: float, reload: float, chance: float, write: float, displaced: float, more: float
) -> None:
    """What is worth moving stays so if it costs more to compute, or less to have."""
    writing = make_writing("by_cost")
    facts = move(recompute=recompute, reload=reload, chance=chance, write=write, displaced=displaced)
    if writing.demotes(facts):
        assert writing.demotes(facts._replace(recompute=recompute * more))
        assert writing.demotes(facts._replace(reload=reload / more, write=write / more))
    if writing.loads(facts):
        assert writing.loads(facts._replace(recompute=recompute * more, reload=reload / more))


class Forecasting(VictimOrder):
    forecasts = True


victims = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1e3)))


@given(victims, st.floats(-1e6, 1e6))
def test_room_costs_what_the_victims_were_worth(victims: list[tuple[int, float, float]], room: float) -> None:
    """No byte costs more than the best byte that was evicted, and none costs anything without a forecast."""
    price, dearest = Price(), 0.0
    for size, chance, recompute in victims:
        facts = move(size=size, chance=chance if size else 0.0, recompute=recompute)
        price.lost(facts, 1e5)
        dearest = max(dearest, facts.worth / max(1, size))
    paid = price.displaced(room, Forecasting())
    assert 0.0 <= paid <= max(0.0, room) * dearest * (1 + 1e-9)
    assert price.displaced(room, VictimOrder()) == 0.0


def test_the_price_is_that_of_the_latest_victims() -> None:
    price = Price()
    price.lost(move(chance=1.0), 1e5)
    assert price.displaced(500, Forecasting()) == pytest.approx(0.5)
    for _ in range(50):  # half of the tier's bytes
        price.lost(move(chance=0.25), 1e5)
    assert price.displaced(1000, Forecasting()) == pytest.approx(0.25, rel=0.1)


def test_a_price_that_refuses_all_falls_to_what_it_refuses() -> None:
    """Else nothing would be copied ever again: while all is refused, nothing is evicted."""
    writing, price = make_writing("by_cost"), Price()
    price.lost(move(chance=1.0), 1e5)
    for number in range(100):
        chance = 0.4 + 0.1 * (number % 2)
        facts = move(chance=chance, displaced=price.displaced(1000, Forecasting()))
        if writing.demotes(facts):
            return
        price.lost(facts, 1e5)
    pytest.fail("nothing is copied")


def test_no_such_policy() -> None:
    with pytest.raises(SettingsError, match=f"'write_around': choose {', '.join(WRITINGS)}"):
        make_writing("write_around")


class Ranked(KeyedOrder):
    def key(self, record: NodeRecord) -> int:
        return record.recency


class Boastful(Ranked):
    def reuse_chance(self, record: NodeRecord, within: float = math.inf) -> float:
        return 2.0


def only_node(cache: RadixCache) -> NodeRecord:
    (record,) = cache._pool.live.values()
    return record


def test_an_order_without_a_forecast_counts_uses() -> None:
    cache = cache_with(Ranked)
    cache.insert([1, 2, 3])
    assert cache._pool.reuse_chance(only_node(cache)) == pytest.approx(1 / 3)
    cache.match_prefix([1, 2, 3])
    assert cache._pool.reuse_chance(only_node(cache)) == pytest.approx(2 / 4)


@pytest.mark.filterwarnings("ignore")
def test_a_forecast_out_of_bounds_drops_the_order(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_with(Boastful)
    cache.insert([1, 2, 3])
    assert cache._pool.reuse_chance(only_node(cache)) == pytest.approx(1 / 3)
    assert cache._pool.policy == "lru"
    assert "reuse_chance is 2.0: give a number from 0 to 1" in caplog.text


def hazard_cache(pool_size: int) -> tuple[RadixCache, Hazard]:
    cache = RadixCache(MODEL, pool_size, policy="hazard", plugins=manager())
    order = cache._pool.order
    assert isinstance(order, Hazard)
    return cache, order


def ask(cache: RadixCache, tokens: list[int]) -> None:
    name = object()
    cache.match_prefix(tokens, name)
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo())


def trained() -> tuple[RadixCache, Hazard]:
    """A cache that has seen long prompts once each, and short ones many times."""
    cache, order = hazard_cache(400)
    for number in range(150):
        ask(cache, [1, number % 5] * 5)
        ask(cache, [2, number + 10] * 20)
    return cache, order


def test_hazard_tells_what_comes_back_from_what_does_not() -> None:
    cache, _ = trained()
    pool = cache._pool
    again = [pool.reuse_chance(record) for record in pool.live.values() if record.uses > 1]
    once = [pool.reuse_chance(record) for record in pool.live.values() if record.uses == 1]
    assert min(again) > 0.5 > max(once)


def test_a_chance_grows_with_the_time_given() -> None:
    cache, _ = trained()
    pool = cache._pool
    for record in pool.live.values():
        chances = [pool.reuse_chance(record, within) for within in (0.0, 1.0, 10.0, 100.0, math.inf)]
        assert chances == sorted(chances)
        assert chances[0] == 0.0
        assert chances[-1] <= 1.0


def test_hazard_remembers_what_another_tier_holds() -> None:
    """The forecast of an evicted node is that of its ghost; of an unknown one, a prior."""
    cache, order = trained()
    ghosts = order.intake.ghosts
    named = list(ghosts._memories)
    assert named
    assert all(0.0 <= (order.ghost_chance(name) or 0.0) <= 1.0 for name in named)
    assert order.ghost_chance(named[-1]) is not None
    assert order.ghost_chance(-1) is None
    elsewhere = Elsewhere(named[-1])
    assert cache._pool.reuse_chance(elsewhere) == order.ghost_chance(named[-1])
    assert cache._pool.reuse_chance(Elsewhere(-1)) == pytest.approx(1 / 3)


def test_a_tier_below_weighs_depth_where_the_device_no_longer_does() -> None:
    """A miss on the device is a reload, alike for every token; one below is computed."""
    settings = HazardSettings(objective="flops")
    order = Hazard(1000, settings, CostModel.of(ModelSpec.preset("llama-3-70b"), Deployment()))
    ranges = order.learner.depths.count
    assert ranges > 1
    below = order.below(PoolState("host", "tokens", 5000, 5000, 0, 0, 1))
    assert isinstance(below, BelowHazard)
    assert order.learner.depths.count == 1
    shallow, deep = NodeRecord(1, None, 64, 0), NodeRecord(2, None, 64, 200_000)
    (first, _), (last, _) = below.place(shallow, None), below.place(deep, None)
    assert below.worth(last, 5.0) > 1.5 * below.worth(first, 5.0)
    order.ranker.worth.as_lru = True
    assert below.worth(last, 5.0) == below.worth(first, 5.0) < below.worth(first, 1.0)


def below_of(cache: RadixCache, tokens: int = 4000) -> tuple[BelowHazard, Pool]:
    """The order and the pool of a tier below a cache."""
    pool = Pool(
        "host",
        lambda _, __: 0,
        lambda states: cache._pool.order_below(states[0]) or ("lru", LRU()),
        HookGuard("generic"),
        capacity=tokens,
        clock=cache.clock,
        lower_tier=True,
    )
    order = pool.order
    assert isinstance(order, BelowHazard)
    return order, pool


def test_a_tier_below_forecasts_by_what_the_device_learned() -> None:
    cache, device = hazard_cache(400)
    below, pool = below_of(cache)
    assert below.forecasts
    early = NodeRecord(0, None, 10, 0)
    pool.insert(early)
    assert pool.reuse_chance(early) == pytest.approx(1 / 3), "a prior, before the first estimate"
    for number in range(150):
        ask(cache, [1, number % 5] * 5)
        ask(cache, [2, number + 10] * 20)
    assert device.learner.estimated is not None
    for record in list(cache._pool.live.values()):
        copy = NodeRecord(0, None, record.tokens, record.depth)
        pool.insert(copy, history=record)
        last = record.data.pieces[-1]
        if len(record.data.pieces) == 1:
            assert pool.reuse_chance(copy, 30.0) == pytest.approx(device.reuse_chance(record, 30.0))
        # Nothing is known of times longer than that watched.
        assert pool.reuse_chance(copy) == device.class_chance(
            device.learner.group_of(last), last.last_use, device.intake.watched
        )
    assert not pool.fallbacks


def test_a_tier_below_forecasts_for_states_too() -> None:
    page, kv, state_bytes = 512, 24_576, 77_266_944
    cache = StateCache(
        "qwen3-next", 8 * state_bytes + 60 * page * kv, page, "hazard", plugins=manager(), state_share=0.5
    )
    for number in range(150):
        tokens, name = np.repeat([number % 2 * number, 7], page), object()
        cache.match_prefix(tokens, name)
        state = cache.allocate_state()
        done = cache.insert(tokens, request=name, state=state)
        if state is not None and (done.node.state is None or done.node.state.slot != state):
            cache.release_state(state)
        cache.finish(name, RequestInfo())
    device = cache._pool.order
    below = device.below(PoolState("host_state", "states", 20, 20, 0, 0, page))
    assert isinstance(device, HazardStates)
    assert isinstance(below, BelowHazardStates)
    assert below.forecasts
    found = 0
    for record in cache._pool.live.values():
        life = device.learner.lives.get(record.serial)
        if record.state is None or life is None or life.superseded:
            continue
        copy = NodeRecord(1, None, 1, record.depth)
        below.inherit(copy, record)
        assert below.reuse_chance(copy, 20.0) == pytest.approx(device.reuse_chance(record, 20.0))
        found += 1
    assert found > 3
    unknown = Elsewhere(-1)
    below.insert(unknown)
    assert below.reuse_chance(unknown) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("objective", "power"), [("tokens", 0.5), ("flops", 1.0)])
def test_what_a_state_saves_counts_by_the_objective_where_it_is_computed_again(
    objective: str, power: float
) -> None:
    page, kv, state_bytes = 64, 24_576, 77_266_944
    cache = StateCache(
        "qwen3-next",
        4 * state_bytes + 20 * page * kv,
        page,
        "hazard",
        policy_settings={"objective": objective},
        plugins=manager(),
    )
    for first, pages in ((1, 1), (2, 4)):
        cache.insert(np.repeat([first], pages * page), request=object(), state=cache.allocate_state())
    order = cache._pool.order
    assert isinstance(order, HazardStates)
    short, long = (record for record in cache._pool.live.values() if record.state is not None)

    def ratio() -> float:
        worths = (order.learner.worth_of(order.learner.lives[each.serial]) for each in (long, short))
        return float(order.score(long) / order.score(short) / operator.truediv(*worths))

    size = (order._state_bytes + 64 * order._kv_bytes) / (order._state_bytes + 256 * order._kv_bytes)
    assert ratio() == pytest.approx((4 * size) ** power)
    below = order.below(PoolState("host_state", "states", 20, 20, 0, 0, 1))
    assert ratio() == pytest.approx((4 * size) ** 0.5), "lost here, it is loaded back"
    assert isinstance(below, BelowHazardStates)
    assert below.upper.weight(4) == pytest.approx(below.upper.weight(1) * 4**power)


def test_the_device_remembers_what_the_tiers_below_hold() -> None:
    _, order = hazard_cache(400)
    ghosts = order.intake.ghosts
    assert ghosts._room == 6.0 * 400
    order.below(PoolState("host", "tokens", 2000, 2000, 0, 0, 1))
    order.below(PoolState("disk", "tokens", 9000, 9000, 0, 0, 1))
    assert ghosts._room == 6.0 * (400 + 2000 + 9000)
    order.below(PoolState("host_state", "states", 50, 50, 0, 0, 1))
    assert ghosts._room == 6.0 * (400 + 2000 + 9000), "states are no tokens"


def test_what_was_evicted_long_ago_keeps_its_class_while_a_tier_holds_it() -> None:
    """Its reuse is learned as an interval, not lost as censored, and it continues its history."""

    def returned(tokens: int) -> tuple[int, float]:
        cache, order = hazard_cache(400)
        if tokens:
            below_of(cache, tokens)
        ask(cache, [1] * 40)
        for number in range(200):
            ask(cache, [2, number + 10] * 20)
        censored = sum(order.learner.table.censored)
        ask(cache, [1] * 40)
        (node,) = [each for each in nodes_of(cache) if each.edge[0] == 1]
        return node.data.pieces[-1].uses, censored

    uses, censored = returned(0)
    assert uses == 1
    assert censored > 0
    uses, censored = returned(4000)
    assert uses == 2
    assert censored == 0


def test_what_has_no_history_below_takes_the_class_of_what_is_before_it() -> None:
    """As if it were of a request that has not ended, it would be evicted before all others."""
    cache, device = trained()
    below, pool = below_of(cache)
    opened = device.learner.classes.open
    known = max(cache._pool.live.values(), key=lambda record: record.uses)
    first = NodeRecord(0, None, known.tokens, known.depth)
    pool.insert(first, history=known)
    assert first.data.stratum != opened
    second = NodeRecord(0, first, 8, first.end)
    pool.insert(second)
    third = NodeRecord(0, second, 8, second.end)
    pool.insert(third)
    assert first.data.stratum == second.data.stratum == third.data.stratum
    alone = NodeRecord(0, None, 8, 0)
    pool.insert(alone)
    assert alone.data.stratum == opened
    assert below.upper is device


class Elsewhere(NodeRecord):
    """A node of another tier."""

    def __init__(self, name: int) -> None:
        super().__init__(0, None, 10, 0)
        self.uses = 1
        self.name = name

    def prefix_hash(self, offset: int = 0) -> int | None:
        return self.name
