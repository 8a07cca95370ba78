"""Bins of age: the grid on which reuse intervals are counted."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BINS", "ENDS", "FIRST", "SHORTEST", "age_bin", "at_age", "bincount_2d", "edges"]

BINS: Final = 64
"""Bins of age: the first starts at 0, each further one is √2 times as wide as the one before it."""
FIRST: Final = 6
"""The first bin ends at ``2 ** -6`` units of the clock; the last begins at ``2 ** 25``."""
ENDS: Final = [math.ldexp(math.sqrt(0.5) if at % 2 else 0.5, at // 2 + 1 - FIRST) for at in range(BINS - 1)]
"""End of each bin of age except the last."""
SHORTEST: Final = 2.0 ** -(FIRST + 0.5)
"""Age up to which what is interpolated is constant, half a step below the first edge."""


def age_bin(age: float) -> int:
    """Bin of an age in units of the clock, seconds or requests."""
    return bisect_right(ENDS, age)


def at_age(values: Sequence[float], age: float) -> float:
    """Value at an age, interpolated between those at the starts of bins; constant after the last."""
    at = 2.0 * (math.log2(age) + FIRST) + 1.0 if age > SHORTEST else 0.0
    low = int(at)
    if low >= len(values) - 1:
        return values[-1]
    value = values[low]
    return value + (values[low + 1] - value) * (at - low)


@cache
def edges() -> NDArray[np.float64]:
    """Start of each bin and end of the last, read-only float64 of shape [BINS + 1]."""
    import numpy as np

    starts: NDArray[np.float64] = np.exp2((np.arange(BINS + 1) - 1) / 2 - FIRST)
    starts[0] = 0.0
    starts.setflags(write=False)
    return starts


def bincount_2d(
    cells: NDArray[np.int64], amounts: NDArray[np.float64], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Sums of amounts by cell of a table, float64 of ``shape``; cells are numbered row by row."""
    import numpy as np

    rows, columns = shape
    sums = np.bincount(cells, amounts, rows * columns)
    return sums.astype(float, copy=False).reshape(shape)  # without any cells, bincount returns integers
