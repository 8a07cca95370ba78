"""Runs what the pages show: every ``python`` and ``console`` block, and compares what it prints.

Blocks of a page run in order, in one folder and one namespace. Marks after the language:

- ``file=NAME`` writes the block to that file instead; other languages (json) may do so too.
- ``torch`` needs torch, ``traces`` the recorded traces, as ``traces/`` in the page's folder; where they
  are missing the page is reported as skipped there, after the blocks above have run.
- ``samples`` needs the sample traces, as ``examples/traces/`` in the page's folder.
- ``output`` on a ``text`` block: what the block above prints.
- ``shown`` is not run; the page says why.
- ``said`` on a ``text`` block: what a server says. Others hold commands, see ``test_commands.py``.

``...`` in an expected output stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import REPO, Block, Page, pages

RUN = ("python", "console")
MARKS = ("torch", "traces", "samples", "output", "shown", "said")
# What anybody gets in a pipe: without colours, without a locale, and without a network.
OFFLINE = "http://127.0.0.1:9"
ENVIRONMENT = {
    "NO_COLOR": "1",
    "LC_ALL": "C",
    "http_proxy": OFFLINE,
    "https_proxy": OFFLINE,
    "PIP_NO_INDEX": "1",
}
UNSET = ("COLUMNS", "FORCE_COLOR", "PYTEST_ADDOPTS", "PYTHONIOENCODING", "PYTHONUTF8")
SITE = "site"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

RUNNABLE = [
    page for page in pages() if any(b.language in RUN and "shown" not in b.marks for b in page.blocks())
]


class Runner:
    """Runs the blocks of one page."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""

    def run(self, block: Block) -> None:
        target = block.mark("file")
        if target is not None:
            path = self.folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        elif block.language == "text" and "output" in block.marks:
            self.compare(block.body, self.printed, block.line)
        elif block.language == "python":
            self.python(block)
        elif block.language == "console":
            self.console(block)

    def python(self, block: Block) -> None:
        # Line numbers of a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.body, str(self.page.path), "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self.names)
        self.printed = out.getvalue()

    def console(self, block: Block) -> None:
        for line, command, expected in transcript(block):
            done = subprocess.run(
                ["bash", "-c", contained(command)],
                cwd=self.folder,
                env=self.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self.printed = done.stdout
            self.compare(expected, done.stdout, line)
            failed = done.stdout.startswith("Error: ")  # a page may show an error, whole
            assert (done.returncode != 0) == failed, f"{command} ended with {done.returncode}"

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mine = {name: value for name, value in os.environ.items() if name not in UNSET}
        return {**mine, **ENVIRONMENT, "PATH": path, "PYTHONPATH": str(self.folder / SITE)}

    def compare(self, expected: str, got: str, line: int) -> None:
        # A rule of a table is as long as its widest number, which may be a timing.
        expected, got = (re.sub("─+", "─", text) for text in (expected, got))
        if not doctest.OutputChecker().check_output(expected, got, FLAGS):
            pytest.fail(f"{self.page.name}:{line} shows\n{expected}\nand the output is\n{got}", pytrace=False)


def contained(command: str) -> str:
    """The command; an installation goes into a folder of the page and asks no index."""
    options = f"--no-build-isolation --no-deps --no-index --target {SITE}"
    return command.replace("pip install ", f"pip install {options} ")


def transcript(block: Block) -> Iterator[tuple[int, str, str]]:
    """Line, command and expected output of each ``$ `` line; a ``\\`` at its end continues it."""
    lines = block.body.splitlines()
    at = 0
    while at < len(lines):
        assert lines[at].startswith("$ "), f"a console block begins with a command: {lines[at]!r}"
        start, command = at, lines[at][2:]
        while command.endswith("\\"):
            at += 1
            command = f"{command}\n{lines[at]}"
        at += 1
        first = at
        while at < len(lines) and not lines[at].startswith("$ "):
            at += 1
        yield block.line + start, command, "".join(f"{line}\n" for line in lines[first:at])


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_blocks_print_the_output_that_the_page_shows(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    runner = Runner(page, tmp_path)
    try:
        for block in page.blocks():
            if "shown" in block.marks:
                continue
            if "torch" in block.marks and importlib.util.find_spec("torch") is None:
                pytest.skip(f"{page.name}:{block.line} needs torch: the blocks above it ran")
            if "traces" in block.marks:
                (tmp_path / "traces").symlink_to(request.getfixturevalue("traces_dir"))
            if "samples" in block.marks and not (tmp_path / "examples").exists():
                (tmp_path / "examples").symlink_to(REPO / "examples")
            runner.run(block)
    finally:
        for name in set(sys.modules) - before:  # the page's own files, which other pages may name alike
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
                del sys.modules[name]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_block_has_a_known_language_and_marks(page: Page) -> None:
    for block in page.blocks():
        assert block.language in (*RUN, "dockerfile", "json", "text", "toml"), f"{page.name}:{block.line}"
        for mark in block.marks:
            known = mark in ("torch", "traces", "samples", "output", "shown", "said") or mark.startswith(
                "file="
            )
            assert known, f"{page.name}:{block.line}: {mark}"
