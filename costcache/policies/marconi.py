"""Marconi: recency and FLOPs saved per byte, for models with states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.spec import PolicySpec
from costcache.policies.states import StateOrder, needs_states
from costcache.records import NodeRecord

if TYPE_CHECKING:
    from costcache.cost import CostModel

__all__ = ["Marconi", "MarconiSettings"]


class MarconiSettings(BaseModel):
    """Settings of ``marconi``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alpha: float = Field(
        1.0, ge=0.0, description="Weight of FLOPs saved per byte beside recency, which has 1."
    )
    refresh: int = Field(50, ge=1, description="Requests after which scores are taken anew.")


class Marconi(StateOrder):
    """The lowest ``recency + alpha x FLOPs saved per byte`` goes first, both from 0 to 1 among all entries.

    FLOPs saved are those of the tokens from the nearest live state in front to the node's end; bytes are
    what goes: the state, and on a leaf its KV too. Nodes with several children stay while there are others.

    Source: R. Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025. Its admission
    rule (states at the ends of requests and at branches seen before) is the cache's own.

    Departures: entries are normalised from least to most every ``refresh`` requests, not at every
    eviction; and ``alpha`` is a setting: the paper tunes it by replaying a window of recent requests
    under several values, which is left out.
    """

    def __init__(self, cost: CostModel, alpha: float, refresh: int) -> None:
        self.period = refresh
        super().__init__()
        self._flops = cost.recompute_flops
        self._token_bytes = cost.token.kv_bytes
        self._state_bytes = cost.token.state_bytes
        self._alpha = alpha
        self._oldest, self._span = 0.0, 1.0
        self._least, self._width = 0.0, 1.0

    def score(self, record: NodeRecord) -> float:
        if record.live_children > 1:
            return math.inf
        recency = (record.recency - self._oldest) / self._span
        return recency + self._alpha * (self._efficiency(record) - self._least) / self._width

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


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "marconi": PolicySpec(
            lambda cost, pools, settings: Marconi(cost, settings.alpha, settings.refresh),
            "Least recency and FLOPs saved per byte first (hybrid models).",
            MarconiSettings,
            supports=needs_states,
        )
    }
