"""RAGPulse: question answering with retrieval, with prompts made of chunks of any length.

Fields of ``0_trace``: ``timestamp`` (seconds, as text), ``input_length``, ``output_length`` (tokens),
``hash_ids`` (for each part of the prompt, the ids of its chunks) and ``session_id``. The lengths of chunks
are in five more files, expected beside it under the same name with another table's:
``1_sys_prompt``, ``2_passages``, ``3_history``, ``4_user_input``, ``5_web_search``. Source:
github.com/flashserve/RAGPulse, ``data/``.

A prompt is its chunks, in the order of the JSON object. A chunk of n tokens becomes n block ids of one
token, so prefixes are exact at every page size. The 6 to 12 tokens by which ``input_length`` exceeds the
sum of the chunks are left out: their position in the prompt is not recorded.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from costcache.errors import TraceError
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.files import open_source
from costcache.sim.traces.rows import BlockId, PieceTokens, Rows, Tokens, fail

if TYPE_CHECKING:
    from pathlib import Path

    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_ragpulse"]

_TRACE = "0_trace"
# For each part of a prompt, the table of its chunks' lengths, and the name of the id in that table.
_TABLES = {
    "sys_prompt": ("1_sys_prompt", "sys_prompt_id"),
    "passages_ids": ("2_passages", "passage_id"),
    "history": ("3_history", "history_id"),
    "web_search": ("5_web_search", "web_search_id"),
    "user_input": ("4_user_input", "user_input_id"),
}


class _Line(msgspec.Struct, gc=False):
    timestamp: str | float
    input_length: Tokens
    output_length: Tokens
    hash_ids: dict[str, list[BlockId]]
    session_id: str | None = None


_ROWS = Rows(
    _Line,
    {
        "timestamp": "seconds from the start, 0 or more",
        "input_length": "tokens of the prompt, a whole number, 0 or more",
        "output_length": "generated tokens, a whole number, 0 or more",
        "hash_ids": "an object of lists of chunk ids, whole numbers from 0",
        "session_id": "the session's name, text",
    },
)

_Chunks = dict[int, "array[int]"]


def read_ragpulse(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a trace and the tables beside it.

    Args:
        source: The file ``0_trace``.
        block_size: 1 or None: chunks have any length.

    Raises:
        TraceError: If a line is malformed, a table is missing, or a chunk is in no table.
    """
    if block_size not in (None, 1):
        raise TraceError(
            f"{source.label}: block size is {block_size}; chunks have any length, so give 1 or none"
        )
    tables = _tables(source)
    columns = Columns(source)
    for number, row in _ROWS.read(source):
        tokens = 0
        for part, chunks in row.hash_ids.items():
            table = tables.get(part)
            if table is None:
                fail(
                    source.label,
                    number,
                    f"a part of hash_ids ({part!r})",
                    chunks,
                    f"one of {', '.join(tables)}",
                )
            for chunk in chunks:
                units = table.get(chunk)
                if units is None:
                    fail(
                        source.label,
                        number,
                        f"hash_ids.{part}",
                        chunk,
                        f"an id of the table {_TABLES[part][0]}",
                    )
                tokens += len(units)
                columns.allow(tokens)
                columns.ids.extend(units)
        seconds = _seconds(source.label, number, row.timestamp)
        columns.add(seconds, tokens, row.output_length, session=row.session_id)
    return columns.trace(1)


def _seconds(label: str, number: int, text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e12:
        fail(label, number, "timestamp", text, "seconds from the start, 0 or more")
    return seconds


def _tables(source: Source) -> dict[str, _Chunks]:
    """For each part of a prompt, the block ids of each of its chunks."""
    tables: dict[str, _Chunks] = {}
    taken = 0
    for part, (name, field) in _TABLES.items():
        path = str(_beside(source, name))
        tables[part] = chunks = {}
        before = taken
        with open_source(path, limits=source.limits) as table:
            for chunk, tokens in _lengths(table, field):
                table.allow(taken + tokens - before)
                chunks[chunk] = array("q", range(taken, taken + tokens))
                taken += tokens
    return tables


def _beside(source: Source, table: str) -> Path:
    """The file of a table: the trace's, with the name of the table in its name, in any compression."""
    path = source.path
    if path is None or _TRACE not in path.name:
        raise TraceError(
            f"{source.label}: is a RAGPulse trace; give a file with {_TRACE} in its name, with the tables of "
            f"its chunks in the same folder"
        )
    name = path.name.replace(_TRACE, table)
    plain = name.removesuffix(".gz").removesuffix(".xz")
    for candidate in (name, plain, f"{plain}.gz", f"{plain}.xz"):
        if (path.parent / candidate).is_file():
            return path.parent / candidate
    raise TraceError(
        f"{source.label}: the table {path.parent / name} is missing; it has the lengths of chunks"
    )


def _lengths(table: Source, field: str) -> Iterator[tuple[int, int]]:
    """The chunks of a table and their tokens."""
    kind: Any = msgspec.defstruct(
        "_Chunk", [("chunk", BlockId), ("token_length", PieceTokens)], rename={"chunk": field}
    )
    rows = Rows(
        kind,
        {field: "a chunk's id, a whole number", "token_length": "its tokens, a whole number from 0 to 2**22"},
    )
    for _, row in rows.read(table):
        yield row.chunk, row.token_length
