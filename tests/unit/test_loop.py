"""Helpers of the loops over requests."""

from __future__ import annotations

import gc

import pytest

from costcache.sim.loop import PER_REPORT, no_collector, numbered


@pytest.mark.parametrize("count", [0, 1, PER_REPORT - 1, PER_REPORT, PER_REPORT + 1, 3 * PER_REPORT])
def test_every_request_is_numbered_and_reported_when_done(count: int) -> None:
    requests = [str(i) for i in range(count)]
    told: list[int] = []
    done = 0

    def progress(more: int) -> None:
        told.append(more)
        assert sum(told) == done  # neither before its turn in the loop nor after

    for number, request in numbered(iter(requests), count, progress):
        assert (number, request) == (done, requests[done])
        done += 1
    assert done == count
    assert list(numbered(requests, count, None)) == list(enumerate(requests))
    assert sum(told) == count
    assert len(told) == -(-count // PER_REPORT)


def test_the_collector_is_off_within_and_as_it_was_after_a_failure() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_collector():
        1 / gc.isenabled()  # fails, since it is off
    assert gc.isenabled()
