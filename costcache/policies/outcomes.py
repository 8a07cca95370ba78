"""Classes of nodes: by how often they were used, and by how the request that used them last ended."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from costcache.policies.survival import LifeTable
from costcache.records import RequestInfo

__all__ = ["LEVELS", "Classes", "Outcome"]

LEVELS = 6
"""Families of classes: used once, 2, 3 or 4, 5 to 8, 9 to 16 times, and more often."""
_SHORTEST, _LONGEST = -1, 15
_OUTPUTS = (50, 200, 500)
_PROMPTS = (2_000, 8_000, 32_000)
_REASONS = 6
_PRIORITIES = 2
_MOST = 768
"""Classes; what would be a further one is told apart less finely."""


class Outcome(NamedTuple):
    """How a request ended.

    Attributes:
        output: Range of its output length: 0 for the shortest.
        reason: Its finish reason, None where unknown.
        priority: Its priority, from -2 to 2.
    """

    output: int
    reason: str | None
    priority: int


class Classes:
    """Numbers of classes in a life table, made as they are met."""

    def __init__(self, table: LifeTable) -> None:
        self._table = table
        self._numbers: dict[object, int] = {}
        self._labels: list[str] = []
        self._reasons: set[str] = set()
        self.open = self._number("open", 0, "used once, by a request that has not ended")
        spans = _LONGEST - _SHORTEST + 1
        self._reused: list[list[int]] = [[-1] * spans for _ in range(LEVELS)]

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, number: int) -> str:
        """A class in words."""
        return self._labels[number]

    def _number(self, key: object, family: int, label: str, scale: float = 0.0) -> int:
        self._numbers[key] = number = self._table.add_class(family, scale)
        self._labels.append(label)
        return number

    def outcome(self, info: RequestInfo) -> Outcome:
        """What counts of how a request ended."""
        reason = info.finish_reason
        if reason is not None and reason not in self._reasons:
            if len(self._reasons) < _REASONS:
                self._reasons.add(reason)
            else:
                reason = None
        priority = max(-_PRIORITIES, min(info.priority, _PRIORITIES)) if info.priority else 0
        return Outcome(bisect_right(_OUTPUTS, info.output_tokens), reason, priority)

    def fresh(self, new_tokens: int, outcome: Outcome) -> int:
        """What a request made that brought ``new_tokens`` never-seen tokens."""
        size = bisect_right(_PROMPTS, new_tokens)
        key = (size, outcome)
        number = self._numbers.get(key)
        if number is None:
            if len(self) >= _MOST:
                return self.open
            label = (
                f"used once, {_range(size, _PROMPTS)} new tokens, {_range(outcome.output, _OUTPUTS)} output"
            )
            number = self._number(key, 0, label + _rest(outcome))
        return number

    def reused(self, hits: int, interval: float) -> int:
        """What was used ``hits`` times, two or more, ``interval`` apart on average."""
        level = (hits - 1).bit_length()
        if level >= LEVELS:
            level = LEVELS - 1
        span = math.frexp(interval)[1] - _SHORTEST
        if span < 0 or interval <= 0.0:
            span = 0
        elif span > _LONGEST - _SHORTEST:
            span = _LONGEST - _SHORTEST
        number = self._reused[level][span]
        if number < 0:
            scale = 2.0 ** (span + _SHORTEST)
            times = f"{2 ** (level - 1) + 1}+" if level > 1 else "2"
            label = f"used {times} times, every {scale / 2:g} to {scale:g}"
            number = self._number((level, span, None), level, label, scale * 0.7)
            self._reused[level][span] = number
        return number

    def after(self, group: int, outcome: Outcome) -> int:
        """The class of ``group``, one of :meth:`reused`, once the request that used it has ended so."""
        long = outcome.output >= 2
        key = (group, long, outcome.reason, outcome.priority)
        number = self._numbers.get(key)
        if number is None:
            if len(self) >= _MOST:
                return group
            family, scale = self._table.kin(group)
            label = f"{self._labels[group]}, {'200 or more' if long else 'under 200'} output"
            number = self._number(key, family, label + _rest(outcome), scale)
        return number


def _range(at: int, limits: tuple[int, ...]) -> str:
    return f"under {limits[0]}" if not at else f"{limits[at - 1]}+"


def _rest(outcome: Outcome) -> str:
    reason = "" if outcome.reason is None else f", {outcome.reason}"
    return reason + (f", priority {outcome.priority}" if outcome.priority else "")
