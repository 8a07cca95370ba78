"""S3-FIFO: a small queue for what is new, a main queue for what came back, ghosts of what went too soon."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.ghosts import Ghosts
from costcache.policies.queues import Place, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["S3FIFO", "S3FIFOSettings"]

MOST = 3
"""Hits that two bits can count."""


class S3FIFOSettings(BaseModel):
    """Settings of ``s3fifo``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    small: float = Field(0.1, gt=0.0, lt=1.0, description="Share of the pool that the small queue may hold.")
    promote: int = Field(
        2, ge=1, le=MOST, description="Hits in the small queue from which a node moves to the main queue."
    )
    ghosts: float = Field(
        0.9,
        ge=0.0,
        description="Nodes that are remembered after they left the small queue, in tokens as a multiple "
        "of the pool.",
    )


class Counted(Place):
    """A place with the hits that were left when the policy last looked."""

    __slots__ = ("hits",)

    def __init__(self, record: NodeRecord, queue: Queue) -> None:
        super().__init__(record, queue)
        self.hits = 0

    def twin(self, prefix: NodeRecord) -> Counted:
        place = super().twin(prefix)
        place.hits = self.hits
        return place

    def count(self) -> int:
        """Hits as a counter of two bits has them: what was left and what was added since, at most 3."""
        return min(MOST, self.hits + self.record.uses - self.uses)

    def look(self, left: int) -> None:
        """Leave ``left`` hits, and count from now on."""
        self.hits = left
        self.uses = self.record.uses


class S3FIFO(QueueOrder):
    """The oldest of the small queue goes first, unless it was hit twice; then the oldest without hits.

    New nodes enter the small queue; those that went from it and came back enter the main queue. While the
    small queue holds its share of the pool, its oldest node is looked at: with two hits it moves to the
    main queue, otherwise it goes. Else the oldest of the main queue is looked at: with hits it moves to the
    new end and has one less, otherwise it goes.

    Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO queues are all you need for cache
    eviction", SOSP 2023, algorithm 1. Parameters: the small queue's share, 10 % in the paper; the hits
    that promote, more than one there; and the ghosts, as many as the main queue has room for.

    Departures: objects are nodes of tokens and queues are measured in tokens; only unlocked leaves may go,
    and a node whose turn comes while it may not go is next once it may; a hit is counted once per
    request; a ghost is known by the first page of its node, so a trimmed tail leaves none. A victim costs
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
            place = small.oldest if small.tokens >= self._share or main.oldest is None else main.oldest
            if place is None:
                place = main.oldest
            if not isinstance(place, Counted):
                self._named = None
                return None
            hits = place.count()
            if place.queue is small and hits >= self._promote:
                place.look(0)
                self.move(place, main)
            elif place.queue is main and hits:
                place.look(hits - 1)
                self.move(place, main)
            elif self.can_go(place):
                return self.name(place)
            else:
                self.leave_line(place)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "s3fifo": PolicySpec(
            lambda cost, pools, settings: S3FIFO(
                pools[0].capacity, settings.small, settings.promote, settings.ghosts
            ),
            "New and not hit twice first, then oldest without hits.",
            S3FIFOSettings,
        )
    }
