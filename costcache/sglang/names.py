"""Names of prefixes in SGLang's trees, by which what went is known again when it comes back.

A name is the CRC-32 of the whole prefix through a page, with the page's place in front of it. A node keeps
the checksum of all that ends with it, once somebody has needed it.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

__all__ = ["page_name"]


def page_name(node: Any, depth: int, offset: int) -> int:
    """A name for what a node holds; see :meth:`costcache.records.NodeRecord.prefix_hash`.

    Args:
        node: The node, with its ``key``, ``parent``, ``page_size`` and ``checksum``.
        depth: Tokens of the prefix in front of the node.
        offset: Where in the node the page begins that ends the name.
    """
    page: int = node.page_size
    start = offset // page * page
    tokens = _tokens(node.key)
    checksum = _above(node)
    if start:
        checksum = zlib.crc32(memoryview(tokens)[:start], checksum)
    return depth + offset << 32 | zlib.crc32(tokens[start : start + page], checksum)


def _above(node: Any) -> int:
    """CRC-32 of the prefix in front of a node, its namespace included."""
    above = node.parent
    if above.parent is None:
        return zlib.crc32(repr((node.key.extra_key, node.key.cache_salt)).encode())
    known: int | None = above.checksum
    if known is not None:
        return known
    waiting: list[Any] = [above]
    while above.parent.parent is not None and above.parent.checksum is None:
        above = above.parent
        waiting.append(above)
    checksum = _above(above)
    while waiting:
        above = waiting.pop()
        checksum = zlib.crc32(_tokens(above.key), checksum)
        above.checksum = checksum
    return checksum


def _tokens(key: Any) -> Any:
    """A key's own tokens, int64; a bigram key shares its last one with what comes after."""
    ids = key.token_ids
    if key.limit is not None or not isinstance(ids, array):
        ids = array("q", key.raw_token_ids())
    return ids[:-1] if key.is_bigram else ids
