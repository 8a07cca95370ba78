"""The host tier: slots in pinned memory, and the rows of endings beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.radix.slots import Slots
from costcache.radix.states import StateTree
from costcache.radix.windows import WindowTree
from costcache.tiers.lower import LowerTier
from costcache.tiers.rows import WindowRows
from costcache.tiers.tier import NO_SLOTS, Place, Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.radix.node import Node
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.layout import Layout
    from costcache.tiers.lower import LowerBinding

__all__ = ["HostLanding", "HostTier"]


class HostTier(LowerTier):
    """Host memory.

    Attributes:
        buffers: The memory.
        slots: The slots of its tokens.
    """

    def __init__(self, binding: LowerBinding, memory: int, state_share: float | None, layout: Layout) -> None:
        """Allocate a host tier of ``memory`` bytes.

        Raises:
            MemoryError: The memory was refused.
            SettingsError: It has no room for a page and what a request resumes from.
        """
        from costcache.tiers.buffers import Buffers

        tree = binding.tree(memory, state_share)
        super().__init__("host", binding, tree)
        states = (tree.state_capacity or 0) if isinstance(tree, StateTree) else 0
        rows = (tree.window_capacity or 0) if isinstance(tree, WindowTree) else 0
        self.slots = Slots(tree.pool.capacity, tree.page_size)
        self.buffers: Buffers = Buffers.allocate(layout, self.slots.capacity, states, rows, joined=True)
        self._freed: list[NDArray[np.int64]] = []
        tree.on_free = self._freed.append
        if isinstance(tree, WindowTree):
            self.windows = WindowRows(self.slots.capacity, rows, tree.page_size)
            tree.on_free_window = self.windows.free
        self._free_states = list(range(states - 1, -1, -1))
        self._reserved_rows = 0

    def land(self, place: Place, start: int, rows: int) -> HostLanding | None:
        """See :meth:`LowerTier.land`."""
        landing = self.land_part(place, start, rows)
        if landing.slots.size < landing.tokens or landing.ending.size < rows:
            landing.give_back()  # half a prefix, or one without its ending, is of little use
            return None
        return landing

    def land_part(self, place: Place, start: int, rows: int) -> HostLanding:
        """The same of as many tokens as there is room for, and of all of the ending or nothing of it."""
        at = self.find(self.first(place, start))
        self.tree.pin(at)
        tokens = len(place.key) // self.tree.page_bytes * self.page_size - start
        slots, ending = self._reserve(at, tokens, rows)
        return HostLanding(self, place, start, tokens, at, slots, ending)

    def _reserve(self, at: Node, tokens: int, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        fits, rows_fit = self.room(at, tokens, rows)
        for slots in self._freed:
            self.slots.evict(slots)
        self._freed.clear()
        found = self.slots.allocate(max(0, fits))
        slots = NO_SLOTS if found is None else found
        ending = NO_SLOTS
        if rows and rows_fit >= rows and slots.size == tokens:
            ending = self._allocate_rows(rows)
            self._reserved_rows += ending.size
        self.count_reserved()
        return slots, ending

    def _allocate_rows(self, rows: int) -> NDArray[np.int64]:
        if self.windows is not None:
            found = self.windows.allocate(rows)
            return NO_SLOTS if found is None else found
        import numpy as np

        return np.array([self._free_states.pop()] if self._free_states else [], np.int64)

    def release(self, slots: NDArray[np.int64], ending: NDArray[np.int64]) -> None:
        """Free reserved slots, and reserved rows of an ending."""
        self.slots.release(slots)
        self._reserved_rows -= ending.size
        if self.windows is not None:
            self.windows.release(ending)
        else:
            self._free_states.extend(ending.tolist())
        self.count_reserved()

    def add(
        self,
        place: Place,
        start: int,
        slots: NDArray[np.int64],
        ending: NDArray[np.int64],
        history: Node | None,
    ) -> Node | None:
        """Take over what was copied into reserved slots; returns the node at its end, None if cut off."""
        found = self.extend(place, start, self.slots.cache(slots), history)
        if found is None:
            self.slots.evict(slots)
            self.release(NO_SLOTS, ending)
            return None
        node, before = found
        self.slots.evict(slots[:before])  # another copy of these tokens came first
        if ending.size:
            self._add_ending(node, ending, history)
        self.count_reserved()
        return node

    def _add_ending(self, node: Node, ending: NDArray[np.int64], history: Node | None) -> None:
        tree, windows = self.tree, self.windows
        if isinstance(tree, StateTree):
            if node.state is None and node.parent is not None:
                self._reserved_rows -= 1
                tree.attach(node, int(ending[0]))
            else:
                self.release(NO_SLOTS, ending)
        elif isinstance(tree, WindowTree) and windows is not None:
            start = node.end - ending.size
            spare = ending.copy()
            for each in tree.restore_window(node, start, history):
                if each.slots is not None:
                    here = slice(each.depth - start, each.end - start)
                    windows.keep(each.slots, ending[here])
                    spare[here] = -1
            spare = spare[spare >= 0]
            self._reserved_rows -= ending.size - spare.size
            self.release(NO_SLOTS, spare)  # another copy of these windows came first

    def count_reserved(self) -> None:
        """Tell the pools what is reserved."""
        tree, tokens = self.tree, self.slots.reserved
        if isinstance(tree, StateTree | WindowTree):
            tree.reserve(tokens, self._reserved_rows)
        else:
            tree.pool.reserved = tokens

    def _free_state(self, slot: int) -> None:
        self._free_states.append(slot)


class HostLanding:
    """Slots and rows of the host for a copy that is under way.

    Attributes:
        slots: Slots of the tokens, from ``start`` on.
        ending: Rows of the ending; none if none is brought.
        tokens: Tokens that were asked for.
    """

    def __init__(
        self,
        host: HostTier,
        place: Place,
        start: int,
        tokens: int,
        at: Node,
        slots: NDArray[np.int64],
        ending: NDArray[np.int64],
    ) -> None:
        self.slots = slots
        self.ending = ending
        self.tokens = tokens
        self._host = host
        self._place = place
        self._start = start
        self._at = at

    @property
    def pages(self) -> int:
        """Pages that there are slots for."""
        return self.slots.size // self._host.page_size

    @property
    def size(self) -> int:
        """See :class:`costcache.tiers.lower.Landing`."""
        return self._host.buffers.bytes_of(self.slots.size, self.ending.size)

    def write(self, source: Source) -> int:
        """See :class:`costcache.tiers.lower.Landing`."""
        source.copy(self._host.buffers, self.slots, self.ending)
        return self.pages + 1

    def settle(self, done: int, history: Node) -> tuple[Node | None, int]:
        """See :class:`costcache.tiers.lower.Landing`."""
        host = self._host
        host.tree.unpin(self._at)
        kept = min(done, self.pages) * host.page_size
        ending = self.ending if done > self.pages else NO_SLOTS
        host.release(self.slots[kept:], NO_SLOTS if ending.size else self.ending)
        if not kept and not ending.size:
            return None, 0
        arrived = host.first(self._place, self._start + kept)
        return host.add(arrived, self._start, self.slots[:kept], ending, history), kept

    def give_back(self) -> None:
        """Give back all that was reserved: nothing is copied."""
        self._host.tree.unpin(self._at)
        self._host.release(self.slots, self.ending)
