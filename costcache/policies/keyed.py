"""Policies that are a single key of a node's own record.

The leaf with the lowest key is evicted first; :class:`costcache.orders.KeyedOrder` keeps the queue.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["FIFO", "FILO", "LFU", "LRU", "MRU", "SLRU", "HitsPerToken", "Priority", "SLRUSettings"]


class LRU(KeyedOrder):
    """Evicts the least recently used leaf. The baseline of every comparison."""

    def key(self, record: NodeRecord) -> int:
        return record.recency


class MRU(KeyedOrder):
    """Evicts the most recently used leaf: useful if the stream cycles through more than the cache holds."""

    rises = False

    def key(self, record: NodeRecord) -> int:
        return -record.recency


class FIFO(KeyedOrder):
    """Evicts the oldest leaf by time of creation, however often it was used since."""

    def key(self, record: NodeRecord) -> int:
        return record.created


class FILO(KeyedOrder):
    """Evicts the newest leaf by time of creation."""

    def key(self, record: NodeRecord) -> int:
        return -record.created


class LFU(KeyedOrder):
    """Evicts the leaf used by the fewest requests; ties are broken by LRU."""

    def key(self, record: NodeRecord) -> tuple[int, int]:
        return (record.uses, record.recency)


class Priority(KeyedOrder):
    """Evicts the leaf with the lowest request priority; ties are broken by LRU.

    A node has the highest priority of the requests that inserted it.
    """

    def key(self, record: NodeRecord) -> tuple[int, int]:
        return (record.priority, record.recency)


class SLRUSettings(BaseModel):
    """Settings of ``slru``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protected_threshold: int = Field(
        2, ge=1, description="Uses, including the first, from which a node is protected."
    )


class SLRU(KeyedOrder):
    """Evicts probationary leaves before protected ones, by LRU within each segment.

    As in SGLang, a node is protected for good once ``protected_threshold`` requests have used it: the
    protected segment has no size limit and nothing is demoted, unlike in the SLRU of the caching
    literature.
    """

    def __init__(self, protected_threshold: int = 2) -> None:
        super().__init__()
        self._threshold = protected_threshold

    def key(self, record: NodeRecord) -> tuple[bool, int]:
        return (record.uses >= self._threshold, record.recency)


class HitsPerToken(KeyedOrder):
    """Evicts the leaf with the fewest uses per token; ties are broken by LRU.

    Source: SGLang pull request 30300 of July 2026, "hits-per-token (HPT) size-aware radix-cache eviction
    policy", proposed as ``hpt``. Its title, summary and instructions for reproduction were available;
    its code and its formula were not. The ratio is the one that the name implies, and ties are broken
    as SGLang breaks every tie. No parameters.

    Departures: uses are counted once per request, where SGLang counts inserts; a trimmed or split node
    keeps its uses but has fewer tokens from then on, and so ranks higher.
    """

    def key(self, record: NodeRecord) -> tuple[float, int]:
        return (record.uses / record.tokens, record.recency)


_WITHOUT_SETTINGS: dict[str, tuple[type[KeyedOrder], str]] = {
    "fifo": (FIFO, "Oldest node, however often it was used."),
    "filo": (FILO, "Newest node, however often it was used."),
    "lfu": (LFU, "Used by the fewest requests; ties broken by LRU."),
    "lru": (LRU, "Least recently used."),
    "mru": (MRU, "Most recently used: for streams that cycle through more than fits."),
    "priority": (Priority, "Lowest request priority; ties broken by LRU."),
}


def _spec(order: type[KeyedOrder], summary: str) -> PolicySpec:
    return PolicySpec(lambda cost, pools, settings: order(), summary, sees=frozenset({"leaves"}))


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        **{name: _spec(order, summary) for name, (order, summary) in _WITHOUT_SETTINGS.items()},
        "slru": PolicySpec(
            lambda cost, pools, settings: SLRU(settings.protected_threshold),
            "Probationary nodes, then protected ones; LRU within each segment.",
            SLRUSettings,
            sees=frozenset({"leaves"}),
        ),
        "hits-per-token": PolicySpec(
            lambda cost, pools, settings: HitsPerToken(),
            "Fewest uses per token; ties broken by LRU.",
            sees=frozenset({"nodes"}),  # sizes
        ),
    }
