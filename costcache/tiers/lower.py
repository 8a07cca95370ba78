"""The tiers below the device: each is a tree over a pool of its own, beside memory that it never touches."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from costcache.binding import Binding
from costcache.radix.node import Node, Root
from costcache.radix.slots import Slots
from costcache.radix.states import StateTree
from costcache.radix.tree import RadixTree
from costcache.records import Clock, RequestRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costcache.pool import Pool
    from costcache.storage import SealedStore
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.layout import Layout
    from costcache.tiers.ranks import Ranks

__all__ = ["DiskTier", "HostTier", "LowerBinding", "LowerTier", "Place", "place_of"]

logger = logging.getLogger("costcache")

_STATE = b"s"
"""Ends the key of a state in storage; that of a page is its hash alone."""
_HASH_BYTES = 20
_ENTRY_BYTES = 64
"""Bytes of an entry beside its payload: the seal's header and the key."""


class Place(NamedTuple):
    """A prefix, by what every tier knows it by.

    Attributes:
        namespace: ``(extra_key, cache_salt)``.
        key: Its tokens, whole pages, as the bytes of int64.
    """

    namespace: tuple[str | None, ...]
    key: bytes


def place_of(node: Node) -> Place:
    """The prefix that ends with a node of any tier's tree."""
    path = node.path()
    root = path[0].parent if path else node
    namespace = root.namespace if isinstance(root, Root) else ()
    return Place(namespace, b"".join(bytes(part.key) for part in path))


@dataclass(frozen=True)
class LowerBinding(Binding):
    """The binding of a lower tier: the same model and policy, on the clock of the device's pool.

    Attributes:
        clock: The device pool's clock.
    """

    clock: Clock = field(default_factory=Clock)

    @classmethod
    def under(cls, binding: Binding, clock: Clock, layout: Layout) -> LowerBinding:
        """The binding of a tier below the one that ``binding`` is of; costs are those of the layout."""
        token = binding.cost.token.model_copy(
            update={"kv_bytes": layout.token_bytes, "state_bytes": layout.state_bytes, "swa_bytes": 0}
        )
        values = {f.name: getattr(binding, f.name) for f in dataclasses.fields(binding)}
        values["cost"] = binding.cost.model_copy(update={"token": token})
        return cls(**values, clock=clock)

    def pool(self, name: str, take: Any, **options: Any) -> Pool:
        """Make a pool of the tier: without headroom, since whoever adds to it asks for room first."""
        return super().pool(name, take, **options, clock=self.clock, lower_tier=True)


class LowerTier:
    """The tree of one tier. A prefix that is in it is there from its first token on.

    Attributes:
        name: ``"host"`` or ``"disk"``.
        tree: The tree.
        leaving: Called with a node, just before it or its last pages are evicted from the tier.
    """

    def __init__(self, name: str, binding: LowerBinding, memory: int, state_share: float | None) -> None:
        self.name = name
        self.binding = binding
        token = binding.cost.token
        self.has_states = token.state_bytes > 0
        self.tree: RadixTree
        if self.has_states:
            self.tree = StateTree(binding, memory, state_share=state_share)
            self.tree.on_free_state = self._free_state
            self.tree.on_tombstone = self._state_leaves
        else:
            self.tree = RadixTree(binding, memory // token.kv_bytes)
        self.tree.on_remove = self._node_leaves
        self.page_size = self.tree.page_size
        self.leaving: Callable[[Node], object] | None = None
        self._nobody = RequestRecord(0)
        self._requests: dict[Hashable, RequestRecord] = {}

    @property
    def pool(self) -> Pool:
        """The pool of the tier."""
        return self.tree.pool

    # -- requests ----------------------------------------------------------------------------

    def find(self, place: Place) -> Node:
        """The node at the end of the longest part of a prefix that is here; nothing is used."""
        tree = self.tree
        return tree.match(tree.root(place.namespace), memoryview(place.key), self._nobody, [])

    def use(self, place: Place, request: Hashable, number: int) -> Node:
        """Find a prefix and use it; returns the node from whose end a request can resume.

        Args:
            place: The prefix.
            request: The request's name, or None for one of its own.
            number: The request's number on the device.
        """
        record = self._requests.get(request) if request is not None else None
        first = record is None
        if record is None:
            record = RequestRecord(number, self.binding.clock.in_seconds)
            if request is not None:
                self._requests[request] = record
        tree = self.tree
        node = tree.match(tree.root(place.namespace), memoryview(place.key), record)
        usable = self.usable(node)
        if usable.state is not None:
            tree.pool.consume(usable, counts=first)
        return usable

    def finish(self, request: Hashable) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request, None)

    def usable(self, node: Node) -> Node:
        """The deepest node on the path to ``node`` from which a request can resume."""
        return self.tree.usable(node) if isinstance(self.tree, StateTree) else node

    # -- changes -----------------------------------------------------------------------------

    def room(self, keep: Node, tokens: int, states: int) -> tuple[int, int]:
        """Make room below a node for more tokens and states; returns how many fit, in whole pages."""
        tree = self.tree
        if isinstance(tree, StateTree):
            return tree.make_room((keep,), tokens, states)
        return tree.pool.make_room(tokens, keep), 0

    def extend(
        self, place: Place, start: int, slots: NDArray[np.int64] | None, history: Node | None
    ) -> tuple[Node, int] | None:
        """Add the rest of a prefix, from token ``start`` on.

        Returns:
            The node at its end, and the tokens from ``start`` on that were here already. None if what is
            before ``start`` is no longer here.
        """
        tree = self.tree
        end = len(place.key) // tree.page_bytes * self.page_size
        node = self.find(place)
        if node.end < start:
            return None
        before = node.end - start
        if node.end < end:
            key = tree.part(place.key, node.end, end - node.end)
            node = tree.append(node, key, None if slots is None else slots[before:], None, history=history)
        return node, before

    def _node_leaves(self, node: Node, pages: int) -> None:  # noqa: ARG002 # the disk tier's needs the pages
        if self.leaving is not None:
            self.leaving(node)

    def _state_leaves(self, node: Node) -> None:
        if self.leaving is not None:
            self.leaving(node)

    def _free_state(self, slot: int) -> None:
        raise NotImplementedError


