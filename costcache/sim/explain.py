"""Reports, for each class of a policy, the hits, evictions and regretted evictions of a replay."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from costcache.errors import SettingsError
from costcache.orders import VictimOrder
from costcache.records import NodeRecord, RequestInfo, RequestRecord
from costcache.settings import Settings
from costcache.sim.engine import OFFLINE

if TYPE_CHECKING:
    from costcache.explained import Explained
    from costcache.model import ModelSpec
    from costcache.plugins import PluginManager
    from costcache.sim.engine import Simulator
    from costcache.sim.paths import PagePaths
    from costcache.sim.results import Outcome

__all__ = ["ClassReport", "Explanation", "StepIn", "explain", "explainable"]

_DEAD = -1
_NO_STATE = "KV after the last state"
_FORWARDED = ("touch", "refresh", "split", "merge", "unlock", "attach", "defer", "load", "next_victim")


@dataclass(frozen=True, slots=True)
class ClassReport:
    """The reuse intervals of one class, in tokens, or in states if the model has them.

    A reuse interval begins with a use of a token. It ends with the next use or with an eviction, or is still
    open at the end of the trace. Each interval of each token counts once.

    Attributes:
        name: The class in words.
        used: Intervals that ended with a hit.
        evicted: Intervals that ended with an eviction.
        held: Intervals still open at the end of the trace: the token is still cached.
        returned: Regretted evictions, after which a later request asked for the token; each counts once.
        hit_tokens: Prompt tokens that hit.
        evicted_tokens: Tokens of KV evicted.
        eviction_age: Median time from the last use to the eviction, in units of the clock; None without
            evictions.
        worth: Mean expected uses per unit of the clock of a cached token or state; None if none is cached.
        unused: The survival curve as the policy estimates it: share not used again up to each of the
            explanation's ages.
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
        """All intervals."""
        return self.used + self.evicted + self.held

    @property
    def reused(self) -> float:
        """Share of all intervals followed by a use, which hit or came after the eviction."""
        return (self.used + self.returned) / self.seen if self.seen else 0.0


@dataclass(frozen=True, slots=True)
class StepIn:
    """A period in which LRU decided, because the policy had found fewer tokens than LRU.

    Attributes:
        request: The request at whose end LRU stepped in, counted from 1.
        delay: Requests since the policy's lead over LRU, in hit tokens, peaked.
        back: The request at whose end the policy took over again; None if it did not.
        run: Requests over which LRU was ahead, as the policy saw it.
        regret: Tokens, by their worth to the policy, that LRU found more in them.
    """

    request: int
    delay: int
    back: int | None
    run: int = 0
    regret: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decisions of a policy in a replay, class by class.

    Attributes:
        policy: The policy's own name.
        unit: The unit of the counts: tokens or states.
        outcome: The outcome of the replay.
        classes: The classes, by used plus evicted, the largest first.
        ages: Ages of the survival curves, in units of the clock.
        compared: True if the policy compares itself with LRU; otherwise the next three are 0 and empty.
        gained: Tokens that hit, and would have missed under LRU.
        lost: Tokens that missed, and would have hit under LRU.
        step_ins: The periods in which LRU decided.
        tables: The learned tables, as a file that the policy can start from; None if it has none.
    """

    policy: str
    unit: Literal["tokens", "states"]
    outcome: Outcome
    classes: list[ClassReport]
    ages: Sequence[float]
    compared: bool
    gained: int
    lost: int
    step_ins: list[StepIn]
    tables: str | None


def explain(
    simulator: Simulator,
    settings: Settings,
    capacity_tokens: int | None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Explanation:
    """Replay a trace in the plain mode and report on the policy's classes.

    Args:
        simulator: The simulator with the trace.
        settings: Policy and its settings, headroom, trimming.
        capacity_tokens: Tokens in the pool; None for no limit.
        progress: Called now and then with the number of requests done since the last call.

    Raises:
        PluginError: If there is no such policy, or it cannot serve the model.
        SettingsError: If the policy has no classes, or fails; or a setting is wrong.
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
        classes=ledger.reports(records),
        ages=ledger.view.ages,
        compared=verdict is not None,
        gained=0 if verdict is None else verdict.gained,
        lost=0 if verdict is None else verdict.lost,
        step_ins=ledger.step_ins,
        tables=ledger.view.tables(),
    )


def explainable(
    settings: Settings, model: ModelSpec, plugins: PluginManager, *, tables: bool = False
) -> None:
    """Check, before any work is done, that a policy can be explained.

    Args:
        settings: The policy and its settings.
        model: The model.
        plugins: Where to look for policies.
        tables: Whether the tables that it learns are to be saved.

    Raises:
        PluginError: If there is no such policy, or it cannot serve the model.
        SettingsError: If it has no classes, naming the policies that do, or cannot start from tables.
    """
    specs, architecture = plugins.policies(), plugins.match(model)
    spec = None if settings.policy in OFFLINE else plugins.policy_spec(settings, architecture)[1]
    if spec is None or not spec.explains:
        known = [name for name in plugins.serving(model) if specs[name].explains]
        raise SettingsError(
            f"policy {settings.policy!r} does not tell classes apart and cannot be explained: of the "
            f"policies that serve {model.name}, {', '.join(known) or 'none'} can"
        )
    plugins.check_settings(settings, architecture)
    if tables and (model.has_states or "tables" not in spec.settings.model_fields):
        raise SettingsError(
            f"--save-tables: policy {settings.policy!r} cannot start from what it learned on "
            f"{model.name}: leave it out"
        )


