"""Make the prior that hazard starts from: shares of tokens used again by age, over many workloads.

    python benchmarks/make_prior.py

Writes ``costcache/policies/hazard/prior.json``. Each workload is replayed under hazard without a
prior, from an empty pool to 1,000 requests after it first fills, at pools of 2, 5, 10 and 20 %. The intervals
are taken by family of classes, their ages in units of the pool's turnover and of the tokens' own mean
interval. Each kind of workload counts the same, whatever its size. Recorded traces are
looked for in $COSTCACHE_TRACES, else in ../shared/traces. Takes two minutes on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from _openings import ALL_FILES, Opening, openings

from costcache.orders import VictimOrder
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.bins import BINS, age_bin
from costcache.policies.hazard.classes import FAMILIES
from costcache.policies.hazard.prior import FILE, Curve, Prior
from costcache.settings import Settings
from costcache.sim.workloads import WORKLOADS

__all__ = ["Observed", "observe", "pool"]

POOLS = (2, 5, 10, 20)
SEED = 30
"""Seed of generated workloads; no other benchmark has it."""
REQUESTS = 1000
KINDS = {
    "mooncake conversation": "mooncake",
    "mooncake synthetic": "mooncake",
    "mooncake arxiv": "mooncake",
    "weka v6, 57 sessions": "weka",
    "weka v8, 60 sessions": "weka",
    "bbh": "shared examples",
    "gsm8k": "shared examples",
    "agents-documents": "agentic",
}
"""Workloads of which several are alike, and count as one."""
OBSERVED = (*(name for name in WORKLOADS if name != "random"), *ALL_FILES)
"""Workloads whose intervals are taken."""
LEAST_FILL = 5
"""Requests in which a pool fills at least: its turnover means nothing in fewer."""
LEAST_INTERVALS = 10
"""Intervals of a family from which a replay counts for it."""
LOW, HIGH = -14, 5
"""Bins of age that a curve has, relative to the unit: from 1/128 of it to 4 times."""
LEAST_AT_RISK = 0.05
"""Share of intervals that must reach an age for it to count."""
SPREAD = 64
SMOOTHINGS = 2

Counts = np.ndarray
"""Tokens used or censored, float64 of shape [2 units, families, bins]."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Intervals of one replay: of each unit and family, scaled so that all of a family add up to 1."""

    kind: str
    used: Counts
    censored: Counts


def kind_of(workload: str) -> str:
    """Kind of a workload: what is alike counts as one, and is left out as one."""
    return KINDS.get(workload, workload)


def observe(workloads: Iterable[str] | None = None) -> list[Observed]:
    """Replay workloads, all by default, and take their intervals."""
    found = []
    for name in OBSERVED if workloads is None else workloads:
        start = SEED if name in WORKLOADS else 0
        for opening in openings(name, [start], POOLS, REQUESTS):
            if opening.fill >= LEAST_FILL:
                found.append(_intervals(opening))
                print(f"{name} at {opening.percent} %: full after {opening.fill}", file=sys.stderr)
    return found


def _intervals(opening: Opening) -> Observed:
    orders: list[Hazard] = []

    def watch(order: VictimOrder) -> VictimOrder:
        assert isinstance(order, Hazard)  # noqa: S101 # for the type checker
        orders.append(order)
        return order

    settings = Settings(policy="hazard", policy_settings={"prior": False})
    opening.simulator.watched(settings, opening.capacity, watch)
    times = opening.simulator.trace.timestamps
    turnover = float(times[opening.fill] - times[0])
    table = orders[0].learner.table
    used = np.zeros((2, len(FAMILIES), 2 * SPREAD))
    censored = np.zeros_like(used)
    for number, each in enumerate(orders[0].snapshot().classes):
        family, scale = table.kin(number)
        lost = np.add(each.censored, each.at_risk)
        for unit, length in enumerate((turnover, scale)):
            if length > 0.0:
                at = np.clip(np.arange(BINS) - age_bin(length) + SPREAD, 0, 2 * SPREAD - 1)
                np.add.at(used[unit, family], at, each.used)
                np.add.at(censored[unit, family], at, lost)
    tokens = (used + censored).sum(axis=2, keepdims=True)
    enough = tokens * table.tokens > LEAST_INTERVALS * table.squares
    weight = np.divide(1.0, tokens, out=np.zeros_like(tokens), where=enough)
    return Observed(kind_of(opening.workload), used * weight, censored * weight)


def pool(observed: Iterable[Observed], without: str | None = None) -> Prior:
    """Pool what was observed; ``without`` leaves out a workload and all of its kind."""
    kept = [each for each in observed if without is None or each.kind != kind_of(without)]
    replays = {kind: sum(each.kind == kind for each in kept) for kind in {each.kind for each in kept}}
    shape = 2, len(FAMILIES), 2 * SPREAD
    used, at_risk = np.zeros(shape), np.zeros(shape)
    for each in kept:
        risk = np.cumsum((each.used + each.censored)[..., ::-1], axis=2)[..., ::-1] - each.censored / 2
        used += each.used / replays[each.kind]
        at_risk += risk / replays[each.kind]
    for _ in range(SMOOTHINGS):
        used, at_risk = _smooth(used), _smooth(at_risk)
    by_turnover, by_interval = (
        [_curve(*each) for each in zip(of_used, of_risk, strict=True)]
        for of_used, of_risk in zip(used, at_risk, strict=True)
    )
    return Prior(by_turnover=by_turnover, by_interval=by_interval)


def _smooth(values: np.ndarray) -> np.ndarray:
    wide = np.pad(values, ((0, 0), (0, 0), (1, 1)), mode="edge")
    return (wide[..., :-2] + wide[..., 1:-1] + wide[..., 2:]) / 3


def _curve(used: np.ndarray, at_risk: np.ndarray) -> Curve:
    reached = np.flatnonzero(at_risk[SPREAD + LOW : SPREAD + HIGH] > LEAST_AT_RISK)
    if not len(reached):
        return Curve(first=0, shares=[0.02])
    first, last = SPREAD + LOW + int(reached[0]), SPREAD + LOW + int(reached[-1]) + 1
    shares = np.clip((used[first:last] + 1e-4) / (at_risk[first:last] + 5e-3), 1e-3, 0.9)
    return Curve(first=first - SPREAD, shares=[round(share, 4) for share in shares.tolist()])


def main() -> None:
    """Observe all workloads, and write the prior."""
    FILE.write_text(pool(observe()).text())


if __name__ == "__main__":
    main()
