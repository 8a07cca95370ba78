"""Compiling the package: what asks for it, and what a failure says; `make test-compiled` does it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = "from hatchling import build; print(build.build_{kind}('out'))"


@pytest.fixture
def project(repo_root: Path, tmp_path: Path) -> Path:
    """What a build needs, but for most of the modules."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(repo_root / name, tmp_path)
    package = tmp_path / "costcache"
    package.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(repo_root / "costcache" / name, package)
    return tmp_path


def build(project: Path, kind: str, compile_: str) -> subprocess.CompletedProcess[str]:
    """Builds a wheel of one kind; gives what was said."""
    return subprocess.run(
        [sys.executable, "-c", BUILD.format(kind=kind)],
        cwd=project,
        env={**os.environ, "COSTCACHE_COMPILE": compile_},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("value", ["", "0"])
def test_is_not_compiled_unless_it_is_asked_for(project: Path, value: str) -> None:
    done = build(project, "wheel", value)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("-py3-none-any.whl")


def test_a_value_that_means_nothing(project: Path) -> None:
    assert "COSTCACHE_COMPILE is 'yes': give 1 to compile, or 0" in build(project, "wheel", "yes").stderr


def test_an_editable_install(project: Path) -> None:
    said = build(project, "editable", "1").stderr
    assert "COSTCACHE_COMPILE is 1: an editable install is not compiled" in said
    assert "leave out -e" in said


def test_what_cannot_be_compiled(project: Path) -> None:
    said = build(project, "wheel", "1").stderr
    assert "costcache was not compiled. That needs a C compiler and Python's headers" in said
    assert "without COSTCACHE_COMPILE=1 it is installed as plain Python" in said
    assert not list(project.rglob("*.so"))


def test_what_is_compiled_exists(repo_root: Path) -> None:
    import tomllib

    with (repo_root / "pyproject.toml").open("rb") as file:
        hook = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert [name for name in hook["modules"] if not (repo_root / name).is_file()] == []
