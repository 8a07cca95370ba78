"""The facts of each request of a trace that a policy hears when the request ends, as from a server."""

from __future__ import annotations

import math
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from costcache.records import MOST_ENDING, Asker, Askers, RequestInfo, tuple_maker

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from costcache.sim.trace import Trace

__all__ = ["Known", "RequestInfos", "finish_reason"]

Known = Literal["server", "all"]
"""What policies are told of a trace's requests: what a server would know, or all that is recorded."""

_info = tuple_maker(RequestInfo)
_REASONS = {
    "end_turn": "stop",
    "eos": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_call",
    "tool_calls": "tool_call",
    "function_call": "tool_call",
    "max_tokens": "length",
    "cancelled": "abort",
}
_CUT = ("length", "abort")
_SERVER = ("stop", *_CUT)
"""Reasons that SGLang's scheduler knows."""


def finish_reason(recorded: str) -> str:
    """Translate a recorded stop reason into that of :class:`~costcache.records.RequestInfo`.

    Stop reasons of the Anthropic and OpenAI APIs become ``stop``, ``tool_call``, ``length`` or ``abort``;
    others stay as they are.
    """
    return _REASONS.get(recorded, recorded)


class RequestInfos:
    """Makes the :class:`~costcache.records.RequestInfo` of a trace's requests.

    A server knows less than a trace: its scheduler sees that a request stopped, and not that it stopped for a
    tool call, which the API layer finds in its text. But it sees the last tokens. So with ``known`` set to
    ``"server"`` recorded reasons become ``stop``, ``length`` or ``abort``, and a request that stopped gets an
    ``ending`` that stands for the tokens that such a request ends in; a trace of text that records no reasons
    has the tokens themselves. Session names are told if clients sent
    them. Priorities and hints are told in either case: they are the client's.

    Attributes:
        askers: Who sent each request, with the same limits, or None; None if nothing is told of any.

    Args:
        trace: The requests, in the order of their numbers.
        known: What is told: ``"server"`` or ``"all"``.
    """

    __slots__ = ("_inputs", "_outputs", "_rest", "askers")

    def __init__(self, trace: Trace, known: Known = "server") -> None:
        self._inputs: list[int] = trace.input_tokens.tolist()
        self._outputs: list[int] = trace.output_tokens.tolist()
        self._rest = _rest(trace, known)
        self.askers = _askers(self._rest)

    def of(self, request: int, matched: int) -> RequestInfo:
        """The info of one request.

        Args:
            request: Its number in the trace.
            matched: Prompt tokens that hit when it began. The rest count as new, as they do for a server,
                which does not remember evicted tokens.
        """
        return _info((self._outputs[request], self._inputs[request] - matched) + self._rest[request])


def _rest(trace: Trace, known: Known) -> Sequence[tuple[Any, ...]]:
    """The other fields of each request's info, in order."""
    count = len(trace)
    reasons: list[str | None] = [finish_reason(name) for name in trace.finish_names]
    endings: list[tuple[int, ...]] = [()] * len(reasons)
    if known == "server":
        endings = [_ending(reason) for reason in reasons]
        reasons = [reason if reason in _SERVER else "stop" for reason in reasons]
    finish = None if trace.finish is None else trace.finish.tolist()
    sessions = trace.sessions if known == "all" or trace.names_sessions else None
    returns = _values(trace.returns_after, count)
    if trace.labels is not None:
        names = [*trace.label_names, None]
        labels = [names[label] for label in trace.labels.tolist()]
        returns = [
            seconds if label is None else label for seconds, label in zip(returns, labels, strict=True)
        ]
    columns = (
        _none(count) if finish is None else [[*reasons, None][i] for i in finish],
        [0] * count if trace.priorities is None else trace.priorities.tolist(),
        _none(count) if sessions is None else [str(i) for i in sessions.tolist()],
        _last_tokens(trace) if finish is None else [[*endings, ()][i] for i in finish],
        _named(trace.tenants, trace.tenant_names, count),
        [False] * count if trace.session_ends is None else trace.session_ends.tolist(),
        returns,
        _values(trace.keep_seconds, count),
        _named(trace.users, trace.user_names, count),
    )
    return list(zip(*columns, strict=True))


def _named(column: NDArray[np.int64] | None, names: tuple[str, ...], count: int) -> list[str | None]:
    """The names that a column of indices stands for."""
    if column is None:
        return _none(count)
    known = [*names, None]  # index -1, unknown, is the last one
    return [known[i] for i in column.tolist()]


def _askers(rest: Sequence[tuple[Any, ...]]) -> list[Asker | None] | None:
    first, askers = len(RequestInfo._fields) - len(rest[0]) if rest else 0, Askers()
    session, tenant, user = (RequestInfo._fields.index(name) - first for name in Asker._fields)
    found = [askers.of(row[session], row[tenant], row[user]) for row in rest]
    return found if any(asker is not None for asker in found) else None


def _last_tokens(trace: Trace) -> list[tuple[int, ...]]:
    """The last tokens that each request generated, where a trace of text names them one by one."""
    if trace.output_ids is None or trace.output_offsets is None or trace.block_size > 1:
        return [()] * len(trace)
    edges = trace.output_offsets.tolist()
    return [
        tuple(trace.output_ids[max(start, stop - MOST_ENDING) : stop].tolist())
        for start, stop in pairwise(edges)
    ]


def _none(count: int) -> list[Any]:
    return [None] * count


def _values(column: NDArray[np.float64] | None, count: int) -> list[Any]:
    """A column of numbers, with None where it is not a number."""
    return _none(count) if column is None else [None if math.isnan(i) else i for i in column.tolist()]


def _ending(reason: str | None) -> tuple[int, ...]:
    """A token that stands for those in which requests of a reason end; none where a limit cut them off."""
    return () if reason is None or reason in _CUT else (zlib.crc32(reason.encode()),)
