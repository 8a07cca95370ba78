"""Prior: how soon tokens are used again in workloads at large, for a cache that has seen little of its own.

The prior is a file beside this module, made by ``benchmarks/make_prior.py`` from replays of many workloads.
For each family of classes (tokens used once, twice, 3 or 4 times and so on) it holds the shares used by bin
of age, in two units that carry over from one deployment to another: the pool's *turnover*, the time in which
it first filled, and the mean interval of the tokens themselves.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from costcache.policies.hazard.bins import BINS, age_bin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FILE", "Curve", "Prior", "shipped_prior"]

FILE = Path(__file__).with_name("prior.json")
"""The prior that comes with the package."""

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class Curve(BaseModel):
    """Shares used in each bin, of what survived up to it; constant beyond both ends.

    Attributes:
        first: Number of the first bin; bin 0 begins at one unit, and each is √2 times as wide as the last.
        shares: The shares.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int
    shares: list[Share] = Field(min_length=1)

    def at(self, bins: range) -> list[float]:
        """Shares in some bins."""
        last = len(self.shares) - 1
        return [self.shares[min(max(number - self.first, 0), last)] for number in bins]


class Prior(BaseModel):
    """Shares by family of classes.

    Attributes:
        by_turnover: For each family, its curve in units of the pool's turnover.
        by_interval: For each family, its curve in units of the tokens' mean reuse interval; that of tokens
            used once is not used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    by_turnover: list[Curve]
    by_interval: list[Curve]

    def by_age(self, turnover: float) -> NDArray[np.float64]:
        """Shares by bin of age, float64 of shape [BINS, families].

        Args:
            turnover: Time in which the pool filled, in units of the clock.
        """
        import numpy as np

        begin = -age_bin(turnover)
        return np.array([curve.at(range(begin, begin + BINS)) for curve in self.by_turnover]).T

    def by_scale(self) -> NDArray[np.float64]:
        """Shares by bin of age in units of the mean interval, float64 of shape [2 * BINS, families]."""
        import numpy as np

        return np.array([curve.at(range(-BINS, BINS)) for curve in self.by_interval]).T

    def text(self) -> str:
        """The file's text, a line to a curve."""
        parts = (
            f'"{name}": [\n  ' + ",\n  ".join(json.dumps(each.model_dump()) for each in curves) + "\n]"
            for name, curves in (("by_turnover", self.by_turnover), ("by_interval", self.by_interval))
        )
        return "{" + ",\n".join(parts) + "}\n"


@cache
def shipped_prior() -> Prior:
    """The prior that comes with the package."""
    return Prior.model_validate(json.loads(FILE.read_text()))
