"""Watches an order: says at the event which part of the contract of orders was broken, and how."""

from __future__ import annotations

import contextlib
import copy
import reprlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from costcache.hookspecs import PROJECT
from costcache.model import ModelSpec
from costcache.orders import KeyedOrder, VictimOrder, overridden
from costcache.plugins import PluginManager
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, RequestInfo, RequestRecord, Victim
from costcache.settings import Settings
from costcache.watch import FACTS

__all__ = ["BrokenContractError", "Watched", "nothing_shared", "watching"]


class BrokenContractError(AssertionError):
    """An order broke its contract."""


class Watched(VictimOrder):
    """Passes every event on to an order and checks what it does.

    An order may write to ``record.data`` and to nothing else of a record. A victim is a cached, unlocked leaf
    that was not named before in the same eviction and left alone; None means that there is none. Of a
    :class:`KeyedOrder` it is the one with the lowest key; if that sees leaves alone, a node of other tokens
    would have the same key.

    Attributes:
        order: The order.
        broken: The first exception, its own or that of a check; the cache goes on under LRU after it.
    """

    def __init__(self, order: VictimOrder, *, leaves_only: bool = False) -> None:
        """Watch an order that has seen no event yet; ``leaves_only`` says that it declares to see no more."""
        self.order = order
        self._leaves_only = leaves_only
        self.broken: Exception | None = None
        self._cached: dict[int, NodeRecord] = {}
        self._named: dict[int, NodeRecord] = {}
        if overridden(order, "merge") is not None:  # nodes are merged only under an order that takes this
            setattr(self, "merge", self._merged)  # noqa: B010 # a method, to mypy

    def _send(self, event: str, record: NodeRecord, *arguments: Any) -> None:
        try:
            self._checked(event, record, *arguments)
        except Exception as error:
            self.broken = self.broken or error
            raise

    def _checked(self, event: str, record: NodeRecord, *arguments: Any) -> None:
        handler = overridden(self.order, event)
        if handler is None:
            return
        before = [getattr(record, name) for name in FACTS]
        handler(record, *arguments)
        for name, value in zip(FACTS, before, strict=True):
            if getattr(record, name) is not value and getattr(record, name) != value:
                raise BrokenContractError(
                    f"{type(self.order).__name__}.{event} changed {name} of a record from {value!r} to "
                    f"{getattr(record, name)!r}: an order writes to record.data only"
                )

    def insert(self, record: NodeRecord) -> None:
        self._cached[record.serial] = record
        self._send("insert", record)

    def use(self, record: NodeRecord) -> None:
        self._send("use", record)

    def touch(self, record: NodeRecord) -> None:
        self._send("touch", record)

    def refresh(self, record: NodeRecord) -> None:
        self._send("refresh", record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self._cached[prefix.serial] = prefix
        self._send("split", prefix, tail)

    def _merged(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        del self._cached[prefix.serial]
        self._send("merge", prefix, tail)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._named.pop(record.serial, None)
        self._send("trim", record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._named.pop(record.serial, None)
        del self._cached[record.serial]
        self._send("remove", record)

    def unlock(self, record: NodeRecord) -> None:
        self._send("unlock", record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self.order.finish(request, info)

    def defer(self, victim: Victim) -> None:
        self._named.pop(victim.record.serial, None)
        self.order.defer(victim)

    def load(self, records: Iterable[NodeRecord]) -> None:
        loaded = list(records)
        self._cached = {record.serial: record for record in loaded}
        self._named.clear()
        self.order.load(loaded)

    def next_victim(self, pool: str) -> Victim | None:
        try:
            return self._checked_victim(pool)
        except Exception as error:
            self.broken = self.broken or error
            raise

    def _checked_victim(self, pool: str) -> Victim | None:
        victim: Any = self.order.next_victim(pool)
        wrong = self._fault(victim)
        if wrong is not None:
            raise BrokenContractError(f"{type(self.order).__name__}.next_victim {wrong}")
        if victim is None:
            return None
        self._named[victim.record.serial] = victim.record
        return Victim(*victim)

    def _fault(self, victim: Any) -> str | None:
        """Say what is wrong with an answer; None if nothing is."""
        if victim is None:
            for record in self._cached.values():
                if record.is_evictable and record.serial not in self._named:
                    return f"named no victim although {record!r} is an unlocked leaf"
            return None
        if not isinstance(victim, Victim) or not isinstance(victim.record, NodeRecord):
            return f"returned {victim!r}, not a Victim of a record"
        record, tokens = victim.record, victim.tokens
        if self._cached.get(record.serial) is not record:
            return f"named {record!r}, which has left the cache"
        if record.live_children:
            return f"named {record!r}, which is not a leaf"
        if record.locks:
            return f"named {record!r}, which is locked"
        if record.serial in self._named:
            return f"named {record!r} again, though it could not be evicted this time"
        if tokens is not None and not 0 < tokens <= record.tokens:
            return f"offered {tokens} of the {record.tokens} tokens of {record!r}"
        return self._lower(record) or self._seen(record)

    def _lower(self, named: NodeRecord) -> str | None:
        """Whether a leaf has a lower key than the victim of an order that leaves the queue to its base."""
        order = self.order
        if not isinstance(order, KeyedOrder) or type(order).next_victim is not KeyedOrder.next_victim:
            return None
        lowest = (order.key(named), named.serial)
        for record in self._cached.values():
            if record.is_evictable and record.serial not in self._named:
                key = order.key(record)
                if (key, record.serial) < lowest:
                    return (
                        f"named {named!r} of the key {reprlib.repr(lowest[0])}, though {record!r} has the "
                        f"lower key {reprlib.repr(key)}: rises is {order.rises}, and its key fell unnoticed"
                    )
        return None

    def _seen(self, record: NodeRecord) -> str | None:
        """Whether the key of an order that sees leaves alone depends on what else it can read of a node."""
        order = self.order
        if not self._leaves_only or not isinstance(order, KeyedOrder):
            return None
        twin = NodeRecord(record.serial, record.parent, record.tokens + 1, record.depth + 1)
        twin.inherit(record)
        twin.data, twin.live_children = record.data, record.live_children
        twin.made_by = twin.used_by = None
        if order.key(twin) == order.key(record):
            return None
        return (
            f"named {record!r} by a key that depends on its tokens, its depth or who asks, though it "
            "declares that it sees leaves alone"
        )


@contextlib.contextmanager
def nothing_shared(one: VictimOrder, other: VictimOrder) -> Iterator[None]:
    """Check that the orders of two caches are two, and that their classes learn nothing meanwhile.

    Raises:
        BrokenContractError: They are one, or a container that is an attribute of a class changed.
    """
    if one is other:
        raise BrokenContractError("make_order returned one order for two caches")
    own = getattr(one, "keyed", one)  # a keyed order that ranks states has another around it
    kept = {
        f"{kind.__name__}.{name}": (value, copy.copy(value))
        for kind in type(own).__mro__
        if kind.__module__.partition(".")[0] != PROJECT
        for name, value in vars(kind).items()
        if isinstance(value, dict | list | set | deque) and not name.startswith("__")
    }
    yield
    for where, (now, before) in kept.items():
        if now != before:
            raise BrokenContractError(f"{where} changed, which the orders of all caches share")


class _Offer:
    """A plugin that offers one policy."""

    def __init__(self, name: str, spec: PolicySpec) -> None:
        from costcache.hookspecs import hookimpl

        self.policies = hookimpl(lambda: {name: spec})


def watching(plugins: PluginManager, policy: str, model: ModelSpec) -> tuple[PluginManager, list[Watched]]:
    """The built-in plugins, and ``watched``: a policy of ``plugins`` under watch, for a model without states.

    Args:
        plugins: Where the policy is offered.
        policy: Its name.
        model: The model that it is to serve.

    Returns:
        The plugins, and the list of the watched orders, one for each cache once it is made.
    """
    _, spec = plugins.policy_spec(Settings(policy=policy), plugins.match(model))
    made: list[Watched] = []

    def make(cost: Any, pools: Any, settings: Any) -> VictimOrder:
        made.append(Watched(spec.make_order(cost, pools, settings), leaves_only=spec.leaves_only))
        return made[-1]

    manager = PluginManager()
    manager.register(
        _Offer("watched", replace(spec, make_order=make, sees=frozenset({"nodes"}), explains=False)), "watch"
    )
    return manager, made
