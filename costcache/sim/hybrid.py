"""Replay of a trace for a model with states.

A request can go on only from a state. States are kept where SGLang keeps them: at the end of a prompt, and
where the KV of a prompt was found to reach further than its last state (a branch seen before).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from costcache.sim.future import Clairvoyant
from costcache.sim.loop import no_collector, numbered
from costcache.sim.replay import outcome_of
from costcache.sim.requests import RequestInfos

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.radix.states import StateTree
    from costcache.sim.results import Outcome
    from costcache.sim.trace import PageKeys, Trace

__all__ = ["replay_states"]


def replay_states(
    trace: Trace, keys: PageKeys, tree: StateTree, *, progress: Callable[[int], None] | None = None
) -> Outcome:
    """Replay a trace once, through an empty store.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, at the tree's page size.
        tree: An empty tree.
        progress: Called now and then with the number of requests done since the last call.
    """
    pool = tree.pool
    clock, finish = pool.clock, pool.finish
    now = time.perf_counter
    times, whole = trace.timestamps.tolist(), keys.tokens.tolist()
    info = RequestInfos(trace).of
    future = pool.order if isinstance(pool.order, Clairvoyant) else None
    matched: list[int] = []
    deciding, slot = 0.0, 0
    with no_collector():
        started = now()
        for i, view in numbered(keys, len(keys), progress):
            key = bytes(view)
            if future is not None:
                future.request = i
            clock.advance(times[i])
            request = pool.begin()
            node = tree.match(tree.root(()), key, request)
            usable = tree.usable(node)
            found = request.matched = usable.depth + usable.tokens
            reached = node.depth + node.tokens
            matched.append(found)
            if found:
                pool.consume(usable)
            end = whole[i]
            added = end - reached
            branch = 0 < reached < end and node.state is None
            wanted = branch + (end > 0 and (added > 0 or node.state is None))
            if wanted:
                kept = (usable, node) if reached else ()
                before = now()
                added, states = tree.make_room(kept, added, wanted)
                deciding += now() - before
                pool.counters.oversized += reached + added < end
                if branch and states:
                    states -= 1
                    slot += 1
                    tree.attach(node, slot)
                if states and (added or reached == end):
                    if added:
                        node = tree.append(node, tree.part(key, reached, added), None, request)
                    slot += 1
                    tree.attach(node, slot)
            finish(request, info(i, found))
        seconds = now() - started
    shortfall, evicted = tree.evicted_tokens()
    return replace(
        outcome_of(pool, matched, seconds, deciding),
        shortfall=shortfall,
        evicted=evicted,
        evictions=sum(each.counters.evictions for each in tree.pools.values()),
        trimmed=None,
    )
