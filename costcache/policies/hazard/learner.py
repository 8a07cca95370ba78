"""Learns how long tokens of each class wait for their next use.

A *reuse interval* begins with a use of tokens, and ends with the next one. It may end while the tokens are
cached or after they were evicted, as long as they are remembered; tokens that are forgotten are *censored*:
that they were not used up to then is all that is known.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, Literal

from costcache.policies.hazard.bins import BINS, ENDS, age_bin, bincount_2d, edges
from costcache.policies.hazard.classes import FAMILIES, SPANS, Classes
from costcache.policies.hazard.cohorts import Cohorts
from costcache.policies.hazard.depths import Depths
from costcache.policies.hazard.history import Piece, Tracked
from costcache.policies.hazard.judge import Judge
from costcache.policies.hazard.life_table import Estimate, LifeTable
from costcache.policies.hazard.prior import Prior
from costcache.policies.hazard.shadow import ShadowLRU
from costcache.policies.hazard.tables import Tables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Learner"]

_SHARE: Final = 0.02
"""Share of uses that are followed by another in each bin of age, before anything is seen."""


class Learner:
    """Closed intervals by class and age, open ones in cohorts, and what LRU would have found.

    Attributes:
        table: Intervals that ended, and those that were censored.
        classes: The classes.
        cohorts: Intervals that are open.
        shadow: LRU of the same size, which sees the same requests.
        judge: Says whether that is ahead.
        depths: Ranges of depth that are told apart.
        estimated: The last estimate; None before the first one.
        tables: Tables of another run to start from; None where there are none, or they have been added.
        prior: What other workloads have in common; None to start as LRU.
        watched_before: Time over which the tables were learned that it started from.
    """

    def __init__(
        self,
        depths: Depths,
        strength: float,
        memory: float,
        doubt: float,
        tables: Tables | None = None,
        prior: Prior | None = None,
    ) -> None:
        """Start without intervals.

        Args:
            depths: Ranges of depth to tell apart.
            strength: Intervals of mean size that outweigh what is expected of similar classes.
            memory: Share of what was learned that an estimate leaves to the next one.
            doubt: Chance, at most, of a false step-in of LRU within 10,000 requests.
            tables: Tables of another run to start from.
            prior: What is expected until enough has been seen; None for what makes it start as LRU.
        """
        self.table = LifeTable(FAMILIES, strength, _SHARE)
        self.classes = Classes(self.table)
        self.cohorts = Cohorts()
        self.shadow = ShadowLRU()
        self.judge = Judge(doubt)
        self.depths = depths
        self.estimated: Estimate | None = None
        self.tables = tables
        self.prior = prior
        self.watched_before = 0.0
        self._expected: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self._memory = memory
        self._forgotten = 0.0  # requests whose weight in the table is gone
        # Read for each use: one look-up instead of two.
        self._depths = depths.count
        self._by_uses = self.classes.by_uses
        self._at_risk, self._first, self._last = self.cohorts.at_risk, self.cohorts.first, self.cohorts.last

    # -- intervals ---------------------------------------------------------------------------

    def end(self, piece: Piece, now: float) -> None:
        """End a piece's interval with a use. The next one gets its class when the request ends.

        Args:
            piece: The piece.
            now: Time of the use.
        """
        tokens, cohort = piece.tokens, piece.cohort
        if cohort is None:  # the request before this one has not ended
            group = piece.group
        else:
            if cohort.into is not None:
                cohort = cohort.whole()
            group = cohort.stratum if self._depths == 1 else cohort.stratum // self._depths
            self._at_risk[cohort.slot] -= tokens
            piece.cohort = None
        self.table.used[group * BINS + bisect_right(ENDS, now - piece.last_use)] += tokens
        uses = piece.uses
        piece.uses = uses + 1
        piece.last_use = now
        interval = (now - piece.first_use) / uses
        number = self._by_uses[uses.bit_length()][bisect_right(SPANS, interval)]
        piece.group = number if number >= 0 else self.classes.reused(uses + 1, interval)

    def begin(self, piece: Piece, group: int, now: float) -> None:
        """Count the interval since a piece's last use for a class from now on.

        Its age is that since the use, as for LRU, not since the request ended, which may take minutes. So an
        interval may be of any age when it begins to count, and cohorts are told apart by it.
        """
        cohorts, tokens, table = self.cohorts, piece.tokens, self.table
        stratum = group if self._depths == 1 else group * self._depths + self._depth(piece)
        last_use = piece.last_use
        key: int | tuple[int, int] = stratum if last_use == now else (stratum, age_bin(now - last_use))
        cohort = cohorts.current.get(key)
        if cohort is None:
            cohort = cohorts.current[key] = cohorts.begin(stratum, last_use)
            self._at_risk[cohort.slot] = tokens
        else:
            slot = cohort.slot
            if last_use > self._last[slot]:
                self._last[slot] = last_use
            elif last_use < self._first[slot]:
                self._first[slot] = last_use
            self._at_risk[slot] += tokens
        piece.cohort = cohort
        table.tokens += tokens
        table.squares += tokens * tokens

    def withdraw(self, piece: Piece) -> None:
        """Take an open interval back, which began to count before its request had ended."""
        if piece.cohort is not None:
            self._at_risk[piece.cohort.whole().slot] -= piece.tokens

    def censor(self, pieces: list[Piece], now: float) -> None:
        """Forget pieces, whose intervals are censored."""
        for piece in pieces:
            if piece.cohort is not None:
                cohort = piece.cohort.whole()
                self._at_risk[cohort.slot] -= piece.tokens
                at = cohort.stratum // self._depths * BINS + age_bin(now - piece.last_use)
                self.table.censored[at] += piece.tokens

    # -- against LRU -------------------------------------------------------------------------

    def _forget(self, watched: float) -> None:
        """Let what was learned before LRU got ahead weigh no more than twice what was learned since.

        Args:
            watched: Time over which all was learned, that of the tables included.
        """
        judge = self.judge
        own = max(watched - self.watched_before, 1e-9)
        learned = judge.requests * watched / own - self._forgotten  # those of the tables too
        kept = min(1.0, 2.0 * judge.run / max(1.0, learned))
        self.table.fade(kept)
        self._forgotten += (1.0 - kept) * learned

    def found(self, piece: Piece) -> None:
        """A request found a piece of which LRU does not hold all."""
        self.shadow.use(piece, 1.0 if self._depths == 1 else self.depths.factors[self._depth(piece)])

    def missed(self, tracked: Tracked, held: int) -> None:
        """A request made a node, of which LRU holds the first ``held`` tokens."""
        shadow, depths = self.shadow, self.depths
        shadow.lost += held
        value = 1.0 if self._depths == 1 else depths.factors[depths.of(tracked.record.depth + held // 2)]
        shadow.behind_by += held * value

    def end_request(self) -> None:
        """Close the account of a request: what follows is another one's."""
        shadow = self.shadow
        asked = float(shadow.newest.high)
        if self._depths > 1:
            asked *= self.depths.factors[self.depths.of(shadow.newest.high)]
        self.judge.add(shadow.behind_by, asked)
        shadow.behind_by = 0.0

    def _depth(self, piece: Piece) -> int:
        """Range of depth of a piece."""
        return self.depths.of(piece.start + piece.tokens // 2)

    def group_of(self, piece: Piece) -> int:
        """Class for which a piece's interval counts, or would count if its request ended now."""
        return piece.group if piece.cohort is None else piece.cohort.whole().stratum // self._depths

    # -- estimates ---------------------------------------------------------------------------

    def start(self, clock: Literal["requests", "seconds"]) -> None:
        """Add the tables to start from, if there are any, on a clock that counts requests or seconds."""
        if self.tables is not None:
            self.watched_before += self.tables.start(self.table, self.classes, clock)
            self.tables = None

    def filled(self, turnover: float) -> bool:
        """Begin to expect what the prior says, now that it is known how fast the pool turns over.

        Args:
            turnover: Time in which the pool filled for the first time.

        Returns:
            Whether there is anything to expect.
        """
        if self.prior is None or turnover <= 0.0:
            return False
        self._expected = self.prior.by_age(turnover), self.prior.by_scale()
        return True

    def estimate(self, now: float, watched: float) -> tuple[Estimate, NDArray[np.int64]]:
        """Estimate survival.

        Args:
            now: The time.
            watched: Time since the first interval began, that of the tables included.

        Returns:
            The estimate, and the classes of which there are open intervals.
        """
        import numpy as np

        if self._memory < 1.0:
            self.table.fade(self._memory)
        judge = self.judge
        if judge.turned:
            judge.turned = False
            if judge.behind:
                self._forget(watched)
                self._expected = None  # with less evidence it would weigh more again, and may be what misled
        strata, ages, at_risk = self.cohorts.merge(now)
        present = strata // self._depths
        count = len(self.table)
        at = np.clip(np.searchsorted(edges(), ages, side="right") - 1, 0, BINS - 1)
        living = bincount_2d(at * count + present, at_risk, (BINS, count))
        self.estimated = self.table.estimate(living, watched, self._expected)
        return self.estimated, present
