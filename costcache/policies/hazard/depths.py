"""Ranges of depth at which a token costs about the same to recompute."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.cost import CostModel

__all__ = ["Depths"]

_STEPS: Final = 12
"""Steps of √2 by which a token's recompute cost may exceed that of the first one."""


class Depths:
    """Ranges of depth, each √2 times as expensive as the one before it.

    Attributes:
        starts: Depth in tokens at which each range but the first begins: from there on a token costs √2, 2,
            2√2, ... times as many FLOPs as the first one.
        count: Number of ranges; 1 where depth does not count.
        factors: Cost of a token of each range, in units of that of the first.
    """

    def __init__(self, cost: CostModel | None = None) -> None:
        """Divide the depths.

        Args:
            cost: Cost of recomputing a token; None where depth does not count.
        """
        self.starts = [] if cost is None else _starts(cost)
        self.count = len(self.starts) + 1
        self.factors: list[float] = [2.0 ** (depth / 2) for depth in range(self.count)]

    def of(self, token: int) -> int:
        """Range of a token at a depth."""
        return bisect_right(self.starts, token)


def _starts(cost: CostModel) -> list[int]:
    flops: Callable[[int, int], float] = cost.recompute_flops  # a plugin's may be fractions
    first = flops(0, 1)
    starts: list[int] = []
    for step in range(1, _STEPS):
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high) // 2
            if flops(middle, middle + 1) >= first * 2.0 ** (step / 2 - 0.25):
                high = middle
            else:
                low = middle + 1
        if low >= 1 << 24:
            break
        starts.append(low)
    return starts
