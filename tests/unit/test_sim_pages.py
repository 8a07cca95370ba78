"""The simulator's fast paths against the tree that serves, and against naive references."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.optimum import optimum
from costcache.sim.paths import page_paths
from costcache.sim.results import Run
from costcache.sim.runs import page_runs
from costcache.sim.stack import LRUCurve, lru
from costcache.sim.trace import Trace

MODEL = ModelSpec.preset("llama-3-8b")
BLOCK = 4


def trace_of(prompts: list[list[int]], rests: list[int]) -> Trace:
    """Each prompt is its blocks, the last one ``rest`` tokens short."""
    lengths = np.array([len(p) for p in prompts], np.int64)
    tokens = lengths * BLOCK - np.minimum(np.array(rests, np.int64), np.maximum(lengths * BLOCK - 1, 0))
    tokens = np.maximum(tokens, (lengths - 1) * BLOCK + 1) * (lengths > 0)
    return Trace(
        name="drawn",
        block_size=BLOCK,
        timestamps=np.arange(len(prompts), dtype=np.float64),
        input_tokens=tokens,
        output_tokens=np.ones(len(prompts), np.int64),
        ids=np.array(list(itertools.chain.from_iterable(prompts)), np.int64),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


def tree_run(trace: Trace, page_size: int, pages: int | None, policy: str = "lru") -> Run:
    simulator = Simulator(trace, MODEL, Deployment(page_size=page_size))
    run = simulator.run(Settings(policy=policy), None if pages is None else pages * page_size, tree=True)
    assert run.tree
    return run


prompts = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=40)
traces = prompts.flatmap(
    lambda p: st.lists(st.integers(0, 3), min_size=len(p), max_size=len(p)).map(lambda r: trace_of(p, r))
)


@given(traces, st.sampled_from([1, 2, 3, 4, 8]))
def test_runs_are_the_pages_that_the_same_requests_use(trace: Trace, page_size: int) -> None:
    keys = trace.page_keys(page_size)
    paths, runs = page_paths(keys), page_runs(keys)
    assert runs.distinct == paths.distinct == trace.distinct_pages(page_size)
    lengths = runs.lengths[runs.visits]
    assert (lengths > 0).all()
    # Each run of a request is a stretch of its pages, from the root down to the end of the prompt.
    starts = (runs.ends - runs.lengths)[runs.visits]
    pages_of: dict[int, list[int]] = {}
    users: dict[int, set[int]] = {}
    for request in range(len(trace)):
        own = paths.paths[paths.offsets[request] : paths.offsets[request + 1]].tolist()
        at = 0
        for visit in range(runs.offsets[request], runs.offsets[request + 1]):
            assert starts[visit] == at
            run, length = int(runs.visits[visit]), int(lengths[visit])
            assert pages_of.setdefault(run, own[at : at + length]) == own[at : at + length]
            users.setdefault(run, set()).add(request)
            at += length
        assert at == len(own)
    for visit, following in enumerate(runs.following.tolist()):
        later = [each for each in users[int(runs.visits[visit])] if each > runs.requests[visit]]
        assert following == min(later, default=len(trace))
    assert len(pages_of) <= 2 * len(trace)


@given(traces, st.sampled_from([1, 2, 3, 4, 8]))
def test_paths_number_each_prefix_once(trace: Trace, page_size: int) -> None:
    keys = trace.page_keys(page_size)
    paths = page_paths(keys)
    seen: dict[bytes, int] = {}
    for i, key in enumerate(keys):
        mine = paths.paths[paths.offsets[i] : paths.offsets[i + 1]].tolist()
        size = keys.bytes_per_page
        names = [bytes(key[: at + size]) for at in range(0, len(key), size)]
        assert len(names) == len(mine)
        for name, number in zip(names, mine, strict=True):
            assert seen.setdefault(name, number) == number
            parent = seen[name[:-size]] if len(name) > size else -1
            assert paths.parents[number] == parent
    assert sorted(seen.values()) == list(range(paths.distinct))
    assert paths.distinct == trace.distinct_pages(page_size)


def test_a_deep_prompt_costs_what_its_pages_cost() -> None:
    def seconds(prompts: list[list[int]]) -> float:
        keys = trace_of(prompts, [0] * len(prompts)).page_keys(BLOCK)
        began = time.process_time()
        assert page_paths(keys).distinct == 200_000
        return time.process_time() - began

    many = [[first] * 1000 for first in range(200)]
    deep = [[7] * 200_000, [7] * 100_000]
    assert min(seconds(deep) for _ in range(3)) < 20 * min(seconds(many) for _ in range(3))


@given(traces, st.sampled_from([1, 2, 4, 8]), st.one_of(st.none(), st.integers(1, 12)))
def test_one_pass_lru_equals_lru_through_the_tree(trace: Trace, page_size: int, capacity: int | None) -> None:
    keys = trace.page_keys(page_size)
    curve = LRUCurve(page_paths(keys))
    fast = curve.at(capacity)
    served = tree_run(trace, page_size, capacity)
    assert int(fast.matched.sum()) * page_size == served.hit_tokens
    assert fast.evicted * page_size == served.evicted_tokens
    assert fast.shortfall * page_size == served.shortfall_tokens
    assert fast.evictions == served.evictions
    assert fast.oversized == served.oversized_requests
    if capacity is not None:
        once = lru(page_paths(keys), capacity)
        assert once.matched.tolist() == fast.matched.tolist()
        assert (once.shortfall, once.evicted) == (fast.shortfall, fast.evicted)
        assert (once.evictions, once.oversized) == (fast.evictions, fast.oversized)
        assert curve.hit_pages(np.array([capacity]))[0] == fast.matched.sum()


def naive_optimum(requests: list[list[int]], capacity: int) -> int:
    """Every choice of victims tried: the most pages that can be found, all misses inserted."""
    best: dict[tuple[int, frozenset[int]], int] = {}

    def go(i: int, cached: frozenset[int], parents: dict[int, int]) -> int:
        if i == len(requests):
            return 0
        state = (i, cached)
        if state not in best:
            pages = requests[i]
            found = 0
            while found < len(pages) and pages[found] in cached:
                found += 1
            used = set(pages[:found])
            short = min(len(pages), capacity) - found - (capacity - len(cached))
            others = sorted(cached - used)
            best[state] = max(
                found + go(i + 1, (cached - set(gone)) | set(pages[: min(len(pages), capacity)]), parents)
                for gone in itertools.combinations(others, max(0, short))
                if all(parents[page] not in gone for page in cached if page not in gone)
            )
        return best[state]

    parents = {page: (pages[i - 1] if i else -1) for pages in requests for i, page in enumerate(pages)}
    return go(0, frozenset(), parents)


@given(traces, st.integers(1, 12))
def test_the_optimum_drops_only_stale_entries(trace: Trace, capacity: int) -> None:
    runs = page_runs(trace.page_keys(BLOCK))
    expected = optimum(runs, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("costcache.sim.optimum._STALE", 0)
        found = optimum(runs, capacity)
    assert found.matched.tolist() == expected.matched.tolist()
    assert (found.evicted, found.shortfall) == (expected.evicted, expected.shortfall)
    # What does not fit is missing, and nothing is there to evict for it.
    assert found.shortfall >= found.evicted
    assert found.oversized or found.shortfall == found.evicted


@given(st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=9), st.integers(1, 5))
def test_the_optimum_is_the_best_of_all_choices(blocks: list[list[int]], capacity: int) -> None:
    keys = trace_of(blocks, [0] * len(blocks)).page_keys(BLOCK)
    runs = page_runs(keys)
    paths = page_paths(keys)
    requests = [
        paths.paths[start:stop].tolist() for start, stop in itertools.pairwise(paths.offsets.tolist())
    ]
    assert int(optimum(runs, capacity).matched.sum()) == naive_optimum(requests, capacity)


@given(traces, st.integers(1, 12))
def test_no_policy_beats_the_optimum(trace: Trace, capacity: int) -> None:
    keys = trace.page_keys(BLOCK)
    runs = page_runs(keys)
    best = optimum(runs, capacity)
    assert int(best.matched.sum()) <= int(optimum(runs, None).matched.sum())
    for policy in ("lru", "lfu", "slru", "mru"):
        served = tree_run(trace, BLOCK, capacity, policy)
        assert served.hit_tokens <= int(best.matched.sum()) * BLOCK


@pytest.mark.parametrize("capacity", [None, 3])
def test_a_trace_without_pages(capacity: int | None) -> None:
    keys = trace_of([[], [1]], [0, 3]).page_keys(BLOCK)
    paths, runs = page_paths(keys), page_runs(keys)
    assert paths.distinct == 0
    assert LRUCurve(paths).at(capacity).matched.tolist() == [0, 0]
    assert optimum(runs, capacity).matched.tolist() == [0, 0]


def test_progress_counts_every_request() -> None:
    runs = page_runs(trace_of([[1, 2]] * 1200, [0] * 1200).page_keys(BLOCK))
    done: list[int] = []
    optimum(runs, 1, done.append)
    assert sum(done) == 1200
