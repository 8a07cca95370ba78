"""Classes of tokens: by how often they were used, and by how the request that used them last ended."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final, NamedTuple

from costcache.policies.hazard.frequent import Frequent
from costcache.policies.hazard.life_table import ALL, LifeTable
from costcache.records import RequestInfo

__all__ = ["FAMILIES", "SPANS", "Classes", "Ending", "Kind"]

FAMILIES: Final = (ALL, ALL, 1, 2, 3, 4)
"""Of classes: used once, 2, 3 or 4, 5 to 8, 9 to 16 times, and more often. The first tokens to be used so
often, of which nothing is known yet, are like those used half as often."""
SPANS: Final = [2.0**exponent for exponent in range(-1, 15)]
"""Mean reuse intervals at which the classes of tokens used more than once are divided."""
_OUTPUTS: Final = (50, 200, 500)
_PROMPTS: Final = (2_000, 8_000, 32_000)
_REASONS: Final = 6
_PRIORITIES: Final = 2
_LAST_TOKENS: Final = 2
"""Tokens by which endings are told apart: the one that stopped the request is the same for many."""
_LAST: Final = 6
"""Endings of outputs that are told apart."""
_LABELS: Final = 8
"""Labels of hints that are told apart."""
_LONGEST: Final = 64
"""Characters of a label that count."""
_SOON, _LATE = 0, 15
"""Powers of two between which the seconds of a hint are told apart."""
_MOST_ENDINGS: Final = 512
"""Ways to end beyond which no further ending of an output or hint counts. There are 140 without those, and
each may be added without its hint."""
_BITS: Final = 11
_MOST: Final = 768
"""Classes; beyond that, tokens are told apart less finely."""
_MOST_HINTED: Final = 512
"""Classes beyond which none is added for a hint."""


class Ending(NamedTuple):
    """The ending of a request, as far as it counts.

    Attributes:
        output: Range of its output length: 0 for the shortest.
        reason: Its finish reason, None where unknown.
        priority: Its priority, from -2 to 2.
        last: Number of its last tokens among the frequent endings, None for the others.
        hint: The client's hint in words, None without one.
    """

    output: int
    reason: str | None
    priority: int
    last: int | None = None
    hint: str | None = None


class Kind(NamedTuple):
    """Features that make a class, by which another run recognises it.

    Attributes:
        uses: Least number of uses of its members.
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
    """Numbers of classes in a life table, given out as they are met.

    Attributes:
        open: The class of tokens used once, by a request that has not ended.
        by_uses: For each number of bits of the uses but one, the classes of tokens used more than once, by
            the range of the mean interval, see :data:`SPANS`; -1 where none has been met.
        endings: Numbers of the endings met.
    """

    def __init__(self, table: LifeTable) -> None:
        self._table = table
        self._labels: list[str] = []
        self.endings: dict[Ending, int] = {}
        self._fresh: dict[int, int] = {}
        self._after: dict[int, int] = {}
        self._reasons: set[str] = set()
        self._last = Frequent(_LAST)
        self._frequent = Frequent(_LABELS)
        self._hints: dict[str, int] = {}
        self._by_hint: dict[tuple[int, str], int] = {}
        self.open = self._add(0, "used once, by a request that has not ended")
        levels = [[-1] * (len(SPANS) + 1) for _ in range(len(FAMILIES))]
        self.by_uses = levels + levels[-1:] * 64

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, number: int) -> str:
        """A class in words."""
        return self._labels[number]

    def _add(self, family: int, label: str, scale: float = 0.0) -> int:
        self._labels.append(label)
        return self._table.add_class(family, scale)

    def ending(self, info: RequestInfo) -> int:
        """Number of a request's ending, of which only the features that count are kept."""
        reason, priority = info.finish_reason, info.priority
        if reason is not None and reason not in self._reasons:
            if len(self._reasons) < _REASONS:
                self._reasons.add(reason)
            else:
                reason = None
        if priority:
            priority = max(-_PRIORITIES, min(priority, _PRIORITIES))
        output = bisect_right(_OUTPUTS, info.output_tokens)
        last = self._last.number(info.ending[-_LAST_TOKENS:]) if info.ending else None
        hint = self._hint(info)
        if (last is not None or hint is not None) and len(self.endings) >= _MOST_ENDINGS:
            known: int | None = self.endings.get(Ending(output, reason, priority, last, hint))
            if known is not None:
                return known
            last = hint = None
        key = output, reason, priority, last, hint
        number: int | None = self.endings.get(key)  # type: ignore[call-overload] # an equal tuple, made faster
        if number is None:
            number = self.endings[Ending(*key)] = len(self.endings)
        return number

    def _hint(self, info: RequestInfo) -> str | None:
        """The hint of a request in words, as far as hints are told apart."""
        if info.session_ends:
            return "session over"
        returns = info.returns_after
        if returns is None:
            keep = info.keep_seconds
            return None if keep is None else f"to keep for {_seconds(keep)}"
        if isinstance(returns, str):
            returns = returns[:_LONGEST]
            return None if self._frequent.number(returns) is None else f"back after {returns}"
        return f"back in {_seconds(returns)}"

    def fresh(self, new_tokens: int, ending: int) -> int:
        """Class of tokens used once, by a request that brought ``new_tokens`` never-seen tokens."""
        size = bisect_right(_PROMPTS, new_tokens)
        key = size << _BITS | ending
        number = self._fresh.get(key)
        if number is None:
            ended = list(self.endings)[ending]
            if ended.hint is not None:
                number = self._fresh[key] = self._hinted(
                    self.fresh(new_tokens, self._plain(ended)), ended.hint
                )
                return number
            if len(self) >= _MOST:
                return self.open
            label = f"used once, {_range(size, _PROMPTS)} new tokens, {_range(ended.output, _OUTPUTS)} output"
            number = self._fresh[key] = self._add(0, label + _rest(ended))
        return number

    def reused(self, uses: int, interval: float) -> int:
        """Class of tokens used two times or more, ``interval`` apart on average."""
        level = min((uses - 1).bit_length(), len(FAMILIES) - 1)
        span = bisect_right(SPANS, interval)
        number = self.by_uses[level][span]
        if number < 0:
            scale = SPANS[0] * 2.0**span
            times = f"{2 ** (level - 1) + 1}+" if level > 1 else "2"
            label = f"used {times} times, every {scale / 2:g} to {scale:g}"
            number = self.by_uses[level][span] = self._add(level, label, scale * 0.7)
        return number

    def after(self, group: int, ending: int) -> int:
        """Class of tokens of ``group``, one of :meth:`reused`, once the request that used them has ended."""
        key = group << _BITS | ending
        number = self._after.get(key)
        if number is None:
            number = self._after[key] = self._after_new(group, ending)
        return number

    def _after_new(self, group: int, ending: int) -> int:
        ended = list(self.endings)[ending]
        if ended.hint is not None:
            return self._hinted(self.after(group, self._plain(ended)), ended.hint)
        for other, same in self.endings.items():  # only two ranges of outputs are told apart
            known = self._after.get(group << _BITS | same)
            if known is not None and other[1:] == ended[1:] and _long(other) == _long(ended):
                return known
        if len(self) >= _MOST:
            return group
        family, scale = self._table.kin(group)
        label = f"{self._labels[group]}, {'200 or more' if _long(ended) else 'under 200'} output"
        return self._add(family, label + _rest(ended), scale)

    def _plain(self, ended: Ending) -> int:
        """Number of an ending without its hint."""
        plain = ended._replace(hint=None)
        return self.endings.setdefault(plain, len(self.endings))

    def _hinted(self, plain: int, hint: str) -> int:
        """Class of members of a class that came with a hint."""
        number = self._by_hint.get((plain, hint))
        if number is None:
            if len(self) >= _MOST_HINTED:
                return plain
            number = self._table.add_hinted(plain, self._hints.setdefault(hint, len(self._hints)))
            self._by_hint[plain, hint] = number
            self._labels.append(f"{self._labels[plain]}, {hint}")
        return number

    def kinds(self) -> list[Kind]:
        """Features of each class, by number."""
        infos = [
            RequestInfo(
                output_tokens=(0, *_OUTPUTS)[ended.output],
                finish_reason=ended.reason,
                priority=ended.priority,
            )
            for ended in self.endings
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
                size, ending = divmod(fresh[number], 1 << _BITS)
                found.append(Kind(1, None, (0, *_PROMPTS)[size], infos[ending]))
            else:
                found.append(Kind(1, None, None, None))
        return found

    def number_of(self, kind: Kind) -> int:
        """Number of the class that has these features."""
        ending = None if kind.ended is None else self.ending(kind.ended)
        if kind.uses == 1:
            if ending is None:
                return self.open
            return self.fresh(kind.new_tokens or 0, ending)
        group = self.reused(kind.uses, kind.interval or 0.0)
        return group if ending is None else self.after(group, ending)


def _long(ending: Ending) -> bool:
    return ending.output >= 2


def _range(at: int, limits: tuple[int, ...]) -> str:
    return f"under {limits[0]}" if not at else f"{limits[at - 1]}+"


def _seconds(value: float) -> str:
    """Range of a time, in powers of two."""
    exponent = min(max(math.frexp(value)[1], _SOON), _LATE)
    if exponent == _SOON:
        return f"under {2**exponent} s"
    return f"{2 ** (exponent - 1)}{'+' if exponent == _LATE else f' to {2**exponent}'} s"


def _rest(ending: Ending) -> str:
    words = "" if ending.reason is None else f", {ending.reason}"
    if ending.priority:
        words += f", priority {ending.priority}"
    if ending.last is not None:
        words += f", ending {ending.last + 1}"
    return words
