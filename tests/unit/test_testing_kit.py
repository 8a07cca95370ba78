"""The conformance kit: our own policies pass it, and a policy with one fault fails the test of that fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict, Field

from costcache import KeyedOrder, ModelSpec, NodeRecord, PolicySpec, Victim, VictimOrder
from costcache.hookspecs import hookimpl
from costcache.plugins import PluginManager
from costcache.policies.states import StateOrder
from costcache.records import PoolState
from costcache.testing import ArchitectureContract, PolicyContract, stream

OWN = sorted(PluginManager().policies())


def contract(name: str, **attributes: Any) -> type[PolicyContract]:
    return type(f"Test_{name}", (PolicyContract,), {"policy": name, **attributes})


# A class for each policy, as an author would write it. Processes start slowly: those of two policies will do.
for own in OWN:
    tests: dict[str, Any] = {}
    if own not in ("hazard", "lru"):
        tests["test_every_process_gives_the_same_victims"] = None
    globals()[f"Test_{own}"] = contract(own, **tests)


class Good(KeyedOrder):
    """Evicts the smallest leaf; a policy without a fault."""

    def key(self, record: NodeRecord) -> Any:
        return (record.tokens, record.recency)


class Random(KeyedOrder):
    def insert(self, record: NodeRecord) -> None:
        record.data = random.random()  # the fault
        super().insert(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        prefix.data = tail.data
        super().split(prefix, tail)

    def key(self, record: NodeRecord) -> float:
        drawn: float = record.data
        return drawn


class Restless(KeyedOrder):
    def key(self, record: NodeRecord) -> float:
        return random.random()  # the fault


class Meddling(Good):
    """Writes to a record."""

    def insert(self, record: NodeRecord) -> None:
        record.uses += 1
        super().insert(record)


class Scanning(VictimOrder):
    """Looks at every leaf for each victim."""

    def __init__(self) -> None:
        self.nodes: dict[int, NodeRecord] = {}

    def insert(self, record: NodeRecord) -> None:
        self.nodes[record.serial] = record

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.nodes[prefix.serial] = prefix

    def remove(self, record: NodeRecord) -> None:
        del self.nodes[record.serial]

    def next_victim(self, pool: str) -> Victim | None:
        best: NodeRecord | None = None
        for record in self.nodes.values():
            if record.is_evictable and (best is None or record.recency < best.recency):
                best = record
        return None if best is None else Victim(best)


class Forgetful(Good):
    """Loses a leaf whose pin is released."""

    def unlock(self, record: NodeRecord) -> None:
        pass


class Mistaken(Scanning):
    """Forgets the wrong one of two nodes that were merged."""

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        del self.nodes[tail.serial]


class Stubborn(Scanning):
    """Names locked nodes too."""

    def next_victim(self, pool: str) -> Victim | None:
        leaves = [record for record in self.nodes.values() if record.is_leaf]
        return Victim(min(leaves, key=lambda record: record.serial)) if leaves else None


class Shared(KeyedOrder):
    """Keeps what it learns in the class, for all caches together."""

    seen: ClassVar[dict[int, int]] = {}

    def key(self, record: NodeRecord) -> int:
        return self.seen.setdefault(record.serial, len(self.seen))


class Falling(KeyedOrder):
    """Says that keys rise, and a use lowers them."""

    def touch(self, record: NodeRecord) -> None:
        record.data = (record.data or 0) + 1

    def key(self, record: NodeRecord) -> int:
        return -(record.data or 0)


class FallingHeard(Falling):
    """The same, without the fault."""

    rises = False

    def touch(self, record: NodeRecord) -> None:
        super().touch(record)
        self.requeue(record)


class Wordless(KeyedOrder):
    """Forgets to return a key for nodes that were used again."""

    def key(self, record: NodeRecord) -> int | None:
        return record.recency if record.uses == 1 else None


class WordlessState(StateOrder):
    """Forgets to return a score, likewise."""

    def score(self, record: NodeRecord) -> int | None:
        return record.recency if record.uses == 1 else None


ONE = Good()


class Lending(Good):
    """Makes an order for a slower tier, without a fault."""

    def below(self, pool: PoolState) -> Any:
        return Good()


class LendingItself(Good):
    def below(self, pool: PoolState) -> Any:
        return self  # the fault


class LendingOne(Good):
    """Gives all tiers one order."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Good()

    def below(self, pool: PoolState) -> Any:
        return self.one


class LendingNone(Good):
    def below(self, pool: PoolState) -> Any:
        return Good  # the class


class Keeping(Good):
    """Keeps a record that is never inserted, and forgets what it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, NodeRecord] = {}

    def inherit(self, record: NodeRecord, history: NodeRecord) -> None:
        self.known[record.serial] = history

    def remove(self, record: NodeRecord) -> None:
        del self.known[record.serial]
        super().remove(record)


class LendingKeeping(Good):
    def below(self, pool: PoolState) -> Any:
        return Keeping()


class LendingForgetful(Good):
    def below(self, pool: PoolState) -> Any:
        return Forgetful()


class Undescribed(BaseModel):
    """Settings without help."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    threshold: int = 3


class Careless(BaseModel):
    """Settings that take anything."""

    threshold: int = Field(3, description="Uses.")


