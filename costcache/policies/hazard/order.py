"""Order of the hazard policy: evicts the leaf that promises the fewest uses per unit of time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

from costcache.orders import VictimOrder
from costcache.policies.hazard.depths import Depths
from costcache.policies.hazard.forecast import Forecast
from costcache.policies.hazard.history import Piece, Tracked
from costcache.policies.hazard.intake import Intake
from costcache.policies.hazard.learner import Learner
from costcache.policies.hazard.prior import shipped_prior
from costcache.policies.hazard.ranker import Ranker
from costcache.policies.hazard.tables import load_tables
from costcache.policies.hazard.worth import Worth
from costcache.records import (
    Action,
    NodeRecord,
    PoolState,
    RequestInfo,
    RequestRecord,
    Victim,
    tuple_maker,
)

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.explained import Verdict
    from costcache.policies.hazard.explained import HazardExplained
    from costcache.policies.hazard.settings import HazardSettings
    from costcache.policies.hazard.snapshot import PieceSnapshot, Snapshot

__all__ = ["Hazard"]

_TICKS: Final = 16
"""Rankings while as many requests pass as there are leaves."""
_SLOWER: Final = 64
"""Estimates are renewed when the requests so far have grown by one in so many."""
_SLOWEST: Final = 10
"""But after so many times the set interval in any case."""
_SOONEST: Final = 4
"""Requests between two estimates at least."""
_EARLY: Final = 8
"""Estimates are renewed when the requests since the pool filled have grown by one in so many, at first."""
_DIRTY: Final = 256
"""Leaves that may wait to be ranked while nothing is evicted, lest the first victim wait for all of them."""
_PENDING: Final = 256
"""Uses whose work may wait."""
_LATE: Final = 8
"""Requests for which a ranking that is due may wait for one to end."""
_AHEAD: Final = 0.35
"""Share of the time until the next ranking by which the time that leaves are ranked for is ahead of now."""
_FURTHEST: Final = 3.0
"""Requests by which it is ahead at most."""
_DELETE: Final = Action.DELETE
_victim: Final = tuple_maker(Victim)


class Hazard(VictimOrder):
    """Evicts the leaf that promises the fewest uses per unit of time, for its class and age.

    With S the survival function of the reuse intervals of a class, a leaf of age a is worth
    ``max over T of (S(a) - S(a + T)) / integral of S from a to a + T``; see
    :func:`costcache.policies.hazard.survival.gittins_index`. Ties are broken by recency. With the objective
    ``flops`` the worth is multiplied by the cost of recomputing a token at the leaf's depth.

    S is estimated by Kaplan and Meier's method, with evicted tokens (as long as they are remembered) and
    tokens that have not been used yet counted as such; see
    :class:`costcache.policies.hazard.life_table.LifeTable`. Classes are made of what a server knows: how
    often and how regularly a node was used, or for one used once how many tokens its request brought; and
    the output length, finish reason and priority of the last request.

    Works on nodes: a split leaves both parts the history; a merge puts both histories in a row; a trim
    evicts the tail and remembers it; tokens that return get their history back, and new ones after them
    start without any, see :mod:`costcache.policies.hazard.history`. Of a node with several, the part with
    the last history is evicted by itself.

    Cost: a match notes its uses, in about a microsecond a node; their work is done before whatever comes
    next, and takes ten to twenty more in a large cache. Leaves are kept by class and age
    (:class:`costcache.policies.hazard.cohorts.Cohorts`), and ranked anew after one request for each sixteen
    leaves, at most ``refresh``. An estimate takes a millisecond or two; it is renewed every ``refresh``
    requests at first and ten times as seldom later. Both are done when a request ends, and before a victim
    only where none has ended for long.

    Memory: about 600 bytes a node; 300 a remembered one, all of which had no more tokens than ``ghosts``
    times the pool and those of the slower tiers that it ranks, and a twentieth of that until a request ends;
    and 2 KB a class, at most 768 of them.

    Attributes:
        depths: Ranges of depth that the objective tells apart, which the tiers below do in any case.
        intake: Keeps the histories of nodes.
        learner: Learns from their reuse intervals.
        ranker: Ranks leaves.
        rank_at: Count of requests at which the ranking is due.
        estimate_at: Count of requests at which the estimate is due.
    """

    forecasts: ClassVar[bool] = True

    def __init__(self, capacity: int, settings: HazardSettings, cost: CostModel | None = None) -> None:
        """Make the order of one cache.

        Args:
            capacity: Tokens in the pool.
            settings: The settings.
            cost: Cost of recomputing tokens; needed for the objective ``flops``.
        """
        depths = self.depths = Depths(cost if settings.objective == "flops" else None)
        self._settings = settings
        self._ghosts = capacity * settings.ghosts
        self.learner = self._new_learner(depths)
        self.ranker = Ranker(self.learner, Worth(depths))
        self.intake = Intake(self.learner, self.ranker, self._ghosts)
        self.rank_at = 0
        self.estimate_at = settings.refresh if settings.tables is None else 0
        self._pending = self.intake.pending
        self._dirty = self.ranker.dirty
        self._refresh_after = settings.refresh
        self._named: Tracked | None = None
        self._late = 0  # _LATE, once the host is known to say when requests end
        self._full_at = 0  # count of requests
        self._asked = False  # for a victim, since the last estimate
        self._forecast: Forecast | None = None  # of the last estimate, once it is asked for

    def _new_learner(self, depths: Depths) -> Learner:
        settings = self._settings
        tables = None if settings.tables is None else load_tables(settings.tables)
        prior = shipped_prior() if settings.prior else None
        return Learner(depths, settings.strength, settings.memory, settings.doubt, tables, prior)

    def over_tier(self) -> None:
        if self.learner.depths.count > 1:
            depths = Depths()  # a token costs a reload at any depth
            self.learner = self._new_learner(depths)
            self.ranker = Ranker(self.learner, Worth(depths))
            self.intake = Intake(self.learner, self.ranker, self._ghosts)
            self._pending = self.intake.pending
            self._dirty = self.ranker.dirty

    # -- events ------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self.intake.insert(record)

    def use(self, record: NodeRecord) -> None:
        # A request waits for its match, which therefore only notes the use: see Intake.catch_up.
        pending, depth = self._pending, record.depth
        pending.append((record.data, record.last_use, depth, depth + record.tokens, record.recency))
        if len(pending) > _PENDING:
            self.intake.catch_up()

    def refresh(self, record: NodeRecord) -> None:
        if self._pending:
            self.intake.catch_up()
        tracked: Tracked = record.data
        tracked.pinned_until = self.intake.requests + self._refresh_after
        if not record.live_children:
            tracked.stamp = 0
            self.ranker.mark_dirty(tracked)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.intake.split(prefix, tail)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self.intake.merge(prefix, tail)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        self._named = None
        self.intake.trim(record, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._named = None
        self.intake.remove(record)
        parent = record.parent
        if parent is not None and parent.is_evictable:
            self.ranker.mark_dirty(parent.data)

    def unlock(self, record: NodeRecord) -> None:
        self.learner.shadow.release()
        if not record.live_children:
            self.ranker.mark_dirty(record.data)

    def defer(self, victim: Victim) -> None:
        self._named = None
        if victim.record.is_evictable:
            self.ranker.mark_dirty(victim.record.data)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        intake, ranker = self.intake, self.ranker
        intake.finish(request, info)
        self._late = _LATE
        if not intake.full:
            # No victim has been asked for, but leaves that were used at different times must not share a
            # cohort: the first victims are chosen among them.
            if intake.requests >= self.rank_at or len(self._dirty) > _DIRTY:
                ranker.flush_dirty(intake.requests, intake.now)
                self.learner.cohorts.merge(intake.now)
                self._rank()
            return
        # Nobody waits for a request that has ended, so what the next victims need is done now.
        intake.ghosts.fit()
        ranker.flush_dirty(intake.requests, intake.now)
        if (self._asked and intake.requests >= self.estimate_at) or self.learner.judge.turned:
            self._estimate()
        elif intake.requests >= self.rank_at:
            self._rank()

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:
        intake, ranker = self.intake, self.ranker
        if self._pending:
            intake.catch_up()
        if not intake.full:
            intake.full = True
            self._full_at = intake.requests
            if self.learner.filled(intake.now - intake.began):
                self.estimate_at = 0
            self.rank_at = -_LATE  # so that the first victim is ranked for
        self._asked = True
        if self._dirty:
            ranker.flush_dirty(intake.requests, intake.now)
        if intake.requests >= self.rank_at + self._late:
            if intake.requests >= self.estimate_at or self.learner.judge.turned:
                self._estimate()
            else:
                self._rank()
        if self._named is not None:
            self._named.stamp = 0  # it was not taken
        tracked = self._named = ranker.pop()
        if tracked is None:
            if not ranker.pinned_by_waiters:
                return None
            ranker.unpin(math.inf)  # no other leaf is evictable
            return self.next_victim(pool)
        pieces, record = tracked.pieces, tracked.record
        end = None if len(pieces) == 1 else record.end - pieces[-1].start
        return _victim((record, _DELETE, end))

    def _rank(self) -> None:
        """Rank leaves for a little later than now: the next request needs the next victims."""
        intake, ranker = self.intake, self.ranker
        if ranker.pinned_by_waiters:
            ranker.unpin(intake.requests)
        after = min(self._refresh_after, 1 + len(ranker) // _TICKS)
        self.rank_at = intake.requests + after
        ahead = min(_AHEAD * (1 + after), _FURTHEST)
        ranker.rank(intake.now + ahead * intake.gap)

    def _estimate(self) -> None:
        """Let the learner estimate survival, and rank leaves by it."""
        intake, learner, ranker = self.intake, self.learner, self.ranker
        requests, after = intake.requests, self._refresh_after
        early = max(_SOONEST, (requests - self._full_at) // _EARLY)
        self.estimate_at = requests + min(max(min(early, after), requests // _SLOWER), _SLOWEST * after)
        self._asked = False
        ranker.flush_dirty(requests, intake.now)
        if learner.tables is not None:
            if intake.clock is None:
                self.estimate_at = requests + 1  # the first request to end tells the unit of their ages
            else:
                learner.start(intake.clock)
        ranker.sweep(intake.nodes)
        estimate, present = learner.estimate(intake.now, intake.watched)
        ranker.worth.as_lru = learner.judge.behind
        ranker.worth.learn(estimate, present, 2.0 * intake.watched)
        self._rank()

    def below(self, pool: PoolState) -> VictimOrder:
        from costcache.policies.hazard.below import BelowHazard

        self.over_tier()
        if pool.unit == "tokens":
            # What that tier holds must be known here: what is forgotten loses its class, and its reuse
            # interval is censored just where the tier decides.
            more = pool.capacity * self._settings.ghosts
            self._ghosts += more
            self.intake.ghosts.widen(more)
        return BelowHazard(self)

    # -- what it knows -----------------------------------------------------------------------

    def reuse_chance(self, record: NodeRecord, within: float = math.inf) -> float:
        if self._pending:
            self.intake.catch_up()
        tracked: Tracked | None = record.data
        chance = None if tracked is None else self._chance(tracked.pieces, within)
        return VictimOrder.reuse_chance(self, record, within) if chance is None else chance

    def ghost_chance(self, name: int, within: float = math.inf) -> float | None:
        if self._pending:
            self.intake.catch_up()
        pieces = self.intake.ghosts.peek(name)
        return None if pieces is None else self._chance(pieces, within)

    def _chance(self, pieces: list[Piece], within: float) -> float | None:
        """Chance of a use of pieces, mean over their tokens; None before the first estimate.

        Nothing is known of times longer than that watched.
        """
        learner, intake, forecast = self.learner, self.intake, self._last_forecast()
        if forecast is None:
            return None
        within = min(within, intake.watched)
        expected, tokens = 0.0, 0
        for piece in pieces:
            chance = forecast.chance(learner.group_of(piece), intake.now - piece.last_use, within)
            expected += chance * piece.tokens
            tokens += piece.tokens
        return expected / tokens if tokens else None

    def class_chance(self, group: int, last_use: float, within: float = math.inf) -> float | None:
        """The same of tokens of a class, by the time of their last use: what a slower tier has of them."""
        if self._pending:
            self.intake.catch_up()
        intake, forecast = self.intake, self._last_forecast()
        if forecast is None:
            return None
        return forecast.chance(group, max(0.0, intake.now - last_use), min(within, intake.watched))

    def _last_forecast(self) -> Forecast | None:
        """The forecast by the last estimate; None before the first one."""
        estimate, forecast = self.learner.estimated, self._forecast
        if estimate is None:
            return None
        if forecast is None or forecast.of is not estimate:
            forecast = self._forecast = Forecast(estimate.shares(), estimate)
        return forecast

    def history(self, record: NodeRecord) -> list[PieceSnapshot]:
        """History of a node of the cache, piece by piece from front to back."""
        from costcache.policies.hazard.describe import history_of

        self.intake.catch_up()
        return history_of(record.data.pieces, self.learner)

    def snapshot(self) -> Snapshot:
        """Describe what the order knows now; takes some milliseconds, and changes nothing."""
        from costcache.policies.hazard.describe import snapshot_of

        return snapshot_of(self.intake, self.learner, self.ranker)

    def against_lru(self) -> Verdict:
        from costcache.policies.hazard.describe import against_lru

        self.intake.catch_up()
        return against_lru(self.learner)

    def explained(self) -> HazardExplained:
        from costcache.policies.hazard.explained import HazardExplained

        return HazardExplained(self.intake, self.learner, self.ranker, self.against_lru)