class _Sums:
    """Sums of one class."""

    __slots__ = ("ages", "amounts", "evicted_tokens", "hit_tokens", "returned", "used")

    def __init__(self) -> None:
        self.used = self.returned = self.hit_tokens = self.evicted_tokens = 0
        self.ages, self.amounts = array("d"), array("q")  # of each eviction

    def median(self) -> float | None:
        """Median age of the evicted tokens or states."""
        if not self.ages:
            return None
        ages, amounts = np.array(self.ages), np.array(self.amounts)
        by_age = np.argsort(ages, kind="stable")
        half = np.searchsorted(np.cumsum(amounts[by_age]), amounts.sum() / 2)
        return float(ages[by_age[half]])


class _Ledger(VictimOrder):
    """Wraps an order: forwards all events, and counts them for the order's classes.

    Attributes:
        view: The order's classes.
        step_ins: The periods in which LRU decided.
    """

    def __init__(self, order: VictimOrder, explained: Explained, paths: PagePaths, page_size: int) -> None:
        self.view = explained
        self.step_ins: list[StepIn] = []
        self._order = order
        self._paths = paths
        self._page = page_size
        self._states = explained.unit == "states"
        self._sums: dict[int, _Sums] = {}
        # The class in which each page, or state, was evicted; -1 if it was not, or was regretted since.
        self._evicted_in = np.full(paths.distinct, -1, np.int32)
        self._lead, self._since = 0, 0
        self._lru_decides = False
        for event in _FORWARDED:
            setattr(self, event, getattr(order, event))

    def _sums_of(self, group: int) -> _Sums:
        sums = self._sums.get(group)
        if sums is None:
            sums = self._sums[group] = _Sums()
        return sums

    # -- uses --------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self._order.insert(record)

    def use(self, record: NodeRecord) -> None:
        if not self._states:
            for part in self.view.parts(record, record.depth, record.end):
                sums = self._sums_of(part.group)
                sums.used += part.amount
                sums.hit_tokens += part.amount
        self._order.use(record)

    def consume(self, record: NodeRecord) -> None:
        for part in self.view.parts(record, record.depth, record.end):
            sums = self._sums_of(part.group)
            sums.used += part.amount
            sums.hit_tokens += record.end
        self._order.consume(record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._count_regrets(request)
        self._order.finish(request, info)
        verdict = self.view.against_lru()
        if verdict is None:
            return
        lead = verdict.gained - verdict.lost
        if verdict.behind != self._lru_decides:
            if verdict.behind:
                delay = request.number - self._since
                self.step_ins.append(StepIn(request.number, delay, None, verdict.run, round(verdict.regret)))
            else:
                self.step_ins[-1] = replace(self.step_ins[-1], back=request.number)
            self._lru_decides = verdict.behind
            self._lead, self._since = lead, request.number
        elif lead >= self._lead:
            self._lead, self._since = lead, request.number

    def _count_regrets(self, request: RequestRecord) -> None:
        """Count the evictions of pages that a request missed."""
        first, stop = self._paths.offsets[request.number - 1 : request.number + 1]
        pages = self._paths.paths[first + request.matched // self._page : stop]
        pages = pages[self._evicted_in[pages] >= 0]
        if self._states:
            pages = pages[-1:]  # it would have resumed from the deepest one
        groups, counts = np.unique(self._evicted_in[pages], return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            self._sums_of(group).returned += count if self._states else count * self._page
        self._evicted_in[pages] = -1

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
            self._sums_of(_DEAD).evicted_tokens += tokens
        at = start
        for part in parts:
            sums = self._sums_of(part.group)
            sums.ages.append(part.age)
            sums.amounts.append(part.amount)
            if self._states:
                sums.evicted_tokens += tokens
                at = stop - page
            else:
                sums.evicted_tokens += part.amount
            end = stop if self._states else at + part.amount
            self._evicted_in[self._paths.paths[first + at // page : first + end // page]] = part.group
            at = end

    # -- at the end --------------------------------------------------------------------------

    def reports(self, records: Sequence[NodeRecord]) -> list[ClassReport]:
        """The classes, given the records of the nodes that are cached now."""
        cached: dict[int, int] = {}
        promised: dict[int, float] = {}
        for record in records:
            for part in self.view.parts(record, record.depth, record.end):
                group = part.group
                cached[group] = cached.get(group, 0) + part.amount
                worth = part.amount * self.view.worth(group, part.age)
                promised[group] = promised.get(group, 0.0) + worth
        found = []
        for group in sorted({*self._sums, *cached}):
            sums, kept = self._sums_of(group), cached.get(group, 0)
            report = ClassReport(
                name=_NO_STATE if group == _DEAD else self.view.name(group),
                used=sums.used,
                evicted=sum(sums.amounts),
                held=kept,
                returned=sums.returned,
                hit_tokens=sums.hit_tokens,
                evicted_tokens=sums.evicted_tokens,
                eviction_age=sums.median(),
                worth=promised[group] / kept if kept else None,
                unused=[] if group == _DEAD else self.view.unused(group),
            )
            found.append(report)
        return sorted(found, key=lambda report: -(report.used + report.evicted))
