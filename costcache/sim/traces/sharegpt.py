"""Turn lengths of ShareGPT's conversations: one conversation a line.

Fields: ``id`` and ``turns``, a list of ``[speaker, tokens, blanks]``. A turn of the assistant with
tokens before it is a request: all earlier turns are its prompt, and its own tokens are the output. So
the next prompt begins with the input and output of this turn, and conversations share nothing. No chat
template is counted.

There are no times. Think time is the time to write the user's turn: one word per blank, 90 words a minute,
as in the traces of Marconi (Pan et al., MLSys 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from costcache.sim.traces.columns import Columns
from costcache.sim.traces.rows import PieceTokens, Rows, Tokens

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_sharegpt"]

_BLOCK_SIZE = 16
_ASSISTANT = frozenset({"gpt", "chatgpt", "bing", "bard", "assistant"})
_SECONDS_PER_WORD = 60.0 / 90.0


class _Conversation(msgspec.Struct):
    turns: list[tuple[str, PieceTokens, Tokens]]
    id: str | None = None


_ROWS = Rows(
    _Conversation,
    {
        "id": "the conversation's name, text",
        "turns": "a list of [speaker, tokens, blanks], as ['human', 34, 28], of 2**22 tokens at most",
    },
)


def read_sharegpt(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a file of conversations.

    A block id is a position in a conversation, so a prompt's partial last block is the beginning of the
    block that the output completes: prefixes are exact at every page size.

    Args:
        source: The file.
        block_size: Tokens per block id; 16 by default.

    Raises:
        TraceError: If a line is malformed.
    """
    size = block_size or _BLOCK_SIZE
    columns = Columns(source)
    first = 0  # the first id of the conversation
    for number, row in _ROWS.read(source):
        tokens, blanks = 0, 0
        for speaker, length, words in row.turns:
            if speaker in _ASSISTANT and tokens:
                columns.allow(tokens + length)
                columns.ids.extend(range(first, first - -tokens // size))
                columns.output_ids.extend(range(first + tokens // size, first - -(tokens + length) // size))
                columns.add(0.0, tokens, length, session=number, think=blanks * _SECONDS_PER_WORD)
                blanks = 0
            elif speaker not in _ASSISTANT:
                blanks += words
            tokens += length
        first -= -tokens // size
    return columns.trace(size)
