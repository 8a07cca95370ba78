"""Names and descriptions of the counts that a server exports for each pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache._version import described
from costcache.eviction import USES

if TYPE_CHECKING:
    from costcache.pool import Pool

__all__ = [
    "BY_USES",
    "BY_USES_LABEL",
    "COUNTERS",
    "ENTRIES",
    "EXCESS",
    "FALLBACKS",
    "INFO",
    "INFO_LABELS",
    "IN_FORCE",
    "SECONDS",
    "VERDICT",
    "counts_of",
    "info_of",
]

COUNTERS = {
    "evictions": ("evictions_total", "Evictions that had a shortfall."),
    "shortfall": ("shortfall_units_total", "Units asked for."),
    "evicted": ("evicted_units_total", "Units freed."),
    "victims": ("victims_total", "Nodes evicted, whole or in part."),
    "trimmed": ("trimmed_total", "Victims evicted in part, from the tail."),
    "deferred": ("deferred_total", "Victims that could not be evicted when they were named."),
    "clamped": ("clamped_total", "Answers of a plugin that were out of bounds and replaced."),
    "short": ("short_evictions_total", "Evictions that freed less than their shortfall."),
    "slow": (
        "slow_decisions_total",
        "Decisions for which a plugin's policy took longer than its time budget.",
    ),
    "resets": ("resets_total", "Times that all that was cached was dropped at once."),
}
"""Names and texts by the field of :class:`costcache.eviction.EvictionCounters`."""
BY_USES = ("victims_by_uses_total", "Victims by the requests that had used them.")
"""A counter with one label more: each of :data:`costcache.eviction.USES`."""
BY_USES_LABEL = "uses"
_BY_USES = tuple(f"{BY_USES[0]}:{uses}" for uses in USES)
VERDICT = {
    "falls": ("step_ins_total", "Times that LRU stepped in by the policy's verdict."),
    "gained": ("gained_tokens_total", "Tokens found that LRU would not have found."),
    "lost": ("lost_tokens_total", "Tokens that LRU would have found, and the policy did not."),
}
"""Likewise of :class:`costcache.explained.Verdict`; only a policy that compares itself with LRU has them."""
FALLBACKS = ("fallbacks_total", "Orders dropped for LRU.")
IN_FORCE = ("lru_in_force", "Whether LRU is in force by the policy's verdict.")
EXCESS = (
    "excess_units",
    "Units freed beyond the shortfall.",
    # Of tokens or states, and of bytes where several kinds of memory share a pool.
    (0, 1, 16, 64, 256, 1024, 4096, 16384, 65536, 2**20, 2**24, 2**28, 2**32),
)
"""Name, text and buckets of a histogram with one value per eviction."""
SECONDS = (
    "decision_seconds",
    "Time to choose victims.",
    (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0),
)
"""Likewise."""

ENTRIES = ("policy_entries", "Entries that a plugin's policy keeps in collections of its own.")
"""A gauge of SGLang's adapter; policies of costcache itself do not have it."""
INFO = ("policy_info", "1 for what is in force; 0 for what was before.")
INFO_LABELS = ("policy", "core", "build", "lru")
"""Labels of the info, besides those of the server and ``pool``."""


def info_of(pool: Pool, policy: str, core: str) -> dict[str, str]:
    """Labels of the info on a pool.

    Args:
        pool: The pool.
        policy: Name of the policy that was asked for.
        core: What keeps the tree: in SGLang ``"python"`` or ``"rust"``.

    Returns:
        ``lru`` is "yes" while LRU chooses: as the policy asked for, after a fallback, or by a verdict.
    """
    verdict = pool.order.against_lru()
    lru = pool.policy == "lru" or (verdict is not None and verdict.behind)
    return {"policy": policy, "core": core, "build": described(), "lru": "yes" if lru else "no"}


def counts_of(pool: Pool) -> dict[str, int]:
    """Counts of a pool by name, since it was made; those of a verdict begin anew after a reset.

    Those of :data:`BY_USES` have their label after the name and a colon.
    """
    counters = pool.counters
    counts = {name: getattr(counters, field) for field, (name, _) in COUNTERS.items()}
    counts.update(zip(_BY_USES, counters.by_uses, strict=True))
    counts[FALLBACKS[0]] = pool.fallbacks
    verdict = pool.order.against_lru()
    if verdict is not None:
        counts |= {name: getattr(verdict, field) for field, (name, _) in VERDICT.items()}
        counts[IN_FORCE[0]] = int(verdict.behind)
    return counts
