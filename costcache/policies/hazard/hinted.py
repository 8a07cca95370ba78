"""Decides how far hints are believed: as far as they foretold reuse better than doing without them.

Tokens of requests with a hint have a class of their own, beside the *plain* class that they would be in
without it. Both have a survival curve: that of the plain class is learned from all of its tokens, with hints
and without; that of the hinted class is shrunk to it. At each estimate, both curves of the last estimate are
scored by what has happened since. The weight of a hint is that of its curve in a mixture of the two.

So what a hint says does not matter, only whether those who give it behave alike: a hint that means nothing
is not used, one that means the contrary of what it says is used for what it means.

Sources: A. P. Dawid, "Statistical theory: the prequential approach", JRSS A 1984, for the score; M. Herbster
and M. K. Warmuth, "Tracking the best expert", Machine Learning 1998, for the weights, of which a share
always goes back, so that they follow a change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.policies.hazard.survival import at_risk_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Trust"]

_START = 0.05
"""Weight of a hint of which nothing is known."""
_RESTART = 0.05
"""Share of a weight that goes back to that before each score: what was true may have changed."""


class Trust:
    """Weights of hints, by the scores of their curves."""

    def __init__(self) -> None:
        self._weights: NDArray[np.float64] | None = None
        self._curves: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self._counts: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]] | None = None

    def fade(self, share: float) -> None:
        """Keep a share of the counts of the past, as the table does."""
        if self._counts is not None:
            used, censored, living = self._counts
            self._counts = used * share, censored * share, living

    def score(
        self,
        used: NDArray[np.float64],
        censored: NDArray[np.float64],
        living: NDArray[np.float64],
        hints: NDArray[np.int64],
        interval: float,
    ) -> NDArray[np.float64]:
        """Score the last curves by what has happened since.

        Args:
            used: Tokens used again, by bin and hinted class; float64 of shape [bins, classes].
            censored: Tokens forgotten unused, likewise.
            living: Tokens unused so far, by their age now, likewise.
            hints: The hint of each class, int64 of shape [classes].
            interval: Tokens of a typical interval, which share their fate.

        Returns:
            The weight of each hint, float64 of shape [hints].
        """
        import numpy as np

        count = int(hints.max()) + 1
        weights = np.full(count, _START)
        if self._weights is not None:
            weights[: len(self._weights)] = self._weights
        if self._curves is not None and self._counts is not None:
            own, plain = self._curves
            used_then, censored_then, living_then = self._counts
            known = own.shape[1]
            before = at_risk_of(used_then, censored_then + living_then)
            at_risk = at_risk_of(used, censored + living)[:, :known]
            uses = np.maximum(used[:, :known] - used_then, 0.0)
            others = np.maximum(at_risk - before - uses, 0.0)
            gains = (uses * np.log(own / plain) + others * np.log((1.0 - own) / (1.0 - plain))).sum(axis=0)
            weights = _RESTART * _START + (1.0 - _RESTART) * weights
            odds = np.log(weights / (1.0 - weights)) + np.bincount(hints[:known], gains / interval, count)
            weights = 1.0 / (1.0 + np.exp(-np.clip(odds, -12.0, 12.0)))
        self._weights, self._counts = weights, (used, censored, living)
        return weights

    def keep(self, own: NDArray[np.float64], plain: NDArray[np.float64]) -> None:
        """Keep the curves of the hinted classes, to be scored at the next estimate."""
        import numpy as np

        least, most = 1e-9, 1.0 - 1e-9
        self._curves = np.clip(own, least, most), np.clip(plain, least, most)
