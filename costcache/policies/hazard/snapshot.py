"""Snapshots: what an order of the hazard policy knows at one time, as immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from costcache.explained import Verdict
    from costcache.policies.hazard.classes import Kind

__all__ = ["ClassSnapshot", "CohortSnapshot", "PieceSnapshot", "Snapshot", "StatesSnapshot"]


class PieceSnapshot(NamedTuple):
    """A part of a node with one history.

    Attributes:
        start: First token of the prefix that it covers.
        tokens: Number of tokens; the last piece of a node may include tokens that have been trimmed off.
        uses: Uses, those before an eviction included.
        first_use: Time of the first use.
        last_use: Time of the last use.
        group: Number of its class.
        cohort: Number of the cohort in which its interval counts; None until its request has ended.
    """

    start: int
    tokens: int
    uses: int
    first_use: float
    last_use: float
    group: int
    cohort: int | None


class CohortSnapshot(NamedTuple):
    """Open intervals of one class, of about one age.

    Attributes:
        number: Its number, by which pieces name it.
        group: Number of the class.
        depth: Range of depth; 0 with the objective ``tokens``.
        first: The earliest of its last uses.
        last: The latest of its last uses.
        at_risk: Tokens, evicted ones that are remembered included.
        worth: Its rank, at the time for which the order ranks leaves; the lowest is evicted first.
        is_listed: Whether it may have leaves, and so has an entry in the ranking.
    """

    number: int
    group: int
    depth: int
    first: float
    last: float
    at_risk: float
    worth: float
    is_listed: bool


class ClassSnapshot(NamedTuple):
    """Knowledge of one class.

    Attributes:
        name: The class in words.
        kind: Its features; None for classes of states.
        used: Tokens, or states, that were used again, by bin of age.
        censored: Those that were forgotten unused, likewise.
        at_risk: Those whose interval is open, by their age now.
        shares: Share used in each bin, of what survived unused up to it; empty before the first estimate.
        worth: Expected uses per unit of time, at the start of each bin; the lowest is evicted first.
    """

    name: str
    kind: Kind | None
    used: tuple[float, ...]
    censored: tuple[float, ...]
    at_risk: tuple[float, ...]
    shares: tuple[float, ...]
    worth: tuple[float, ...]

    @property
    def reused(self) -> float:
        """Tokens, or states, that were used again."""
        return sum(self.used)

    @property
    def ended(self) -> float:
        """Tokens, or states, of all intervals that are over: used again, or censored."""
        return sum(self.used) + sum(self.censored)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Knowledge of a :class:`~costcache.policies.hazard.order.Hazard` at one time.

    Attributes:
        clock: Unit of times and ages; None until a request has ended.
        now: The time.
        watched: Time since the first interval began, and that of the tables that the order started from.
        gap: Mean time between its own requests.
        requests: Requests so far.
        nodes: Nodes in the cache.
        resident: Tokens in the cache.
        ghosts: Evicted nodes that are remembered.
        ghost_tokens: Tokens of these.
        dirty: Nodes that are to be ranked before the next victim.
        entries: Entries of leaves in the ranking, stale ones included.
        ranked_for: The time for which leaves are ranked.
        tokens: Tokens of all intervals that began.
        squares: Sum of the squares of their sizes.
        classes: The classes, by number.
        cohorts: The open intervals.
        against_lru: Comparison with LRU.
    """

    clock: Literal["requests", "seconds"] | None
    now: float
    watched: float
    gap: float
    requests: int
    nodes: int
    resident: int
    ghosts: int
    ghost_tokens: int
    dirty: int
    entries: int
    ranked_for: float
    tokens: float
    squares: float
    classes: tuple[ClassSnapshot, ...]
    cohorts: tuple[CohortSnapshot, ...]
    against_lru: Verdict


@dataclass(frozen=True, slots=True)
class StatesSnapshot:
    """Knowledge of a :class:`~costcache.policies.hazard.states.HazardStates` at one time.

    Attributes:
        now: The time.
        watched: Time since the first state.
        states: States in the cache.
        ghosts: Evicted nodes that are remembered, with a state or without.
        classes: The classes, by number.
    """

    now: float
    watched: float
    states: int
    ghosts: int
    classes: tuple[ClassSnapshot, ...]
