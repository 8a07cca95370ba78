"""Hazard for models with states: expected uses per unit of time, weighed with what a use saves per byte.

For each state, with G its class's index at its age (see :mod:`costcache.policies.survival`)::

    G x (tokens that would be recomputed without it / bytes that go with it) ** power

Classes are by the children of the node (none, one, more), by how often a state was gone on from, and by the
mean gap between those times; before the first, by the answer of the request, how it ended, and how many
states were made in front. So a state in front of a longer one of the same conversation soon ranks low, one
where many conversations fork stays, and the newest of a conversation that goes on is told from that of a
prompt asked for the first time. KV needs no score of its own: what lies between two states is worth what the
state behind it is.

A state that went is remembered for a while, to see whether it would have been used: a request that walks
over its place, and found no state further on, would have gone on from it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from costcache.policies.hazard_explained import StatesExplained
from costcache.policies.states import StateOrder
from costcache.policies.survival import ALL, BINS, LifeTable, age_bin, edges, index
from costcache.records import NodeRecord, RequestInfo, RequestRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HazardStates"]

FAMILIES = (ALL,) * 12
GHOSTS = 8
"""States that went and are remembered, for each that is there."""
LEAST = 1024
ESTIMATE = 32
"""Requests after which the curves are estimated anew, unless there are new classes before."""

Kind = tuple[int, str | None]
"""Step of an answer's length, and why it ended."""


class _Life:
    """What is known of a state, there or gone.

    Attributes:
        group: Its class.
        uses: How often it was gone on from, that time included in which it was made.
        first: When it was made.
        since: When it was last used.
        gone: It is not there any more.
        kind: What the request that made it was like: how long its answer, and why it stopped.
        turns: States that were made in front of it, there or gone.
    """

    __slots__ = ("first", "gone", "group", "kind", "since", "turns", "uses")

    def __init__(self, turns: int, now: float) -> None:
        self.group = 0
        self.turns = turns
        self.uses = 1
        self.first = self.since = now
        self.gone = False
        self.kind: Kind | None = None


