"""Chance that tokens are used again within a time, by their class and age."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.policies.hazard.bins import BINS, age_bin, edges

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Forecast"]


class Forecast:
    """Survival of the reuse intervals of all classes, as estimated once.

    Attributes:
        of: The estimate.
    """

    def __init__(self, shares: NDArray[np.float64], of: object) -> None:
        """Work out the survival of every class of an estimate.

        Args:
            shares: Share used in each bin of age of what survived unused up to it, float64 of shape [BINS,
                classes].
            of: The estimate.
        """
        import numpy as np

        classes = shares.shape[1]
        alive = np.ones((BINS + 1, classes))
        np.cumprod(1.0 - shares, axis=0, out=alive[1:])
        self.of = of
        self._classes = classes
        # Row by row; reads one number several times as fast as the array.
        self._alive: memoryview[float] = alive.ravel().data.cast("B").cast("d")
        self._edges: list[float] = edges().tolist()

    def chance(self, group: int, age: float, within: float) -> float:
        """Chance that tokens of a class are used in the time after an age, given that they were not before.

        Args:
            group: Number of the class; one that is newer than the estimate counts as the first.
            age: Time since the last use, in units of the clock.
            within: Time after that.
        """
        if group >= self._classes:
            group = 0
        now = self._survival(group, age)
        if now <= 0.0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self._survival(group, age + within) / now))

    def _survival(self, group: int, age: float) -> float:
        alive, classes = self._alive, self._classes
        at = age_bin(age)
        start = self._edges[at]
        share = min(1.0, (age - start) / (self._edges[at + 1] - start))
        before, after = alive[at * classes + group], alive[(at + 1) * classes + group]
        survival: float = before + (after - before) * max(0.0, share)
        return survival
