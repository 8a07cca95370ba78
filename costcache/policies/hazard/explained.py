"""The hazard policies, seen by their classes: what ``costcache explain`` reads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Literal

from costcache.explained import Part, Verdict
from costcache.policies.hazard.bins import age_bin, edges
from costcache.policies.hazard.describe import snapshot_of
from costcache.policies.hazard.tables import tables_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.policies.hazard.intake import Intake
    from costcache.policies.hazard.learner import Learner
    from costcache.policies.hazard.ranker import Ranker
    from costcache.policies.hazard.state_learner import StateLearner
    from costcache.records import NodeRecord

__all__ = ["HazardExplained", "StatesExplained"]


class HazardExplained:
    """Classes of tokens of :class:`~costcache.policies.hazard.order.Hazard`.

    Attributes:
        against_lru: Gives the comparison of the order with LRU.
    """

    unit: Literal["tokens", "states"] = "tokens"

    def __init__(
        self, intake: Intake, learner: Learner, ranker: Ranker, against_lru: Callable[[], Verdict]
    ) -> None:
        self.against_lru = against_lru
        self._intake, self._learner, self._ranker = intake, learner, ranker
        self.ages: list[float] = edges()[1:].tolist()

    def parts(self, record: NodeRecord, start: int, stop: int) -> list[Part]:
        """Parts of a node between two tokens of its prefix."""
        intake, learner, found = self._intake, self._learner, []
        intake.catch_up()
        for piece in record.data.pieces:
            tokens = min(piece.end, stop) - max(piece.start, start)
            if tokens > 0:
                found.append(Part(learner.group_of(piece), tokens, max(0.0, intake.now - piece.last_use)))
        return found

    def name(self, group: int) -> str:
        """A class in words."""
        return self._learner.classes.label(group)

    def worth(self, group: int, age: float) -> float:
        """Expected uses of a token per unit of the clock, as of the last estimate."""
        table = self._ranker.worth.table()
        return float(table[group if group < len(table) else 0, age_bin(age)])

    def unused(self, group: int) -> list[float]:
        """Share that is not used again up to each age, as of the last estimate."""
        estimated = self._learner.estimated
        return [] if estimated is None else _unused(estimated.shares().T, group)

    def tables(self) -> str:
        """Text of a file of what was learned, which the setting ``tables`` takes."""
        return tables_of(snapshot_of(self._intake, self._learner, self._ranker)).text()


class StatesExplained:
    """Classes of states of :class:`~costcache.policies.hazard.states.HazardStates`."""

    unit: Literal["tokens", "states"] = "states"

    def __init__(self, learner: StateLearner) -> None:
        self._learner = learner
        self.ages: list[float] = edges()[1:].tolist()

    def parts(self, record: NodeRecord, start: int, stop: int) -> list[Part]:
        """The state at the end of a node, if that is in ``(start, stop]`` and the state is cached."""
        learner = self._learner
        life = learner.lives.get(record.serial)
        if life is None or life.evicted or not start < record.end <= stop:
            return []
        return [Part(life.group, 1, max(0.0, learner.now - life.last_use))]

    def name(self, group: int) -> str:
        """A class in words."""
        return self._learner.label(group)

    def worth(self, group: int, age: float) -> float:
        """Expected uses of a state per unit of the clock, as of the last estimate."""
        return self._learner.worth_at(group, age)

    def unused(self, group: int) -> list[float]:
        """Share that is not used again up to each age, as of the last estimate."""
        shares = self._learner.shares
        return [] if shares is None else _unused(shares, group)

    def against_lru(self) -> None:
        """None: the order does not compare itself with LRU."""

    def tables(self) -> None:
        """None: the order cannot start from tables."""


def _unused(shares: NDArray[np.float64], group: int) -> list[float]:
    if group >= len(shares):
        return []
    return list(accumulate((1.0 - shares[group]).tolist(), mul))
