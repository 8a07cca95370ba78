"""Life table: reuse intervals by class and age, and the share used at each age that follows from them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from costcache.policies.hazard.bins import BINS, age_bin, bincount_2d, edges
from costcache.policies.hazard.hinted import Trust
from costcache.policies.hazard.survival import at_risk_of, shrink_to_prior, survival

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ALL", "Estimate", "LifeTable"]

ALL: Final = -1
"""In place of a family: all classes."""
_SMOOTHINGS: Final = 2
_ONE_STRETCH: Final = 20.0
"""Factor by which a prior weighs more at an age as long as the time watched."""
_OF_HINT: Final = 1 / 3
"""Weight of the plain class's curve in that of a hinted one, which is believed by its score besides."""
_MOST_SHARE: Final = 0.9
"""Share that is expected at most."""


class LifeTable:
    """Tokens that were used again and tokens that were censored, by class and age.

    A class is shrunk to its family. A family is shrunk to what a prior expects of it, given the family before
    it. Without a prior it is shrunk to the family that it is most like or to all classes, and those to a
    share that is the same in each bin; since the width of bins doubles every second one, that share makes
    tokens the less likely to be used the older they are, and the table starts as LRU. A class of tokens used
    often has a time scale too, its mean reuse interval; it is shrunk as much to its family's curve in units
    of that scale.

    Attributes:
        used: Tokens that were used again, by class and bin, ``BINS`` to a class.
        censored: Tokens that were forgotten unused, likewise.
        tokens: Tokens of all intervals.
        squares: The same, the tokens of each interval squared.
    """

    def __init__(self, families: Sequence[int], strength: float, share: float) -> None:
        """Start without classes.

        Args:
            families: Of classes: for each the one before it that it is most like, :data:`ALL` for none.
            strength: Intervals of mean size that a prior weighs.
            share: Share of uses that are followed by another in each bin, before anything is seen.
        """
        self.used = array("d")
        self.censored = array("d")
        self._family: list[int] = []
        self._scale: list[float] = []
        self._families = tuple(families)
        self._strength = strength
        self._share = share
        self.tokens = 0.0
        self.squares = 0.0
        self._kinship: _Kinship | None = None
        self._plain: dict[int, tuple[int, int]] = {}
        self._trust = Trust()

    def __len__(self) -> int:
        """Number of classes."""
        return len(self._family)

    def add_class(self, family: int, scale: float = 0.0) -> int:
        """Add a class to a family, with the mean interval of its members if it has one; return its number."""
        self.used.extend([0.0] * BINS)
        self.censored.extend([0.0] * BINS)
        self._family.append(family)
        self._scale.append(scale)
        return len(self._family) - 1

    def add_hinted(self, plain: int, hint: int) -> int:
        """Add a class of those members of a plain class that came with a hint; return its number.

        Args:
            plain: Number of the plain class.
            hint: Number of the hint.
        """
        number = self.add_class(*self.kin(plain))
        self._plain[number] = plain, hint
        return number

    def kin(self, number: int) -> tuple[int, float]:
        """Family and scale of a class."""
        return self._family[number], self._scale[number]

    def interval(self, tokens: int) -> None:
        """Count an interval of ``tokens`` tokens that begins."""
        self.tokens += tokens
        self.squares += tokens * tokens

    def fade(self, share: float) -> None:
        """Keep a share of everything seen so far."""
        self.used = array("d", [value * share for value in self.used])
        self.censored = array("d", [value * share for value in self.censored])
        self.tokens *= share
        self.squares *= share
        self._trust.fade(share)

    def estimate(
        self,
        living: NDArray[np.float64],
        watched: float,
        expected: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
    ) -> Estimate:
        """Estimate survival from what was seen up to now.

        Args:
            living: Tokens of each class whose age is in each bin now, unused so far, float64 of shape
                [BINS, classes].
            watched: Time since the first interval began. An age that is not small beside it was seen in one
                stretch of the past only, and tells less than the count of tokens suggests.
            expected: Shares of each family before anything is seen, by bin of age, float64 of shape [BINS,
                families], and by bin of age in units of the scale, [2 * BINS, families]; None for a share
                that is the same everywhere.
        """
        import numpy as np

        if self._kinship is None or len(self._kinship.family) != len(self):
            self._kinship = _Kinship(self._family, self._scale, self._families)
        used = np.array(np.asarray(self.used).reshape(-1, BINS).T, order="C")
        forgotten = np.asarray(self.censored).reshape(-1, BINS).T
        censored = forgotten + living
        # Tokens of a node share their fate: many small intervals tell more than a few large ones.
        interval = self.squares / self.tokens if self.tokens else 1.0
        once = self._strength * interval
        doubt = 1.0 + np.minimum(_ONE_STRETCH * edges()[:-1] / max(watched, 1e-9), 1e6)
        weight = (once * doubt)[:, None]
        estimate = Estimate(used, censored, self._kinship, self._share, once, weight, expected)
        if self._plain:
            hinted = np.array(list(self._plain), np.int64)
            plain, hints = np.array(list(self._plain.values()), np.int64).T
            weights = self._trust.score(
                used[:, hinted], forgotten[:, hinted], living[:, hinted], hints, interval
            )
            estimate.hint(hinted, plain, weights[hints])
            self._trust.keep(*estimate.curves(hinted))
        return estimate

    def shares(self, living: NDArray[np.float64], watched: float) -> NDArray[np.float64]:
        """Share used in each bin of what survived up to it, of each class.

        Arguments as for :meth:`estimate`; float64 of the shape of ``living``.
        """
        return self.estimate(living, watched).shares()


