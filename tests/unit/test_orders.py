"""The two ways to write an order, and what a victim costs."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest

from costcache import KeyedOrder, NodeRecord, RadixCache, Victim, VictimOrder
from costcache.orders import overridden
from costcache.policies.keyed import FIFO, FILO, LFU, LRU, MRU, SLRU, Priority
from costcache.policies.tlru import TLRU
from costcache.records import RequestInfo, RequestRecord
from tests.property.kit import cache_with, check_structure, drain, insert_all, nodes_of

ORDERS: dict[str, Callable[[], KeyedOrder]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "mru": MRU,
    "filo": FILO,
    "priority": Priority,
    "slru": SLRU,
    "tlru": lambda: TLRU(12, 2),
}


def busy(cache: RadixCache, seed: int, steps: int = 150) -> None:
    """Shared prefixes, splits, repeats, priorities, locks, evictions."""
    rng = random.Random(seed)
    locked = []
    for _ in range(steps):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        found = cache.match_prefix(prompt)
        if rng.random() < 0.1:
            cache.lock(found.node)
            locked.append(found.node)
        if rng.random() < 0.7:
            cache.insert(prompt, priority=rng.randrange(3))
        if rng.random() < 0.1:
            cache.refresh(found.node)
        if rng.random() < 0.3:
            cache.evict(rng.randrange(1, 6))
        if locked and rng.random() < 0.1:
            cache.unlock(locked.pop())
    for node in locked:
        cache.unlock(node)


def by_search(cache: RadixCache, order: KeyedOrder) -> NodeRecord:
    """The victim, found the slow way: the lowest key of all unlocked leaves, now."""
    leaves = [node for node in nodes_of(cache) if node.is_evictable]
    return min(leaves, key=lambda node: (order.key(node), node.serial))


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_each_victim_is_the_lowest_key_of_all_unlocked_leaves(name: str, seed: int) -> None:
    cache = cache_with(ORDERS[name], 80)
    order = cache._pool.order
    assert isinstance(order, KeyedOrder)
    rng = random.Random(seed)
    for _ in range(12):
        busy(cache, rng.randrange(10**6), 25)
        for _ in range(min(8, cache.evictable)):
            expected = by_search(cache, order)
            serial = expected.serial
            (victim,) = cache.evict(rng.choice([1, expected.tokens])).victims
            assert victim.serial == serial
    drain(cache)
    assert cache.policy == "tested"


class Parity(KeyedOrder):
    """A key that goes up and down: odd uses first."""

    rises = False

    def key(self, record: NodeRecord) -> int:
        return -(record.uses % 2)


class Smallest(KeyedOrder):
    """A key that a trim and a split lower."""

    def key(self, record: NodeRecord) -> int:
        return record.tokens


class Largest(KeyedOrder):
    """A key that a trim and a split raise."""

    def key(self, record: NodeRecord) -> int:
        return -record.tokens


class Deepest(KeyedOrder):
    """A key that a split lowers and nothing raises."""

    def key(self, record: NodeRecord) -> int:
        return -record.depth


class Same(KeyedOrder):
    """A constant key: the oldest serial is evicted."""

    def key(self, record: NodeRecord) -> int:
        return 0


class Popular(KeyedOrder):
    """A key that every touch lowers."""

    rises = False

    def key(self, record: NodeRecord) -> tuple[int, int]:
        return (-record.uses, -record.recency)


@pytest.mark.parametrize("make", [Parity, Smallest, Largest, Deepest, Same, Popular])
@pytest.mark.parametrize("seed", range(4))
def test_a_policy_of_one_function_is_followed_exactly(make: type[KeyedOrder], seed: int) -> None:
    cache = cache_with(make, 80)
    order = cache._pool.order
    assert isinstance(order, KeyedOrder)
    rng = random.Random(seed)
    for _ in range(12):
        busy(cache, rng.randrange(10**6), 25)
        for _ in range(min(8, cache.evictable)):
            serial = by_search(cache, order).serial
            (victim,) = cache.evict(1).victims
            assert victim.serial == serial
    assert cache.policy == "tested", "it was not dropped"
    drain(cache)


def test_a_key_that_returns_to_an_old_value_is_no_error() -> None:
    """The heap then has one record twice with one key."""
    cache = cache_with(Parity)
    insert_all(cache, ([n] for n in range(4)))
    for _ in range(7):
        for n in range(4):
            cache.match_prefix([n])
    drain(cache)
    assert cache.policy == "tested"


# -- what a victim costs ----------------------------------------------------------------------


class Counted:
    """A key that counts comparisons."""

    compared: ClassVar[int] = 0
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.compared += 1
        return bool(self.value < other.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


def counting(make: Callable[[], KeyedOrder]) -> Callable[[], KeyedOrder]:
    """The same order, counting its calls of key() in ``order.keys`` and comparisons in Counted."""

    def made() -> KeyedOrder:
        order = make()
        key = order.key

        def counted(record: NodeRecord) -> Counted:
            keys[0] += 1
            return Counted(key(record))

        keys = [0]
        order.key = counted  # type: ignore[method-assign] # the order's own key, counted
        order.keys = keys  # type: ignore[attr-defined] # where the test looks
        return order

    return made


@pytest.mark.parametrize("name", ORDERS)
def test_a_victim_costs_a_logarithm_of_the_leaves(name: str) -> None:
    cost = {}
    for leaves in (64, 512, 4096):
        cache = cache_with(counting(ORDERS[name]), 5 * leaves)
        order: Any = cache._pool.order
        for n in range(leaves):
            cache.insert([n, n, n, n])
        rng = random.Random(1)
        for _ in range(leaves // 4):  # some are used again, as in life
            n = rng.randrange(leaves)
            cache.match_prefix([n, n, n, n])
        victims = 40
        cache.evict(4)
        order.keys[0] = Counted.compared = 0
        stale = 0
        for n in range(victims):
            cache.evict(4)
            cache.insert([leaves + n] * 4)
        cost[leaves] = (order.keys[0] - stale) / victims, Counted.compared / victims
    for leaves, (keys, compared) in cost.items():
        # A key for the insert, one to check the victim, and now and then one to correct a used leaf.
        assert keys <= 4, cost
        assert compared <= 8 * math.log2(leaves), cost


@pytest.mark.parametrize("order", ["lru", "fifo"])
def test_with_entries_in_order_a_victim_costs_the_same_at_any_number_of_leaves(
    order: str,
) -> None:
    cost = {}
    for leaves in (64, 4096):
        cache = cache_with(counting(ORDERS[order]), 5 * leaves)
        for n in range(leaves):
            cache.insert([n, n, n, n])
        Counted.compared = 0
        for n in range(40):
            cache.evict(4)
            cache.insert([leaves + n] * 4)
        cost[leaves] = Counted.compared
    assert cost[64] == cost[4096] <= 2 * 40


def test_leftovers_do_not_pile_up() -> None:
    for make in (MRU, Popular):
        cache = cache_with(make, 100)
        insert_all(cache, ([n] * 5 for n in range(10)))
        order: Any = cache._pool.order
        for step in range(20_000):
            cache.match_prefix([step % 10] * 5)
        assert len(order._heap) + len(order._line) < 5000
        drain(cache)
        assert cache.policy == "tested"


# -- the events -------------------------------------------------------------------------------


class Recorder(VictimOrder):
    """Writes down what it hears, and checks that records are up to date when it hears it."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.queue: dict[int, NodeRecord] = {}

    def _hear(self, *event: Any) -> None:
        self.heard.append(event)

    def insert(self, record: NodeRecord) -> None:
        assert record.is_evictable
        assert record.uses == 1
        assert record.data is None
        self.queue[record.serial] = record
        self._hear("insert", record.depth, record.tokens)

    def use(self, record: NodeRecord) -> None:
        self._hear("use", record.end, record.uses)

    def touch(self, record: NodeRecord) -> None:
        self._hear("touch", record.end, record.uses)

    def refresh(self, record: NodeRecord) -> None:
        self._hear("refresh", record.end, record.uses)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        assert tail.parent is prefix
        assert prefix.end == tail.depth
        assert prefix.live_children == 1
        assert bool(prefix.locks) == bool(tail.locks)
        self.queue[prefix.serial] = prefix
        self._hear("split", prefix.depth, prefix.tokens, tail.tokens)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._hear("trim", record.end, tokens)

    def remove(self, record: NodeRecord) -> None:
        assert record.parent is not None
        del self.queue[record.serial]
        self._hear("remove", record.depth, record.tokens, record.parent.live_children)

    def unlock(self, record: NodeRecord) -> None:
        assert record.locks == 0
        self._hear("unlock", record.end)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._hear("finish", request.number, request.end.end if request.end else None, info.output_tokens)

    def next_victim(self, pool: str) -> Victim | None:
        self._hear("next_victim", pool)
        return next((Victim(r) for r in self.queue.values() if r.is_evictable), None)


