"""Replay of a trace, one request at a time, through the tree, pool and orders of the cache itself.

Prompts are cached, generated tokens are not. A model with states also keeps checkpoints, where SGLang keeps
them: at the end of each prompt, and where a prompt's cached KV reaches past its deepest checkpoint (two
prompts branch there). Sliding windows that are cached apart are kept at the same places.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from costcache.radix.states import StateTree
from costcache.radix.windows import WindowTree
from costcache.sim.loop import no_collector, numbered
from costcache.sim.requests import RequestInfos
from costcache.sim.results import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from costcache.radix.node import Node
    from costcache.radix.tree import RadixTree
    from costcache.records import RequestRecord
    from costcache.sim.requests import Known
    from costcache.sim.trace import PageKeys, Trace

__all__ = ["outcome_of", "replay"]


def replay(
    trace: Trace,
    keys: PageKeys,
    tree: RadixTree,
    *,
    always_free: bool = False,
    known: Known = "server",
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay a trace once, through an empty tree.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, at the tree's page size.
        tree: The tree.
        always_free: Restore the free target after every request, not only after an eviction; models without
            states only.
        known: What the policy is told of requests; see :class:`~costcache.sim.requests.RequestInfos`.
        progress: Called now and then with the number of requests done since the last call.
    """
    pool, clock = tree.pool, tree.pool.clock
    match: Callable[[Node, bytes, RequestRecord], Node] = tree.match
    root_of, namespace, now = tree.root, (), time.perf_counter
    begin, finish = pool.begin, pool.finish
    times, whole = trace.timestamps.tolist(), keys.tokens.tolist()
    priorities = None if trace.priorities is None else trace.priorities.tolist()
    infos = RequestInfos(trace, known)
    info, askers = infos.of, infos.askers
    cache: _Checkpoints | _Prefixes | _Windows
    if isinstance(tree, StateTree):
        cache = _Checkpoints(tree)
    elif isinstance(tree, WindowTree):
        cache, finish, match = _Windows(tree, always_free), tree.finish, tree.find
    else:
        cache = _Prefixes(tree, always_free)
    serve = cache.serve
    matched: list[int] = []
    with no_collector():
        started = now()
        for i, view in numbered(keys, len(keys), progress):
            key = bytes(view)  # slices of bytes are cheaper than slices of a view
            clock.advance(times[i])
            request = begin(None if askers is None else askers[i])
            node = match(root_of(namespace), key, request)
            found = serve(node, key, whole[i], request)
            matched.append(found)
            if priorities is not None and priorities[i]:
                pool.raise_priority(request.end or node, priorities[i])
            if pool.hears_finish:
                finish(request, info(i, found))
        seconds = now() - started
    return outcome_of(tree, matched, seconds, cache.deciding)


class _Prefixes:
    """Reuses and caches prompts, for a model without states.

    Attributes:
        deciding: Seconds spent on evictions.
    """

    def __init__(self, tree: RadixTree, always_free: bool) -> None:
        self.deciding = 0.0
        self._tree = tree
        self._pool = tree.pool
        self._capacity = tree.pool.capacity
        self._watermark = not always_free
        self._reserve = tree.pool.reserve() if always_free else 0

    def serve(self, node: Node, key: bytes, end: int, request: RequestRecord) -> int:
        """Reuse what matched and cache the rest of the prompt, as far as it fits.

        Args:
            node: The deepest node that matched.
            key: The prompt's whole pages.
            end: Tokens in them.
            request: The request.

        Returns:
            Tokens that need no prefill.
        """
        found = request.matched = node.depth + node.tokens
        added = end - found
        if not added:
            return found
        pool, tree, capacity = self._pool, self._tree, self._capacity
        if end > capacity:
            pool.counters.oversized += 1
        if added > capacity - pool.cached:
            before = time.perf_counter()
            added = pool.make_room(added, node, watermark=self._watermark)
            self.deciding += time.perf_counter() - before
        if added:
            tree.append(node, tree.part(key, found, added), None, request)
        if self._reserve:
            before = time.perf_counter()
            pool.evict(self._reserve - pool.free, watermark=False)
            self.deciding += time.perf_counter() - before
        return found