class HostTier(LowerTier):
    """Host memory: slots in pinned tensors.

    Attributes:
        buffers: The memory.
        slots: The slots of its tokens.
    """

    def __init__(self, binding: LowerBinding, memory: int, state_share: float | None, layout: Layout) -> None:
        """Allocate a host tier of ``memory`` bytes.

        Raises:
            MemoryError: The memory was refused.
            SettingsError: It has no room for a page and a state.
        """
        from costcache.tiers.buffers import Buffers

        super().__init__("host", binding, memory, state_share)
        tree = self.tree
        states = (tree.state_capacity or 0) if isinstance(tree, StateTree) else 0
        self.slots = Slots(tree.pool.capacity, tree.page_size)
        self.buffers: Buffers = Buffers.allocate(layout, self.slots.capacity, states, joined=True)
        self._freed: list[NDArray[np.int64]] = []
        tree.on_free = self._freed.append
        self._free_states = list(range(states - 1, -1, -1))
        self._reserved_states = 0

    def reserve(self, keep: Node, tokens: int, states: int) -> tuple[NDArray[np.int64], int | None]:
        """Reserve slots for a copy that begins, evicting for them; fewer, or none, if there is no room."""
        fits, states_fit = self.room(keep, tokens, states)
        self._collect()
        slots = self.slots.allocate(max(0, fits))
        if slots is None:
            slots = np.empty(0, np.int64)
        state = None
        if states_fit and self._free_states:
            state = self._free_states.pop()
            self._reserved_states += 1
        self._reserve()
        return slots, state

    def release(self, slots: NDArray[np.int64], state: int | None = None) -> None:
        """Free reserved slots, and a reserved state slot."""
        self.slots.release(slots)
        if state is not None:
            self._reserved_states -= 1
            self._free_states.append(state)
        self._reserve()

    def add(
        self, place: Place, start: int, slots: NDArray[np.int64], state: int | None, history: Node | None
    ) -> Node | None:
        """Take over what was copied into reserved slots; returns the node at its end, None if cut off."""
        tree = self.tree
        found = self.extend(place, start, self.slots.cache(slots), history)
        if found is None:
            self.slots.evict(slots)
            self.release(slots[:0], state)
            return None
        node, before = found
        self.slots.evict(slots[:before])  # another copy of these tokens came first
        if state is not None:
            if isinstance(tree, StateTree) and node.state is None and node.parent is not None:
                self._reserved_states -= 1
                tree.attach(node, state)
            else:
                self.release(slots[:0], state)
        self._reserve()
        return node

    def _reserve(self) -> None:
        tree = self.tree
        if isinstance(tree, StateTree):
            tree.reserve(self.slots.reserved, self._reserved_states)
        else:
            tree.pool.reserved = self.slots.reserved

    def _collect(self) -> None:
        for slots in self._freed:
            self.slots.evict(slots)
        self._freed.clear()

    def _free_state(self, slot: int) -> None:
        self._free_states.append(slot)


