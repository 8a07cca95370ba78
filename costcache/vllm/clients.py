"""Who sent the requests of a scheduler, for the CPU offload tier: vLLM tells it the id of a request alone.

vLLM hands the tier a context with the request's ``kv_hints``. Its session, its cache salt, its adapter and
hints among its ``extra_args`` are on the request, which the scheduler sees first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from costcache.hints import NO_HINTS
from costcache.vllm.requests import asker_of, hints_of, sender

if TYPE_CHECKING:
    from costcache.records import Asker, RequestInfo

__all__ = ["MOST", "Clients"]

logger = logging.getLogger("costcache")

MOST = 1 << 16
"""Requests that are kept, the newest: more than a scheduler has waiting and running."""


class Clients:
    """Senders of the requests of one scheduler that have not ended.

    Attributes:
        listening: Whether a tier asks; otherwise nothing is kept.
    """

    __slots__ = ("_known", "listening")

    def __init__(self) -> None:
        self.listening = False
        self._known: dict[str, tuple[Asker | None, RequestInfo]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def arrive(self, request: Any) -> None:
        """A request came in."""
        if not self.listening:
            return
        try:
            asker, told = sender(request)
            if asker is None and told == NO_HINTS:
                return
            known = self._known
            if len(known) >= MOST:
                del known[next(iter(known))]
            known[request.request_id] = asker, told
        except Exception as error:  # a tier without senders is still a tier
            self.listening = False
            logger.error("costcache: the offload tier is not told who sent requests", exc_info=error)

    def leave(self, request: Any) -> None:
        """A request ended."""
        self._known.pop(request.request_id, None)

    def of(self, context: Any) -> tuple[Asker | None, RequestInfo]:
        """Who sent the request of a context, and what its client said, if only in the context itself."""
        known = self._known.get(context.req_id)
        if known is None:
            told = hints_of(context.kv_hints)
            known = asker_of(told), told
        return known
