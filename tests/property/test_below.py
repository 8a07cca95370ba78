"""The order of a slower tier names the record that is worth least, as a naive model finds it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from hypothesis import given
from hypothesis import strategies as st

from costcache.eviction import Refused
from costcache.guard import HookGuard
from costcache.policies.hazard.below import Below
from costcache.pool import Pool
from costcache.records import Clock, NodeRecord, RequestRecord, Victim
from costcache.testing import PolicyContract
from tests.property.kit import policy as offering


class Toy(Below):
    """Strata are priorities; what was used long ago is worth less."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        known = record if history is None else history
        return known.priority, known.last_use

    def reading(self) -> tuple[int, float]:
        return int(self.clock.now), float(self.clock.now)

    def worth(self, stratum: int, age: float) -> float:
        return (1.0 + stratum) / (1.0 + age)


class Alone(Below):
    """The order of a cache, which hears of time from the records: strata are sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        self.now = max(self.now, record.last_use)
        return record.tokens.bit_length(), record.last_use

    def reading(self) -> tuple[int, float]:
        return int(self.now), self.now

    def use(self, record: NodeRecord) -> None:
        self.now = max(self.now, record.last_use)
        super().use(record)

    def worth(self, stratum: int, age: float) -> float:
        return stratum / (1.0 + age)


class TestBelow(PolicyContract):
    """What every policy has to do, in a tree: with splits, merges, trims and pins."""

    policy = "below"
    plugin: ClassVar[Any] = offering("below", Alone)
    test_every_process_gives_the_same_victims = None  # type: ignore[assignment]  # an order of a test is in this process alone


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("insert", "insert", "use", "lock", "unlock", "split", "merge", "renew", "evict", "evict")
        ),
        st.integers(0, 30),
        st.integers(0, 3),
    ),
    max_size=60,
)


def path_to(record: Any) -> list[NodeRecord]:
    """The records from the top down to one."""
    path = []
    while record.parent is not None:
        path.append(record)
        record = record.parent
    return path[::-1]


@given(STEPS, st.booleans(), st.booleans())
def test_it_evicts_what_is_worth_least(steps: list[tuple[str, int, int]], refuses: bool, flat: bool) -> None:
    clock = Clock()
    order = Toy(clock)
    refused: set[int] = set()

    def take(victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        free = [r for r in pool.records() if r.is_evictable and r.serial not in refused]
        assert record in free
        now = float(clock.now)
        worths = {r.serial: order.worth(r.priority, max(0.0, now - r.last_use)) for r in free}
        assert math.isclose(worths[record.serial], min(worths.values()))
        if refuses and record.serial % 3 == 0:
            refused.add(record.serial)
            return Refused.NOT_NOW
        if record.tokens > needed:
            pool.trim(record, needed)
            return needed
        pool.remove(record)
        return record.tokens

    pool = Pool(
        "host",
        take,
        lambda _: ("toy", order),
        HookGuard("generic"),
        capacity=10_000,
        clock=clock,
        flat=flat,
        lower_tier=True,
    )
    for number, (name, which, priority) in enumerate(steps):
        clock.begin()
        clock.advance(number // 3)  # a request of several steps
        clock.accesses += 1
        records: list[Any] = pool.records()
        if name == "insert":
            above = None if flat or not records else ([None, *records])[which % (len(records) + 1)]
            depth = 10 if above is None else above.end
            pool.insert(NodeRecord(0, above, 4 + which % 3, depth), priority=priority)
        elif not records:
            continue
        elif name == "evict":
            refused.clear()
            pool.evict(1 + which % 8)
        else:
            record = records[which % len(records)]
            if name == "use" and not record.locks:
                pool.use(path_to(record), RequestRecord(clock.accesses, False))
            elif name == "lock" and not record.locks:
                pool.pin(record)
            elif name == "unlock" and record.pins:
                pool.unpin(record)
            elif name == "split" and not record.locks and record.tokens > 1:
                pool.split(NodeRecord(0, None, 1, record.depth), record)
            elif name == "merge" and not flat:
                above = record.parent
                single = above.parent is not None and above.live_children == 1 and not above.pins
                if single and above.priority == record.priority:
                    pool.use(path_to(record), RequestRecord(clock.accesses, False))
                    pool.merge(above, record)
            elif name == "renew":
                # The copy above is evicted again: of another class by now, and used since.
                past = NodeRecord(0, None, record.tokens, record.depth)
                past.data, past.priority, past.last_use = "known", priority, float(clock.now)
                record.priority, record.last_use = past.priority, past.last_use
                pool.inherit(record, past)
    assert not pool.fallbacks
    evictable = sum(r.tokens for r in pool.records() if not r.locks)
    refuses = False
    refused.clear()
    assert pool.evict(evictable).freed == evictable
    assert not pool.fallbacks


def test_stale_entries_do_not_pile_up() -> None:
    clock = Clock()
    order = Toy(clock)
    pool = Pool(
        "host", lambda _, __: 0, lambda _: ("toy", order), HookGuard("generic"), capacity=100, clock=clock
    )
    records = [NodeRecord(0, None, 1, 0) for _ in range(4)]
    for record in records:
        pool.insert(record)
    for number in range(3000):
        clock.begin()
        pool.use([records[number % 4]], RequestRecord(number, False))
    assert order._entries == sum(map(len, order._queues.values())) <= 2 * 4 + 1024 + 1
