"""Hashes of prefixes may be equal by chance: hazard then learns something wrong, and nothing breaks."""

from __future__ import annotations

import random

import pytest

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.eviction import Refused
from costcache.model import ModelSpec
from costcache.records import NodeRecord, RequestInfo, Victim
from costcache.settings import Settings


class Colliding(NodeRecord):
    """A node whose prefix has one of few hashes, whatever its tokens and its depth."""

    def __init__(self, parent: Colliding | None, tokens: int, name: int) -> None:
        super().__init__(0, parent, tokens, 0 if parent is None else parent.end)
        self.name = name

    def prefix_hash(self, offset: int = 0) -> int:
        return (self.name + offset) % 5


@pytest.mark.parametrize("seed", range(8))
def test_equal_hashes_at_different_depths_break_nothing(seed: int) -> None:
    rng = random.Random(seed)

    def take(victim: Victim, needed: int) -> int | Refused:
        record = victim.record
        freed = min(needed, record.tokens) if rng.random() < 0.5 else record.tokens
        if freed < record.tokens:
            pool.trim(record, record.tokens - freed)
        else:
            pool.remove(record)
        return freed

    binding = Binding.of(ModelSpec.preset("llama-3-8b"), Deployment(), Settings(policy="hazard"))
    pool = binding.pool("kv", take, capacity=400)
    for _ in range(1500):
        pool.clock.accesses += 1
        request = pool.begin()
        live = [record for record in pool.records() if isinstance(record, Colliding)]
        parent = rng.choice(live) if live and rng.random() < 0.7 else None
        path: list[NodeRecord] = []
        above: NodeRecord | None = parent
        while isinstance(above, Colliding):
            path.insert(0, above)
            above = above.parent
        pool.use(path, request)
        if parent is not None:
            pool.pin(parent)
        keep = pool.root if parent is None else parent
        room = pool.make_room(rng.choice((5, 20, 60)), keep)
        if room:
            pool.insert(Colliding(parent, room, rng.randrange(5)), request)
        if parent is not None:
            pool.unpin(parent)
        pool.finish(request, RequestInfo(new_tokens=room))
    assert pool.fallbacks == 0
