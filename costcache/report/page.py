"""Renders the report as one HTML file that loads nothing else."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from costcache.report import charts
from costcache.report.advice import advise
from costcache.report.files import check_outputs, write_whole
from costcache.report.words import seconds, share, size

if TYPE_CHECKING:
    from costcache.report.advice import Advice
    from costcache.report.charts import Figure
    from costcache.report.material import Material

__all__ = ["render", "write_report"]

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f9; color: #1f2328; font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 28px; line-height: 1.25; margin: 8px 0 4px; }
h2 { font-size: 21px; margin: 0 0 4px; }
section { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; padding: 20px 24px;
  margin: 20px 0; }
section.advice { border: 2px solid #0072b2; }
p { margin: 6px 0 10px; max-width: 80ch; }
.lead { color: #4b5563; }
.headline { font-size: 20px; font-weight: 600; }
ul { padding-left: 22px; margin: 6px 0 12px; }
li { margin: 4px 0; max-width: 90ch; }
pre { background: #f3f4f6; border: 1px solid #e5e7eb; border-radius: 6px; padding: 12px 14px;
  overflow-x: auto; font: 14px/1.5 ui-monospace, monospace; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th, td { padding: 5px 8px; border-bottom: 1px solid #e5e7eb; text-align: right; white-space: nowrap; }
th { background: #f3f4f6; white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
tr.first td { border-top: 2px solid #9ca3af; }
.scroll { overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 8px 0; }
dt { color: #4b5563; }
dd { margin: 0; }
h3 { font-size: 16px; margin: 14px 0 2px; }
"""
# The page may run its own scripts and styles but reach nothing else, whatever a library tries.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}
_DRAW = """
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent))) {
  Plotly.newPlot(id, figure.data, figure.layout, CONFIG);
}
"""


def write_report(material: Material, path: Path) -> None:
    """Write the page of :func:`render` atomically.

    Raises:
        SettingsError: If plotly is not installed, or the folder does not exist.
        OSError: If the file cannot be written.
    """
    check_outputs(report=path)
    write_whole(path, render(material).encode())


def render(material: Material) -> str:
    """Render the report as one HTML page; equal material gives equal bytes.

    Raises:
        SettingsError: If plotly is not installed.
    """
    check_outputs(report=Path("report.html"))
    from plotly.offline import get_plotlyjs

    advice = advise(material)
    figures: dict[str, Figure] = {}
    parts = [_advice(advice), _replayed(material)]
    if material.policies:
        parts += _charts(material, advice, figures)
    parts += [_table(material), _caveats(advice)]
    title = f"Prefix cache eviction: {material.trace} on {material.model}"
    # "</" would end the script element that holds the figures.
    values = json.dumps(figures, sort_keys=True, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    draw = _DRAW.replace("CONFIG", json.dumps(_CONFIG, sort_keys=True))
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</main>",
            f"<script>{get_plotlyjs()}</script>",
            f'<script type="application/json" id="figures">{values}</script>',
            f"<script>{draw}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _section(title: str, text: str, *parts: str, kind: str = "") -> str:
    lead = f'<p class="lead">{escape(text)}</p>' if text else ""
    opening = f'<section class="{kind}">' if kind else "<section>"
    return "\n".join((opening, f"<h2>{escape(title)}</h2>", lead, *parts, "</section>"))


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
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return _section("What was replayed", "", f"<dl>{rows}</dl>")


def _charts(material: Material, advice: Advice, figures: dict[str, Figure]) -> list[str]:
    """The sections with charts; adds their figures to ``figures`` by element id."""

    def chart(name: str, title: str, figure: Figure) -> str:
        figures[name] = figure
        return f'<div id="{name}" role="img" aria-label="{escape(title, quote=True)}"></div>'

    def section(name: str, title: str, text: str, figure: Figure) -> str:
        return _section(title, text, chart(name, title, figure))

    ceiling = (
        "The dashed line is the offline optimum, the dotted one an unlimited pool."
        if material.optimum
        else "The dotted line is an unlimited pool."
    )
    parts = [
        section(
            "hit-rates",
            "Token hit rate by pool size",
            f"Higher is better. {ceiling}",
            charts.hit_rates(material),
        )
    ]
    closed = charts.gap(material)
    if closed is not None:
        parts.append(
            section(
                "gap-closed",
                "Gap from LRU to the optimum",
                "0 % is LRU, 100 % the offline optimum, which knows the future. Negative is worse than LRU.",
                closed,
            )
        )
    parts += [
        _section(
            "Time to first token",
            "Lower is better. A box spans the middle half of the requests, with a line at the median; "
            "whiskers reach from the 5th to the 95th percentile. The scale is logarithmic.",
            chart("ttft-boxes", "Time to first token by pool and policy", charts.first_token_boxes(material)),
            "<h3>Share of requests with a first token by a given time</h3>",
            chart(
                "ttft-curves",
                "Share of requests with a first token by a given time",
                charts.first_token_curve(material, advice),
            ),
        ),
        section(
            "regret",
            "Evictions and the misses they caused",
            "Regretted tokens are prompt tokens of earlier requests that were no longer cached when "
            "requested again. Lower is better. Evicted tokens made room for new ones. "
            f"Each point sums one of {len(material.bins.starts)} equal spans of the trace.",
            charts.losses_over_time(material, advice),
        ),
        section(
            "flops",
            "Prefill compute saved",
            "Higher is better. A token deep in a long prompt costs more to compute than one at its start, so "
            "this can differ from the token hit rate.",
            charts.flops(material),
        ),
    ]
    return parts


def _table(material: Material) -> str:
    headings = (
        ("Pool", True),
        ("Policy", True),
        ("Pool tokens", False),
        ("Token hit rate", False),
        ("Compute saved", False),
        ("Gap closed", False),
        ("TTFT, mean", False),
        ("TTFT, median", False),
        ("TTFT, p90", False),
        ("TTFT, p99", False),
        ("KV not computed", False),
        ("Shortfall tokens", False),
        ("Evicted tokens", False),
        ("Regretted tokens", False),
    )
    head = "".join(
        f'<th class="text">{escape(text)}</th>' if is_text else f"<th>{escape(text)}</th>"
        for text, is_text in headings
    )
    rows = []
    order = {name: at for at, (name, _) in enumerate(material.capacities)}
    last = None
    for replay in sorted(material.replays, key=lambda r: order[r.run.capacity]):
        run = replay.run
        cells = (
            "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,}",
            share(run.token_hit_rate),
            share(run.flops_saved_rate),
            "–" if replay.gap_closed is None else share(replay.gap_closed, 0),
            seconds(run.ttft_mean),
            seconds(run.ttft_p50),
            seconds(run.ttft_p90),
            seconds(run.ttft_p99),
            size(run.kv_bytes_avoided),
            f"{run.shortfall_tokens:,}",
            f"{run.evicted_tokens:,}",
            f"{sum(replay.regretted):,}",
        )
        names = f'<td class="text">{escape(run.capacity)}</td><td class="text">{escape(replay.label)}</td>'
        opening = '<tr class="first">' if run.capacity != last else "<tr>"
        rows.append(opening + names + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        last = run.capacity
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _section("All figures", "", f'<div class="scroll">{table}</div>')
