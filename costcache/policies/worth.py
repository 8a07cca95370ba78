"""What a leaf is worth, by its class, its age, and what its depth makes it cost to recompute."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from costcache.policies.survival import BINS, FIRST, age_bin, edges, index

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from costcache.cost import CostModel
    from costcache.policies.survival import Estimate

__all__ = ["Worth", "depth_steps"]

_SHORTEST = 2.0 ** -(FIRST + 0.5)
"""Age up to which worth is the same, half a step below the first edge. Behind the last it is, too."""
_DEPTHS = 12
"""Steps of √2 by which a token's recompute cost may exceed the first one's."""


class Worth:
    """Expected uses per unit of time, times a factor of the depth.

    A *group* is ``class * depths + depth``.

    Attributes:
        depths: Ranges of depth that are told apart; 1 for none.
        factors: Of each of them.
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
        self.factors: list[float] = [2.0 ** (depth / 2) for depth in range(self.depths)]
        self.behind = False
        self._estimate: Estimate | None = None
        self._take(1.0 / np.arange(1.0, BINS + 2)[:, None], np.zeros(1, np.int64), 1)

    def learn(self, estimate: Estimate, present: NDArray[np.int64], age: float = math.inf) -> None:
        """Take over an estimate.

        What else is asked for later is worked out then, which is seldom.

        Args:
            estimate: Of all classes.
            present: Those that there is something of, int64.
            age: Up to which it is likely to be asked for.
        """
        import numpy as np

        self._estimate = estimate
        known = np.zeros(len(estimate), bool)
        known[present] = True
        known[0] = True  # stands for classes that are newer than the estimate
        classes = np.flatnonzero(known)
        rows = min(age_bin(age) + 2, BINS + 1)
        self._take(index(estimate.shares(classes), edges(), rows), classes, len(estimate))

    def _take(self, worth: NDArray[np.float64], classes: NDArray[np.int64], of: int) -> None:
        import numpy as np

        self._worth = worth
        self._last = len(worth) - 1
        self._rises = worth[1:] - worth[:-1]
        # Row by row; reads one number several times as fast as the array.
        self._cells: memoryview[float] = worth.ravel().data.cast("B").cast("d")
        self._width: int = worth.shape[1]
        column = np.full(of + 1, -1)
        column[classes] = np.arange(len(classes))
        column[of] = column[0]  # of newer classes
        self._column = column
        self._columns: list[int] = column[:of].tolist()

    def _complete(self) -> None:
        """Work out the classes and ages that were left out."""
        import numpy as np

        if self._estimate is not None:
            of = len(self._estimate)
            self._take(index(self._estimate.shares(), edges()), np.arange(of), of)

    def table(self) -> NDArray[np.float64]:
        """Uses at the start of each bin, float64 of shape [classes, BINS + 1], as of the last estimate.

        Classes that are newer count as the first.
        """
        if self._worth.shape != (BINS + 1, len(self._columns)):
            self._complete()
        return self._worth.T

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
        column = self._columns[group] if group < len(self._columns) else self._columns[0]
        at = 2.0 * (math.log2(age) + FIRST) + 1.0 if age > _SHORTEST else 0.0
        if column < 0 or (at >= self._last and self._last < BINS):
            self._complete()
            column = self._columns[group if group < len(self._columns) else 0]
        cells, width = self._cells, self._width
        if at >= BINS:
            return cells[BINS * width + column] * factor
        low = int(at)
        cell = low * width + column
        value = cells[cell]
        return (value + (cells[cell + width] - value) * (at - low)) * factor

    def of(self, group: NDArray[np.int64], ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for many, of shape [groups] all."""
        import numpy as np

        if self.behind:
            return -ages
        at: NDArray[np.float64] = np.log2(np.maximum(ages, _SHORTEST))
        at += FIRST
        at *= 2.0
        at += 1.0
        low = np.minimum(at.astype(np.int64), BINS - 1)
        if self.depths > 1:
            group, depth = np.divmod(group, self.depths)
        column = self._column.take(group, mode="clip")
        if column.size and (column.min() < 0 or low.max() >= self._last):
            self._complete()
            column = self._column.take(group, mode="clip")
        at -= low
        low *= self._width
        low += column  # cells now, row by row
        at *= self._rises.take(low)
        at += self._worth.take(low)
        if self.depths > 1:
            at *= np.array(self.factors).take(depth)
        return at


def depth_steps(cost: CostModel) -> list[int]:
    """Depths in tokens from which a token costs √2, 2, 2√2, ... times as many FLOPs as the first one."""
    flops: Callable[[int, int], float] = cost.recompute_flops  # a plugin's may be fractions
    first = flops(0, 1)
    steps: list[int] = []
    for step in range(1, _DEPTHS):
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high) // 2
            if flops(middle, middle + 1) >= first * 2.0 ** (step / 2 - 0.25):
                high = middle
            else:
                low = middle + 1
        if low >= 1 << 24:
            break
        steps.append(low)
    return steps
