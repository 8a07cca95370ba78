"""Classes of nodes: by how often they were used, and by how the request that used them last ended."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from costcache.policies.survival import ALL, LifeTable
from costcache.records import RequestInfo

__all__ = ["FAMILIES", "SPANS", "Classes", "Kind", "Outcome"]

FAMILIES = (ALL, ALL, 1, 2, 3, 4)
"""Of classes: used once, 2, 3 or 4, 5 to 8, 9 to 16 times, and more often. The first to be used so often, of
which nothing is known yet, are like what was used half as often."""
SPANS = [2.0**exponent for exponent in range(-1, 15)]
"""Mean intervals from which on classes of what was used more than once differ."""
_OUTPUTS = (50, 200, 500)
_PROMPTS = (2_000, 8_000, 32_000)
_REASONS = 6
_PRIORITIES = 2
_BITS = 10  # enough for 4 outputs, 7 reasons and 5 priorities
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


class Kind(NamedTuple):
    """What makes a class, by which another run knows it.

    Attributes:
        uses: How often its members were used, at least.
        interval: Of those used more than once, the mean time between uses, somewhere in the class's range.
        new_tokens: Of those used once, the least tokens that their request brought.
        ended: How the last request ended, its output length the least of the class; None where it did not
            count, or has not ended.
    """

    uses: int
    interval: float | None
    new_tokens: int | None
    ended: RequestInfo | None


class Classes:
    """Numbers of classes in a life table, made as they are met.

    Attributes:
        open: The class of what was used once, by a request that has not ended.
        by_uses: For each number of bits of the uses but one, the classes of what was used more than once, by
            the range of the mean interval, see :data:`SPANS`; -1 where none has been met.
    """

    def __init__(self, table: LifeTable) -> None:
        self._table = table
        self._labels: list[str] = []
        self._outcomes: dict[Outcome, int] = {}
        self._fresh: dict[int, int] = {}
        self._after: dict[int, int] = {}
        self._reasons: set[str] = set()
        self.open = self._number(0, "used once, by a request that has not ended")
        levels = [[-1] * (len(SPANS) + 1) for _ in range(len(FAMILIES))]
        self.by_uses = levels + levels[-1:] * 64

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, number: int) -> str:
        """A class in words."""
        return self._labels[number]

    def _number(self, family: int, label: str, scale: float = 0.0) -> int:
        self._labels.append(label)
        return self._table.add_class(family, scale)

    def outcome(self, info: RequestInfo) -> int:
        """Number of what counts of how a request ended."""
        reason, priority = info.finish_reason, info.priority
        if reason is not None and reason not in self._reasons:
            if len(self._reasons) < _REASONS:
                self._reasons.add(reason)
            else:
                reason = None
        if priority:
            priority = max(-_PRIORITIES, min(priority, _PRIORITIES))
        key = bisect_right(_OUTPUTS, info.output_tokens), reason, priority
        number: int | None = self._outcomes.get(key)  # type: ignore[call-overload] # an equal tuple, made faster
        if number is None:
            number = self._outcomes[Outcome(*key)] = len(self._outcomes)
        return number

    def fresh(self, new_tokens: int, outcome: int) -> int:
        """What a request made that brought ``new_tokens`` never-seen tokens, and ended so."""
        size = bisect_right(_PROMPTS, new_tokens)
        key = size << _BITS | outcome
        number = self._fresh.get(key)
        if number is None:
            if len(self) >= _MOST:
                return self.open
            ended = list(self._outcomes)[outcome]
            label = f"used once, {_range(size, _PROMPTS)} new tokens, {_range(ended.output, _OUTPUTS)} output"
            number = self._fresh[key] = self._number(0, label + _rest(ended))
        return number

    def reused(self, hits: int, interval: float) -> int:
        """What was used ``hits`` times, two or more, ``interval`` apart on average."""
        level = min((hits - 1).bit_length(), len(FAMILIES) - 1)
        span = bisect_right(SPANS, interval)
        number = self.by_uses[level][span]
        if number < 0:
            scale = SPANS[0] * 2.0**span
            times = f"{2 ** (level - 1) + 1}+" if level > 1 else "2"
            label = f"used {times} times, every {scale / 2:g} to {scale:g}"
            number = self.by_uses[level][span] = self._number(level, label, scale * 0.7)
        return number

    def after(self, group: int, outcome: int) -> int:
        """The class of ``group``, one of :meth:`reused`, once the request that used it has ended so."""
        key = group << _BITS | outcome
        number = self._after.get(key)
        if number is None:
            number = self._after[key] = self._after_new(group, outcome)
        return number

    def _after_new(self, group: int, outcome: int) -> int:
        ended = list(self._outcomes)[outcome]
        for other, same in self._outcomes.items():  # outputs are told apart in two ranges only
            known = self._after.get(group << _BITS | same)
            if known is not None and other[1:] == ended[1:] and _long(other) == _long(ended):
                return known
        if len(self) >= _MOST:
            return group
        family, scale = self._table.kin(group)
        label = f"{self._labels[group]}, {'200 or more' if _long(ended) else 'under 200'} output"
        return self._number(family, label + _rest(ended), scale)

    def kinds(self) -> list[Kind]:
        """What makes each class, by number."""
        infos = [
            RequestInfo(
                output_tokens=(0, *_OUTPUTS)[ended.output],
                finish_reason=ended.reason,
                priority=ended.priority,
            )
            for ended in self._outcomes
        ]
        fresh = {number: key for key, number in self._fresh.items()}
        after: dict[int, int] = {}
        for key, number in self._after.items():
            if number != key >> _BITS:
                after.setdefault(number, key)
        found = []
        for number in range(len(self)):
            level, scale = self._table.kin(number)
            if level:
                info = infos[after[number] & (1 << _BITS) - 1] if number in after else None
                found.append(Kind(2 ** (level - 1) + 1 if level > 1 else 2, scale, None, info))
            elif number in fresh:
                size, outcome = divmod(fresh[number], 1 << _BITS)
                found.append(Kind(1, None, (0, *_PROMPTS)[size], infos[outcome]))
            else:
                found.append(Kind(1, None, None, None))
        return found

    def number_of(self, kind: Kind) -> int:
        """The class that something of a kind belongs to."""
        outcome = None if kind.ended is None else self.outcome(kind.ended)
        if kind.uses == 1:
            if outcome is None:
                return self.open
            return self.fresh(kind.new_tokens or 0, outcome)
        group = self.reused(kind.uses, kind.interval or 0.0)
        return group if outcome is None else self.after(group, outcome)


def _long(outcome: Outcome) -> bool:
    return outcome.output >= 2


def _range(at: int, limits: tuple[int, ...]) -> str:
    return f"under {limits[0]}" if not at else f"{limits[at - 1]}+"


def _rest(outcome: Outcome) -> str:
    reason = "" if outcome.reason is None else f", {outcome.reason}"
    return reason + (f", priority {outcome.priority}" if outcome.priority else "")
