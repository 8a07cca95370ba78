"""A tier as the copies see it: a tree over pools, the memory of its rows, and what a request resumes from.

A request resumes at the end of a node if the KV of its whole prefix is there, and besides it an *ending*, in
models that need one: a state, or where sliding windows are evicted apart, the window KV of the last tokens.
An ending is copied as one piece with the prefix that it is at the end of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from costcache.radix.node import Node, Root
from costcache.radix.states import StateTree
from costcache.radix.windows import WindowTree
from costcache.records import RequestRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from costcache.pool import Pool
    from costcache.radix.tree import RadixTree
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.rows import WindowRows

__all__ = ["NO_SLOTS", "Place", "Source", "Tier", "place_of"]

NO_SLOTS: NDArray[np.int64] = np.empty(0, np.int64)


class Place(NamedTuple):
    """A prefix, by what every tier knows it by.

    Attributes:
        namespace: ``(extra_key, cache_salt)``.
        key: Its tokens, whole pages, as the bytes of int64.
    """

    namespace: tuple[str | None, ...]
    key: bytes

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Its tokens, int64 of shape [tokens]."""
        return np.frombuffer(self.key, np.int64)

    @property
    def names(self) -> dict[str, str | None]:
        """Its namespace, as a cache's calls take it."""
        extra_key, cache_salt = (*self.namespace, None, None)[:2]  # that of an empty prefix may have no names
        return {"extra_key": extra_key, "cache_salt": cache_salt}


def place_of(node: Node) -> Place:
    """The prefix that ends with a node of any tier's tree."""
    path = node.path()
    root = path[0].parent if path else node
    namespace = root.namespace if isinstance(root, Root) else ()
    return Place(namespace, b"".join(bytes(part.key) for part in path))


class Tier:
    """A tree, and which rows of a memory its tokens and endings have.

    Attributes:
        name: ``"device"``, ``"host"`` or ``"disk"``.
        tree: The tree.
        page_size: Tokens per page.
        needs_ending: Whether a request needs an ending to resume from.
        windows: Rows of window KV; None in a tier without any, and in storage.
    """

    def __init__(self, name: str, tree: RadixTree) -> None:
        self.name = name
        self.tree = tree
        self.page_size = tree.page_size
        self.needs_ending = isinstance(tree, StateTree | WindowTree)
        self.windows: WindowRows | None = None
        self._nobody = RequestRecord(0)

    @property
    def pool(self) -> Pool:
        """The pool of the tier's tokens."""
        return self.tree.pool

    def forecaster(self, device: Pool) -> Pool:
        """The pool whose order forecasts for the nodes of this tier, given that of the device."""
        return device

    def find(self, place: Place) -> Node:
        """The node at the end of the longest part of a prefix that is here; nothing is used."""
        tree = self.tree
        return tree.match(tree.root(place.namespace), memoryview(place.key), self._nobody, [])

    def first(self, place: Place, tokens: int) -> Place:
        """The first tokens of a prefix, whole pages."""
        return Place(place.namespace, place.key[: tokens // self.page_size * self.tree.page_bytes])

    def usable(self, node: Node) -> Node:
        """The deepest node on the path to ``node`` from which a request can resume."""
        tree = self.tree
        return tree.usable(node) if isinstance(tree, StateTree | WindowTree) else node

    def ends(self, node: Node) -> bool:
        """Whether a request can resume from the very end of a node."""
        return node.parent is not None and self.usable(node) is node

    def ending_rows(self, end: int) -> int:
        """Rows of the ending of a prefix of so many tokens."""
        tree = self.tree
        if isinstance(tree, WindowTree):
            return min(end, tree.tail)
        return int(self.needs_ending and end > 0)

    def slots_of(self, node: Node) -> NDArray[np.int64]:
        """Slots of a prefix, from its first token on."""
        parts = [part.slots for part in node.path() if part.slots is not None]
        return np.concatenate(parts) if parts else NO_SLOTS

    def ending(self, node: Node) -> NDArray[np.int64]:
        """Rows of the ending of a node; none if it has no whole one."""
        if node.state is not None:
            return np.array([node.state.slot], np.int64)
        if self.windows is None or not self.ends(node):
            return NO_SLOTS
        count, parts = self.ending_rows(node.end), [NO_SLOTS]
        start = node.end - count
        while node.parent is not None and node.end > start:
            if node.slots is not None:
                parts.append(node.slots)
            node = node.parent
        rows = self.windows.of(np.concatenate(parts[::-1])[-count:])
        return rows if (rows >= 0).all() else NO_SLOTS

    def resting_on(self, node: Node) -> list[Node]:
        """Nodes that lose their ending with that of ``node``, itself included if it has one."""
        tree = self.tree
        return tree.resting_on(node) if isinstance(tree, WindowTree) else [node]


class Source:
    """The source of a copy: rows that stay where they are, or those of what is evicted, read at once."""

    def __init__(
        self, buffers: Buffers, slots: NDArray[np.int64], ending: NDArray[np.int64], *, at_once: bool
    ) -> None:
        self._buffers = buffers
        self._slots = slots
        self._ending = ending
        self._read: tuple[Any, Any] | None = None
        self._error: BaseException | None = None
        if at_once:
            try:
                self._read = (
                    buffers.tokens.gather(slots),
                    None if buffers.endings is None or not ending.size else buffers.endings.gather(ending),
                )
            except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError where there is no memory
                self._error = error  # of this rank alone: the copy fails, and with it that of the others

    def copy(self, memory: Buffers, slots: NDArray[np.int64], ending: NDArray[np.int64]) -> None:
        """Copy the rows to those of another memory.

        Raises:
            RuntimeError: They could not be read.
        """
        ours, theirs = self._buffers, memory
        self._check()
        if self._read is not None:
            theirs.tokens.scatter(slots, self._read[0])
        else:
            ours.tokens.copy(self._slots, theirs.tokens, slots)
        if not ending.size or ours.endings is None or theirs.endings is None:
            return
        if self._read is not None:
            theirs.endings.scatter(ending, self._read[1])
        else:
            ours.endings.copy(self._ending, theirs.endings, ending)

    def tokens(self, here: slice) -> list[memoryview]:
        """The bytes of some of the tokens.

        Raises:
            RuntimeError: They could not be read.
        """
        self._check()
        if self._read is not None:
            return [_bytes(self._read[0][here])]
        return self._buffers.tokens.pack(self._slots[here])

    def ending(self, here: slice) -> list[memoryview]:
        """The bytes of some rows of the ending."""
        self._check()
        if self._read is not None:
            return [_bytes(self._read[1][here])]
        rows = self._buffers.endings
        return [] if rows is None else rows.pack(self._ending[here])

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _bytes(rows: Any) -> memoryview:
    """Rows of the host as bytes."""
    return memoryview(rows.numpy()).cast("B")
