"""Hooks of mkdocs: the pages of the repository as a site (``make docs``).

The pages keep their places and their links, so that they read the same on the web view of the repository.
The navigation is the list in ``docs/README.md``. Only the pages with the source of public modules are the
site's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPO = Path(__file__).resolve().parent.parent
INDEX = "docs/README.md"
QUESTIONS = "docs/where-to-look.md"
PAGES = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/results/*.md",
    "plugins/*/README.md",
    "examples/*/README.md",
)
FILES = (
    "docs/images/*.png",
    "docs/assets/*",
    "benchmarks/*.py",
    "benchmarks/gpu/*.py",
    "LICENSE",
)
SOURCES = "docs/reference/source"
MODULES = (
    "costcache.hookspecs",
    "costcache.settings",
    "costcache.records",
    "costcache.orders",
    "costcache.policies.spec",
    "costcache.policies.states",
    "costcache.plugins",
    "costcache.pool",
    "costcache.pool.tree",
    "costcache.pool.pinned",
    "costcache.pool.ranked",
    "costcache.eviction",
    "costcache.binding",
    "costcache.model",
    "costcache.deployment",
    "costcache.cost",
    "costcache.radix",
    "costcache.sim.engine",
    "costcache.sim.trace",
    "costcache.sim.traces",
    "costcache.sim.workloads",
    "costcache.testing",
)
"""Modules whose public names get a page with their source."""

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")
_BOUNDS = re.compile(
    r"(?<=[.\]] )\[(?=[^\]\n]*[<>]=)"
)  # of an option's value: no link, as mkdocstrings takes it for
_ROLE = re.compile(r":\w+:<code>~?(?:[\w.]*\.)?(\w+)</code>")
_FENCE = re.compile(r"^```(\w+) (.+)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the index, and make anchors as GitHub does."""
    config.nav = [{"Home": "README.md"}, {"Where to look": QUESTIONS}, *sections(), {"All pages": INDEX}]
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the folder ``docs`` by the pages of the repository, at their places in it."""
    found = [file for file in files if file.src_dir != config.docs_dir]  # the theme's own
    for pattern in (*PAGES, *FILES):
        for path in sorted(REPO.glob(pattern)):
            name = path.relative_to(REPO).as_posix()
            found.append(File.generated(config, name, abs_src_path=str(path)))
    for module in MODULES:
        text = f"# {module}\n\n::: {module}\n"
        found.append(File.generated(config, f"{SOURCES}/{module}.md", content=text))
    return Files(found)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Take the marks for the tests from the code blocks; the name of a file becomes a title."""
    return _BOUNDS.sub(r"\\[", _FENCE.sub(_fence, markdown))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Take the roles from the docstrings of the pages with source."""
    return _ROLE.sub(r"<code>\1</code>", html) if page.file.src_uri.startswith(SOURCES) else html


def anchor(text: str, separator: str) -> str:
    """The anchor of a heading as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", separator)


def sections() -> Iterator[dict[str, Any]]:
    """The lists of the index: a section for each heading, a page for each link."""
    index = REPO / INDEX
    for part in re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        pages: list[Any] = []
        for item in re.split(r"^- ", body, flags=re.MULTILINE)[1:]:
            links = [{" ".join(text.split()): _place(link)} for text, link in _LINK.findall(item)]
            label, colon, _ = item.partition(":")
            pages += [{label: links}] if colon and "[" not in label else links[:1]
        if title == "Reference":
            pages.append({"Source": [{module: f"{SOURCES}/{module}.md"} for module in MODULES]})
        if pages:
            yield {title: pages}


def _place(link: str) -> str:
    return (REPO / INDEX).parent.joinpath(link).resolve().relative_to(REPO).as_posix()


def _fence(found: re.Match[str]) -> str:
    language, marks = found[1], found[2].split()
    title = next((mark.removeprefix("file=") for mark in marks if mark.startswith("file=")), None)
    return f"```{language}" + (f' title="{title}"' if title else "")
