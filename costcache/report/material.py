"""Gathers the figures of a report, which advice, charts and page then present."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from costcache._version import __version__
from costcache.planning import LENGTHS
from costcache.settings import Settings
from costcache.sim.engine import OFFLINE
from costcache.sim.results import Run, gap_closed

if TYPE_CHECKING:
    from costcache.report.tiers import HostMemory
    from costcache.sim.engine import Simulator
    from costcache.sim.results import Outcome
    from costcache.sim.sweep import Cell

__all__ = ["Material", "Replay", "TimeBins", "gather"]

Int64 = NDArray[np.int64]

_CURVE_POINTS = 100
_BINS = 48
_BOX = (5, 25, 50, 75, 95)
_QUANTILES = tuple(range(101))
_OPTIMUM_PAGES = 6_000_000
"""Most pages of all prompts for which the optimum is added unasked: beyond, it takes too long."""


@dataclass(frozen=True, slots=True)
class TimeBins:
    """Equal spans of the trace.

    Attributes:
        unit: ``s``, ``min`` or ``h``; ``requests`` if the trace has no times.
        starts: Start of each span, in that unit.
        width: Length of a span.
    """

    unit: str
    starts: tuple[float, ...]
    width: float


@dataclass(frozen=True, slots=True)
class Replay:
    """One policy at one capacity.

    Attributes:
        run: Its figures.
        label: Name of the policy in a legend.
        settings: The settings replayed.
        gap_closed: Share of the gap from LRU to the optimum that is closed; None if not known.
        ttft: Seconds to first token at the percentiles 5, 25, 50, 75 and 95.
        ttft_curve: The same at each percentile from 0 to 100.
        regretted: Prompt tokens of earlier requests no longer cached when requested again, per time bin.
        evicted: Tokens evicted, per time bin; None if they cannot be assigned to bins.
    """

    run: Run
    label: str
    settings: Settings
    gap_closed: float | None
    ttft: tuple[float, ...]
    ttft_curve: tuple[float, ...]
    regretted: tuple[int, ...]
    evicted: tuple[int, ...] | None

    @property
    def online(self) -> bool:
        """Whether a server could run the policy, which then does not know the future."""
        return self.run.policy not in OFFLINE


@dataclass(frozen=True, slots=True)
class Material:
    """All figures of a report.

    Attributes:
        version: Version of costcache.
        command: The command line that made the report; empty if none did.
        seed: Seed of the arrivals.
        trace: Name of the trace.
        model: Name of the model.
        requests: Requests in the trace.
        warmup: Requests at the start that rates and times leave out.
        input_tokens: Prompt tokens after the warm-up.
        page_size: Tokens per page.
        deployment: The deployment, by field.
        token_bytes: Bytes of a cached token on one rank; 0 if a token takes none.
        state_bytes: Bytes of one state of a hybrid model on one rank; 0 for other models.
        state_share: Share of a pool's memory that is for states; None if states and KV share all of it.
        distinct_tokens: Tokens of the trace's distinct whole pages.
        ceiling: Token hit rate of an unlimited pool.
        prefill: Model of prefill times.
        serving: Whether a server with a queue was replayed.
        always_free: Whether the free target was restored after every request.
        capacities: Capacities as given, with their tokens, smallest first.
        replays: The replays, in the order given.
        optimum: Pool tokens and token hit rate of the offline optimum; empty where it does not apply.
        lru: The same for LRU, at many capacities; empty if one pass cannot give them.
        bins: The time bins.
        windows: Where sliding windows are assumed to be cached, in words; empty for a model without any.
        window_ratio: Tokens of the pool of windows per token of the full pool; None without such a pool.
        lengths: What that means for the largest pool: the length of sequences, the tokens of them that fit,
            and those that would in one pool of all layers.
        host: Replays with host memory; None without any.
    """

    version: str
    command: str
    seed: int
    trace: str
    model: str
    requests: int
    warmup: int
    input_tokens: int
    page_size: int
    deployment: dict[str, Any]
    token_bytes: int
    state_bytes: int
    state_share: float | None
    distinct_tokens: int
    ceiling: float
    prefill: str
    serving: bool
    always_free: bool
    capacities: tuple[tuple[str, int], ...]
    replays: tuple[Replay, ...]
    optimum: tuple[tuple[int, float], ...]
    lru: tuple[tuple[int, float], ...]
    bins: TimeBins
    windows: str = ""
    window_ratio: float | None = None
    lengths: tuple[tuple[int, int, int], ...] = ()
    host: HostMemory | None = None

    def pool(self, run: Run) -> int:
        """Tokens in a run's pool; those of all distinct pages if it is unlimited."""
        return self.distinct_tokens if run.capacity_tokens is None else run.capacity_tokens

    def of(self, policy: str) -> list[Replay]:
        """The replays of a policy, smallest pool first."""
        return sorted((r for r in self.replays if r.run.policy == policy), key=lambda r: self.pool(r.run))

    def at(self, capacity: str) -> list[Replay]:
        """The replays at a capacity that a server could run, LRU first."""
        found = [r for r in self.replays if r.run.capacity == capacity and r.online]
        return sorted(found, key=lambda r: r.run.policy != "lru")

    @property
    def policies(self) -> list[str]:
        """Policies that a server could run, in the order given."""
        return list(dict.fromkeys(r.run.policy for r in self.replays if r.online))


