"""Markdown pages as the tests see them: fenced blocks, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: The first word of the info string.
        marks: Its other words.
        body: The text.
        line: Line of the page that the body starts on, from 1.
    """

    language: str
    marks: tuple[str, ...]
    body: str
    line: int

    def mark(self, name: str) -> str | None:
        """The value of a ``name=value`` mark."""
        return next((mark.partition("=")[2] for mark in self.marks if mark.startswith(f"{name}=")), None)


@dataclass(frozen=True)
class Page:
    """A Markdown file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the root."""
        return self.path.relative_to(REPO).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self) -> Iterator[Block]:
        """Its fenced blocks, in order."""
        text = self.text
        for found in _FENCE.finditer(text):
            language, *marks = found["info"].split() or [""]
            line = text.count("\n", 0, found.start("body")) + 1
            yield Block(language, tuple(marks), found["body"], line)

    def links(self) -> list[str]:
        """Targets of its links."""
        return _LINK.findall(re.sub(r"`[^`\n]*`", "", self.prose))

    def anchors(self) -> set[str]:
        """The anchors of its headings, as GitHub makes them."""
        return {anchor(heading) for heading in _HEADING.findall(self.prose)}


def anchor(heading: str) -> str:
    """``## The `trim` setting`` is linked to as ``#the-trim-setting``."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def pages() -> list[Page]:
    """Every page that readers see."""
    found = [REPO / name for name in TOP]
    found += sorted((REPO / "plugins").glob("*/README.md"))
    found += sorted((REPO / "docs").rglob("*.md"))
    return [Page(path) for path in found]
