"""How long until something is used again: survival curves by class, and what a curve says of an age."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ALL", "BINS", "ENDS", "Estimate", "LifeTable", "added", "age_bin", "edges", "index", "survival"]

BINS = 64
"""Bins of age: the first from 0, each further one √2 times as wide as the one before it."""
FIRST = 6
"""The first bin ends at ``2 ** -6`` units of the clock; the last begins at ``2 ** 25``."""
ENDS = [math.ldexp(math.sqrt(0.5) if at % 2 else 0.5, at // 2 + 1 - FIRST) for at in range(BINS - 1)]
"""Where each bin of age ends, but for the last."""
ALL = -1
"""In place of a family: all classes."""
_SMOOTHINGS = 2
_ONE_STRETCH = 20.0
"""How much more a prior weighs at an age as long as the time watched."""
# Waits that are tried, in bins: all short ones, and some long ones.
_AHEAD = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 63)


def age_bin(age: float) -> int:
    """Bin of an age in units of the clock, seconds or requests."""
    return bisect_right(ENDS, age)


@cache
def edges() -> NDArray[np.float64]:
    """Where each bin begins, and where the last ends; float64 of shape [BINS + 1], not to be written to."""
    import numpy as np

    starts: NDArray[np.float64] = np.exp2((np.arange(BINS + 1) - 1) / 2 - FIRST)
    starts[0] = 0.0
    starts.setflags(write=False)
    return starts


def added(
    cells: NDArray[np.int64], amounts: NDArray[np.float64], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Amounts added up by cell of a table, float64 of ``shape``; cells are counted row by row."""
    import numpy as np

    rows, columns = shape
    sums = np.bincount(cells, amounts, rows * columns)
    return sums.astype(float, copy=False).reshape(shape)  # of no cells at all it counts in whole numbers


def survival(
    used: NDArray[np.float64],
    lost: NDArray[np.float64],
    prior: NDArray[np.float64] | float,
    weight: NDArray[np.float64] | float,
    smoothings: int = 0,
) -> NDArray[np.float64]:
    """Share of what is used in each bin of what had not been used before it.

    Kaplan and Meier's estimate on a grid, in the form of actuaries: what is lost from sight within a bin was
    at risk for half of it. Each share is drawn to a prior.

    Args:
        used: Weight of what was used again at an age in each bin, float64 of shape [bins, ...]. Bins come
            first here, since then what is added up and compared is contiguous.
        lost: Weight of what was seen unused up to an age in the bin, and no longer; same shape.
        prior: Shares expected before anything is seen, broadcast to the same shape.
        weight: What the prior weighs.
        smoothings: How often uses and what was at risk are averaged with those of the two bins beside.

    Returns:
        Float64 of the shape of ``used``. The survival function is the running product of one minus it.

    Source: E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", JASA 1958.
    """
    at_risk = _at_risk(used, lost)
    for _ in range(smoothings):
        used, at_risk = _smooth(used), _smooth(at_risk)
    return _drawn(used, at_risk, prior, weight)