class HazardStates(StateOrder):
    """The fewest tokens that a byte is expected to save in a unit of time go first."""

    def __init__(
        self,
        kv_bytes: int,
        state_bytes: int,
        *,
        power: float = 0.5,
        refresh: int = 4,
        strength: float = 5.0,
    ) -> None:
        """An order for one cache.

        Args:
            kv_bytes: Bytes of a token.
            state_bytes: Bytes of a state.
            power: Of the tokens saved per byte; 1 weighs them as they are, 0 leaves them out.
            refresh: Requests after which all scores are taken anew.
            strength: States that a prior weighs.
        """
        self.period = refresh
        super().__init__()
        self._kv_bytes, self._state_bytes, self._power = kv_bytes, state_bytes, power
        self._table = LifeTable(FAMILIES, strength, 0.02)
        self._classes: dict[tuple[int, int, int | tuple[Kind | None, int]], int] = {}
        self._worth: list[list[float]] = []
        self._shares: NDArray[np.float64] | None = None
        self._lives: dict[int, _Life] = {}
        self._ghosts: OrderedDict[int, tuple[int, _Life | None]] = OrderedDict()
        self._passed: NodeRecord | None = None
        self._now = 0.0
        self._began: float | None = None
        self._estimate = 0
        self._estimated = 0

    # -- what happens ------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        self._now = max(self._now, record.last_use)
        if self._began is None:
            self._began = self._now
        ghosts, at, end = self._ghosts, record.depth, record.end
        deepest: _Life | None = None
        while ghosts and at < end:
            name = record.prefix_hash(at - record.depth)
            ghost = None if name is None else ghosts.pop(name, None)
            if ghost is None:
                break
            tokens, life = ghost
            at += tokens
            if life is not None:
                if at > end:
                    self._lose(life)
                else:
                    if deepest is not None:
                        self._lose(deepest)
                    deepest = life
        if deepest is not None:
            # The request would have gone on from there.
            self._passed = None
            self._use(record, deepest)
            if at == end:
                self._lives[record.serial] = deepest
        super().insert(record)

    def touch(self, record: NodeRecord) -> None:
        self._now = max(self._now, record.last_use)
        life = self._lives.get(record.serial)
        if life is not None and life.gone:
            self._passed = record  # the deepest of them is the last one touched

    def attach(self, record: NodeRecord) -> None:
        self._settle(record.serial)
        life = self._lives.get(record.serial)
        if life is None:
            life = self._lives[record.serial] = _Life(self._turns(record), self._now)
            life.group = self._class(record, life)
            self._table.interval(1)
        elif life.gone and life.since < self._now:
            self._use(record, life)
        life.gone = False
        super().attach(record)

    def _turns(self, record: NodeRecord) -> int:
        """States made in front of a node, as far as they are remembered."""
        lives, above = self._lives, record.parent
        while above is not None:
            life = lives.get(above.serial)
            if life is not None:
                return life.turns + 1
            above = above.parent
        return 0

    def consume(self, record: NodeRecord) -> None:
        passed = self._passed
        if passed is not None:
            self._passed = None
            if passed.depth >= record.end:
                self._use(passed, self._lives[passed.serial])
        self._use(record, self._lives[record.serial])
        super().consume(record)

    def detach(self, record: NodeRecord) -> None:
        self._lives[record.serial].gone = True
        super().detach(record)

    def remove(self, record: NodeRecord) -> None:
        life = self._lives.pop(record.serial, None)
        name = record.prefix_hash()
        if name is not None:
            self._bury_ghost(name, record.tokens, life)
        elif life is not None:
            self._lose(life)
        if life is not None:
            life.gone = True
        if self._passed is record:
            self._passed = None
        super().remove(record)

    def _bury_ghost(self, name: int, tokens: int, life: _Life | None) -> None:
        ghosts = self._ghosts
        old = ghosts.pop(name, None)
        if old is not None and old[1] is not None:
            self._lose(old[1])
        ghosts[name] = tokens, life
        while len(ghosts) > GHOSTS * len(self._known) + LEAST:
            _, lost = ghosts.popitem(last=False)[1]
            if lost is not None:
                self._lose(lost)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._settle(None)
        end = request.end
        life = None if end is None else self._lives.get(end.serial)
        if end is not None and life is not None and life.uses == 1 and life.kind is None:
            out = info.output_tokens
            life.kind = (
                0 if out < 50 else 1 if out < 200 else 2 if out < 500 else 3,
                info.finish_reason,
            )
            life.group = self._class(end, life)
        super().finish(request, info)

    def _settle(self, attached: int | None) -> None:
        """A request that went on from nowhere would have gone on from the deepest place it passed."""
        passed, self._passed = self._passed, None
        if passed is not None and passed.serial != attached and passed.serial in self._lives:
            self._use(passed, self._lives[passed.serial])

    def _use(self, record: NodeRecord, life: _Life) -> None:
        now = self._now
        self._table.used[life.group * BINS + age_bin(now - life.since)] += 1.0
        life.uses += 1
        life.since = now
        self._table.interval(1)
        life.group = self._class(record, life)

    def _lose(self, life: _Life) -> None:
        self._table.lost[life.group * BINS + age_bin(self._now - life.since)] += 1.0

    def _class(self, record: NodeRecord, life: _Life) -> int:
        uses = life.uses
        gap = (life.since - life.first) / (uses - 1) if uses > 1 else 0.0
        children = min(record.live_children, 2)
        level = min((uses - 1).bit_length(), 3)
        exponent = math.frexp(gap)[1] if uses > 1 and gap > 0 else 0
        exponent = min(max(exponent, -1), 16)
        known: int | tuple[Kind | None, int]
        known = exponent if uses > 1 else (life.kind, min(life.turns.bit_length(), 3))
        key = (children, level, known)
        number = self._classes.get(key)
        if number is None:
            scale = math.ldexp(0.75, exponent) if uses > 1 and gap > 0 else 0.0
            number = self._classes[key] = self._table.add_class(children * 4 + level, scale)
            self._worth.append(self._worth[0] if self._worth else [1.0 / (age + 1) for age in range(BINS)])
        return number

    # -- what is expected --------------------------------------------------------------------

    def score(self, record: NodeRecord) -> float:
        life = self._lives[record.serial]
        replay, alone = reach(record)
        bytes_freed = self._state_bytes + alone * self._kv_bytes
        worth = self._worth[life.group][age_bin(self._now - life.since)]
        return float(worth * (replay / bytes_freed) ** self._power)

    def rescore(self, records: list[NodeRecord]) -> None:
        lives = self._lives
        # A class follows its node: children come and go without a use.
        for record in records:
            life = lives[record.serial]
            life.group = self._class(record, life)
        # A class that is new has no estimate of its own: early on that is most of them.
        if self._requests >= self._estimate or len(self._classes) > self._estimated:
            self._estimate = self._requests + ESTIMATE
            self._estimated = len(self._classes)
            self._expect()

    def _expect(self) -> None:
        import numpy as np

        now = self._now
        living = np.zeros((BINS, len(self._table)))
        ghosts = [life for _, life in self._ghosts.values() if life is not None]
        for life in (*self._lives.values(), *ghosts):
            living[age_bin(now - life.since), life.group] += 1.0
        shares = self._table.shares(living, now - (self._began or 0.0))
        self._shares = shares.T
        self._worth = index(shares, edges()).T.tolist()

    def explained(self) -> StatesExplained:
        return StatesExplained(self)


def reach(record: NodeRecord) -> tuple[int, int]:
    """What is lost with a node's state: tokens to recompute, and tokens whose KV nothing else needs.

    The first go back to the nearest state in front. The second are 0 on a node with children; behind a
    leaf's state KV dies back to the nearest state or fork.
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
