"""Worth of a leaf by its class, its age, and the cost of recomputing it at its depth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from costcache.policies.hazard.bins import BINS, FIRST, SHORTEST, age_bin, edges
from costcache.policies.hazard.depths import Depths
from costcache.policies.hazard.survival import gittins_index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.policies.hazard.life_table import Estimate

__all__ = ["Worth"]


class Worth:
    """Expected uses per unit of time, times a factor of the depth.

    The class and the depth of a leaf make its *stratum*, ``class * depths + depth``.

    Attributes:
        as_lru: Only the age counts, as for LRU.
    """

    def __init__(self, depths: Depths) -> None:
        """Start as LRU.

        Args:
            depths: Ranges of depth that are told apart.
        """
        import numpy as np

        self.as_lru = False
        self._depths = depths.count
        self._factors = depths.factors
        self._estimate: Estimate | None = None
        self._asked: list[int] = []  # classes that were asked for when they had been left out
        self._take(1.0 / np.arange(1.0, BINS + 2)[:, None], np.zeros(2, np.int64))

    def learn(self, estimate: Estimate, present: NDArray[np.int64], age: float = math.inf) -> None:
        """Adopt an estimate.

        Only what is likely to be asked for is worked out now; the rest is when it is asked for, which is
        seldom.

        Args:
            estimate: Survival of all classes.
            present: Classes that have members now, int64.
            age: Highest age that is likely to be asked for.
        """
        import numpy as np

        self._estimate = estimate
        known = np.zeros(len(estimate), bool)
        known[present] = True
        known[self._asked] = True
        known[0] = True  # stands for classes that are newer than the estimate
        classes = np.flatnonzero(known)
        rows = min(age_bin(age) + 2, BINS + 1)
        column = np.full(len(estimate) + 1, -1)
        column[classes] = np.arange(len(classes))
        column[-1] = column[0]  # of newer classes
        self._take(gittins_index(estimate.shares(classes), edges(), rows), column)

    def _take(self, worth: NDArray[np.float64], column: NDArray[np.int64]) -> None:
        self._worth = worth
        self._last = len(worth) - 1
        self._rises = worth[1:] - worth[:-1]
        # Row by row; reads one number several times as fast as the array.
        self._cells: memoryview[float] = worth.ravel().data.cast("B").cast("d")
        self._width: int = worth.shape[1]
        self._column = column
        self._columns: list[int] = column[:-1].tolist()

    def _complete(self) -> None:
        """Work out the classes and ages that were left out."""
        import numpy as np

        if self._estimate is not None:
            column = np.arange(len(self._estimate) + 1)
            column[-1] = 0
            self._take(gittins_index(self._estimate.shares(), edges()), column)

    @property
    def is_complete(self) -> bool:
        """Whether all classes and ages of the last estimate have been worked out."""
        return self._worth.shape == (BINS + 1, len(self._columns))

    def table(self) -> NDArray[np.float64]:
        """Worth at the start of each bin, float64 of shape [classes, BINS + 1], as of the last estimate.

        Classes that are newer count as the first.
        """
        if not self.is_complete:
            self._complete()
        return self._worth[:, self._column[:-1]].T

    def at(self, stratum: int, age: float) -> float:
        """Worth of a stratum at an age, interpolated between the bins."""
        if self.as_lru:
            return -age
        factor = 1.0
        if self._depths > 1:
            stratum, depth = divmod(stratum, self._depths)
            factor = self._factors[depth]
        columns = self._columns
        column = columns[stratum if stratum < len(columns) else 0]
        at = 2.0 * (math.log2(age) + FIRST) + 1.0 if age > SHORTEST else 0.0
        if column < 0 or at >= self._last:
            column = self._work_out(stratum, at)
            if at >= BINS:
                return self._cells[BINS * self._width + column] * factor
        low = int(at)
        cells, width = self._cells, self._width
        cell = low * width + column
        value = cells[cell]
        return (value + (cells[cell + width] - value) * (at - low)) * factor

    def _work_out(self, stratum: int, at: float) -> int:
        """Work out what was left out and is asked for now; returns the column of a class."""
        if at >= self._last and self._last < BINS:
            self._complete()
        number = stratum if stratum < len(self._columns) else 0
        if self._columns[number] < 0:
            self._add(number)
        return self._columns[number]

    def _add(self, number: int) -> None:
        """Work out one more class, up to the same age as the others."""
        import numpy as np

        if self._estimate is not None:
            shares = self._estimate.shares(np.array([number]))
            worth = gittins_index(shares, edges(), len(self._worth))
            column = self._column
            column[number] = self._width
            self._asked.append(number)
            self._take(np.concatenate((self._worth, worth), axis=1), column)

    def each(self, strata: list[int], ages: list[float]) -> list[float]:
        """Worth of a few strata, each at its age: :meth:`at` for each of them, without the calls."""
        if self.as_lru or self._depths > 1:
            return [self.at(stratum, age) for stratum, age in zip(strata, ages, strict=True)]
        log2 = math.log2
        found: list[float] = []
        columns, cells, width, last = self._columns, self._cells, self._width, self._last
        known = len(columns)
        for stratum, age in zip(strata, ages):  # noqa: B905 # mypyc compiles this form
            column = columns[stratum if stratum < known else 0]
            at = 2.0 * (log2(age) + FIRST) + 1.0 if age > SHORTEST else 0.0
            if column < 0 or at >= last:
                found.append(self.at(stratum, age))  # which may work out what was left out
                columns, cells, width, last = self._columns, self._cells, self._width, self._last
                continue
            low = int(at)
            cell = low * width + column
            value = cells[cell]
            found.append(value + (cells[cell + width] - value) * (at - low))
        return found

    def of(self, strata: NDArray[np.int64], ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Worth of many strata, each at its age; arrays of one shape."""
        import numpy as np

        if self.as_lru:
            return -ages
        at: NDArray[np.float64] = np.log2(np.maximum(ages, SHORTEST))
        at += FIRST
        at *= 2.0
        at += 1.0
        low = np.minimum(at.astype(np.int64), BINS - 1)
        classes = strata
        if self._depths > 1:
            classes, depth = np.divmod(strata, self._depths)
        column = self._column.take(classes, mode="clip")
        if column.size and (column.min() < 0 or low.max() >= self._last):
            self._complete()
            column = self._column.take(classes, mode="clip")
        at -= low
        low *= self._width
        low += column  # cells now, row by row
        at *= self._rises.take(low)
        at += self._worth.take(low)
        if self._depths > 1:
            at *= np.array(self._factors).take(depth)
        return at
