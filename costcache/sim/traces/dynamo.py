"""Request traces of NVIDIA Dynamo: one event a line, of which ``request_end`` is a request.

Its ``request`` has ``output_tokens``, ``request_received_ms``, ``total_time_ms`` and ``replay`` with
``trace_block_size``, ``input_length`` and ``input_sequence_hashes`` (64 bits, one per block of the
prompt; each covers the whole prefix). ``agent_context.session_id`` names the agent's session. Source:
github.com/ai-dynamo/dynamo, schema ``dynamo.request.trace.v1``. Tool events are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from costcache.errors import TraceError
from costcache.sim.trace import MOST_BLOCK
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.rows import Milliseconds, Rows, Tokens, fail, fail_block_size

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_dynamo"]

_Hash = Annotated[int, msgspec.Meta(ge=0)]
_HIGHEST_HASH = 2**64 - 1


class _Replay(msgspec.Struct):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK)]
    input_length: Tokens
    input_sequence_hashes: list[_Hash]


class _Request(msgspec.Struct):
    output_tokens: Tokens
    request_received_ms: Milliseconds
    replay: _Replay
    total_time_ms: Milliseconds | None = None


class _Agent(msgspec.Struct):
    session_id: str | None = None


class _Event(msgspec.Struct):
    event_type: str
    request: _Request | None = None
    agent_context: _Agent | None = None


class _Line(msgspec.Struct):
    event: _Event


_ROWS = Rows(
    _Line,
    {
        "event": "an object with event_type",
        "event_type": "the kind of event, text",
        "request": "an object with replay",
        "agent_context": "an object with session_id",
        "session_id": "the session's name, text",
        "output_tokens": "generated tokens, a whole number, 0 or more",
        "request_received_ms": "milliseconds, 0 or more",
        "total_time_ms": "milliseconds, 0 or more",
        "replay": "an object with trace_block_size, input_length and input_sequence_hashes",
        "trace_block_size": f"tokens per hash, a whole number from 1 to {MOST_BLOCK}",
        "input_length": "tokens of the prompt, a whole number, 0 or more",
        "input_sequence_hashes": "a list of whole numbers from 0 to 2**64 - 1",
    },
)


def read_dynamo(source: Source, *, block_size: int | None = None) -> Trace:
    """Read a file of events.

    Args:
        source: The file.
        block_size: The expected ``trace_block_size``; None for any.

    Raises:
        TraceError: If a line is malformed.
    """
    columns = Columns(source)
    size = block_size
    ended: dict[str, float] = {}
    for number, row in _ROWS.read(source):
        event, request = row.event, row.event.request
        if event.event_type != "request_end":
            continue
        if request is None:
            fail(source.label, number, "event.request", None, "an object with replay")
        replay = request.replay
        if size is not None and size != replay.trace_block_size:
            fail_block_size(
                source.label,
                number,
                "trace_block_size",
                replay.trace_block_size,
                size,
                asked=block_size is not None,
            )
        size = replay.trace_block_size
        tokens, hashes = replay.input_length, replay.input_sequence_hashes
        if len(hashes) != -(-tokens // size):
            expected = f"{-(-tokens // size)} for input_length {tokens} in blocks of {size} tokens"
            fail(source.label, number, "the number of input_sequence_hashes", len(hashes), expected)
        for value in hashes:
            if value > _HIGHEST_HASH:
                fail(source.label, number, "input_sequence_hashes", value, "whole numbers of 64 bits")
            columns.ids.append(value - 2**64 if value >= 2**63 else value)
        received = request.request_received_ms / 1000.0
        service = request.total_time_ms / 1000.0 if request.total_time_ms is not None else None
        session = event.agent_context.session_id if event.agent_context is not None else None
        think = None
        if session is not None:
            think = max(0.0, received - ended.get(session, received))
            ended[session] = received + (service or 0.0)
        columns.add(received, tokens, request.output_tokens, session=session, think=think, service=service)
    if size is None:
        raise TraceError(f"{source.label}: holds no request; expected events of type request_end")
    return columns.trace(size, from_zero=True)