def test_an_order_hears_every_change_in_order() -> None:
    recorder = Recorder()
    cache = cache_with(lambda: recorder)

    def heard() -> list[tuple[Any, ...]]:
        events, recorder.heard = recorder.heard, []
        return events

    cache.insert([1, 2, 3, 4, 5, 6], request="r")
    assert heard() == [("insert", 0, 6)]
    found = cache.match_prefix([1, 2, 3, 4])
    assert heard() == [("split", 0, 4, 2), ("use", 4, 2), ("touch", 4, 2)]
    cache.match_prefix([1, 2, 3, 4])
    assert heard() == [("use", 4, 3), ("touch", 4, 3)]
    cache.match_prefix([1, 2, 3, 4, 5, 6], "r")
    assert heard() == [("touch", 4, 3), ("touch", 6, 1)], "r has counted these nodes before"
    cache.lock(found.node)
    cache.lock(found.node)
    assert heard() == [], "a lock is no event: records say it"
    cache.insert([1, 2, 9])
    assert heard() == [("split", 0, 2, 2), ("use", 2, 4), ("touch", 2, 4), ("insert", 2, 1)]
    cache.unlock(found.node)
    assert heard() == []
    cache.unlock(found.node)
    assert heard() == [], "neither is a leaf"
    leaf = cache.match_prefix([1, 2, 9]).node
    heard()
    cache.lock(leaf)
    assert heard() == []
    cache.unlock(leaf)
    assert heard() == [("unlock", 3)], "the prefix was locked by its child alone, and is no leaf"
    cache.refresh(found.node)
    assert heard() == [("refresh", 4, 3), ("refresh", 2, 5)]
    cache.finish("r", RequestInfo(output_tokens=7))
    assert heard() == [("finish", 1, 6, 7)]
    cache.evict(1)
    assert heard() == [("next_victim", "kv"), ("trim", 5, 1)]
    cache.evict(2)
    assert heard() == [
        ("next_victim", "kv"),
        ("remove", 4, 1, 0),
        ("next_victim", "kv"),
        ("trim", 3, 1),
    ]
    check_structure(cache)
    assert cache.policy == "tested"


