"""Writing ahead of need, and one forecast for all tiers: what is copied when, and what a tier knows of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from costcache import Deployment, KeyedOrder, NodeRecord, RadixCache, RequestInfo, Victim, VictimOrder
from costcache.errors import SettingsError
from costcache.policies.hazard.below import BelowHazard
from costcache.policies.hazard.order import Hazard
from costcache.policies.keyed import LRU
from costcache.records import PoolState
from costcache.storage import StorageSpec
from costcache.tiers import Buffers, Layout, TieredCache
from tests.property.kit import Plugin, manager
from tests.property.kit import policy as offering
from tests.tiers import LAYERS, PAGE, MemoryStore, Prompts, Server, model, plugins_with

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def server(layout: str = "mla", **made: Any) -> Server:
    made = {"disk": 800, "path": Path("unused"), "host": 400, "write": "by_cost", **made}
    return Server(layout, storage="tested", plugins=plugins_with(MemoryStore()), **made)


def prompt(number: int, tokens: int = 32) -> list[int]:
    return list(range(1000 * number, 1000 * number + tokens))


def mover_of(made: Server) -> Any:
    assert made.tiers._mover is not None
    return made.tiers._mover


# -- writing ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sorted(LAYERS))
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_no_byte_is_written_while_the_device_has_room(layout: str, policy: str) -> None:
    made = server(layout, slots=400, policy=policy)
    for _ in range(3):
        for number in range(4):
            made.serve(prompt(number))
            made.tiers.step()
    made.tiers.drain()
    for counters in made.tiers.counters.values():
        assert counters.bytes_in == counters.written == counters.skipped == 0
    assert made.cache.counters.evictions == 0
    made.tiers.close()


@pytest.mark.parametrize("layout", sorted(LAYERS))
def test_an_allocation_that_fits_the_room_made_ahead_evicts_nothing(layout: str) -> None:
    made = server(layout, slots=400)
    ahead, most = mover_of(made)._ahead, 0
    for number in range(60):
        made.serve(prompt(number))
        made.tiers.step()
        if number < 13:
            continue
        assert ahead.room == 32, "as much as a prompt takes"
        free, before = made.cache.free, made.cache.counters.evictions
        made.tiers.release(made.tiers.allocate(min(free, ahead.room)))
        assert made.cache.counters.evictions == before
        submitted = made.tiers._lines[0].copies.submitted
        made.tiers.release(made.tiers.allocate(ahead.room))
        assert made.tiers._lines[0].copies.submitted == submitted, "what it evicts beyond is below already"
        most = max(most, free)
    assert most > 24
    made.tiers.drain()
    host = made.tiers.counters["host"]
    assert host.written == host.demoted > 300, "evictions wrote it, and nothing else did"
    assert made.serve(prompt(40)) == 32, "and it is found there, bit by bit"
    made.tiers.close()


def test_the_room_follows_the_requests_up_to_a_tenth_of_the_device() -> None:
    made = server(slots=400)
    ahead = mover_of(made)._ahead
    assert ahead.room == 0
    made.serve(prompt(0, 24))
    made.tiers.step()
    assert ahead.room == 24
    made.serve(prompt(1, 120))
    made.tiers.step()
    assert ahead.room == 40
    rooms = []
    for number in range(2, 250):
        made.serve(prompt(number, 8))
        made.tiers.step()
        rooms.append(ahead.room)
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] == 8
    made.tiers.close()


def test_what_is_below_already_is_left_on_the_device() -> None:
    """Nobody would wait for its eviction, and a request may want it still."""
    made = server(slots=160, policy="lru")
    for number in range(8):
        made.serve(prompt(number))
        made.tiers.step()
    made.tiers.drain()
    assert made.serve(prompt(0)) == 32  # loaded: both tiers have it
    for number in range(4, 8):
        made.serve(prompt(number))  # so that it is the next victim
    made.tiers.release(made.tiers.allocate(made.cache.free))
    made.tiers.step()
    made.serve([*prompt(9, 16)])
    made.tiers.step()
    made.tiers.drain()
    written = made.tiers.counters["host"].written
    first = made.cache._pool.next_victim({})
    assert first is not None
    made.cache._pool.defer(first)
    node: Any = first.record
    assert mover_of(made)._to_host.left_to_copy(node) is None
    short = mover_of(made)._ahead.room - made.cache.free
    assert short > 0, "there is less room than is wanted"
    assert made.tiers.step() == 0
    assert mover_of(made)._ahead.room - made.cache.free == short
    assert made.tiers.counters["host"].written == written
    made.tiers.close()


@pytest.mark.parametrize("layout", sorted(LAYERS))
def test_nothing_is_evicted_ahead_that_could_not_be_copied_now(layout: str) -> None:
    """It would be lost, though nobody is short of room."""
    made = server(layout, slots=400, disk=0, host=4000, in_flight=40_000)
    for number in range(12):
        made.serve(prompt(number))
    line, copied = made.tiers._lines[0], threading.Event()
    line.submit(lambda: int(copied.wait(60.0)), lambda done: None, 40_000)  # as much as may be under way
    evictions, free = made.cache.counters.evictions, made.cache.free
    for _ in range(3):
        made.tiers.step()
    assert (made.cache.counters.evictions, made.cache.free) == (evictions, free)
    assert not made.tiers.counters["host"].skipped
    copied.set()
    made.tiers.drain()
    made.tiers.step()
    assert made.cache.free > free, "once there is room on the link"
    made.tiers.drain()
    host = made.tiers.counters["host"]
    assert host.written > host.skipped == 0
    made.tiers.close()


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_only_a_policy_that_writes_ahead_makes_room(write: str) -> None:
    made = server(slots=160, write=write)
    for number in range(8):
        made.serve(prompt(number))
        made.tiers.step()
        made.tiers.drain()
    assert made.cache.free == 0
    made.tiers.close()


def test_a_subscriber_that_calls_the_cache_is_refused_meanwhile() -> None:
    made = server(slots=160)
    said: list[str] = []

    def observer(event: Any) -> None:
        try:
            made.cache.match_prefix([1])
        except RuntimeError as error:
            said.append(str(error))

    for number in range(5):
        made.serve(prompt(number))
    made.cache.subscribe(observer)
    made.tiers.step()
    assert said
    assert "another call is at work on this cache" in said[0]
    made.tiers.close()


# -- one forecast --------------------------------------------------------------------------------


def trained(**made: Any) -> Server:
    """A server that has seen some prompts again and again, and others once."""
    served = server(slots=160, policy="hazard", **made)
    for number in range(120):
        served.serve(prompt(number % 3, 24))
        served.serve(prompt(number + 10, 16))
        served.tiers.step()
    served.tiers.drain()
    return served


def test_the_tiers_rank_by_the_order_of_the_device() -> None:
    made = trained()
    mover = mover_of(made)
    device = made.cache._pool
    assert isinstance(device.order, Hazard)
    for tier in (mover.host, mover.disk):
        assert isinstance(tier.pool.order, BelowHazard)
        assert tier.pool.order.upper is device.order
        assert tier.pool.policy == "hazard"
        assert tier.forecaster(device) is tier.pool
    # What they hold is remembered on the device, too.
    capacities = sum(tier.pool.capacity for tier in (mover.device, mover.host, mover.disk))
    assert device.order.intake.ghosts._room == 6.0 * capacities
    made.tiers.close()


def test_a_copy_below_has_the_class_that_the_device_knew() -> None:
    made = trained()
    mover, order = mover_of(made), made.cache._pool.order
    assert isinstance(order, Hazard)
    nodes = list(mover.host.tree.walk())
    assert len(nodes) > 20
    groups = [node.data.stratum for node in nodes]
    opened = order.learner.classes.open
    assert groups.count(opened) < len(groups) / 10, "though they arrived after the device had dropped them"
    made.tiers.close()


def test_the_tiers_forecast_less_for_what_is_used_less_and_longer_ago() -> None:
    made = trained()
    pool = mover_of(made).host.pool
    order = pool.order
    records = sorted(pool.live.values(), key=lambda record: record.data.last_use)
    assert 0.0 < pool.reuse_chance(records[-1]) < 1.0
    for record in (records[0], records[-1]):
        chances = [order.reuse_chance(record, within) for within in (0.0, 1.0, 20.0, 200.0)]
        assert chances == sorted(chances)
        assert chances[0] == 0.0
        # As the device would say of a piece of that class and age.
        entry = record.data
        assert chances[2] == order.upper.class_chance(entry.stratum, entry.last_use, 20.0)
    made.tiers.close()


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_copy_takes_the_class_that_the_device_knows_when_it_evicts_the_prefix_again(write: str) -> None:
    made = trained(host=4000, write=write)
    mover, order = mover_of(made), made.cache._pool.order
    assert isinstance(order, Hazard)
    for number in range(300, 320):
        made.serve(prompt(number, 16))
        made.tiers.step()
    made.tiers.drain()
    tokens = prompt(301, 16)
    place = made.tiers._place(tokens, None, None)
    copy = mover.host.find(place)
    assert copy.end == 16
    once, was_used = copy.data.stratum, copy.data.last_use
    for _ in range(4):  # used often by now, on the device
        made.serve(tokens)
    assert mover.host.find(place) is copy
    assert copy.data.stratum == once
    assert mover.device.find(place).end == 16
    made.cache.evict(made.cache.evictable)
    made.tiers.drain()
    assert mover.device.find(place).end == 0
    copy = mover.host.find(place)
    assert copy.end == 16
    assert copy.data.stratum != once
    assert copy.data.last_use > was_used
    made.tiers.close()


def test_the_tiers_go_on_by_a_new_order_after_a_reset_of_the_device() -> None:
    made = trained()
    mover = mover_of(made)
    before = made.cache._pool.order
    made.tiers.reset()
    after = made.cache._pool.order
    assert after is not before
    for tier in (mover.host, mover.disk):
        assert tier.pool.order.upper is after
        assert not tier.pool.fallbacks
        assert all(record.data is not None for record in tier.pool.live.values())
    assert isinstance(after, Hazard)
    capacities = sum(tier.pool.capacity for tier in (mover.device, mover.host, mover.disk))
    assert after.intake.ghosts._room == 6.0 * capacities
    used = next(iter(mover.host.tree.walk()))
    made.serve(prompt(0, 24))
    assert used.data.last_use >= used.last_use, "not older than what was not used"
    for number in range(500, 560):
        made.serve(prompt(number))
        made.tiers.step()
    made.tiers.drain()
    assert not any(tier.pool.fallbacks for tier in (mover.device, mover.host, mover.disk))
    made.tiers.close()


def test_the_tiers_follow_a_device_whose_order_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = trained()
    mover = mover_of(made)

    def fails(self: Hazard, request: Any, info: RequestInfo) -> None:
        raise RuntimeError("a bug")

    device = made.cache._pool
    order: Any = device.order
    monkeypatch.setattr(device, "_finish", lambda *_: fails(order, *_), raising=False)
    made.serve(prompt(600))
    assert device.policy == "lru"
    evicted = mover.host.pool.counters.evicted
    for number in range(601, 640):
        made.serve(prompt(number))
        made.tiers.step()
    made.tiers.drain()
    assert mover.host.pool.counters.evicted > evicted
    for tier in (mover.host, mover.disk):
        assert isinstance(tier.pool.order, LRU)
        assert tier.pool.policy == "lru"
        assert tier.forecaster(device) is device
    assert made.serve(prompt(638)) == 32
    assert len([line for line in caplog.records if "is dropped for 'lru'" in line.message]) == 1
    made.tiers.close()


def test_a_cache_without_the_tiers_that_it_was_to_have_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are refused or closed: the order ranks by FLOPs again, and remembers as much as before."""
    spec, deployment = model("mla"), Deployment(page_size=PAGE)
    settings = {"objective": "flops"}
    cache = RadixCache(spec, 160, PAGE, "hazard", deployment=deployment, policy_settings=settings)
    buffers = Buffers.allocate(Layout.of(spec, deployment), 160, 0, 0)
    host = buffers.layout().token_bytes * 400

    def refuse(*_: Any) -> None:
        raise SettingsError("no room")

    def known() -> tuple[int, float]:
        order = cache._pool.order
        assert isinstance(order, Hazard)
        return order.learner.depths.count, order.intake.ghosts._room

    before = known()
    assert before[0] > 1
    with monkeypatch.context() as patched:
        patched.setattr("costcache.tiers.cache.DiskTier.__init__", refuse)
        plugins = plugins_with(MemoryStore())
        monkeypatch.setattr(cache._tree.binding.plugins, "open_storage", plugins.open_storage)
        with pytest.raises(SettingsError, match="no room"):
            TieredCache(cache, buffers, host=host, disk=host, path=Path("unused"), storage="tested")
    assert known() == before
    for _ in range(3):
        tiers = TieredCache(cache, buffers, host=host)
        assert known() == (1, 6.0 * (160 + 400))
        tiers.close()


