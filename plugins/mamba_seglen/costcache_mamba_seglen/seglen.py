"""seglen: the tokens recomputed without a state, mixed with its recency."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache import CostModel, NodeRecord, PolicySpec, PoolState, StateOrder, hookimpl

__all__ = ["Seglen", "SeglenSettings"]


class SeglenSettings(BaseModel):
    """Settings of ``seglen``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seglen_eff_weight: float = Field(
        0.3, ge=0.0, le=1.0, description="Weight of the replay length, from 0 to 1; recency has the rest."
    )
    refresh: int = Field(50, ge=1, description="Requests between recomputations of all scores.")


class Seglen(StateOrder):
    """Evicts the state with the lowest ``w x replay + (1 - w) x recency``, each scaled to 0..1.

    Replay is the tokens that a request would recompute without the state: those since the nearest live
    state before it. Recency is when a request last resumed from the state; earlier states on its path are
    not refreshed.

    Source: the pull request "seglen eviction for mamba radix cache" to SGLang, with w = 0.85. Its
    normalisation could not be read; here the longest replay and the span from the oldest to the newest
    recency, among the cached states, count 1, and are updated every ``refresh`` requests.
    """

    def __init__(self, weight: float, refresh: int) -> None:
        self.period = refresh
        super().__init__()
        self._weight = weight
        self._longest = 1
        self._oldest, self._span = 0, 1

    def score(self, record: NodeRecord) -> float:
        """Mix replay and recency of a record's state."""
        state = record.state
        recency = 0 if state is None else state.recency
        return (
            self._weight * record.replay / self._longest
            + (1 - self._weight) * (recency - self._oldest) / self._span
        )

    def rescore(self, records: list[NodeRecord]) -> None:
        """Update the longest replay and the span of recency."""
        if records:
            times = [record.state.recency for record in records if record.state is not None]
            self._longest = max(1, *(record.replay for record in records))
            self._oldest, self._span = min(times), max(1, max(times) - min(times))


def _make(
    cost: CostModel,  # noqa: ARG001  # the signature of make_order
    pools: tuple[PoolState, ...],  # noqa: ARG001  # as above
    settings: SeglenSettings,
) -> Seglen:
    return Seglen(settings.seglen_eff_weight, settings.refresh)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "seglen": PolicySpec(
            _make,
            "State with the lowest mix of recompute length and recency (models with states).",
            SeglenSettings,
            sees=frozenset({"states"}),
        )
    }
