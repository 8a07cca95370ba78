"""Sessions of Claude Code as kv-cache-tester records them: one session a line.

Fields of a session: ``id``, ``block_size``, ``hash_id_scope`` (``global`` in release v6, ``local`` in
v8) and ``requests``. Of a request: ``t`` (seconds from the session's start), ``type``, ``in``,
``out`` (tokens), ``hash_ids`` (whole blocks only), and where known ``stop``, ``api_time`` (seconds of
the server), ``think_time`` (seconds of the client before the request). A request of type ``subagent``
holds the requests of an agent of its own. Source: github.com/callanjfox/kv-cache-tester, ``traces/``.

- Local ids are numbered apart for each session, so that sessions share nothing.
- Global ids are hashes of content: the same one occurs behind different prefixes, and whoever
  replays them has to go by path, as :class:`~costcache.sim.trace.Trace` and the tree do.
- A turn that was streamed (type ``s``) is often logged again (type ``n``) by the same agent with the
  same ids, after the first. The second record is dropped; its stop reason is kept, as the first has none,
  and its time counts to the turn's, since the next think time begins when it has ended.
- Tokens behind the last whole block have an id of their own: nobody shares them.
- A request of a sub-agent is on the session's clock if its ``t`` is not before the agent's own, else
  on the agent's. Requests of a session are ordered by time, whoever made them.
- A request waits for the one before of its agent, and comes ``think_time`` after that has ended. A
  sub-agent's first one waits for the one before in the agent that started it, for as long as recorded;
  the two then go on side by side.
- Sessions have no common clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from costcache.errors import TraceError
from costcache.sim.trace import MOST_BLOCK
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.rows import BlockId, Rows, Seconds, Tokens, fail, fail_block_size

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_weka"]


class _Call(msgspec.Struct, gc=False):
    t: Seconds
    input: Tokens = msgspec.field(name="in")
    output: Tokens = msgspec.field(name="out")
    hash_ids: list[BlockId]
    stop: str | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _Whole(_Call, tag_field="type", tag="n", gc=False):
    """Not streamed."""


class _Streamed(_Call, tag_field="type", tag="s", gc=False):
    """Streamed."""


class _Agent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    requests: list[_Whole | _Streamed | _Agent]


_Requests: TypeAlias = "list[_Whole | _Streamed | _Agent]"


class _Session(msgspec.Struct):
    requests: list[_Whole | _Streamed | _Agent]
    hash_id_scope: Literal["local", "global"]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK)] = 64
    id: str | None = None


_ROWS = Rows(
    _Session,
    {
        "id": "the session's name, text",
        "hash_id_scope": "'local' or 'global'",
        "block_size": f"tokens per hash id, a whole number from 1 to {MOST_BLOCK}",
        "requests": "a list of requests",
        "type": "'n', 's' or 'subagent'",
        "t": "seconds from the session's start, 0 or more",
        "in": "tokens of the prompt, a whole number from 0 on",
        "out": "generated tokens, a whole number from 0 on",
        "hash_ids": "a list of whole numbers from 0 on, of 63 bits",
        "stop": "the stop reason, text",
        "api_time": "seconds that the server took, 0 or more",
        "think_time": "seconds that the client took before, 0 or more",
    },
)


def read_weka(source: Source, *, block_size: int | None = None, duplicates: bool = False) -> Trace:
    """Read a file of sessions.

    Times are the seconds from each session's own start.

    Args:
        source: The file.
        block_size: What the file's ``block_size`` has to be; None for any.
        duplicates: Keep turns that are logged twice.

    Raises:
        TraceError: A line is malformed.
    """
    columns = Columns()
    size = block_size
    local_ids = 0
    for number, session in _ROWS.read(source):
        if size is not None and size != session.block_size:
            fail_block_size(
                source.label, number, "block_size", session.block_size, size, asked=block_size is not None
            )
        size = session.block_size
        turns = _turns(session.requests, keep_all=duplicates)
        order = sorted(range(len(turns)), key=lambda place: turns[place].seconds)
        places = {place: len(columns) + at for at, place in enumerate(order)}
        if session.hash_id_scope == "local":
            local_ids = _number([turns[place].call for place in order], local_ids)
        for place in order:
            seconds, think, call, follows = turns[place]
            if len(call.hash_ids) != call.input // size:
                expected = f"{call.input // size} for in {call.input} in whole blocks of {size} tokens"
                fail(
                    source.label,
                    number,
                    f"the number of hash_ids at t {call.t}",
                    len(call.hash_ids),
                    expected,
                )
            columns.ids.fromlist(call.hash_ids)
            if call.input % size:
                columns.ids.append(-1 - len(columns))  # ids of the file are not negative
            columns.add(
                seconds,
                call.input,
                call.output,
                session=number,
                follows=places.get(follows, -1),
                think=think,
                service=call.api_time,
                finish=call.stop,
            )
    if size is None or not len(columns):
        raise TraceError(f"{source.label}: holds no request; give a file with one session a line")
    return columns.trace(source, size)


class _Turn(NamedTuple):
    """A request with its time on the session's clock.

    Attributes:
        seconds: When it came.
        think: Seconds between the end of the request that it waits for and this.
        call: The record.
        follows: Its place in the order of its agent's records and of their sub-agents', -1 for none.
    """

    seconds: float
    think: float
    call: _Call
    follows: int


def _turns(session: _Requests, *, keep_all: bool) -> list[_Turn]:
    """The requests of a session and of its sub-agents, an agent's before those of its sub-agents."""
    turns: list[_Turn] = []

    def agent(requests: _Requests, start: float, follows: int, ended: float | None) -> None:
        before: _Call | None = None
        for request in requests:
            seconds = request.t if request.t >= start else start + request.t
            if isinstance(request, _Agent):
                agent(request.requests, seconds, follows, ended)
                continue
            repeats = (
                isinstance(request, _Whole)
                and isinstance(before, _Streamed)
                and before.hash_ids == request.hash_ids
            )
            if repeats and before is not None and not keep_all:
                before.stop = before.stop or request.stop
                before.api_time = _both(before.api_time, request.api_time)
            else:
                think = request.think_time or 0.0
                if before is None and ended is not None:
                    think = max(0.0, seconds - ended)
                turns.append(_Turn(seconds, think, request, follows))
                follows = len(turns) - 1
            ended = seconds + (request.api_time or 0.0)
            before = request

    agent(session, 0.0, -1, None)
    return turns


def _both(first: Seconds | None, second: Seconds | None) -> Seconds | None:
    """The sum of two durations, either of which may be unknown."""
    return second if first is None else first if second is None else first + second


def _number(calls: list[_Call], first: int) -> int:
    """Number a session's ids from ``first`` on; gives the number after the last."""
    ids = np.concatenate(
        [np.array(call.hash_ids, dtype=np.int64) for call in calls] or [np.empty(0, np.int64)]
    )
    names, numbers = np.unique(ids, return_inverse=True)
    numbered = (numbers + first).tolist()
    at = 0
    for call in calls:
        count = len(call.hash_ids)
        call.hash_ids = numbered[at : at + count]
        at += count
    return first + len(names)
