"""The device as a tier: its cache, its memory, and the window KV of its tokens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from costcache.radix.keys import as_int64
from costcache.radix.statecache import StateCache
from costcache.radix.windows import WindowTree
from costcache.tiers.rows import WindowRows
from costcache.tiers.tier import NO_SLOTS, Place, Source, Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costcache.radix.cache import RadixCache
    from costcache.radix.node import Node
    from costcache.radix.results import Inserted
    from costcache.tiers.buffers import Buffers

__all__ = ["DeviceLanding", "DeviceTier"]


class DeviceTier(Tier):
    """The device's cache and the memory that its slots are of.

    Attributes:
        cache: The cache.
        buffers: The memory.
        largest: Tokens of the largest allocation since it was last set to 0.
    """

    def __init__(self, cache: RadixCache | StateCache, buffers: Buffers) -> None:
        tree = cache._tree
        super().__init__("device", tree)
        self.cache: Any = cache
        self.buffers = buffers
        self.largest = 0
        if isinstance(tree, WindowTree):
            self.windows = WindowRows(cache.pool_size, tree.window_capacity or 0, cache.page_size)
            tree.on_free_window = self.windows.free

    def allocate(self, tokens: int) -> Any:
        """Reserve slots, as the cache does."""
        slots = self.cache.allocate(tokens)
        self.largest = max(self.largest, tokens)
        return slots

    # -- windows of running requests ---------------------------------------------------------

    def hold_windows(self, slots: NDArray[np.int64]) -> bool:
        """Give reserved slots room for their window KV, evicting for it; False if there is none."""
        windows = self._windows()
        if slots.size % self.page_size:
            raise ValueError(f"there are {slots.size} slots: give those of whole pages of {self.page_size}")
        if not slots.size:
            return True
        self.cache._slots.check_reserved(slots, "hold window KV")
        held = windows.held(slots)
        if held.any():
            raise ValueError(f"slot {slots[held][0]} holds window KV already: hold it once")
        if np.unique(slots).size < slots.size:
            raise ValueError("a slot is named twice: name each once")
        if not self.cache.reserve_windows(slots.size):
            return False
        rows = windows.allocate(slots.size)
        if rows is None:  # rows are freed in whole pages; parts of them are of no use
            self.cache.release_windows(slots.size)
            return False
        windows.hold(slots, rows)
        return True

    def free_windows(self, slots: NDArray[np.int64]) -> None:
        """Free the window KV of a running request's slots, as far as they have any."""
        self._windows()
        if slots.size:
            self.cache._slots.check_reserved(slots, "free window KV")
            self._free_held(slots)

    def release(self, slots: Any) -> None:
        """Free reserved slots, with the window KV that they hold."""
        self.cache.release(slots)
        if self.windows is not None:
            self._free_held(as_int64(slots, "slots"))

    def _free_held(self, slots: NDArray[np.int64]) -> None:
        windows, slots = self._windows(), np.unique(slots)
        held = slots[windows.held(slots)]
        windows.free(held)
        self.cache.release_windows(held.size)

    def window_rows(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of window KV of tokens by their slots; -1 for those without."""
        if slots.size and (slots.min() < 0 or slots.max() >= self.cache.pool_size):
            raise ValueError(f"a slot is not in the pool: slots go from 0 to {self.cache.pool_size - 1}")
        return self._windows().of(slots)

    def _windows(self) -> WindowRows:
        if self.windows is None:
            raise ValueError("the cache has one pool: give window_pool_size for one of sliding windows")
        return self.windows

    def insert(self, tokens: Any, slots: Any, request: Hashable, **options: Any) -> Inserted:
        """Insert into the cache; window KV that the request holds becomes the cache's, or is freed."""
        windows = self.windows
        if windows is None or slots is None:
            done: Inserted = self.cache.insert(tokens, slots, request, **options)
            return done
        given = as_int64(slots, "slots")
        if given.size and (given.min() < 0 or given.max() >= self.cache.pool_size):
            return self.cache.insert(tokens, slots, request, **options)  # type: ignore[no-any-return] # it raises
        held = windows.held(given)
        missing = np.flatnonzero(~held)
        start = int(missing[-1]) + 1 if missing.size else 0
        mine = given[held]
        rows = windows.take(mine)
        try:
            return self._insert(tokens, slots, request, mine, rows, start, options)
        except BaseException:
            windows.hold(mine, rows)
            raise

    def restore(
        self,
        tokens: Any,
        slots: NDArray[np.int64],
        rows: NDArray[np.int64],
        request: Hashable,
        **options: Any,
    ) -> Inserted:
        """Insert what was loaded: its last tokens' window KV is in rows that were allocated for it."""
        if self.windows is None:
            done: Inserted = self.cache.insert(tokens, slots, request, **options)
            return done
        last = slots[slots.size - rows.size :]
        return self._insert(tokens, slots, request, last, rows, slots.size - rows.size, options)

    def _insert(
        self,
        tokens: Any,
        slots: Any,
        request: Hashable,
        mine: NDArray[np.int64],
        rows: NDArray[np.int64],
        start: int,
        options: dict[str, Any],
    ) -> Inserted:
        """Insert, and settle whose the rows are that are those of slots of the caller."""
        windows, cache = self._windows(), self.cache
        options["window_from"] = max(start, options.get("window_from", 0))
        cache.release_windows(mine.size)
        try:
            done: Inserted = cache.insert(tokens, slots, request, **options)
        except BaseException:
            cache.reserve_windows(mine.size)
            raise
        from_caller, cached = (as_int64(part, "slots") for part in done.windows)
        order = np.argsort(mine, kind="stable")
        at = order[np.searchsorted(mine, from_caller, sorter=order)] if from_caller.size else order[:0]
        windows.keep(cached, rows[at])
        windows.release(np.delete(rows, at))
        return done

    # -- loads -------------------------------------------------------------------------------

    def land(self, place: Place, start: int, rows: int) -> DeviceLanding | None:
        """Reserve slots for a prefix from token ``start`` on, and rows of its ending; None without room."""
        at = self.find(self.first(place, start))
        self.tree.pin(at)
        tokens = len(place.key) // self.tree.page_bytes * self.page_size - start
        ending = self._allocate_rows(rows)
        slots = None if ending is None else self.allocate(tokens)
        if ending is None or slots is None:
            self.tree.unpin(at)
            if ending is not None:
                self.release_rows(ending)
            return None
        return DeviceLanding(self, place, at, np.asarray(as_array(slots)), ending)

    def _allocate_rows(self, rows: int) -> NDArray[np.int64] | None:
        if not rows:
            return NO_SLOTS
        if self.windows is None:
            state = self.cache.allocate_state()
            return None if state is None else np.array([state], np.int64)
        if not self.cache.reserve_windows(rows):
            return None
        found = self.windows.allocate(rows)
        if found is None:
            self.cache.release_windows(rows)
        return found

    def release_rows(self, ending: NDArray[np.int64]) -> None:
        """Free rows of an ending that are nobody's."""
        if self.windows is not None:
            self.windows.release(ending)
            self.cache.release_windows(ending.size)
        else:
            for state in ending.tolist():
                self.cache.release_state(state)


class DeviceLanding:
    """Slots and rows of the device for a load that is under way. What was there before it is pinned."""

    def __init__(
        self,
        device: DeviceTier,
        place: Place,
        at: Node,
        slots: NDArray[np.int64],
        ending: NDArray[np.int64],
    ) -> None:
        self._device = device
        self._place = place
        self._at = at
        self._slots = slots
        self._ending = ending

    @property
    def size(self) -> int:
        """Bytes to copy."""
        return self._device.buffers.bytes_of(self._slots.size, self._ending.size)

    def write(self, source: Source) -> int:
        """Copy; in the thread of the link."""
        source.copy(self._device.buffers, self._slots, self._ending)
        return 1

    def give_back(self) -> None:
        """Give back all that was reserved: nothing was copied, or nobody wants it."""
        device = self._device
        device.tree.unpin(self._at)
        device.cache.release(self._slots)
        device.release_rows(self._ending)

    def settle(self, request: Hashable) -> Node:
        """Give what was loaded to the device's cache; returns the node at its end, locked."""
        device, cache, ending = self._device, self._device.cache, self._ending
        tokens, names = self._place.tokens, self._place.names
        whole = np.concatenate((device.slots_of(self._at), self._slots))
        if request not in cache._requests:
            request = None  # it has ended meanwhile
        state = int(ending[0]) if ending.size and device.windows is None else None
        if state is None:
            done = device.restore(tokens, whole, ending, request, **names)
        else:
            done = cache.insert(tokens, whole, request, state=state, **names)
        node: Node = done.node
        cache.lock(node)
        spare = np.asarray(as_array(done.duplicates))
        if spare.size:
            cache.release(spare)
        if state is not None and (node.state is None or node.state.slot != state):
            cache.release_state(state)  # another request left one there meanwhile
        device.tree.unpin(self._at)
        return node


def as_array(slots: Any) -> Any:
    """Slots as numpy has them."""
    return slots.detach().cpu().numpy() if hasattr(slots, "detach") else slots
