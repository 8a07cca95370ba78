"""Replay of a trace through the tree, pipeline and orders that serve.

The plain mode: prompts are cached, generated tokens are not, and requests come one at a time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from costcache.radix.store import PrefixStore
from costcache.records import RequestRecord
from costcache.sim.loop import no_collector, numbered
from costcache.sim.requests import RequestInfos
from costcache.sim.results import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.sim.trace import PageKeys, Trace

__all__ = ["outcome_of", "replay"]


def replay(
    trace: Trace,
    keys: PageKeys,
    store: PrefixStore,
    *,
    always_free: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay a trace once, through an empty store.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, at the store's page size.
        store: The tree and its policy.
        always_free: Restore the free target after every request, not only when an eviction has a
            shortfall.
        progress: Called now and then with the number of requests done since the last call.
    """
    tree, capacity, clock = store.tree, store.capacity, store.tree.clock
    match, append, part, fit, root_of = tree.match, tree.append, tree.part, store.fit, tree.root
    begin, namespace, now = clock.begin, (), time.perf_counter
    reserve = store.pipeline.reserve() if always_free else 0
    times, whole = trace.timestamps.tolist(), keys.tokens.tolist()
    priorities = None if trace.priorities is None else trace.priorities.tolist()
    info = RequestInfos(trace).of
    matched: list[int] = []
    deciding = 0.0
    with no_collector():
        started = now()
        for i, view in numbered(keys, len(keys), progress):
            key = bytes(view)  # slices of bytes are cheaper than slices of a view
            clock.advance(times[i])
            request = RequestRecord(begin(), clock.now, clock.in_seconds)
            node = match(root_of(namespace), key, request)
            found = request.matched = node.depth + node.tokens
            matched.append(found)
            added = whole[i] - found
            if added:
                if whole[i] > capacity:
                    store.oversized += 1
                if added > capacity - tree.cached:
                    before = now()
                    added = fit(node, added, watermark=not always_free)
                    deciding += now() - before
                if added:
                    append(node, part(key, found, added), None, request)
                if reserve:
                    before = now()
                    store.evict(reserve - store.free, watermark=False)
                    deciding += now() - before
            if priorities is not None and priorities[i]:
                tree.raise_priority(request.end or node, priorities[i])
            finish = store.guard.finish
            if finish is not None:
                finish(request, info(i, found))
        seconds = now() - started
    return outcome_of(store, matched, seconds, deciding)


def outcome_of(
    store: PrefixStore,
    matched: list[int],
    seconds: float,
    deciding: float,
    ttft: list[float] | None = None,
) -> Outcome:
    """The outcome of a replay through ``store``."""
    counters = store.pipeline.counters
    return Outcome(
        matched=np.array(matched, np.int64),
        evictions=counters.evictions,
        shortfall=counters.shortfall,
        evicted=counters.evicted,
        trimmed=counters.trimmed,
        oversized=store.oversized,
        seconds=seconds,
        policy=store.guard.name,
        clamped=counters.clamped,
        fallbacks=store.guard.fallbacks,
        decision_seconds=deciding,
        ttft=None if ttft is None else np.array(ttft, np.float64),
    )