def test_other_policies_learn_on_each_tier() -> None:
    made = server(policy="gdsf")
    mover = mover_of(made)
    made.tiers.reset()
    assert mover.host.pool.policy == "gdsf"
    assert mover.host.pool.order is not made.cache._pool.order
    assert mover.host.forecaster(made.cache._pool) is made.cache._pool
    made.tiers.close()


@pytest.mark.parametrize("layout", ["apart", "hybrid"])
def test_where_endings_are_evicted_apart_each_tier_learns_by_itself(layout: str) -> None:
    made = server(layout, policy="hazard")
    mover = mover_of(made)
    assert not isinstance(mover.host.pool.order, BelowHazard)
    assert mover.host.forecaster(made.cache._pool) is made.cache._pool
    made.tiers.close()


def test_random_prompts_never_drop_an_order() -> None:
    made = server(slots=160, host=200, disk=400, policy="hazard")
    prompts = Prompts(3, longest=60)
    for _ in range(200):
        made.serve(prompts.next())
        made.tiers.step()
    made.tiers.drain()
    mover = mover_of(made)
    for tier in (mover.device, mover.host, mover.disk):
        assert not tier.pool.fallbacks
        assert tier.pool.counters.evicted > 0
    assert made.checked > 1000
    made.tiers.close()


