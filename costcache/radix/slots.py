"""Slots of a pool of tokens: each is free, reserved by a running request, or cached."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Slots"]

CACHED, FREE, RESERVED = range(3)
_CACHED, _FREE = bytes((CACHED,)), bytes((FREE,))


class Slots:
    """``capacity`` slots, one per token, given out in whole pages.

    Callers either :meth:`allocate` slots or choose their own when they insert; free slots chosen this way are
    no longer free.

    Attributes:
        capacity: Slots in all: whole pages of the size asked for.
        free: Unused slots.
        cached: Slots in the cache.
    """

    def __init__(self, capacity: int, page_size: int = 1) -> None:
        self.capacity = capacity // page_size * page_size
        self.page_size = page_size
        # One byte per slot: CACHED, FREE or RESERVED.
        self._state: NDArray[np.uint8] = np.empty(self.capacity, np.uint8)
        # Where each slot was last named in an insert, to see whether it is named twice; never cleared.
        self._named: NDArray[np.int32] = np.empty(self.capacity, np.int32)
        self._positions = np.arange(self.capacity, dtype=np.int32)
        # Consecutive slots are a slice of this one array: nothing is copied, and nobody can write to it. Its
        # memory is a bytes object, with a slice of which slots are compared in place, at memory speed.
        self._row = np.arange(self.capacity, dtype=np.int64).tobytes()
        self._all: NDArray[np.int64] = np.frombuffer(self._row, np.int64)
        self._offsets = np.arange(page_size)
        self.free = self.capacity
        self.cached = 0
        # A stack of the pages that are wholly free. It is stale once callers name free slots themselves or
        # free parts of pages; it is rebuilt when slots are next allocated.
        self._stack: NDArray[np.int64]
        self._top = 0
        self._stale = False
        self.reset()

    @property
    def reserved(self) -> int:
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
        self._state[slots] = RESERVED
        self.free -= slots.size
        return slots

    def cache(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move reserved or free slots into the cache.

        Returns:
            The same slots in an array that the caller does not share.

        Raises:
            ValueError: A slot is out of range, cached already, or named twice. Nothing changes.
        """
        size, state = slots.size, self._state
        if not size:
            return slots.copy()
        if (first := self._row_at(slots)) is not None:
            row = state[first : first + size]
            before = row.tobytes()
            if before.find(_CACHED) < 0:  # several times faster than `in`
                self._count(before)
                row.fill(CACHED)
                return self._all[first : first + size]
        if size > self.capacity:
            raise ValueError(f"there are {size} slots, and the pool has {self.capacity}")
        try:
            states = state.take(slots)  # faster than an index; checks the upper end, and counts from the end
        except IndexError:
            states = None
        if states is None or slots.min() < 0:
            wrong = slots[(slots < 0) | (slots >= self.capacity)][0]
            raise ValueError(f"slot {wrong} is not in the pool: slots go from 0 to {self.capacity - 1}")
        before = states.tobytes()
        if _CACHED in before:
            wrong = slots[states == CACHED][0]
            raise ValueError(f"slot {wrong} is in the cache already: insert each slot once")
        named, marks = self._named, self._positions[:size]
        named[slots] = marks
        if named.take(slots).tobytes() != marks.tobytes():  # a slot named twice holds its later position
            values, counts = np.unique(slots, return_counts=True)
            raise ValueError(f"slot {values[counts > 1][0]} is named twice in one insert")
        state[slots] = CACHED
        self._count(before)
        return slots.copy()

    def _row_at(self, slots: NDArray[np.int64]) -> int | None:
        """Return the first of one or more consecutive slots; None if they are not consecutive."""
        first, size = int(slots[0]), slots.size
        if 0 <= first <= self.capacity - size and self._row.startswith(slots.data, 8 * first):
            return first
        return None

    def _count(self, before: bytes) -> None:
        """Count slots that are cached from now on, by their state before: reserved or free."""
        named = 0 if before.find(_FREE) < 0 else before.count(_FREE)
        self._stale |= named > 0
        self.free -= named
        self.cached += len(before)

    def release(self, slots: NDArray[np.int64]) -> None:
        """Free reserved slots.

        Raises:
            ValueError: A slot is out of range, free already, or in the cache. Nothing changes.
        """
        if slots.size:
            self.check_reserved(slots, "be freed")
            self.free += self._make_free(np.unique(slots))

    def check_reserved(self, slots: NDArray[np.int64], can: str) -> None:
        """Raise unless a request has reserved all of these slots, one or more.

        Args:
            slots: The slots.
            can: What only reserved slots can do.

        Raises:
            ValueError: A slot is out of range, free, or in the cache.
        """
        if slots.view(np.uint64).max() >= self.capacity:
            wrong = slots[(slots < 0) | (slots >= self.capacity)][0]
            raise ValueError(f"slot {wrong} is not in the pool: slots go from 0 to {self.capacity - 1}")
        state = self._state[slots]
        if (state != RESERVED).any():
            wrong = slots[state != RESERVED][0]
            where = "free" if self._state[wrong] == FREE else "in the cache"
            raise ValueError(f"slot {wrong} is {where}: only slots that a request has reserved can {can}")

    def evict(self, slots: NDArray[np.int64]) -> None:
        """Free cached slots, once their victims have left the tree."""
        self.cached -= slots.size
        self.free += self._make_free(slots)

    def _make_free(self, slots: NDArray[np.int64]) -> int:
        size, page_size = slots.size, self.page_size
        if size == 1 == page_size and not self._stale:  # most evictions of a busy server
            slot = slots[0]
            self._state[slot] = FREE
            self._stack[self._top] = slot
            self._top += 1
            return 1
        if not size:
            return 0
        self._state[slots] = FREE
        if self._stale:
            pass  # the next sweep finds them
        elif page_size == 1:
            self._push(slots)
        elif (first := self._row_at(slots)) is not None and not (first | size) % page_size:
            self._push(self._all[first // page_size : (first + size) // page_size])
        elif size % page_size == 0:
            # Slots freed together are distinct, so page_size slots of one page are the whole page.
            pages = (slots // page_size).reshape(-1, page_size)
            firsts = pages[:, 0]
            if (pages == firsts[:, None]).all():
                self._push(firsts)
            else:
                self._stale = True
        else:
            self._stale = True
        return size

    def _push(self, pages: NDArray[np.int64]) -> None:
        stop = self._top + pages.size
        self._stack[self._top : stop] = pages[::-1]  # popped in ascending order
        self._top = stop

    def _sweep(self) -> None:
        """Rebuild the stack of wholly free pages, lowest on top."""
        whole = (self._state.reshape(-1, self.page_size) == FREE).all(axis=1)
        pages = np.flatnonzero(whole)[::-1].astype(np.int64)
        self._stack = np.empty(self.capacity // self.page_size, np.int64)
        self._stack[: pages.size] = pages
        self._top = pages.size
        self._stale = False
