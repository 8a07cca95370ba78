"""How much FLOPs count beside recency: Marconi's tuning, by replaying recent requests on states alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["ALPHAS", "Place", "ShadowStates", "best_alpha"]

ALPHAS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Weights that are tried."""
_AT_ONCE = 0.02
"""Share of the memory that a shadow frees at a time, so that scores are seldom sorted."""


class Place(NamedTuple):
    """Where a state can be: the end of a node on a request's path.

    Attributes:
        name: Of the whole prefix up to there.
        end: Tokens of that prefix.
    """

    name: int
    end: int


class ShadowStates:
    """What a cache of a given size and weight would have found, counted on states alone.

    A state weighs its own bytes and those of the KV back to the state in front of it. A request finds the
    deepest state on its path, and leaves one at its end and one where it parts from an earlier request.
    """

    def __init__(
        self,
        capacity: int,
        kv_bytes: int,
        state_bytes: int,
        flops: Callable[[int, int], float],
        alpha: float,
    ) -> None:
        """Start empty.

        Args:
            capacity: Bytes for states and KV.
            kv_bytes: Bytes of a token.
            state_bytes: Bytes of a state.
            flops: FLOPs to compute tokens [start, stop).
            alpha: Weight of FLOPs saved per byte beside recency, which has 1.
        """
        self.found = 0
        self._capacity, self._kv, self._state = capacity, kv_bytes, state_bytes
        self._flops, self._alpha = flops, alpha
        self._live: dict[int, tuple[int, float, int]] = {}  # name: last use, FLOPs per byte, bytes
        self._seen: set[int] = set()
        self._used = 0
        self._now = 0

    def serve(self, path: Sequence[Place]) -> None:
        """Serve one request, whose path goes from the front to its end."""
        self._now += 1
        live, seen = self._live, self._seen
        hit = 0
        shared: Place | None = None
        for place in reversed(path):
            if place.name in live:
                hit = place.end
                _, gain, held = live[place.name]
                live[place.name] = (self._now, gain, held)
                break
            if shared is None and place.name in seen:
                shared = place
        self.found += hit
        front = hit
        for made in (shared, path[-1]):
            if made is not None and made.name not in live:
                held = self._state + (made.end - front) * self._kv
                live[made.name] = (self._now, self._flops(front, made.end) / held, held)
                self._used += held
                front = made.end
        seen.update(place.name for place in path)
        if self._used > self._capacity:
            self._evict()

    def _evict(self) -> None:
        live = self._live
        gains = [gain for _, gain, _ in live.values()]
        least, width = min(gains), max(gains) - min(gains) or 1.0
        oldest = min(used for used, _, _ in live.values())
        span = max(1, self._now - oldest)
        alpha = self._alpha
        order = sorted(
            live,
            key=lambda name: (live[name][0] - oldest) / span + alpha * (live[name][1] - least) / width,
        )
        goal = self._capacity * (1 - _AT_ONCE)
        for name in order:
            if self._used <= goal:
                break
            self._used -= live.pop(name)[2]


def best_alpha(
    requests: Sequence[Sequence[Place]],
    capacity: int,
    kv_bytes: int,
    state_bytes: int,
    flops: Callable[[int, int], float],
    alphas: Sequence[float] = ALPHAS,
) -> float:
    """The weight under which the shadow finds most tokens of these requests; the smallest of equals."""
    found = {}
    for alpha in alphas:
        shadow = ShadowStates(capacity, kv_bytes, state_bytes, flops, alpha)
        for path in requests:
            shadow.serve(path)
        found[alpha] = shadow.found
    return max(sorted(found), key=lambda alpha: found[alpha])
