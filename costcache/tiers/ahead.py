"""Room on the device that is made before it is needed, so that no request waits for what is copied down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from costcache.tiers.device import DeviceTier
    from costcache.tiers.down import Down

__all__ = ["MOST_AHEAD", "NEED_KEEPS", "Ahead"]

NEED_KEEPS: Final = 0.98
"""Share of its size that an allocation keeps at each request after it."""
MOST_AHEAD: Final = 10
"""Room is made ahead of need in one part of the device in so many, at most."""


class Ahead:
    """Keeps about as much of the device free as the largest allocation of late took.

    It is not the free target of the plugin, to which an eviction frees *beyond* a shortfall: here nobody is
    short yet, the room wanted follows the requests, and what nobody would wait for is left alone. That is a
    victim which is below already: a request may want it still. It counts as room, if that is enough; one
    that is not is evicted, since the next allocation of that size could not spare it. Nor is anything evicted
    that could not be copied now, since as much is under way as may be: it would be lost, and for nobody.

    All of it follows from counts that every rank has: allocations, requests, the trees, and copies that all
    ranks have finished or not collected yet.
    """

    def __init__(self, device: DeviceTier, down: Down) -> None:
        """Make room on a device whose evictions are copied by ``down``."""
        self._device = device
        self._down = down
        self._need = 0.0
        self._requests = 0
        self._left: tuple[int, int] | None = None  # accesses and free tokens, when a victim was left alone

    @property
    def room(self) -> int:
        """Tokens to keep free, whole pages."""
        page = self._device.page_size
        return min(-(-int(self._need) // page), self._device.pool.capacity // MOST_AHEAD // page) * page

    def make(self) -> int:
        """Make room; returns the tokens that were evicted for it."""
        device = self._device
        pool, clock = device.pool, device.pool.clock
        self._need = max(self._need * NEED_KEEPS ** (clock.requests - self._requests), float(device.largest))
        self._requests, device.largest = clock.requests, 0
        freed, room = 0, self.room
        while (missing := room - pool.free) > 0 and self._left != (clock.accesses, pool.free):
            if not pool.evictable:
                break  # an order that named no victim would be checked by a look at all records, at each step
            victim = pool.next_victim({})
            if victim is None:
                break
            pool.defer(victim)
            node: Any = victim.record
            tokens = min(node.tokens, victim.at_most(missing))
            to_copy = self._down.left_to_copy(node)
            if to_copy is None:
                if tokens >= missing:
                    self._left = clock.accesses, pool.free
                    break
            elif not self._down.may_copy(node, to_copy):
                break
            got = device.cache.evict(tokens, watermark=False).freed
            if not got:
                break
            freed += got
        return freed