def test_events_that_are_not_overridden_are_not_called() -> None:
    order = LRU()
    for event in ("touch", "refresh", "finish"):
        assert overridden(order, event) is None
    for event in ("insert", "split", "trim", "remove", "unlock", "defer"):
        assert overridden(order, event) is not None
    assert overridden(MRU(), "touch") is not None
    assert overridden(VictimOrder(), "insert") is None
    own = LRU()
    heard: list[NodeRecord] = []
    vars(own)["touch"] = heard.append  # a handler may be set on the object too
    assert overridden(own, "touch") == heard.append


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize(
    "kind", [int, float, str, Fraction, Decimal, np.int32, np.int64, np.uint8, np.float32, np.float64]
)
def test_keys_may_be_of_any_kind_that_compares(kind: Callable[[Any], Any], rising: bool) -> None:
    class Plain(KeyedOrder):
        rises = rising

        def key(self, record: NodeRecord) -> Any:
            return record.uses % 10, record.serial % 7

    class Kind(Plain):
        def key(self, record: NodeRecord) -> Any:
            return tuple(kind(part) for part in super().key(record))

    class First(Plain):
        def key(self, record: NodeRecord) -> Any:
            return kind(super().key(record)[0])

    class PlainFirst(Plain):
        def key(self, record: NodeRecord) -> Any:
            return super().key(record)[0]

    for plain, other in ((Plain, Kind), (PlainFirst, First)):
        went = []
        for made in (plain, other):
            cache = cache_with(made, pool_size=60)
            busy(cache, seed=5)
            assert cache.policy == "tested"
            went.append([node.serial for node in nodes_of(cache)])
        assert went[0] == went[1]


