"""Hazard for models with states: expected uses per unit of time, weighed with what a use saves per byte.

The score of each state, with G the Gittins index of its class at its age (see
:mod:`costcache.policies.hazard.survival`)::

    G x (tokens to recompute without it / bytes that are freed with it) ** power

So a state that a longer one of its session has superseded ranks below the newest of every session, one where
many conversations fork stays, and the newest of a conversation that continues is told from that of a prompt
asked for the first time. When the newest is evicted, the state before it stands in for it, and is worth what
the evicted one would be. KV needs no score of its own: tokens between two states are worth what the state
after them is.

An evicted state is remembered for a while, to see whether it would have been used: a request that passes its
position, and found no state further on, would have resumed from it.

Where the host says what LRU would have found, a judge lets LRU step in as in
:class:`costcache.policies.hazard.order.Hazard`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar

from costcache.orders import VictimOrder
from costcache.policies.hazard.describe import verdict_of
from costcache.policies.hazard.forecast import Forecast
from costcache.policies.hazard.judge import Judge
from costcache.policies.hazard.state_learner import Life, StateLearner
from costcache.policies.states import StateOrder
from costcache.records import NodeRecord, PoolState, RequestInfo, RequestRecord

if TYPE_CHECKING:
    from costcache.explained import Verdict
    from costcache.policies.hazard.explained import StatesExplained
    from costcache.policies.hazard.snapshot import StatesSnapshot

__all__ = ["TOKENS_POWER", "HazardStates", "reach"]

_Ghost = tuple[int, Life | None, bytes | bytearray | None]
"""Tokens of an evicted node, the life of its state, and the node's content if the cache can give it."""

TOKENS_POWER = 0.5
"""Power of the tokens saved per byte for hits in tokens; for FLOPs it is 1, which makes little difference."""
GHOSTS = 8
"""Evicted nodes that are remembered, for each state in the cache."""
LEAST = 1024
"""Evicted nodes that are remembered in any case."""
ESTIMATE = 32
"""Requests after which the curves are estimated anew, unless there are new classes before."""


