"""Sessions of Claude Code as kv-cache-tester records them: one session a line.

Fields of a session: ``id``, ``block_size``, ``hash_id_scope`` (``global`` in release v6, ``local`` in
v8) and ``requests``. Of a request: ``t`` (seconds from the session's start), ``type``, ``in``,
``out`` (tokens), ``hash_ids`` (whole blocks only), and where known ``stop``, ``api_time`` (seconds of
the server), ``think_time`` (seconds of the client before the request). A request of type ``subagent``
holds the requests of an agent of its own. Source: github.com/callanjfox/kv-cache-tester, ``traces/``.

- Local ids are renumbered per session, so that sessions share nothing.
- Global ids are hashes of content: one id occurs after several prefixes, so a replay has to identify blocks
  by path, as :class:`~costcache.sim.trace.Trace` and the tree do.
- A streamed turn (type ``s``) is often logged again (type ``n``) by the same agent with the same ids, after
  the first record. The second record is dropped. Its stop reason is kept, since the first has none, and its
  time is added to the turn's, since the next think time begins at its end.
- Tokens after the last whole block get an id of their own and are never shared.
- A sub-agent's request is on the session's clock if its ``t`` is not before the sub-agent's own, else on
  the sub-agent's. The requests of a session are sorted by time across its agents.
- A request waits for the previous one of its agent and arrives ``think_time`` after its end. The first one of
  a sub-agent waits, for as long as recorded, for the previous one of the agent that started it; the two
  agents then run side by side.
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
        "in": "tokens of the prompt, a whole number, 0 or more",
        "out": "generated tokens, a whole number, 0 or more",
        "hash_ids": "a list of whole numbers from 0 to 2**63 - 1",
        "stop": "the stop reason, text",
        "api_time": "seconds that the server took, 0 or more",
        "think_time": "the client's seconds before the request, 0 or more",
    },
)


def read_weka(source: Source, *, block_size: int | None = None, duplicates: bool = False) -> Trace:
    """Read a file of sessions.

    Times are the seconds from each session's own start.

    Args:
        source: The file.
        block_size: The expected ``block_size``; None for any.
        duplicates: Keep the second records of turns that are logged twice.

    Raises:
        TraceError: If a line is malformed.
    """
    columns = Columns(source)
    size = block_size
    local_ids = 0
    for number, session in _ROWS.read(source):
        if size is not None and size != session.block_size:
            fail_block_size(
                source.label, number, "block_size", session.block_size, size, asked=block_size is not None
            )
        size = session.block_size
        turns = _turns(session.requests, keep_all=duplicates)
        order = sorted(range(len(turns)), key=lambda turn: turns[turn].seconds)
        numbers = {turn: len(columns) + at for at, turn in enumerate(order)}
        if session.hash_id_scope == "local":
            local_ids = _number([turns[turn].call for turn in order], local_ids)
        for turn in order:
            seconds, think, call, follows = turns[turn]
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
                columns.ids.append(-1 - len(columns))  # the file has no negative ids
            columns.add(
                seconds,
                call.input,
                call.output,
                session=number,
                follows=numbers.get(follows, -1),
                think=think,
                service=call.api_time,
                finish=call.stop,
            )
    if size is None or not len(columns):
        raise TraceError(f"{source.label}: holds no request; give a file with one session a line")
    return columns.trace(size)


class _Turn(NamedTuple):
    """A request with its time on the session's clock.

    Attributes:
        seconds: Arrival time.
        think: Seconds since the end of its predecessor.
        call: The record.
        follows: Index of its predecessor among the session's turns, -1 for none.
    """

    seconds: float
    think: float
    call: _Call
    follows: int


def _turns(session: _Requests, *, keep_all: bool) -> list[_Turn]:
    """The requests of a session and its sub-agents, as they are nested in the file."""
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
    """Number a session's ids from ``first`` on; returns the first unused number."""
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
