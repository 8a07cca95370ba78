"""The facts of each request of a trace that a policy hears when the request ends, as from a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.records import RequestInfo, tuple_maker

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["RequestInfos", "finish_reason"]

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


def finish_reason(recorded: str) -> str:
    """Translate a recorded stop reason into that of :class:`~costcache.records.RequestInfo`.

    Stop reasons of the Anthropic and OpenAI APIs become ``stop``, ``tool_call``, ``length`` or ``abort``;
    others stay as they are.
    """
    return _REASONS.get(recorded, recorded)


class RequestInfos:
    """Makes the :class:`~costcache.records.RequestInfo` of a trace's requests.

    Args:
        trace: The requests, in the order of their numbers.
    """

    __slots__ = ("_finish", "_inputs", "_outputs", "_priorities", "_sessions")

    def __init__(self, trace: Trace) -> None:
        reasons = [*map(finish_reason, trace.finish_names), None]  # index -1, unknown, is the last one
        self._inputs: list[int] = trace.input_tokens.tolist()
        self._outputs: list[int] = trace.output_tokens.tolist()
        self._finish = None if trace.finish is None else [reasons[i] for i in trace.finish.tolist()]
        self._sessions = None if trace.sessions is None else [str(i) for i in trace.sessions.tolist()]
        self._priorities = None if trace.priorities is None else trace.priorities.tolist()

    def of(self, request: int, matched: int) -> RequestInfo:
        """The info of one request.

        Args:
            request: Its number in the trace.
            matched: Prompt tokens that hit when it began. The rest count as new, as they do for a server,
                which does not remember evicted tokens.
        """
        return _info(
            (
                self._outputs[request],
                self._inputs[request] - matched,
                None if self._finish is None else self._finish[request],
                0 if self._priorities is None else self._priorities[request],
                None if self._sessions is None else self._sessions[request],
            )
        )