class HazardStates(StateOrder):
    """Evicts the state that is expected to save the fewest tokens per byte and unit of time.

    Attributes:
        learner: Learns from the reuse intervals of states.
    """

    forecasts: ClassVar[bool] = True

    def __init__(
        self,
        kv_bytes: int,
        state_bytes: int,
        *,
        power: float = TOKENS_POWER,
        refresh: int = 4,
        strength: float = 5.0,
        doubt: float = 0.01,
    ) -> None:
        """Make the order of one cache.

        Args:
            kv_bytes: Bytes of a token.
            state_bytes: Bytes of a state.
            power: Of the tokens saved per byte; 1 weighs them as they are, 0 ignores them.
            refresh: Requests after which all scores are taken anew.
            strength: States that a prior weighs.
            doubt: Chance, at most, of a false step-in of LRU within 10,000 requests.
        """
        self.period = refresh
        super().__init__()
        self._kv_bytes, self._state_bytes = kv_bytes, state_bytes
        self._power = self._power_below = power
        self.learner = StateLearner(strength)
        self._lives = self.learner.lives
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()
        self._passed: NodeRecord | None = None
        self._estimate_at = 0
        self._forecast: Forecast | None = None  # of the last estimate, once it is asked for
        self._doubt = doubt
        self._judge: Judge | None = None  # once a host says what LRU would have found
        self._gained = self._lost = 0

    def over_tier(self) -> None:
        self._power = TOKENS_POWER  # what is lost here costs a reload, by the byte

    # -- events ------------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        learner = self.learner
        learner.now = max(learner.now, record.last_use)
        if learner.began is None:
            learner.began = learner.now
        parent = record.parent
        if parent is not None and parent.live_children > 1:
            self._part(parent)
        longest = self._find_ghost(record)
        if longest is not None:
            # The request would have resumed from there. Where it did resume from, it fell back to.
            if self._passed is None:
                learner.take_back(record)
            self._passed = None
            learner.use(record, longest)
        super().insert(record)

    def _find_ghost(self, record: NodeRecord) -> Life | None:
        """Take the ghosts of a new node's prefix out; returns the longest state among them.

        The state is the node's own again if it was at its end. What a ghost has after the node, or after
        where the two part, is remembered under a name of its own.
        """
        learner, ghosts, at, depth, end = self.learner, self._ghosts, record.depth, record.depth, record.end
        longest: Life | None = None
        while ghosts and at < end:
            name = record.prefix_hash(at - depth)
            ghost = None if name is None else ghosts.pop(name, None)
            if ghost is None:
                break
            tokens, life, content = ghost
            common = min(tokens, end - at)
            if content is not None:
                common = min(common, record.shared(at - depth, content))
            at += common
            if common < tokens:
                rest = None if content is None else content[common * len(content) // tokens :]
                name = None if rest is None else record.prefix_hash_with(at - depth, rest)
                if name is not None:
                    self._remember(name, tokens - common, life, rest)
                elif life is not None:
                    learner.censor(life)
                break
            if life is not None:
                if longest is not None:
                    learner.censor(longest)
                longest = life
        if longest is not None and at == end:
            self._lives[record.serial] = longest
        return longest

    def use(self, record: NodeRecord) -> None:
        learner = self.learner
        learner.now = max(learner.now, record.last_use)
        if not record.depth:
            self._settle_passed()  # another walk begins
        if record.state is not None:
            self._passed = None
        elif record.serial in self._lives:
            self._passed = record

    def attach(self, record: NodeRecord) -> None:
        self._settle_passed()
        life = self._lives.get(record.serial) or self.learner.make(record)
        life.evicted, life.followed, life.stands_for = False, False, None
        state = record.state
        # Made where a prompt parts from another.
        life.branched = record.live_children > 0 or (state is not None and state.parts)
        self.learner.classify(record, life)
        super().attach(record)
        self._follow(record)

    def consume(self, record: NodeRecord) -> None:
        life = self._lives[record.serial]
        if self._passed is None or not life.superseded:  # else it falls back to this one
            self.learner.use(record, life)
        self._settle_passed()
        super().consume(record)

    def detach(self, record: NodeRecord) -> None:
        super().detach(record)
        life = self._lives[record.serial]
        life.evicted = True
        self._follow(record, life.stands_for if life.superseded else life)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        life = self._lives.pop(prefix.serial, None)
        if life is not None:
            if tail.serial in self._lives:
                self.learner.censor(life)  # only a prompt that parts between the two would resume from it
            else:
                self._lives[tail.serial] = life
        if self._passed is prefix:
            self._passed = tail
        self.merged(prefix, tail)

    def remove(self, record: NodeRecord) -> None:
        life = self._lives.pop(record.serial, None)
        name = record.prefix_hash()
        if name is not None:
            self._remember(name, record.tokens, life, record.content(0, record.tokens))
        elif life is not None:
            self.learner.censor(life)
        if self._passed is record:
            self._passed = None
        super().remove(record)
        if life is not None and not life.evicted:
            life.evicted = True
            self._follow(record, life.stands_for if life.superseded else life)

    def _follow(self, record: NodeRecord, evicted: Life | None = None) -> None:
        """Tell the state before a node's that one follows it, or which one did until it was evicted."""
        above, parted = record.parent, False
        while above is not None and above.state is None:
            parted |= above.live_children > 1
            above = above.parent
        if above is not None and not parted:
            life = self._lives[above.serial]
            life.followed, life.stands_for = True, evicted
            if life.superseded:
                self._reclassify(above)

    def _part(self, record: NodeRecord) -> None:
        """Prompts part at the end of a node: its state, or else the one before it, serves all of them."""
        above: NodeRecord | None = record
        while above is not None and above.state is None:
            above = above.parent
        if above is not None:
            life = self._lives[above.serial]
            life.branched |= above is record
            life.followed &= above is record
            self._reclassify(above)

    def _reclassify(self, record: NodeRecord) -> None:
        self.learner.classify(record, self._lives[record.serial])
        self._queue(record)

    def _remember(self, name: int, tokens: int, life: Life | None, content: bytes | bytearray | None) -> None:
        ghosts = self._ghosts
        old = ghosts.pop(name, None)
        if old is not None and old[1] is not None:
            self.learner.censor(old[1])
        ghosts[name] = tokens, life, content
        while len(ghosts) > GHOSTS * len(self._known) + LEAST:
            oldest = ghosts.popitem(last=False)[1][1]
            if oldest is not None:
                self.learner.censor(oldest)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._settle_passed()
        if request.end is not None:
            self.learner.answered(request.end, info)
        super().finish(request, info)
        judge, lru = self._judge, request.lru_matched
        if judge is not None and lru is not None:
            regret = lru - request.matched
            if regret > 0:
                self._lost += regret
            else:
                self._gained -= regret
            judge.add(regret, request.matched + (info.new_tokens or 0))
            if judge.turned:
                judge.turned = False
                self._due = self._requests  # all are ranked anew before the next victim

    def _settle_passed(self) -> None:
        """Count a use of the deepest evicted state that a request passed: it found none further on."""
        passed, self._passed = self._passed, None
        if passed is not None and passed.serial in self._lives:
            self.learner.use(passed, self._lives[passed.serial])

    # -- scores ------------------------------------------------------------------------------

    def score(self, record: NodeRecord) -> float:
        judge = self._judge
        if judge is not None and judge.behind:
            return as_lru(record)
        learner, life = self.learner, self._lives[record.serial]
        replay, alone = reach(record)
        bytes_freed = self._state_bytes + alone * self._kv_bytes
        worth = learner.worth_of(life)
        if life.stands_for is not None and life.followed and not life.branched:
            worth = max(worth, learner.worth_of(life.stands_for))
        return float(worth * (replay / bytes_freed) ** self._power)

    def rescore(self, records: list[NodeRecord]) -> None:
        learner = self.learner
        learner.reclassify(records)
        # A class that is new has no estimate of its own: early on that is most of them.
        if self._requests >= self._estimate_at or learner.has_new_classes:
            self._estimate_at = self._requests + ESTIMATE
            learner.estimate(self._ghost_lives())

    def weight(self, tokens: int) -> float:
        """Factor of the worth of a state below that saves so many tokens and is evicted alone."""
        return float((tokens / self._state_bytes) ** self._power_below)

    @property
    def requests(self) -> int:
        """Requests that have ended."""
        return self._requests

    def compares(self) -> bool:
        self._judge = Judge(self._doubt)
        return True

    def against_lru(self) -> Verdict | None:
        judge = self._judge
        return None if judge is None else verdict_of(judge, self._gained, self._lost)

    def below(self, pool: PoolState) -> VictimOrder:  # the same for states and for KV
        from costcache.policies.hazard.below import BelowHazardStates

        self.over_tier()
        return BelowHazardStates(self)

    # -- what it knows -----------------------------------------------------------------------

    def _ghost_lives(self) -> list[Life]:
        return [life for _, life, _ in self._ghosts.values() if life is not None]

    def reuse_chance(self, record: NodeRecord, within: float = math.inf) -> float:
        life = self._lives.get(record.serial)
        chance = None if life is None else self._chance(life, within)
        return VictimOrder.reuse_chance(self, record, within) if chance is None else chance

    def ghost_chance(self, name: int, within: float = math.inf) -> float | None:
        ghost = self._ghosts.get(name)
        return None if ghost is None or ghost[1] is None else self._chance(ghost[1], within)

    def _chance(self, life: Life, within: float) -> float | None:
        """Chance that a request resumes from a state; None before the first estimate.

        Nothing is known of times longer than that watched. A state that stands in for the evicted one after
        it is as likely to be used.
        """
        learner, forecast = self.learner, self._last_forecast()
        if forecast is None:
            return None
        within = min(within, learner.watched)
        lives = [life]
        if life.stands_for is not None and life.superseded:
            lives.append(life.stands_for)
        return max(forecast.chance(each.group, learner.now - each.last_use, within) for each in lives)

    def class_chance(self, group: int, last_use: float, within: float = math.inf) -> float | None:
        """The same of a state of a class, by the time of its last use: what a slower tier has of it."""
        learner, forecast = self.learner, self._last_forecast()
        if forecast is None:
            return None
        return forecast.chance(group, max(0.0, learner.now - last_use), min(within, learner.watched))

    def _last_forecast(self) -> Forecast | None:
        """The forecast by the last estimate; None before the first one."""
        shares, forecast = self.learner.shares, self._forecast
        if shares is None:
            return None
        if forecast is None or forecast.of is not shares:
            forecast = self._forecast = Forecast(shares.T, shares)
        return forecast

    def snapshot(self) -> StatesSnapshot:
        """Describe what the order knows now; changes nothing."""
        from costcache.policies.hazard.snapshot import StatesSnapshot

        learner = self.learner
        return StatesSnapshot(
            now=learner.now,
            watched=learner.watched,
            states=len(self._known),
            ghosts=len(self._ghosts),
            classes=learner.classes(self._ghost_lives()),
        )

    def explained(self) -> StatesExplained:
        from costcache.policies.hazard.explained import StatesExplained

        return StatesExplained(self.learner)


def as_lru(record: NodeRecord) -> float:
    """Rank of a state under LRU; a leaf goes together with its state, and so by the older of the two."""
    state = record.state
    if state is None or (not record.live_children and record.recency < state.recency):
        return float(record.recency)
    return float(state.recency)


def reach(record: NodeRecord) -> tuple[int, int]:
    """Loss with a node's state: tokens to recompute, and tokens whose KV nothing else needs.

    The first are those after the nearest state before it. The second are 0 on a node with children; with a
    leaf's state, KV is dead back to the nearest state or fork.
    """
    end = record.end
    above, alone = record.parent, 0 if record.live_children else record.tokens
    forked = bool(record.live_children)
    while above is not None and above.state is None:
        forked = forked or above.live_children > 1
        if not forked:
            alone += above.tokens
        above = above.parent
    return end - (0 if above is None else above.end), alone
