"""Traces in memory: page keys against a naive expansion, pages counted by path."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from costcache.errors import TraceError
from costcache.sim.trace import Trace

BLOCK_SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
PAGE_SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 32])


def make(block_size: int, prompts: list[tuple[int, list[int]]], times: list[float] | None = None) -> Trace:
    """A trace of prompts, each its tokens and its block ids."""
    n = len(prompts)
    return Trace(
        name="made",
        block_size=block_size,
        timestamps=np.array(times if times is not None else range(n), dtype=np.float64),
        input_tokens=np.array([tokens for tokens, _ in prompts], dtype=np.int64),
        output_tokens=np.arange(n, dtype=np.int64),
        ids=np.array([i for _, ids in prompts for i in ids], dtype=np.int64),
        offsets=np.cumsum([0, *(len(ids) for _, ids in prompts)], dtype=np.int64),
    )


@st.composite
def traces(draw: st.DrawFn, ids: st.SearchStrategy[int] | None = None) -> Trace:
    block_size = draw(BLOCK_SIZES)
    # Few ids, so that prompts share paths, and the same id occurs after different ones.
    ids = st.integers(0, 2) if ids is None else ids
    prompts = []
    for _ in range(draw(st.integers(0, 8))):
        tokens = draw(st.integers(0, 5 * block_size))
        blocks = math.ceil(tokens / block_size)
        prompts.append((tokens, draw(st.lists(ids, min_size=blocks, max_size=blocks))))
    return make(block_size, prompts)


def naive_pages(trace: Trace, page_size: int) -> list[list[tuple[tuple[int, int], ...]]]:
    """Each prompt's whole pages as tuples of tokens, a token being (block id, place in block)."""
    pages = []
    for i in range(len(trace)):
        ids = trace.ids[trace.offsets[i] : trace.offsets[i + 1]].tolist()
        tokens = [(block, k) for block in ids for k in range(trace.block_size)]
        # A partial last block counts in whole units.
        unit = math.gcd(page_size, trace.block_size)
        tokens = tokens[: int(trace.input_tokens[i]) // unit * unit]
        whole = len(tokens) // page_size
        pages.append([tuple(tokens[p * page_size : (p + 1) * page_size]) for p in range(whole)])
    return pages


def naive_distinct(trace: Trace, page_size: int) -> int:
    return len(
        {tuple(pages[: depth + 1]) for pages in naive_pages(trace, page_size) for depth in range(len(pages))}
    )


@given(traces(), PAGE_SIZES)
def test_page_keys_equal_the_naive_expansion(trace: Trace, page_size: int) -> None:
    keys = trace.page_keys(page_size)
    unit = math.gcd(page_size, trace.block_size)
    units_per_block = trace.block_size // unit
    assert keys.unit_tokens == unit
    assert keys.units_per_page == page_size // unit
    assert keys.bytes_per_page == 8 * keys.units_per_page
    assert len(keys) == len(trace)
    expected = []
    for pages in naive_pages(trace, page_size):
        tokens = [token for page in pages for token in page]
        units = [block * units_per_block + k // unit for block, k in tokens[::unit]]
        expected.append(np.array(units, dtype="<i8").tobytes())
    assert [bytes(key) for key in keys] == expected
    assert [bytes(keys[i]) for i in range(len(keys))] == expected
    assert keys.tokens.tolist() == [len(e) // keys.bytes_per_page * page_size for e in expected]


@given(traces(st.integers(-(2**63), 2**63 - 1)), PAGE_SIZES)
def test_keys_of_any_64_bit_ids_share_what_the_blocks_share(trace: Trace, page_size: int) -> None:
    keys = trace.page_keys(page_size)
    step = keys.bytes_per_page
    naive = naive_pages(trace, page_size)
    mine = [[bytes(key[at : at + step]) for at in range(0, len(key), step)] for key in keys]
    seen: dict[object, bytes] = {}
    for pages, slices in zip(naive, mine, strict=True):
        assert len(pages) == len(slices)
        for page, piece in zip(pages, slices, strict=True):
            assert seen.setdefault(page, piece) == piece
    assert len(set(seen.values())) == len(seen)


@example(make(4, [(2, [7]), (4, [7]), (4, [7]), (6, [7, 8])]), 1)
@example(make(2, [(4, [0, 1]), (4, [1, 1])]), 2)
@given(traces(), PAGE_SIZES)
def test_distinct_pages_counts_paths(trace: Trace, page_size: int) -> None:
    assert trace.distinct_pages(page_size) == naive_distinct(trace, page_size)


@given(traces(), PAGE_SIZES)
def test_ideal_hit_rate_is_that_of_an_unlimited_cache(trace: Trace, page_size: int) -> None:
    seen: set[tuple[object, ...]] = set()
    hits = 0
    for pages in naive_pages(trace, page_size):
        paths = [tuple(pages[: depth + 1]) for depth in range(len(pages))]
        hits += sum(path in seen for path in paths) * page_size
        seen.update(paths)
    total = int(trace.input_tokens.sum())
    assert trace.ideal_hit_rate(page_size) == pytest.approx(hits / total if total else 0.0)


@given(traces(), PAGE_SIZES)
def test_batches_do_not_change_the_keys(trace: Trace, page_size: int) -> None:
    expected = [bytes(key) for key in trace.page_keys(page_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("costcache.sim.trace._UNITS_PER_BATCH", 5)
        assert [bytes(key) for key in trace.page_keys(page_size)] == expected


@pytest.mark.parametrize("page_size", [4, 8])
def test_keys_are_slices_of_one_buffer_where_blocks_are_units(page_size: int) -> None:
    trace = make(4, [(9, [1, 2, 3]), (8, [1, 4])])
    keys = trace.page_keys(page_size)
    key = keys[1]
    assert key.obj is keys[0].obj
    assert np.shares_memory(np.frombuffer(key, dtype=np.int64), trace.ids) == (sys.byteorder == "little")
    assert list(keys)[1] is key


@pytest.mark.parametrize("page_size", [2, 4])
def test_keys_are_read_only_bytes(page_size: int) -> None:
    key = make(4, [(8, [1, 4])]).page_keys(page_size)[0]
    assert (key.format, key.ndim, key.c_contiguous, key.readonly) == ("B", 1, True, True)
    assert key[:8] == bytes(key)[:8]


@pytest.mark.parametrize("page_size", [2, 4])
def test_keys_are_indexed_like_a_sequence(page_size: int) -> None:
    keys = make(4, [(8, [1, 4]), (4, [5])]).page_keys(page_size)
    assert keys[-1] == keys[1]
    with pytest.raises(IndexError):
        keys[2]
    with pytest.raises(IndexError):
        keys[-3]


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_has_tokens(page_size: int) -> None:
    trace = make(4, [(8, [1, 4])])
    for method in (trace.page_keys, trace.distinct_pages, trace.ideal_hit_rate):
        with pytest.raises(TraceError, match=f"page size is {page_size}"):
            method(page_size)


def test_an_empty_trace_has_no_pages() -> None:
    trace = make(4, [])
    assert len(trace) == 0
    assert list(trace.page_keys(4)) == list(trace.page_keys(2)) == []
    assert trace.distinct_pages(4) == 0
    assert trace.ideal_hit_rate(4) == 0.0


def test_time_order_is_stable_and_keeps_each_prompt_whole() -> None:
    trace = make(4, [(8, [1, 2]), (4, [3]), (0, []), (9, [4, 5, 6])], times=[2.0, 1.0, 2.0, 1.0])
    ordered = trace.in_time_order()
    assert ordered.timestamps.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert ordered.output_tokens.tolist() == [1, 3, 0, 2]
    assert ordered.input_tokens.tolist() == [4, 9, 8, 0]
    assert ordered.ids.tolist() == [3, 4, 5, 6, 1, 2]
    assert ordered.offsets.tolist() == [0, 1, 4, 6, 6]
    assert ordered.in_time_order() is ordered


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"timestamps": np.zeros(1)}, "timestamps has 1 entries, input_tokens has 2"),
        ({"output_tokens": np.zeros(3, dtype=np.int64)}, "output_tokens has 3 entries"),
        ({"offsets": np.array([0, 3])}, "offsets has 2 entries"),
        ({"offsets": np.array([0, 1, 2])}, "from 0 to 3"),
        ({"offsets": np.array([0, 1, 3])}, "request 0 has 1 ids for 8 tokens in blocks of 4"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    good = make(4, [(8, [1, 2]), (4, [3])])
    columns = {name: getattr(good, name) for name in Trace.__dataclass_fields__}
    with pytest.raises(TraceError, match=message):
        Trace(**(columns | change))


def with_columns() -> Trace:
    """Three requests, the second first, with every field that a trace may have."""
    plain = make(4, [(8, [1, 2]), (3, [3]), (0, [])], times=[2.0, 1.0, 2.0])
    return replace(
        plain,
        output_tokens=np.array([1, 2, 5]),
        sessions=np.array([0, 1, 0]),
        think_seconds=np.array([0.5, 0.0, 4.0]),
        service_seconds=np.array([1.0, 2.0, np.nan]),
        finish=np.array([1, -1, 0]),
        finish_names=("stop", "tool"),
        output_ids=np.array([9, 30, 31, 7, 8]),
        output_offsets=np.array([0, 1, 3, 5]),
    )


def test_optional_columns_follow_their_requests() -> None:
    ordered = with_columns().in_time_order()
    assert [getattr(ordered, name).tolist()[:2] for name in ("sessions", "think_seconds", "finish")] == [
        [1, 0],
        [0.0, 0.5],
        [-1, 1],
    ]
    assert ordered.service_seconds is not None
    assert ordered.service_seconds[:2].tolist() == [2.0, 1.0]
    assert ordered.finish_names == ("stop", "tool")
    assert ordered.output_ids is not None
    assert ordered.output_offsets is not None
    assert ordered.output_ids.tolist() == [30, 31, 9, 7, 8]
    assert ordered.output_offsets.tolist() == [0, 2, 3, 5]


def test_a_request_waits_for_the_one_before_in_its_session_or_for_the_one_that_it_names() -> None:
    assert with_columns().predecessors().tolist() == [-1, -1, 0]
    assert with_columns().in_time_order().predecessors().tolist() == [-1, -1, 1]
    named = replace(with_columns(), follows=np.array([1, -1, 1]))
    assert named.predecessors().tolist() == [1, -1, 1]
    assert named.in_time_order().predecessors().tolist() == [-1, 0, 0]
    assert named.take(np.array([2, 0])).predecessors().tolist() == [
        -1,
        -1,
    ]  # no request left to wait for
    assert replace(with_columns(), sessions=None).predecessors().tolist() == [-1, -1, -1]


def test_prompts_continue_with_their_outputs() -> None:
    trace = with_columns()  # 8 + 1, 3 + 2 and 0 + 5 tokens in blocks of 4
    left, computed = trace.with_outputs(), trace.with_outputs(computed=True)
    assert left is not None
    assert computed is not None
    assert left.input_tokens.tolist() == [9, 5, 5]
    assert left.ids.tolist() == [1, 2, 9, 30, 31, 7, 8]
    assert computed.input_tokens.tolist() == [8, 4, 4]  # the last token of each was never computed on
    assert computed.ids.tolist() == [1, 2, 30, 7]
    assert replace(trace, output_ids=None, output_offsets=None).with_outputs() is None


def test_requests_are_taken_by_number() -> None:
    taken = with_columns().take(np.array([2, 0]))
    assert taken.input_tokens.tolist() == [0, 8]
    assert taken.ids.tolist() == [1, 2]
    assert taken.output_ids is not None
    assert taken.output_ids.tolist() == [7, 8, 9]
    assert len(with_columns().take(np.array([], dtype=np.int64))) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sessions": np.zeros(2)}, "sessions has 2 entries, input_tokens has 3"),
        ({"follows": np.array([-1, 3, 0])}, "follows must be request numbers from -1 to 2"),
        ({"priorities": np.zeros(2)}, "priorities has 2 entries, input_tokens has 3"),
        ({"finish": np.zeros(4)}, "finish has 4 entries"),
        ({"output_ids": None}, "give output_ids and output_offsets, or neither"),
        ({"output_offsets": np.array([0, 1, 5])}, "output_offsets has 3 entries; give 4, from 0 to 5"),
        (
            {"output_offsets": np.array([0, 2, 3, 5])},
            "request 0 has 2 output ids for 9 tokens in blocks of 4",
        ),
    ],
)
def test_optional_columns_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(with_columns(), **change)
