"""The hazard policies, seen by their classes."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Literal

from costcache.explained import Part, Verdict
from costcache.policies.survival import age_bin, edges
from costcache.policies.tables import tables_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.policies.hazard_order import Hazard
    from costcache.policies.hazard_states import HazardStates
    from costcache.records import NodeRecord

__all__ = ["HazardExplained", "StatesExplained"]

_OUTPUTS = ("under 50 output", "50+ output", "200+ output", "500+ output")
_CHILDREN = ("nothing behind it", "one branch behind it", "branches behind it")
_TURNS = ("", ", behind a state", ", behind 2+ states", ", behind 4+ states")
_USES = ("", "used 2 times", "used 3+ times", "used 5+ times")


class HazardExplained:
    """Classes of tokens of :class:`~costcache.policies.hazard_order.Hazard`."""

    unit: Literal["tokens", "states"] = "tokens"

    def __init__(self, order: Hazard) -> None:
        self._order = order
        self.ages: list[float] = edges()[1:].tolist()

    def parts(self, record: NodeRecord, start: int, stop: int) -> list[Part]:
        """What a node holds between two tokens of its prefix."""
        order, found = self._order, []
        order._catch_up()
        for piece in record.data.pieces:
            tokens = min(piece.end, stop) - max(piece.start, start)
            if tokens > 0:
                run = piece.run
                group = piece.group if run is None else run.whole().group // order._depths
                found.append(Part(group, tokens, max(0.0, order._now - piece.since)))
        return found

    def name(self, group: int) -> str:
        """A class in words."""
        return self._order._classes.label(group)

    def worth(self, group: int, age: float) -> float:
        """Expected uses of a token per unit of the clock, as of the last estimate."""
        table = self._order._worth.table()
        return float(table[group if group < len(table) else 0, age_bin(age)])

    def unused(self, group: int) -> list[float]:
        """Share that is not used again up to each age, as of the last estimate."""
        return _unused(self._order._shares, group)

    def against_lru(self) -> Verdict:
        """How the order stands against LRU."""
        gained, lost, _ = self._order.against_lru()
        return Verdict(gained, lost, self._order._shadow.behind)

    def tables(self) -> str:
        """What was learned, as the text of a file that the setting ``tables`` takes."""
        return tables_of(self._order).text()


class StatesExplained:
    """Classes of states of :class:`~costcache.policies.hazard_states.HazardStates`."""

    unit: Literal["tokens", "states"] = "states"

    def __init__(self, order: HazardStates) -> None:
        self._order = order
        self.ages: list[float] = edges()[1:].tolist()

    def parts(self, record: NodeRecord, start: int, stop: int) -> list[Part]:
        """The state at the end of a node, if that is in ``(start, stop]`` and has not gone."""
        order = self._order
        life = order._lives.get(record.serial)
        if life is None or life.gone or not start < record.end <= stop:
            return []
        return [Part(life.group, 1, max(0.0, order._now - life.since))]

    def name(self, group: int) -> str:
        """A class in words."""
        children, level, rest = list(self._order._classes)[group]
        if isinstance(rest, int):
            words = f"{_USES[level]}, every {2.0 ** (rest - 1):g} to {2.0**rest:g}"
        else:
            kind, turns = rest
            words = "used once, where prompts part"
            if kind is not None:
                output, reason = kind
                words = f"used once, {_OUTPUTS[output]}" + ("" if reason is None else f", {reason}")
            words += _TURNS[turns]
        return f"{words}, {_CHILDREN[children]}"

    def worth(self, group: int, age: float) -> float:
        """Expected uses of a state per unit of the clock, as of the last estimate."""
        return self._order._worth[group][age_bin(age)]

    def unused(self, group: int) -> list[float]:
        """Share that is not used again up to each age, as of the last estimate."""
        return _unused(self._order._shares, group)

    def against_lru(self) -> None:
        """It does not compare."""

    def tables(self) -> None:
        """It cannot start from any."""


def _unused(shares: NDArray[np.float64] | None, group: int) -> list[float]:
    if shares is None or group >= len(shares):
        return []
    return list(accumulate((1.0 - shares[group]).tolist(), mul))
