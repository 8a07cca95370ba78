"""The report in a real browser: on narrow and wide, light and dark screens, without a mouse or scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from costcache.cli import cli
from costcache.report import render
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings
from tests.materials import material_from

NEEDS = "needs {}, which is in the extra 'dev'"
pytest.importorskip("playwright.sync_api", reason=NEEDS.format("playwright"))
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason=NEEDS.format("axe-playwright-python")
)

WIDTHS = (320, 420, 1400)
SCHEMES = ("light", "dark")
OPTIONS = {
    "usual": ("--policy", "costcache,lru,lfu,slru,optimum", "--capacity", "5%,10%,20%"),
    "least": ("--policy", "lru", "--capacity", "10%"),
    "serving": ("--policy", "lru,mru", "--capacity", "5%,20%", "--serving"),
}
MANY = "many"

# Texts of a chart that touch each other, and visible texts that are cut off or stick out of the page.
OVERLAPS = """() => [...document.querySelectorAll("svg.plot, svg.scale")].flatMap(svg => {
  const boxes = [...svg.querySelectorAll("text")]
    .map(text => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
  return boxes.flatMap(([one, a], at) => boxes.slice(at + 1).filter(([, b]) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3
  ).map(([other]) => `${one} touches ${other}`));
})"""
OUTSIDE = """() => [...document.querySelectorAll(
    "h1,h2,h3,p,li,dd,pre,label,summary,figcaption,text,th,td,caption")]
  .filter(each => !each.closest(".scroll") && !each.closest("details:not([open]) > :not(summary)"))
  .filter(each => { const box = each.getBoundingClientRect();
    return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5
      || each.tagName != "text" && each.clientWidth && each.scrollWidth > each.clientWidth + 1); })
  .map(each => `${each.tagName}: ${each.textContent.slice(0, 60)}`)"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name, made once."""
    folder = tmp_path_factory.mktemp("reports")
    trace = folder / "chat.jsonl"
    write_trace(generate("chat", workload_settings("chat", {"requests": 400})), trace)
    found = {}
    for name, options in OPTIONS.items():
        found[name] = folder / f"{name}.html"
        line = ["simulate", str(trace), "--model", "deepseek-v3", *options, "--report", str(found[name])]
        result = CliRunner().invoke(cli, line)
        assert result.exit_code == 0, result.output
    pools: dict[str, int | None] = {f"{size * 1234567}tok": size * 1_234_567 for size in range(1, 13)}
    rates = {f"policy-with-a-long-name-{at}": [0.3 + at / 90 + n / 40 for n in range(12)] for at in range(24)}
    found[MANY] = folder / "many.html"
    material = material_from(pools, rates, failed=[("policy-with-a-long-name-23", "1234567tok")])
    found[MANY].write_text(render(material), encoding="utf-8")
    return found


@pytest.fixture
def opened(browser: Any, reports: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page; the test fails if the browser complains of it or it asks for anything else."""
    contexts, said, asked = [], [], []

    def open_page(name: str = "usual", *, width: int = 1400, scheme: str = "light", **more: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(reports[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert {url.rpartition("/")[2] for url in asked} <= {path.name for path in reports.values()}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [*OPTIONS, MANY])
def test_a_page_fits_its_screen(opened: Callable[..., Any], name: str, width: int) -> None:
    page = opened(name, width=width)
    for closed in page.locator("summary:visible").all():
        closed.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(("usual", width, scheme) for width in WIDTHS[1:] for scheme in SCHEMES),
        ("least", 420, "light"),
        ("serving", 1400, "dark"),
    ],
)
def test_axe_finds_no_fault(opened: Callable[..., Any], name: str, width: int, scheme: str) -> None:
    """Contrast, names of controls, order of headings, landmarks, tables, and all other rules of axe-core."""
    page = opened(name, width=width, scheme=scheme, bypass_csp=True)  # the page lets no script in
    for closed in page.locator("summary:visible").all():
        closed.click()
    found = axe.Axe().run(page)
    assert [f"{fault['id']}: {fault['nodes'][0]['html']}" for fault in found.response["violations"]] == []
    assert len(found.response["passes"]) > 15


def test_the_colours_follow_the_reader(opened: Callable[..., Any]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert opened(scheme="light").evaluate(ground) == "rgb(246, 247, 249)"
    dark = opened(scheme="dark")
    assert dark.evaluate(ground) == "rgb(13, 17, 23)"
    dark.emulate_media(media="print")
    assert dark.evaluate(ground) == "rgb(246, 247, 249)"


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_scripts_are_not_missed(opened: Callable[..., Any], width: int) -> None:
    page = opened(width=width, java_script_enabled=False)
    assert page.screenshot(full_page=True) == opened(width=width).screenshot(full_page=True)
    assert page.locator("table.figures").last.is_visible()
    assert page.locator("svg.plot:visible").count() == 4


def test_a_pool_is_chosen_with_the_keyboard(opened: Callable[..., Any]) -> None:
    page = opened()
    shown = page.locator(".panel:visible h3")
    assert shown.all_inner_texts() == [
        "Share of requests with a first token by a given time, at 20%",
        "Regretted tokens, at 20%",
        "Evicted tokens, at 20%",
    ]
    focused = "document.activeElement.closest('label, summary, .scroll')?.textContent.slice(0, 22)"
    stops = []
    for _ in range(5):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(focused))
        if len(stops) == 1:
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            page.keyboard.press("ArrowLeft")
        elif len(stops) == 2:
            page.keyboard.press("Enter")  # opens the table below the chart
    assert stops == [
        "pool of 20%",
        "The figures as a table",
        "Time to first token by",
        "pool of 20%",
        "The figures as a table",
    ]
    assert shown.all_inner_texts()[0].endswith("at 10%")
    assert page.locator("details[open] table").is_visible()


def test_a_wide_table_scrolls_with_the_keyboard(opened: Callable[..., Any]) -> None:
    page = opened(width=420)
    table = page.locator(".scroll").last
    table.focus()
    # The page's own policy forbids what playwright's wait_for_function does, so this waits by itself.
    for _ in range(50):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(100)
        if table.evaluate("table => table.scrollLeft > 0"):
            break
    assert table.evaluate("table => table.scrollLeft > 0")
    policy, region = table.locator("th[scope=row]").first.bounding_box(), table.bounding_box()
    assert policy["x"] == pytest.approx(region["x"], abs=1)  # the name of the row stays in sight


def test_all_pools_are_printed(opened: Callable[..., Any]) -> None:
    page = opened()
    page.emulate_media(media="print")
    assert page.locator(".panel:visible").count() == 6


def test_a_chart_is_drawn_to_scale(opened: Callable[..., Any]) -> None:
    """Marks lie where the axis puts their values, at every width."""
    places = """svg => { const plot = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("path.mark")].map(mark => { const box = mark.getBoundingClientRect();
        return [mark.textContent, (plot.bottom - (box.top + box.bottom) / 2) / plot.height]; }); }"""
    for width in WIDTHS:
        page = opened(width=width)
        plot = page.locator("svg.plot").first
        high = float(plot.locator("text[text-anchor=end]").last.text_content().rstrip("%"))
        found = plot.evaluate(places)
        assert len(found) == 5 * 3  # policies and pools
        for tip, above in found:
            rate = float(tip.rpartition(": ")[2].rstrip(" %"))
            assert above == pytest.approx(rate / high, abs=0.01), tip
