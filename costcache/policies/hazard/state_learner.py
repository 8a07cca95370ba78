"""Learns how long state checkpoints of each class wait until a request resumes from them.

Classes are by the children of the node (none, one, more), by how often requests resumed from a state, and by
the mean gap between those times; before the first, by the answer of the request, how it ended, and the number
of states made before it on the path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from costcache.policies.hazard.bins import BINS, age_bin, edges
from costcache.policies.hazard.life_table import ALL, LifeTable
from costcache.policies.hazard.survival import gittins_index
from costcache.records import NodeRecord, RequestInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.policies.hazard.snapshot import ClassSnapshot

__all__ = ["Life", "StateLearner"]

FAMILIES = (ALL,) * 12

_OUTPUTS = ("under 50 output", "50+ output", "200+ output", "500+ output")
_CHILDREN = ("nothing after it", "one branch after it", "branches after it")
_TURNS = ("", ", after a state", ", after 2+ states", ", after 4+ states")
_USES = ("", "used 2 times", "used 3+ times", "used 5+ times")

Answer = tuple[int, str | None]
"""Step of an answer's length, and its finish reason."""


class Life:
    """History of a state, cached or evicted.

    Attributes:
        group: Number of its class.
        uses: Requests that resumed from it, and the one that made it.
        first_use: When it was made.
        last_use: When it was last used.
        evicted: Whether it is no longer cached.
        answer: Length and finish reason of the answer of the request that made it; None until that is known.
        turns: States that were made before it on its path, cached or evicted.
    """

    __slots__ = ("answer", "evicted", "first_use", "group", "last_use", "turns", "uses")

    def __init__(self, turns: int, now: float) -> None:
        self.group = 0
        self.turns = turns
        self.uses = 1
        self.first_use = self.last_use = now
        self.evicted = False
        self.answer: Answer | None = None


class StateLearner:
    """Lives of states, and their reuse intervals by class.

    Attributes:
        lives: Lives of states by serial number of their nodes, which are in the cache.
        now: The latest time of a use.
        began: Time of the first insert; None before it.
        worth: Expected uses per unit of time, by class and bin of age.
        shares: Share used in each bin of what survived unused up to it, float64 of shape [classes, BINS];
            None before the first estimate.
    """

    def __init__(self, strength: float) -> None:
        """Start as LRU.

        Args:
            strength: States that a prior weighs.
        """
        self.lives: dict[int, Life] = {}
        self.now = 0.0
        self.began: float | None = None
        self.worth: list[list[float]] = []
        self.shares: NDArray[np.float64] | None = None
        self._table = LifeTable(FAMILIES, strength, 0.02)
        self._classes: dict[tuple[int, int, int | tuple[Answer | None, int]], int] = {}
        self._estimated = 0  # classes

    @property
    def watched(self) -> float:
        """Time since the first insert."""
        return self.now - (self.began or 0.0)

    @property
    def has_new_classes(self) -> bool:
        """Whether there are classes without an estimate of their own."""
        return len(self._classes) > self._estimated

    def tick(self, now: float) -> None:
        """Move the clock on."""
        self.now = max(self.now, now)

    def make(self, record: NodeRecord) -> Life:
        """Begin the life of a state that was just made at the end of a node."""
        turns, above = 0, record.parent
        while above is not None:
            before = self.lives.get(above.serial)
            if before is not None:
                turns = before.turns + 1
                break
            above = above.parent
        life = self.lives[record.serial] = Life(turns, self.now)
        life.group = self.class_of(record, life)
        self._table.interval(1)
        return life

    def use(self, record: NodeRecord, life: Life) -> None:
        """End a state's interval with a use, and begin the next one."""
        now = self.now
        self._table.used[life.group * BINS + age_bin(now - life.last_use)] += 1.0
        life.uses += 1
        life.last_use = now
        self._table.interval(1)
        life.group = self.class_of(record, life)

    def censor(self, life: Life) -> None:
        """Forget a state, whose interval is censored."""
        self._table.censored[life.group * BINS + age_bin(self.now - life.last_use)] += 1.0

    def answered(self, record: NodeRecord, info: RequestInfo) -> None:
        """Class the state at the end of a request's path by its answer, if it was made by it."""
        life = self.lives.get(record.serial)
        if life is not None and life.uses == 1 and life.answer is None:
            out = info.output_tokens
            life.answer = (0 if out < 50 else 1 if out < 200 else 2 if out < 500 else 3, info.finish_reason)
            life.group = self.class_of(record, life)

    def class_of(self, record: NodeRecord, life: Life) -> int:
        """Number of a state's class; classes follow the node, whose children come and go without a use."""
        uses = life.uses
        gap = (life.last_use - life.first_use) / (uses - 1) if uses > 1 else 0.0
        children = min(record.live_children, 2)
        level = min((uses - 1).bit_length(), 3)
        exponent = math.frexp(gap)[1] if uses > 1 and gap > 0 else 0
        exponent = min(max(exponent, -1), 16)
        known: int | tuple[Answer | None, int]
        known = exponent if uses > 1 else (life.answer, min(life.turns.bit_length(), 3))
        key = (children, level, known)
        number = self._classes.get(key)
        if number is None:
            scale = math.ldexp(0.75, exponent) if uses > 1 and gap > 0 else 0.0
            number = self._classes[key] = self._table.add_class(children * 4 + level, scale)
            self.worth.append(self.worth[0] if self.worth else [1.0 / (age + 1) for age in range(BINS)])
        return number

    def label(self, group: int) -> str:
        """A class in words."""
        children, level, rest = list(self._classes)[group]
        if isinstance(rest, int):
            words = f"{_USES[level]}, every {2.0 ** (rest - 1):g} to {2.0**rest:g}"
        else:
            answer, turns = rest
            words = "used once, where prompts part"
            if answer is not None:
                output, reason = answer
                words = f"used once, {_OUTPUTS[output]}" + ("" if reason is None else f", {reason}")
            words += _TURNS[turns]
        return f"{words}, {_CHILDREN[children]}"

    def estimate(self, ghosts: Iterable[Life]) -> None:
        """Estimate survival from the lives of states in the cache, and of evicted ones."""
        import numpy as np

        self._estimated = len(self._classes)
        shares = self._table.shares(np.array(self._living(ghosts)), self.watched)
        self.shares = shares.T
        self.worth = gittins_index(shares, edges()).T.tolist()

    def _living(self, ghosts: Iterable[Life]) -> list[list[float]]:
        """States by bin of their age now and by class."""
        living = [[0.0] * len(self._table) for _ in range(BINS)]
        for life in (*self.lives.values(), *ghosts):
            living[age_bin(self.now - life.last_use)][life.group] += 1.0
        return living

    def classes(self, ghosts: Iterable[Life]) -> tuple[ClassSnapshot, ...]:
        """Describe the classes, by number; ``ghosts`` as in :meth:`estimate`."""
        from costcache.policies.hazard.snapshot import ClassSnapshot

        living, table = self._living(ghosts), self._table
        shares = [] if self.shares is None else self.shares.tolist()
        found = []
        for number in self._classes.values():
            row = slice(number * BINS, (number + 1) * BINS)
            found.append(
                ClassSnapshot(
                    name=self.label(number),
                    kind=None,
                    used=tuple(table.used[row]),
                    censored=tuple(table.censored[row]),
                    at_risk=tuple(in_bin[number] for in_bin in living),
                    shares=tuple(shares[number]) if number < len(shares) else (),
                    worth=tuple(self.worth[number]),
                )
            )
        return tuple(found)
