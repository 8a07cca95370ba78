"""LMCache's agent traces: prompts and answers as text, one request a line.

Fields: ``timestamp`` (microseconds), ``input``, ``output`` (text), ``session_id``. Source:
github.com/LMCache/lmcache-agent-trace. Lines of a session need not be in time order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from costcache.sim.traces.rows import Rows
from costcache.sim.traces.tokens import TextColumns

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_lmcache"]


class _Line(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    input: str
    output: str
    session_id: str | int | None = None


_ROWS = Rows(
    _Line,
    {
        "timestamp": "microseconds, 0 or more",
        "input": "the prompt, text",
        "output": "the answer, text",
        "session_id": "the session's name, text",
    },
)


def read_lmcache(source: Source, *, block_size: int | None = None, tokenizer: str | None = None) -> Trace:
    """Read a file of requests.

    Args:
        source: The file.
        block_size: Tokens per block id; 1 by default.
        tokenizer: Name or path of a tokenizer.

    Raises:
        TraceError: If a line is malformed, or the tokenizer cannot be loaded.
    """
    columns = TextColumns(source, tokenizer, block_size)
    for _, row in _ROWS.read(source):
        columns.add(row.timestamp / 1e6, [row.input], [row.output], session=row.session_id)
    return columns.trace(from_zero=True)
