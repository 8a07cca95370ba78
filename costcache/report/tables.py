"""Tables of a report, some with bars or boxes in their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from costcache.report.charts import first_token_axis
from costcache.report.style import styles
from costcache.report.svg import box, scale
from costcache.report.words import seconds, share, size

if TYPE_CHECKING:
    from costcache.report.advice import Advice
    from costcache.report.material import Material, Replay

__all__ = ["all_figures", "bars", "boxes", "over_time", "percentiles"]

_PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99)
_SPANS = 8


def bars(
    material: Material, pools: Sequence[str], title: str, value: Callable[[Replay], float | None]
) -> str:
    """A bar per policy and pool, from zero, with its share; empty if no value is known."""
    found = {name: [(r, v) for r in material.at(name) if (v := value(r)) is not None] for name in pools}
    values = [v for rows in found.values() for _, v in rows]
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    look = styles(material.policies)

    def bar(replay: Replay, at: float) -> str:
        start, end = sorted((0.0, at))
        left, width = (start - low) / (high - low), (end - start) / (high - low)
        zero = f'<i class="zero" style="left:{-low / (high - low):.2%}"></i>' if low < 0 else ""
        filled = f'style="left:{left:.2%};width:{width:.2%}"'
        return f'{zero}<i class="{look[replay.run.policy].name}" {filled}></i>'

    bodies = [
        _group(
            f"pool of {name}",
            3,
            [
                f'{_row(r)}<td class="number">{share(v)}</td><td><div class="bar">{bar(r, v)}</div></td></tr>'
                for r, v in rows
            ],
        )
        for name, rows in found.items()
        if rows
    ]
    head = f'<th scope="col">Policy</th><th scope="col" colspan="2">{escape(title)}</th>'
    return _table(f"{title} by pool and policy", head, bodies, "drawn")


def boxes(material: Material, pools: Sequence[str]) -> str:
    """A box per policy and pool, with its numbers."""
    axis = first_token_axis(material)
    look = styles(material.policies)
    bodies = [
        _group(
            f"pool of {name}",
            3,
            [
                f'{_row(r)}<td class="number">{seconds(r.ttft[2])}'
                f"<small>{seconds(r.ttft[0])} to {seconds(r.ttft[4])}</small></td>"
                f"<td>{box(look[r.run.policy], axis, r.ttft, seconds)}</td></tr>"
                for r in material.at(name)
            ],
        )
        for name in pools
    ]
    head = (
        '<th scope="col">Policy</th><th scope="col">Median <small>5 % to 95 %</small></th>'
        f'<th scope="col">Distribution{scale(axis)}</th>'
    )
    return _table("Time to first token by pool and policy", head, bodies, "drawn")


def percentiles(replays: Sequence[Replay], capacity: str) -> str:
    """The time to first token of each policy at some percentiles, at one pool size."""
    head = '<th scope="col">Policy</th>' + "".join(f'<th scope="col">{at} %</th>' for at in _PERCENTILES)
    rows = [
        _row(r) + "".join(_number(seconds(r.ttft_curve[at])) for at in _PERCENTILES) + "</tr>"
        for r in replays
    ]
    return _scrolling(
        f"Time to first token by percentile, at {capacity}", head, [f"<tbody>{''.join(rows)}</tbody>"]
    )


def over_time(material: Material, capacity: str) -> str:
    """Regretted and evicted tokens of each policy in spans of the trace, at one pool size."""
    replays = material.at(capacity)
    bins = material.bins
    each = len(bins.starts) // _SPANS
    head = '<th scope="col">Policy</th>' + "".join(
        f'<th scope="col">from {bins.starts[at * each]:.3g} {bins.unit}</th>' for at in range(_SPANS)
    )

    def row(replay: Replay, values: Sequence[int]) -> str:
        sums = (sum(values[at * each : (at + 1) * each]) for at in range(_SPANS))
        return _row(replay) + "".join(_number(f"{total:,}") for total in sums) + "</tr>"

    bodies = [_group("regretted tokens", _SPANS + 1, [row(r, r.regretted) for r in replays])]
    known = [row(r, r.evicted) for r in replays if r.evicted is not None and any(r.evicted)]
    if known:
        bodies.append(_group("evicted tokens", _SPANS + 1, known))
    return _scrolling(f"Regretted and evicted tokens over the trace, at {capacity}", head, bodies)


def all_figures(material: Material, advice: Advice) -> str:
    """The figures of every replay."""
    columns: tuple[tuple[str, Callable[[Replay], str]], ...] = (
        ("Token hit rate", lambda r: share(r.run.token_hit_rate, 2)),
        ("Compute saved", lambda r: share(r.run.flops_saved_rate, 2)),
        ("Gap closed", lambda r: "–" if r.gap_closed is None else share(r.gap_closed, 0)),
        ("TTFT, mean", lambda r: seconds(r.run.ttft_mean)),
        ("TTFT, median", lambda r: seconds(r.run.ttft_p50)),
        ("TTFT, p90", lambda r: seconds(r.run.ttft_p90)),
        ("TTFT, p99", lambda r: seconds(r.run.ttft_p99)),
        ("KV not computed", lambda r: size(r.run.kv_bytes_avoided)),
        ("Shortfall tokens", lambda r: f"{r.run.shortfall_tokens:,}"),
        ("Evicted tokens", lambda r: f"{r.run.evicted_tokens:,}"),
        ("Regretted tokens", lambda r: f"{sum(r.regretted):,}"),
    )
    head = '<th scope="col">Policy</th>' + "".join(
        f'<th scope="col">{escape(title)}</th>' for title, _ in columns
    )
    bodies = []
    for name, tokens in material.capacities:
        replays = [r for r in material.replays if r.run.capacity == name]
        rows = [
            _row(r, "advised" if r is advice.chosen else "")
            + "".join(_number(words(r)) for _, words in columns)
            + "</tr>"
            for r in replays
        ]
        limited = any(r.run.capacity_tokens is not None for r in replays)
        pool = f"pool of {name}: {tokens:,} tokens" if limited else f"pool of {name}"
        bodies.append(_group(pool, len(columns) + 1, rows))
    return _scrolling("All figures by pool and policy", head, bodies)


def _row(replay: Replay, note: str = "") -> str:
    """The beginning of a row: its heading."""
    kind = f' class="{note}"' if note else ""
    more = f" <small>{note}</small>" if note else ""
    return f'<tr{kind}><th scope="row">{escape(replay.label)}{more}</th>'


def _number(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _group(title: str, columns: int, rows: Sequence[str]) -> str:
    heading = f'<tr><th scope="rowgroup" colspan="{columns}">{escape(title)}</th></tr>'
    return f"<tbody>{heading}{''.join(rows)}</tbody>"


def _table(caption: str, head: str, bodies: Sequence[str], kind: str) -> str:
    return (
        f'<table class="{kind}"><caption>{escape(caption)}</caption>'
        f"{'<col><col><col>' if kind == 'drawn' else ''}"
        f"<thead><tr>{head}</tr></thead>{''.join(bodies)}</table>"
    )


def _scrolling(caption: str, head: str, bodies: Sequence[str]) -> str:
    """A table too wide for a narrow screen, which scrolls by itself, with the keyboard too."""
    table = _table(caption, head, bodies, "figures")
    return f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">{table}</div>'
