"""What a policy that tells classes apart can say of them, for ``costcache explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from costcache.records import NodeRecord

__all__ = ["Explained", "Part", "Verdict"]


class Part(NamedTuple):
    """A part of a node that is of one class.

    Attributes:
        group: Number of the class.
        amount: Tokens, or states, that it holds.
        age: Time since their last use, in units of the clock.
    """

    group: int
    amount: int
    age: float


class Verdict(NamedTuple):
    """Comparison with LRU of a policy that steps back where LRU is ahead.

    Attributes:
        gained: Tokens found that LRU would not have found.
        lost: Tokens that LRU would have found, and the policy did not.
        behind: LRU is in force now.
        falls: How often LRU stepped in.
        since: Count of requests at which LRU stepped in, or back, last; 0 if it never did.
        run: Requests over which LRU was ahead when it stepped in last.
        regret: Tokens, by their worth, that it found more in them.
    """

    gained: int
    lost: int
    behind: bool
    falls: int = 0
    since: int = 0
    run: int = 0
    regret: float = 0.0


class Explained(Protocol):
    """An order, seen by its classes: what :meth:`costcache.orders.VictimOrder.explained` gives.

    It only reads the order, and costs nothing where nobody asks.
    """

    @property
    def unit(self) -> Literal["tokens", "states"]:
        """What classes are of: tokens of nodes, or states at their ends."""
        ...

    @property
    def ages(self) -> Sequence[float]:
        """Ages at which :meth:`unused` is known, in units of the clock."""
        ...

    def parts(self, record: NodeRecord, start: int, stop: int) -> Sequence[Part]:
        """What a node holds between two tokens of its prefix; of states, the one at its end."""
        ...

    def name(self, group: int) -> str:
        """A class in words."""
        ...

    def worth(self, group: int, age: float) -> float:
        """Expected uses per unit of the clock of what a class holds at an age."""
        ...

    def unused(self, group: int) -> Sequence[float]:
        """Share that is not used again up to each of :attr:`ages`; empty before the first estimate."""
        ...

    def against_lru(self) -> Verdict | None:
        """How the order stands against LRU; None where it does not compare."""
        ...

    def tables(self) -> str | None:
        """What was learned, as the text of a file that the policy can start from; None where it cannot."""
        ...
