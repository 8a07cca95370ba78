"""Renders the report as one HTML file that loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from costcache.report import charts, tables
from costcache.report.advice import advise
from costcache.report.files import check_outputs, write_whole
from costcache.report.sheet import sheet
from costcache.report.svg import draw, legend
from costcache.report.tiers import host_section
from costcache.report.words import share, size

if TYPE_CHECKING:
    from costcache.report.advice import Advice
    from costcache.report.material import Material
    from costcache.report.svg import Chart

__all__ = ["render", "write_report"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(material: Material, path: Path) -> None:
    """Write the page of :func:`render` atomically.

    Raises:
        SettingsError: If the folder does not exist.
        OSError: If the file cannot be written.
    """
    check_outputs(report=path)
    write_whole(path, render(material).encode())


def render(material: Material) -> str:
    """Render the report as one HTML page; equal material gives equal bytes."""
    advice = advise(material)
    parts = [_advice(advice), _replayed(material)]
    if material.policies:
        parts += _charts(material, advice)
    if material.host is not None:
        parts.append(
            _section(
                "How much host memory pays",
                f"Replayed with {material.host.policy} on every tier and writing {material.host.write}, on a "
                "server with a queue that caches prompts only. Sizes are of one rank.",
                host_section(material.host),
            )
        )
    table = tables.all_figures(material, advice)
    parts += [_section("All figures", "", table), _caveats(advice)]
    title = f"Prefix cache eviction: {material.trace} on {material.model}"
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{sheet()}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</main>",
            f"<footer>Made by costcache {escape(material.version)}.</footer>",
            "</body>",
            "</html>",
            "",
        )
    )


def _section(title: str, text: str, *parts: str, kind: str = "", name: str = "") -> str:
    lead = f'<p class="lead">{escape(text)}</p>' if text else ""
    opening = f'<section class="{kind}">' if kind else "<section>"
    heading = f'<h2 id="{name}">' if name else "<h2>"
    return "\n".join((opening, f"{heading}{escape(title)}</h2>", lead, *parts, "</section>"))


def _list(items: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _advice(advice: Advice) -> str:
    parts = [f'<p class="headline">{escape(advice.headline)}</p>', _list(advice.reasons)]
    if advice.command:
        parts += [
            f"<pre>{escape(advice.command)}</pre>",
            (
                "<p>Without --max-total-tokens SGLang sizes the pool itself: adjust --mem-fraction-static "
                "until its log shows about this many tokens.</p>"
            ),
        ]
    if advice.losses:
        parts += ["<h3>Where it loses</h3>", _list(advice.losses)]
    return _section("Recommendation", "", *parts, kind="advice")


def _caveats(advice: Advice) -> str:
    return _section("Limits of this report", "", _list(advice.caveats))


def _replayed(material: Material) -> str:
    served = material.deployment
    ways = [f"{name} {served[name]}" for name in ("tp", "pp", "dp_attention") if served.get(name, 1) != 1]
    each = f"{size(material.token_bytes)} per GPU" if material.token_bytes else "no key and value bytes"
    counted = f" (the first {material.warmup:,} only warm up the cache)" if material.warmup else ""
    facts = {
        "Trace": f"{material.trace}: {material.requests:,} requests{counted}, "
        f"{material.input_tokens:,} prompt tokens",
        "Model": f"{material.model}, {', '.join([*ways, 'KV cache in ' + str(served['kv_dtype'])])}; "
        f"a cached token takes {each}",
        **(
            {
                "Windows": f"{material.windows}; of the largest pool this makes "
                + ", ".join(
                    f"{fit:,} tokens of sequences of {length:,}" for length, fit, _ in material.lengths
                )
                + f" ({material.lengths[0][2]:,} in one pool of all layers)"
            }
            if material.windows
            else {}
        ),
        "Pages": f"{material.page_size:,} tokens each; "
        f"{material.distinct_tokens:,} tokens in distinct whole pages"
        + (f", {size(material.distinct_tokens * material.token_bytes)}" if material.token_bytes else ""),
        "Upper bound": f"{share(material.ceiling)} of the prompt tokens hit, in an unlimited pool",
        "Policies": ", ".join(dict.fromkeys(r.label for r in material.replays)),
        "Pools": "; ".join(
            f"{name}: {tokens:,} tokens"
            + (f", {size(tokens * material.token_bytes)}" if material.token_bytes else "")
            for name, tokens in material.capacities
        ),
        "Mode": (
            "a server with a queue, reserved memory and generated tokens"
            if material.serving
            else "one request at a time"
        )
        + (", free target restored after every request" if material.always_free else ""),
    }
    facts["Made by"] = f"costcache {material.version}"
    facts["Seed"] = f"{material.seed}, of the arrivals of a trace without a clock"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    if material.command:
        rows += f"<dt>Command</dt><dd><code>{escape(material.command)}</code></dd>"
    return _section("What was replayed", "", f"<dl>{rows}</dl>")


def _charts(material: Material, advice: Advice) -> list[str]:
    """The sections with charts."""
    pools = charts.pools_drawn(material, advice)
    ceiling = (
        "The dashed line is the offline optimum, the dotted one an unlimited pool."
        if material.optimum
        else "The dotted line is an unlimited pool."
    )
    left_out = len([name for name, _ in material.capacities if material.at(name)]) - len(pools)
    more = f" {left_out} pool sizes are left out here: all are in the table at the end." if left_out else ""
    rates = charts.hit_rates(material, advice)
    parts = [
        _section(rates.title, f"Higher is better. {ceiling}", _figure(rates), name=f"{rates.name}-title")
    ]
    closed = tables.bars(
        material, pools, "Gap closed", lambda r: None if r.run.policy == "lru" else r.gap_closed
    )
    if closed:
        parts.append(
            _section(
                "Gap from LRU to the optimum",
                "0 % is LRU, 100 % the offline optimum, which knows the future. Negative is worse than LRU."
                + more,
                closed,
            )
        )
    parts += [
        _section(
            "Time to first token",
            "Lower is better. A box spans the middle half of the requests, with a line at the median; "
            "whiskers reach from the 5th to the 95th percentile. The scale is logarithmic." + more,
            tables.boxes(material, pools),
            _by_pool(
                "requests",
                "Requests with a first token by a given time",
                pools,
                advice,
                _first_tokens(material),
            ),
        ),
        _section(
            "Evictions and the misses they caused",
            "Regretted tokens are prompt tokens of earlier requests that were no longer cached when "
            "requested again. Lower is better. Evicted tokens made room for new ones. "
            f"Each point sums one of {len(material.bins.starts)} equal spans of the trace." + more,
            _by_pool("tokens", "Tokens over the time of the trace", pools, advice, _over_time(material)),
        ),
        _section(
            "Prefill compute saved",
            "Higher is better. A token deep in a long prompt costs more to compute than one at its start, so "
            "this can differ from the token hit rate." + more,
            tables.bars(material, pools, "Compute saved", lambda r: r.run.flops_saved_rate),
        ),
    ]
    return parts


def _first_tokens(material: Material) -> Callable[[str, str], list[str]]:
    def panel(name: str, capacity: str) -> list[str]:
        chart = charts.first_token_curve(material, capacity)
        table = tables.percentiles(material.at(capacity), capacity)
        return [_titled(replace(chart, name=f"{chart.name}-{name}")), _details(table)]

    return panel


def _over_time(material: Material) -> Callable[[str, str], list[str]]:
    def panel(name: str, capacity: str) -> list[str]:
        drawn = [charts.regretted(material, capacity), charts.evicted(material, capacity)]
        table = tables.over_time(material, capacity)
        return [
            *(_titled(replace(chart, name=f"{chart.name}-{name}")) for chart in drawn if chart is not None),
            _details(table),
        ]

    return panel


def _by_pool(
    name: str, title: str, pools: Sequence[str], advice: Advice, panel: Callable[[str, str], list[str]]
) -> str:
    """A panel per pool size; buttons choose the one that is shown, the advised one at first."""
    shown = advice.chosen.run.capacity if advice.chosen else pools[0]
    buttons = [
        f'<label><input type="radio" name="{name}"{" checked" if pool == shown else ""}>'
        f"pool of {escape(pool)}</label>"
        for pool in pools
    ]
    panels = [f'<div class="panel">{"".join(panel(str(at), pool))}</div>' for at, pool in enumerate(pools)]
    if len(pools) == 1:
        return panels[0]
    choice = f'<p class="pools">{"".join(buttons)}</p>'
    return f'<fieldset class="by"><legend>{escape(title)}</legend>{choice}{"".join(panels)}</fieldset>'


def _titled(chart: Chart) -> str:
    return f'<h3 id="{chart.name}-title">{escape(chart.title)}</h3>{_figure(chart)}'


def _figure(chart: Chart) -> str:
    said = f'<figcaption id="{chart.name}-text">{escape(chart.text)}</figcaption>'
    return f"<figure>{draw(chart)}{legend(chart.lines)}{said}</figure>"


def _details(table: str) -> str:
    return f"<details><summary>The figures as a table</summary>{table}</details>"
