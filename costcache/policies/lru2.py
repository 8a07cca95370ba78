"""LRU-K: evicts nodes without a K-th last use first, then those whose K-th last use is oldest."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.ghosts import Ghosts
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["LRUK", "LRU2Settings"]


class LRU2Settings(BaseModel):
    """Settings of ``lru2``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: int = Field(2, ge=1, le=64, description="The K of LRU-K: which last use ranks a node; 1 is LRU.")
    correlated_period: float = Field(
        0.0,
        ge=0.0,
        description="Uses closer together than this count as one, in units of the stream clock: "
        "seconds if the cache is told the time, else requests.",
    )
    history: float = Field(
        1.0,
        ge=0.0,
        description="Evicted nodes whose uses are remembered, in tokens as a multiple of the pool.",
    )


class History:
    """Uses of one node.

    Attributes:
        last: Time of the last use, correlated or not.
        times: Times of the last K uncorrelated uses, newest first; minus infinity for missing ones.
    """

    __slots__ = ("last", "times")

    def __init__(self, last: float, times: tuple[float, ...]) -> None:
        self.last = last
        self.times = times

    def use(self, now: float, period: float) -> None:
        """Record a use, as in figure 2.1 of the paper."""
        if now - self.last > period or not period:
            gap = self.last - self.times[0]  # length of the last correlated burst
            self.times = (now, *(time + gap for time in self.times[:-1]))
        self.last = now


class LRUK(KeyedOrder):
    """Evicts the leaf whose K-th last use is oldest; leaves without one come first, by LRU.

    Source: E. O'Neil, P. O'Neil and G. Weikum, "The LRU-K page replacement algorithm for database disk
    buffering", SIGMOD 1993. Parameters: ``k``; the paper's correlated reference period; and its retained
    information, here bounded by size instead of by time.

    Departures: objects are nodes of tokens, of which only unlocked leaves are evicted; a use is counted once
    per request, at the reading of the stream clock; a node inside its correlated period may be evicted (the
    locks of a running request protect what the paper means to protect); a history is recognised by the first
    page of a node, so that of a trimmed tail is not.
    """

    def __init__(
        self, capacity: int, k: int = 2, correlated_period: float = 0.0, history: float = 1.0
    ) -> None:
        super().__init__()
        self._period = correlated_period
        self._never = (-math.inf,) * (k - 1)
        self._histories: dict[int, History] = {}
        self._ghosts: Ghosts[History] = Ghosts(capacity * history)

    def key(self, record: NodeRecord) -> tuple[float, int]:
        return (self._histories[record.serial].times[-1], record.recency)

    def insert(self, record: NodeRecord) -> None:
        now = record.last_use
        history = self._ghosts.take(record.prefix_hash()) if len(self._ghosts) else None
        if history is None:
            history = History(now, (now, *self._never))
        else:
            history.use(now, self._period)
        self._histories[record.serial] = history
        super().insert(record)

    def use(self, record: NodeRecord) -> None:
        self._histories[record.serial].use(record.last_use, self._period)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        own = self._histories[tail.serial]
        self._histories[prefix.serial] = History(own.last, own.times)
        super().split(prefix, tail)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        del self._histories[prefix.serial]
        self.merged(prefix, tail)

    def remove(self, record: NodeRecord) -> None:
        super().remove(record)
        self._ghosts.keep(record.prefix_hash(), record.tokens, self._histories.pop(record.serial))


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "lru2": PolicySpec(
            lambda cost, pools, settings: LRUK(
                pools[0].capacity, settings.k, settings.correlated_period, settings.history
            ),
            "Oldest second-to-last use (LRU-K).",
            LRU2Settings,
        )
    }