class DiskTier(LowerTier):
    """Storage: an entry for each page, and one for each state, by the hash of the prefix up to its end.

    What storage has from an earlier run is not in the tree until it is asked for: :meth:`find` adopts it.
    Until then it is evicted before anything that is.

    Attributes:
        store: The storage backend, sealed; only the thread of its link calls it.
        delete: Called with keys to delete from it.
    """

    def __init__(
        self,
        binding: LowerBinding,
        memory: int,
        store: SealedStore,
        fingerprint: bytes,
        ranks: Ranks,
        delete: Callable[[list[bytes]], object],
    ) -> None:
        """Make the tier over a store that was just opened."""
        token, page = binding.cost.token, binding.page_size
        page_bytes = token.kv_bytes * page
        super().__init__("disk", binding, memory * page_bytes // (page_bytes + _ENTRY_BYTES), None)
        self.store = store
        self.delete = delete
        self._seed = fingerprint
        self._states: dict[int, bytes] = {}
        self._next_state = 0
        self._gone: list[bytes] = []
        self._reserved = [0, 0]  # tokens and states that are being written
        self._orphan_units = 0
        self._orphans: OrderedDict[bytes, int] = OrderedDict()
        found = store.keys()
        common = ranks.common([key for key, _ in found])
        kept = set(common)
        stale = [key for key, _ in found if key not in kept]
        for key in common:
            self._orphans[key] = self._units(key)
            self._orphan_units += self._orphans[key]
        for key in stale:  # other ranks have lost them; no other thread calls the store yet
            store.delete(key)
        self._evict_orphans(0)
        self._reserve()

    def _units(self, key: bytes) -> int:
        pool = self.pool
        return (
            pool.state_units
            if key.endswith(_STATE) and len(key) > _HASH_BYTES
            else (pool.token_units * self.page_size)
        )

    # -- keys --------------------------------------------------------------------------------

    def hashes(self, place: Place, start: int, end: int, before: int | None = None) -> list[int]:
        """The hashes of the pages of a prefix from token ``start`` to ``end``, chained.

        Args:
            place: The prefix.
            start: First token; a page begins there.
            end: Token after the last.
            before: Hash of the page before ``start``, if it is known.
        """
        step = self.tree.page_bytes
        first = start // self.page_size
        digest = self._seed + repr(place.namespace).encode()
        pages: Iterable[int] = range(end // self.page_size)
        if before is not None:
            digest = before.to_bytes(_HASH_BYTES, "little")
            pages = range(first, end // self.page_size)
        found = []
        for page in pages:
            key = place.key[page * step : (page + 1) * step]
            digest = hashlib.blake2b(digest + key, digest_size=_HASH_BYTES).digest()
            if page >= first:
                found.append(int.from_bytes(digest, "little"))
        return found

    @staticmethod
    def page_key(value: int) -> bytes:
        """The key of a page in storage."""
        return value.to_bytes(_HASH_BYTES, "little")

    @staticmethod
    def state_key(value: int) -> bytes:
        """The key of the state at the end of a page."""
        return value.to_bytes(_HASH_BYTES, "little") + _STATE

    # -- changes -----------------------------------------------------------------------------

    def find(self, place: Place) -> Node:
        """The node at the end of what is here of a prefix; what an earlier run left of it is adopted."""
        node = super().find(place)
        size = len(place.key) // self.tree.page_bytes * self.page_size
        if not self._orphans or node.end >= size:
            return node
        hashes: list[int] = []
        before = node.hashes[-1] if node.hashes else None
        at = node.end
        while at < size:
            (value,) = self.hashes(place, at, at + self.page_size, before)
            if self.page_key(value) not in self._orphans:
                break
            hashes.append(value)
            before, at = value, at + self.page_size
            if self.state_key(value) in self._orphans:
                node = self._adopt(place, node, hashes)
                hashes = []
        return self._adopt(place, node, hashes) if hashes else node

    def use(self, place: Place, request: Hashable, number: int) -> Node:
        """See :meth:`LowerTier.use`; what an earlier run left is adopted first."""
        if self._orphans:
            self.find(place)
        return super().use(place, request, number)

    def reserve(self, keep: Node, tokens: int, states: int) -> tuple[int, int]:
        """Reserve room for entries that are being written; fewer, or none, if there is no room."""
        pool = self.pool
        self._evict_orphans(tokens * pool.token_units + states * pool.state_units)
        fits, states_fit = self.room(keep, tokens, states)
        self.flush_deletes()
        self._reserved[0] += max(0, fits)
        self._reserved[1] += max(0, states_fit)
        self._reserve()
        return max(0, fits), max(0, states_fit)

    def release(self, tokens: int, states: int) -> None:
        """Give reserved room back."""
        self._reserved[0] -= tokens
        self._reserved[1] -= states
        self._reserve()

    def add(
        self, place: Place, start: int, hashes: list[int], state: bool, history: Node | None
    ) -> Node | None:
        """Take over pages that are in storage now; returns the node at their end, None if it is cut off."""
        found = self.extend(place, start, None, history)
        if found is None:
            return None
        node, before = found
        if node.hashes is None and node.parent is not None:
            node.hashes = hashes[before // self.page_size :]
        if state and node.state is None and node.parent is not None and node.hashes:
            self._attach(node, self.state_key(node.hashes[-1]))
        return node

    def drop(self, place: Place, good: int) -> None:
        """Forget what follows the first ``good`` tokens of a prefix: storage has lost it."""
        tree = self.tree
        before = super().find(Place(place.namespace, bytes(tree.part(place.key, 0, good))))
        child = before.children.get(bytes(tree.part(place.key, good, self.page_size)))
        if before.end != good:
            return
        if child is None:
            if before.state is not None and isinstance(tree, StateTree) and not before.state.locks:
                self._drop_state(before)
            return
        for victim in reversed([child, *child.walk()]):
            if victim.locks or victim.children:
                return  # a copy that is under way finds the same, and comes here again
            self._node_leaves(victim, victim.tokens // self.page_size)
            self.tree.remove(victim)
        self.flush_deletes()

    def _drop_state(self, node: Node) -> None:
        state = node.state
        if state is not None:
            self.pool.detach(node)
            self._free_state(state.slot)
            self.flush_deletes()

    def flush_deletes(self) -> None:
        """Delete from storage what has left the tree."""
        if self._gone:
            self.delete(self._gone)
            self._gone = []

    def _attach(self, node: Node, key: bytes) -> None:
        if isinstance(self.tree, StateTree):
            self._next_state += 1
            self._states[self._next_state] = key
            self.tree.attach(node, self._next_state)

    def _adopt(self, place: Place, parent: Node, hashes: list[int]) -> Node:
        """Add pages that an earlier run left after a node, with the state at their end if there is one."""
        for value in hashes:
            self._orphan_units -= self._orphans.pop(self.page_key(value))
        key = self.tree.part(place.key, parent.end, len(hashes) * self.page_size)
        node = self.tree.append(parent, key, None, None)
        node.hashes = hashes
        state = self.state_key(hashes[-1])
        if self.has_states and state in self._orphans:
            self._orphan_units -= self._orphans.pop(state)
            self._attach(node, state)
        self._reserve()
        return node

    def _evict_orphans(self, units: int) -> None:
        """Evict what an earlier run left, oldest first, until so many units are free or none is left."""
        pool = self.pool
        gone = []
        while self._orphans and pool.capacity - pool.used - self._held() - self._orphan_units < units:
            key, size = self._orphans.popitem(last=False)
            self._orphan_units -= size
            gone.append(key)
        if gone:
            self.delete(gone)
            self._reserve()

    def _held(self) -> int:
        pool = self.pool
        return self._reserved[0] * pool.token_units + self._reserved[1] * pool.state_units

    def _reserve(self) -> None:
        self.pool.reserved = self._held() + self._orphan_units

    def _node_leaves(self, node: Node, pages: int) -> None:
        super()._node_leaves(node, pages)
        hashes = node.hashes or []
        cut = len(hashes) - pages
        self._gone.extend(self.page_key(value) for value in hashes[cut:])
        del hashes[cut:]

    def _state_leaves(self, node: Node) -> None:
        pass  # its entry is deleted when the slot is freed

    def _free_state(self, slot: int) -> None:
        self._gone.append(self._states.pop(slot))
