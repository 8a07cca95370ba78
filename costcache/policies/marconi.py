"""Marconi: recency and FLOPs saved per byte, for models with states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.marconi_tuning import Place, best_alpha
from costcache.policies.spec import PolicySpec
from costcache.policies.states import StateOrder, needs_states
from costcache.records import NodeRecord, PoolState, RequestInfo, RequestRecord, Victim

if TYPE_CHECKING:
    from costcache.cost import CostModel

__all__ = ["Marconi", "MarconiSettings"]


class MarconiSettings(BaseModel):
    """Settings of ``marconi``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alpha: float | None = Field(
        None,
        ge=0.0,
        description="Weight of FLOPs saved per byte beside recency, which has 1; without it, the weight "
        "under which recent requests would have found most.",
    )
    window: int = Field(
        1000, ge=1, description="Requests that the weight is tuned on, each time so many have come."
    )
    refresh: int = Field(50, ge=1, description="Requests after which scores are taken anew.")


class Marconi(StateOrder):
    """The lowest ``recency + alpha x FLOPs saved per byte`` goes first, both from 0 to 1 among all entries.

    FLOPs saved are those of the tokens from the nearest live state in front to the node's end; bytes are
    what goes: the state, and on a leaf its KV too. Nodes with several children stay while there are others.

    Source: R. Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025. Its admission
    rule (states at the ends of requests and at branches seen before) is the cache's own.

    Weight: as in the paper, 0 at first. From the first eviction on requests are recorded, and when there are
    ``window`` of them they are replayed under several weights; the one that finds most tokens is taken. So it
    goes on, window after window; see :mod:`costcache.policies.marconi_tuning`.

    Departures: entries are normalised from least to most every ``refresh`` requests, not at every
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
        """An order for one cache.

        Args:
            cost: What tokens and states hold, and what they cost to recompute.
            capacity: Bytes for states and KV.
            alpha: The weight; None to tune it.
            refresh: Requests after which scores are taken anew.
            window: Requests that the weight is tuned on.
        """
        self.period = refresh
        super().__init__()
        self._capacity, self._window = capacity, window
        self._recent: list[list[Place]] | None = None
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
                return  # a cache that cannot tell prefixes by name: nothing can be replayed
            path.append(Place(name, record.end))
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
        held = self._state_bytes + (0 if record.live_children else record.tokens * self._token_bytes)
        return float(self._flops(end - record.replay, end)) / held


def _make(cost: CostModel, pools: tuple[PoolState, ...], settings: MarconiSettings) -> Marconi:
    size = {"bytes": 1, "tokens": cost.token.kv_bytes, "states": cost.token.state_bytes}
    capacity = sum(pool.capacity * size[pool.unit] for pool in pools)
    return Marconi(cost, capacity, settings.alpha, settings.refresh, settings.window)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "marconi": PolicySpec(
            _make,
            "Least recency and FLOPs saved per byte first (hybrid models).",
            MarconiSettings,
            supports=needs_states,
        )
    }
