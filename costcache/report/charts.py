"""Charts of a report, as plotly figures.

They are plain dictionaries, so that their bytes do not depend on the installed release of plotly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from costcache.report.style import GRID, INK, MUTED, styles
from costcache.report.words import count, seconds

if TYPE_CHECKING:
    from costcache.report.advice import Advice
    from costcache.report.material import Material, Replay

__all__ = [
    "Figure",
    "first_token_boxes",
    "first_token_curve",
    "flops",
    "gap",
    "hit_rates",
    "losses_over_time",
]

Figure = dict[str, Any]


def hit_rates(material: Material) -> Figure:
    """Token hit rate over pool size, with the bounds that no policy can exceed."""
    data: list[Figure] = []
    if material.optimum:
        data.append(
            _line(
                *zip(*material.optimum, strict=True),
                name="offline optimum",
                line={"color": INK, "width": 2, "dash": "dash"},
                marker={"color": INK, "size": 7, "symbol": "star"},
            )
        )
    for policy, style in styles(material.policies).items():
        replays = material.of(policy)
        line = {"color": style.color, "width": style.width}
        more: Figure = {"line": line | {"dash": style.dash}}
        if policy == "lru" and material.lru:  # its curve is known between the replays too
            curve = zip(*material.lru, strict=True)
            data.append(_line(*curve, name=replays[0].label, mode="lines", line=line))
            more = {"mode": "markers", "showlegend": False}
        data.append(
            _line(
                [material.pool(r.run) for r in replays],
                [r.run.token_hit_rate for r in replays],
                name=replays[0].label,
                marker={"color": style.color, "size": 9, "symbol": style.symbol},
                **more,
            )
        )
    layout = _layout("Pool size in tokens", "Token hit rate", height=460)
    pools = [tokens for _, tokens in material.capacities] + [tokens for tokens, _ in material.lru]
    layout["xaxis"] |= _log_axis(min(pools), max(pools), count)
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    layout["shapes"] = [_level(material.ceiling)]
    layout["annotations"] = [
        {
            "xref": "paper",
            "x": 0.005,
            "y": material.ceiling,
            "yanchor": "bottom",
            "xanchor": "left",
            "showarrow": False,
            "text": f"unlimited pool: {material.ceiling:.1%}",
            "font": {"color": MUTED, "size": 13},
        }
    ]
    return {"data": data, "layout": layout}


def gap(material: Material) -> Figure | None:
    """Share of the gap from LRU to the optimum that each policy closes; None if either is missing."""
    others = [policy for policy in material.policies if policy != "lru"]
    data = _bars(material, lambda r: r.gap_closed, others)
    zero = {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 2}
    return {"data": data, "layout": _bar_layout("Gap closed", **zero)} if data else None


def flops(material: Material) -> Figure:
    """Share of the prefill compute that hits save."""
    data = _bars(material, lambda r: r.run.flops_saved_rate, material.policies)
    return {"data": data, "layout": _bar_layout("Prefill compute saved", rangemode="tozero")}


def first_token_boxes(material: Material) -> Figure:
    """Distribution of the time to first token."""
    look = styles(material.policies)
    names = [name for name, _ in material.capacities]
    data: list[Figure] = []
    for policy in material.policies:
        replays = material.of(policy)
        columns = list(zip(*(r.ttft for r in replays), strict=True))
        low, first, middle, third, high = (list(map(_short, column)) for column in columns)
        data.append(
            {
                "type": "box",
                "name": replays[0].label,
                "x": [r.run.capacity for r in replays],
                "lowerfence": low,
                "q1": first,
                "median": middle,
                "q3": third,
                "upperfence": high,
                "marker": {"color": look[policy].color},
                "line": {"width": 1.5},
            }
        )
    layout = _layout("Pool", "Time to first token", height=400)
    layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": names}
    times = [time for r in material.replays if r.online for time in r.ttft]
    layout["yaxis"] |= _log_axis(min(times), max(times), seconds)
    layout["boxmode"] = "group"
    return {"data": data, "layout": layout}


def first_token_curve(material: Material, advice: Advice) -> Figure:
    """Share of the requests with a first token by a given time, at one pool size."""

    def traces(replay: Replay) -> list[Figure]:
        style = styles(material.policies)[replay.run.policy]
        return [
            _line(
                replay.ttft_curve,
                [at / 100 for at in range(len(replay.ttft_curve))],
                name=replay.label,
                mode="lines",
                line={"color": style.color, "width": style.width, "dash": style.dash},
            )
        ]

    layout = _layout("Time to first token", "Requests with a first token", height=420)
    times = [time for r in material.replays if r.online for time in r.ttft_curve]
    layout["xaxis"] |= _log_axis(min(times), max(times), seconds)
    layout["yaxis"] |= {"tickformat": ".0%"}
    return _by_pool(material, advice, traces, layout)


def losses_over_time(material: Material, advice: Advice) -> Figure:
    """Regretted and evicted tokens over the time of the trace, at one pool size."""
    bins = material.bins
    shown = any(r.evicted is not None and any(r.evicted) for r in material.replays if r.online)

    def traces(replay: Replay) -> list[Figure]:
        style = styles(material.policies)[replay.run.policy]
        line = {"color": style.color, "width": style.width - 0.5, "dash": style.dash}
        found = [
            _line(bins.starts, replay.regretted, name=replay.label, mode="lines", line=line)
            | {"legendgroup": replay.run.policy}
        ]
        if shown and replay.evicted is not None:
            found.append(
                _line(bins.starts, replay.evicted, name=replay.label, mode="lines", line=line)
                | {"legendgroup": replay.run.policy, "yaxis": "y2", "showlegend": False}
            )
        return found

    what = (
        "Requests" if bins.unit == "requests" else {"s": "Seconds", "min": "Minutes", "h": "Hours"}[bins.unit]
    )
    layout = _layout(f"{what} since the first request", "Regretted tokens", height=580 if shown else 400)
    layout["yaxis"] |= {"rangemode": "tozero"}
    if shown:
        layout["yaxis"] |= {"domain": [0.55, 1.0]}
        layout["yaxis2"] = layout["yaxis"] | {
            "domain": [0.0, 0.45],
            "title": {"text": "Evicted tokens", "standoff": 12},
            "anchor": "x",
        }
        layout["xaxis"] |= {"anchor": "y2"}
    return _by_pool(material, advice, traces, layout)


def _by_pool(
    material: Material, advice: Advice, traces: Callable[[Replay], list[Figure]], layout: Figure
) -> Figure:
    """One chart per pool size, with buttons; the recommended one is shown first."""
    names = [name for name, _ in material.capacities if material.at(name)]
    shown = advice.chosen.run.capacity if advice.chosen else names[0]
    data: list[Figure] = []
    owners: list[str] = []
    for name in names:
        for replay in material.at(name):
            made = traces(replay)
            data.extend(made)
            owners.extend([name] * len(made))
    for trace, owner in zip(data, owners, strict=True):
        trace["visible"] = owner == shown
    if len(names) > 1:
        layout["updatemenus"] = [
            {
                "type": "buttons",
                "direction": "right",
                "x": 0,
                "xanchor": "left",
                "y": 1.0,
                "yanchor": "bottom",
                "pad": {"b": 10},
                "showactive": True,
                "active": names.index(shown),
                "bgcolor": "#ffffff",
                "bordercolor": MUTED,
                "buttons": [
                    {
                        "label": f"pool of {name}",
                        "method": "restyle",
                        "args": ["visible", [owner == name for owner in owners]],
                    }
                    for name in names
                ],
            }
        ]
        layout["margin"] |= {"t": 64}
    return {"data": data, "layout": layout}


def _bars(
    material: Material, value: Callable[[Replay], float | None], policies: Iterable[str]
) -> list[Figure]:
    look = styles(material.policies)
    data: list[Figure] = []
    for policy in policies:
        rows = [(r, value(r)) for r in material.of(policy)]
        known = [(r, v) for r, v in rows if v is not None]
        if known:
            data.append(
                {
                    "type": "bar",
                    "name": known[0][0].label,
                    "x": [r.run.capacity for r, _ in known],
                    "y": [_short(v) for _, v in known],
                    "text": [f"{v:.0%}" for _, v in known],
                    "textposition": "outside",
                    "cliponaxis": False,
                    "marker": {
                        "color": look[policy].color,
                        "pattern": {"shape": look[policy].pattern, "solidity": 0.25},
                    },
                    "hovertemplate": "%{y:.1%}<extra>%{fullData.name}</extra>",
                }
            )
    return data


def _line(xs: Iterable[float], ys: Iterable[float], **more: Any) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [_short(x) for x in xs],
        "y": [_short(y) for y in ys],
    } | more


def _short(value: float) -> float:
    """Round to six digits: more than a chart shows, and the same on every machine."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _log_axis(low: float, high: float, words: Callable[[float], str]) -> Figure:
    """A logarithmic axis with formatted ticks at 1, 2 and 5 times each power of ten."""
    if low <= 0:  # zero has no logarithm
        return {"rangemode": "tozero"}
    ticks = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        for step in (1, 2, 5)
    ]
    if high > 1000 * low:
        ticks = ticks[::3]
    return {"type": "log", "tickvals": [_short(t) for t in ticks], "ticktext": [words(t) for t in ticks]}


def _level(height: float) -> Figure:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
    }


def _layout(x: str, y: str, *, height: int) -> Figure:
    axis = {
        "gridcolor": GRID,
        "linecolor": MUTED,
        "showline": True,
        "zeroline": False,
        "automargin": True,
    }
    return {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 16, "b": 48},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "size": 14, "color": INK},
        "hovermode": "closest",
        "legend": {"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1},
        "xaxis": axis | {"title": {"text": x, "standoff": 10}},
        "yaxis": axis | {"title": {"text": y, "standoff": 12}},
    }


def _bar_layout(y: str, **axis: Any) -> Figure:
    layout = _layout("Pool", y, height=380) | {"barmode": "group"}
    layout["xaxis"] |= {"type": "category"}
    layout["yaxis"] |= {"tickformat": ".0%"} | axis
    return layout
