"""Axes of charts: where a value lies, and the ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Axis", "linear", "log"]

_MOST_TICKS = 9


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or a logarithmic axis.

    Attributes:
        title: What it measures.
        low: Value at its beginning.
        high: Value at its end.
        log: Whether it is logarithmic.
        ticks: Values with their labels.
    """

    title: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Position of a value, from 0 at the beginning to 1 at the end; values beyond lie there."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear(title: str, high: float, words: Callable[[float], str], *, exact: bool = False) -> Axis:
    """An axis from 0 with round ticks, to ``high`` if ``exact``, else to the next tick."""
    high = high if high > 0 else 1.0
    step = 10.0 ** math.floor(math.log10(high / 4))
    step *= next(s for s in (1, 2, 5, 10) if high / (step * s) <= 6)
    last = math.floor(high / step + 1e-9) if exact else math.ceil(high / step - 1e-9)
    ticks = tuple((at * step, words(round(at * step, 12))) for at in range(last + 1))
    return Axis(title, 0.0, high if exact else last * step, False, ticks)


def log(title: str, low: float, high: float, words: Callable[[float], str]) -> Axis:
    """A logarithmic axis with round ticks, as many as it has room for; linear from a low of 0."""
    if low <= 0:  # zero has no logarithm
        return linear(title, high, words)
    if high < low * 1.5:
        low, high = low / 1.5, high * 1.5
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps, most in (
        ((1, 1.5, 2, 3, 4, 6, 8), 6),
        ((1, 2, 5), _MOST_TICKS),
        ((1, 3), _MOST_TICKS),
        ((1,), 0),
    ):
        ticks = [float(f"{step}e{power}") for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    return Axis(title, low, high, True, tuple((tick, words(tick)) for tick in ticks))
