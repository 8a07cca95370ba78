"""S3-FIFO: a small queue for new nodes, a main queue for reused ones, and ghosts of early evictions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.ghosts import Ghosts
from costcache.policies.queues import Entry, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["S3FIFO", "S3FIFOSettings"]

MOST = 3
"""Hits that two bits can count."""


class S3FIFOSettings(BaseModel):
    """Settings of ``s3fifo``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    small: float = Field(0.1, gt=0.0, lt=1.0, description="Share of the pool that the small queue may take.")
    promote: int = Field(
        2, ge=1, le=MOST, description="Hits in the small queue from which a node moves to the main queue."
    )
    ghosts: float = Field(
        0.9,
        ge=0.0,
        description="Nodes evicted from the small queue that are remembered, in tokens as a multiple of the "
        "pool.",
    )


class Counted(Entry):
    """An entry with the hits that remained when the policy last looked."""

    __slots__ = ("hits",)

    def __init__(self, record: NodeRecord, queue: Queue) -> None:
        super().__init__(record, queue)
        self.hits = 0

    def twin(self, prefix: NodeRecord) -> Counted:
        entry = super().twin(prefix)
        entry.hits = self.hits
        return entry

    def count(self) -> int:
        """Return the value of the two-bit counter: hits that remained plus those since, at most 3."""
        return min(MOST, self.hits + self.record.uses - self.uses)

    def look(self, left: int) -> None:
        """Set the hits that remain, and count from now on."""
        self.hits = left
        self.uses = self.record.uses


class S3FIFO(QueueOrder):
    """Evicts the small queue's oldest node unless it was hit twice, else the main queue's oldest unhit one.

    New nodes enter the small queue; nodes with a ghost, which were evicted from it, enter the main queue.
    While the small queue fills its share of the pool, its oldest node is examined: with two hits it moves to
    the main queue, otherwise it is evicted. Else the oldest of the main queue is examined: with hits it moves
    to the new end and loses one hit, otherwise it is evicted.

    Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache
    eviction", SOSP 2023, algorithm 1. Parameters: the small queue's share, 10 % in the paper; the hits
    that promote, more than one there; and the ghosts, as many as the main queue has room for.

    Departures: objects are nodes of tokens and queues are measured in tokens; only unlocked leaves are
    evicted, and a node whose turn comes while it is not evictable is next once it is; a hit is counted once
    per request; a ghost is known by the first page of its node, so a trimmed tail leaves none. A victim costs
    O(1), amortised.
    """

    def __init__(self, capacity: int, small: float = 0.1, promote: int = 2, ghosts: float = 0.9) -> None:
        super().__init__()
        self._small, self._main = Queue(), Queue()
        self._share = capacity * small
        self._promote = promote
        self._ghosts: Ghosts[bool] = Ghosts(capacity * ghosts)

    def insert(self, record: NodeRecord) -> None:
        back = bool(len(self._ghosts)) and self._ghosts.take(record.prefix_hash())
        self.enter(Counted(record, self._main if back else self._small))

    def remove(self, record: NodeRecord) -> None:
        if record.data.queue is self._small:
            self._ghosts.keep(record.prefix_hash(), record.tokens, True)
        super().remove(record)

    def next_victim(self, pool: str) -> Victim | None:
        small, main = self._small, self._main
        while True:
            entry = small.oldest if small.tokens >= self._share or main.oldest is None else main.oldest
            if entry is None:
                entry = main.oldest
            if not isinstance(entry, Counted):
                self._named = None
                return None
            hits = entry.count()
            if entry.queue is small and hits >= self._promote:
                entry.look(0)
                self.move(entry, main)
            elif entry.queue is main and hits:
                entry.look(hits - 1)
                self.move(entry, main)
            elif self.can_name(entry):
                return self.name(entry)
            else:
                self.leave_line(entry)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "s3fifo": PolicySpec(
            lambda cost, pools, settings: S3FIFO(
                pools[0].capacity, settings.small, settings.promote, settings.ghosts
            ),
            "New nodes not hit twice, then the main queue's oldest without hits.",
            S3FIFOSettings,
        )
    }
