"""Judge: decides, by a sequential test on the shadow's account, when LRU steps in and when it steps back."""

from __future__ import annotations

import logging
import math
from typing import Final

__all__ = ["Judge"]

logger = logging.getLogger("costcache")

_STRETCH: Final = 10_000
"""Requests for which the chance of a false step-in is stated."""
_HIGH: Final = 0.6
"""The higher of two stakes, as a share of the most that may be lost on a request of mean length."""
_LOW: Final = 0.1
"""The lower one, for small and steady losses."""
_TOLERANCE: Final = 0.003
"""Share of the tokens asked for that the policy may be behind without any consequence."""
_LEAST: Final = 50
"""Requests for which LRU is in force at least."""


class Judge:
    """Says whether LRU is ahead, on the differences in hits, request by request.

    The hypothesis is that the policy is not behind by more than a tolerance, whatever came before: that, for
    each request, the tokens that LRU is expected to find beyond the policy are at most a small share of its
    prompt. Against it, stakes are bet on each request. The money is multiplied by a factor that is 1 on
    average at most if the hypothesis holds, so that it seldom grows large. A bettor begins at each request,
    so that old evidence, for or against, does not delay the verdict after a change; the money of all of them
    is one number for each stake. If the hypothesis holds, it is ``n`` on average, at most, after ``n``
    requests. So it ever exceeds ``10,000 / doubt`` within the first 10,000 with a chance of ``doubt`` at
    most, whenever one looks. That is when LRU steps in.

    LRU finds then what it finds, so nobody can tell what the policy would have found. It is in force as long
    as it took to prove it ahead: a trial of the policy costs no more than as long a stretch as before. Each
    further time it is in force twice as long, and half as long again once the policy has held its own for
    that long.

    Sources: the bets are those of I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random
    variables by betting", JRSS B 2024. That a new bettor begins at each step is the e-detector of J. Shin, A.
    Ramdas and A. Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", NEJSDS
    2023, in the form of Shiryaev and Roberts.

    Attributes:
        behind: LRU should be in force now.
        falls: How often that became so.
        since: Count of requests at which it became so, or ceased to be so; 0 if it never was.
        until: Count of requests up to which LRU is in force.
        requests: Requests so far.
        run: Requests over which LRU was ahead, as of the last step-in.
        regret: Tokens, by worth, that LRU found more in them.
        turned: Whether ``behind`` has changed since this was last set to False.
    """

    def __init__(self, doubt: float) -> None:
        """Begin without evidence.

        Args:
            doubt: Chance, at most, of a false step-in within 10,000 requests.
        """
        self.behind = False
        self.falls = 0
        self.since = self.until = 0
        self.requests = 0
        self.run = 0
        self.regret = 0.0
        self.turned = False
        self._limit = 2 * _STRETCH / doubt
        self._asked = 0.0  # tokens, of all requests
        self._high = self._low = 0.0  # money
        self._total = self._lowest = 0.0  # regret since the last verdict, beyond the tolerance
        self._lowest_at = 0
        self._doublings = 0
        self._holds = 0  # count of requests at which a doubling is taken back

    @property
    def evidence(self) -> float:
        """Evidence that LRU is ahead, as a share of what makes it step in."""
        return (self._high + self._low) / self._limit

    def add(self, regret: float, asked: float) -> None:
        """Account for a request.

        Args:
            regret: Tokens that LRU would have found beyond the policy, by worth; from -asked to asked.
            asked: Tokens of its prompt, by worth.
        """
        self.requests += 1
        if not asked:
            return
        self._asked += asked
        if self.behind:
            if self.requests >= self.until:
                self._step_back()
            return
        if regret > asked:
            regret = asked  # of several requests that overlap
        elif regret < -asked:
            regret = -asked
        excess = regret - _TOLERANCE * asked
        self._total = total = self._total + excess
        if total <= self._lowest:
            self._lowest, self._lowest_at = total, self.requests
        # A longer prompt than usual is bet on as if it were a usual one that is lost or found as a whole.
        usual = self._asked / self.requests
        excess /= usual if usual > asked else asked
        self._high = high = (1.0 + self._high) * (1.0 + _HIGH * excess)
        self._low = low = (1.0 + self._low) * (1.0 + _LOW * excess)
        if high + low > self._limit:
            self._step_in()
        elif self._doublings and self.requests >= self._holds:
            self._doublings -= 1
            self._holds = self.requests + self._pause()

    def _pause(self) -> int:
        return int(max(self.run, _LEAST) * math.ldexp(1.0, self._doublings))

    def _step_in(self) -> None:
        self.behind = self.turned = True
        self.falls += 1
        self.since = self.requests
        self.run = self.requests - self._lowest_at
        self.regret = self._total - self._lowest
        pause = self._pause()
        self.until = self.requests + pause
        self._doublings += 1
        logger.info(
            "hazard: LRU steps in after request %d, for %d more: it was ahead by %.0f tokens in the last %d",
            self.requests,
            pause,
            self.regret,
            self.run,
        )

    def _step_back(self) -> None:
        self.behind = False
        self.turned = True
        self.since = self.requests
        self._holds = self.requests + self._pause()
        self._high = self._low = 0.0  # money
        self._total = self._lowest = 0.0
        self._lowest_at = self.requests
        logger.info("hazard: LRU steps back after request %d: hazard is in force again", self.requests)