class Offer:
    """A plugin that offers one policy."""

    def __init__(self, make: Callable[[], VictimOrder], summary: str = "For a test.", **spec: Any) -> None:
        offered = {"tested": PolicySpec(lambda cost, pools, settings: make(), summary, **spec)}
        self.policies = hookimpl(lambda: offered)


def outcome(plugin: object, test: str) -> str:
    """The message of a test of the contract that fails; empty if it passes."""
    tested = type("Tested", (PolicyContract,), {"policy": "tested", "plugin": plugin})()
    run = getattr(tested, test)
    try:
        if hasattr(run, "hypothesis"):  # a long stream finds it as well, and need not be shrunk
            run.hypothesis.inner_test(tested, steps=stream(seed=5))
        else:
            run()
    except (AssertionError, pytest.fail.Exception) as error:
        return str(error)
    return ""


WATCHED = "test_it_names_unlocked_leaves_and_writes_to_their_data_only"
SERVED = "test_whatever_happens_it_frees_enough_and_nothing_pinned"
OFFERED = "test_it_is_offered_with_a_summary_and_default_settings"
ALONE = "test_what_another_cache_does_changes_nothing"
BELOW = "test_an_order_that_it_makes_for_a_slower_tier_serves_there"
GROWTH = "test_a_victim_takes_about_as_long_among_many_leaves_as_among_few"

TESTS = [
    name
    for name in dir(PolicyContract)
    if name.startswith("test_") and name != "test_every_process_gives_the_same_victims"
]


@pytest.mark.parametrize("order", [Good, FallingHeard, Lending])
def test_a_policy_without_a_fault_passes(order: Callable[[], VictimOrder]) -> None:
    assert {test: outcome(Offer(order), test) for test in TESTS} == dict.fromkeys(TESTS, "")


@pytest.mark.parametrize(
    ("plugin", "test", "says"),
    [
        (Offer(Random), "test_equal_streams_give_equal_victims", "unseeded random"),
        (Offer(Restless), "test_equal_streams_give_equal_victims", "LRU had to take over"),
        (Offer(Meddling), WATCHED, "changed uses"),
        (
            Offer(Scanning),
            GROWTH,
            "loop over all",
        ),
        (
            Offer(Forgetful),
            SERVED,
            "LRU had to take over",
        ),
        (Offer(Forgetful), WATCHED, "named no victim"),
        (Offer(Mistaken), WATCHED, "named no victim"),
        (Offer(Stubborn), WATCHED, "which is locked"),
        (Offer(Shared), ALONE, "Shared.seen changed, which the orders of all caches share"),
        (Offer(lambda: ONE), ALONE, "make_order returned one order for two caches"),
        (Offer(Falling), WATCHED, "has the lower key"),
        (Offer(Good, sees=frozenset({"leaves"})), WATCHED, "declares that it sees leaves alone"),
        (Offer(LendingItself), BELOW, "below was refused"),
        (Offer(LendingOne), BELOW, "below was refused"),
        (Offer(LendingNone), BELOW, "below was refused"),
        (Offer(LendingKeeping), BELOW, "in a slower tier, LRU had to take over"),
        (Offer(LendingForgetful), BELOW, "in a slower tier, LRU had to take over"),
        (Offer(Wordless), SERVED, "LRU had to take over"),
        (Offer(WordlessState, sees=frozenset({"states"})), SERVED, "LRU had to take over"),
        (Offer(Good, windows="nope"), OFFERED, "there is no such policy"),
        (Offer(Good, explains=True), OFFERED, "no classes to explain"),
        (Offer(Good, ""), OFFERED, "summary is empty"),
        (
            Offer(Good, settings=Undescribed),
            OFFERED,
            "no description",
        ),
        (
            Offer(Good, settings=Careless),
            "test_a_wrong_setting_is_refused_and_not_ignored",
            "was not refused",
        ),
    ],
)
def test_a_policy_with_one_fault_fails_the_test_of_it(plugin: object, test: str, says: str) -> None:
    assert says in outcome(plugin, test)


class Acme:
    """An architecture plugin for the models of one name."""

    @hookimpl
    def match_model(self, model: ModelSpec) -> int | None:
        return 20 if model.name.startswith("acme-") else None


class TestAcme(ArchitectureContract):
    """The contract of architecture plugins."""

    plugin = Acme()
    serves = (ModelSpec.preset("llama-3-8b").model_copy(update={"name": "acme-8b"}),)
    leaves = ("llama-3-8b", "qwen3-next")


def test_an_architecture_plugin_that_frees_too_little_is_named() -> None:
    class Stingy(Acme):
        @hookimpl
        def adjust_eviction_count(self, requested: int) -> int:
            return requested - 1

    tested = type("Tested", (ArchitectureContract,), {"plugin": Stingy(), "serves": TestAcme.serves})()
    with pytest.raises(AssertionError, match="it may not free less"):
        tested.test_eviction_hooks_answer_within_their_bounds()


def test_the_fixtures_make_small_things(costcache_cache: Any, costcache_trace: Any) -> None:
    cache = costcache_cache("lru", tokens=50)
    cache.insert(range(40))
    assert cache.match_prefix(range(40)).matched_len == 40
    assert len(costcache_trace("chat", requests=20)) == 20
