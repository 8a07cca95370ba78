"""Watches the code of orders that costcache did not write: what it changes, and how long it takes.

A record is the host's own: an order that wrote a wrong number of tokens or locks into one would end the
server later, or free what is in use. So after each call the facts of its records are compared with those
before it; what was changed is put back, and the order is dropped. This costs about a microsecond a call, and
nothing for the policies that come with costcache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

from costcache.errors import PluginError
from costcache.orders import KeyedOrder, VictimOrder, overridden
from costcache.policies.states import StateOrder
from costcache.records import NodeRecord, RequestRecord, Victim

if TYPE_CHECKING:
    from costcache.eviction import EvictionCounters

__all__ = ["FACTS", "Watch", "is_ours"]

logger = logging.getLogger("costcache")

MOST_SLOW = 3
"""Slow decisions after which an order is dropped."""
WITHIN = 1000
"""Decisions within which these must be: a machine that stands still now and then drops no order."""
LOOKS = 4096
"""Evictions and walks between two looks at what an order keeps."""
MANY = 1_000_000
"""Entries that an order may keep before the log says so, again at each doubling."""

_OURS = __name__.partition(".")[0]
_AUTHORS = ("keyed", "leaves")
"""Attributes under which orders of costcache have the order that they rank by."""
_COUNT = 2
FACTS = (
    "serial",
    "parent",
    "tokens",
    "depth",
    "uses",
    "last_use",
    "recency",
    "created",
    "creator",
    "live_children",
    "pins",
    "locks",
    "priority",
    "made_by",
    "used_by",
    "state",
)
"""Fields of a record that an order may read only."""
_REQUEST_FACTS = ("number", "end", "counted", "matched", "in_seconds", "oversized")
_END = _REQUEST_FACTS.index("end")
_facts_of = operator.attrgetter(*FACTS)
_request_facts_of = operator.attrgetter(*_REQUEST_FACTS)


def is_ours(order: VictimOrder) -> bool:
    """Whether an order is of costcache, and the one whose code it ranks by, if there is one."""
    return all(type(each).__module__.partition(".")[0] == _OURS for each in _with_author(order))


def _with_author(order: VictimOrder) -> tuple[VictimOrder, ...]:
    """An order, and the one that it ranks by: an order of costcache for states or windows has that."""
    if type(order).__module__.partition(".")[0] == _OURS:
        for name in _AUTHORS:
            author = getattr(order, name, None)
            if isinstance(author, VictimOrder):
                return order, author
    return (order,)


class Watch:
    """Watches one order.

    Attributes:
        name: The policy's name, for messages.
        spent: Seconds in the order's code since the last :meth:`start`.
    """

    def __init__(
        self, name: str, order: VictimOrder, budget: float, drops: bool, counters: EvictionCounters
    ) -> None:
        """Watch an order.

        Args:
            name: The policy's name.
            order: The order.
            budget: Seconds that its code may take for one decision, or for one walk of the tree.
            drops: Whether an order that is often slower is dropped. Ranks that must decide alike do not: the
                time differs between them.
            counters: Where slow decisions are counted.
        """
        self.name = name
        self.spent = 0.0
        self._order = order
        self._budget = budget
        self._drops = drops
        self._counters = counters
        self._started = 0
        self._many = MANY
        self._slow: list[int] = []

    @property
    def entries(self) -> int:
        """Entries in the collections that are attributes of the order."""
        entries = 0
        for each in getattr(self._order, "__dict__", {}).values():
            if isinstance(each, Sized) and not isinstance(each, str | bytes):
                with contextlib.suppress(Exception):  # an array without a length, say
                    entries += len(each)
        return entries

    def start(self) -> None:
        """Begin an eviction, or a walk of the tree."""
        self._started += 1
        self.spent = 0.0
        if not self._started % LOOKS:
            entries = self.entries
            if entries >= self._many:
                self._many = 2 * entries
                logger.warning(
                    "policy %r keeps %s entries after %s evictions and walks: if they grow without end, they "
                    "take the server's memory (counted as policy_entries)",
                    self.name,
                    f"{entries:,}",
                    f"{self._started:,}",
                )

    def took(self, seconds: float) -> None:
        """Count time in the order's code.

        Raises:
            PluginError: It was too slow, too often.
        """
        self.spent += seconds
        if self.spent <= self._budget:
            return
        spent, self.spent = self.spent, 0.0
        self._counters.slow += 1
        words = f"it took {spent:.2f} s for one decision, and time_budget is {self._budget:g} s"
        if self._counters.slow == 1:
            logger.warning(
                "policy %r is slow: %s (logged once; counted as slow_decisions_total)", self.name, words
            )
        self._slow = [at for at in self._slow if self._started - at < WITHIN] + [self._started]
        if self._drops and len(self._slow) >= MOST_SLOW:
            raise PluginError(f"{words}, {MOST_SLOW} times: the policy stalls the server")

    def watched(self, order: VictimOrder, event: str) -> Callable[..., None] | None:
        """The order's handler of an event, watched; None if it has none."""
        handler = overridden(order, event)
        return None if handler is None else functools.partial(self._call, handler)

    def seal(self) -> None:
        """Watch what the order's key does to a record, too."""
        for order in _with_author(self._order):
            name = "key" if isinstance(order, KeyedOrder) else "score"
            if isinstance(order, KeyedOrder | StateOrder):
                with contextlib.suppress(AttributeError):  # a class without a __dict__
                    setattr(order, name, functools.partial(_unchanged, getattr(order, name)))

    def _call(self, handler: Callable[..., None], *arguments: Any) -> None:
        began = time.perf_counter()
        before = [_facts(each) for each in arguments]
        try:
            handler(*arguments)
        except BaseException:
            _put_back(arguments, before)
            raise
        _put_back(arguments, before)
        self.took(time.perf_counter() - began)


