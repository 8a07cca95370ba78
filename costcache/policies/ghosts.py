"""Ghosts: a policy's memories of evicted nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Ghosts"]

M = TypeVar("M")


class Ghosts(Generic[M]):
    """Memories of evicted nodes by name, the oldest dropped first.

    A name is :meth:`costcache.records.NodeRecord.prefix_hash`: a node is recognised when a new one starts
    with the same page after the same prefix. The tokens of the nodes are bounded, and with them the
    number of entries, by one per page.

    Attributes:
        tokens: Tokens of all remembered nodes.
    """

    __slots__ = ("_dropped", "_memories", "_most", "_room", "_slack", "tokens")

    def __init__(
        self, room: float, dropped: Callable[[M], object] | None = None, *, slack: float = 0.0
    ) -> None:
        """Make an empty memory.

        Args:
            room: Most tokens of all remembered nodes.
            dropped: Called with each memory that is dropped to make room.
            slack: Share of ``room`` by which it may be exceeded until :meth:`fit` is called.
        """
        self._memories: OrderedDict[int, tuple[M, int]] = OrderedDict()
        self._room = 0.0
        self._slack = slack
        self.widen(room)
        self._dropped = dropped
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._memories)

    def widen(self, room: float) -> None:
        """Give it room for so many more tokens."""
        self._room += room
        self._most = self._room * (1.0 + self._slack)

    def keep(self, name: int | None, tokens: int, memory: M) -> None:
        """Remember an evicted node of ``tokens`` tokens; one without a name is not remembered."""
        if name is None:
            return
        if name in self._memories:
            before = self.take(name)
            if before is not None and self._dropped is not None:
                self._dropped(before)
        self._memories[name] = (memory, tokens)
        self.tokens += tokens
        if self.tokens > self._most:
            self.fit()

    def fit(self, room: float | None = None) -> None:
        """Drop the oldest until the others fit into ``room`` tokens; by default, into the room they have."""
        if room is None:
            room = self._room
        while self.tokens > room:
            oldest, had = self._memories.popitem(last=False)[1]
            self.tokens -= had
            if self._dropped is not None:
                self._dropped(oldest)

    def peek(self, name: int) -> M | None:
        """The memory of a node, which stays; None if there is none."""
        found = self._memories.get(name)
        return None if found is None else found[0]

    def take(self, name: int | None) -> M | None:
        """Forget a node that is cached again, and return its memory; None if there is none."""
        found = self._memories.pop(name, None) if name is not None else None
        if found is None:
            return None
        self.tokens -= found[1]
        return found[0]
