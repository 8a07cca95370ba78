"""What LRU would have found: a comparison that a policy carries along, to step back where it is behind."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["ShadowLRU", "Span"]

_DECAY = 0.8
"""What a verdict leaves of the evidence to the next one."""
_SURE = 1.0
"""Standard deviations by which a policy must be behind."""
_PAUSE = 8
"""Verdicts for which LRU is in force at first; each further time twice as many."""
_LONGEST = 128


class Span:
    """Tokens that were last used in one stretch of time.

    Attributes:
        tokens: How many of them may go: those that no running request holds.
        gone: LRU would have evicted these by now.
    """

    __slots__ = ("gone", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.gone = False


class ShadowLRU:
    """An LRU cache of the same size that sees the same uses, without its contents.

    LRU holds what was used last, as much as fits. So it is enough to know of everything in which span of
    time it was used last, what was evicted included: spans go from the old end while more tokens than
    fit were used later. Each use then tells whether LRU would have had it. Spans are a few requests wide.

    What running requests hold cannot go from either cache, and takes room in both. When the last of them
    has ended it is released, and is as old as its last use.

    The verdict is on the difference in hits, request by request since those of one request are not
    independent: a policy is behind where the sum is negative by more than its own noise.

    Attributes:
        behind: LRU should be in force now.
        falls: How often that became so.
        gained: Tokens found that LRU would not have found, since the start.
        lost: Tokens that LRU would have found, and the policy did not, since the start.
        newest: The span that takes what is used now.
        oldest: The one of which LRU evicts next; a part of it may have gone already.
    """

    def __init__(self) -> None:
        self.behind = False
        self.falls = 0
        self.gained = 0
        self.lost = 0
        self._room = math.inf
        self._spans: deque[Span] = deque()
        self._held = 0
        self.newest = self.oldest = Span()
        self._spans.append(self.newest)
        self._request = 0.0  # difference of the request under way
        self._sum = 0.0
        self._squares = 0.0
        self._pause = 0
        self._next_pause = _PAUSE

    def use(
        self,
        span: Span | None,
        tokens: int,
        found: bool,
        value: float = 1.0,
        *,
        released: bool = True,
        held: bool = False,
    ) -> Span:
        """Tokens are used, or new where ``span`` is None; returns where they belong now, locked.

        Args:
            span: Where they belonged.
            tokens: How many.
            found: They were in the cache.
            value: What a hit of one token is worth to the verdict.
            released: They have been released since their last use.
            held: A running request holds them, so that LRU has them too.
        """
        if span is not None and not released:
            span = self.release(span, tokens)
        if span is None:
            self._held += tokens
        elif span.gone:
            self._held += tokens
            if found and not held:
                self.gained += tokens
                self._request += tokens * value
        else:
            kept = tokens
            if span is self.oldest and not held and (excess := self._held - self._room) > 0:
                kept -= int(tokens * min(1.0, excess / span.tokens))  # LRU would have evicted a part of it
            span.tokens -= tokens
            if not found:
                self.lost += kept
                self._request -= kept * value
            elif kept < tokens:
                self.gained += tokens - kept
                self._request += (tokens - kept) * value
        return self.newest

    def release(self, span: Span, tokens: int) -> Span:
        """The last request that held tokens has ended: they may go. Returns where they belong now."""
        if span.gone:
            span = self.oldest  # they are older than all that may go
        span.tokens += tokens
        return span

    def forget(self, span: Span, tokens: int, *, released: bool = True) -> None:
        """Tokens are no longer known of; ``released`` as in :meth:`use`."""
        if not released:
            span = self.release(span, tokens)
        if not span.gone:
            span.tokens -= tokens
            self._held -= tokens

    def fit(self, room: float) -> None:
        """Evict what does not fit into so many tokens."""
        self._room = room
        spans = self._spans
        while len(spans) > 1 and self._held - spans[0].tokens >= room:
            span = spans.popleft()
            span.gone = True
            self._held -= span.tokens
            self.oldest = spans[0]

    def end_request(self) -> None:
        """What comes now is another request's."""
        if self._request:
            self._sum += self._request
            self._squares += self._request * self._request
            self._request = 0.0

    def end_span(self) -> None:
        """What is used from now on is in a new span."""
        self.newest = Span()
        self._spans.append(self.newest)

    def judge(self) -> bool:
        """Look at the evidence; returns whether the verdict has changed."""
        self._sum *= _DECAY
        self._squares *= _DECAY
        if self.behind:
            self._pause -= 1
            if self._pause > 0:
                return False
            self.behind = False
        elif self._sum < 0 and self._sum * self._sum > _SURE * _SURE * self._squares:
            self.behind = True
            self.falls += 1
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST)
        else:
            return False
        self._sum = self._squares = 0.0
        return True
