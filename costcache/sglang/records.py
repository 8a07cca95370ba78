"""Records of SGLang's tree nodes, and the hashes by which an evicted prefix is recognised.

A hash is the CRC-32 of the whole prefix through a page, with the page's depth in the upper bits. A node keeps
the checksum of all tokens up to its end, once it has been needed.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any, Final

from costcache.pool import Pool
from costcache.radix.node import shared_pages
from costcache.records import NodeRecord

__all__ = ["PoolRecord", "add_record", "drop_record"]

_NO_NAMESPACE: Final = zlib.crc32(repr((None, None)).encode())


class PoolRecord(NodeRecord):
    """A record with its tree node.

    Attributes:
        node: The tree node, or its id on the Rust core; None once it has left the pool.
    """

    __slots__ = ("node",)

    def __init__(self, parent: NodeRecord | None, tokens: int, depth: int, node: Any) -> None:
        NodeRecord.__init__(self, 0, parent, tokens, depth)  # the pool numbers it
        self.node = node

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`; None on the Rust core, which hides its keys."""
        node = self.node
        return None if node is None or isinstance(node, int) else _page_hash(node, self.depth, offset)

    def content(self, start: int, end: int) -> bytes | None:
        """See :class:`costcache.records.NodeRecord`; None if the node has been cut already, too."""
        node = self.node
        if node is None or isinstance(node, int):
            return None
        tokens = _tokens(node.key)
        if len(tokens) != end:
            return None
        content: bytes = memoryview(tokens)[start:].tobytes() if start else tokens.tobytes()
        return content

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int | None:
        """See :class:`costcache.records.NodeRecord`."""
        node = self.node
        if node is None or isinstance(node, int):
            return None
        checksum = _checksum_before(node)
        if offset:
            checksum = zlib.crc32(memoryview(_tokens(node.key))[:offset], checksum)
        return self.depth + offset << 32 | zlib.crc32(content[: 8 * node.page_size], checksum)

    def shared(self, offset: int, content: bytes | bytearray) -> int:
        """See :class:`costcache.records.NodeRecord`."""
        node = self.node
        own: bytes = memoryview(_tokens(node.key))[offset : offset + len(content) // 8].tobytes()
        if own == content:  # the usual case
            return len(own) // 8
        page: int = node.page_size
        return shared_pages(own, content, 8 * page) * page


def add_record(
    pool: Pool,
    node: Any,
    tokens: int,
    depth: int,
    parent: NodeRecord | None = None,
    *,
    priority: int = 0,
    history: NodeRecord | None = None,
    after: NodeRecord | None = None,
    locks: int = 0,
) -> PoolRecord:
    """Report a new node to a pool, on behalf of the current request.

    Args:
        pool: The pool.
        node: The tree node, or its id.
        tokens: Units of the pool that it takes.
        depth: Tokens of the prefix before it.
        parent: Record of the parent node; the pool's root by default.
        priority: See :meth:`costcache.pool.Pool.insert`, as for the others.
        history: Likewise.
        after: Record of the node before it, of which an order may take over what it knows if there is no
            history: in a flat pool it does not see what a node follows.
        locks: Likewise.
    """
    record = PoolRecord(parent, tokens, depth, node)
    if after is not None and history is None:
        pool.inherit(record, after)
    pool.insert(record, pool.request, priority=priority, history=history, locks=locks)
    return record


def drop_record(pool: Pool, record: PoolRecord) -> None:
    """Report to a pool that a node left it."""
    pool.remove(record)
    record.node = None  # an order may keep the record for a while, but not the node


def _page_hash(node: Any, depth: int, offset: int) -> int:
    """Hash of a prefix up to the end of a page of a node.

    Args:
        node: The node, with its ``key``, ``parent``, ``page_size`` and ``checksum``.
        depth: Tokens of the prefix before the node.
        offset: Tokens of the node before the page.
    """
    page: int = node.page_size
    start = offset // page * page
    tokens = _tokens(node.key)
    checksum = _checksum_before(node)
    if start:
        checksum = zlib.crc32(memoryview(tokens)[:start], checksum)
    return depth + offset << 32 | zlib.crc32(tokens[start : start + page], checksum)


def _checksum_before(node: Any) -> int:
    """CRC-32 of the prefix before a node, including its namespace."""
    above = node.parent
    if above.parent is None:
        key = node.key
        if key.extra_key is None and key.cache_salt is None:  # the usual case
            return _NO_NAMESPACE
        return zlib.crc32(repr((key.extra_key, key.cache_salt)).encode())
    known: int | None = above.checksum
    if known is not None:
        return known
    waiting: list[Any] = [above]
    while above.parent.parent is not None and above.parent.checksum is None:
        above = above.parent
        waiting.append(above)
    checksum = _checksum_before(above)
    while waiting:
        above = waiting.pop()
        checksum = zlib.crc32(_tokens(above.key), checksum)
        above.checksum = checksum
    return checksum


def _tokens(key: Any) -> Any:
    """A key's own tokens, int64; a bigram key shares its last one with the key after it."""
    ids = key.token_ids
    if key.limit is not None or not isinstance(ids, array):
        ids = array("q", key.raw_token_ids())
    return ids[:-1] if key.is_bigram else ids
