"""The order of the hazard policy: the leaf that promises the fewest uses per unit of time goes first."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Literal, NamedTuple

from costcache.orders import VictimOrder
from costcache.policies.ages import AgeQueues
from costcache.policies.ghosts import Ghosts
from costcache.policies.hazard_explained import HazardExplained
from costcache.policies.outcomes import FAMILIES, SPANS, Classes
from costcache.policies.pieces import Piece, Place, join, split_at
from costcache.policies.shadow import ShadowLRU
from costcache.policies.survival import BINS, ENDS, Estimate, LifeTable, added, age_bin, edges
from costcache.policies.tables import load_tables
from costcache.policies.worth import Worth
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim, tuple_maker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.cost import CostModel
    from costcache.policies.hazard import HazardSettings

__all__ = ["Curve", "Hazard"]

_TICKS = 16
"""Rankings while as many requests pass as there are leaves."""
_SLOWER = 64
"""Estimates are renewed when the requests so far have grown by one in so many."""
_SLOWEST = 10
"""But after so many times the set interval in any case."""
_DOUBT = 0.25
"""Share of what was learned that is kept when it turned out to be worse than LRU."""
_MARKED = 256
"""Leaves that may wait to be put into queues: the first victim should not wait for all of a full pool."""
_USED = 256
"""Uses whose work may wait."""
_GONE = 8
"""Pieces trimmed off a node that are remembered with it."""
_LATE = 8
"""Requests for which a ranking that is due may wait for one to end."""
_SLACK = 0.05
"""Share of the room for ghosts that may be exceeded until a request ends."""
_AHEAD = 0.35
"""Share of the time until the next ranking by which the time that leaves are ranked for is ahead of now."""
_FURTHEST = 3.0
"""Requests by which it is ahead at most."""
_DELETE = Action.DELETE
_victim = tuple_maker(Victim)


class Curve(NamedTuple):
    """What is known of one class.

    Attributes:
        name: The class in words.
        tokens: Tokens of its intervals that have ended: used again, or lost from sight.
        reused: Of these, the tokens that were used again.
        shares: Share used in each bin of age of what was not used before; empty before the first estimate.
        worth: Expected uses per unit of time, by bin of age; what is lowest goes first.
    """

    name: str
    tokens: float
    reused: float
    shares: list[float]
    worth: list[float]


class Hazard(VictimOrder):
    """The leaf that promises the fewest uses per unit of time, for its class and age, goes first.

    With S the survival function of the intervals between uses of a class, a leaf of age a is worth
    ``max over T of (S(a) - S(a + T)) / integral of S from a to a + T``; see
    :func:`costcache.policies.survival.index`. Ties go least recent first. With the objective ``flops``
    the worth is multiplied by the cost of recomputing a token at the leaf's depth.

    S is estimated by Kaplan and Meier's method, with what was evicted (as long as it is remembered) and what
    has not been used yet counted as such; see :class:`costcache.policies.survival.LifeTable`. Classes are
    made of what a server knows: how often and how regularly a node was used, or for one used once how
    much its request brought; and the output length, finish reason and priority of the last request.

    Works on nodes: a split leaves both parts the history; a trim frees the tail and remembers it; what
    comes back has its history again, and what is new behind it none, see
    :mod:`costcache.policies.pieces`. Of such a node, the part with the last history goes by itself.

    Cost: a match notes what it used, in about a microsecond a node; the work of it is done before what comes
    next, and takes ten to twenty more in a large cache. Leaves are kept by class and age
    (:class:`costcache.policies.ages.AgeQueues`), and ranked anew after one request for each sixteen leaves,
    at most ``refresh``. An estimate takes a millisecond or two; it is renewed every ``refresh`` requests at
    first and ten times as seldom later. Both are done when a request ends, and before a victim only where
    none has ended for long.

    Memory: about 600 bytes a node; 300 a remembered one, all of which had no more tokens than ``ghosts``
    times the pool, and a twentieth of that until a request ends; and 2 KB a class, at most 768 of them.
    """

    def __init__(self, capacity: int, settings: HazardSettings, cost: CostModel | None = None) -> None:
        """Make the order of one cache.

        Args:
            capacity: Tokens that the pool holds.
            settings: The settings.
            cost: What recomputing costs; needed for the objective ``flops``.
        """
        self._refresh_after = settings.refresh
        self._memory = settings.memory
        self._table = LifeTable(FAMILIES, settings.strength, 0.02)
        self._classes = Classes(self._table)
        self._by_uses = self._classes.by_uses
        self._worth = Worth(cost if settings.objective == "flops" else None)
        self._depths = self._worth.depths
        self._queues: AgeQueues[Place] = AgeQueues(self._worth)
        self._last, self._risk = self._queues.last, self._queues.risk
        self._ghosts: Ghosts[list[Piece]] = Ghosts(capacity * settings.ghosts, self._lose, slack=_SLACK)
        self._shadow = ShadowLRU()
        self._resident = 0
        self._full = False  # once something had to go
        self._estimated: Estimate | None = None
        # Place, time, which tokens it covered, and by how many it was locked.
        self._used: list[tuple[Place, float, int, int, int]] = []
        self._marked: list[Place] = []
        self._wanted: dict[Place, None] = {}
        self._named: Place | None = None
        self._nodes = 0
        self._now = self._began = 0.0
        self._before = 0.0  # time that others watched, whose tables it started from
        self._clock: Literal["requests", "seconds"] | None = None  # what it counts; requests tell
        self._requests = 0
        self._tables = None if settings.tables is None else load_tables(settings.tables)
        self._estimate_at = settings.refresh if self._tables is None else 0
        self._rank_at = -_LATE  # so that the first victim is ranked for
        self._late = 0  # _LATE, once the host is known to say when requests end
        self._asked = False

    # -- what happens ------------------------------------------------------------------------

    def insert(self, record: NodeRecord) -> None:
        if self._used:
            self._catch_up()
        if not self._nodes and not self._requests:
            self._began = record.last_use
        now, at, tokens, ghosts = record.last_use, record.depth, record.tokens, self._ghosts
        if now > self._now:
            self._now = now
        else:
            now = self._now
        end = at + tokens
        back: list[Piece] = []
        if at:
            # What comes behind a node that was trimmed is, but for rare cases, what was trimmed off.
            parent = record.parent
            before: Place | None = None if parent is None else parent.data
            if parent is not None and before is not None and parent.live_children == 1:
                last = before.pieces[-1]
                if last.end > at:
                    # Trimmed while the request waited, which had used it whole: it was not touched again.
                    self._cut_off(before, [last.cut(at)])
                if before.gone and before.gone[0].start == at:
                    back, before.gone = before.gone, []
        else:
            self._requests += 1
            self._shadow.end_request()
        self._resident += tokens
        pieces: list[Piece] = []
        gone: list[Piece] = []
        name: int | None = None
        while at < end:
            if not back and ghosts.tokens:
                named = record.prefix_hash(at - record.depth)
                if at == record.depth:
                    name = named
                back = ghosts.take(named) or []
            if not back:
                piece = Piece(at, end - at, now, self._classes.open)
                piece.span = self._shadow.use(None, end - at, found=False)
                pieces.append(piece)
                break
            back, behind = split_at(back, end)
            for piece in back:
                self._use(piece, now, 0, found=False)
            pieces += back
            at = back[-1].end
            gone, back = behind, []
        place = record.data = Place(record, pieces if len(pieces) < 2 else join(pieces), gone)
        place.name = name
        self._nodes += 1
        if self._full:
            self._shadow.fit(self._resident)  # LRU would have had to make the same room
        self._marked.append(place)
        place.marked = True

    def use(self, record: NodeRecord) -> None:
        # A match is what a request waits for, so it only notes what it used: see _catch_up.
        used, depth = self._used, record.depth
        used.append((record.data, record.last_use, depth, depth + record.tokens, record.locks))
        if len(used) > _USED:
            self._catch_up()

    def _catch_up(self) -> None:
        """Do what the uses up to now left to be done; whatever else happens, this comes first."""
        used = self._used
        self._used = []
        for place, now, depth, end, locks in used:
            if now > self._now:  # noqa: PLR1730 # max is a call
                self._now = now
            if not depth:
                self._requests += 1
                self._shadow.end_request()
            pieces = place.pieces
            last = pieces[-1]
            if last.start + last.tokens > end:
                self._cut_off(place, [last.cut(end)])
            for piece in pieces:
                self._use(piece, now, locks)
            if last is not pieces[0]:
                place.pieces = join(pieces)
            place.until = 0
            if not place.marked and not place.record.live_children:
                place.marked = True
                self._marked.append(place)

    def _use(self, piece: Piece, now: float, locks: int, *, found: bool = True) -> None:
        """A piece is used: its interval ends. The next one gets its class when the request ends."""
        tokens, run, span, shadow = piece.tokens, piece.run, piece.span, self._shadow
        if found and not piece.locked and span is not None and not span.gone and span is not shadow.oldest:
            span.tokens -= tokens  # LRU has it too: the usual case of shadow.use
            piece.span = shadow.newest
        else:
            value = 1.0 if self._depths == 1 else self._worth.factors[self._depth(piece)]
            released = not piece.locked
            piece.span = shadow.use(span, tokens, found, value, released=released, held=locks > 0)
        piece.locked = True
        if run is None:  # the request before this one has not ended
            group = piece.group
        else:
            if run.into is not None:
                run = run.whole()
            group = run.group if self._depths == 1 else run.group // self._depths
            self._risk[run.slot] -= tokens
            piece.run = None
        self._table.used[group * BINS + bisect_right(ENDS, now - piece.since)] += tokens
        hits = piece.hits
        piece.hits = hits + 1
        piece.since = now
        interval = (now - piece.first) / hits
        number = self._by_uses[hits.bit_length()][bisect_right(SPANS, interval)]
        piece.group = number if number >= 0 else self._classes.reused(hits + 1, interval)

    def refresh(self, record: NodeRecord) -> None:
        if self._used:
            self._catch_up()
        place: Place = record.data
        place.until = self._requests + self._refresh_after
        if not record.live_children:
            place.stamp = 0
            self._mark(place)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        if self._used:
            self._catch_up()
        known: Place = tail.data
        front, known.pieces = split_at(known.pieces, tail.depth)
        place = prefix.data = Place(prefix, front, [])
        place.name, known.name = known.name, None
        place.until = known.until
        self._nodes += 1

    def trim(self, record: NodeRecord, tokens: int) -> None:
        if self._used:
            self._catch_up()
        self._named = None
        self._resident -= tokens
        place: Place = record.data
        pieces, end = place.pieces, record.depth + record.tokens
        if pieces[-1].start >= end:  # another piece is the last one now
            kept, off = split_at(pieces, end)
            place.pieces = kept
            self._cut_off(place, off)
            self._mark(place)

    def _cut_off(self, place: Place, pieces: list[Piece]) -> None:
        place.gone[:0] = pieces
        if len(place.gone) > _GONE:
            self._lose(place.gone[_GONE:])
            del place.gone[_GONE:]

    def remove(self, record: NodeRecord) -> None:
        if self._used:
            self._catch_up()
        self._named = None
        place: Place = record.data
        record.data = None
        place.stamp = 0
        self._nodes -= 1
        self._resident -= record.tokens
        pieces = place.pieces + place.gone
        name = place.name
        if name is None:
            name = record.prefix_hash()
        if name is None:
            self._lose(pieces)
        else:
            last = pieces[-1]
            self._ghosts.keep(name, last.start + last.tokens - pieces[0].start, pieces)
        parent = record.parent
        if parent is not None and parent.is_evictable:
            self._mark(parent.data)

    def _lose(self, pieces: list[Piece]) -> None:
        """Pieces are forgotten; that they were not used up to now is all that is known."""
        for piece in pieces:
            if piece.span is not None:
                self._shadow.forget(piece.span, piece.tokens, released=not piece.locked)
            if piece.run is not None:
                run = piece.run.whole()
                self._risk[run.slot] -= piece.tokens
                at = run.group // self._depths * BINS + age_bin(self._now - piece.since)
                self._table.lost[at] += piece.tokens

    def unlock(self, record: NodeRecord) -> None:
        if not record.live_children:
            self._mark(record.data)

    def defer(self, victim: Victim) -> None:
        self._named = None
        if victim.record.is_evictable:
            self._mark(victim.record.data)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        if self._used:
            self._catch_up()
        self._clock = "seconds" if request.in_seconds else "requests"
        number, classes = request.number, self._classes
        open_class = classes.open
        made = 0
        record = request.end
        while record is not None and record.creator == number and record.data is not None:
            last = record.data.pieces[-1]
            if last.group == open_class:
                made += last.tokens
            record = record.parent
        outcome = classes.outcome(info)
        record = request.end
        while record is not None:
            place: Place | None = record.data
            if place is None:
                break  # the root, or an end that has been evicted
            moved = False
            free = not record.locks
            for piece in place.pieces:
                group = piece.group
                if free and piece.locked:
                    self._release(piece)
                if group == open_class:
                    if record.creator != number:
                        continue  # its own request is still running
                    if piece.run is not None:
                        self._risk[piece.run.whole().slot] -= piece.tokens
                    piece.group = group = classes.fresh(made, outcome)
                elif piece.run is None:
                    group = classes.after(group, outcome)
                else:
                    continue
                self._begin(piece, group)
                moved = True
            if moved and place.stamp:
                self._mark(place)
            record = record.parent
        self._late = _LATE
        if not self._full:
            if len(self._marked) > _MARKED:
                self._settle()
            return
        # Nobody waits for a request that has ended, so what the next victims need is done now.
        self._ghosts.fit()
        self._settle()
        if self._asked and self._requests >= self._estimate_at:
            self._estimate()
        elif self._requests >= self._rank_at:
            self._rank()

    def _release(self, piece: Piece) -> None:
        """No request holds a piece any more: LRU could evict it from now on."""
        piece.locked = False
        span = piece.span
        if span is not None:
            if span.gone:
                piece.span = self._shadow.release(span, piece.tokens)
            else:  # the usual case of shadow.release
                span.tokens += piece.tokens

    def _begin(self, piece: Piece, of_class: int) -> None:
        """The interval since a piece's last use counts for a class from now on.

        Its age is that since the use, as for LRU, not since the request ended, which may take minutes. So
        what begins now may be of any age, and runs are told apart by it.
        """
        queues, now, tokens, table = self._queues, self._now, piece.tokens, self._table
        group = of_class if self._depths == 1 else of_class * self._depths + self._depth(piece)
        since = piece.since
        key: int | tuple[int, int] = group if since == now else (group, age_bin(now - since))
        run = queues.current.get(key)
        if run is None:
            run = queues.current[key] = queues.begin(group, since)
        piece.run, slot = run, run.slot
        if since > self._last[slot]:
            self._last[slot] = since
        elif since < queues.first[slot]:
            queues.first[slot] = since
        self._risk[slot] += tokens
        table.tokens += tokens
        table.squares += tokens * tokens

    def _depth(self, piece: Piece) -> int:
        """How many times √2 as much a token of a piece costs to recompute as the first one."""
        return self._worth.depth(piece.start + piece.tokens // 2)

    def curves(self) -> list[Curve]:
        """What has been learned, class by class, as of the last estimate."""
        self._catch_up()
        table, shares, values = self._table, self._shares, self._worth.table()
        known = 0 if shares is None else len(shares)
        found = []
        for number in range(len(table)):
            row = slice(number * BINS, (number + 1) * BINS)
            reused = math.fsum(table.used[row])
            own = [] if shares is None or number >= known else shares[number].tolist()
            worth = values[number].tolist() if number < len(values) else []
            label = self._classes.label(number)
            found.append(Curve(label, reused + math.fsum(table.lost[row]), reused, own, worth))
        return found

    @property
    def _shares(self) -> NDArray[np.float64] | None:
        """Share used in each bin of age of what was not used before, float64 of shape [classes, BINS]."""
        return None if self._estimated is None else self._estimated.shares().T

    @property
    def time_watched(self) -> float:
        """Time since the first interval began, and what the tables that it started from had watched."""
        return self._now - self._began + self._before

    @property
    def gap(self) -> float:
        """Mean time between its own requests."""
        return (self._now - self._began) / max(1, self._requests)

    def against_lru(self) -> tuple[int, int, int]:
        """Tokens found that LRU would not have found, the reverse, and how often LRU stepped in."""
        self._catch_up()
        return self._shadow.gained, self._shadow.lost, self._shadow.falls

    def explained(self) -> HazardExplained:
        return HazardExplained(self)

    def _mark(self, place: Place) -> None:
        if not place.marked:
            place.marked = True
            self._marked.append(place)

    # -- victims -----------------------------------------------------------------------------

    def next_victim(self, pool: str) -> Victim | None:
        if self._used:
            self._catch_up()
        self._asked = self._full = True
        if self._marked:
            self._settle()
        if self._requests >= self._rank_at + self._late:
            if self._requests >= self._estimate_at:
                self._estimate()
            else:
                self._rank()
        if self._named is not None:
            self._named.stamp = 0  # it was not taken
        place = self._named = self._queues.pop()
        if place is None:
            if not self._wanted:
                return None
            self._let_go(math.inf)  # nothing else is left
            return self.next_victim(pool)
        pieces, record = place.pieces, place.record
        end = None if len(pieces) == 1 else record.end - pieces[-1].start
        return _victim((record, _DELETE, end))

    def _settle(self) -> None:
        """Put what was made, used or freed since the last time into its queue."""
        requests, push = self._requests, self._queues.push
        for place in self._marked:
            place.marked = False
            record = place.record
            if record.live_children or record.locks or record.data is not place:
                continue
            if place.until > requests:
                self._wanted[place] = None
                continue
            for piece in place.pieces:
                if piece.locked:
                    self._release(piece)
                if piece.run is None:
                    self._begin(piece, piece.group)
            run = place.pieces[-1].run
            if run is not None:
                push(run if run.into is None else run.whole(), place)
        self._marked.clear()

    def _let_go(self, requests: float) -> None:
        """What was wanted up to so many requests may go again."""
        for place in [place for place in self._wanted if place.until <= requests]:
            del self._wanted[place]
            place.until = 0
            self._mark(place)

    def _rank(self) -> None:
        if self._wanted:
            self._let_go(self._requests)
        self._shadow.end_span()
        after = min(self._refresh_after, 1 + len(self._queues) // _TICKS)
        self._rank_at = self._requests + after
        # The next victims are not wanted before the next request comes.
        ahead = min(_AHEAD * (1 + after), _FURTHEST)
        self._queues.rank(self._now + ahead * self.gap)

    def _estimate(self) -> None:
        import numpy as np

        requests, after = self._requests, self._refresh_after
        self._estimate_at = requests + min(max(after, requests // _SLOWER), _SLOWEST * after)
        self._asked = False
        self._settle()
        if self._tables is not None:
            if self._clock is None:
                self._estimate_at = requests + 1
            else:
                self._before += self._tables.start(self._table, self._classes, self._clock)
                self._tables = None
        if self._memory < 1.0:
            self._table.fade(self._memory)
        if self._shadow.judge() and self._shadow.behind:
            self._table.fade(_DOUBT)
        self._worth.behind = self._shadow.behind
        queues, now = self._queues, self._now
        queues.sweep(self._nodes)
        groups, ages, risks = queues.merge(now)
        classes = len(self._table)
        at = np.clip(np.searchsorted(edges(), ages, side="right") - 1, 0, BINS - 1)
        at = at * classes + groups // self._depths
        living = added(at, risks, (BINS, classes))
        watched = self.time_watched
        self._estimated = self._table.estimate(living, watched)
        self._worth.learn(self._estimated, groups // self._depths, 2.0 * watched)
        self._rank()
