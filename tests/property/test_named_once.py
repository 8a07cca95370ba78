"""No policy names a node twice in one eviction, whatever the host cannot free and whoever waits for it."""

from __future__ import annotations

import random

import pytest

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.eviction import Refused
from costcache.model import ModelSpec
from costcache.policies import BUILTIN
from costcache.records import NodeRecord, RequestInfo, Victim
from costcache.settings import Settings

MODEL = ModelSpec.preset("llama-3-8b")
CAPACITY = 120


class Host:
    """Values under a root or in a tree; some of them cannot be freed for now, as those of open sessions."""

    def __init__(self, policy: str, seed: int, *, flat: bool) -> None:
        binding = Binding.of(MODEL, Deployment(), Settings(policy=policy))
        self.rng = random.Random(seed)
        self.pool = binding.pool("kv", self.take, capacity=CAPACITY, flat=flat)
        self.flat = flat
        self.records: list[NodeRecord] = []
        self.stuck: set[NodeRecord] = set()
        self.refused: set[NodeRecord] = set()

    def take(self, victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        assert record in self.records
        assert record.is_evictable
        if record in self.stuck:
            assert record not in self.refused, "named twice in one eviction"
            self.refused.add(record)
            return Refused.NOT_NOW
        needed = victim.at_most(needed)
        if needed < record.tokens:
            self.pool.trim(record, needed)
            return needed
        self.records.remove(record)
        self.pool.remove(record)
        return record.tokens

    def evict(self, shortfall: int) -> None:
        self.refused.clear()
        freed = self.pool.evict(shortfall).freed
        free = [record for record in self.records if record.is_evictable and record not in self.stuck]
        assert freed >= shortfall or not free

    def path(self, record: NodeRecord) -> list[NodeRecord]:
        if self.flat or record.parent is None or record.parent is self.pool.root:
            return [record]
        return [*self.path(record.parent), record]

    def step(self) -> None:
        rng, pool = self.rng, self.pool
        pool.clock.accesses += 1
        request = pool.begin()
        for record in rng.sample(self.records, min(len(self.records), rng.randrange(4))):
            pool.use(self.path(record), None)  # a waiting request needs it
        if self.records and rng.random() < 0.5:  # one of those begins
            pool.use(self.path(rng.choice(self.records)), request)
        tokens = rng.randrange(1, 12)
        if pool.free < tokens:
            self.stuck = set(rng.sample(self.records, len(self.records) * rng.choice((0, 1, 3)) // 4))
            self.evict(rng.choice((tokens, CAPACITY // 2, CAPACITY)))
        if pool.free >= tokens:
            parent = rng.choice([None, *self.records]) if not self.flat else None
            record = NodeRecord(0, parent, tokens, 0 if parent is None else parent.end)
            pool.insert(record, request)
            self.records.append(record)
        if rng.random() < 0.7:
            pool.finish(request, RequestInfo(output_tokens=rng.randrange(100)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("policy", BUILTIN)
def test_a_victim_that_cannot_be_freed_is_named_once(policy: str, flat: bool) -> None:
    for seed in range(4):
        host = Host(policy, seed, flat=flat)
        for _ in range(150):
            host.step()
        assert host.pool.counters.deferred > 0
        assert (host.pool.policy, host.pool.fallbacks) == (policy, 0)
