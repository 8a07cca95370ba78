"""The documentation's site in a real browser, opened from a folder, on a narrow and a wide screen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright, which is in the extra 'dev'")
pytest.importorskip("mkdocs", reason="needs mkdocs, which is in the extra 'docs'")

REPO = Path(__file__).resolve().parents[2]
WIDTHS = (420, 1400)

# Texts that stick out of the screen, other than those of a box that scrolls by itself.
OUTSIDE = """() => [...document.querySelectorAll(".md-content :is(h1,h2,h3,h4,p,li,dd,img)")]
  .filter(each => !each.closest("pre, table"))
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
  .map(each => `${each.tagName}: ${each.textContent.slice(0, 60)}`)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab; the test fails if a page complains, or asks for anything but files."""
    context = browser.new_context(viewport={"width": WIDTHS[1], "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)  # a hang is found; a busy machine is none
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_its_screen(tab: Any, site: Path, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    files = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(files) > 50
    for file in files:
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, file.name
        assert tab.evaluate(OUTSIDE) == [], file.name


def test_search_works_without_a_server(tab: Any, site: Path) -> None:
    tab.goto(f"{(site / 'index.html').as_uri()}?q=hazard")  # asks once the index has been read
    first = tab.locator("a.md-search-result__link").first
    first.wait_for(state="attached", timeout=120_000)
    address = first.get_attribute("href").partition("?")[0]
    assert address == (site / "docs" / "explanation" / "hazard.html").as_uri()
