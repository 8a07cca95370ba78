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
  same ids. The second record is dropped; its stop reason is kept, as the first has none.
- Tokens behind the last whole block have an id of their own: nobody shares them.
- A request of a sub-agent is on the session's clock if its ``t`` is not before the agent's own, else
  on the agent's. Requests of a session are ordered by time, whoever made them.
- Sessions have no common clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
import numpy as np

from costcache.errors import TraceError
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.rows import BlockId, Rows, Seconds, Tokens, fail

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
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 64
    id: str | None = None


_ROWS = Rows(
    _Session,
    {
        "id": "the session's name, text",
        "hash_id_scope": "'local' or 'global'",
        "block_size": "tokens per hash id, a whole number from 1 on",
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
        if size not in (None, session.block_size):
            from_whom = "as asked for" if block_size is not None else "as in the lines before"
            fail(source.label, number, "block_size", session.block_size, f"{size}, {from_whom}")
        size = session.block_size
        calls = list(_calls(session.requests, 0.0, keep_all=duplicates))
        calls.sort(key=_by_time)
        local = session.hash_id_scope == "local"
        if local:
            local_ids = _number(calls, local_ids)
        for seconds, call in calls:
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
                think=call.think_time or 0.0,
                service=call.api_time,
                finish=call.stop,
            )
    if size is None or not len(columns):
        raise TraceError(f"{source.label}: holds no request; give a file with one session a line")
    return columns.trace(source, size)


def _calls(requests: _Requests, start: float, *, keep_all: bool) -> Iterator[tuple[float, _Call]]:
    """The requests of an agent and of its sub-agents, with their times on the session's clock."""
    before: _Call | None = None
    for request in requests:
        if isinstance(request, _Agent):
            began = request.t if request.t >= start else start + request.t
            yield from _calls(request.requests, began, keep_all=keep_all)
            continue
        repeats = isinstance(request, _Whole) and isinstance(before, _Streamed)
        if repeats and before is not None and before.hash_ids == request.hash_ids and not keep_all:
            before.stop = before.stop or request.stop
        else:
            yield (request.t if request.t >= start else start + request.t), request
        before = request


def _by_time(call: tuple[float, _Call]) -> float:
    return call[0]


def _number(calls: list[tuple[float, _Call]], first: int) -> int:
    """Number a session's ids from ``first`` on; gives the number after the last."""
    ids = np.concatenate(
        [np.array(call.hash_ids, dtype=np.int64) for _, call in calls] or [np.empty(0, np.int64)]
    )
    names, numbers = np.unique(ids, return_inverse=True)
    numbered = (numbers + first).tolist()
    at = 0
    for _, call in calls:
        count = len(call.hash_ids)
        call.hash_ids = numbered[at : at + count]
        at += count
    return first + len(names)
