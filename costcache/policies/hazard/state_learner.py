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
from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

from costcache.policies.hazard.bins import BINS, ENDS, age_bin, at_age, edges
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
_FEW = 8
"""Uses before which states are ranked by age alone."""
_BRANCHED_OFF = 1e-9
"""Factor of that for superseded states: all but none, yet those last used longest ago are evicted first."""
_SUPERSEDED = 3
"""Position of a superseded state; that of others is how many branches follow, at most 2."""
_LEVELS = 4
"""Steps of the number of uses."""

_OUTPUT_STEPS = (50, 200, 500)
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
        undo: Class and bin of age in which its last use was counted, and the time of the one before; None if
            there was none, or it has been taken back.
        evicted: Whether it is no longer cached.
        answer: Length and finish reason of the answer of the request that made it; None until that is known.
        turns: States that were made before it on its path, cached or evicted.
        followed: Whether a longer state was made after it, with no branch in between.
        stands_for: The state after it, evicted, whose session resumes from this one now; None otherwise.
        branched: Whether prompts have parted at it.
        position: How many branches followed it when it was classed, at most 2, or that it is superseded.
    """

    __slots__ = (
        "answer",
        "branched",
        "evicted",
        "first_use",
        "followed",
        "group",
        "last_use",
        "position",
        "stands_for",
        "turns",
        "undo",
        "uses",
    )

    def __init__(self, turns: int, now: float) -> None:
        self.group = self.position = 0
        self.turns = turns
        self.uses = 1
        self.first_use = self.last_use = now
        self.undo: tuple[int, int, float] | None = None
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
        worth: Expected uses per unit of time, by class: at the start of each bin of age, and where
            the last one ends.
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
        # Of all others, and of superseded states. A class is a row of one of them.
        self._tables = (
            LifeTable((ALL,) * (_SUPERSEDED * _LEVELS), strength, _SHARE),
            LifeTable((ALL,) * _LEVELS, strength, _SHARE * _BRANCHED_OFF),
        )
        self._rows: list[tuple[LifeTable, int]] = []
        self._numbers: tuple[list[int], list[int]] = [], []  # of the classes of each table
        self._classes: dict[tuple[int, int, int | tuple[Answer | None, int]], int] = {}
        self._estimated = 0  # classes
        self._uses = 0.0  # counted so far

    @property
    def watched(self) -> float:
        """Time since the first insert."""
        return self.now - (self.began or 0.0)

    @property
    def has_new_classes(self) -> bool:
        """Whether there are classes without an estimate of their own."""
        return len(self._classes) > self._estimated

    def make(self, record: NodeRecord) -> Life:
        """Begin the life of a state that is made at the end of a node."""
        before = self._before(record)
        turns = 0 if before is None else self.lives[before.serial].turns + 1
        life = self.lives[record.serial] = Life(turns, self.now)
        return life

    def _before(self, record: NodeRecord) -> NodeRecord | None:
        """The nearest node before one that has a state, or had."""
        above = record.parent
        while above is not None and above.serial not in self.lives:
            above = above.parent
        return above

    def use(self, record: NodeRecord, life: Life) -> None:
        """End a state's interval with a use, and begin the next one."""
        at = age_bin(self.now - life.last_use)
        self._count_use(life.group, at, 1.0)
        life.undo = life.group, at, life.last_use
        life.uses += 1
        life.last_use = self.now
        self.classify(record, life)

    def take_back(self, record: NodeRecord) -> None:
        """Take back the last use of the state before a node, if it was counted for superseded ones.

        The request resumed from it because a newer state had been evicted. That says nothing of how often
        prompts branch off before the newer one, which is what superseded states wait for.
        """
        above = self._before(record)
        life = None if above is None else self.lives[above.serial]
        if above is None or life is None or life.undo is None:
            return
        group, at, last_use = life.undo
        if self._rows[group][0] is self._tables[True]:
            self._count_use(group, at, -1.0)
            life.uses -= 1
            life.last_use, life.undo = last_use, None
            self.classify(above, life)

    def _count_use(self, group: int, at: int, states: float) -> None:
        self._uses += states
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
            life.answer = bisect_right(_OUTPUT_STEPS, info.output_tokens), info.finish_reason
            self.classify(record, life)

    def classify(self, record: NodeRecord, life: Life) -> None:
        """Give a state its class, which follows its node: children come and go without a use."""
        uses, position = life.uses, record.live_children
        if life.followed and not life.branched:
            position = _SUPERSEDED
        elif position > 2:
            position = 2
        life.position = position
        level, gap = 0, 0.0
        known: int | tuple[Answer | None, int]
        if uses == 1:
            known = life.answer, min(life.turns.bit_length(), 3)
        else:
            level = min((uses - 1).bit_length(), _LEVELS - 1)
            gap = (life.last_use - life.first_use) / (uses - 1)
            known = min(max(math.frexp(gap)[1], -1), 16)
        key = (position, level, known)
        number = self._classes.get(key)
        if number is None:
            scale = math.ldexp(0.75, known) if isinstance(known, int) and gap > 0 else 0.0
            number = self._classes[key] = self._add_class(position, level, scale)
        life.group = number

    def reclassify(self, records: Iterable[NodeRecord]) -> None:
        """Give states the classes that follow from the children that their nodes have now."""
        lives = self.lives
        for record in records:
            life = lives[record.serial]
            position, children = life.position, record.live_children
            if position not in (children, _SUPERSEDED) and (position < 2 or children < 2):
                self.classify(record, life)

    def _add_class(self, position: int, level: int, scale: float) -> int:
        """Add a class, which is worth as much as the first of its table until it is estimated."""
        superseded = position == _SUPERSEDED
        family = level if superseded else position * _LEVELS + level
        numbers = self._numbers[superseded]
        if numbers:
            self.worth.append(self.worth[numbers[0]])
        else:
            self.worth.append([(_BRANCHED_OFF if superseded else 1.0) / (age + 1) for age in range(BINS + 1)])
        number = len(self._rows)
        numbers.append(number)
        table = self._tables[superseded]
        self._rows.append((table, table.add_class(family, scale)))
        return number

    def worth_of(self, life: Life) -> float:
        """Expected uses of a state per unit of time, as of the last estimate."""
        return self.worth_at(life.group, self.now - life.last_use)

    def worth_at(self, group: int, age: float) -> float:
        """The same of a class at an age.

        Until something is learned only the age counts, without the steps of bins: they would make states
        equal of which one is nearly half as old again as the other, and leave the choice to their sizes.
        """
        worth = self.worth[group]
        return at_age(worth, age) if self.shares is None else worth[age_bin(age)]

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
        """Estimate survival from the lives of states in the cache, and of evicted ones.

        Not before there are a few uses: all that is known until then is that young states have not been used
        yet, which would rank them below those of which nothing is known, the oldest.
        """
        if self._uses < _FEW:
            return
        import numpy as np

        self._estimated = len(self._classes)
        living = self._living(ghosts)
        shares = np.empty_like(living)
        for table, own in zip(self._tables, self._numbers, strict=True):
            if own:
                shares[:, own] = table.shares(living[:, own], self.watched)
        self.shares = shares.T
        self.worth = gittins_index(shares, edges()).T.tolist()

    def _living(self, ghosts: Iterable[Life]) -> NDArray[np.float64]:
        """States by their age now and by class, float64 of shape [BINS, classes]."""
        import numpy as np

        now, count = self.now, len(self._rows)
        lives = (*self.lives.values(), *ghosts)
        cells = [bisect_right(ENDS, now - life.last_use) * count + life.group for life in lives]
        return np.bincount(cells, minlength=BINS * count).reshape(BINS, count).astype(float)

    def classes(self, ghosts: Iterable[Life]) -> tuple[ClassSnapshot, ...]:
        """Describe the classes, by number; ``ghosts`` as in :meth:`estimate`."""
        from costcache.policies.hazard.snapshot import ClassSnapshot

        living = self._living(ghosts).T.tolist()
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
                    at_risk=tuple(living[number]),
                    shares=tuple(shares[number]) if number < len(shares) else (),
                    worth=tuple(self.worth[number]),
                )
            )
        return tuple(found)