def _unchanged(key: Callable[[NodeRecord], Any], record: NodeRecord) -> Any:
    before = _facts_of(record)
    try:
        answer = key(record)
    except BaseException:
        _check(record, FACTS, _facts_of, before)
        raise
    _check(record, FACTS, _facts_of, before)
    return answer


def _facts(argument: Any) -> Any:
    if isinstance(argument, NodeRecord):
        return _facts_of(argument)
    if isinstance(argument, Victim):
        return _facts_of(argument.record)
    if isinstance(argument, RequestRecord):
        end = argument.end
        return _request_facts_of(argument), None if end is None else _facts_of(end)
    return None


def _put_back(arguments: tuple[Any, ...], before: list[Any]) -> None:
    for argument, facts in zip(arguments, before, strict=True):
        if isinstance(argument, NodeRecord):
            _check(argument, FACTS, _facts_of, facts)
        elif isinstance(argument, Victim):
            _check(argument.record, FACTS, _facts_of, facts)
        elif isinstance(argument, RequestRecord):
            own, last = facts
            if last is not None:
                _check(own[_END], FACTS, _facts_of, last)
            _check(argument, _REQUEST_FACTS, _request_facts_of, own)


def _check(holder: Any, names: tuple[str, ...], read: Callable[[Any], Any], before: tuple[Any, ...]) -> None:
    """Put back the facts that were changed.

    Raises:
        PluginError: Some were.
    """
    try:
        now = read(holder)
        if now == before and type(now[_COUNT]) is type(before[_COUNT]):  # a float that equals a count is none
            return
    except Exception:  # a fact was deleted, or cannot be compared
        logger.debug("a record's facts cannot be compared", exc_info=True)
    for name, fact in zip(names, before, strict=True):
        setattr(holder, name, fact)
    raise PluginError(f"it wrote to {holder!r}, which has been put back: an order writes record.data only")
