"""Learns how long state checkpoints of each class wait until a request resumes from them.

Classes are by the children of the node (none, one, more), by how often requests resumed from a state, and by
the mean gap between those times; before the first, by the answer of the request, how it ended, and the number
of states made before it on the path.

A state is *superseded* once a longer one of the same session follows it and no other prompt ever parted from
there. The session resumes from the longer one, so a superseded state serves only a prompt that branches off
before it. Superseded states have a life table of their own, since those that are newest say nothing about
them. It begins with next to no uses, which ranks them before all others; prompts that do branch off are what
raises them.
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

_SHARE = 0.02
"""Share of states that are resumed from in each bin of age, before anything is seen."""
_BRANCHED_OFF = 1e-9
"""The same of superseded ones: none, but those last used longest ago are evicted first."""
_SUPERSEDED = 3
"""Position of a superseded state; that of others is how many branches follow, at most 2."""
_LEVELS = 4

_OUTPUTS = ("under 50 output", "50+ output", "200+ output", "500+ output")
_POSITIONS = ("nothing after it", "one branch after it", "branches after it", "superseded")
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
        before: Class, bin of age and time of the use before that; None if there was none, or it is unknown.
        evicted: Whether it is no longer cached.
        answer: Length and finish reason of the answer of the request that made it; None until that is known.
        turns: States that were made before it on its path, cached or evicted.
        followed: Whether a longer state was made after it, with no branch in between.
        stands_for: The state after it, evicted, whose session resumes from this one now; None otherwise.
        branched: Whether prompts have parted at it.
    """

    __slots__ = (
        "answer",
        "before",
        "branched",
        "evicted",
        "first_use",
        "followed",
        "group",
        "last_use",
        "stands_for",
        "turns",
        "uses",
    )

    def __init__(self, turns: int, now: float) -> None:
        self.group = 0
        self.turns = turns
        self.uses = 1
        self.first_use = self.last_use = now
        self.before: tuple[int, int, float] | None = None
        self.stands_for: Life | None = None
        self.evicted = self.followed = self.branched = False
        self.answer: Answer | None = None

    @property
    def superseded(self) -> bool:
        """Whether only a prompt that branches off before the next state would resume from it."""
        return self.followed and not self.branched


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
        # Those of superseded states last. A class is a row of one of them.
        self._tables = (
            LifeTable((ALL,) * (_SUPERSEDED * _LEVELS), strength, _SHARE),
            LifeTable((ALL,) * _LEVELS, strength, _SHARE * _BRANCHED_OFF),
        )
        self._rows: list[tuple[LifeTable, int]] = []
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
        """Begin the life of a state that is made at the end of a node."""
        above = self.life_above(record)
        life = self.lives[record.serial] = Life(0 if above is None else above.turns + 1, self.now)
        return life

    def life_above(self, record: NodeRecord) -> Life | None:
        """Life of the nearest state before a node's, cached or evicted."""
        above, life = record.parent, None
        while above is not None and life is None:
            life = self.lives.get(above.serial)
            above = above.parent
        return life

    def use(self, record: NodeRecord, life: Life) -> None:
        """End a state's interval with a use, and begin the next one."""
        now, last_use = self.now, life.last_use
        at = age_bin(now - last_use)
        self._count_use(life.group, at, 1.0)
        life.before = life.group, at, last_use
        life.uses += 1
        life.last_use = now
        self.classify(record, life)

    def take_back(self, life: Life) -> None:
        """Take back a state's last use, by a request that would have resumed from a longer one."""
        if life.before is not None:
            life.group, at, life.last_use = life.before
            life.uses -= 1
            life.before = None
            self._count_use(life.group, at, -1.0)

    def _count_use(self, group: int, at: int, states: float) -> None:
        table, row = self._rows[group]
        table.used[row * BINS + at] += states

    def censor(self, life: Life) -> None:
        """Forget a state, whose interval is censored."""
        table, row = self._rows[life.group]
        table.censored[row * BINS + age_bin(self.now - life.last_use)] += 1.0

    def answered(self, record: NodeRecord, info: RequestInfo) -> None:
        """Class the state at the end of a request's path by its answer, if it was made by it."""
        life = self.lives.get(record.serial)
        if life is not None and life.uses == 1 and life.answer is None:
            out = info.output_tokens
            life.answer = (0 if out < 50 else 1 if out < 200 else 2 if out < 500 else 3, info.finish_reason)
            self.classify(record, life)

    def classify(self, record: NodeRecord, life: Life) -> None:
        """Give a state its class, which follows its node: children come and go without a use."""
        uses = life.uses
        gap = (life.last_use - life.first_use) / (uses - 1) if uses > 1 else 0.0
        position = _SUPERSEDED if life.superseded else min(record.live_children, 2)
        level = min((uses - 1).bit_length(), _LEVELS - 1)
        exponent = math.frexp(gap)[1] if gap > 0 else 0
        exponent = min(max(exponent, -1), 16)
        known: int | tuple[Answer | None, int]
        known = exponent if uses > 1 else (life.answer, min(life.turns.bit_length(), 3))
        key = (position, level, known)
        number = self._classes.get(key)
        if number is None:
            number = self._classes[key] = self._add_class(position, level, exponent if gap > 0 else None)
        life.group = number

    def _add_class(self, position: int, level: int, exponent: int | None) -> int:
        table = self._tables[position == _SUPERSEDED]
        # Until it is estimated: as the first of its kind.
        worth = next((w for w, (own, _) in zip(self.worth, self._rows, strict=True) if own is table), None)
        if worth is None:
            scale = _BRANCHED_OFF if position == _SUPERSEDED else 1.0
            worth = [scale / (age + 1) for age in range(BINS)]
        self.worth.append(worth)
        family = level if position == _SUPERSEDED else position * _LEVELS + level
        self._rows.append((table, table.add_class(family, 0.0 if exponent is None else math.ldexp(0.75, exponent))))
        return len(self._rows) - 1

    def worth_of(self, life: Life) -> float:
        """Expected uses of a state per unit of time, as of the last estimate."""
        return self.worth[life.group][age_bin(self.now - life.last_use)]

    def label(self, group: int) -> str:
        """A class in words."""
        position, level, rest = list(self._classes)[group]
        if isinstance(rest, int):
            words = f"{_USES[level]}, every {2.0 ** (rest - 1):g} to {2.0**rest:g}"
        else:
            answer, turns = rest
            words = "used once, where prompts part"
            if answer is not None:
                output, reason = answer
                words = f"used once, {_OUTPUTS[output]}" + ("" if reason is None else f", {reason}")
            words += _TURNS[turns]
        return f"{words}, {_POSITIONS[position]}"

    def estimate(self, ghosts: Iterable[Life]) -> None:
        """Estimate survival from the lives of states in the cache, and of evicted ones."""
        import numpy as np

        self._estimated = len(self._classes)
        living = np.array(self._living(ghosts))
        shares = np.empty_like(living)
        for table in self._tables:
            own = [number for number, (its, _) in enumerate(self._rows) if its is table]
            if own:
                shares[:, own] = table.shares(living[:, own], self.watched)
        self.shares = shares.T
        self.worth = gittins_index(shares, edges()).T.tolist()

    def _living(self, ghosts: Iterable[Life]) -> list[list[float]]:
        """States by bin of their age now and by class."""
        living = [[0.0] * len(self._rows) for _ in range(BINS)]
        for life in (*self.lives.values(), *ghosts):
            living[age_bin(self.now - life.last_use)][life.group] += 1.0
        return living

    def classes(self, ghosts: Iterable[Life]) -> tuple[ClassSnapshot, ...]:
        """Describe the classes, by number; ``ghosts`` as in :meth:`estimate`."""
        from costcache.policies.hazard.snapshot import ClassSnapshot

        living = self._living(ghosts)
        shares = [] if self.shares is None else self.shares.tolist()
        found = []
        for number, (table, row) in enumerate(self._rows):
            own = slice(row * BINS, (row + 1) * BINS)
            found.append(
                ClassSnapshot(
                    name=self.label(number),
                    kind=None,
                    used=tuple(table.used[own]),
                    censored=tuple(table.censored[own]),
                    at_risk=tuple(in_bin[number] for in_bin in living),
                    shares=tuple(shares[number]) if number < len(shares) else (),
                    worth=tuple(self.worth[number]),
                )
            )
        return tuple(found)
