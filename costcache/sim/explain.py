"""What a policy did to each of its classes in a replay: kept, dropped, and missed afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.orders import VictimOrder
from costcache.records import NodeRecord, PoolState, RequestInfo, RequestRecord
from costcache.sim.engine import OFFLINE

if TYPE_CHECKING:
    from costcache.explained import Explained
    from costcache.model import ModelSpec
    from costcache.plugins import PluginManager
    from costcache.settings import Settings
    from costcache.sim.engine import Simulator
    from costcache.sim.paths import PagePaths
    from costcache.sim.results import Outcome

__all__ = ["Account", "Explanation", "Fall", "explain", "explainable"]

_DEAD = -1
_NO_STATE = "KV behind the last state"
_FORWARDED = ("touch", "refresh", "split", "unlock", "attach", "defer", "load", "next_victim")


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one class, in tokens, or in states where the model has them.

    A token counts once for each time that it waited for its next use: it was used, or went, or waits still.

    Attributes:
        name: The class in words.
        used: Waits that ended with a use that the cache served.
        evicted: Waits that ended with an eviction.
        held: Waits that last at the end of the trace.
        returned: Of the evicted, those that a later request asked for; each counts once.
        hit_tokens: Prompt tokens that the uses saved.
        evicted_tokens: Tokens of KV that went.
        eviction_age: Median wait of what was evicted, in units of the clock; None where nothing was.
        worth: Expected uses of what is held per unit of the clock, on average; None where nothing is.
        unused: Share that is not used again up to each of the explanation's ages, as the policy sees it.
    """

    name: str
    used: int
    evicted: int
    held: int
    returned: int
    hit_tokens: int
    evicted_tokens: int
    eviction_age: float | None
    worth: float | None
    unused: Sequence[float]

    @property
    def seen(self) -> int:
        """All waits."""
        return self.used + self.evicted + self.held

    @property
    def reused(self) -> float:
        """Share of all waits after which a use came, those included that came too late."""
        return (self.used + self.returned) / self.seen if self.seen else 0.0


