"""The charts of a report: their lines, axes and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from costcache.report.axes import Axis, linear, log
from costcache.report.style import Style, styles
from costcache.report.svg import Chart, Line
from costcache.report.words import count, listed, seconds, share

if TYPE_CHECKING:
    from costcache.report.advice import Advice
    from costcache.report.material import Material, Replay

__all__ = [
    "evicted",
    "first_token_axis",
    "first_token_curve",
    "hit_rates",
    "pools_drawn",
    "ranked",
    "regretted",
]

_MOST_POOLS = 8
"""Most pool sizes of the charts that are drawn once per size; the table has all."""
_MOST_NAMES = 6
_OPTIMUM = Style("ink", "", "dash", "star", 2.0)


def pools_drawn(material: Material, advice: Advice) -> list[str]:
    """The pool sizes of the charts that are drawn once per size: all, or some among them the advised one."""
    names = [name for name, _ in material.capacities if material.at(name)]
    if len(names) <= _MOST_POOLS:
        return names
    step = (len(names) - 1) / (_MOST_POOLS - 1)
    kept = {round(at * step) for at in range(_MOST_POOLS)}
    if advice.chosen is not None:
        mine = names.index(advice.chosen.run.capacity)
        if mine not in kept:
            kept.remove(min(kept - {0, len(names) - 1}, key=lambda at: abs(at - mine)))
            kept.add(mine)
    return [names[at] for at in sorted(kept)]


def hit_rates(material: Material, advice: Advice) -> Chart:
    """Token hit rate over pool size, with the bounds that no policy can exceed."""
    lines = []
    if material.optimum:
        marks = [
            (tokens, rate, f"offline optimum, {tokens:,} tokens: {share(rate, 2)}")
            for tokens, rate in material.optimum
        ]
        lines.append(Line("offline optimum", _OPTIMUM, material.optimum, marks))
    for policy, style in styles(material.policies).items():
        replays = material.of(policy)
        points = [(material.pool(r.run), r.run.token_hit_rate) for r in replays]
        tips = [f"{r.label} at {r.run.capacity}: {share(r.run.token_hit_rate, 2)}" for r in replays]
        marks = [(*point, tip) for point, tip in zip(points, tips, strict=True)]
        # LRU's curve is known between the replays too.
        path = material.lru if policy == "lru" and material.lru else points
        lines.append(Line(replays[0].label, style, path, marks))
    pools = [tokens for _, tokens in material.capacities] + [tokens for tokens, _ in material.lru]
    rates = [rate for line in lines for _, rate in line.path]
    said = [
        f"At {name}: {ranked(material.at(name), lambda r: r.run.token_hit_rate, _rate)}."
        for name in pools_drawn(material, advice)
    ]
    return Chart(
        "hit-rates",
        "Token hit rate by pool size",
        " ".join(said),
        log("Pool size in tokens", min(pools), max(pools), count),
        linear("Token hit rate", max([*rates, material.ceiling]), lambda value: f"{value:.0%}"),
        lines,
        (material.ceiling, f"unlimited pool: {share(material.ceiling)}"),
    )


def first_token_axis(material: Material) -> Axis:
    """An axis for the boxes of all replays."""
    times = [time for r in material.replays if r.online for time in r.ttft]
    return log("Time to first token", min(times), max(times), _brief)


def first_token_curve(material: Material, capacity: str) -> Chart:
    """Share of the requests with a first token by a given time, at one pool size."""
    replays = material.at(capacity)
    look = styles(material.policies)
    times = [time for r in material.replays if r.online for time in r.ttft_curve]
    lines = [
        Line(r.label, look[r.run.policy], [(time, at / 100) for at, time in enumerate(r.ttft_curve)])
        for r in replays
    ]
    return Chart(
        "ttft-curve",
        f"Share of requests with a first token by a given time, at {capacity}",
        f"Half of the requests have their first token after: "
        f"{ranked(replays, lambda r: -r.ttft_curve[50], lambda value: seconds(-value))}.",
        log("Time to first token", min(times), max(times), _brief),
        linear("Requests with a first token", 1.0, lambda value: f"{value:.0%}"),
        lines,
    )


def regretted(material: Material, capacity: str) -> Chart:
    """Regretted tokens over the time of the trace, at one pool size."""
    return _over_time(material, capacity, "regretted", lambda r: r.regretted)


def evicted(material: Material, capacity: str) -> Chart | None:
    """Evicted tokens over the time of the trace, at one pool size; None if no replay knows them."""
    if not any(r.evicted is not None and any(r.evicted) for r in material.replays if r.online):
        return None
    return _over_time(material, capacity, "evicted", lambda r: r.evicted)


def _over_time(
    material: Material, capacity: str, what: str, values: Callable[[Replay], Sequence[int] | None]
) -> Chart:
    bins, look = material.bins, styles(material.policies)
    known = [(r, found) for r in material.at(capacity) if (found := values(r)) is not None]
    span = {"requests": "Requests", "s": "Seconds", "min": "Minutes", "h": "Hours"}[bins.unit]
    all_values = [values(r) for r in material.replays if r.online]
    return Chart(
        what,
        f"{what.capitalize()} tokens, at {capacity}",
        "In total: " + ranked([r for r, _ in known], lambda r: -sum(values(r) or ()), _total) + ".",
        linear(
            f"{span} since the first request",
            bins.starts[-1] + bins.width,
            lambda value: f"{value:g}",
            exact=True,
        ),
        linear(f"{what.capitalize()} tokens", max(chain([0], *(each for each in all_values if each))), count),
        [Line(r.label, look[r.run.policy], list(zip(bins.starts, found, strict=True))) for r, found in known],
    )


def ranked(replays: Sequence[Replay], value: Callable[[Replay], float], words: Callable[[float], str]) -> str:
    """Policies with their figures in a sentence, the highest value first; at most six of them."""
    best = sorted(replays, key=lambda r: -value(r))
    said = [f"{r.run.policy} {words(value(r))}" for r in best]
    if len(said) > _MOST_NAMES:
        said = [*said[: _MOST_NAMES - 2], f"{len(said) - _MOST_NAMES + 1} others", said[-1]]
    return listed(said)


def _brief(value: float) -> str:
    """A time on an axis, which is round."""
    return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"


def _rate(value: float) -> str:
    return share(value)


def _total(value: float) -> str:
    return f"{-value:,.0f}"
