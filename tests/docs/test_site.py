"""The documentation as a site: it builds strictly, its links lead somewhere, and no page asks the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.docs.pages import REPO, pages

NEEDS = "the extra 'docs' is not installed"
pytest.importorskip("mkdocs", reason=NEEDS)
pytest.importorskip("mkdocstrings", reason=NEEDS)

# Attributes that a browser follows by itself; a link is followed by its reader.
FETCHED = {"src", "srcset", "data", "poster"}
LINK_TYPES = {"canonical", "next", "prev"}  # <link rel> that only say something


class Found(HTMLParser):
    """What a page refers to.

    Attributes:
        fetched: Addresses that are loaded with the page.
        links: Addresses that a reader may click.
        anchors: Places in the page.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.fetched += [given[name] for name in FETCHED & given.keys()]
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "link" and given.get("rel") not in LINK_TYPES:
            self.fetched.append(given["href"])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    # Not quiet: what is not said is not counted by --strict.
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPO,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": "127.0.0.1:9",
            "https_proxy": "127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def found(site: Path) -> dict[Path, Found]:
    """Every page."""
    # The page of a server's missing pages is at home in no folder.
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: Found(path.read_text(encoding="utf-8")) for path in files}


def test_every_page_is_there(site: Path, found: dict[Path, Found]) -> None:
    for page in pages():
        name = re.sub(r"README\.md$", "index.md", page.name)
        assert site / name.replace(".md", ".html") in found
    assert len(list((site / "docs" / "reference" / "source").glob("costcache.*.html"))) > 10


def test_no_page_asks_the_network(site: Path, found: dict[Path, Found]) -> None:
    asked = {address for page in found.values() for address in page.fetched}
    assert asked
    assert [address for address in asked if re.match(r"(\w+:)?//", address)] == []
    for path in site.rglob("*.css"):
        styles = path.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*", styles) == [], path.name


def _leads_nowhere(found: dict[Path, Found]) -> Iterator[str]:
    for path, page in found.items():
        for link in {*page.links, *page.fetched}:
            if re.match(r"\w+:", link) or link == "":
                continue
            address, fragment = urldefrag(unquote(link))
            target = (path.parent / address).resolve() if address else path
            known = target in found
            if not (known or target.is_file()) or (
                fragment and known and fragment not in found[target].anchors
            ):
                yield f"{path.name}: {link}"


def test_links_of_the_site_lead_somewhere(found: dict[Path, Found]) -> None:
    assert list(_leads_nowhere(found)) == []


def test_docstrings_have_no_markup_of_another_tool(found: dict[Path, Found], site: Path) -> None:
    roles = re.compile(r":(?:class|meth|func|mod|attr):<code>")
    assert [path.name for path in found if roles.search(path.read_text(encoding="utf-8"))] == []