class Estimate:
    """Estimate of a table at one time, worked out for the classes that are asked for."""

    def __init__(
        self,
        used: NDArray[np.float64],
        censored: NDArray[np.float64],
        kin: _Kinship,
        share: float,
        once: float,
        weight: NDArray[np.float64],
        expected: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
    ) -> None:
        self._used, self._censored, self._kin, self._weight = used, censored, kin, weight
        used_by = kin.by_family(used)
        at_risk = at_risk_of(used_by, kin.by_family(censored))
        used_scaled = kin.by_scale(used)
        at_risk_scaled = at_risk_of(used_scaled, kin.by_scale(censored))
        if expected is None:
            of_all = shrink_to_prior(used_by[:, -1:], at_risk[:, -1:], share, weight)
            self._by_family = _by_kinship(kin.families, used_by, at_risk, of_all, weight)
            self._by_scale = _by_kinship(kin.families, used_scaled, at_risk_scaled, share, once)
        else:
            self._by_family = _by_prior(used_by, at_risk, expected[0], weight)
            self._by_scale = _by_prior(used_scaled, at_risk_scaled, expected[1], once)
        self._pooled: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self._of: NDArray[np.int64] = kin.family
        self._trusted: NDArray[np.float64] = used[0]

    def hint(self, hinted: NDArray[np.int64], plain: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Mix the curves of hinted classes with those of their plain classes.

        Args:
            hinted: Numbers of the hinted classes, int64.
            plain: Number of the plain class of each.
            weights: Weight of the hinted class's own curve, of each.
        """
        import numpy as np

        of = self._of = np.arange(len(self))
        of[hinted] = plain
        cells = (np.arange(BINS)[:, None] * len(self) + of).ravel()
        shape = BINS, len(self)
        self._pooled = (
            bincount_2d(cells, self._used.ravel(), shape),
            bincount_2d(cells, self._censored.ravel(), shape),
        )
        self._trusted = np.zeros(len(self))
        self._trusted[hinted] = weights

    def __len__(self) -> int:
        """Number of classes."""
        return len(self._kin.family)

    def shares(self, classes: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Share used in each bin of what survived up to it.

        Args:
            classes: Numbers of the classes, int64; all by default.

        Returns:
            Float64 of shape [BINS, classes].
        """
        import numpy as np

        if classes is None:
            classes = np.arange(len(self))
        if self._pooled is None:
            return self._shares(self._used[:, classes], self._censored[:, classes], self._prior(classes))
        own, plain = self.curves(classes)
        trusted = self._trusted[classes]
        return own * trusted + plain * (1.0 - trusted)

    def curves(self, classes: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Shares of classes by their own counts alone, and those of their plain classes, their own if plain.

        Args:
            classes: Numbers of the classes, int64; the estimate has hinted ones.
        """
        used, censored = (self._used, self._censored) if self._pooled is None else self._pooled
        of = self._of[classes]
        plain = self._shares(used[:, of], censored[:, of], self._prior(classes))
        weight = self._weight * _OF_HINT
        own = survival(self._used[:, classes], self._censored[:, classes], plain, weight, _SMOOTHINGS)
        return own, plain

    def _prior(self, classes: NDArray[np.int64]) -> NDArray[np.float64]:
        import numpy as np

        kin = self._kin
        prior = self._by_family[:, kin.family[classes]]
        both = np.sqrt(prior * self._by_scale.take(kin.at[:, classes]))
        return np.where(kin.is_scaled[classes], both, prior)

    def _shares(
        self, used: NDArray[np.float64], censored: NDArray[np.float64], prior: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return survival(used, censored, prior, self._weight, _SMOOTHINGS)


class _Kinship:
    """Families and scales of the classes of a table, as arrays.

    Attributes:
        families: For each family the one that it is most like.
        family: Family of each class, int64 of shape [classes].
        is_scaled: Whether a class has a time scale, bool of shape [classes].
        at: For each bin of each class, its position in a curve of its family in units of the scale, as an
            index of an array of shape [2 * BINS, families]; int64 of shape [BINS, classes]. Bin j of a
            scaled curve lies j - BINS bins after that of the scale. Meaningless for classes without a scale.
    """

    def __init__(self, family: list[int], scale: list[float], families: tuple[int, ...]) -> None:
        import numpy as np

        self.families = families
        self.family = np.array(family, np.int64)
        self._at_family = (np.arange(BINS)[:, None] * (len(families) + 1) + self.family).ravel()
        self.is_scaled = np.array(scale) > 0.0
        shift = np.array([age_bin(own) for own in scale], np.int64)
        self.at = (np.arange(BINS)[:, None] - shift + BINS) * len(families) + self.family
        self._scaled = np.flatnonzero(self.is_scaled)
        self._at_scaled = self.at[:, self._scaled].ravel()
        self._shape = 2 * BINS, len(families)

    def by_family(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens by bin and family, and in one more column those of all, from those by bin and class.

        Summed in the order of the classes, and so to the same sum on every machine; a matrix product would
        not be, and would start threads.
        """
        found = bincount_2d(self._at_family, tokens.ravel(), (BINS, self._shape[1] + 1))
        found.sum(axis=1, out=found[:, -1])
        return found

    def by_scale(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens by bin of age in units of the scale and by family, from those by bin and class."""
        return bincount_2d(self._at_scaled, tokens[:, self._scaled].ravel(), self._shape)


def _by_kinship(
    families: tuple[int, ...],
    used: NDArray[np.float64],
    at_risk: NDArray[np.float64],
    prior: NDArray[np.float64] | float,
    weight: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Shares of families, each shrunk to those of the family that it is most like, or else to a prior."""
    shares = shrink_to_prior(used, at_risk, prior, weight)
    for number, like in enumerate(families):
        if like != ALL:
            own, its = slice(number, number + 1), slice(like, like + 1)
            shares[:, own] = shrink_to_prior(used[:, own], at_risk[:, own], shares[:, its], weight)
    return shares


def _by_prior(
    used: NDArray[np.float64],
    at_risk: NDArray[np.float64],
    expected: NDArray[np.float64],
    weight: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Shares of families, each expected to differ from the family before it as it does elsewhere.

    What is learned of tokens used seldom so moves what is expected of those used more often, of which less
    has been seen.
    """
    import numpy as np

    shares = np.empty_like(expected)
    prior = expected[:, :1]
    for number in range(expected.shape[1]):
        own = slice(number, number + 1)
        if number:
            ratio = expected[:, own] / expected[:, number - 1 : number]
            prior = np.minimum(shares[:, number - 1 : number] * ratio, _MOST_SHARE)
        shares[:, own] = shrink_to_prior(used[:, own], at_risk[:, own], prior, weight)
    return shares
