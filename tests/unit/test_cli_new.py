"""Templates of new plugins: what they write passes its own tests, and names are checked first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from costcache.cli import cli
from costcache.plugins import RESERVED
from tests.unit.commands import costcache_, refusal


@pytest.mark.parametrize(("kind", "name"), [("policy", "by-tenant"), ("architecture", "acme")])
def test_what_is_written_passes_its_own_tests(tmp_path: Path, kind: str, name: str) -> None:
    folder = tmp_path / "made"
    result = costcache_(f"new-{kind}", name, "--out", str(folder))
    assert result.exit_code == 0, result.output
    module = "costcache_" + name.replace("-", "_")
    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert made == {
        "README.md",
        "pyproject.toml",
        f"{module}.py",
        f"tests/test_{module}.py",
        ".github/workflows/test.yml",
    }
    assert not [path for path in folder.rglob("*") if path.is_file() and "$class" in path.read_text()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["Upper", "with space", "../escape", "", "-dash", "two--hyphens", "é", "a\n"]
)
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    result = costcache_("new-policy", "--out", str(tmp_path / "made"), "--", name)
    assert result.exit_code == 1
    assert "cannot be the name of a plugin" in result.output
    assert not (tmp_path / "made").exists()


def test_a_name_that_is_taken_and_a_folder_that_is_full_are_refused(tmp_path: Path) -> None:
    result = costcache_("new-policy", "lru", "--out", str(tmp_path / "made"))
    assert "the name 'lru' is taken" in result.output
    (tmp_path / "file").write_text("mine")
    result = costcache_("new-policy", "mine", "--out", str(tmp_path))
    assert "exists: name another folder with --out" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", sorted(RESERVED - {""}))
def test_a_name_that_the_command_line_means_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    """The policy would be refused when it is loaded."""
    said = refusal("new-policy", name, "--out", tmp_path / "made")
    assert said == f"the name {name!r} means something else on the command line: give another one"
    assert not (tmp_path / "made").exists()


def test_the_commands_are_listed() -> None:
    assert {"new-policy", "new-architecture"} <= set(cli.list_commands(None))  # type: ignore[arg-type]  # unused


@pytest.mark.parametrize("there", [False, True])
def test_a_distribution_is_written_whole_or_not_at_all(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    too_long = "a" * 300  # for the name of a file, of which others are written before
    assert "cannot be written (File name too long)" in refusal("new-policy", too_long, "--out", out)
    assert [*tmp_path.rglob("*")] == [out][:there]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal("new-policy", "abc", "--out", tmp_path / "file" / "x") == (
        f"{str(tmp_path / 'file' / 'x')!r} cannot be written (Not a directory): name another one with --out"
    )
