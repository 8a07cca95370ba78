"""The pages hold together: links, hooks, public names, generated text."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

import costcache
from costcache import hookspecs
from costcache.cli import COMMANDS, cli
from costcache.plugins import HOOKS
from tests.docs.pages import REPO, Page, pages
from tests.scripts import load_script

PAGES = pages()
REFERENCE = REPO / "docs" / "reference"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """``docs/generate.py`` as a module."""
    return load_script(REPO / "docs" / "generate.py")


def test_generated_pages_are_up_to_date(generator: ModuleType) -> None:
    for name, text in generator.pages().items():
        written = (REFERENCE / name).read_text(encoding="utf-8")
        assert written == text, f"{name} is out of date: run python docs/generate.py"


def test_the_command_line_page_shows_the_help_options_that_the_program_has(generator: ModuleType) -> None:
    page = generator.pages()["command-line.md"]
    # A command keeps the help option that it was first asked for: neither may spoil it for the other.
    assert CliRunner().invoke(cli, ["models", "-h"]).exit_code == 0
    assert generator.pages()["command-line.md"] == page
    sections = page.split("\n## costcache ")[1:]
    assert len(sections) >= len(COMMANDS)
    for section in sections:
        assert "- `-h, --help`: " in section, section.partition("\n")[0]


def test_pages_marked_as_generated_are_the_generators(generator: ModuleType) -> None:
    marked = {page.path.name for page in PAGES if generator.MARK in page.text}
    assert marked == set(generator.PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links():
        if re.match(r"https?://", link):
            continue
        target, _, fragment = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.name} links to {link}"
        if fragment:
            assert fragment in Page(path).anchors(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_place_of_one_machine(page: Page) -> None:
    folders = "work|home|root|tmp|Users|mnt|opt"
    found = re.findall(rf"(?<![\w.])/(?:{folders})\b[^\s`]*|[A-Z]:\\\S+", page.text)
    assert not found, f"{page.name}: {found}"
    assert str(Path.home()) + os.sep not in page.text


def test_every_page_of_the_documentation_is_listed_in_its_index() -> None:
    index = Page(REPO / "docs" / "README.md")
    listed = {(index.path.parent / link).resolve() for link in index.links()}
    unlisted = [
        page.name for page in PAGES if page.path.is_relative_to(REPO / "docs") if page.path not in listed
    ]
    assert unlisted == [index.name]


def test_every_question_of_a_reader_is_answered_within_two_clicks() -> None:
    """One to the list of questions, from where readers begin, and one to the answer."""
    questions = Page(REPO / "docs" / "where-to-look.md")
    for begins in ("README.md", "docs/README.md"):
        page = Page(REPO / begins)
        assert questions.path in [(page.path.parent / link).resolve() for link in page.links()], begins
    rows = re.findall(r"^\| (\d+)\. (.+\?[^|]*) \| (.+) \|$", questions.text, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 20
    for _, question, answer in rows:
        links = re.findall(r"\]\(([^)#]+)", answer)
        assert links, question
        assert all((questions.path.parent / link).resolve().is_file() for link in links), question


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_real_signature(hook: str) -> None:
    function = getattr(hookspecs, hook)
    page = (REFERENCE / "hooks.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {hook}\n")[2].partition("\n## ")[0]
    arguments = inspect.signature(function).parameters
    shown = ", ".join(f"{name}: {parameter.annotation}" for name, parameter in arguments.items())
    assert f"{hook}({shown}) -> {inspect.signature(function).return_annotation}" in section
    assert (inspect.getdoc(function) or "").partition("\n")[0].replace("``", "`") in section
    for name in arguments:
        assert f"- `{name}`: " in section
    assert "**Returns:**" in section


@pytest.mark.parametrize("name", costcache.__all__)
def test_every_public_name_has_a_docstring_and_is_in_the_reference(name: str) -> None:
    value = getattr(costcache, name)
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert section.strip()
    if isinstance(value, type):
        doc = value.__dict__.get("__doc__")  # its own, not one inherited
        assert doc, f"{name} has no docstring"
        first = doc.strip().partition("\n")[0].replace("``", "`")
        assert first.partition("`")[0] in section


def test_the_architecture_page_places_every_module() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    modules = re.findall(r"\w+", " ".join(layers))
    page = (REPO / "ARCHITECTURE.md").read_text(encoding="utf-8")
    missing = [module for module in modules if f"`{module}`" not in page]
    assert missing == ["__main__"]  # it only calls the command line


def test_the_readme_shows_the_demo_that_make_runs() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    planned = subprocess.run(
        [make, "-n", "-o", ".venv/.program", "demo"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout
    commands = [
        " ".join(line.split()).replace(".venv/bin/", "").replace("build/", "")
        for line in planned.replace("\\\n", "").splitlines()
        if ".venv/bin/costcache" in line
    ]
    readme = " ".join((REPO / "README.md").read_text(encoding="utf-8").replace("\\\n", "").split())
    assert commands
    for command in commands:
        assert f"$ {command}" in readme
