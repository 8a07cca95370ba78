"""Names and descriptions of the counts that a server exports for each pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.pool import Pool

__all__ = ["COUNTERS", "EXCESS", "FALLBACKS", "INFO", "IN_FORCE", "SECONDS", "VERDICT", "counts_of"]

COUNTERS = {
    "evictions": ("evictions_total", "Evictions that had a shortfall."),
    "shortfall": ("shortfall_units_total", "Units asked for."),
    "evicted": ("evicted_units_total", "Units freed."),
    "victims": ("victims_total", "Nodes evicted, whole or in part."),
    "trimmed": ("trimmed_total", "Victims evicted in part, from the tail."),
    "deferred": ("deferred_total", "Victims that could not be evicted when they were named."),
    "clamped": ("clamped_total", "Answers of a plugin that were out of bounds and replaced."),
    "short": ("short_evictions_total", "Evictions that freed less than their shortfall."),
}
"""Names and texts by the field of :class:`costcache.eviction.EvictionCounters`."""
VERDICT = {
    "falls": ("step_ins_total", "Times that LRU stepped in by the policy's verdict."),
    "gained": ("gained_tokens_total", "Tokens found that LRU would not have found."),
    "lost": ("lost_tokens_total", "Tokens that LRU would have found, and the policy did not."),
}
"""Likewise of :class:`costcache.explained.Verdict`; only a policy that compares itself with LRU has them."""
FALLBACKS = ("fallbacks_total", "Orders dropped for LRU.")
IN_FORCE = ("lru_in_force", "Whether LRU is in force by the policy's verdict.")
INFO = ("info", "Always 1: the policy in force, the build of costcache, and the server's core.")
EXCESS = ("excess_units", "Units freed beyond the shortfall.", (0, 1, 16, 64, 256, 1024, 4096, 16384, 65536))
"""Name, text and buckets of a histogram with one value per eviction."""
SECONDS = (
    "decision_seconds",
    "Time to choose victims.",
    (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0),
)
"""Likewise."""


def counts_of(pool: Pool) -> dict[str, int]:
    """Counts of a pool by name, since it was made; those of a verdict begin anew after a reset."""
    counters = pool.counters
    counts = {name: getattr(counters, field) for field, (name, _) in COUNTERS.items()}
    counts[FALLBACKS[0]] = pool.fallbacks
    verdict = pool.order.against_lru()
    if verdict is not None:
        counts |= {name: getattr(verdict, field) for field, (name, _) in VERDICT.items()}
        counts[IN_FORCE[0]] = int(verdict.behind)
    return counts
