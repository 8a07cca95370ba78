"""A pool under a host of its own, flat or a tree: counts are right after every call, and locks hold."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.eviction import Refused
from costcache.model import ModelSpec
from costcache.records import NodeRecord, RequestRecord, Victim
from costcache.settings import Settings

MODEL = ModelSpec.preset("llama-3-8b")
POLICIES = ("lru", "mru", "lfu", "slru", "hazard", "arc", "s3fifo", "sieve", "gdsf", "lhd", "wtinylfu")
CAPACITY = 60


class Machine(RuleBasedStateMachine):
    """Values of a few tokens, each under a parent or under the root, some locked for a while."""

    @initialize(policy=st.sampled_from(POLICIES), flat=st.booleans(), trims=st.booleans())
    def begin(self, policy: str, flat: bool, trims: bool) -> None:
        binding = Binding.of(MODEL, Deployment(), Settings(policy=policy))
        self.pool = binding.pool("kv", self.take, capacity=CAPACITY, flat=flat)
        self.policy, self.flat, self.trims = policy, flat, trims
        self.records: list[NodeRecord] = []
        self.pinned: list[NodeRecord] = []
        self.stuck: set[NodeRecord] = set()
        self.named: set[NodeRecord] = set()
        self.request: RequestRecord = self.pool.begin()

    def take(self, victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        if record not in self.records or record.live_children:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        assert record not in self.pinned
        if record in self.stuck:
            assert record not in self.named, "named twice in one eviction"
            self.named.add(record)
            return Refused.NOT_NOW
        needed = victim.at_most(needed)
        if self.trims and needed < record.tokens:
            self.pool.trim(record, needed)
            return needed
        self.records.remove(record)
        self.pool.remove(record)
        return record.tokens

    def path(self, record: NodeRecord) -> list[NodeRecord]:
        found: list[NodeRecord] = []
        node: NodeRecord | None = record
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @rule(tokens=st.integers(1, 12), under=st.integers(0, 20), pinned=st.booleans())
    def insert(self, tokens: int, under: int, pinned: bool) -> None:
        parent = None
        if not self.flat and self.records and under < len(self.records):
            parent = self.records[under]
        keep = parent or self.pool.root
        self.named = set()
        room = self.pool.make_room(tokens, keep)
        assert parent is None or parent in self.records, "what an eviction was told to keep was evicted"
        if room < tokens and self.stuck:
            return
        if room < tokens:
            assert self.pool.evictable <= (0 if parent is None else parent.depth + parent.tokens)
            return
        self.pool.clock.accesses += 1
        record = NodeRecord(0, parent, tokens, 0 if parent is None else parent.end)
        self.pool.insert(record, self.request)
        self.records.append(record)
        if pinned:
            self.pool.pin(record)
            self.pinned.append(record)

    @precondition(lambda self: self.records)
    @rule(which=st.integers(0, 50), again=st.booleans(), nobody=st.booleans())
    def use(self, which: int, again: bool, nobody: bool) -> None:
        record = self.records[which % len(self.records)]
        path = [record] if self.flat else self.path(record)
        uses = [each.uses for each in path]
        self.pool.clock.accesses += 1
        before = self.request.counted
        self.pool.use(path, None if nobody else self.request, again=again)
        for each, had in zip(path, uses, strict=True):
            counts = not nobody and each.end > before
            assert each.uses == had + counts
            assert each.recency == self.pool.clock.accesses

    @precondition(lambda self: any(record.tokens > 1 for record in self.records))
    @rule(which=st.integers(0, 50), at=st.integers(1, 11))
    def split(self, which: int, at: int) -> None:
        whole = [record for record in self.records if record.tokens > 1]
        tail = whole[which % len(whole)]
        tokens = 1 + at % (tail.tokens - 1) if tail.tokens > 2 else 1
        prefix = NodeRecord(0, tail.parent, tokens, tail.depth)
        # In a flat pool the prefix is a value of its own, which nobody has locked.
        self.pool.split(prefix, tail, locked=False if self.flat else None)
        if self.flat:
            self.pool.unlock(prefix)
        self.records.append(prefix)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 50))
    def unpin(self, which: int) -> None:
        self.pool.unpin(self.pinned.pop(which % len(self.pinned)))

    @precondition(lambda self: self.records)
    @rule(which=st.lists(st.integers(0, 50), max_size=4))
    def stick(self, which: list[int]) -> None:
        """The host cannot free these for now, for a reason of its own: an open session, say."""
        self.stuck = {self.records[each % len(self.records)] for each in which}

    @rule(output=st.integers(0, 700))
    def finish(self, output: int) -> None:
        from costcache.records import RequestInfo

        self.pool.finish(self.request, RequestInfo(output_tokens=output))
        self.request = self.pool.begin()

    @rule(shortfall=st.integers(1, 70))
    def evict(self, shortfall: int) -> None:
        evictable = self.pool.evictable
        self.named = set()
        freed = self.pool.evict(shortfall).freed
        if self.stuck:
            left = [r for r in self.records if r.is_evictable and r not in self.stuck]
            assert freed >= shortfall or not left, "nothing else can be evicted"
            return
        assert min(shortfall, evictable) <= freed <= evictable

    @precondition(lambda self: not self.pinned)
    @rule()
    def reset(self) -> None:
        self.pool.reset()
        assert all(record.parent is None for record in self.records)
        self.records = []
        self.request = self.pool.begin()

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert list(pool.live.values()) == sorted(self.records, key=lambda record: record.serial)
        assert pool.cached == sum(record.tokens for record in self.records)
        locked = [record for record in self.records if record.locks]
        assert pool.pinned == sum(record.tokens for record in locked)
        assert pool.state().free == CAPACITY - pool.cached >= 0
        assert pool.evictable == pool.cached - pool.pinned
        children = count(record.parent for record in self.records)
        assert all(record.live_children == children.get(id(record), 0) for record in self.records)
        assert pool.root.live_children == children.get(id(pool.root), 0)
        assert (pool.policy, pool.fallbacks) == (self.policy, 0)


def count(parents: Iterable[NodeRecord | None]) -> dict[int, int]:
    """Children of each record, by its id."""
    found: dict[int, int] = {}
    for parent in parents:
        found[id(parent)] = found.get(id(parent), 0) + 1
    return found


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