def test_a_policy_may_define_touch_and_not_rise() -> None:
    touched: list[int] = []

    class Own(MRU):
        def touch(self, record: NodeRecord) -> None:
            touched.append(record.serial)
            self.requeue(record)

    cache = cache_with(Own)
    insert_all(cache, ([1], [2], [3]))
    cache.match_prefix([1])
    assert touched
    assert cache.evict(1).victims[0].recency == 4


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_can_start_from_a_cache_that_exists(name: str) -> None:
    cache = cache_with(ORDERS[name], 120)
    busy(cache, 5)
    cache.reset(force=True)
    busy(cache, 6, 60)
    late = ORDERS[name]()
    late.load(cache._pool.records())
    told = []
    live = list(nodes_of(cache))
    for _ in range(len([node for node in live if node.is_evictable])):
        victim = late.next_victim("kv")
        assert victim is not None
        told.append(victim.record)
    assert late.next_victim("kv") is None, "each leaf once"
    assert {record.serial for record in told} == {node.serial for node in live if node.is_evictable}
    if name != "tlru":  # which remembers evicted prefixes
        assert told == sorted(told, key=lambda record: (late.key(record), record.serial))


def test_base_classes_ask_for_what_is_missing() -> None:
    class Empty(VictimOrder):
        pass

    class Keyless(KeyedOrder):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define next_victim"):
        Empty().next_victim("kv")
    with pytest.raises(NotImplementedError, match="Keyless must define key"):
        Keyless().insert(NodeRecord(2, NodeRecord(1, None, 0, 0), 4, 0))


def test_next_victim_of_an_empty_order_is_none() -> None:
    for make in ORDERS.values():
        assert make().next_victim("kv") is None


def test_asking_again_names_another_victim() -> None:
    """A victim that was named is not named again until an event requeues it."""
    cache = cache_with(LRU)
    insert_all(cache, ([1], [2]))
    order = cache._pool.order
    first, second = order.next_victim("kv"), order.next_victim("kv")
    assert first is not None
    assert second is not None
    assert first.record is not second.record
    assert order.next_victim("kv") is None
    order.defer(first)
    order.defer(second)
    assert order.next_victim("kv") == first


# -- keys that do not hold still ----------------------------------------------------------------


def restless(kind: str) -> Callable[[NodeRecord], Any]:
    """A key that is not equal to itself from one call to the next."""
    calls = itertools.count()
    match kind:
        case "nan":
            return lambda record: float("nan")
        case "nan in a tuple":
            return lambda record: (float("nan"), record.recency)
        case "inf - inf":
            return lambda record: (math.inf - math.inf * bool(record.tokens), record.serial)
        case "numpy's nan":
            return lambda record: (np.float64("nan"), record.recency)
        case "decimal's nan":
            return lambda record: (Decimal("NaN"), record.recency)
        case "a clock":
            return lambda record: time.perf_counter_ns()
        case "a coarse clock":
            return lambda record: int(time.perf_counter() * 2000)
        case "a random number":
            return lambda record: random.random()
        case "a counter":
            return lambda record: next(calls)
        case "a falling counter":
            return lambda record: -next(calls)
        case "a counter of tens":
            return lambda record: next(calls) // 10
        case "an object":
            return lambda record: Never(next(calls))
    raise AssertionError(kind)


