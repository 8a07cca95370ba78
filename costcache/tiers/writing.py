"""What is copied to a slower tier, and what is loaded back: three classic policies, and one by cost.

A *move* is a run of tokens between two neighbouring tiers with the facts that a decision needs. The decisions
are functions of these facts alone.

Sources: write-through, write-back and selective write-through are those of SGLang's hierarchical cache
(0.5.23, ``--hicache-write-policy``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from costcache.errors import SettingsError

__all__ = ["WRITINGS", "ByCost", "Move", "WriteBack", "WriteThrough", "Writing", "make_writing"]

_SELECTIVE_USES = 2


class Move(NamedTuple):
    """A run of tokens, and what it takes to have it one tier down.

    The bytes of a state are all or nothing: a run that ends with one has its bytes in ``size`` and the tokens
    before it that its loss would make recomputed in ``recompute``.

    Attributes:
        tokens: Tokens of the run.
        size: Bytes that one rank moves.
        uses: Requests that used it, the one that made it included.
        recompute: Seconds to compute its tokens at their depth, attention included.
        reload: Seconds to load it back, the queue on the link included.
        chance: Chance that it is used again while the tier below would keep it.
        write: Seconds for which the write would occupy the link or keep an eviction waiting.
        displaced: Seconds that what it displaces in the tier below would be expected to save; 0 while that
            tier has room.
    """

    tokens: int
    size: int
    uses: int
    recompute: float
    reload: float
    chance: float = 1.0
    write: float = 0.0
    displaced: float = 0.0

    @property
    def saves(self) -> float:
        """Seconds that a load saves; 0 if it takes longer than to compute the tokens."""
        return max(0.0, self.recompute - self.reload)

    @property
    def worth(self) -> float:
        """Seconds that a copy in the tier below is expected to save."""
        return self.chance * self.saves


class Writing(Protocol):
    """A policy of writing; all answers are pure."""

    @property
    def name(self) -> str:
        """Its name."""

    def copies(self, move: Move) -> bool:
        """Whether to copy a run down now, after it was made or used, while it stays where it is."""

    def demotes(self, move: Move) -> bool:
        """Whether to copy a run down before it is evicted, if it is not there; else it is dropped."""

    def loads(self, move: Move) -> bool:
        """Whether to load a matched run; else it is computed again."""


class WriteThrough:
    """Copies every run that has been used so many times, and drops the others when they are evicted."""

    def __init__(self, uses: int = 1) -> None:
        """Copy at the ``uses``-th use; the request that makes a run is the first."""
        if uses < 1:
            raise SettingsError(f"uses is {uses}: give 1 or more")
        self.uses = uses

    @property
    def name(self) -> str:
        """``write_through``, or ``write_through_selective`` from the second use on."""
        return "write_through" if self.uses == 1 else "write_through_selective"

    def copies(self, move: Move) -> bool:
        """True once it has been used often enough."""
        return move.uses >= self.uses

    def demotes(self, move: Move) -> bool:  # noqa: ARG002 # as the protocol says
        """False: what was worth a copy has one."""
        return False

    def loads(self, move: Move) -> bool:  # noqa: ARG002 # as the protocol says
        """True: what is there is loaded."""
        return True


class WriteBack:
    """Copies a run when it is evicted."""

    name = "write_back"

    def copies(self, move: Move) -> bool:  # noqa: ARG002 # as the protocol says
        """False."""
        return False

    def demotes(self, move: Move) -> bool:  # noqa: ARG002 # as the protocol says
        """True."""
        return True

    def loads(self, move: Move) -> bool:  # noqa: ARG002 # as the protocol says
        """True: what is there is loaded."""
        return True


class ByCost:
    """Moves what saves more seconds than it costs, by the chance that it is used again.

    A copy is worth its chance of reuse times the seconds that a load saves over computing the tokens anew. It
    is made if that exceeds the seconds for which the write is in the way, and what it displaces.
    """

    name = "by_cost"

    def copies(self, move: Move) -> bool:
        """True if a copy is worth it."""
        return move.worth > move.write + move.displaced

    def demotes(self, move: Move) -> bool:
        """True if a copy is worth it, now that the eviction waits for it."""
        return move.worth > move.write + move.displaced

    def loads(self, move: Move) -> bool:
        """True if a load is faster than to compute the tokens."""
        return move.saves > 0.0


WRITINGS: dict[str, Callable[[], Writing]] = {
    "by_cost": ByCost,
    "write_back": WriteBack,
    "write_through": WriteThrough,
    "write_through_selective": lambda: WriteThrough(_SELECTIVE_USES),
}
"""The policies by name."""


def make_writing(name: str) -> Writing:
    """Make a policy of writing by its name.

    Raises:
        SettingsError: There is none of this name.
    """
    if name not in WRITINGS:
        raise SettingsError(f"there is no policy of writing {name!r}: choose {', '.join(WRITINGS)}")
    return WRITINGS[name]()
