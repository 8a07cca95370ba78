"""Survival curves of reuse intervals: their estimate, and the Gittins index of an age."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["at_risk_of", "gittins_index", "shrink_to_prior", "survival"]

# Horizons that are tried, in bins: all short ones, and some long ones.
_HORIZONS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 63)


def survival(
    used: NDArray[np.float64],
    censored: NDArray[np.float64],
    prior: NDArray[np.float64] | float,
    weight: NDArray[np.float64] | float,
    smoothings: int = 0,
) -> NDArray[np.float64]:
    """Share re-accessed in each bin, of what survived unused up to that bin.

    Kaplan and Meier's estimate on a grid, in the actuarial form: what is censored within a bin counts as at
    risk for half of it. Each share is shrunk to a prior.

    Args:
        used: Weight of what was re-accessed at an age in each bin, float64 of shape [bins, ...]. Bins are the
            first axis, so that what is summed and compared is contiguous.
        censored: Weight of what was last seen unused at an age in the bin; same shape.
        prior: Shares expected before anything is seen, broadcast to the same shape.
        weight: Weight of the prior.
        smoothings: How often uses and what was at risk are averaged with those of the two adjacent bins.

    Returns:
        Float64 of the shape of ``used``. The survival function is the running product of one minus it.

    Source: E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", JASA 1958.
    """
    at_risk = at_risk_of(used, censored)
    for _ in range(smoothings):
        used, at_risk = _smooth(used), _smooth(at_risk)
    return shrink_to_prior(used, at_risk, prior, weight)


def at_risk_of(used: NDArray[np.float64], censored: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weight at risk of a use in each bin; arguments as for :func:`survival`."""
    import numpy as np

    at_risk: NDArray[np.float64] = np.add(used, censored)[::-1].cumsum(axis=0)[::-1]
    at_risk -= censored * 0.5
    return at_risk


def shrink_to_prior(
    used: NDArray[np.float64],
    at_risk: NDArray[np.float64],
    prior: NDArray[np.float64] | float,
    weight: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Share used of what was at risk, shrunk to a prior of some weight."""
    import numpy as np

    at_risk = at_risk + weight
    np.maximum(at_risk, 1e-12, out=at_risk)
    shares: NDArray[np.float64] = used + weight * prior
    shares /= at_risk
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


def gittins_index(
    shares: NDArray[np.float64], starts: NDArray[np.float64], rows: int | None = None
) -> NDArray[np.float64]:
    """Most uses per unit of time that something of an age promises if it is kept.

    With S the survival function, at age a it is the maximum over T of ``(S(a) - S(a + T)) / ∫ S`` from a to
    a + T: keeping it for T costs the integral, and pays with that probability. S is linear within a bin, and
    T ends with one.

    Args:
        shares: Of each bin, float64 of shape [bins, classes].
        starts: Start of each bin and end of the last, float64 of shape [bins + 1].
        rows: How many of the starts are wanted; all by default.

    Returns:
        The index at the start of each bin, and the last one once more for where that ends, float64 of shape
        [bins + 1, classes], or [rows, classes].

    Source: the density of N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by maximizing hit
    density", NSDI 2018, with the best time to give up in place of the time of eviction, as in the index of
    J. C. Gittins, "Bandit processes and dynamic allocation indices", 1979.
    """
    import numpy as np

    bins, classes = shares.shape
    left = np.zeros((2, bins + 1, classes))  # share of the members that survives, and minus the time spent
    alive, spent = left
    alive[0] = 1.0
    np.cumprod(1.0 - shares, axis=0, out=alive[1:])
    np.cumsum((alive[:-1] + alive[1:]) * (0.5 * np.diff(starts))[:, None], axis=0, out=spent[1:])
    spent += starts[:, None] * 1e-9  # where nothing survives, keeping costs nothing and is worth nothing
    np.negative(spent, out=spent)
    rows = bins + 1 if rows is None else rows
    best = np.zeros((rows, classes))
    for ahead in _HORIZONS:
        last = min(bins + 1 - ahead, rows)
        if last > 0:
            gain, cost = left[:, :last] - left[:, ahead : ahead + last]
            gain /= cost
            top = best[:last]
            np.maximum(top, gain, out=top)
    if rows > bins:
        best[bins] = best[bins - 1]
    return best
