"""The order of a slower tier names the record that is worth least, as a naive model finds it."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from costcache.eviction import Refused
from costcache.guard import HookGuard
from costcache.policies.hazard.below import Below
from costcache.pool import Pool
from costcache.records import Clock, NodeRecord, RequestRecord, Victim


class Toy(Below):
    """Strata are priorities; what was used long ago is worth less."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def place(self, record: NodeRecord, history: NodeRecord | None) -> tuple[int, float]:
        return record.priority, record.last_use

    def time(self) -> tuple[int, float]:
        return self.clock.accesses, float(self.clock.now)

    def worth(self, stratum: int, age: float) -> float:
        return (1.0 + stratum) / (1.0 + age)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("insert", "insert", "use", "lock", "unlock", "split", "evict", "evict")),
        st.integers(0, 30),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(STEPS, st.booleans())
def test_it_evicts_what_is_worth_least(steps: list[tuple[str, int, int]], refuses: bool) -> None:
    clock = Clock()
    order = Toy(clock)
    refused: set[int] = set()

    def take(victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        free = [r for r in pool.records() if not r.locks and r.serial not in refused]
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
        flat=True,
        lower_tier=True,
    )
    for name, which, priority in steps:
        clock.begin()
        clock.accesses += 1
        records: list[Any] = pool.records()
        if name == "insert":
            pool.insert(NodeRecord(0, None, 4 + which % 3, 10), priority=priority)
        elif not records:
            continue
        elif name == "evict":
            refused.clear()
            pool.evict(1 + which % 8)
        else:
            record = records[which % len(records)]
            if name == "use" and not record.locks:
                pool.use([record], RequestRecord(clock.accesses, False))
            elif name == "lock" and not record.locks:
                pool.pin(record)
            elif name == "unlock" and record.locks:
                pool.unpin(record)
            elif name == "split" and not record.locks and record.tokens > 1:
                pool.split(NodeRecord(0, None, 1, record.depth), record)
    assert not pool.fallbacks
