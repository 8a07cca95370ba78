"""seglen: how much would be recomputed, mixed with how long ago it was used."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache import CostModel, NodeRecord, PolicySpec, PoolState, StateOrder, hookimpl

__all__ = ["Seglen", "SeglenSettings"]


class SeglenSettings(BaseModel):
    """Settings of ``seglen``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seglen_eff_weight: float = Field(
        0.3, ge=0.0, le=1.0, description="Weight of the replay length; recency has the rest."
    )
    refresh: int = Field(50, ge=1, description="Requests after which scores are taken anew.")


class Seglen(StateOrder):
    """The lowest ``w x replay + (1 - w) x recency`` goes first, both from 0 to 1 among all states.

    Replay is what a request would recompute if the state were not there: the tokens from the nearest live
    state in front of it. Recency is when a request last went on from the state; those in front of it on the
    path are not refreshed.

    Source: the pull request "seglen eviction for mamba radix cache" to SGLang, with w = 0.85. How it
    normalises the two could not be read; here the longest replay and the span from the oldest to the newest
    recency, among the states that are cached, count 1, and are taken anew every ``refresh`` requests.
    """

    def __init__(self, weight: float, refresh: int) -> None:
        self.period = refresh
        super().__init__()
        self._weight = weight
        self._longest = 1
        self._oldest, self._span = 0, 1

    def score(self, record: NodeRecord) -> float:
        """Replay and recency of a record's state, mixed."""
        state = record.state
        recency = 0 if state is None else state.recency
        return (
            self._weight * record.replay / self._longest
            + (1 - self._weight) * (recency - self._oldest) / self._span
        )

    def rescore(self, records: list[NodeRecord]) -> None:
        """Bring up to date what counts 1."""
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
            "Least to recompute and least recently gone on from first (hybrid models).",
            SeglenSettings,
            sees=frozenset({"states"}),
        )
    }
