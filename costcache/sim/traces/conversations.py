"""Whole conversations: one a line, or one JSON array of them, as tau-bench, ShareGPT and AIPerf write them.

The turns are in ``traj`` (tau-bench), ``conversations`` (ShareGPT) or ``turns`` (AIPerf). A turn has a
speaker (``role`` or ``from``), a text (``content``, ``value`` or ``text``, as in OpenAI's API) and perhaps
``tool_calls``; AIPerf's also ``timestamp`` and ``delay`` (milliseconds since the answer before). Each turn of
the assistant is a request: all turns before it are its prompt. In a conversation without any, each turn is a
request whose answer is not recorded. Conversations are sessions, and texts become tokens as in
:mod:`~costcache.sim.traces.messages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from costcache.sim.traces.messages import Message, pieces, text_of
from costcache.sim.traces.rows import Milliseconds, Rows, fail, note_time
from costcache.sim.traces.tokens import TextColumns

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_conversations"]

_ASSISTANT = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


class _Turn(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    content: str | list[dict[str, Any]] | None = None
    value: str | None = None
    text: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None

    def message(self) -> Message:
        """The turn as a message of OpenAI's API."""
        content = next((text for text in (self.content, self.value, self.text) if text is not None), None)
        return Message(self.role or self.from_ or "user", content, self.tool_calls)


class _Line(msgspec.Struct):
    traj: list[_Turn] | None = None
    conversations: list[_Turn] | None = None
    turns: list[_Turn] | None = None
    session_id: str | int | None = None


_MILLISECONDS = "milliseconds, from 0 to 1e15"
_ROWS = Rows(
    _Line,
    {
        "traj": "a list of turns",
        "conversations": "a list of turns",
        "turns": "a list of turns",
        "role": "the speaker, text",
        "from": "the speaker, text",
        "content": "text, a list of parts, or null",
        "value": "text",
        "text": "text",
        "tool_calls": "a list of objects",
        "timestamp": _MILLISECONDS,
        "delay": _MILLISECONDS,
        "session_id": "the session's name, text",
    },
)


def read_conversations(
    source: Source, *, block_size: int | None = None, tokenizer: str | None = None
) -> Trace:
    """Read a file of conversations.

    Args:
        source: The file.
        block_size: Tokens per block id; 1 by default.
        tokenizer: Name or path of a tokenizer.

    Raises:
        TraceError: If a line is malformed, or the tokenizer cannot be loaded.
    """
    columns = TextColumns(source, tokenizer, block_size)
    for number, row in _ROWS.read(source):
        turns = row.traj or row.conversations or row.turns
        if turns is None:
            if row.traj is row.conversations is row.turns is None:
                fail(source.label, number, "turns", None, "a list of turns, in traj, conversations or turns")
            continue
        note_time(source, number, turns[0].timestamp, "a time of the first turn in every line or in none")
        answered = any(turn.message().role in _ASSISTANT for turn in turns)
        session = number if row.session_id is None else row.session_id
        prompt: list[str] = []
        milliseconds = 0.0
        for turn in turns:
            message = turn.message()
            milliseconds = (
                turn.timestamp if turn.timestamp is not None else milliseconds + (turn.delay or 0.0)
            )
            answers = message.role in _ASSISTANT
            if not answers:
                prompt += pieces(message)
            if not answered or (answers and prompt):
                columns.add(
                    milliseconds / 1000.0,
                    [*prompt, "<|im_start|>assistant\n"],
                    [text_of(message), "<|im_end|>"] if answers else [],
                    session=session,
                    think=None if turn.delay is None else turn.delay / 1000.0,
                )
            if answers:
                prompt += pieces(message)
    return columns.trace(from_zero=True)
