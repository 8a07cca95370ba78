"""The style sheet of the page, for narrow and wide, light and dark screens, and for paper."""

from __future__ import annotations

from costcache.report.style import COLORS, DARK, DARK_COLORS, LIGHT

__all__ = ["sheet"]

_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main, footer { max-width: 1200px; margin: 0 auto; padding: 24px 20px; }
footer { color: var(--muted); padding-top: 0; }
h1, dd, li, p, legend, label, caption { overflow-wrap: anywhere; }
h1 { font-size: 28px; line-height: 1.25; margin: 8px 0 4px; }
h2 { font-size: 21px; line-height: 1.3; margin: 0 0 4px; }
h3 { font-size: 16px; margin: 18px 0 2px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 20px 24px;
  margin: 20px 0; }
section.advice { border: 2px solid var(--accent); }
p { margin: 6px 0 10px; max-width: 80ch; }
.lead, dt, caption, figcaption, small { color: var(--muted); }
.headline { font-size: 20px; font-weight: 600; line-height: 1.4; }
ul { padding-left: 22px; margin: 6px 0 12px; }
li { margin: 4px 0; max-width: 90ch; }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.5 ui-monospace, monospace; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 20px; margin: 8px 0; }
dd { margin: 0; }
dd code { font: 14px/1.5 ui-monospace, monospace; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }

figure { margin: 12px 0 0; }
figcaption, small { font-size: 14px; }
figcaption { margin-top: 8px; max-width: 90ch; }
svg { display: block; overflow: visible; }
svg svg { overflow: visible; }
.plot { width: calc(100% - 76px); height: 320px; margin: 8px 16px 34px 60px; }
.plot.low { height: 220px; }
.plot > text, .scale text { fill: var(--muted); font-size: 13px; }
.axis { margin: 10px 0 0; font-size: 14px; color: var(--muted); }
.axis.x { margin: 0 16px 0 60px; text-align: center; max-width: none; }
.grid { stroke: var(--line); stroke-width: 1; }
.level { stroke: var(--edge); stroke-width: 1.5; stroke-dasharray: 2 4; }
.path { width: 100%; height: 100%; }
polyline { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
polyline, line { stroke: var(--c); }
.mark { fill: var(--c); stroke: var(--card); stroke-width: 1; }
.box { width: 100%; height: 26px; }
.box .mark { fill-opacity: .65; stroke: var(--c); }
.box .middle { stroke: var(--ink); stroke-width: 2; }
.scale { width: 100%; height: 18px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 10px 0 0; list-style: none; }
.legend li { display: flex; align-items: center; gap: 8px; margin: 0; }
.key { width: 36px; height: 16px; }

table { border-collapse: collapse; font-size: 14px; width: 100%; }
caption { text-align: left; padding: 6px 0; }
th, td { padding: 5px 8px; border-bottom: 1px solid var(--line); text-align: right; }
th { text-align: left; font-weight: 600; }
.drawn th { overflow-wrap: anywhere; }
thead th { vertical-align: bottom; background: var(--code); }
tbody th[scope=rowgroup] { border-top: 2px solid var(--edge); background: var(--card); }
tbody th[scope=row] { font-weight: 400; }
tr.advised th, tr.advised td { font-weight: 600; background: var(--code); }
.scroll { overflow-x: auto; }
.figures td, .figures tbody th { white-space: nowrap; }
.figures tbody th[scope=row] { white-space: normal; max-width: 180px; }
.figures thead th + th { text-align: right; overflow-wrap: normal; }
.figures tr > th:first-child { position: sticky; left: 0; }
.figures tbody th[scope=row] { background: var(--card); }
.figures tbody tr.advised th { background: var(--code); }
.drawn { table-layout: fixed; }
.drawn col:nth-child(1) { width: 24%; }
.drawn col:nth-child(2) { width: 14%; }
.drawn .number { white-space: nowrap; }
.drawn td small, .drawn th small { display: block; font-weight: 400; white-space: normal; }
.drawn th:nth-child(3), .drawn td:nth-child(3) { padding-right: 24px; }
.bar { position: relative; height: 16px; }
.bar i { position: absolute; top: 0; bottom: 0; background: var(--c); min-width: 1px; }
.bar .zero { border-left: 1px solid var(--edge); background: none; top: -5px; bottom: -5px; }
details { margin: 10px 0 0; }
summary { cursor: pointer; color: var(--accent); padding: 4px 0; }

.by { border: 0; padding: 0; margin: 14px 0 0; min-width: 0; }
.by > legend { font-weight: 600; padding: 0 0 6px; }
.pools { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0; max-width: none; }
.pools label { display: flex; align-items: center; gap: 6px; padding: 4px 0; }
.pools input { margin: 0; width: 18px; height: 18px; accent-color: var(--accent); }
@supports selector(:has(*)) {
@media screen {
  .by > .panel { display: none; }
SHOWN
}
}
@media (max-width: 640px) {
  main, footer { padding: 12px 10px; }
  h1 { font-size: 23px; }
  section { padding: 14px 12px; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
  dd { margin-bottom: 8px; }
  .plot { width: calc(100% - 60px); margin-left: 50px; margin-right: 10px; height: 280px; }
  .wide { display: none; }
  .drawn col:nth-child(1) { width: 30%; }
  .drawn col:nth-child(2) { width: 24%; }
  th, td { padding: 5px 5px; }
  .figures tbody th[scope=row] { max-width: 120px; }
}
@media print { section { break-inside: avoid; } }
"""
_MOST_PANELS = 8


def sheet() -> str:
    """The style sheet."""
    dark = _variables(DARK, DARK_COLORS)
    classes = ["lru", "ink", *(f"c{at}" for at in range(len(COLORS)))]
    colors = "\n".join(f".{name} {{ --c: var(--{name}); }}" for name in classes)
    shown = "\n".join(
        f"  .by:has(> .pools > :nth-child({at}) > :checked) > .panel:nth-of-type({at}) {{ display: block; }}"
        for at in range(1, _MOST_PANELS + 1)
    )
    return (
        f":root {{ color-scheme: light dark; {_variables(LIGHT, COLORS)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"{colors}{_RULES.replace('SHOWN', shown)}"
    )


def _variables(named: dict[str, str], colors: tuple[str, ...]) -> str:
    numbered = {f"c{at}": color for at, color in enumerate(colors)}
    return " ".join(f"--{name}: {color};" for name, color in (named | numbered).items())
