"""Workload-aware eviction: a probability of reuse for each class of requests, which falls with age."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.queues import Entry, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["RequestClass", "Wild", "WildSettings"]

FORGET = 1 << 22
"""Halve a class's counts once it has seen this many tokens."""
FADE = 0.999
"""Factor by which each victim discounts the earlier ones in the mean lifespan."""
MOST_CLASSES = 64
"""Limit on the number of classes; later ones share the last."""


class WildSettings(BaseModel):
    """Settings of ``wild``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(
        8, ge=1, le=MOST_CLASSES, description="Turns of a conversation that are distinguished."
    )
    prior: float = Field(
        100_000.0,
        gt=0.0,
        description="Tokens of evidence from which a class outweighs the estimate over all classes.",
    )
    refresh: int = Field(256, ge=1, description="Uses and victims between fits of the classes.")


class Evidence:
    """Reuse and evictions of some nodes, in tokens.

    Attributes:
        reused: Tokens that were used again.
        waited: Sum of their reuse intervals, tokens x time.
        evicted: Tokens evicted before another use.
    """

    __slots__ = ("evicted", "reused", "waited")

    def __init__(self) -> None:
        self.reused = 0.0
        self.waited = 0.0
        self.evicted = 0.0

    def reuse(self, tokens: int, interval: float) -> None:
        """Count tokens that were used again after ``interval``."""
        self.reused += tokens
        self.waited += tokens * interval
        self._fade()

    def evict(self, tokens: int) -> None:
        """Count tokens that were evicted before another use."""
        self.evicted += tokens
        self._fade()

    def _fade(self) -> None:
        if self.reused + self.evicted > FORGET:
            self.reused /= 2
            self.waited /= 2
            self.evicted /= 2


class RequestClass:
    """One class of requests: an LRU queue of their nodes, and the reuse observed.

    Attributes:
        queue: Its nodes.
        evidence: Their reuse and evictions.
        rate: One over the mean time to the next use.
        log_scale: Logarithm of the probability of a reuse within a lifespan, just after a use.
    """

    __slots__ = ("evidence", "log_scale", "queue", "rate")

    def __init__(self) -> None:
        self.queue = Queue()
        self.evidence = Evidence()
        self.rate = 1.0
        self.log_scale = 0.0

    def fit(self, life: float, of_all: Evidence, prior: float) -> None:
        """Refit the probability ``p * (exp(-age * rate) - exp(-(age + life) * rate))``.

        A share p of the uses is followed by another, after exponentially distributed times. Both are
        estimated for this class and shrunk to the estimates over all classes by ``prior`` tokens of evidence.

        Args:
            life: The lifespan, in units of the clock.
            of_all: Evidence over all classes.
            prior: Tokens of evidence that the estimates over all classes weigh.
        """
        own = self.evidence
        share = (of_all.reused + 1.0) / (of_all.reused + of_all.evicted + 2.0)
        mean = of_all.waited / of_all.reused if of_all.reused else life
        weight = prior * share
        p = (own.reused + weight) / (own.reused + own.evicted + prior)
        self.rate = (own.reused + weight) / max(own.waited + weight * mean, 1e-9)
        self.log_scale = math.log(p) + math.log(-math.expm1(-life * self.rate))


class Tagged(Entry):
    """An entry with its class, its turn and the time of its last use."""

    __slots__ = ("group", "turn", "used")

    def __init__(self, record: NodeRecord, group: RequestClass, turn: int) -> None:
        super().__init__(record, group.queue)
        self.group = group
        self.turn = turn
        self.used = record.last_use

    def twin(self, prefix: NodeRecord) -> Tagged:
        entry = Tagged(prefix, self.group, self.turn)
        entry.used = self.used
        return entry


class Wild(QueueOrder):
    """Evicts the leaf with the lowest probability of being reused within a lifespan.

    Nodes belong to the class of the request that made them. Each class is an LRU queue, since the
    probability only falls with the time since the last use, so the victim is the oldest of one of the
    queues; of equals, the deepest. The lifespan is the mean time from last use to eviction.

    Source: J. Wang and others, "KVCache cache in the wild: characterizing and optimizing KVCache cache at a
    large cloud provider", USENIX ATC 2025, arXiv 2506.02634. Only its abstract, the description of the
    authors' vLLM pull request 22236 and reimplementations by others were available, not its section on the
    policy: the rank (probability, then depth), the exponential fit of each class, the lifespan and one
    queue per class are theirs; the estimators of the lifespan and of the fit are ours.

    Departures: the paper's classes are tags that clients send (text, image, file, with the turn of the
    conversation), fitted beforehand on an hour of traffic. No such tag reaches a cache, so a class is the
    priority of the request and the turn that the tree shows: the first child of a node continues its
    conversation, any other branch begins one. Classes are fitted online, and the fit is multiplied by the
    share of uses that were followed by another, without which a class that is never reused would have no
    rank. Objects are nodes of tokens, weighted by them; only unlocked leaves are evicted. A victim costs
    O(classes).
    """

    def __init__(self, turns: int = 8, prior: float = 100_000.0, refresh: int = 256) -> None:
        super().__init__()
        self._turns, self._prior, self._refresh = turns, prior, refresh
        self._events = 0
        self._classes: dict[tuple[int, int], RequestClass] = {}
        self._all = Evidence()
        self._now = 0.0
        self._life_sum, self._life_count = 1.0, 1.0

    def insert(self, record: NodeRecord) -> None:
        parent = record.parent
        above = parent.data if parent is not None and parent.live_children == 1 else None
        turn = min(above.turn + 1, self._turns) if isinstance(above, Tagged) else 1
        self._now = max(self._now, record.last_use)
        self.enter(Tagged(record, self._class(record.priority, turn), turn))

    def use(self, record: NodeRecord) -> None:
        entry: Tagged = record.data
        self._now = now = record.last_use
        interval, tokens = max(now - entry.used, 0.0), record.tokens
        entry.group.evidence.reuse(tokens, interval)
        self._all.reuse(tokens, interval)
        self._event()
        entry.used = now
        self.move(entry, entry.queue)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._evicted(record, tokens)
        super().trim(record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._evicted(record, record.tokens)
        super().remove(record)

    def next_victim(self, pool: str) -> Victim | None:
        now = self._now
        best: Tagged | None = None
        least: tuple[float, int, int] | None = None
        for group in self._classes.values():
            entry = self.oldest(group.queue)
            if isinstance(entry, Tagged):
                reuse = group.log_scale - (now - entry.used) * group.rate
                rank = (reuse, -entry.record.depth, entry.record.serial)
                if least is None or rank < least:
                    best, least = entry, rank
        if best is None:
            self._named = None
            return None
        return self.name(best)

    def _class(self, priority: int, turn: int) -> RequestClass:
        classes = self._classes
        found = classes.get((priority, turn))
        if found is None:
            if len(classes) >= MOST_CLASSES:
                return next(reversed(classes.values()))
            found = classes[priority, turn] = RequestClass()
            found.fit(self._life(), self._all, self._prior)
        return found

    def _evicted(self, record: NodeRecord, tokens: int) -> None:
        entry: Tagged = record.data
        entry.group.evidence.evict(tokens)
        self._all.evict(tokens)
        self._life_sum = FADE * self._life_sum + max(self._now - entry.used, 0.0)
        self._life_count = FADE * self._life_count + 1.0
        self._event()

    def _life(self) -> float:
        return max(self._life_sum / self._life_count, 1e-9)

    def _event(self) -> None:
        self._events += 1
        if self._events >= self._refresh:
            self._events = 0
            life = self._life()
            for group in self._classes.values():
                group.fit(life, self._all, self._prior)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "wild": PolicySpec(
            lambda cost, pools, settings: Wild(settings.turns, settings.prior, settings.refresh),
            "Lowest probability of reuse within a lifespan, by class of request.",
            WildSettings,
        )
    }
