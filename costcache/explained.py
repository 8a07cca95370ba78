"""A policy's view of its classes of nodes, for ``costcache explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from costcache.records import NodeRecord

__all__ = ["Explained", "Part", "Verdict"]


class Part(NamedTuple):
    """A part of a node that is of one class.

    Attributes:
        group: Number of the class.
        amount: Tokens, or states, in it.
        age: Time since their last use, in units of the clock.
    """

    group: int
    amount: int
    age: float


class Verdict(NamedTuple):
    """A policy compared with the LRU that it simulates alongside.

    Attributes:
        gained: Tokens that hit, and would have missed under LRU.
        lost: Tokens that missed, and would have hit under LRU.
        behind: LRU is in force now.
        falls: How often LRU stepped in.
        since: Count of requests at which LRU stepped in, or back, last; 0 if it never did.
        run: Requests over which LRU was ahead when it stepped in last.
        regret: Tokens that it found more in them, beyond the tolerance; with the objective ``flops`` by
            their cost, in units of that of a first token.
        until: Count of requests up to which LRU is in force, as of that time.
        evidence: Evidence that LRU is ahead now, as a share of what makes it step in.
    """

    gained: int
    lost: int
    behind: bool
    falls: int = 0
    since: int = 0
    run: int = 0
    regret: float = 0.0
    until: int = 0
    evidence: float = 0.0


class Explained(Protocol):
    """An order by its classes, as :meth:`costcache.orders.VictimOrder.explained` returns it.

    It only reads the order, and costs nothing until it is called.
    """

    @property
    def unit(self) -> Literal["tokens", "states"]:
        """Members of the classes: tokens of nodes, or states at their ends."""
        ...

    @property
    def ages(self) -> Sequence[float]:
        """Ages at which :meth:`unused` is known, in units of the clock."""
        ...

    def parts(self, record: NodeRecord, start: int, stop: int) -> Sequence[Part]:
        """Parts of a node between two tokens of its prefix; for states, the one at its end."""
        ...

    def name(self, group: int) -> str:
        """Name of a class, in words."""
        ...

    def worth(self, group: int, age: float) -> float:
        """Expected uses per unit of the clock of a class's tokens or states at an age."""
        ...

    def unused(self, group: int) -> Sequence[float]:
        """Share not reused by each of :attr:`ages`; empty before the first estimate."""
        ...

    def against_lru(self) -> Verdict | None:
        """Comparison with LRU; None if the order makes none."""
        ...

    def tables(self) -> str | None:
        """Learned tables, as the text of a file that the policy can start from; None if it cannot."""
        ...