def gather(
    simulator: Simulator,
    cells: Sequence[Cell],
    outcomes: Sequence[Outcome],
    *,
    command: str = "",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Material:
    """Gather the figures of a report.

    Also replays the bounds for comparison: the unlimited pool and, in the plain mode, the
    offline optimum at each capacity.

    Args:
        simulator: The trace, prepared.
        cells: The replays.
        outcomes: Their outcomes, in the same order.
        command: The command line, for the page.
        seed: Seed of the arrivals, for the page.
        progress: Called now and then with the number of requests done since the last call.
    """
    trace, warmup, page = simulator.trace, simulator.warmup, simulator.keys.page_size
    # The report's own replays are plain: their prompts do not hit generated tokens.
    infinite = simulator.outcome(Settings(policy="infinite"), None, progress=progress)
    ideal = simulator.figures(infinite, Settings(policy="infinite"), None)
    distinct = trace.distinct_pages(page) * page
    bins, where = _bins(trace.timestamps, len(trace))
    runs = [cell.figures(simulator, outcome) for cell, outcome in zip(cells, outcomes, strict=True)]
    serving = any(cell.serving is not None for cell in cells)
    sizes = {
        cell.capacity: distinct if cell.capacity_tokens is None else cell.capacity_tokens for cell in cells
    }
    best = _optimum(simulator, cells, runs, sizes, ideal, serving, progress)
    whole = simulator.keys.tokens
    replays = []
    for cell, outcome, run in zip(cells, outcomes, runs, strict=True):
        times = simulator.ttft(outcome)
        missed = np.maximum(infinite.matched - outcome.matched, 0)
        evicted = _evicted(outcome, whole, cell.capacity_tokens) if cell.serving is None else None
        at = [replace(best[run.capacity], capacity=run.capacity)] if run.capacity in best else []
        others = [other for other in runs if other.policy != "optimum"]
        replays.append(
            Replay(
                run=run,
                label=_label(run),
                settings=cell.settings,
                gap_closed=gap_closed(run, [*others, *at]),
                ttft=_percentiles(times, _BOX),
                ttft_curve=_percentiles(times, _QUANTILES),
                regretted=_sums(missed, where, bins),
                evicted=None if evicted is None else _sums(evicted, where, bins),
            )
        )
    plain = [
        cell for cell in cells if cell.settings.policy == "lru" and cell.serving is None and not cell.tree
    ]
    token = simulator.cost.token
    largest = max(sizes.values())
    return Material(
        version=__version__,
        command=_text(command),
        seed=seed,
        trace=_text(trace.name),
        model=simulator.cost.spec.name,
        requests=len(trace),
        warmup=warmup,
        input_tokens=ideal.input_tokens,
        page_size=page,
        deployment=simulator.cost.deployment.model_dump(mode="json"),
        token_bytes=int(simulator.token_bytes),
        windows=simulator.windows,
        window_ratio=simulator.window_ratio if simulator.window_layout == "own-pool" else None,
        lengths=tuple(
            (length, *simulator.fitting(largest, length)) for length in LENGTHS if simulator.windows
        ),
        state_bytes=int(token.state_bytes),
        state_share=simulator.state_share,
        distinct_tokens=distinct,
        ceiling=ideal.token_hit_rate,
        prefill=simulator.prefill.name,
        serving=serving,
        always_free=any(cell.always_free for cell in cells),
        capacities=tuple(sorted(sizes.items(), key=lambda item: item[1])),
        replays=tuple(replays),
        optimum=tuple(sorted((sizes[name], run.token_hit_rate) for name, run in best.items())),
        lru=_lru(simulator, plain[0].settings, sizes, ideal) if plain else (),
        bins=bins,
    )


def _text(name: str) -> str:
    """A name that may come from a file's, with a question mark for each byte that is not UTF-8."""
    return name.encode(errors="replace").decode()


def _label(run: Run) -> str:
    if run.fallbacks:
        return f"{run.policy} (failed, then lru)"
    return run.policy if run.policy_in_force == run.policy else f"{run.policy} (means {run.policy_in_force})"


def _optimum(
    simulator: Simulator,
    cells: Sequence[Cell],
    runs: Sequence[Run],
    sizes: dict[str, int],
    ideal: Run,
    serving: bool,
    progress: Callable[[int], None] | None,
) -> dict[str, Run]:
    """The optimum's run at each capacity; none with a server, whose hit rates it does not bound."""
    if serving:
        return {}
    found = {run.capacity: run for run in runs if run.policy == "optimum"}
    settings = Settings(policy="optimum")
    pages = int(simulator.keys.tokens.sum()) // simulator.keys.page_size
    for cell in cells:
        if cell.capacity in found or pages > _OPTIMUM_PAGES:
            continue
        if cell.capacity_tokens is None:
            found[cell.capacity] = replace(ideal, policy="optimum", capacity=cell.capacity)
        else:
            outcome = simulator.outcome(settings, cell.capacity_tokens, progress=progress)
            found[cell.capacity] = simulator.figures(
                outcome, settings, cell.capacity_tokens, capacity=cell.capacity
            )
    return {name: found[name] for name in sizes if name in found}


def _lru(
    simulator: Simulator, settings: Settings, sizes: dict[str, int], ideal: Run
) -> tuple[tuple[int, float], ...]:
    """Token hit rates of LRU from a quarter of the smallest pool to all distinct pages."""
    curve = simulator.lru_curve(settings)
    if curve is None or not ideal.input_tokens:
        return ()
    page = simulator.keys.page_size
    most = simulator.paths.distinct
    least = max(1, min(min(sizes.values()) // page, most) // 4)
    if most < 1:
        return ()
    points = np.geomspace(least, most, _CURVE_POINTS).round().astype(np.int64)
    points = np.unique(np.append(points, [min(size // page, most) for size in sizes.values()]))
    distances = np.sort(curve.distances[simulator.paths.offsets[simulator.warmup] :])
    hits = np.searchsorted(distances, points, side="right") * page
    rates = hits / ideal.input_tokens
    return tuple(zip((points * page).tolist(), rates.tolist(), strict=True))


def _bins(times: NDArray[np.float64], requests: int) -> tuple[TimeBins, Int64]:
    """Time bins, and the bin of each request."""
    first, last = (float(times.min()), float(times.max())) if requests else (0.0, 0.0)
    if last > first:
        span = last - first
        unit, seconds = ("h", 3600.0) if span >= 3 * 3600 else ("min", 60.0) if span >= 180 else ("s", 1.0)
        at = (times - first) / seconds
        width = span / seconds / _BINS
    else:
        unit, at = "requests", np.arange(requests, dtype=np.float64)
        width = max(1.0, requests / _BINS)
    where = np.minimum((at / width).astype(np.int64), _BINS - 1)
    return TimeBins(unit, tuple(round(i * width, 6) for i in range(_BINS)), width), where


def _sums(values: Int64, where: Int64, bins: TimeBins) -> tuple[int, ...]:
    sums = np.zeros(len(bins.starts), np.int64)
    np.add.at(sums, where, values)
    return tuple(sums.tolist())


def _evicted(outcome: Outcome, whole: Int64, capacity: int | None) -> Int64 | None:
    """Tokens evicted by each request if evictions free their shortfall and no more.

    The pool then fills up and stays full. None if that does not account for every evicted token.
    """
    if capacity is None:
        return np.zeros_like(whole) if not outcome.evicted else None
    added = np.cumsum(np.maximum(np.minimum(whole, capacity) - outcome.matched, 0))
    evicted = np.diff(np.maximum(added - capacity, 0), prepend=0)
    return evicted if int(evicted.sum()) == outcome.evicted else None


def _percentiles(values: NDArray[np.float64], at: Sequence[int]) -> tuple[float, ...]:
    if not values.size:
        return tuple(0.0 for _ in at)
    return tuple(np.percentile(values, at).tolist())
