"""How long until something is used again: survival curves by class, and what a curve says of an age."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BINS", "LifeTable", "age_bin", "edges", "index", "survival"]

BINS = 64
"""Bins of age: the first from 0, each further one √2 times as wide as the one before it."""
FIRST = 6
"""The first bin ends at ``2 ** -6`` units of the clock; the last begins at ``2 ** 25``."""
_HALF = math.sqrt(0.5)
_OFFSET = 2 * FIRST - 1
_SMOOTHINGS = 2
_ONE_STRETCH = 20.0
"""How much more a prior weighs at an age as long as the time watched."""
# Waits that are tried, in bins: all short ones, and some long ones.
_AHEAD = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 63)


def age_bin(age: float) -> int:
    """Bin of an age in units of the clock, seconds or requests."""
    if age <= 0.0:
        return 0
    mantissa, exponent = math.frexp(age)
    at = 2 * exponent + _OFFSET + (mantissa >= _HALF)
    return 0 if at < 0 else at if at < BINS else BINS - 1


def edges() -> NDArray[np.float64]:
    """Where each bin begins, and where the last ends; float64 of shape [BINS + 1]."""
    import numpy as np

    starts: NDArray[np.float64] = np.exp2((np.arange(BINS + 1) - 1) / 2 - FIRST)
    starts[0] = 0.0
    return starts


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
        used: Weight of what was used again at an age in each bin, float64 of shape [..., bins].
        lost: Weight of what was seen unused up to an age in the bin, and no longer; same shape.
        prior: Shares expected before anything is seen, broadcast to the same shape.
        weight: What the prior weighs.
        smoothings: How often uses and what was at risk are averaged with those of the two bins beside.

    Returns:
        Float64 of the shape of ``used``. The survival function is the running product of one minus it.

    Source: E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", JASA 1958.
    """
    import numpy as np

    ended = used + lost
    at_risk = np.cumsum(ended[..., ::-1], axis=-1)[..., ::-1] - lost / 2
    for _ in range(smoothings):
        used, at_risk = _smooth(used), _smooth(at_risk)
    shares: NDArray[np.float64] = (used + weight * prior) / np.maximum(at_risk + weight, 1e-12)
    return shares


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    wider = np.concatenate((values[..., :1], values, values[..., -1:]), axis=-1)
    smooth: NDArray[np.float64] = (wider[..., :-2] + values + wider[..., 2:]) / 3
    return smooth


def index(shares: NDArray[np.float64], starts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most uses per unit of time that may be expected of something of an age, if it is kept on.

    With S the survival function, at age a it is the maximum over T of ``(S(a) - S(a + T)) / ∫ S`` from a to
    a + T: to wait for T costs the integral, and pays with that probability. S is linear within a bin, and
    T ends with one.

    Args:
        shares: Of each bin, float64 of shape [classes, bins].
        starts: Where each bin begins, and where the last ends, float64 of shape [bins + 1].

    Returns:
        The index at the start of each bin, float64 of shape [classes, bins].

    Source: the density of N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by maximizing hit
    density", NSDI 2018, with the best time to give up in place of the time of eviction, as in the index of
    J. C. Gittins, "Bandit processes and dynamic allocation indices", 1979.
    """
    import numpy as np

    classes, bins = shares.shape
    alive = np.ones((bins + 1, classes))  # by bin first: then what is compared is contiguous
    np.cumprod(1.0 - shares.T, axis=0, out=alive[1:])
    spent = np.zeros((bins + 1, classes))
    np.cumsum((alive[:-1] + alive[1:]) / 2 * np.diff(starts)[:, None], axis=0, out=spent[1:])
    spent += starts[:, None] * 1e-9  # what nothing survives costs nothing, and is worth nothing
    best = np.zeros((bins, classes))
    for ahead in _AHEAD:
        if ahead <= bins:
            gain = alive[:-ahead] - alive[ahead:]
            gain /= spent[ahead:] - spent[:-ahead]
            np.maximum(best[: bins + 1 - ahead], gain, out=best[: bins + 1 - ahead])
    return np.ascontiguousarray(best.T)


class LifeTable:
    """What was seen of the intervals between uses, by class; from it, the share used at each age.

    A class is drawn to its family, a family to all classes, and those to a share that is the same in each
    bin. Since bins double in width every second one, that share makes the older the less likely to be used:
    the table starts as LRU. A class of what was used often has a time scale too, its mean interval; then it
    is drawn as much to what its family does in units of that scale.

    Attributes:
        used: Tokens that were used again, by class and bin, ``BINS`` to a class.
        lost: Tokens that were lost from sight, likewise.
    """

    def __init__(self, families: int, strength: float, share: float) -> None:
        """Start without classes.

        Args:
            families: Of classes.
            strength: Intervals of mean size that a prior weighs.
            share: Share of uses that are followed by another in each bin, before anything is seen.
        """
        self.used = array("d")
        self.lost = array("d")
        self._family: list[int] = []
        self._scale: list[float] = []
        self._families = families
        self._strength = strength
        self._share = share
        self._tokens = 0.0
        self._squares = 0.0

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
        self._tokens += tokens
        self._squares += tokens * tokens

    def fade(self, share: float) -> None:
        """Keep a share of what has been seen."""
        self.used = array("d", [value * share for value in self.used])
        self.lost = array("d", [value * share for value in self.lost])
        self._tokens *= share
        self._squares *= share

    def shares(self, living: NDArray[np.float64], watched: float) -> NDArray[np.float64]:
        """The estimate of each class: share used in each bin of what was not used before.

        Args:
            living: Tokens of each class that are at an age in each bin now, float64 of shape
                [classes, BINS].
            watched: Time since the first interval began. An age that is not small beside it was seen in one
                stretch of the past only, and tells less than the count of tokens says.
        """
        import numpy as np

        used = np.array(self.used).reshape(-1, BINS)
        lost = np.array(self.lost).reshape(-1, BINS) + living
        # Tokens of a node share their fate: many small intervals tell more than a few large ones.
        once = self._strength * (self._squares / self._tokens if self._tokens else 1.0)
        weight = once * (1.0 + np.minimum(_ONE_STRETCH * edges()[:-1] / max(watched, 1e-9), 1e6))
        family = np.array(self._family)
        of_all = survival(used.sum(0), lost.sum(0), self._share, weight)
        members = np.zeros((self._families, len(family)))
        members[family, np.arange(len(family))] = 1.0
        prior = survival(members @ used, members @ lost, of_all, weight)[family]
        shift = np.array([age_bin(scale) if scale else -1 for scale in self._scale])
        scaled = np.flatnonzero(shift >= 0)
        if scaled.size:
            # Bin j of a scaled curve is bin j - BINS behind the one of the scale.
            at = np.arange(BINS) - shift[scaled][:, None] + BINS
            rows, members = np.arange(scaled.size)[:, None], members[:, scaled]
            curves = np.zeros((2, scaled.size, 2 * BINS))
            curves[0, rows, at], curves[1, rows, at] = used[scaled], lost[scaled]
            by_scale = survival(members @ curves[0], members @ curves[1], self._share, once)
            prior[scaled] = np.sqrt(prior[scaled] * by_scale[family[scaled][:, None], at])
        return survival(used, lost, prior, weight, _SMOOTHINGS)
