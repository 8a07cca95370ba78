"""Workload-aware eviction: each class of requests has its own probability of reuse, which fades with time."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.queues import Place, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["Wild", "WildSettings", "Workload"]

FORGET = 1 << 22
"""Tokens of evidence at which a class counts its past half."""
FADE = 0.999
"""What a victim leaves of the weight of those before it in the mean lifespan."""
MOST_CLASSES = 64
"""Classes; what comes beyond shares the last one."""


class WildSettings(BaseModel):
    """Settings of ``wild``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(8, ge=1, le=MOST_CLASSES, description="Turns of a conversation that are told apart.")
    prior: float = Field(
        100_000.0,
        gt=0.0,
        description="Tokens of evidence from which a class outweighs what is known of all classes.",
    )
    refresh: int = Field(256, ge=1, description="Uses and victims after which the classes are fitted anew.")


class Evidence:
    """What was seen of the reuse of some nodes, in tokens.

    Attributes:
        reused: Tokens that were used again.
        waited: Sum of the times that they waited, tokens x time.
        evicted: Tokens that went without.
    """

    __slots__ = ("evicted", "reused", "waited")

    def __init__(self) -> None:
        self.reused = 0.0
        self.waited = 0.0
        self.evicted = 0.0

    def reuse(self, tokens: int, interval: float) -> None:
        """Tokens were used again after ``interval``."""
        self.reused += tokens
        self.waited += tokens * interval
        self._fade()

    def evict(self, tokens: int) -> None:
        """Tokens went without another use."""
        self.evicted += tokens
        self._fade()

    def _fade(self) -> None:
        if self.reused + self.evicted > FORGET:
            self.reused /= 2
            self.waited /= 2
            self.evicted /= 2


class Workload:
    """One class of requests: an LRU queue of their nodes, and what was seen of them.

    Attributes:
        queue: Its nodes.
        evidence: What was seen.
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
        """Estimate the probability ``p * (exp(-age * rate) - exp(-(age + life) * rate))`` anew.

        A share p of the uses is followed by another, after exponential times. Both are estimates of this
        class, drawn to those of all classes by ``prior`` tokens of evidence.
        """
        own = self.evidence
        share = (of_all.reused + 1.0) / (of_all.reused + of_all.evicted + 2.0)
        mean = of_all.waited / of_all.reused if of_all.reused else life
        weight = prior * share
        p = (own.reused + weight) / (own.reused + own.evicted + prior)
        self.rate = (own.reused + weight) / max(own.waited + weight * mean, 1e-9)
        self.log_scale = math.log(p) + math.log(-math.expm1(-life * self.rate))


class Tagged(Place):
    """A place that knows its class, its turn and when it was used."""

    __slots__ = ("turn", "used", "workload")

    def __init__(self, record: NodeRecord, workload: Workload, turn: int) -> None:
        super().__init__(record, workload.queue)
        self.workload = workload
        self.turn = turn
        self.used = record.last_use

    def twin(self, prefix: NodeRecord) -> Tagged:
        place = Tagged(prefix, self.workload, self.turn)
        place.used = self.used
        return place


class Wild(QueueOrder):
    """The leaf with the lowest probability of being reused within a lifespan goes first.

    Nodes belong to the class of the request that made them. Each class is an LRU queue, since the
    probability only falls with the time since the last use, so the victim is the oldest of one of the
    queues; of equals, the deepest. The lifespan is the mean time from last use to eviction.

    Source: J. Wang and others, "KVCache cache in the wild: characterizing and optimizing KVCache cache at a
    large cloud provider", USENIX ATC 2025, arXiv 2506.02634. Only its abstract, the description of the
    authors' vLLM pull request 22236 and reimplementations by others were at hand, not its section on the
    policy: the rank (probability, then depth), the exponential fit of each class, the lifespan and one
    queue a class are theirs; how the lifespan and the fit are estimated is ours.

    Departures: the paper's classes are tags that clients send (text, image, file, with the turn of the
    conversation), fitted beforehand on an hour of traffic. No such tag reaches a cache, so a class is the
    priority of the request and the turn that the tree shows: the first node behind another one goes on with
    its conversation, any other branch begins one. Classes are fitted as the stream goes, and the fit is
    multiplied by the share of uses that were followed by another, without which a class that is never
    reused would have no rank. Objects are nodes of tokens, weighed by them; only unlocked leaves may go.
    A victim costs O(classes).
    """

    def __init__(self, turns: int = 8, prior: float = 100_000.0, refresh: int = 256) -> None:
        super().__init__()
        self._turns, self._prior, self._refresh = turns, prior, refresh
        self._events = 0
        self._workloads: dict[tuple[int, int], Workload] = {}
        self._all = Evidence()
        self._now = 0.0
        self._life_sum, self._life_count = 1.0, 1.0

    def insert(self, record: NodeRecord) -> None:
        parent = record.parent
        above = parent.data if parent is not None and parent.live_children == 1 else None
        turn = min(above.turn + 1, self._turns) if isinstance(above, Tagged) else 1
        self._now = max(self._now, record.last_use)
        self.enter(Tagged(record, self._workload(record.priority, turn), turn))

    def use(self, record: NodeRecord) -> None:
        place: Tagged = record.data
        self._now = now = record.last_use
        interval, tokens = max(now - place.used, 0.0), record.tokens
        place.workload.evidence.reuse(tokens, interval)
        self._all.reuse(tokens, interval)
        self._event()
        place.used = now
        self.move(place, place.queue)

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
        for workload in self._workloads.values():
            place = self.oldest(workload.queue)
            if isinstance(place, Tagged):
                reuse = workload.log_scale - (now - place.used) * workload.rate
                rank = (reuse, -place.record.depth, place.record.serial)
                if least is None or rank < least:
                    best, least = place, rank
        if best is None:
            self._named = None
            return None
        return self.name(best)

    def _workload(self, priority: int, turn: int) -> Workload:
        workloads = self._workloads
        found = workloads.get((priority, turn))
        if found is None:
            if len(workloads) >= MOST_CLASSES:
                return next(reversed(workloads.values()))
            found = workloads[priority, turn] = Workload()
            found.fit(self._life(), self._all, self._prior)
        return found

    def _evicted(self, record: NodeRecord, tokens: int) -> None:
        place: Tagged = record.data
        place.workload.evidence.evict(tokens)
        self._all.evict(tokens)
        self._life_sum = FADE * self._life_sum + max(self._now - place.used, 0.0)
        self._life_count = FADE * self._life_count + 1.0
        self._event()

    def _life(self) -> float:
        return max(self._life_sum / self._life_count, 1e-9)

    def _event(self) -> None:
        self._events += 1
        if self._events >= self._refresh:
            self._events = 0
            life = self._life()
            for workload in self._workloads.values():
                workload.fit(life, self._all, self._prior)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "wild": PolicySpec(
            lambda cost, pools, settings: Wild(settings.turns, settings.prior, settings.refresh),
            "Least likely to be reused within a lifespan first, by class of request.",
            WildSettings,
        )
    }
