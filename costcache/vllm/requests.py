"""Records of vLLM's requests, and the facts known of one at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.hints import KEY, NO_HINTS, read_hints
from costcache.records import MOST_ENDING, Asker, Askers, RequestInfo, RequestRecord

if TYPE_CHECKING:
    from costcache.pool import Pool
    from costcache.vllm.runs import Held

__all__ = ["Life", "asker_of", "hints_of", "info", "keep_list", "life_of", "sender"]

_ATTRIBUTE = "_costcache"
_ASKERS = Askers()


class Life:
    """One request, from its first allocation to its end, across preemptions.

    Attributes:
        record: Its record.
        told: Hints of its client.
        held: The path of the blocks that it holds; None while it holds none.
    """

    __slots__ = ("held", "record", "told")

    def __init__(self, record: RequestRecord, told: RequestInfo = NO_HINTS) -> None:
        self.record = record
        self.told = told
        self.held: Held | None = None


def life_of(request: Any, pool: Pool) -> Life:
    """Return the life of vLLM's request object; begins it if it has none yet.

    It is an attribute of the object, so it lives as long as that does.
    """
    life: Life | None = getattr(request, _ATTRIBUTE, None)
    if life is None:
        told = _hints(request)
        life = Life(pool.begin(_asker(request, told)), told)
        setattr(request, _ATTRIBUTE, life)
    return life


def keep_list(request: Any, blocks: list[Any]) -> None:
    """Keep vLLM's list of the blocks of a request, to which it adds."""
    life: Life | None = getattr(request, _ATTRIBUTE, None)
    if life is not None and life.held is not None:
        life.held.blocks = blocks


def info(request: Any, record: RequestRecord) -> RequestInfo:
    """The facts known of a request that has finished. Its client's hints were read when it began.

    New prompt tokens are those that the GPU's blocks did not have at its first allocation. vLLM's lower
    priority values come first, ours are kept longer. Its scheduler knows no tool calls, but they end in
    tokens of their own.
    """
    reason = request.get_finished_reason()
    kind = None if reason is None else str(reason)
    life: Life | None = getattr(request, _ATTRIBUTE, None)
    told = _hints(request) if life is None else life.told
    output = request.output_token_ids
    count = len(output)
    return RequestInfo(  # not _replace, which takes five times as long
        output_tokens=count,
        new_tokens=max(0, request.num_prompt_tokens - record.matched),
        finish_reason=kind,
        priority=-request.priority,
        session=request.session_id or told.session,
        ending=tuple(output[max(0, count - MOST_ENDING) : count]) if count and kind == "stop" else (),
        tenant=told.tenant,
        session_ends=told.session_ends,
        returns_after=told.returns_after,
        keep_seconds=told.keep_seconds,
        user=told.user,
    )


def sender(request: Any) -> tuple[Asker | None, RequestInfo]:
    """Who sent a request, and what its client said before it ran."""
    told = _hints(request)
    told = told._replace(priority=-request.priority, session=request.session_id or told.session)
    return _asker(request, told), told


def asker_of(told: RequestInfo) -> Asker | None:
    """Who sent a request of which only the hints are known."""
    return _ASKERS.of(told.session, told.tenant, told.user)


def hints_of(envelope: Any) -> RequestInfo:
    """The action ``costcache`` among vLLM's ``kv_hints`` of a request; no hints if there is none."""
    for action in () if envelope is None else envelope.actions:
        if action.action_type == KEY:
            return read_hints(action.payload)
    return NO_HINTS


def _asker(request: Any, told: RequestInfo) -> Asker | None:
    """Who sent a request. A client that names no tenant may have one in what keeps its prefixes apart."""
    lora = request.lora_request
    tenant = told.tenant or request.cache_salt or (None if lora is None else lora.lora_name)
    return _ASKERS.of(request.session_id or told.session, tenant or None, told.user)


def _hints(request: Any) -> RequestInfo:
    """Hints of a client: those of its ``kv_hints``, or the entry ``costcache`` of its ``extra_args``."""
    hints = request.kv_hints
    if hints is not None and any(action.action_type == KEY for action in hints.actions):
        return hints_of(hints)
    params = request.sampling_params
    more = None if params is None else params.extra_args
    return read_hints(more.get(KEY)) if more and isinstance(more, dict) else NO_HINTS