class _Checkpoints:
    """Reuses and caches prompts and their checkpoints, for a model with states.

    Attributes:
        deciding: Seconds spent on evictions.
    """

    def __init__(self, tree: StateTree) -> None:
        self.deciding = 0.0
        self._tree = tree
        self._slot = 0

    def serve(self, node: Node, key: bytes, end: int, request: RequestRecord) -> int:
        """Resume from the deepest checkpoint that matched; cache the rest of the prompt and its checkpoints.

        Arguments and result as those of :meth:`_Prefixes.serve`.
        """
        tree = self._tree
        usable = tree.usable(node)
        found = request.matched = usable.depth + usable.tokens
        if found:
            tree.pool.consume(usable)
        reached = node.depth + node.tokens
        added = end - reached
        branch = 0 < reached < end and node.state is None
        wanted = branch + (end > 0 and (added > 0 or node.state is None))
        if wanted:
            kept = (usable, node) if reached else ()
            before = time.perf_counter()
            added, states = tree.make_room(kept, added, wanted)
            self.deciding += time.perf_counter() - before
            tree.pool.counters.oversized += reached + added < end
            if branch and states:
                states -= 1
                self._attach(node)
            if states and (added or reached == end):
                if added:
                    node = tree.append(node, tree.part(key, reached, added), None, request)
                self._attach(node)
        return found

    def _attach(self, node: Node) -> None:
        self._slot += 1
        self._tree.attach(node, self._slot)


class _Windows:
    """Reuses and caches prompts and their windows, for a model whose windows are cached apart.

    Attributes:
        deciding: Seconds spent on evictions.
    """

    def __init__(self, tree: WindowTree, always_free: bool) -> None:
        self.deciding = 0.0
        self._tree = tree
        self._always_free = always_free

    def serve(self, node: Node, key: bytes, end: int, request: RequestRecord) -> int:
        """Resume where a whole window is cached; compute and cache the rest of the prompt and its windows.

        Arguments and result as those of :meth:`_Prefixes.serve`.
        """
        tree = self._tree
        usable = tree.usable(node)
        found = request.matched = usable.depth + usable.tokens
        computed = end - found
        if not computed:
            return found
        before = time.perf_counter()
        watermark = not self._always_free
        # All of it is computed, also what is cached beyond the usable end, which may go for it.
        windows = tree.in_flight(computed) if tree.chunk else 0
        room, _ = tree.make_room(usable, computed, windows, watermark=watermark)
        tree.pool.counters.oversized += room < computed
        if node is not usable:
            node = tree.match(tree.root(()), key, request)
        cached = node.depth + node.tokens
        added = min(end - cached, room)
        if added:
            node = tree.append(node, tree.part(key, cached, added), None, request)
        tree.keep_both(node, cached, found, request, watermark=watermark)
        if self._always_free:
            tree.restore()
        self.deciding += time.perf_counter() - before
        return found


def outcome_of(
    tree: RadixTree, matched: list[int], seconds: float, deciding: float, ttft: list[float] | None = None
) -> Outcome:
    """The outcome of a replay through ``tree``; several pools are added up, as tokens of so many bytes."""
    pool = tree.pool
    if isinstance(tree, StateTree | WindowTree):
        counters = [each.counters for each in tree.pools.values()]
        shortfall, evicted = _evicted_tokens(tree)
        trimmed = None
    else:
        counters = [pool.counters]
        shortfall, evicted, trimmed = counters[0].shortfall, counters[0].evicted, counters[0].trimmed
    return Outcome(
        matched=np.array(matched, np.int64),
        evictions=sum(each.evictions for each in counters),
        shortfall=shortfall,
        evicted=evicted,
        trimmed=trimmed,
        oversized=pool.counters.oversized,
        seconds=seconds,
        policy=pool.policy,
        clamped=sum(each.clamped for each in counters),
        fallbacks=int(pool.fell_back),
        decision_seconds=deciding,
        ttft=None if ttft is None else np.array(ttft, np.float64),
    )


def _evicted_tokens(tree: StateTree | WindowTree) -> tuple[int, int]:
    """Shortfall and evictions of all pools, in tokens of KV and window KV of the same bytes."""
    units = {"memory": 1, "kv": tree.kv_bytes}
    if isinstance(tree, WindowTree):
        units["swa"] = tree.window_bytes
        token = tree.kv_bytes + tree.window_bytes
    else:
        units["state"] = tree.state_bytes
        token = tree.kv_bytes
    counts = [(units[name], pool.counters) for name, pool in tree.pools.items()]
    shortfall = sum(size * count.shortfall for size, count in counts)
    return shortfall // token, sum(size * count.evicted for size, count in counts) // token
