"""What a leaf is worth, by its class, its age, and what its depth makes it cost to recompute."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from costcache.policies.survival import BINS, FIRST

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.cost import CostModel

__all__ = ["Worth", "depth_steps"]

_DEPTHS = 12
"""Steps of √2 by which a token's recompute cost may exceed the first one's."""


class Worth:
    """Expected uses per unit of time, times a factor of the depth.

    A *group* is ``class * depths + depth``.

    Attributes:
        table: Uses by class at the start of each bin of age, float64 of shape [classes, BINS + 1]; classes
            that it does not have count as the first.
        depths: Ranges of depth that are told apart; 1 for none.
        behind: Age alone counts, as for LRU.
    """

    def __init__(self, cost: CostModel | None = None) -> None:
        """Begin as LRU.

        Args:
            cost: What recomputing costs, if it is to count.
        """
        import numpy as np

        self._steps = [] if cost is None else depth_steps(cost)
        self.depths = len(self._steps) + 1
        self.factors = [2.0 ** (depth / 2) for depth in range(self.depths)]
        self.behind = False
        self.learn(1.0 / np.arange(1.0, BINS + 2)[:, None])

    def learn(self, worth: NDArray[np.float64]) -> None:
        """Take over uses by bin and class, float64 of shape [BINS + 1, classes]."""
        self.table = worth.T
        self._cells = worth.data  # reads one number several times as fast as the array
        self._classes = worth.shape[1]

    def depth(self, token: int) -> int:
        """How many times √2 as much a token costs to recompute as the first one."""
        return bisect_right(self._steps, token)

    def at(self, group: int, age: float) -> float:
        """Worth of a group at an age, interpolated between the bins."""
        if self.behind:
            return -age
        factor = 1.0
        if self.depths > 1:
            group, depth = divmod(group, self.depths)
            factor = self.factors[depth]
        if group >= self._classes:
            group = 0
        cells = self._cells
        at = 2.0 * (math.log2(age) + FIRST) + 1.0 if age > 0.0 else 0.0
        if at <= 0.0:
            return cells[0, group] * factor
        if at >= BINS:
            return cells[BINS, group] * factor
        low = int(at)
        value = cells[low, group]
        return (value + (cells[low + 1, group] - value) * (at - low)) * factor

    def of(self, group: NDArray[np.int64], ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for many, of shape [groups] all."""
        import numpy as np

        if self.behind:
            return -ages
        at = 2.0 * (np.log2(np.maximum(ages, 1e-300)) + FIRST) + 1.0
        at = np.minimum(np.maximum(at, 0.0), BINS)
        low = np.minimum(at.astype(np.int64), BINS - 1)
        if self.depths > 1:
            group, depth = np.divmod(group, self.depths)
        group = np.where(group < self._classes, group, 0)
        value = self.table[group, low]
        found: NDArray[np.float64] = value + (self.table[group, low + 1] - value) * (at - low)
        if self.depths > 1:
            found *= np.array(self.factors)[depth]
        return found


def depth_steps(cost: CostModel) -> list[int]:
    """Depths in tokens from which a token costs √2, 2, 2√2, ... times as many FLOPs as the first one."""
    first = cost.recompute_flops(0, 1)
    steps: list[int] = []
    for step in range(1, _DEPTHS):
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high) // 2
            if cost.recompute_flops(middle, middle + 1) >= first * 2.0 ** (step / 2 - 0.25):
                high = middle
            else:
                low = middle + 1
        if low >= 1 << 24:
            break
        steps.append(low)
    return steps
