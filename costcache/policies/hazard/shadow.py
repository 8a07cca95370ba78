"""Shadow LRU: the hits LRU would have had, so that a policy can step back where it is behind."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["ShadowLRU", "Span"]

_DECAY = 0.8
"""Share of the evidence that a verdict leaves to the next one."""
_SURE = 1.0
"""Standard deviations by which a policy must be behind."""
_PAUSE = 8
"""Verdicts for which LRU is in force at first; each further time twice as many."""
_LONGEST = 128


class Span:
    """Tokens that were last used in one stretch of time.

    Attributes:
        tokens: Number of those that may be evicted, since no running request locks them.
        evicted: Whether LRU would have evicted these by now.
    """

    __slots__ = ("evicted", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.evicted = False


class ShadowLRU:
    """An LRU cache of the same size that sees the same uses, without its contents.

    LRU keeps what was used last, as much as fits. So it is enough to know of all tokens in which span of time
    they were used last, evicted ones included: spans are evicted from the old end while more tokens than fit
    were used later. Each use then tells whether LRU would have had it. Spans are a few requests wide.

    Tokens pinned by running requests are unevictable in both caches and take room in both. When the last of
    the requests has ended they are released, and are as old as their last use.

    The verdict is on the difference in hits, request by request since those of one request are not
    independent: a policy is behind where the sum is negative by more than its own noise.

    Attributes:
        behind: LRU should be in force now.
        falls: How often that became so.
        gained: Tokens found that LRU would not have found, since the start.
        lost: Tokens that LRU would have found, and the policy did not, since the start.
        newest: The span of what is used now.
        oldest: The span that LRU evicts from next; a part of it may have been evicted already.
    """

    def __init__(self) -> None:
        self.behind = False
        self.falls = 0
        self.gained = 0
        self.lost = 0
        self._room = math.inf
        self._spans: deque[Span] = deque()
        self._cached = 0  # tokens, pinned ones included
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
        locked: bool = False,
    ) -> Span:
        """Use tokens, or add new ones where ``span`` is None; returns their span from now on, locked.

        Args:
            span: Their span up to now.
            tokens: Number of tokens.
            found: They were in the cache.
            value: Worth of a hit of one token to the verdict.
            released: They have been released since their last use.
            locked: A running request pins them, so that LRU has them too.
        """
        if span is not None and not released:
            span = self.release(span, tokens)
        if span is None:
            self._cached += tokens
        elif span.evicted:
            self._cached += tokens
            if found and not locked:
                self.gained += tokens
                self._request += tokens * value
        else:
            kept = tokens
            if span is self.oldest and not locked and (excess := self._cached - self._room) > 0:
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
        """Unpin tokens when the last request that uses them has ended; returns their span from now on."""
        if span.evicted:
            span = self.oldest  # they are older than everything evictable
        span.tokens += tokens
        return span

    def forget(self, span: Span, tokens: int, *, released: bool = True) -> None:
        """Forget tokens; ``released`` as in :meth:`use`."""
        if not released:
            span = self.release(span, tokens)
        if not span.evicted:
            span.tokens -= tokens
            self._cached -= tokens

    def fit(self, room: float) -> None:
        """Evict what does not fit into so many tokens."""
        self._room = room
        spans = self._spans
        while len(spans) > 1 and self._cached - spans[0].tokens >= room:
            span = spans.popleft()
            span.evicted = True
            self._cached -= span.tokens
            self.oldest = spans[0]

    def end_request(self) -> None:
        """Close the account of a request: what follows is another one's."""
        if self._request:
            self._sum += self._request
            self._squares += self._request * self._request
            self._request = 0.0

    def end_span(self) -> None:
        """Begin a new span for what is used from now on."""
        self.newest = Span()
        self._spans.append(self.newest)

    def judge(self) -> bool:
        """Weigh the evidence; returns whether the verdict has changed."""
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
