"""Chat requests of OpenAI's API, one a line.

A line has ``messages``, or a ``body`` with them (a batch file). Optional beside them: ``tools``; ``priority``
(as in SGLang and vLLM); ``user`` (as in OpenAI's API); ``timestamp`` (seconds, or a date and time);
``session_id``; ``tenant``; and ``response``, the
API's answer, with ``choices`` and ``usage``. Without a ``response``, a last message of the assistant is the
answer.

Rows of AIPerf are read too. They have ``text_input``, ``text`` or ``texts`` (parts of one) in place of
``messages``, or beside them ``output_length`` (tokens of the answer) or ``delay`` (milliseconds since the
answer of the session's previous request); their ``timestamp`` is in milliseconds.

Messages become text in ChatML: ``<|im_start|>role``, a line break, the content, ``<|im_end|>``, a line break.
Tools come first, as JSON; tool calls and parts of a content that are not text come after the text, as JSON.
A served model's own template differs by a few tokens per message. Each content is encoded on its own, so an
answer has the same tokens when it recurs in the next prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from costcache.sim.traces.rows import Milliseconds, Rows, Tokens, fail, note_time
from costcache.sim.traces.tokens import TextColumns

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["Message", "pieces", "read_messages", "text_of"]


_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class Message(msgspec.Struct, omit_defaults=True):
    """A message of a conversation, as in OpenAI's API."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Body(msgspec.Struct):
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    priority: _Priority | None = None
    user: str | None = None


class _Choice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Tokens


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Response(_Completion):
    body: _Completion | None = None


class _Text(msgspec.Struct):
    contents: list[str]


class _Line(msgspec.Struct):
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    body: _Body | None = None
    response: _Response | None = None
    timestamp: Milliseconds | str | None = None
    session_id: str | int | None = None
    tenant: str | None = None
    user: str | None = None
    priority: _Priority | None = None
    text_input: str | None = None
    text: str | None = None
    texts: list[str | _Text] | None = None
    output_length: Tokens | None = None
    delay: Milliseconds | None = None
    message_mode: Literal["history"] | None = None

    @property
    def milliseconds(self) -> bool:
        """Whether it is a row of AIPerf, whose times are milliseconds."""
        return any(x is not None for x in (self.prompt, self.output_length, self.delay))

    @property
    def prompt(self) -> str | list[dict[str, Any]] | None:
        """The prompt of a row of AIPerf: one text, or the parts of one."""
        if self.texts is None:
            return self.text_input if self.text_input is not None else self.text
        texts = [each if isinstance(each, str) else "".join(each.contents) for each in self.texts]
        return [{"type": "text", "text": text} for text in texts]


_TIME = "seconds, 0 or more, or a date and time as 2026-01-31T12:00:00Z"
_ROWS = Rows(
    _Line,
    {
        "messages": "a list of messages",
        "role": "the speaker, text",
        "content": "text, a list of parts, or null",
        "tool_calls": "a list of objects",
        "tools": "a list of objects",
        "body": "an object with messages",
        "response": "an object with choices",
        "choices": "a list of objects with a message",
        "message": "an object with a role",
        "finish_reason": "the stop reason, text",
        "usage": "an object with completion_tokens",
        "completion_tokens": "generated tokens, a whole number, 0 or more",
        "timestamp": _TIME,
        "text_input": "the prompt, text",
        "text": "the prompt, text",
        "texts": "a list of texts, or of objects with contents",
        "contents": "a list of texts",
        "output_length": "generated tokens, a whole number, 0 or more",
        "delay": "milliseconds since the answer before, from 0 to 1e15",
        "message_mode": "'history', with whole prompts in every line",
        "session_id": "the session's name, text",
        "tenant": "the tenant's name, text",
        "user": "the end user's name, text",
        "priority": "a whole number of 32 bits, higher is kept longer",
    },
)


def read_messages(source: Source, *, block_size: int | None = None, tokenizer: str | None = None) -> Trace:
    """Read a file of requests.

    Without timestamps all times are 0.

    Args:
        source: The file.
        block_size: Tokens per block id; 1 by default.
        tokenizer: Name or path of a tokenizer.

    Raises:
        TraceError: If a line is malformed, or the tokenizer cannot be loaded.
    """
    columns = TextColumns(source, tokenizer, block_size)
    came: dict[str | int, float] = {}  # when each session's last request did
    for number, row in _ROWS.read(source):
        asked = row if row.body is None else row.body
        messages, tools = asked.messages, asked.tools
        if messages is None and row.prompt is not None:
            messages = [Message("user", row.prompt)]
        if messages is None:
            fail(source.label, number, "messages", None, "a list of messages, here or in body")
        seconds = _seconds(source.label, number, row)
        follows = row.session_id is not None and row.session_id in came
        if row.delay is not None and row.session_id is not None and row.timestamp is None and follows:
            seconds = came[row.session_id] + row.delay / 1000.0
        else:
            note_time(source, number, row.timestamp, "a time in every line or in none")
        if row.session_id is not None:
            came[row.session_id] = seconds
        answer, finish, tokens = _answer(row.response)
        tokens = row.output_length if tokens is None else tokens
        if row.response is None and messages and messages[-1].role == "assistant":
            messages, answer = messages[:-1], messages[-1]
        prompt = [*_tools(tools), *(piece for message in messages for piece in pieces(message))]
        columns.add(
            seconds,
            [*prompt, "<|im_start|>assistant\n"],
            [text_of(answer), "<|im_end|>"] if answer is not None else [],
            output_tokens=tokens if answer is None else None,
            session=row.session_id,
            finish=finish,
            priority=asked.priority or 0,
            think=None if row.delay is None else row.delay / 1000.0,
        )
        columns.columns.hint(tenant=row.tenant, user=asked.user)
    return columns.trace(from_zero=True)


def _answer(response: _Response | None) -> tuple[Message | None, str | None, int | None]:
    """The answer, its stop reason, and the server's count of its tokens."""
    if response is None:
        return None, None, None
    completion = response.body if response.body is not None else response
    tokens = completion.usage.completion_tokens if completion.usage is not None else None
    if not completion.choices:
        return None, None, tokens
    choice = completion.choices[0]
    return choice.message, choice.finish_reason, tokens


def _seconds(label: str, number: int, row: _Line) -> float:
    value = row.timestamp
    if not isinstance(value, str):
        return (value or 0.0) / (1000.0 if row.milliseconds else 1.0)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        fail(label, number, "timestamp", value, _TIME)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def pieces(message: Message) -> Iterator[str]:
    """The text of a message in a prompt, in pieces that are encoded one by one."""
    yield f"<|im_start|>{message.role}\n"
    yield text_of(message)
    yield "<|im_end|>"
    yield "\n"


def _tools(tools: list[dict[str, Any]] | None) -> list[str]:
    return [_json(tools), "\n"] if tools else []


def text_of(message: Message) -> str:
    """The text of a message's content; what is not text as JSON."""
    content = message.content
    parts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        for part in content:
            text = part.get("text")
            parts.append(text if isinstance(text, str) else _json(part))
    if message.tool_calls:
        parts.append(_json(message.tool_calls))
    return "".join(parts)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8")
