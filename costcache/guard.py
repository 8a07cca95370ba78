"""Keeps plugins from hurting the cache: checks every answer of an order or a hook."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import reprlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from costcache.errors import one_line
from costcache.eviction import EvictionCounters
from costcache.orders import VictimOrder
from costcache.policies.keyed import LRU
from costcache.policies.states import StateOrder, state_lru
from costcache.records import Action, NodeRecord, PoolState, Victim
from costcache.watch import Watch

__all__ = ["HookGuard", "OrderGuard"]

logger = logging.getLogger("costcache")


class OrderGuard:
    """An order that is replaced by LRU over the same records once it raises or gives an invalid answer.

    Every rank feeds its order the same events, so every rank drops it at the same point.

    Attributes:
        name: Name of the policy in force; ``"lru"`` after a fallback.
        order: The order in force.
        fallbacks: Orders dropped: 0 or 1.
        watch: Watches the order in force; None for one of costcache's own.
    """

    __slots__ = ("_listen", "_records", "fallbacks", "name", "order", "watch")

    def __init__(
        self,
        name: str,
        order: VictimOrder,
        records: Callable[[], Iterable[NodeRecord]],
        listen: Callable[[VictimOrder], None],
        watch: Watch | None = None,
    ) -> None:
        """Guard ``order``.

        Args:
            name: The policy's name, for messages.
            order: The order.
            records: Gives the records that the cache has, in order of creation.
            listen: Called with the order that takes over, to send it all further events.
            watch: Watches the order.
        """
        self.name = name
        self.order = order
        self.fallbacks = 0
        self.watch = watch
        self._records = records
        self._listen = listen

    def next_victim(self, pool: str) -> Victim | None:
        """Ask the order for a victim; if it raises or its answer is invalid, drop it and ask LRU."""
        if not self.fallbacks:
            try:
                watch = self.watch
                if watch is None:
                    answer: Any = self.order.next_victim(pool)
                else:
                    began = time.perf_counter()
                    answer = self.order.next_victim(pool)
                    watch.took(time.perf_counter() - began)
                if answer is None:
                    return None
                if isinstance(answer, Victim):
                    fields: tuple[Any, ...] = answer
                    record, action, tokens = fields
                    if isinstance(record, NodeRecord) and isinstance(action, Action):
                        if tokens is None or type(tokens) is int:
                            return answer
                        if not isinstance(tokens, bool) and hasattr(tokens, "__index__"):  # numpy's integers
                            return answer._replace(tokens=operator.index(tokens))
                self.drop(
                    f"next_victim returned {reprlib.repr(answer)}, not the Victim of a record "
                    "with an Action and, as its tokens, an int or None"
                )
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a plugin's SystemExit ends no server
                self.drop("next_victim raised", error)
        return self.order.next_victim(pool)

    def drop(self, why: str, error: BaseException | None = None) -> None:
        """Replace the order by LRU until the pool is reset; logged with the traceback, if there is one."""
        logger.error(
            "policy %r is dropped for 'lru' until the cache is reset: %s%s",
            self.name,
            why,
            "" if error is None else f" {one_line(error)}",
            exc_info=error,
        )
        self.fallbacks += 1
        self.name = "lru"
        self.watch = None
        self.order = state_lru() if isinstance(self.order, StateOrder) else LRU()
        self._listen(self.order)
        self.order.load(self._records())


class HookGuard:
    """The two eviction hooks of an architecture plugin, bound to its model and settings.

    Attributes:
        counters: Counts of the pool; answers that were replaced are counted here.
    """

    __slots__ = ("_adjust", "_free_target", "_plugin", "_reported", "counters")

    def __init__(
        self,
        plugin: str,
        free_target: Callable[[PoolState], Any] | None = None,
        adjust: Callable[[PoolState, int], Any] | None = None,
    ) -> None:
        """Guard a plugin's hooks.

        Args:
            plugin: The plugin's name, for messages.
            free_target: Its free target; none by default, which keeps no headroom.
            adjust: Its adjusted count; the request itself by default.
        """
        self.counters = EvictionCounters()
        self._plugin = plugin
        self._free_target = free_target
        self._adjust = adjust
        self._reported: set[str] = set()

    def headroom(self, state: PoolState) -> int:
        """Units that the free target leaves free in a pool of this state."""
        if self._free_target is None:
            return 0
        try:
            share = self._free_target(state)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._replaced("free_target", "raised", "0", error)
            return 0
        if isinstance(share, (float, int)) and not share:
            return 0  # the usual answer
        if isinstance(share, float) and 0.0 <= (plain := float(share)) < 1.0:  # numpy's are floats, too
            return math.ceil(plain * state.capacity)
        self._replaced(
            "free_target", f"answered {reprlib.repr(share)}, not a share from 0.0 to below 1.0", "0"
        )
        return 0

    def adjusted(self, state: PoolState, requested: int) -> int:
        """Units to evict, in whole pages: the plugin's count, or ``requested`` if that is wrong."""
        if state.page_size > 1:
            requested = state.in_pages(requested)
        if self._adjust is None:
            return requested
        try:
            count = self._adjust(state, requested)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._replaced("adjust_eviction_count", "raised", "the request itself", error)
            return requested
        if type(count) is not int:
            with contextlib.suppress(Exception):  # numpy's integers are welcome, True is not
                count = -1 if isinstance(count, bool) else operator.index(count)
        if type(count) is int and (count == requested or requested < count <= state.capacity):
            return count if count == requested else state.in_pages(count)
        self._replaced(
            "adjust_eviction_count",
            f"answered {reprlib.repr(count)}, not an int from {requested} (requested) "
            f"to {state.capacity} (capacity)",
            "the request itself",
        )
        return requested

    def _replaced(self, hook: str, what: str, by: str, error: BaseException | None = None) -> None:
        self.counters.clamped += 1
        if hook not in self._reported:
            self._reported.add(hook)
            logger.error(
                "plugin %r: %s %s; it counts as %s (logged once)",
                self._plugin,
                hook,
                what,
                by,
                exc_info=error,
            )
