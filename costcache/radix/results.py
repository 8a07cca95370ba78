"""The results of the calls of a prefix cache: matches, inserts and statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costcache.radix.node import Node

__all__ = ["CacheStats", "Inserted", "Match", "joined", "slots_of"]

Out = Callable[[NDArray[np.int64]], Any]
"""Turns slots into what the caller uses: a copy of the array, or a tensor on the caller's device."""


class Match:
    """The result of :meth:`RadixCache.match_prefix`.

    Attributes:
        matched_len: Tokens that are cached, whole pages.
        node: The node at the end of the match; lock it while the slots are in use.
    """

    __slots__ = ("_out", "_parts", "matched_len", "node")

    def __init__(self, node: Node, out: Out) -> None:
        self.matched_len = node.depth + node.tokens
        self.node = node
        self._out = out
        # Captured now: later changes of the tree do not change what was found.
        self._parts = slots_of(node)

    @property
    def slots(self) -> Any:
        """Slots of the matched tokens, int64 of shape [matched_len]; a tensor if tensors were inserted.

        The caller's own copy: writing to it changes nothing in the cache.
        """
        return self._out(np.concatenate(self._parts) if self._parts else np.empty(0, np.int64))

    def __repr__(self) -> str:
        return f"Match(matched_len={self.matched_len}, node={self.node!r})"


class Inserted:
    """The result of :meth:`RadixCache.insert`.

    Attributes:
        node: The node at the end of the cached prefix.
        matched_len: Tokens that were cached before.
        inserted_len: Tokens that were added.
    """

    __slots__ = ("_given", "_out", "_parts", "_windows", "inserted_len", "matched_len", "node")

    def __init__(
        self,
        node: Node,
        matched_len: int,
        inserted_len: int,
        given: NDArray[np.int64] | None,
        parts: list[NDArray[np.int64]],
        out: Out,
    ) -> None:
        self.node = node
        self.matched_len = matched_len
        self.inserted_len = inserted_len
        self._out = out
        self._given = given
        self._parts = parts
        self._windows: list[tuple[int, NDArray[np.int64]]] = []

    def _keep(self, nodes: list[Node]) -> None:
        """Note that the cache took over the window KV of some nodes, unless it was evicted again."""
        for node in nodes:
            if node.window is not None and node.slots is not None:
                self._windows.append((node.depth, node.slots))  # the slots of now

    @property
    def windows(self) -> Any:
        """The tokens whose window KV the cache took over: two rows of slots, int64 of shape [2, n].

        The caller's slots, which name that KV so far, and the cache's slots, which name it from now on. They
        are equal unless the tokens are duplicates.
        """
        mine, cached = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start, slots in self._windows:
            cached.append(slots)
            mine.append(slots if self._given is None else self._given[start : start + slots.size])
        return self._out(np.stack((np.concatenate(mine), np.concatenate(cached))))

    @property
    def duplicates(self) -> Any:
        """The caller's slots of tokens that the cache already has in other slots.

        int64 of shape [n]; they stay the caller's, to free or to use again.
        """
        if self._given is None:
            return self._out(np.empty(0, np.int64))
        mine = self._given[: self.matched_len]
        return self._out(mine[mine != joined(self._parts)])

    @property
    def unused(self) -> Any:
        """The caller's slots of tokens that are not cached: those of a partial page at the end."""
        if self._given is None:
            return self._out(np.empty(0, np.int64))
        return self._out(self._given[self.matched_len + self.inserted_len :])

    def __repr__(self) -> str:
        return f"Inserted(matched_len={self.matched_len}, inserted_len={self.inserted_len})"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made, in tokens unless said otherwise.

    Attributes:
        hits: Matches that found something.
        misses: Matches that found nothing.
        hit_tokens: Tokens found by matches.
        asked_tokens: Tokens that matches asked for.
        cached: Tokens in the cache now.
        free: Unused slots now.
        reserved: Slots that running requests own now, outside the cache.
        protected: Locked cached tokens now.
        nodes: Nodes in the tree now.
        evictions: Evictions that had a shortfall.
        evicted: Tokens evicted.
        trimmed: Victims evicted in part, from the tail.
        clamped: Answers of plugins that were out of bounds and replaced.
        fallbacks: Policies dropped for LRU: 0 or 1 since the last reset.
        oversized: Requests longer than the whole pool.
        policy: Name of the policy in force.
    """

    hits: int
    misses: int
    hit_tokens: int
    asked_tokens: int
    cached: int
    free: int
    reserved: int
    protected: int
    nodes: int
    evictions: int
    evicted: int
    trimmed: int
    clamped: int
    fallbacks: int
    oversized: int
    policy: str


def joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Concatenate arrays of slots; without a copy if there is one."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def slots_of(node: Node) -> list[NDArray[np.int64]]:
    """The slots of each node from the root to ``node``."""
    return [part.slots for part in node.path() if part.slots is not None]
