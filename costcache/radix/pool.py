"""The slot pool: which slot is free, held by a running request, or cached."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["SlotPool"]

FREE = -1
HELD = -2


class SlotPool:
    """``capacity`` slots, one per token, given out in whole pages.

    Callers either let the pool choose slots (:meth:`allocate`) or name slots of their own choice when
    they insert them; free slots so named leave the pool's free ones.

    Attributes:
        capacity: Slots in the pool: whole pages of the size asked for.
        free: Slots that nobody uses.
        cached: Slots in the cache.
    """

    def __init__(self, capacity: int, page_size: int = 1) -> None:
        self.capacity = capacity // page_size * page_size
        self.page_size = page_size
        # FREE, HELD or, for a cached slot, the position that it was cached at: any int from 0 up.
        self._state: NDArray[np.int32] = np.empty(self.capacity, np.int32)
        self._positions = np.arange(self.capacity, dtype=np.int32)
        # Slots in a row are kept as a part of this one array: nothing to copy, and nobody can write to it.
        self._all: NDArray[np.int64] = np.arange(self.capacity)
        self._all.flags.writeable = False
        self._offsets = np.arange(page_size)
        self.free = self.capacity
        self.cached = 0
        # A stack of wholly free pages. It is stale once callers name free slots themselves or free
        # parts of pages; it is made afresh when slots are next allocated.
        self._stack: NDArray[np.int64]
        self._top = 0
        self._stale = False
        self.reset()

    @property
    def held(self) -> int:
        """Slots that requests own outside the cache."""
        return self.capacity - self.free - self.cached

    def reset(self) -> None:
        """Make every slot free."""
        self._state.fill(FREE)
        self.free = self.capacity
        self.cached = 0
        self._sweep()

    def allocate(self, tokens: int) -> NDArray[np.int64] | None:
        """Take slots for ``tokens`` tokens, rounded up to whole pages.

        Returns:
            int64 of shape [tokens rounded up], pages in one piece each; None when too few pages are
            wholly free.
        """
        pages = -(-tokens // self.page_size)
        if self._stale:
            self._sweep()
        if pages > self._top:
            return None
        first = self._stack[self._top - pages : self._top][::-1] * self.page_size
        self._top -= pages
        slots = (first[:, None] + self._offsets).reshape(-1) if self.page_size > 1 else first
        self._state[slots] = HELD
        self.free -= slots.size
        return slots

    def cache(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move held or free slots into the cache.

        Returns:
            The same slots in an array that the caller of this method does not share.

        Raises:
            ValueError: A slot is out of range, cached already, or named twice. Nothing changes.
        """
        size, state = slots.size, self._state
        if not size:
            return slots.copy()
        first = int(slots[0])
        if (
            0 <= first <= self.capacity - size
            and int(slots[-1]) == first + size - 1
            and bool((slots[1:] > slots[:-1]).all())
        ):
            own, row = self._all[first : first + size], state[first : first + size]
            highest = row.max()
            if highest < 0:
                self._count(row, highest)
                row.fill(0)
                return own
        if size > self.capacity:
            raise ValueError(f"there are {size} slots, and the pool has {self.capacity}")
        try:
            before = state.take(slots)  # faster than an index; checks the upper end, and counts from the end
        except IndexError:
            before = None
        if before is None or slots.min() < 0:
            wrong = slots[(slots < 0) | (slots >= self.capacity)][0]
            raise ValueError(f"slot {wrong} is not in the pool: slots go from 0 to {self.capacity - 1}")
        highest = before.max()
        if highest >= 0:
            wrong = slots[before >= 0][0]
            raise ValueError(f"slot {wrong} is in the cache already: insert each slot once")
        state[slots] = marks = self._positions[:size]
        if state.take(slots).tobytes() != marks.tobytes():  # a slot named twice holds its later position
            state[slots] = before
            values, counts = np.unique(slots, return_counts=True)
            raise ValueError(f"slot {values[counts > 1][0]} is named twice in one insert")
        self._count(before, highest)
        return slots.copy()

    def _count(self, before: NDArray[np.int32], highest: np.int32) -> None:
        """Count slots that are cached from now on, by what they were before: held or free."""
        if highest == HELD:
            named = 0
        elif before.min() == FREE:
            named = before.size
        else:
            named = int(np.count_nonzero(before == FREE))
        self._stale |= named > 0
        self.free -= named
        self.cached += before.size

    def release(self, slots: NDArray[np.int64]) -> None:
        """Free held slots.

        Raises:
            ValueError: A slot is out of range, free already, or in the cache. Nothing changes.
        """
        if not slots.size:
            return
        if slots.view(np.uint64).max() >= self.capacity:
            wrong = slots[(slots < 0) | (slots >= self.capacity)][0]
            raise ValueError(f"slot {wrong} is not in the pool: slots go from 0 to {self.capacity - 1}")
        state = self._state[slots]
        if (state != HELD).any():
            wrong = slots[state != HELD][0]
            where = "free" if self._state[wrong] == FREE else "in the cache"
            raise ValueError(f"slot {wrong} is {where}: only slots that a request holds can be freed")
        self.free += self._put_back(np.unique(slots))

    def evict(self, slots: NDArray[np.int64]) -> None:
        """Free cached slots, as the cache hands them back."""
        self.cached -= slots.size
        self.free += self._put_back(slots)

    def _put_back(self, slots: NDArray[np.int64]) -> int:
        self._state[slots] = FREE
        page_size = self.page_size
        if self._stale:
            pass  # the next sweep finds them
        elif page_size == 1:
            self._push(slots)
        elif slots.size % page_size == 0:
            # Slots that are freed together are distinct: as many of one page as it has are all of it.
            pages = (slots // page_size).reshape(-1, page_size)
            first = pages[:, 0]
            if (pages == first[:, None]).all():
                self._push(first)
            else:
                self._stale = True
        else:
            self._stale = True
        return slots.size

    def _push(self, pages: NDArray[np.int64]) -> None:
        stop = self._top + pages.size
        self._stack[self._top : stop] = pages[::-1]  # on top the first, so that rows are given out as rows
        self._top = stop

    def _sweep(self) -> None:
        """List the wholly free pages afresh, lowest on top."""
        whole = (self._state.reshape(-1, self.page_size) == FREE).all(axis=1)
        pages = np.flatnonzero(whole)[::-1].astype(np.int64)
        self._stack = np.empty(self.capacity // self.page_size, np.int64)
        self._stack[: pages.size] = pages
        self._top = pages.size
        self._stale = False
