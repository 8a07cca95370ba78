"""Describes the parts of an order as a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from costcache.explained import Verdict
from costcache.policies.hazard.bins import BINS, age_bin
from costcache.policies.hazard.history import Piece
from costcache.policies.hazard.intake import Intake
from costcache.policies.hazard.judge import Judge
from costcache.policies.hazard.learner import Learner
from costcache.policies.hazard.ranker import Ranker
from costcache.policies.hazard.snapshot import (
    ClassSnapshot,
    CohortSnapshot,
    PieceSnapshot,
    Snapshot,
)

__all__ = ["against_lru", "history_of", "snapshot_of", "verdict_of"]


def history_of(pieces: Sequence[Piece], learner: Learner) -> list[PieceSnapshot]:
    """Describe pieces."""
    return [
        PieceSnapshot(
            start=piece.start,
            tokens=piece.tokens,
            uses=piece.uses,
            first_use=piece.first_use,
            last_use=piece.last_use,
            group=learner.group_of(piece),
            cohort=None if piece.cohort is None else piece.cohort.whole().slot,
        )
        for piece in pieces
    ]


def against_lru(learner: Learner) -> Verdict:
    """Describe the comparison with LRU."""
    return verdict_of(learner.judge, learner.shadow.gained, learner.shadow.lost)


def verdict_of(judge: Judge, gained: int, lost: int) -> Verdict:
    """What a judge says, with the tokens that LRU would not have found, and those found by LRU alone."""
    return Verdict(
        gained=gained,
        lost=lost,
        behind=judge.behind,
        falls=judge.falls,
        since=judge.since,
        run=judge.run,
        regret=judge.regret,
        until=judge.until,
        evidence=judge.evidence,
    )


def snapshot_of(intake: Intake, learner: Learner, ranker: Ranker) -> Snapshot:
    """Describe an order by its parts."""
    intake.catch_up()
    now, table, worth = intake.now, learner.table, ranker.worth
    columns, depths = learner.cohorts, learner.depths.count
    cohorts = []
    at_risk = [0.0] * (len(table) * BINS)
    for cohort in columns.all():
        slot = cohort.slot
        group, depth = divmod(cohort.stratum, depths)
        first, last, tokens = columns.first[slot], columns.last[slot], columns.at_risk[slot]
        middle = (first + last) / 2
        at_risk[group * BINS + age_bin(now - middle)] += tokens
        rank = worth.at(cohort.stratum, ranker.now - middle)
        listed = bool(columns.listed[slot])
        cohorts.append(CohortSnapshot(slot, group, depth, first, last, tokens, rank, listed))
    shares = [] if learner.estimated is None else learner.estimated.shares().T.tolist()
    values = worth.table().tolist()
    classes = []
    for number, kind in enumerate(learner.classes.kinds()):
        row = slice(number * BINS, (number + 1) * BINS)
        classes.append(
            ClassSnapshot(
                name=learner.classes.label(number),
                kind=kind,
                used=tuple(table.used[row]),
                censored=tuple(table.censored[row]),
                at_risk=tuple(at_risk[row]),
                shares=tuple(shares[number]) if number < len(shares) else (),
                worth=tuple(values[number]) if number < len(values) else (),
            )
        )
    return Snapshot(
        clock=intake.clock,
        now=now,
        watched=intake.watched,
        gap=intake.gap,
        requests=intake.requests,
        nodes=intake.nodes,
        resident=intake.resident,
        ghosts=len(intake.ghosts),
        ghost_tokens=intake.ghosts.tokens,
        dirty=len(ranker.dirty),
        entries=len(ranker),
        ranked_for=ranker.now,
        tokens=table.tokens,
        squares=table.squares,
        classes=tuple(classes),
        cohorts=tuple(cohorts),
        against_lru=against_lru(learner),
    )
