"""The commands that pages show in blocks that are not run: ``text`` blocks, and indented ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.pages import REPO, Page, pages

__all__ = ["Command", "commands"]

PROGRAMS = ("costcache", "docker", "make", "pip", "python", "sglang", "vllm")
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
_ASSIGNED = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: The page's name.
        words: The program and its arguments.
        text: The whole line, with what is before and after it in a pipe.
    """

    page: str
    words: tuple[str, ...]
    text: str

    @property
    def program(self) -> str:
        """What is run."""
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands(*programs: str) -> list[Command]:
    """The commands of all pages that run one of these programs, in order."""
    # Usage lines are no commands.
    found = [page for page in pages() if page.name != "docs/reference/command-line.md"]
    found += [Page(path) for path in sorted((REPO / "examples").glob("*/README.md"))]
    return [each for page in found for each in _of(page) if each.program in programs]


def _of(page: Page) -> Iterator[Command]:
    blocks = [b.body for b in page.blocks() if b.language == "text" and not {"output", "said"} & {*b.marks}]
    blocks += [re.sub(r"^ {4}", "", each, flags=re.MULTILINE) for each in _INDENTED.findall(page.prose)]
    for block in blocks:
        for line in _lines(block):
            for words in _programs(line):
                yield Command(page.name, tuple(words), line)


def _lines(block: str) -> Iterator[str]:
    """Lines as the shell takes them: a backslash or an open quote goes on in the next line."""
    line = ""
    for one in block.splitlines():
        line = f"{line}{one}"
        if line.endswith("\\"):
            line = line[:-1]
            continue
        try:
            shlex.split(line, comments=True)
        except ValueError:
            line += "\n"
            continue
        yield line.removeprefix("$ ").strip()
        line = ""


def _programs(line: str) -> Iterator[list[str]]:
    """The programs of a line that are ours to check."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    part: list[str] = []
    for word in [*lexer, "|"]:
        if set(word) <= set("|;&"):
            while part and _ASSIGNED.fullmatch(part[0]):
                part.pop(0)
            if part and part[0] in PROGRAMS and len(part) > 1:
                yield part
            part = []
        else:
            part.append(word)
