"""Records of SGLang's requests, from their first match to their end."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

from costcache.hints import HINTS, KEY, NO_HINTS, read_hints
from costcache.recording.hashes import Tokens
from costcache.recording.recorder import EPOCH, Ended
from costcache.records import MOST_ENDING, Asker, Askers, RequestInfo, RequestRecord

if TYPE_CHECKING:
    from costcache.sglang.pools import Pools

__all__ = ["HINTS", "KEY", "Life", "ended", "hints", "info", "life_of"]

ATTRIBUTE = "_costcache"
_ASKERS = Askers()


class Life:
    """One request's records.

    Attributes:
        records: Its record in each pool, by the pool's name.
        told: Hints of its client.
        stored: Whether the cache has tokens that it computed: later matches find its own tokens.
        finished: Whether its end was reported to the pools.
    """

    __slots__ = ("finished", "records", "stored", "told")

    def __init__(self, records: dict[str, RequestRecord], told: RequestInfo = NO_HINTS) -> None:
        self.records = records
        self.told = told
        self.stored = False
        self.finished = False

    def matched(self, tokens: int) -> None:
        """Note a match of ``tokens`` tokens that other requests had computed."""
        for record in self.records.values():
            record.matched = max(record.matched, tokens)


def life_of(req: Any, pools: Pools) -> Life:
    """Return the records of SGLang's request object; begins the request if it has none yet.

    They are an attribute of the object, so they live as long as it does. Every rank sees the requests in the
    same order.
    """
    life: Life | None = getattr(req, ATTRIBUTE, None)
    if life is None:
        told = hints(req.sampling_params.custom_params)
        life = Life(pools.begin(_asker(req, told)), told)
        setattr(req, ATTRIBUTE, life)
    return life


def info(req: Any, life: Life) -> RequestInfo:
    """The facts known of a request that has finished.

    New prompt tokens are those that no tier had at its first match. SGLang's scheduler knows the
    finish reasons stop, length and abort; tool calls are found by its API layer, in another process, but end
    in tokens of their own. Hints are what the client put into its sampling parameters, see :func:`hints`.
    """
    prompt, matched = len(req.origin_input_ids), life.records["kv"].matched
    reason = req.finished_reason
    kind = None if reason is None else reason.to_json().get("type")
    return life.told._replace(
        output_tokens=len(req.output_ids),
        new_tokens=max(0, prompt - matched),
        finish_reason=kind,
        priority=req.priority or 0,
        session=req.session_id or life.told.session,
        ending=tuple(req.output_ids_through_stop[-MOST_ENDING:]) if kind == "stop" else (),
    )


def _asker(req: Any, told: RequestInfo) -> Asker | None:
    """Who sent a request. A client that names no tenant may have one in what keeps its prefixes apart."""
    tenant = told.tenant or req.extra_key or req.cache_salt
    return _ASKERS.of(req.session_id or told.session, tenant or None, told.user)


def hints(params: Any) -> RequestInfo:
    """Hints of a client: the object ``costcache`` in a request's ``custom_params``."""
    return read_hints(params.get(KEY) if isinstance(params, dict) else None)


def ended(req: Any, told: RequestInfo) -> Ended:
    """A request that has finished, for a recording: copies its tokens, which are hashed elsewhere."""
    prompt, output = req.origin_input_ids, req.output_ids
    now = time.perf_counter()
    arrived = req.time_stats.scheduler_recv_time or now
    return Ended(
        Tokens(repr((req.extra_key, req.cache_salt)).encode(), _raw(prompt), _raw(output)),
        len(prompt),
        req.cached_tokens,
        EPOCH + arrived,
        EPOCH + now,
        told,
    )


def _raw(tokens: Any) -> bytes:
    return (tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)).tobytes()