def _at_risk(used: NDArray[np.float64], lost: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    at_risk: NDArray[np.float64] = np.add(used, lost)[::-1].cumsum(axis=0)[::-1]
    at_risk -= lost * 0.5
    return at_risk


def _drawn(
    used: NDArray[np.float64],
    at_risk: NDArray[np.float64],
    prior: NDArray[np.float64] | float,
    weight: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Shares, drawn to a prior."""
    import numpy as np

    at_risk = at_risk + weight
    np.maximum(at_risk, 1e-12, out=at_risk)
    shares: NDArray[np.float64] = used + weight * prior
    shares /= at_risk
    return shares


def _by_kinship(
    families: tuple[int, ...],
    used: NDArray[np.float64],
    at_risk: NDArray[np.float64],
    prior: NDArray[np.float64] | float,
    weight: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Shares of families, each drawn to those of the one that it is most like, or else to a prior."""
    shares = _drawn(used, at_risk, prior, weight)
    for number, like in enumerate(families):
        if like != ALL:
            own, its = slice(number, number + 1), slice(like, like + 1)
            shares[:, own] = _drawn(used[:, own], at_risk[:, own], shares[:, its], weight)
    return shares


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    smooth = np.empty_like(values)
    np.add(values[:-1], values[1:], out=smooth[1:])
    np.add(values[0], values[0], out=smooth[0])
    smooth[:-1] += values[1:]
    smooth[-1] += values[-1]
    smooth /= 3
    return smooth


def index(
    shares: NDArray[np.float64], starts: NDArray[np.float64], rows: int | None = None
) -> NDArray[np.float64]:
    """The most uses per unit of time that may be expected of something of an age, if it is kept on.

    With S the survival function, at age a it is the maximum over T of ``(S(a) - S(a + T)) / ∫ S`` from a to
    a + T: to wait for T costs the integral, and pays with that probability. S is linear within a bin, and
    T ends with one.

    Args:
        shares: Of each bin, float64 of shape [bins, classes].
        starts: Where each bin begins, and where the last ends, float64 of shape [bins + 1].
        rows: How many of the starts are asked for; all by default.

    Returns:
        The index at the start of each bin, and the last one once more for where that ends, float64 of shape
        [bins + 1, classes], or [rows, classes].

    Source: the density of N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by maximizing hit
    density", NSDI 2018, with the best time to give up in place of the time of eviction, as in the index of
    J. C. Gittins, "Bandit processes and dynamic allocation indices", 1979.
    """
    import numpy as np

    bins, classes = shares.shape
    left = np.zeros((2, bins + 1, classes))  # of what was there at first, and of the time to spend on it
    alive, spent = left
    alive[0] = 1.0
    np.cumprod(1.0 - shares, axis=0, out=alive[1:])
    np.cumsum((alive[:-1] + alive[1:]) * (0.5 * np.diff(starts))[:, None], axis=0, out=spent[1:])
    spent += starts[:, None] * 1e-9  # what nothing survives costs nothing, and is worth nothing
    np.negative(spent, out=spent)
    rows = bins + 1 if rows is None else rows
    best = np.zeros((rows, classes))
    for ahead in _AHEAD:
        last = min(bins + 1 - ahead, rows)
        if last > 0:
            gain, cost = left[:, :last] - left[:, ahead : ahead + last]
            gain /= cost
            top = best[:last]
            np.maximum(top, gain, out=top)
    if rows > bins:
        best[bins] = best[bins - 1]
    return best


class LifeTable:
    """What was seen of the intervals between uses, by class; from it, the share used at each age.

    A class is drawn to its family, a family to the one that it is most like or to all classes, and those to a
    share that is the same in each bin. Since bins double in width every second one, that share makes the
    older the less likely to be used: the table starts as LRU. A class of what was used often has a time scale
    too, its mean interval; then it is drawn as much to what its family does in units of that scale.

    Attributes:
        used: Tokens that were used again, by class and bin, ``BINS`` to a class.
        lost: Tokens that were lost from sight, likewise.
        tokens: Tokens of all intervals.
        squares: The same, the tokens of each interval squared.
    """

    def __init__(self, families: Sequence[int], strength: float, share: float) -> None:
        """Start without classes.

        Args:
            families: Of classes: for each the one before it that it is most like, :data:`ALL` for none.
            strength: Intervals of mean size that a prior weighs.
            share: Share of uses that are followed by another in each bin, before anything is seen.
        """
        self.used = array("d")
        self.lost = array("d")
        self._family: list[int] = []
        self._scale: list[float] = []
        self._families = tuple(families)
        self._strength = strength
        self._share = share
        self.tokens = 0.0
        self.squares = 0.0
        self._kinship: _Kinship | None = None

    def __len__(self) -> int:
        """Number of classes."""
        return len(self._family)

    def add_class(self, family: int, scale: float = 0.0) -> int:
        """Add a class to a family, with the mean interval of its members if it has one; return its number."""
        self.used.extend([0.0] * BINS)
        self.lost.extend([0.0] * BINS)
        self._family.append(family)
        self._scale.append(scale)
        return len(self._family) - 1

    def kin(self, number: int) -> tuple[int, float]:
        """Family and scale of a class."""
        return self._family[number], self._scale[number]

    def interval(self, tokens: int) -> None:
        """An interval of ``tokens`` tokens began."""
        self.tokens += tokens
        self.squares += tokens * tokens

    def fade(self, share: float) -> None:
        """Keep a share of what has been seen."""
        self.used = array("d", [value * share for value in self.used])
        self.lost = array("d", [value * share for value in self.lost])
        self.tokens *= share
        self.squares *= share

    def estimate(self, living: NDArray[np.float64], watched: float) -> Estimate:
        """What the table says now.

        Args:
            living: Tokens of each class that are at an age in each bin now, float64 of shape
                [BINS, classes].
            watched: Time since the first interval began. An age that is not small beside it was seen in one
                stretch of the past only, and tells less than the count of tokens says.
        """
        import numpy as np

        if self._kinship is None or len(self._kinship.family) != len(self):
            self._kinship = _Kinship(self._family, self._scale, self._families)
        used = np.array(np.asarray(self.used).reshape(-1, BINS).T, order="C")
        lost = np.asarray(self.lost).reshape(-1, BINS).T + living
        # Tokens of a node share their fate: many small intervals tell more than a few large ones.
        once = self._strength * (self.squares / self.tokens if self.tokens else 1.0)
        doubt = 1.0 + np.minimum(_ONE_STRETCH * edges()[:-1] / max(watched, 1e-9), 1e6)
        return Estimate(used, lost, self._kinship, self._share, once, (once * doubt)[:, None])

    def shares(self, living: NDArray[np.float64], watched: float) -> NDArray[np.float64]:
        """The estimate of each class: share used in each bin of what was not used before.

        See :meth:`estimate`; float64 of the shape of ``living``.
        """
        return self.estimate(living, watched).shares()


class Estimate:
    """What a table said at one time, worked out for the classes that are asked for."""

    def __init__(
        self,
        used: NDArray[np.float64],
        lost: NDArray[np.float64],
        kin: _Kinship,
        share: float,
        once: float,
        weight: NDArray[np.float64],
    ) -> None:
        self._used, self._lost, self._kin, self._weight = used, lost, kin, weight
        used_by = kin.by_family(used)
        at_risk = _at_risk(used_by, kin.by_family(lost))
        of_all = _drawn(used_by[:, -1:], at_risk[:, -1:], share, weight)
        self._by_family = _by_kinship(kin.families, used_by, at_risk, of_all, weight)
        used_by = kin.by_scale(used)
        at_risk = _at_risk(used_by, kin.by_scale(lost))
        self._by_scale = _by_kinship(kin.families, used_by, at_risk, share, once)

    def __len__(self) -> int:
        """Number of classes."""
        return len(self._kin.family)

    def shares(self, classes: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Share used in each bin of what was not used before.

        Args:
            classes: Whose, int64; of all by default.

        Returns:
            Float64 of shape [BINS, classes].
        """
        import numpy as np

        kin = self._kin
        if classes is None:
            classes = np.arange(len(self))
        prior = self._by_family[:, kin.family[classes]]
        both = np.sqrt(prior * self._by_scale.take(kin.at[:, classes]))
        prior = np.where(kin.is_scaled[classes], both, prior)
        return survival(self._used[:, classes], self._lost[:, classes], prior, self._weight, _SMOOTHINGS)


class _Kinship:
    """Families and scales of the classes of a table, as arrays.

    Attributes:
        families: For each family the one that it is most like.
        family: Family of each class, int64 of shape [classes].
        is_scaled: Whether a class has a time scale, bool of shape [classes].
        at: For each bin of each class, its place in a curve of its family in units of the scale, as an
            index of an array of shape [2 * BINS, families]; int64 of shape [BINS, classes]. Bin j of a
            scaled curve is bin j - BINS behind the one of the scale. Says nothing where there is none.
    """

    def __init__(self, family: list[int], scale: list[float], families: tuple[int, ...]) -> None:
        import numpy as np

        self.families = families
        self.family = np.array(family, np.int64)
        self._at_family = (np.arange(BINS)[:, None] * (len(families) + 1) + self.family).ravel()
        self.is_scaled = np.array(scale) > 0.0
        shift = np.array([age_bin(own) for own in scale], np.int64)
        self.at = (np.arange(BINS)[:, None] - shift + BINS) * len(families) + self.family
        self._scaled = np.flatnonzero(self.is_scaled)
        self._at_scaled = self.at[:, self._scaled].ravel()
        self._shape = 2 * BINS, len(families)

    def by_family(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens by bin of age and family, and in one more column those of all, from those by bin and class.

        Added up in the order of the classes, and so to the same sum on every machine; a product of matrices
        would not be, and would wake threads for it.
        """
        found = added(self._at_family, tokens.ravel(), (BINS, self._shape[1] + 1))
        found.sum(axis=1, out=found[:, -1])
        return found

    def by_scale(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens by bin of age in units of the scale and by family, from those by bin and class."""
        return added(self._at_scaled, tokens[:, self._scaled].ravel(), self._shape)
