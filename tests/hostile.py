"""Policies that do what no policy should: the list that every host has to serve on with."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

from costcache import KeyedOrder, NodeRecord, PolicySpec, RadixCache, Victim, VictimOrder, hookimpl
from costcache.plugins import PluginManager
from costcache.policies.keyed import LRU
from costcache.policies.spec import Sight
from costcache.records import Action

__all__ = ["HOSTILE", "KEYS", "falls_back", "plugins_with", "settings_for"]

BUDGET = 0.1
"""Seconds: the time_budget that tests give to the policy that sleeps."""


class Panic(BaseException):
    """As an extension written in Rust raises it."""


class Keyed(KeyedOrder):
    """A policy of one function."""

    def __init__(self, key: Callable[[NodeRecord], Any]) -> None:
        super().__init__()
        self.key = key  # type: ignore[method-assign, assignment] # a function without self


class Acting(LRU):
    """LRU that does something before it names a victim, or in place of it."""

    def __init__(self, act: Callable[[Acting, Victim | None], Any]) -> None:
        super().__init__()
        self.act = act
        self.last: Victim | None = None
        self.kept: list[Any] = []
        self.gone: list[NodeRecord] = []

    def remove(self, record: NodeRecord) -> None:
        super().remove(record)
        self.gone.append(record)

    def next_victim(self, pool: str) -> Any:
        victim = super().next_victim(pool)
        answer = self.act(self, victim)
        self.last = victim
        return victim if answer is KEEP else answer


KEEP = object()


class Hearing(LRU):
    """LRU that does something to each record that it hears of."""

    def __init__(self, act: Callable[[NodeRecord], Any]) -> None:
        super().__init__()
        self.act = act

    def insert(self, record: NodeRecord) -> None:
        super().insert(record)
        self.act(record)

    def touch(self, record: NodeRecord) -> None:
        self.act(record)

    def remove(self, record: NodeRecord) -> None:
        super().remove(record)
        self.act(record)


def _raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


def _recursing(*arguments: Any) -> Any:
    return _recursing(*arguments)


def _writing(field: str, value: Any) -> Callable[[NodeRecord], Any]:
    def write(record: NodeRecord) -> int:
        setattr(record, field, value)
        return 0

    return write


def _sleeping(*_: Any) -> Any:
    time.sleep(1.2 * BUDGET)
    return KEEP


def _foreign() -> Callable[[Acting, Victim | None], Any]:
    other = RadixCache("llama-3-8b", 100, policy="lru")
    other.insert(range(50))
    node = other.match_prefix(range(20)).node
    leaf = next(iter(node.children.values()))
    return lambda order, victim: Victim(leaf)


def _keeping(order: Acting, victim: Victim | None) -> Any:
    order.kept.append(bytearray(1 << 12))
    return KEEP


def _swapped(record: NodeRecord) -> int:
    del record.tokens
    return 0


def _counter() -> Callable[[NodeRecord], int]:
    numbers = itertools.count()
    return lambda record: next(numbers)


KEYS: dict[str, Callable[[], VictimOrder]] = {
    "a key of NaN in a tuple": lambda: Keyed(lambda record: (float("nan"), record.recency)),
    "a key of inf - inf": lambda: Keyed(lambda record: (math.inf - math.inf * bool(record.serial), 0)),
    "a clock as key": lambda: Keyed(lambda record: time.perf_counter_ns()),
    "a random number as key": lambda: Keyed(lambda record: random.random()),
    "a counter as key": lambda: Keyed(_counter()),
    "a key of mixed types": lambda: Keyed(lambda record: str(record.serial) if record.serial % 2 else 1),
    "a key that raises SystemExit": lambda: Keyed(_raising(SystemExit(3))),
    "a key that panics": lambda: Keyed(_raising(Panic("panicked"))),
    "a key that recurses": lambda: Keyed(_recursing),
    "a key that locks": lambda: Keyed(_writing("locks", 1)),
    "a key that shortens": lambda: Keyed(_writing("tokens", 1)),
    "a key that deletes": lambda: Keyed(_swapped),
}
"""Keys: every host can serve them."""
OTHERS: dict[str, Callable[[], VictimOrder]] = {
    "SystemExit for a victim": lambda: Acting(_raising(SystemExit(3))),
    "a panic for a victim": lambda: Acting(_raising(Panic("panicked"))),
    "no memory for a victim": lambda: Acting(_raising(MemoryError())),
    "nothing for a victim": lambda: Acting(lambda order, victim: None),
    "a string for a victim": lambda: Acting(lambda order, victim: "node"),
    "the victim before": lambda: Acting(lambda order, victim: order.last or KEEP),
    "a victim that is gone": lambda: Acting(
        lambda order, victim: Victim(order.gone[0]) if order.gone else KEEP
    ),
    "a stranger for a victim": lambda: Acting(
        lambda order, victim: Victim(NodeRecord(3, NodeRecord(1, None, 0, 0), 5, 0))
    ),
    "a node of another cache for a victim": lambda: Acting(_foreign()),
    "the root for a victim": lambda: Acting(
        lambda order, victim: (victim and Victim(_top(victim.record))) or KEEP
    ),
    "a state for a victim": lambda: Acting(
        lambda order, victim: victim and victim._replace(action=Action.TOMBSTONE)
    ),
    "an event that raises SystemExit": lambda: Hearing(_raising(SystemExit(3))),
    "an event that panics": lambda: Hearing(_raising(Panic("panicked"))),
    "an event that unlocks": lambda: Hearing(_writing("locks", -1)),
    "an event that renumbers": lambda: Hearing(_writing("serial", -7)),
    "an event that orphans": lambda: Hearing(_writing("parent", None)),
    "an event that uses words": lambda: Hearing(_writing("recency", "late")),
    "an event that counts in words": lambda: Hearing(_writing("uses", "many")),
    "sleep before a victim": lambda: Acting(_sleeping),
}
HARMLESS: dict[str, Callable[[], VictimOrder]] = {
    "a memory of everything": lambda: Acting(_keeping),
    "a note on each record": lambda: Hearing(_writing("data", object())),
    "no tokens of a victim": lambda: Acting(lambda order, victim: victim and victim._replace(tokens=0)),
    "one key for all": lambda: Keyed(lambda record: 0),
}
"""These may stay in force."""
HOSTILE = KEYS | OTHERS | HARMLESS

KEY_AT_ONCE = frozenset(KEYS) - {
    "a key of NaN in a tuple",
    "a key of inf - inf",
    "a clock as key",
    "a random number as key",
    "a counter as key",
}
"""Keys that fail when they are first asked for; the others fail once a decision has moved some entries."""


def _top(record: NodeRecord) -> NodeRecord:
    while record.parent is not None:
        record = record.parent
    return record


def plugins_with(name: str) -> PluginManager:
    """Plugins, of which one offers the policy of this name in :data:`HOSTILE` as ``hostile``."""

    class Plugin:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            sees: frozenset[Sight] = frozenset({"leaves" if name in KEYS else "nodes"})
            return {
                "hostile": PolicySpec(lambda cost, pools, settings: HOSTILE[name](), "Hostile.", sees=sees)
            }

    plugins = PluginManager()
    plugins.register(Plugin(), "hostile")
    return plugins


def settings_for(name: str) -> dict[str, Any]:
    """Settings under which a policy of the list has its effect."""
    return {"time_budget": BUDGET} if name == "sleep before a victim" else {}


def falls_back(name: str) -> bool | None:
    """Whether a policy of the list is dropped for LRU under some pressure; None if it may be."""
    if name in HARMLESS:
        return False
    if name == "a state for a victim":
        return None  # some hosts take the leaf that it is on
    return True if name not in KEYS or name in KEY_AT_ONCE else None