# -- wrong orders for the tiers ------------------------------------------------------------------


class Plain(KeyedOrder):
    """LRU, with a method ``below`` that a test gives it."""

    lends: Any = None

    def key(self, record: NodeRecord) -> int:
        return record.recency

    def below(self, pool: PoolState) -> Any:
        return self.lends(self)


class Frozen(VictimOrder):
    """Takes no attribute once it is made."""

    def __init__(self) -> None:
        self.__dict__["records"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def insert(self, record: NodeRecord) -> None:
        self.__dict__["records"][record.serial] = record

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.insert(prefix)

    def remove(self, record: NodeRecord) -> None:
        del self.__dict__["records"][record.serial]

    def next_victim(self, pool: str) -> Victim | None:
        return next((Victim(each) for each in self.__dict__["records"].values() if each.is_evictable), None)


def leaves(order: Plain) -> Any:
    raise SystemExit(3)


def one(order: Plain, made: list[Any] = []) -> Any:  # noqa: B006 # the fault: one order for all
    made += [LRU()] * (not made)
    return made[0]


@pytest.mark.parametrize(
    ("lends", "says"),
    [
        (lambda order: order, "below returned a Plain by which a pool ranks already"),
        (one, "below returned a LRU by which a pool ranks already"),
        (lambda order: 7, "below returned 7: return a VictimOrder or None"),
        (leaves, "SystemExit"),
    ],
)
def test_a_wrong_order_for_a_tier_is_reported_and_all_tiers_serve_on(
    lends: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = type("Plain", (Plain,), {"lends": staticmethod(lends)})
    made = offering_server(plain)
    (line,) = [line.getMessage() for line in caplog.records if "is dropped for 'lru'" in line.message]
    assert line.startswith("policy 'mine'")
    assert says in line
    for number in range(40):
        made.serve(prompt(number % 7, 24))
        made.serve(prompt(number + 10, 16))
        made.tiers.step()
    made.tiers.drain()
    mover = mover_of(made)
    for tier in (mover.device, mover.host, mover.disk):
        assert isinstance(tier.pool.order, LRU)
        assert tier.pool.policy == "lru"
        assert tier.pool.counters.evicted
    assert not any(tier.pool.fallbacks for tier in (mover.host, mover.disk))
    made.tiers.close()


def test_an_order_that_takes_no_attribute_serves() -> None:
    made = offering_server(Frozen)
    for number in range(20):
        made.serve(prompt(number))
    assert not made.cache._pool.fallbacks
    made.tiers.close()


def offering_server(order: type[VictimOrder]) -> Server:
    store = MemoryStore()
    spec = StorageSpec(lambda path, capacity, settings: store, "for a test")
    plugins = manager(mine=offering("mine", order), tested=Plugin(storage_backend=lambda: {"tested": spec}))
    return Server(
        "mla",
        storage="tested",
        plugins=plugins,
        disk=240,
        path=Path("unused"),
        host=160,
        write="by_cost",
        slots=160,
        policy="mine",
    )
