"""Who sent a request reaches the records of its nodes, in the caches and in replays, within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costcache import Asker, ModelSpec, RadixCache, Settings
from costcache.deployment import Deployment
from costcache.orders import KeyedOrder
from costcache.radix.statecache import StateCache
from costcache.records import MOST_ASKERS, MOST_NAME, Askers, NodeRecord
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace
from tests.property.kit import MODEL, manager, policy
from tests.unit.test_statecache import PAGE, cache_of

A, B = Asker("a", "acme", "eve"), Asker("b")


def made() -> RadixCache:
    return RadixCache(MODEL, 100, policy="lru", plugins=manager())


def test_a_node_names_who_made_it_and_who_used_it_last() -> None:
    cache = made()
    node = cache.insert(range(10), asker=A).node
    assert (node.made_by, node.used_by) == (A, A)
    cache.match_prefix(range(10), asker=B)
    assert (node.made_by, node.used_by) == (A, B)
    cache.match_prefix(range(10))  # by somebody who is not known
    assert (node.made_by, node.used_by) == (A, B)


def test_both_parts_of_a_split_have_its_history() -> None:
    cache = made()
    tail = cache.insert(range(10), asker=A).node
    prefix = cache.match_prefix(range(4), asker=B).node
    assert prefix is tail.parent
    assert (prefix.made_by, prefix.used_by) == (A, B)
    assert (tail.made_by, tail.used_by) == (A, A)


def test_a_request_keeps_the_first_asker_that_it_is_given() -> None:
    cache = made()
    cache.match_prefix(range(10), "request")
    assert cache.insert(range(10), request="request", asker=A).node.made_by == A
    assert cache.insert(range(20), request="request", asker=B).node.made_by == A
    cache.reset()
    assert cache.insert(range(10), asker=B).node.made_by == B


def test_nothing_known_is_none() -> None:
    node = made().insert(range(10)).node
    assert node.made_by is node.used_by is None
    assert made().insert(range(10), asker=Asker()).node.made_by is None


def test_a_cache_of_states_takes_them_too() -> None:
    cache: StateCache = cache_of(6, 24)
    node = cache.insert([1] * PAGE, asker=A).node
    cache.match_prefix([1] * PAGE, asker=B)
    assert (node.made_by, node.used_by) == (A, B)


@pytest.mark.parametrize("wrong", ["a", ("a", None, None), Asker(5), Asker(tenant=b"acme")])  # type: ignore[arg-type] # the point
def test_a_wrong_asker_is_refused(wrong: Any) -> None:
    cache = made()
    for call in (cache.match_prefix, cache.insert):
        with pytest.raises(TypeError, match=r"give an Asker|give text"):
            call(range(10), asker=wrong)
    assert not cache.cached


def test_equal_askers_are_one_object() -> None:
    askers = Askers()
    assert askers.of("a", "acme", "eve") is askers.of("a", "acme", "eve")
    assert askers.of("a") is not askers.of("b")
    assert askers.of(None) is None


def test_names_and_their_table_are_bounded() -> None:
    askers = Askers()
    one, other = askers.of("x" * 10**6), askers.of("x" * (10**6 + 1))
    assert one is not None
    assert other is not None
    assert one != other  # told apart by the checksum of the whole
    assert len(one.session or "") == MOST_NAME
    assert askers.of("\ud800" * 1000) is not None  # half of a character cannot be encoded
    for number in range(MOST_ASKERS + 10):
        askers.of(str(number))
    assert len(askers._known) <= MOST_ASKERS


class ByTenant(KeyedOrder):
    """Keeps acme's."""

    rises = False

    def key(self, record: NodeRecord) -> tuple[bool, int]:
        return (record.used_by is not None and record.used_by.tenant == "acme", record.recency)


def trace(requests: int = 400) -> Trace:
    """One tenant's prompt in four, among prompts that do not come back; the sessions are the recorder's."""
    numbers = np.arange(requests)
    ours = numbers % 4 == 0
    ids = np.where(ours, numbers // 4 % 5, 1000 + numbers)
    return Trace(
        name="tenants",
        block_size=16,
        timestamps=numbers.astype(float),
        input_tokens=np.full(requests, 32),
        output_tokens=np.ones(requests, np.int64),
        ids=np.stack([ids, 10_000 + ids], axis=1).ravel(),
        offsets=2 * np.arange(requests + 1),
        sessions=numbers,
        tenants=np.where(ours, 0, -1),
        tenant_names=("acme",),
    )


@pytest.mark.parametrize("serving", [None, ServingSettings()])
def test_a_replay_tells_policies_who_asks(serving: ServingSettings | None) -> None:
    plugins = manager(by_tenant=policy("by-tenant", ByTenant))
    simulator = Simulator(trace(), ModelSpec.preset(MODEL), Deployment(page_size=16), plugins=plugins)
    hits = {
        name: int(simulator.outcome(Settings(policy=name), 32 * 8, serving=serving).matched.sum())
        for name in ("lru", "by-tenant")
    }
    assert hits["lru"] == 0
    assert hits["by-tenant"] > 0


def test_sessions_are_told_if_the_server_would_know_them() -> None:
    seen: set[Any] = set()

    class Seeing(KeyedOrder):
        def key(self, record: NodeRecord) -> int:
            seen.add(None if record.used_by is None else record.used_by.session)
            return record.recency

    plugins = manager(seeing=policy("seeing", Seeing))
    simulator = Simulator(trace(8), ModelSpec.preset(MODEL), Deployment(page_size=16), plugins=plugins)
    simulator.outcome(Settings(policy="seeing"), 160)
    assert seen == {None}
    simulator = Simulator(
        trace(8), ModelSpec.preset(MODEL), Deployment(page_size=16), plugins=plugins, known="all"
    )
    simulator.outcome(Settings(policy="seeing"), 160)
    assert {str(number) for number in range(8)} <= seen
