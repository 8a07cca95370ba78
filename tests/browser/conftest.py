"""A headless Chromium, for tests of the report as a reader sees it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser, as playwright's; the test is skipped where there is none."""
    from playwright.sync_api import sync_playwright

    named = os.environ.get("COSTCACHE_BROWSER")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            "no browser: install chromium, such as Debian's chromium-headless-shell, or set COSTCACHE_BROWSER"
        )
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, who runs the tests in containers; the pages are our own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
