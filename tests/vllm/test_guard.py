"""A policy that raises or lies leaves vLLM's own LRU in force, and no allocation fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder, VictimOrder
from costcache.plugins import PluginManager
from costcache.policies.keyed import LRU
from costcache.policies.spec import PolicySpec
from costcache.records import Action, NodeRecord, Victim
from costcache.vllm.runs import Run, Runs
from tests.vllm.fuzz import Fuzz, run
from tests.vllm.serving import Server, bind, manager

EVENTS = ("insert", "use", "touch", "split", "trim", "remove", "unlock", "defer", "finish", "next_victim")


class Hostile(LRU):
    """LRU that misbehaves from its twentieth call of one kind on."""

    def __init__(self, event: str, act: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.calls = 0
        self.locked: list[NodeRecord] = []
        self.dead: list[NodeRecord] = []
        original = getattr(self, event)

        def misbehave(*args: Any) -> Any:
            self.calls += 1
            answer = original(*args)
            return answer if self.calls < 20 else act(self, answer)

        setattr(self, event, misbehave)

    def insert(self, record: NodeRecord) -> None:
        super().insert(record)
        self.newest = record
        if not record.depth:
            self.oldest = record

    def remove(self, record: NodeRecord) -> None:
        super().remove(record)
        self.dead.append(record)


def raising(order: Any, answer: Any) -> Any:
    raise ZeroDivisionError("hostile")


LIES: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda order, answer: None,
    "a dead record": lambda order, answer: Victim(order.dead[-1]),
    "an inner record": lambda order, answer: Victim(order.oldest),
    "the root": lambda order, answer: Victim(answer.record.parent),
    "a record of its own": lambda order, answer: Victim(Run(None, 16, 0, [])),
    "another class": lambda order, answer: Victim(NodeRecord(1, None, 16, 0)),
    "the newest": lambda order, answer: Victim(order.newest),
    "a tombstone": lambda order, answer: Victim(answer.record, Action.TOMBSTONE),
    "a number": lambda order, answer: 7,
    "a tuple": lambda order, answer: (answer.record,),
}
HARMLESS: dict[str, Callable[[Any, Any], Any]] = {
    "no tokens": lambda order, answer: answer and answer._replace(tokens=0),
    "fewer than none": lambda order, answer: answer and answer._replace(tokens=-99),
    "more than there are": lambda order, answer: answer and answer._replace(tokens=1 << 40),
    "a part of a block": lambda order, answer: answer and answer._replace(tokens=3),
}


def hostile(event: str, act: Callable[[Any, Any], Any]) -> PluginManager:
    class Plugin:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {"hostile": PolicySpec(lambda cost, pools, settings: Hostile(event, act), "Misbehaves.")}

    plugins = PluginManager()
    plugins.register(Plugin(), "hostile")
    return plugins


STEPS = 500


def is_vllms_lru(server: Server) -> None:
    """Further victims are those at the head of vLLM's list."""
    for number in range(30):
        order = server.free_list()
        request = server.request(f"after {number}", [9_000_000 + number] * 250)
        assert server.start(request) == order[:16]
        server.finish(request)


@pytest.mark.parametrize("event", EVENTS)
def test_an_order_that_raises(event: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(manager(150), bind("hostile", plugins=hostile(event, raising)))
    run(server, STEPS)
    pool = server.pool.costcache.runs.pool
    if event == "defer":  # vLLM's free blocks can all be evicted when they are named
        assert (pool.policy, pool.counters.deferred) == ("hostile", 0)
        return
    assert pool.policy == "lru"
    assert pool.fallbacks == 1
    (error,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "policy 'hostile' is dropped for 'lru'" in error.getMessage()
    assert error.exc_info is not None
    is_vllms_lru(server)


@pytest.mark.parametrize("lie", LIES)
def test_an_order_that_lies(lie: str) -> None:
    server = Server(manager(150), bind("hostile", plugins=hostile("next_victim", LIES[lie])))
    run(server, STEPS)
    pool = server.pool.costcache.runs.pool
    assert pool.counters.short == 0
    if lie != "the newest":  # which may be evictable
        assert pool.policy == "lru"
        assert pool.fallbacks == 1
        is_vllms_lru(server)


@pytest.mark.parametrize("lie", HARMLESS)
def test_an_order_that_names_odd_numbers(lie: str) -> None:
    server = Server(manager(150), bind("hostile", plugins=hostile("next_victim", HARMLESS[lie])))
    run(server, STEPS)
    pool = server.pool.costcache.runs.pool
    assert (pool.policy, pool.counters.short) == ("hostile", 0)


def test_an_order_that_cannot_be_made_stops_the_server_at_start() -> None:
    def make(cost: Any, pools: Any, settings: Any) -> VictimOrder:
        raise ZeroDivisionError("no order today")

    class Plugin:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {"broken": PolicySpec(make, "Breaks.")}

    plugins = PluginManager()
    plugins.register(Plugin(), "broken")
    with pytest.raises(Exception, match="broken"):
        Server(manager(150), bind("broken", plugins=plugins))


def test_a_reset_starts_the_policy_afresh() -> None:
    server = Server(manager(150), bind("hostile", plugins=hostile("next_victim", raising)))
    run(server, STEPS)
    assert server.pool.costcache.runs.pool.policy == "lru"
    assert server.manager.reset_prefix_cache()
    assert server.pool.costcache.runs.pool.policy == "hostile"
    assert server.pool.costcache.runs.pool.fallbacks == 1
    server.check()


def fail(runs: type[Runs], method: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method of ours fail at a call of it, in servers that are made from now on."""
    original, left = getattr(runs, method), calls

    def wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise ZeroDivisionError("ours")
        return original(*args, **kwargs)

    monkeypatch.setattr(runs, method, wrong)


def is_taken_over(server: Server, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """Under random operations vLLM's own list takes over, says so once, and no block is lost."""
    fuzz = Fuzz(server, seed=5, evictions=True)
    for _ in range(steps):
        fuzz.step()
        server.check()
    fuzz.close()
    assert server.pool.costcache.runs is None
    assert len(server.free_list()) == len(server.pool.blocks) - 1
    (error,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "vLLM's own LRU takes over" in error.getMessage()


@pytest.mark.parametrize("method", ["victims", "take", "advance", "release", "forget"])
def test_vllms_own_list_takes_over_from_our_own_mistakes(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(Runs, method, 20, monkeypatch)
    server = Server(manager(150), "hazard")
    is_taken_over(server, 1500, caplog)
    is_vllms_lru(server)


def test_a_third_partys_policy_chooses() -> None:
    class Deepest(KeyedOrder):
        def key(self, record: NodeRecord) -> Any:
            return -record.end

    class Plugin:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {
                "deepest": PolicySpec(lambda cost, pools, settings: Deepest(), "The longest prefix first.")
            }

    plugins = PluginManager()
    plugins.register(Plugin(), "deepest")
    server = Server(manager(100), bind("deepest", plugins=plugins))
    server.serve("long", [1] * 16 * 50)
    server.serve("short", [2] * 16 * 30)
    server.serve("new", [3] * 16 * 40)
    assert server.serve("short again", [2] * 16 * 30 + [0]) == 16 * 30
    assert server.serve("long again", [1] * 16 * 50 + [0]) < 16 * 50
    assert issubclass(Deepest, VictimOrder)
