"""Pages of the slot pool: what is freed in whole pages can be allocated again, in whole pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.radix.slots import Slots


@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]), pages=st.integers(1, 6))
def test_every_wholly_free_page_can_be_allocated_and_no_other(
    data: st.DataObject, page_size: int, pages: int
) -> None:
    pool = Slots(pages * page_size, page_size)
    everything = np.arange(pool.capacity)
    pool.cache(everything)
    # Freed in pieces of any size, order and make-up: whole pages, permuted ones, parts of several.
    order = data.draw(st.one_of(st.just(everything.tolist()), st.permutations(everything.tolist())))
    at = 0
    while at < len(order):
        size = data.draw(st.one_of(st.just(page_size), st.integers(1, len(order))))
        pool.evict(np.array(order[at : at + size], np.int64))
        at += size
        free = set(order[:at])
        whole = [p for p in range(pages) if free.issuperset(range(p * page_size, (p + 1) * page_size))]
        assert pool.free == len(free)
        slots = pool.allocate(len(whole) * page_size)
        assert slots is not None
        assert sorted(slots.tolist()) == [p * page_size + i for p in whole for i in range(page_size)]
        assert (slots.reshape(-1, page_size) % page_size == np.arange(page_size)).all()  # in one piece each
        assert pool.allocate(page_size) is None
        pool.release(slots)
    assert (pool.free, pool.cached, pool.reserved) == (pool.capacity, 0, 0)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 8], "slot 8 is not in the pool: slots go from 0 to 7"),
        ([-1, 2], "slot -1 is not in the pool"),
        ([7, -8], "slot -8 is not in the pool"),
        ([0, 2**62], f"slot {2**62} is not in the pool"),
        ([-(2**63)], f"slot {-(2**63)} is not in the pool"),
        ([3, 1, 1], "slot 1 is named twice in one insert"),
        ([5, 2], "slot 5 is in the cache already"),
        (list(range(9)), "there are 9 slots, and the pool has 8"),
    ],
)
def test_wrong_slots_are_named_and_change_nothing(slots: list[int], message: str) -> None:
    pool = Slots(8)
    pool.cache(np.array([5], np.int64))
    with pytest.raises(ValueError, match=message):
        pool.cache(np.array(slots, np.int64))
    assert (pool.free, pool.cached, pool.reserved) == (7, 1, 0)
    rest = pool.allocate(7)
    assert rest is not None
    assert sorted(rest.tolist()) == [0, 1, 2, 3, 4, 6, 7]
