"""The pools of one cache inside SGLang, and the current request.

SGLang has one kind of memory for full-attention KV and, for some models, one for sliding-window KV and one
for states. Each is a :class:`costcache.pool.Pool` with an order and records of its own. A policy that ranks
states gets one order for ``kv`` and ``state`` together; see :mod:`costcache.sglang.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from costcache.policies.keyed import LRU
from costcache.records import Asker, Clock, PoolState, RequestInfo, RequestRecord
from costcache.tiers.shared import SharedForecast

if TYPE_CHECKING:
    from costcache.binding import Binding
    from costcache.eviction import Refused
    from costcache.orders import VictimOrder
    from costcache.pool import Pool
    from costcache.records import Victim

__all__ = ["POOLS", "PoolHost", "Pools"]

POOLS = ("kv", "swa", "state", "host", "host_swa", "host_state")
"""Pools that may have an order: full attention, sliding window and states, and copies of each on the host."""

_SHARED = {"host": "kv", "host_swa": "swa", "host_state": "state"}
"""Both tiers share a request's record: a use of KV on the host counts as its use on the device."""


class PoolHost(Protocol):
    """The owner of one pool's memory."""

    def pool_state(self) -> PoolState:
        """Measure the pool as it is now."""

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Free a victim; see :class:`costcache.pool.Pool`."""


class Pools:
    """The pools of one cache, and the current request.

    Attributes:
        binding: The model, its policy and its plugin.
        trim_step: Tokens that a trim is a multiple of; 0 if victims are evicted whole.
        ranks_states: Whether one order ranks KV and states together.
        clock: Logical time.
        kv: The pool of full-attention KV.
        by_name: All pools.
    """

    __slots__ = ("_hosts", "_shared", "binding", "by_name", "clock", "kv", "ranks_states", "trim_step")

    def __init__(
        self, binding: Binding, trim_step: int, hosts: Callable[[str], PoolHost], names: Iterable[str]
    ) -> None:
        """Make the pools.

        Args:
            binding: The model, its policy and its plugin.
            trim_step: Tokens that a trim is a multiple of; 0 if victims are evicted whole.
            hosts: Gives the owner of a pool's memory, by the pool's name.
            names: Names of the pools, ``"kv"`` among them.
        """
        self.binding = binding
        self.trim_step = trim_step
        self.clock = Clock()
        self._hosts = hosts
        self._shared: dict[str, SharedForecast] = {}
        names = tuple(names)
        self.ranks_states = "state" in names and binding.ranks_states
        state = self._make("state", ranked=False) if self.ranks_states else None
        self.by_name: dict[str, Pool] = {}
        for name in names:
            if name == "state" and state is not None:
                self.by_name[name] = state
            elif name == "kv" and state is not None:
                self.by_name[name] = self._make(name, also=(state,))
            else:
                self.add(name)
        self.kv = self.by_name["kv"]

    def add(self, name: str) -> Pool:
        """Add a pool with its own order."""
        pool = self.by_name[name] = self._make(name)
        return pool

    def _make(self, name: str, *, ranked: bool = True, also: tuple[Pool, ...] = ()) -> Pool:
        host = self._hosts(name)
        return self.binding.pool(
            name,
            host.take,
            unit="states" if name in ("state", "host_state") else "tokens",
            measure=host.pool_state,
            make_order=partial(self._make_order, name),
            ranked=ranked,
            clock=self.clock,
            flat=name != "kv",
            lower_tier=name in _SHARED,
            also=also,
        )

    def _make_order(self, name: str, pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        if name in _SHARED:
            shared = self._shared.get(name)
            if shared is None:
                shared = self._shared[name] = SharedForecast(self.by_name[_SHARED[name]])
            made = shared.make(pools[0])
            if made is not None:
                return made
            if name == "host_state" and self.ranks_states:
                return "lru", LRU()  # the policy ranks states by the KV that they are with
        if name in ("swa", "host_swa"):
            return self.binding.make_window_order(pools)
        return self.binding.make_order(pools)

    def follow(self, name: str) -> None:
        """Rank a pool of the host by the order in force on the device, if its own was made by another one."""
        shared = self._shared.get(name)
        if shared is not None:
            shared.follow(self.by_name[name])

    def reset(self) -> None:
        """Forget all records; logical time continues."""
        for pool in self.by_name.values():
            for record in pool.live.values():
                record.node = None  # type: ignore[attr-defined]  # a PoolRecord
            pool.reset()

    # -- requests ----------------------------------------------------------------------------

    def begin(self, asker: Asker | None = None) -> dict[str, RequestRecord]:
        """Begin a request, which ``asker`` sent; returns its record in each pool."""
        clock = self.clock
        number = clock.begin()
        return {
            name: RequestRecord(number, clock.in_seconds, asker)
            for name in self.by_name
            if name not in _SHARED
        }

    def walk(self, request: dict[str, RequestRecord] | None) -> None:
        """Begin a walk of the tree, on behalf of ``request`` if given."""
        self.clock.accesses += 1
        if len(self.by_name) == 1:
            self.kv.request = None if request is None else request["kv"]
            return
        for name, pool in self.by_name.items():
            pool.request = None if request is None else request[_SHARED.get(name, name)]

    def end_walk(self) -> None:
        """End the walk."""
        if len(self.by_name) == 1:
            self.kv.request = None
            return
        for pool in self.by_name.values():
            pool.request = None

    def finish(self, request: dict[str, RequestRecord], info: RequestInfo) -> None:
        """End a request."""
        for name, pool in self.by_name.items():
            if pool.book is not pool:
                continue  # the pool that has the order reports it
            if name in request:
                pool.finish(request[name], info)
            else:
                pool.finish(_without_end(request[_SHARED[name]]), info)


def _without_end(request: RequestRecord) -> RequestRecord:
    """A copy of a request for another tier's order, without the end, which is not a record of that order."""
    seen = RequestRecord(request.number, request.in_seconds, request.asker)
    seen.matched = request.matched
    return seen
