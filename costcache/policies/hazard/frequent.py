"""Keeps the most frequent of many labels, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

__all__ = ["Frequent"]

_COUNTERS: Final = 32
_SHARE: Final = 16
_LEAST: Final = 8


class Frequent:
    """Numbers the labels that make up a sixteenth or more of all that are counted, up to a limit.

    A label keeps its number for good, so that what is learned of it stays its own. All others share None.
    Counts are those of the space-saving algorithm with 32 counters: a label as frequent as that always has
    one. Ties go to the label that was met first, so equal streams give equal numbers.

    Source: A. Metwally, D. Agrawal and A. El Abbadi, "Efficient computation of frequent and top-k elements in
    data streams", ICDT 2005.
    """

    def __init__(self, limit: int) -> None:
        """Start without labels; at most ``limit`` get numbers."""
        self._limit = limit
        self._numbers: dict[Hashable, int] = {}
        self._counts: dict[Hashable, int] = {}
        self._total = 0
        self._uncounted = 0  # at most so often was a label met that has no counter

    def __len__(self) -> int:
        """Labels that have numbers."""
        return len(self._numbers)

    def number(self, label: Hashable) -> int | None:
        """Count a label once more, and return its number; None while it has none."""
        self._total += 1
        number = self._numbers.get(label)
        if number is not None or len(self._numbers) >= self._limit:
            return number
        counts = self._counts
        if label not in counts and len(counts) >= _COUNTERS:
            self._uncounted = counts.pop(min(counts, key=counts.__getitem__))
        count = counts[label] = counts.get(label, self._uncounted) + 1
        if count < _LEAST or count * _SHARE < self._total:
            return None
        del counts[label]
        number = self._numbers[label] = len(self._numbers)
        return number
