"""Events that a cache sends to its observers: the prefixes that it stored and removed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costcache.radix.node import Node

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Cleared", "Event", "EventStream", "Removed", "Stored"]

logger = logging.getLogger("costcache")

Namespace = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Pages were added to the cache.

    A page is named by the hash of its namespace and of the whole prefix up to its end (8 bytes of
    BLAKE2b, chained page by page), so names do not change when nodes split.

    Attributes:
        namespace: ``(extra_key, cache_salt)``.
        parent: Hash of the page before, None at the start of a prefix.
        hashes: Hash of each page.
        tokens: int64 of shape [pages * page_size].
        page_size: Tokens per page.
    """

    namespace: Namespace
    parent: int | None
    hashes: tuple[int, ...]
    tokens: NDArray[np.int64]
    page_size: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages left the cache.

    Attributes:
        namespace: ``(extra_key, cache_salt)``.
        hashes: Hash of each page.
    """

    namespace: Namespace
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was reset: every page left it."""


Event = Stored | Removed | Cleared


class EventStream:
    """Sends events to observers, in the order of the changes."""

    def __init__(self, page_bytes: int, page_size: int) -> None:
        self._page_bytes = page_bytes
        self._page_size = page_size
        self._observers: list[Callable[[Event], None]] = []

    def __bool__(self) -> bool:
        """True while there are observers; without any, nothing is hashed."""
        return bool(self._observers)

    def subscribe(self, observer: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``observer`` with every event from now on; returns a function that stops it."""
        self._observers.append(observer)

        def unsubscribe() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return unsubscribe

    def stored(self, node: Node, namespace: Namespace) -> None:
        """Report a new leaf."""
        import numpy as np

        parent = self.hash(node, namespace)
        self._send(
            Stored(
                namespace,
                parent,
                tuple(node.hashes or ()),
                np.frombuffer(bytes(node.key), np.int64),
                self._page_size,
            )
        )

    def removed(self, node: Node, namespace: Namespace, pages: int) -> None:
        """Report that the last ``pages`` pages of ``node`` are about to be removed."""
        hashes = node.hashes or []
        cut = len(hashes) - pages
        self._send(Removed(namespace, tuple(hashes[cut:])))
        del hashes[cut:]

    def cleared(self) -> None:
        """Report a reset."""
        self._send(Cleared())

    def hash(self, node: Node, namespace: Namespace) -> int | None:
        """Hash the pages of ``node``, chained from its parent's; returns the hash before its first page."""
        parent = node.parent
        before = parent.hashes[-1] if parent is not None and parent.hashes else None
        digest = repr(namespace).encode() if before is None else before.to_bytes(8, "little")
        hashes, key, step = [], node.key, self._page_bytes
        for at in range(0, len(key), step):
            digest = hashlib.blake2b(digest + key[at : at + step], digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "little"))
        node.hashes = hashes
        return before

    def _send(self, event: Event) -> None:
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception:
                logger.exception("observer %r raised and is dropped", observer)
                if observer in self._observers:  # it may have unsubscribed itself
                    self._observers.remove(observer)