class Never:
    """Compares with others, and equals nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __lt__(self, other: Never) -> bool:
        return self.number < other.number

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment] # as for any class with an equality of its own


RESTLESS = (
    "nan",
    "nan in a tuple",
    "inf - inf",
    "numpy's nan",
    "decimal's nan",
    "a clock",
    "a coarse clock",
    "a random number",
    "a counter",
    "a falling counter",
    "a counter of tens",
    "an object",
)


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("kind", RESTLESS)
def test_a_key_that_does_not_hold_still_stalls_no_decision(
    kind: str, rising: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Restless(KeyedOrder):
        rises = rising

        def __init__(self) -> None:
            super().__init__()
            self.key = restless(kind)  # type: ignore[method-assign, assignment] # a function without self

    cache = cache_with(Restless, 300)
    for _ in range(6):
        busy(cache, seed=9)
        evictable = cache.evictable
        eviction = cache.evict(min(40, evictable))
        assert eviction.freed == min(40, evictable)
        check_structure(cache)
    drain(cache)
    assert cache.cached == 0
    dropped = [r.getMessage() for r in caplog.records if "is dropped for 'lru'" in r.getMessage()]
    assert len(dropped) == cache.stats().fallbacks <= 1
    if kind == "decimal's nan":  # it does not even compare
        assert "InvalidOperation" in dropped[0]
    elif rising and kind not in {"a coarse clock", "a counter of tens"}:
        assert cache.policy == "lru"
        assert "must depend on the record" in dropped[0]


@pytest.mark.parametrize("leaves", [1, 2, 7, 100, 3000])
def test_a_decision_asks_for_few_keys_before_it_gives_up(leaves: int) -> None:
    asked = itertools.count()

    class Counter(KeyedOrder):
        def key(self, record: NodeRecord) -> int:
            return next(asked)

    cache = cache_with(Counter, 2 * leaves)
    for n in range(leaves):
        cache.insert([n])
    before = next(asked)
    assert cache.evict(1).freed == 1
    assert next(asked) - before <= 20
    assert cache.policy == "lru"


def test_keys_that_all_rose_are_no_sign_of_trouble() -> None:
    """A decision may move every leaf once: then its keys hold still."""
    for leaves in (3, 8, 9, 1000):
        cache = cache_with(LRU, 2 * leaves)
        for n in range(leaves):
            cache.insert([n])
        for n in range(leaves):
            cache.match_prefix([n])
        assert cache.evict(1).freed == 1
        assert cache.policy == "tested"


def test_the_data_of_a_record_is_the_authors_own() -> None:
    """Whatever an author of a key puts there, and whenever, victims are the same."""

    class Noted(LFU):
        def note(self, record: NodeRecord) -> None:
            record.data = None if random.random() < 0.3 else random.random()

        def insert(self, record: NodeRecord) -> None:
            assert record.data is None
            self.note(record)
            super().insert(record)
            self.note(record)

        def touch(self, record: NodeRecord) -> None:
            self.note(record)

        def trim(self, record: NodeRecord, tokens: int) -> None:
            super().trim(record, tokens)
            self.note(record)

        def key(self, record: NodeRecord) -> tuple[int, int]:
            self.note(record)
            return super().key(record)

    for seed in range(4):
        went = []
        for made in (LFU, Noted):
            cache = cache_with(made, 60)
            busy(cache, seed)
            assert cache.policy == "tested"
            went.append([node.serial for node in nodes_of(cache)])
            drain(cache)
        assert went[0] == went[1]


class Told(KeyedOrder):
    """Ranks nodes by the outputs of the requests that ended in them; the key falls at a finish."""

    rises = False

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, int] = {}

    def key(self, record: NodeRecord) -> int:
        return -self.outputs.get(record.serial, 0)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        if request.end is not None:
            self.outputs[request.end.serial] = info.output_tokens


def test_an_order_that_does_not_rise_may_change_a_key_at_a_finish() -> None:
    cache = cache_with(Told)
    for n in range(5):
        cache.insert([n], request=n)
    for n, outputs in ((3, 10), (1, 20), (3, 30)):
        cache.finish(n, RequestInfo(output_tokens=outputs))
        cache.match_prefix([n], n)
    cache.finish(3, RequestInfo(output_tokens=40))
    order: Any = cache._pool.order
    while cache.evictable:
        serial = by_search(cache, order).serial
        assert cache.evict(1).victims[0].serial == serial
    assert cache.policy == "tested"


def test_an_author_may_requeue_any_record_at_any_time() -> None:
    class Swapped(KeyedOrder):
        def __init__(self) -> None:
            super().__init__()
            self.signs: dict[int, int] = {}
            self.records: list[NodeRecord] = []

        def key(self, record: NodeRecord) -> int:
            return self.signs.get(record.serial, 1) * record.serial

        def insert(self, record: NodeRecord) -> None:
            self.records.append(record)
            super().insert(record)

    cache = cache_with(Swapped)
    for n in range(6):
        cache.insert([n])
    order: Any = cache._pool.order
    for record in order.records[3:]:
        order.signs[record.serial] = -1
        order.requeue(record)
    went = [cache.evict(1).victims[0].serial for _ in range(6)]
    serials = [record.serial for record in order.records]
    assert went == [*reversed(serials[3:]), *serials[:3]]
    for record in order.records:
        order.requeue(record)  # evicted: it has no place
    assert order.next_victim("kv") is None
