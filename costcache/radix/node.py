"""A node of the radix tree: a record with a key, slots and children."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from costcache.records import NodeRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Node", "Root", "shared_pages"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Node(NodeRecord):
    """One edge of the tree: whole pages of a prefix that its requests share.

    Attributes:
        key: The node's tokens, ``tokens / page_size`` pages of the tree's page bytes each. A
            bytearray, since that compares with any buffer at memory speed and shrinks in place.
        slots: Slots of the node's tokens, int64 of shape [tokens]; None in a tree that only counts.
        children: Child nodes by the bytes of their first page.
        checksum: CRC-32 of the whole prefix through this node; None until it is needed.
        edge: Bytes of the first page, by which its parent finds the node.
        hashes: Hash of the prefix up to each page; None unless the cache has observers.
        window: Record of the node's sliding-window KV, in a cache that evicts it alone; None without any.
        into: The node that took this one's tokens over when both were merged; None for others.
    """

    __slots__ = ("checksum", "children", "edge", "hashes", "into", "key", "slots", "window")

    def __init__(
        self,
        parent: Node | None,
        tokens: int,
        depth: int,
        edge: bytes,
        key: bytearray,
        slots: NDArray[np.int64] | None,
    ) -> None:
        NodeRecord.__init__(self, 0, parent, tokens, depth)  # the pool numbers it
        self.edge = edge
        self.key = key
        self.slots = slots
        self.children: dict[bytes, Node] = {}
        self.hashes: list[int] | None = None
        self.checksum: int | None = None
        self.window: NodeRecord | None = None
        self.into: Node | None = None

    def current(self) -> Node:
        """The node that has this one's tokens by now: itself, unless it was merged into another one."""
        node = self
        while node.into is not None:
            node = node.into
        return node

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`; None for a root and for an evicted node."""
        parent = self.parent
        if parent is None:
            return None
        checksum, page = parent.checksum, self.edge
        if checksum is None:
            checksum = parent.prefix_checksum()
        if offset:
            start = self._byte(offset)
            checksum = zlib.crc32(memoryview(self.key)[:start], checksum)
            page = bytes(self.key[start : start + len(page)])
        # With the depth beside the 32-bit checksum, only prefixes of one length can collide.
        return self.depth + offset << 32 | zlib.crc32(page, checksum)

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int | None:
        """See :class:`costcache.records.NodeRecord`; None for a root and for an evicted node."""
        parent = self.parent
        if parent is None:
            return None
        checksum = zlib.crc32(memoryview(self.key)[: self._byte(offset)], parent.prefix_checksum())
        return self.depth + offset << 32 | zlib.crc32(content[: len(self.edge)], checksum)

    def _byte(self, offset: int) -> int:
        """Index in the key of the page that begins ``offset`` tokens after the node's start."""
        size = len(self.edge)
        return offset * len(self.key) // self.tokens // size * size

    def content(self, start: int, end: int) -> bytes | bytearray | None:
        """See :class:`costcache.records.NodeRecord`."""
        key = self.key
        if not start:
            return key  # all of it is evicted, and nobody changes it any more: no need to read it
        return key[start * len(key) // end :]

    def shared(self, offset: int, content: bytes | bytearray) -> int:
        """See :class:`costcache.records.NodeRecord`."""
        key, size = self.key, len(self.edge)
        start = self._byte(offset)
        pages = shared_pages(key[start : start + len(content)], content, size)
        return pages * size * self.tokens // len(key)

    def prefix_checksum(self) -> int:
        """CRC-32 of the whole prefix through this node, including its namespace.

        Chained from node to node, so that it does not depend on where nodes begin and end. Each byte is read
        once, when the first node below this one is hashed.
        """
        waiting: list[Node] = []
        node: Node = self
        while node.checksum is None:
            waiting.append(node)
            if node.parent is None:
                break
            node = node.parent
        checksum = node.checksum or 0
        for node in reversed(waiting):
            node.checksum = checksum = zlib.crc32(node.hashed_bytes(), checksum)
        return checksum

    def hashed_bytes(self) -> bytearray | bytes:
        """Bytes that the node adds to the checksum."""
        return self.key

    def path(self) -> list[Node]:
        """The nodes from the root, exclusive, down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def walk(self) -> Iterator[Node]:
        """This node's descendants, parents before children, siblings in order of insertion."""
        stack = list(reversed(self.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))


class Root(Node):
    """The empty top node of one namespace; never a victim."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: tuple[str | None, ...]) -> None:
        super().__init__(None, 0, 0, b"", bytearray(), None)
        self.namespace = namespace

    def hashed_bytes(self) -> bytes:
        """Bytes that the namespace adds to the checksum of its prefixes."""
        return repr(self.namespace).encode()


def shared_pages(a: bytes | bytearray, b: bytes | bytearray | memoryview, page_bytes: int) -> int:
    """Count the whole pages that ``a`` and ``b`` have in common at their start.

    Bisects with memory comparisons: each byte is compared about once, in O(log pages) steps.
    """
    low, high = 0, min(len(a), len(b)) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = low * page_bytes, middle * page_bytes
        if a[start:stop] == b[start:stop]:
            low = middle
        else:
            high = middle - 1
    return low
