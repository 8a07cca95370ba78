"""Replay of a trace through the tree, pipeline and orders that serve.

The plain mode: prompts are cached, generated tokens are not, and requests come one at a time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costcache.radix.store import PrefixStore
from costcache.records import RequestInfo, RequestRecord

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.deployment import Deployment
    from costcache.model import ModelSpec
    from costcache.plugins import PluginManager
    from costcache.settings import Settings
    from costcache.sim.trace import PageKeys, Trace

__all__ = ["Run", "replay"]

_PER_REPORT = 512


@dataclass(frozen=True, slots=True)
class Run:
    """One policy at one capacity.

    Attributes:
        policy: The policy that was asked for.
        policy_in_force: The policy that decided at the end: what ``costcache`` means, or ``lru``
            after a fallback.
        plugin: The architecture plugin that serves the model.
        capacity: The capacity as it was asked for.
        capacity_tokens: Tokens in the pool; None when unlimited.
        requests: Requests replayed.
        input_tokens: Prompt tokens of all requests.
        hit_tokens: Prompt tokens that were found.
        token_hit_rate: Share of the prompt tokens that were found.
        flops_saved_rate: Share of the prefill FLOPs that hits saved; a token deep in a context
            counts more.
        evictions: Evictions that had a shortfall.
        evicted_tokens: Tokens evicted.
        trimmed: Victims of which only the tail went.
        oversized_requests: Requests longer than the pool: what matched was used, and the head that
            fits was cached.
        clamped: Answers of plugins that were out of bounds and replaced.
        fallbacks: 1 if the policy failed and LRU took over.
        seconds: Wall time of the replay, parsing excluded.
        requests_per_second: Requests over ``seconds``.
    """

    policy: str
    policy_in_force: str
    plugin: str
    capacity: str
    capacity_tokens: int | None
    requests: int
    input_tokens: int
    hit_tokens: int
    token_hit_rate: float
    flops_saved_rate: float
    evictions: int
    evicted_tokens: int
    trimmed: int
    oversized_requests: int
    clamped: int
    fallbacks: int
    seconds: float
    requests_per_second: float


def replay(
    trace: Trace,
    keys: PageKeys,
    model: ModelSpec,
    deployment: Deployment,
    settings: Settings,
    capacity_tokens: int | None,
    *,
    capacity: str = "",
    plugins: PluginManager | None = None,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Replay a trace once.

    Args:
        trace: The requests, in order of time.
        keys: Their pages, ``trace.page_keys(deployment.page_size)``.
        model: The model's architecture facts.
        deployment: Page size, parallelism and KV dtype.
        settings: Policy and its settings, headroom, trimming.
        capacity_tokens: Tokens in the pool; None for no limit.
        capacity: How the capacity was written, for the report.
        plugins: Where to look for plugins; the process's own by default.
        progress: Called now and then with the number of requests done since the last call.

    Raises:
        PluginError: No plugin, or no policy, can serve the model.
        SettingsError: A setting is wrong.
    """
    store = PrefixStore(
        model,
        int(keys.tokens.sum()) + deployment.page_size if capacity_tokens is None else capacity_tokens,
        settings,
        deployment,
        page_bytes=keys.bytes_per_page,
        plugins=plugins,
    )
    collect = gc.isenabled()
    gc.disable()  # nodes make no garbage in cycles; scanning them all again and again is half of the time
    try:
        matched, seconds = _replay(trace, keys, store, progress)
    finally:
        if collect:
            gc.enable()
    counters, hit, asked = store.pipeline.counters, int(matched.sum()), int(trace.input_tokens.sum())
    return Run(
        policy=settings.policy,
        policy_in_force=store.guard.name,
        plugin=store.architecture.name,
        capacity=capacity,
        capacity_tokens=capacity_tokens,
        requests=len(trace),
        input_tokens=asked,
        hit_tokens=hit,
        token_hit_rate=hit / asked if asked else 0.0,
        flops_saved_rate=_flops_saved(store.cost, matched, trace.input_tokens),
        evictions=counters.evictions,
        evicted_tokens=counters.evicted,
        trimmed=counters.trimmed,
        oversized_requests=store.oversized,
        clamped=counters.clamped,
        fallbacks=store.guard.fallbacks,
        seconds=seconds,
        requests_per_second=len(trace) / seconds if seconds else 0.0,
    )


def _replay(
    trace: Trace, keys: PageKeys, store: PrefixStore, progress: Callable[[int], None] | None
) -> tuple[NDArray[np.int64], float]:
    """Matched tokens of each request, and the seconds that it took."""
    tree, capacity = store.tree, store.capacity
    match, append, fit, root_of, clock = tree.match, tree.append, store.fit, tree.root, tree.clock
    begin, namespace = clock.begin, ()
    page_size, page_bytes = tree.page_size, tree.page_bytes
    times, whole, outputs = (
        trace.timestamps.tolist(),
        keys.tokens.tolist(),
        trace.output_tokens.tolist(),
    )
    matched: list[int] = []
    done = 0
    started = time.perf_counter()
    for i, view in enumerate(keys):
        key = bytes(view)  # slices of bytes are cheaper than slices of a view
        clock.advance(times[i])
        request = RequestRecord(begin(), clock.now)
        node = match(root_of(namespace), key, request)
        found = node.depth + node.tokens
        matched.append(found)
        tokens = whole[i]
        if tokens > found:
            if tokens > capacity:
                store.oversized += 1
            added = fit(node, tokens - found)
            if added:
                start = found // page_size * page_bytes
                stop = start + added // page_size * page_bytes
                append(node, key[start:stop], None, request)
        finish = store.guard.finish
        if finish is not None:
            finish(request, RequestInfo(output_tokens=outputs[i]))
        if progress is not None and i - done >= _PER_REPORT:
            progress(i - done)
            done = i
    seconds = time.perf_counter() - started
    if progress is not None:
        progress(len(matched) - done)
    return np.array(matched, dtype=np.int64), seconds


def _flops_saved(cost: CostModel, matched: NDArray[np.int64], asked: NDArray[np.int64]) -> float:
    total = float(np.sum(cost.recompute_flops(np.zeros_like(asked), asked)))
    saved = float(np.sum(cost.recompute_flops(np.zeros_like(matched), matched)))
    return saved / total if total else 0.0
