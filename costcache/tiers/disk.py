"""The disk tier: an entry in storage for each page, and for each state or page of window KV."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from costcache.radix.states import StateTree
from costcache.radix.windows import WindowTree
from costcache.tiers.lower import LowerTier
from costcache.tiers.tier import Place, Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.pool import Pool
    from costcache.radix.node import Node
    from costcache.records import Asker
    from costcache.storage import SealedStore
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.lower import LowerBinding
    from costcache.tiers.ranks import Ranks

__all__ = ["DiskLanding", "DiskTier"]

_STATE, _WINDOW = b"s", b"w"
"""Ends of the keys of a state and of a page's window KV in storage; that of a page is its hash alone."""
_HASH_BYTES = 20
_ENTRY_BYTES = 64
"""Bytes of an entry beside its payload: the seal's header and the key."""


class DiskTier(LowerTier):
    """Storage: entries by the hash of the prefix up to the end of their page.

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
        """Make the tier over a store that was just opened.

        Raises:
            SettingsError: It has no room for a page and what a request resumes from.
        """
        tree = binding.tree(memory, None, _ENTRY_BYTES / binding.page_size)
        super().__init__("disk", binding, tree)
        self.store = store
        self.delete = delete
        self.left = Leftovers()
        self.writing: set[bytes] = set()  # entries of endings that are being written
        self._seed = fingerprint
        self._states: dict[int, bytes] = {}
        self._next_state = 0
        self._gone: list[bytes] = []
        self._reserved = [0, 0]  # tokens, and rows of endings, that are being written
        found = store.keys()
        common = ranks.common([key for key, _ in found])
        kept = set(common)
        stale = [key for key, _ in found if key not in kept]
        for key in common:
            self.left.add(*self._measured(key), key)
        for key in stale:  # other ranks have lost them; no other thread calls the store yet
            store.delete(key)
        self._evict_leftovers(0, 0)
        self._count_reserved()

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

    @staticmethod
    def window_key(value: int) -> bytes:
        """The key of a page's window KV."""
        return value.to_bytes(_HASH_BYTES, "little") + _WINDOW

    def ending_keys(self, place: Place, end: int) -> list[bytes]:
        """The keys of the entries of the ending of a prefix's first tokens."""
        if not self.needs_ending or not end:
            return []
        states = isinstance(self.tree, StateTree)
        first = end - (self.page_size if states else self.ending_rows(end))
        values = self.hashes(place, first, end, self._hash_before(place, first))
        return [self.state_key(value) if states else self.window_key(value) for value in values]

    def _hash_before(self, place: Place, start: int) -> int | None:
        """The hash of the page that ends at a token of a prefix, if the tree has it."""
        node = super().find(self.first(place, start))
        return node.hashes[-1] if node.hashes and node.end == start else None

    def _measured(self, key: bytes) -> tuple[Pool, int]:
        """The pool that an entry belongs to, and the units of it that it takes."""
        pool, end = self.pool, key[_HASH_BYTES:]
        if end == _STATE:
            return pool, pool.state_units
        if end == _WINDOW and isinstance(self.tree, WindowTree):
            return self.tree.windows, self.page_size
        return pool, pool.token_units * self.page_size

    # -- changes -----------------------------------------------------------------------------

    def find(self, place: Place) -> Node:
        """The node at the end of what is here of a prefix; what an earlier run left of it is adopted."""
        node = super().find(place)
        size = len(place.key) // self.tree.page_bytes * self.page_size
        if not self.left or node.end >= size:
            return node
        hashes: list[int] = []
        before = node.hashes[-1] if node.hashes else None
        at = node.end
        while at < size:
            (value,) = self.hashes(place, at, at + self.page_size, before)
            if self.page_key(value) not in self.left:
                break
            hashes.append(value)
            before, at = value, at + self.page_size
            if self.state_key(value) in self.left:
                node = self._adopt(place, node, hashes)
                hashes = []
        return self._adopt(place, node, hashes) if hashes else node

    def use(self, place: Place, request: Hashable, number: int, asker: Asker | None = None) -> Node:
        """See :meth:`LowerTier.use`; what an earlier run left is adopted first."""
        if self.left:
            self.find(place)
        return super().use(place, request, number, asker)

    def land(self, place: Place, start: int, rows: int) -> DiskLanding | None:
        """See :meth:`LowerTier.land`; entries that are there, or on their way, are not written again."""
        at = self.find(self.first(place, start))
        end = len(place.key) // self.tree.page_bytes * self.page_size
        before = at.hashes[-1] if at.hashes and at.end == start else None
        hashes = self.hashes(place, start, end, before)
        keys = self.ending_keys(place, end) if rows else []
        missing = [
            number
            for number, key in enumerate(keys)
            if key not in self.writing
            and not self._has_page_of_ending(at, end - (len(keys) - number) * self.page_size)
        ]
        rows = sum(rows // len(keys) for _ in missing)
        tokens = end - start
        self.tree.pin(at)
        self._evict_leftovers(tokens, rows)
        fits, rows_fit = self.room(at, tokens, rows)
        self.flush_deletes()
        if fits < tokens or rows_fit < rows:
            self.tree.unpin(at)
            self._count_reserved()
            return None
        # The chain of what an earlier run left may be broken: what follows the gap is written again.
        self.left.take([*(self.page_key(value) for value in hashes), *(keys[number] for number in missing)])
        self._reserved[0] += tokens
        self._reserved[1] += rows
        self._count_reserved()
        return DiskLanding(self, place, start, at, hashes, {number: keys[number] for number in missing}, rows)

    def _has_page_of_ending(self, at: Node, start: int) -> bool:
        """Whether the tree has the part of an ending that begins at a token, on the path to a node."""
        if not isinstance(self.tree, WindowTree):
            return at.state is not None and start + self.page_size == at.end
        node = at
        while node.parent is not None and node.depth > start:
            node = node.parent
        return node.end > start and node.window is not None

    def read(
        self,
        hashes: list[int],
        keys: list[bytes],
        memory: Buffers,
        slots: NDArray[np.int64],
        ending: NDArray[np.int64],
        *,
        unwanted: Callable[[], bool],
    ) -> int:
        """Read entries into rows of the host's memory, until one is missing; in the thread of the link.

        Args:
            hashes: Hashes of the pages to read.
            keys: Keys of the entries of the ending.
            memory: The host's memory.
            slots: Slots of the pages there.
            ending: Rows of the ending there, as many for each of its entries; none if it is not read.
            unwanted: Asked before each page whether nobody wants the rest.

        Returns:
            The pages read, plus one if the ending was read, too.
        """
        page = self.page_size
        for number, value in enumerate(hashes):
            here = slots[number * page : (number + 1) * page]
            payload = None if unwanted() else self.store.get(self.page_key(value))
            if payload is None or not memory.tokens.unpack(here, payload):
                return number
        if not ending.size or memory.endings is None:
            return len(hashes)
        each = ending.size // len(keys)
        for number, key in enumerate(keys):
            here = ending[number * each : (number + 1) * each]
            payload = self.store.get(key)
            if payload is None or not memory.endings.unpack(here, payload):
                return len(hashes)
        return len(hashes) + 1

    def settled(self, tokens: int, rows: int) -> None:
        """Give reserved room back."""
        self._reserved[0] -= tokens
        self._reserved[1] -= rows
        self._count_reserved()

    def add(
        self, place: Place, start: int, hashes: list[int], ending: Collection[bytes], history: Node | None
    ) -> Node | None:
        """Take over entries that are in storage now; returns the node at their end, None if it is cut off."""
        found = self.extend(place, start, None, history)
        if found is None:
            return None
        node, before = found
        if node.hashes is None and node.parent is not None:
            node.hashes = hashes[before // self.page_size :]
        if ending and node.parent is not None and node.hashes:
            if isinstance(self.tree, WindowTree):
                start = node.end - self.ending_rows(node.end)
                self._add_windows(node, start, ending, history)
            elif node.state is None:
                self._attach(node, self.state_key(node.hashes[-1]))
        return node

    def _add_windows(
        self, node: Node, start: int, keys: Collection[bytes], history: Node | None = None
    ) -> list[bytes]:
        """Add the window KV of pages, by the keys of their entries, to nodes on a path that have none."""
        tree, page = self.tree, self.page_size
        added: list[bytes] = []
        if not isinstance(tree, WindowTree):
            return added
        for each in node.path():
            if each.end <= start or each.window is not None or not each.hashes:
                continue
            theirs = [self.window_key(value) for value in each.hashes]
            flags = [key in keys for key in theirs]
            while flags:
                run = next((n for n, flag in enumerate(reversed(flags)) if flag != flags[-1]), len(flags))
                rest = tree.split(each, (len(flags) - run) * page) if run < len(flags) else each
                if flags[-1]:
                    tree.restore_window(each, each.depth, history)
                    added.extend(theirs[len(flags) - run : len(flags)])
                each = rest  # noqa: PLW2901 # the pages before the run
                del flags[-run:]
        return added

    def drop(self, place: Place, good: int) -> None:
        """Forget what follows the first ``good`` tokens of a prefix: storage has lost it."""
        tree = self.tree
        before = super().find(self.first(place, good))
        child = before.children.get(bytes(tree.part(place.key, good, self.page_size)))
        if before.end != good:
            return
        if child is None:
            self._drop_ending(before)
            return
        for victim in reversed([child, *child.walk()]):
            if victim.locks or victim.children:
                return  # a copy that is under way finds the same, and comes here again
            self._node_leaves(victim, victim.tokens // self.page_size)
            tree.remove(victim)
        self.flush_deletes()

    def _drop_ending(self, node: Node) -> None:
        tree, state = self.tree, node.state
        if state is not None and not state.locks:
            tree.pool.detach(node)
            self._free_state(state.slot)
        elif isinstance(tree, WindowTree):
            start = node.end - self.ending_rows(node.end)
            for each in node.path():
                window = each.window
                if each.end > start and window is not None and not window.locks:
                    self._gone.extend(self.window_key(value) for value in each.hashes or ())
                    tree.drop_window(each)
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
        """Add pages that an earlier run left after a node, with what is left of the endings there."""
        self.left.take([self.page_key(value) for value in hashes])
        key = self.tree.part(place.key, parent.end, len(hashes) * self.page_size)
        node = self.tree.append(parent, key, None, None)
        node.hashes = hashes
        state = self.state_key(hashes[-1])
        if self.needs_ending and self.left.take([state]):
            self._attach(node, state)
        if isinstance(self.tree, WindowTree):
            found = self.left.take([self.window_key(value) for value in hashes])
            self._count_reserved()
            self._add_windows(node, node.depth, set(found))
        self._count_reserved()
        return node

    def _evict_leftovers(self, tokens: int, rows: int) -> None:
        """Evict what an earlier run left, oldest first, until there is room or none is left."""
        pool, tree = self.pool, self.tree
        wanted = [(pool, tokens * pool.token_units + rows * pool.state_units)]
        if isinstance(tree, WindowTree):
            wanted.append((tree.windows, rows))
        gone = []
        for each, units in wanted:
            held = self._held(each)
            while each.capacity - each.used - held - self.left.units(each) < units:
                key = self.left.oldest(each)
                if key is None:
                    break
                gone.append(key)
        if gone:
            self.delete(gone)
            self._count_reserved()

    def _held(self, pool: Pool) -> int:
        """Units of a pool that are being written."""
        tokens, rows = self._reserved
        if isinstance(self.tree, WindowTree) and pool is self.tree.windows:
            return rows
        return tokens * pool.token_units + rows * pool.state_units

    def _count_reserved(self) -> None:
        pools = [self.pool, self.tree.windows] if isinstance(self.tree, WindowTree) else [self.pool]
        for pool in pools:
            pool.reserved = self._held(pool) + self.left.units(pool)

    def _node_leaves(self, node: Node, pages: int) -> None:
        super()._node_leaves(node, pages)
        hashes = node.hashes or []
        cut = len(hashes) - pages
        self._gone.extend(self.page_key(value) for value in hashes[cut:])
        if node.window is not None:
            self._gone.extend(self.window_key(value) for value in hashes[cut:])
        del hashes[cut:]

    def _ending_leaves(self, node: Node) -> None:
        if isinstance(self.tree, WindowTree):  # the entry of a state is deleted when its slot is freed
            self._gone.extend(self.window_key(value) for value in node.hashes or ())

    def _free_state(self, slot: int) -> None:
        self._gone.append(self._states.pop(slot))


class DiskLanding:
    """Room in storage for the entries of a copy that is under way."""

    def __init__(
        self,
        disk: DiskTier,
        place: Place,
        start: int,
        at: Node,
        hashes: list[int],
        ending: dict[int, bytes],
        rows: int,
    ) -> None:
        self._disk = disk
        self._place = place
        self._start = start
        self._at = at
        self._hashes = hashes
        self._ending = ending  # the entries to write, by their number in the ending
        self._rows = rows
        self._rows_each = rows // len(ending) if ending else 0
        disk.writing.update(ending.values())

    @property
    def size(self) -> int:
        """See :class:`costcache.tiers.lower.Landing`."""
        token = self._disk.binding.cost.token
        tokens = len(self._hashes) * self._disk.page_size
        return tokens * token.kv_bytes + self._rows * (token.state_bytes or token.swa_bytes)

    def write(self, source: Source) -> int:
        """See :class:`costcache.tiers.lower.Landing`."""
        disk, page, each = self._disk, self._disk.page_size, self._rows_each
        for number, value in enumerate(self._hashes):
            here = slice(number * page, (number + 1) * page)
            if not disk.store.put(disk.page_key(value), source.tokens(here)):
                return number
        for number, key in self._ending.items():
            if not disk.store.put(key, source.ending(slice(number * each, (number + 1) * each))):
                return len(self._hashes)
        return len(self._hashes) + 1

    def settle(self, done: int, history: Node) -> tuple[Node | None, int]:
        """See :class:`costcache.tiers.lower.Landing`."""
        disk, page, hashes = self._disk, self._disk.page_size, self._hashes
        ending = set(self._ending.values())
        disk.writing -= ending
        disk.tree.unpin(self._at)
        disk.settled(len(hashes) * page, self._rows)
        kept = min(done, len(hashes))
        whole = done > len(hashes)
        # This rank may have kept what another could not.
        lost = [disk.page_key(value) for value in hashes[kept:]]
        lost += [] if whole else ending
        node = None
        if kept or (whole and ending):
            arrived = disk.first(self._place, self._start + kept * page)
            node = disk.add(arrived, self._start, hashes[:kept], ending if whole else (), history)
            if node is None:
                lost += [*(disk.page_key(value) for value in hashes[:kept]), *(ending if whole else ())]
        if lost:
            disk.delete(lost)
        return node, kept * page


class Leftovers:
    """Entries that storage has from an earlier run and nobody has asked for, oldest first."""

    def __init__(self) -> None:
        self._by_pool: dict[str, OrderedDict[bytes, int]] = {}
        self._units: dict[str, int] = {}
        self._pools: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._pools)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pools

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pools)

    def add(self, pool: Pool, units: int, key: bytes) -> None:
        """Add an entry, younger than all others."""
        self._by_pool.setdefault(pool.name, OrderedDict())[key] = units
        self._units[pool.name] = self._units.get(pool.name, 0) + units
        self._pools[key] = pool.name

    def units(self, pool: Pool) -> int:
        """Units that the entries of a pool take."""
        return self._units.get(pool.name, 0)

    def take(self, keys: Iterable[bytes]) -> list[bytes]:
        """Take entries, as far as they are here."""
        found = [key for key in keys if key in self._pools]
        for key in found:
            name = self._pools.pop(key)
            self._units[name] -= self._by_pool[name].pop(key)
        return found

    def oldest(self, pool: Pool) -> bytes | None:
        """Take the oldest entry of a pool; None if there is none."""
        entries = self._by_pool.get(pool.name)
        if not entries:
            return None
        return self.take([next(iter(entries))])[0]
