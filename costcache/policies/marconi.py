"""Marconi: recency mixed with FLOPs saved per byte, for models with states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.spec import PolicySpec
from costcache.policies.states import StateOrder
from costcache.records import NodeRecord, PoolState, RequestInfo, RequestRecord, Victim

if TYPE_CHECKING:
    from costcache.cost import CostModel

__all__ = ["ALPHAS", "Checkpoint", "Marconi", "MarconiSettings", "ShadowStates", "best_alpha"]

ALPHAS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Weights that the tuning tries."""
_AT_ONCE = 0.02
"""Share of the memory that a shadow cache frees at a time, so that it seldom sorts its scores."""


class MarconiSettings(BaseModel):
    """Settings of ``marconi``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alpha: float | None = Field(
        None,
        ge=0.0,
        description="Weight of FLOPs saved per byte, where recency has 1; without it, the weight under "
        "which recent requests would have hit the most tokens.",
    )
    window: int = Field(1000, ge=1, description="Requests per tuning of the weight.")
    refresh: int = Field(50, ge=1, description="Requests between recomputations of all scores.")


class Marconi(StateOrder):
    """Evicts the state with the lowest ``recency + alpha x FLOPs saved per byte``, each scaled to 0..1.

    FLOPs saved are those of the tokens from the nearest live state before the node to the node's end; bytes
    are those that an eviction frees: the state, and on a leaf its KV too. Nodes with several children are
    evicted only if there are no others.

    Source: R. Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025. Its admission
    rule (states at the ends of requests and at branches seen before) is the cache's own.

    Weight: as in the paper, 0 at first. From the first eviction on, requests are recorded; once there are
    ``window`` of them they are replayed under several weights, and the one that hits the most tokens is
    taken. Then the next window begins; see :func:`best_alpha`.

    Departures: scores are normalised from least to most every ``refresh`` requests, not at every
    eviction; the tuning replays states alone, without a tree, and again after each window, where the paper
    tunes once, on 5 to 15 times the requests before the first eviction.
    """

    def __init__(
        self,
        cost: CostModel,
        capacity: int,
        alpha: float | None = None,
        refresh: int = 50,
        window: int = 1000,
    ) -> None:
        """Make an order for one cache.

        Args:
            cost: Bytes of tokens and states, and FLOPs to recompute them.
            capacity: Bytes for states and KV.
            alpha: The weight; None to tune it.
            refresh: Requests between recomputations of all scores.
            window: Requests per tuning of the weight.
        """
        self.period = refresh
        super().__init__()
        self._capacity, self._window = capacity, window
        self._recent: list[list[Checkpoint]] | None = None
        self._tunes = alpha is None
        self._flops = cost.recompute_flops
        self._token_bytes = cost.token.kv_bytes
        self._state_bytes = cost.token.state_bytes
        self._page_size = cost.deployment.page_size
        self.alpha = alpha or 0.0
        self._oldest, self._span = 0.0, 1.0
        self._least, self._width = 0.0, 1.0

    def next_victim(self, pool: str) -> Victim | None:
        if self._tunes and self._recent is None:
            self._recent = []
        return super().next_victim(pool)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        super().finish(request, info)
        recent = self._recent
        if recent is None:
            return
        path = []
        record = request.end
        while record is not None and record.parent is not None:
            name = record.prefix_hash(record.tokens - self._page_size)
            if name is None:
                return  # without prefix hashes nothing can be replayed
            path.append(Checkpoint(name, record.end))
            record = record.parent
        if path:
            path.reverse()
            recent.append(path)
        if len(recent) >= self._window:
            self.alpha = best_alpha(recent, self._capacity, self._token_bytes, self._state_bytes, self._flops)
            recent.clear()

    def score(self, record: NodeRecord) -> float:
        if record.live_children > 1:
            return math.inf
        recency = (record.recency - self._oldest) / self._span
        return recency + self.alpha * (self._efficiency(record) - self._least) / self._width

    def rescore(self, records: list[NodeRecord]) -> None:
        if records:
            times = [record.recency for record in records]
            self._oldest, self._span = min(times), max(1, max(times) - min(times))
            gains = [self._efficiency(record) for record in records]
            self._least, self._width = min(gains), max(gains) - min(gains) or 1.0

    def _efficiency(self, record: NodeRecord) -> float:
        end = record.end
        freed = self._state_bytes + (0 if record.live_children else record.tokens * self._token_bytes)
        return float(self._flops(end - record.replay, end)) / freed


# -- tuning the weight -------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """A position on a request's path that can hold a state: the end of a node.

    Attributes:
        name: Hash of the whole prefix up to there.
        end: Tokens of that prefix.
    """

    name: int
    end: int


class ShadowStates:
    """Hit tokens of a cache of a given size and weight, counted on states alone.

    A state weighs its own bytes plus those of the KV back to the previous state. A request hits the deepest
    state on its path, and adds one at its end and one where it diverges from an earlier request.

    Attributes:
        found: Tokens hit so far.
    """

    def __init__(
        self,
        capacity: int,
        kv_bytes: int,
        state_bytes: int,
        flops: Callable[[int, int], float],
        alpha: float,
    ) -> None:
        """Make an empty shadow cache.

        Args:
            capacity: Bytes for states and KV.
            kv_bytes: Bytes of a token.
            state_bytes: Bytes of a state.
            flops: FLOPs to compute tokens [start, stop).
            alpha: Weight of FLOPs saved per byte, where recency has 1.
        """
        self.found = 0
        self._capacity, self._kv, self._state = capacity, kv_bytes, state_bytes
        self._flops, self._alpha = flops, alpha
        self._live: dict[int, tuple[int, float, int]] = {}  # name: last use, FLOPs per byte, bytes
        self._seen: set[int] = set()
        self._used = 0
        self._now = 0

    def serve(self, path: Sequence[Checkpoint]) -> None:
        """Serve one request, given its path from the root to its end."""
        self._now += 1
        live, seen = self._live, self._seen
        hit = 0
        shared: Checkpoint | None = None
        for place in reversed(path):
            if place.name in live:
                hit = place.end
                _, gain, size = live[place.name]
                live[place.name] = (self._now, gain, size)
                break
            if shared is None and place.name in seen:
                shared = place
        self.found += hit
        front = hit
        for made in (shared, path[-1]):
            if made is not None and made.name not in live:
                size = self._state + (made.end - front) * self._kv
                live[made.name] = (self._now, self._flops(front, made.end) / size, size)
                self._used += size
                front = made.end
        seen.update(place.name for place in path)
        if self._used > self._capacity:
            self._evict()

    def _evict(self) -> None:
        live = self._live
        gains = [gain for _, gain, _ in live.values()]
        least, width = min(gains), max(gains) - min(gains) or 1.0
        oldest = min(used for used, _, _ in live.values())
        span = max(1, self._now - oldest)
        alpha = self._alpha
        order = sorted(
            live,
            key=lambda name: (live[name][0] - oldest) / span + alpha * (live[name][1] - least) / width,
        )
        goal = self._capacity * (1 - _AT_ONCE)
        for name in order:
            if self._used <= goal:
                break
            self._used -= live.pop(name)[2]


def best_alpha(
    requests: Sequence[Sequence[Checkpoint]],
    capacity: int,
    kv_bytes: int,
    state_bytes: int,
    flops: Callable[[int, int], float],
    alphas: Sequence[float] = ALPHAS,
) -> float:
    """Return the weight under which the shadow hits the most tokens; of equals, the smallest.

    Args:
        requests: Paths of the requests to replay.
        capacity: Bytes for states and KV.
        kv_bytes: Bytes of a token.
        state_bytes: Bytes of a state.
        flops: FLOPs to compute tokens [start, stop).
        alphas: Weights to try.
    """
    found = {}
    for alpha in alphas:
        shadow = ShadowStates(capacity, kv_bytes, state_bytes, flops, alpha)
        for path in requests:
            shadow.serve(path)
        found[alpha] = shadow.found
    return max(sorted(found), key=lambda alpha: found[alpha])


def _make(cost: CostModel, pools: tuple[PoolState, ...], settings: MarconiSettings) -> Marconi:
    size = {"bytes": 1, "tokens": cost.token.kv_bytes, "states": cost.token.state_bytes}
    capacity = sum(pool.capacity * size[pool.unit] for pool in pools)
    return Marconi(cost, capacity, settings.alpha, settings.refresh, settings.window)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "marconi": PolicySpec(
            _make,
            "State with the lowest mix of recency and FLOPs saved per byte (models with states).",
            MarconiSettings,
            sees=frozenset({"states"}),
        )
    }
