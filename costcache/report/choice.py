"""Chooses the policy and the pool size that a report recommends, by the token hit rates in its table.

The rule, over the policies that a server can run and that never failed:

1. The pool is the smallest limited one at which a policy gets :data:`ENOUGH` of the hits of an unlimited
   pool. If there is none, it is the largest.
2. At that pool, all policies within :data:`MATTERS` of the best token hit rate are tied.
3. Of the tied ones, LRU is chosen if it is one, since it needs no change; else the one with the best mean
   over the pool sizes, then the best rate at the pool, then the first given.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.report.material import Material, Replay

__all__ = ["ENOUGH", "MATTERS", "Choice", "choose", "failed", "mean_rate"]

MATTERS = 0.005
"""Half a point of token hit rate; smaller differences are within the variation from day to day."""
ENOUGH = 0.9
"""Share of an unlimited pool's hits beyond which more memory gains little."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy at a pool size.

    Attributes:
        replay: The chosen replay.
        rivals: The other candidates at the same pool, best token hit rate first.
        ties: Those of the rivals that are tied with the chosen one. Nothing else is ahead of it.
        enough: Whether the pool was chosen for getting :data:`ENOUGH` of the hits.
    """

    replay: Replay
    rivals: tuple[Replay, ...]
    ties: tuple[Replay, ...]
    enough: bool

    @property
    def ahead(self) -> tuple[Replay, ...]:
        """The tied replays with a higher token hit rate than the chosen one."""
        mine = self.replay.run.token_hit_rate
        return tuple(r for r in self.ties if r.run.token_hit_rate > mine)


def failed(material: Material) -> list[str]:
    """Policies that failed in a replay. They were LRU from then on, so their figures are not theirs."""
    return list(dict.fromkeys(r.run.policy for r in material.replays if r.run.fallbacks))


def choose(material: Material) -> Choice | None:
    """Choose a policy and a pool size together; None if no policy could be served."""
    broken = failed(material)
    usable = [r for r in material.replays if r.online and r.run.policy not in broken]
    candidates = _limited(usable)
    if not candidates:
        return None
    pools = sorted({(material.pool(r.run), r.run.capacity) for r in candidates})
    target = ENOUGH * material.ceiling
    sufficient = {r.run.capacity for r in candidates if r.run.token_hit_rate >= target}
    capacity = next((name for _, name in pools if name in sufficient), pools[-1][1])
    there = [r for r in candidates if r.run.capacity == capacity]
    best = max(r.run.token_hit_rate for r in there)
    tied = [r for r in there if best - r.run.token_hit_rate < MATTERS]
    chosen = max(
        tied,
        key=lambda r: (r.run.policy == "lru", mean_rate(material, r.run.policy), r.run.token_hit_rate),
    )
    rivals = tuple(sorted((r for r in there if r is not chosen), key=lambda r: -r.run.token_hit_rate))
    ties = tuple(r for r in rivals if r in tied)
    return Choice(chosen, rivals, ties, capacity in sufficient)


def mean_rate(material: Material, policy: str) -> float:
    """A policy's mean token hit rate over the limited pools; over all if there is no other."""
    return fmean(r.run.token_hit_rate for r in _limited(material.of(policy)))


def _limited(replays: list[Replay]) -> list[Replay]:
    """The replays in limited pools; all if there are none."""
    return [r for r in replays if r.run.capacity_tokens is not None] or replays
