"""The pools of one cache, and the request that works on them.

SGLang keeps one pool for full-attention KV and, for some models, one for sliding-window KV and one for
states. Each has an order of its own and records of its own. Where the policy knows states, one order serves
``kv`` and ``state`` together; see :mod:`costcache.sglang.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from costcache.eviction import EvictionHost
from costcache.policies.states import StateOrder
from costcache.records import Clock, PoolState, RequestInfo, RequestRecord
from costcache.sglang.pool import PoolEvents
from costcache.sglang.states import StatePool

if TYPE_CHECKING:
    from costcache.sglang.plan import Plan

__all__ = ["POOLS", "Pools"]

POOLS = ("kv", "swa", "state", "host")
"""Pools that may have an order: full attention, sliding window, states, and full attention on the host."""


_SHARED = {"host": "kv"}
"""KV is one thing on two tiers: a request that used it on the host has used it when it is on the device."""


class Pools:
    """The pools of one cache, and the request that works on them.

    Attributes:
        clock: Logical time.
        kv: The pool of full-attention KV.
        by_name: All pools that have an order.
        plan: What was decided for this cache.
    """

    __slots__ = ("_hosts", "_names", "by_name", "clock", "kv", "plan")

    def __init__(self, plan: Plan, hosts: Callable[[str], EvictionHost], names: Iterable[str]) -> None:
        """Make the pools.

        Args:
            plan: What was decided for this cache.
            hosts: Gives what tells the state of a pool and frees its victims, by the pool's name.
            names: Names of the pools, ``"kv"`` among them.
        """
        self.plan = plan
        self.clock = Clock()
        self._hosts = hosts
        self._names = names = tuple(names)
        self.by_name: dict[str, PoolEvents] = {}
        for name in names:
            self.add(name)
        self.kv = self.by_name["kv"]

    def add(self, name: str) -> PoolEvents:
        """Give one more pool an order.

        The host tier keeps no headroom: nothing allocates from it without asking for room first.
        """
        plan, host, tier = self.plan, self._hosts(name), name == "host"
        free_target, adjust = (_nothing, _unchanged) if tier else (plan.free_target, plan.adjust)
        plugin = plan.architecture.name
        kv = self.by_name.get("kv")
        # An order of KV may be one of states as well; it is told of both pools.
        ordered = [name, "state"] if name == "kv" and "state" in self._names else [name]
        pool: PoolEvents
        if name == "state" and kv is not None and isinstance(kv.guard.order, StateOrder):
            pool = StatePool(kv, host, free_target, adjust, plugin=plugin)
        else:
            pool = PoolEvents(
                name,
                self.clock,
                host,
                lambda: plan.make_order(tuple(self._hosts(pool).pool_state(pool) for pool in ordered)),
                free_target,
                adjust,
                plugin=plugin,
                unit_bytes=plan.bytes_of(name),
            )
        self.by_name[name] = pool
        return pool

    def reset(self) -> None:
        """Forget all records; logical time goes on."""
        for pool in self.by_name.values():
            pool.reset()

    # -- requests ----------------------------------------------------------------------------

    def begin(self) -> dict[str, RequestRecord]:
        """A request begins; what each pool remembers of it."""
        clock = self.clock
        number = clock.begin()
        names = (name for name in self.by_name if name != "host")
        return {name: RequestRecord(number, clock.now, clock.in_seconds) for name in names}

    def walk(self, request: dict[str, RequestRecord] | None) -> None:
        """A walk of the tree begins, on behalf of ``request`` or of nobody."""
        self.clock.accesses += 1
        if len(self.by_name) == 1:
            self.kv.request = None if request is None else request["kv"]
            return
        for name, pool in self.by_name.items():
            pool.request = None if request is None else request[_SHARED.get(name, name)]

    def rest(self) -> None:
        """The walk is over."""
        if len(self.by_name) == 1:
            self.kv.request = None
            return
        for pool in self.by_name.values():
            pool.request = None

    def finish(self, request: dict[str, RequestRecord], info: RequestInfo) -> None:
        """A request ended."""
        for name, pool in self.by_name.items():
            if name in request:
                pool.finish(request[name], info)
            else:
                pool.finish(_elsewhere(request[_SHARED[name]]), info)


def _elsewhere(request: RequestRecord) -> RequestRecord:
    """A request as another tier's order knows it: what it made has records of another order."""
    seen = RequestRecord(request.number, request.began, request.in_seconds)
    seen.matched = request.matched
    return seen


def _nothing(pool: PoolState) -> float:  # noqa: ARG001  # the signature of a free target
    return 0.0


def _unchanged(pool: PoolState, requested: int) -> int:  # noqa: ARG001  # as above
    return requested
