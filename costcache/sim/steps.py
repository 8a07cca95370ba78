"""The steps in which a server makes room for a request: chunk by chunk for its prompt, then for its answer.

Neither server computes the KV of the last token that a request generates, so that one needs no slot. vLLM
takes blocks as it needs them. SGLang evicts until a page more is free than a request's tokens fill, and keeps
that page free while it generates; in pages of one token it needs none. Of other servers a replay knows
nothing: room is made at once, with a slot for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from costcache.sim.trace import RecordedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costcache.sim.settings import ServingSettings
    from costcache.sim.trace import Trace

__all__ = ["Step", "Steps", "steps_of"]


class Step(NamedTuple):
    """One step.

    Attributes:
        computed: Tokens of the request that are computed after it.
        owned: Tokens that the request has slots for after it, whole pages, those that it found included.
        free: Slots that have to be free before it.
    """

    computed: int
    owned: int
    free: int


class Steps:
    """The steps of a server's requests.

    Args:
        page: Tokens per page.
        server: ``sglang`` or ``vllm``; empty if it is unknown.
        chunk: Prompt tokens that are computed at once; 0 for all.

    Attributes:
        frees_copies: Whether a request gives up its own copy of a page once it finds the page cached.
    """

    def __init__(self, page: int, server: str = "", chunk: int = 0) -> None:
        self._page = page
        self._server = server
        # SGLang cuts chunks in whole pages, vLLM where its budget ends.
        self._chunk = max(page, chunk // page * page) if chunk and server == "sglang" else chunk
        self.frees_copies = bool(server)
        self._spare = page if server == "sglang" and page > 1 else 0

    def most(self, prompt: int, output: int) -> int:
        """Slots that a request needs at most, whole pages."""
        return self._whole(self._computed(prompt, output)) + self._spare

    def of(self, found: int, prompt: int, output: int) -> Iterator[Step]:
        """The steps of a request that found so many tokens, whole pages."""
        page, spare = self._page, self._spare
        if not (self._server or self._chunk):
            most = self.most(prompt, output)
            yield Step(prompt, most, most - found)
            return
        ends = [*range(found + self._chunk, prompt, self._chunk)] if self._chunk else []
        owned = found
        for end in (*ends, prompt):
            before, owned = owned, max(found, self._whole(end))
            yield Step(end, owned, owned - before + spare)
        computed = self._computed(prompt, output)
        while owned < computed:
            first = owned + 1  # token of a new page
            owned += page
            yield Step(prompt, owned, page)
            if spare and first < computed:  # the next token, too, wants a page free
                yield Step(prompt, owned, page)

    def _computed(self, prompt: int, output: int) -> int:
        return prompt + (max(0, output - 1) if self._server else output)

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page


def steps_of(settings: ServingSettings, trace: Trace, page: int) -> Steps:
    """The steps of the requests of a replay."""
    server = trace.server or RecordedServer()
    chunk = server.chunk if settings.chunk is None else settings.chunk
    return Steps(page, server.name, chunk or 0)