@dataclass(frozen=True, slots=True)
class Fall:
    """LRU took over since the policy was behind it.

    Attributes:
        request: The request at whose end that was so, counted from 1.
        delay: Requests since the policy's lead over LRU, in tokens found, was greatest.
        back: The request at whose end the policy was in force again; None if it was not.
    """

    request: int
    delay: int
    back: int | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a policy did in a replay, class by class.

    Attributes:
        policy: Its own name.
        unit: What is counted: tokens, or states.
        outcome: What the replay gave.
        accounts: The classes, those first of which most was used or evicted.
        ages: Ages of the curves, in units of the clock.
        compared: True where the policy compares itself with LRU; what follows is 0 and empty otherwise.
        gained: Tokens found that LRU would not have found.
        lost: Tokens that LRU would have found, and the policy did not.
        falls: When LRU took over.
        tables: What was learned, as a file that the policy can start from; None where it cannot.
    """

    policy: str
    unit: Literal["tokens", "states"]
    outcome: Outcome
    accounts: list[Account]
    ages: Sequence[float]
    compared: bool
    gained: int
    lost: int
    falls: list[Fall]
    tables: str | None


def explain(
    simulator: Simulator,
    settings: Settings,
    capacity_tokens: int | None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Explanation:
    """Replay a trace in the plain mode, and keep account of the policy's classes.

    Args:
        simulator: The trace, prepared.
        settings: Policy and its settings, headroom, trimming.
        capacity_tokens: Tokens in the pool; None for no limit.
        progress: Called now and then with the number of requests done since the last call.

    Raises:
        PluginError: No such policy, or it cannot serve the model.
        SettingsError: The policy tells no classes apart, or failed; or a setting is wrong.
    """
    name = simulator.check(settings, capacity_tokens)
    paths = simulator.paths
    ledgers: list[_Ledger] = []

    def watch(order: VictimOrder) -> VictimOrder:
        explained = order.explained()
        if explained is None:
            raise SettingsError(f"policy {name!r} does not tell classes apart and cannot be explained")
        ledgers.append(_Ledger(order, explained, paths, simulator.keys.page_size))
        return ledgers[0]

    outcome, records = simulator.watched(settings, capacity_tokens, watch, progress=progress)
    if outcome.fallbacks:
        raise SettingsError(
            f"policy {name!r} failed and was replaced by lru: there is nothing to explain; see the log"
        )
    ledger = ledgers[0]
    verdict = ledger.view.against_lru()
    return Explanation(
        policy=name,
        unit=ledger.view.unit,
        outcome=outcome,
        accounts=ledger.accounts(records),
        ages=ledger.view.ages,
        compared=verdict is not None,
        gained=0 if verdict is None else verdict.gained,
        lost=0 if verdict is None else verdict.lost,
        falls=ledger.falls,
        tables=ledger.view.tables(),
    )


def explainable(
    settings: Settings, model: ModelSpec, plugins: PluginManager, *, tables: bool = False
) -> None:
    """Find out, before any work is done, whether a policy can be explained.

    Args:
        settings: The policy and its settings.
        model: The model.
        plugins: Where to look for policies.
        tables: What it learns is to be saved.

    Raises:
        PluginError: No such policy, or it cannot serve the model.
        SettingsError: It tells no classes apart, and which do; or what it learns cannot be saved.
    """
    architecture = plugins.match(model)
    if settings.policy in OFFLINE or not plugins.policy_spec(settings, architecture)[1].explains:
        specs = plugins.policies()
        known = [name for name in plugins.serving(model) if specs[name].explains]
        raise SettingsError(
            f"policy {settings.policy!r} does not tell classes apart and cannot be explained: of the "
            f"policies that serve {model.name}, {', '.join(known) or 'none'} can"
        )
    unit = "bytes" if model.has_states else "tokens"
    pools = (PoolState("memory", unit, 1 << 40, 1 << 40, 0, 0, 1),)
    _, order = plugins.make_order(settings, architecture, architecture.cost(Deployment()), pools)
    view = order.explained() if tables else None
    if tables and (view is None or view.tables() is None):
        raise SettingsError(
            f"--save-tables: policy {settings.policy!r} cannot start from what it learned on "
            f"{model.name}: leave it out"
        )


class _Entry:
    """Sums of one class."""

    __slots__ = ("ages", "amounts", "evicted_tokens", "hit_tokens", "returned", "used")

    def __init__(self) -> None:
        self.used = self.returned = self.hit_tokens = self.evicted_tokens = 0
        self.ages, self.amounts = array("d"), array("q")  # of each eviction

    def median(self) -> float | None:
        """Age at which half of what was evicted had gone."""
        if not self.ages:
            return None
        ages, amounts = np.array(self.ages), np.array(self.amounts)
        by_age = np.argsort(ages, kind="stable")
        half = np.searchsorted(np.cumsum(amounts[by_age]), amounts.sum() / 2)
        return float(ages[by_age[half]])


class _Ledger(VictimOrder):
    """Stands in front of an order, hands all events on, and counts what they mean for its classes.

    Attributes:
        view: The order, seen by its classes.
        falls: When LRU took over.
    """

    def __init__(self, order: VictimOrder, explained: Explained, paths: PagePaths, page_size: int) -> None:
        self.view = explained
        self.falls: list[Fall] = []
        self._order = order
        self._paths = paths
        self._page = page_size
        self._states = explained.unit == "states"
        self._entries: dict[int, _Entry] = {}
        self._gone = np.full(paths.distinct, -1, np.int32)  # class in which a page, or state, went
        self._lead, self._since = 0, 0
        self._behind = False
        for event in _FORWARDED:
            setattr(self, event, getattr(order, event))

    def _entry(self, group: int) -> _Entry:
        entry = self._entries.get(group)
        if entry is None:
            entry = self._entries[group] = _Entry()
        return entry

    # -- uses --------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self._order.insert(record)

    def use(self, record: NodeRecord) -> None:
        if not self._states:
            for part in self.view.parts(record, record.depth, record.end):
                entry = self._entry(part.group)
                entry.used += part.amount
                entry.hit_tokens += part.amount
        self._order.use(record)

    def consume(self, record: NodeRecord) -> None:
        for part in self.view.parts(record, record.depth, record.end):
            entry = self._entry(part.group)
            entry.used += part.amount
            entry.hit_tokens += record.end
        self._order.consume(record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._missed(request)
        self._order.finish(request, info)
        verdict = self.view.against_lru()
        if verdict is None:
            return
        lead = verdict.gained - verdict.lost
        if verdict.behind != self._behind:
            if verdict.behind:
                self.falls.append(Fall(request.number, request.number - self._since, None))
            else:
                fall = self.falls[-1]
                self.falls[-1] = Fall(fall.request, fall.delay, request.number)
            self._behind = verdict.behind
            self._lead, self._since = lead, request.number
        elif lead >= self._lead:
            self._lead, self._since = lead, request.number

    def _missed(self, request: RequestRecord) -> None:
        """What a request asked for, and had been evicted."""
        first, stop = self._paths.offsets[request.number - 1 : request.number + 1]
        pages = self._paths.paths[first + request.matched // self._page : stop]
        pages = pages[self._gone[pages] >= 0]
        if self._states:
            pages = pages[-1:]  # it would have gone on from the deepest one
        groups, counts = np.unique(self._gone[pages], return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            self._entry(group).returned += count if self._states else count * self._page
        self._gone[pages] = -1

    # -- evictions ---------------------------------------------------------------------------

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._evict(record, record.end, record.end + tokens, tokens)
        self._order.trim(record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._evict(record, record.depth, record.end, record.tokens)
        self._order.remove(record)

    def detach(self, record: NodeRecord) -> None:
        self._evict(record, record.depth, record.end, 0)
        self._order.detach(record)

    def _evict(self, record: NodeRecord, start: int, stop: int, tokens: int) -> None:
        page = self._page
        first = int(self._paths.offsets[record.creator - 1])
        parts = self.view.parts(record, start, stop)
        if self._states and not parts:
            self._entry(_DEAD).evicted_tokens += tokens
        at = start
        for part in parts:
            entry = self._entry(part.group)
            entry.ages.append(part.age)
            entry.amounts.append(part.amount)
            if self._states:
                entry.evicted_tokens += tokens
                at = stop - page
            else:
                entry.evicted_tokens += part.amount
            end = stop if self._states else at + part.amount
            self._gone[self._paths.paths[first + at // page : first + end // page]] = part.group
            at = end

    # -- at the end --------------------------------------------------------------------------

    def accounts(self, records: Sequence[NodeRecord]) -> list[Account]:
        """The classes, given the records of what is held now."""
        held: dict[int, int] = {}
        promised: dict[int, float] = {}
        for record in records:
            for part in self.view.parts(record, record.depth, record.end):
                group = part.group
                held[group] = held.get(group, 0) + part.amount
                worth = part.amount * self.view.worth(group, part.age)
                promised[group] = promised.get(group, 0.0) + worth
        found = []
        for group in sorted({*self._entries, *held}):
            entry, kept = self._entry(group), held.get(group, 0)
            account = Account(
                name=_NO_STATE if group == _DEAD else self.view.name(group),
                used=entry.used,
                evicted=sum(entry.amounts),
                held=kept,
                returned=entry.returned,
                hit_tokens=entry.hit_tokens,
                evicted_tokens=entry.evicted_tokens,
                eviction_age=entry.median(),
                worth=promised[group] / kept if kept else None,
                unused=[] if group == _DEAD else self.view.unused(group),
            )
            found.append(account)
        return sorted(found, key=lambda account: -(account.used + account.evicted))
