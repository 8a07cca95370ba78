"""Misuse of a tiered cache is an error at the call, and every tier is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from costcache import RequestInfo
from costcache.tiers import TieredCache
from tests.tiers import LAYERS, PAGE, Server
from tests.unit.test_misuse import BIG, at_once, empty, free_slot, look, slot_of

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def filled(layout: str) -> Server:
    server = Server(layout, slots=64, host=96, write="write_through")
    for first in (1, 2):
        server.serve([first] * 12)
    server.tiers.drain()
    server.tiers.match_prefix([1] * 4, "running")
    return server


def tiers_look(server: Server) -> Any:
    tiers = server.tiers
    return look(server.cache)[1:], tiers.cached("host")


def foreign() -> Any:
    """The node of a match of another cache."""
    return filled("mha").tiers.match_prefix([1] * 8).device.node


def foreign_load() -> Any:
    tiers = filled("mha").tiers
    return tiers.load(tiers.match_prefix([1] * 8))


MISUSE: dict[str, Callable[[TieredCache], Any]] = {
    "lock a node of another cache": lambda tiers: tiers.lock(foreign()),
    "unlock a node of another cache": lambda tiers: tiers.unlock(foreign()),
    "lock the match": lambda tiers: tiers.lock(tiers.match_prefix([1] * 4)),  # type: ignore[arg-type] # the point
    "unlock what is not locked": lambda tiers: tiers.unlock(tiers.match_prefix([1] * 12).device.node),
    "slots of words": lambda tiers: tiers.insert([7] * PAGE, ["a"] * PAGE),
    "slots of floats": lambda tiers: tiers.insert([7] * PAGE, [1.0] * PAGE),
    "slots beyond the pool": lambda tiers: tiers.insert([7] * PAGE, [tiers.device.pool_size] * PAGE),
    "slots twice": lambda tiers: tiers.insert([7] * PAGE, [free_slot(tiers.device)] * PAGE),
    "slots of the cache": lambda tiers: tiers.insert([7] * PAGE, [slot_of(tiers.device)] * PAGE),
    "huge slots": lambda tiers: tiers.insert([7], np.array([BIG], np.uint64)),
    "huge tokens": lambda tiers: tiers.insert(np.array([BIG] * PAGE, np.uint64), None),
    "huge tokens to match": lambda tiers: tiers.match_prefix(np.array([BIG] * PAGE, np.uint64)),
    "huge tokens to prefetch": lambda tiers: tiers.prefetch(np.array([BIG] * PAGE, np.uint64)),
    "prefetch words": lambda tiers: tiers.prefetch(["a"]),
    "release what is free": lambda tiers: tiers.release([free_slot(tiers.device)]),
    "release what is cached": lambda tiers: tiers.release([slot_of(tiers.device)]),
    "allocate words": lambda tiers: tiers.allocate("3"),  # type: ignore[arg-type] # the point
    "a reason that is no string": lambda tiers: tiers.finish("running", RequestInfo(finish_reason=3)),  # type: ignore[arg-type] # the point
    "an info that is a dict": lambda tiers: tiers.finish("running", {"output_tokens": 3}),  # type: ignore[arg-type] # the point
    "the end of nobody": lambda tiers: tiers.finish("nobody"),
    "load a word": lambda tiers: tiers.load("match"),  # type: ignore[arg-type] # the point
    "load the match of the device": lambda tiers: tiers.load(tiers.match_prefix([1] * 12).device),  # type: ignore[arg-type] # the point
    "resume nothing": lambda tiers: tiers.resume(None),  # type: ignore[arg-type] # the point
    "resume a match": lambda tiers: tiers.resume(tiers.match_prefix([1] * 12)),  # type: ignore[arg-type] # the point
    "resume a load of another cache": lambda tiers: tiers.resume(foreign_load()),
    "cancel a load of another cache": lambda tiers: tiers.cancel(foreign_load()),
    "cancel a word": lambda tiers: tiers.cancel("load"),  # type: ignore[arg-type] # the point
    "wait for a word": lambda tiers: tiers.wait("load"),  # type: ignore[arg-type] # the point
    "wait for a load of another cache": lambda tiers: tiers.wait(foreign_load()),
}


@pytest.mark.parametrize("layout", ["mha", "hybrid"])
@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_an_error_and_changes_nothing(what: str, layout: str) -> None:
    server = filled(layout)
    server.tiers.match_prefix([1] * 12)
    server.tiers.drain()
    before = tiers_look(server)
    with pytest.raises((ValueError, TypeError)) as error:
        MISUSE[what](server.tiers)
    assert str(error.value)
    server.tiers.drain()
    assert tiers_look(server) == before
    server.tiers.finish("running", RequestInfo(finish_reason="stop"))
    assert server.serve([1] * 12) >= 8
    server.tiers.drain()
    empty(server.cache)
    server.tiers.close()


def test_a_load_that_is_under_way_is_not_resumed_yet() -> None:
    server = filled("mha")
    tiers = server.tiers
    tiers.device.evict(64)
    match = tiers.match_prefix([1] * 12)
    load = tiers.load(match)
    assert not load.done
    with pytest.raises(ValueError, match="is under way"):
        tiers.resume(load)
    tiers.wait(load)
    assert tiers.resume(load).matched_len == 12
    assert server.cache.stats().protected == 0
    tiers.close()


def test_two_threads_are_refused_and_the_tiers_are_whole() -> None:
    server = Server("mha", slots=64, host=96)
    tiers = server.tiers

    def call(rng: np.random.Generator) -> None:
        prompt = rng.integers(0, 3, rng.integers(4, 30))
        tiers.insert(prompt, None)
        tiers.load(tiers.match_prefix(prompt))
        tiers.step()

    refused, done = at_once(call)
    assert refused
    assert all("not thread-safe" in said for said in refused)
    assert done
    tiers.drain()
    empty(server.cache)
    host = tiers._mover.host if tiers._mover is not None else None
    assert host is not None
    assert host.slots.reserved == 0
    assert host.pool.evict(host.pool.evictable).freed == host.pool.capacity - host.slots.free
    tiers.close()


@pytest.mark.parametrize("layout", sorted(LAYERS))
def test_an_observer_cannot_call_the_tiers(layout: str) -> None:
    server = filled(layout)
    refused: list[str] = []

    def observer(event: Any) -> None:
        for call in (
            lambda: server.tiers.reset(force=True),
            server.tiers.step,
            lambda: server.tiers.allocate(4),
        ):
            with pytest.raises(RuntimeError, match="while another call is at work") as error:
                call()
            refused.append(str(error.value))

    server.cache.subscribe(observer)
    server.serve([3] * 12)
    assert refused
    server.tiers.close()
