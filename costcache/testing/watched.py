"""Watches an order: says at the event which part of the contract of orders was broken, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from costcache.model import ModelSpec
from costcache.orders import VictimOrder, overridden
from costcache.plugins import PluginManager
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, RequestInfo, RequestRecord, Victim
from costcache.settings import Settings
from costcache.watch import FACTS

__all__ = ["BrokenContractError", "Watched", "watching"]


class BrokenContractError(AssertionError):
    """An order broke its contract."""


class Watched(VictimOrder):
    """Passes every event on to an order and checks what it does.

    An order may write to ``record.data`` and to nothing else of a record. A victim is a cached, unlocked leaf
    that was not named before in the same eviction and left alone; None means that there is none.

    Attributes:
        order: The order.
        broken: The first exception, its own or that of a check; the cache goes on under LRU after it.
    """

    def __init__(self, order: VictimOrder) -> None:
        """Watch an order that has seen no event yet."""
        self.order = order
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
        return None


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
        made.append(Watched(spec.make_order(cost, pools, settings)))
        return made[-1]

    manager = PluginManager()
    manager.register(
        _Offer("watched", replace(spec, make_order=make, sees=frozenset({"nodes"}), explains=False)), "watch"
    )
    return manager, made
