"""Qwen-Bailian's traces of a cloud service: one request a line, blocks of 16 tokens.

Fields: ``chat_id``, ``parent_chat_id`` (-1 for the first turn), ``timestamp`` (seconds from the start),
``input_length``, ``output_length`` (tokens), ``hash_ids`` (salted hashes of the blocks' content,
renumbered; one per block of the prompt), ``type`` (text, search, image, file) and ``turn``. Source:
github.com/alibaba-edu/qwen-bailian-usagetraces-anon.

A chat whose parent is in the file belongs to its parent's session. Ids are identified by their path, since
one block of content may follow several prefixes. A partial last block may have an id or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from costcache.sim.traces.columns import Columns
from costcache.sim.traces.rows import BlockId, Rows, Seconds, Tokens, fail

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_bailian"]

_BLOCK_SIZE = 16

_Id = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class _Line(msgspec.Struct, gc=False):
    chat_id: _Id
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]
    parent_chat_id: _Id = -1


_ROWS = Rows(
    _Line,
    {
        "chat_id": "the request's number, a whole number",
        "parent_chat_id": "the number of the turn before, -1 for none",
        "timestamp": "seconds from the start, 0 or more",
        "input_length": "tokens of the prompt, a whole number, 0 or more",
        "output_length": "generated tokens, a whole number, 0 or more",
        "hash_ids": "a list of whole numbers from 0 to 2**63 - 1",
    },
)


def read_bailian(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a file of requests.

    Args:
        source: The file.
        block_size: Tokens per hash id; 16 by default.

    Raises:
        TraceError: If a line is malformed.
    """
    size = block_size or _BLOCK_SIZE
    columns = Columns(source)
    roots: dict[int, int] = {}
    for number, row in _ROWS.read(source):
        tokens, count = row.input_length, len(row.hash_ids)
        if count not in (tokens // size, -(-tokens // size)):
            expected = f"{-(-tokens // size)} for input_length {tokens} in blocks of {size} tokens"
            fail(source.label, number, "the number of hash_ids", count, expected)
        columns.ids.fromlist(row.hash_ids)
        if count * size < tokens:
            columns.ids.append(-1 - len(columns))  # the file has no negative ids
        root = roots.get(row.parent_chat_id, row.parent_chat_id)
        roots[row.chat_id] = session = row.chat_id if row.parent_chat_id < 0 else root
        columns.add(row.timestamp, tokens, row.output_length, session=session)
    return columns.trace(size)
