"""Hazard, the default policy: evicts what promises the fewest uses for the time that it would be kept.

The data flows one way. Read it from the order::

    order     Hazard: takes the events of a cache, and decides when to rank and when to estimate
      intake    keeps the history of each node (history), and of evicted ones; dates uses (pace)
        learner   counts reuse intervals by class (classes, frequent): over (life_table), or open (cohorts);
                  estimates their survival (survival, on bins of age; hinted says how far hints count);
                  compares with LRU (shadow), and says when that steps in (judge)
          ranker    ranks leaves by cohort, by their worth (worth, depths), and finds the victim

``forecast`` says how likely a use is within a time, for tiers of memory, from the learner's estimate.
``prior`` is what the estimates start from, while a cache has seen little.
``snapshot`` describes an order at one time; ``explained`` and ``tables`` (what it learned, as a file) read
that. ``states`` is the order for models with recurrent states, with a ``state_learner`` of its own.
``settings`` and ``plugin`` make it a policy.
"""

from __future__ import annotations

from costcache.policies.hazard.order import Hazard
from costcache.policies.hazard.plugin import policies
from costcache.policies.hazard.settings import HazardSettings
from costcache.policies.hazard.states import HazardStates

__all__ = ["Hazard", "HazardSettings", "HazardStates", "policies"]
