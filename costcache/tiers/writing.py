"""What is copied to a slower tier, and what is loaded back: three classic policies, and one by cost.

A *move* is a run of tokens between two neighbouring tiers with the facts that a decision needs. The decisions
are functions of these facts alone.

Sources: write-through, write-back and selective write-through are those of SGLang's hierarchical cache
(0.5.23, ``--hicache-write-policy``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.orders import VictimOrder

__all__ = ["WRITINGS", "ByCost", "Move", "Price", "WriteBack", "WriteThrough", "Writing", "make_writing"]

_SELECTIVE_USES = 2
_LATELY = 0.1
"""Share of a tier's bytes that were lost lately."""


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
        displaced: Seconds that what it displaces in the tier below would be expected to save, see
            :class:`Price`; 0 while that tier has room.
        followed: Whether the tier below holds what follows the run, which is no use without it.
    """

    tokens: int
    size: int
    uses: int
    recompute: float
    reload: float
    chance: float = 1.0
    write: float = 0.0
    displaced: float = 0.0
    followed: bool = False

    @property
    def saves(self) -> float:
        """Seconds that a load saves; 0 if it takes longer than to compute the tokens."""
        return max(0.0, self.recompute - self.reload)

    @property
    def worth(self) -> float:
        """Seconds that a copy in the tier below is expected to save."""
        return self.chance * self.saves


class Price:
    """The price of room in a full tier: the seconds that what it gave up lately was expected to save.

    It gives up what it evicts and what it refuses. Without the latter nothing would be learned while all is
    refused, and a price that was once too high would stay. The latest weighs most, byte by byte: a state is
    worth all that it saves, and the KV before it, which is evicted after it, is then worth nothing.

    A copy pays by the byte, and only under an order that forecasts: a prior does not fall with age, so that
    what is displaced would seem worth as much as what displaces it, and nothing would be copied.
    """

    __slots__ = ("_bytes", "_worth")

    def __init__(self) -> None:
        """Room is free until something was lost."""
        self._bytes = 0.0
        self._worth = 0.0

    def lost(self, move: Move, capacity: float) -> None:
        """Learn from what the tier has evicted or refused.

        Args:
            move: The facts of that.
            capacity: Bytes of the tier.
        """
        keeps = math.exp(-move.size / (_LATELY * capacity))
        self._bytes = self._bytes * keeps + move.size
        self._worth = self._worth * keeps + move.worth

    def displaced(self, missing: float, order: VictimOrder) -> float:
        """Seconds that are lost with what is displaced.

        Args:
            missing: Bytes of the copy for which the tier has no room.
            order: The order that the chances come from.
        """
        if missing <= 0.0 or not self._bytes or not order.forecasts:
            return 0.0
        return missing * self._worth / self._bytes


class Writing(Protocol):
    """A policy of writing; all answers are pure."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def ahead(self) -> bool:
        """Whether evictions write what is copied, ahead of need, so that no request waits for them.

        A host that can make room before it is needed then copies nothing earlier; another one asks
        :meth:`copies`, as for any policy.
        """

    @property
    def gives_up(self) -> bool:
        """Whether full host memory gives up copies of what the device has had for long.

        They are written again when the device evicts them. Only for a host that makes room ahead.
        """

    def copies(self, move: Move) -> bool:
        """Whether to copy a run down now, after it was made or used, while it stays where it is."""

    def demotes(self, move: Move) -> bool:
        """Whether to copy a run down before it is evicted, if it is not there; else it is dropped."""

    def loads(self, move: Move) -> bool:
        """Whether to load a matched run; else it is computed again."""


class WriteThrough:
    """Copies every run that has been used so many times, and drops the others when they are evicted."""

    ahead = gives_up = False

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
    ahead = gives_up = False

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
    is made if that exceeds the seconds for which the write is in the way, and what it displaces. Best when a
    run is evicted, which is when most is known of it, and what stays on the device takes no room below; and
    ahead of need, so that no request waits.
    """

    name = "by_cost"
    ahead = gives_up = True

    def copies(self, move: Move) -> bool:
        """True if a copy is worth it."""
        return move.worth > move.write + move.displaced

    def demotes(self, move: Move) -> bool:
        """True if a copy is worth it, or if what follows the run needs it."""
        return move.saves > 0.0 and (move.followed or self.copies(move))

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
