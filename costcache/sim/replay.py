"""Replay of a trace through the tree, pipeline and orders that serve.

The plain mode: prompts are cached, generated tokens are not, and requests come one at a time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from costcache.sim.loop import no_collector, numbered
from costcache.sim.requests import RequestInfos
from costcache.sim.results import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.pool import Pool
    from costcache.radix.tree import RadixTree
    from costcache.sim.trace import PageKeys, Trace

__all__ = ["outcome_of", "replay"]


def replay(
    trace: Trace,
    keys: PageKeys,
    tree: RadixTree,
    *,
    always_free: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay a trace once, through an empty store.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, at the tree's page size.
        tree: An empty tree.
        always_free: Restore the free target after every request, not only when an eviction has a
            shortfall.
        progress: Called now and then with the number of requests done since the last call.
    """
    pool = tree.pool
    capacity, clock, counters = pool.capacity, pool.clock, pool.counters
    match, append, part, make_room, root_of = tree.match, tree.append, tree.part, pool.make_room, tree.root
    begin, finish, namespace, now = pool.begin, pool.finish, (), time.perf_counter
    reserve = pool.reserve() if always_free else 0
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
            request = begin()
            node = match(root_of(namespace), key, request)
            found = request.matched = node.depth + node.tokens
            matched.append(found)
            added = whole[i] - found
            if added:
                if whole[i] > capacity:
                    counters.oversized += 1
                if added > capacity - pool.cached:
                    before = now()
                    added = make_room(added, node, watermark=not always_free)
                    deciding += now() - before
                if added:
                    append(node, part(key, found, added), None, request)
                if reserve:
                    before = now()
                    pool.evict(reserve - pool.free, watermark=False)
                    deciding += now() - before
            if priorities is not None and priorities[i]:
                pool.raise_priority(request.end or node, priorities[i])
            finish(request, info(i, found))
        seconds = now() - started
    return outcome_of(pool, matched, seconds, deciding)


def outcome_of(
    pool: Pool,
    matched: list[int],
    seconds: float,
    deciding: float,
    ttft: list[float] | None = None,
) -> Outcome:
    """The outcome of a replay through ``pool``."""
    counters = pool.counters
    return Outcome(
        matched=np.array(matched, np.int64),
        evictions=counters.evictions,
        shortfall=counters.shortfall,
        evicted=counters.evicted,
        trimmed=counters.trimmed,
        oversized=counters.oversized,
        seconds=seconds,
        policy=pool.policy,
        clamped=counters.clamped,
        fallbacks=int(pool.fell_back),
        decision_seconds=deciding,
        ttft=None if ttft is None else np.array(ttft, np.float64),
    )
