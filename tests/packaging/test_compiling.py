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
    """Everything that a build needs, but few of the modules."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(repo_root / name, tmp_path)
    package = tmp_path / "costcache"
    package.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(repo_root / "costcache" / name, package)
    return tmp_path


def build(project: Path, kind: str, compile_: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Builds a wheel of one kind; gives what was said."""
    return subprocess.run(
        [sys.executable, "-c", BUILD.format(kind=kind)],
        cwd=project,
        env={**os.environ, "COSTCACHE_COMPILE": compile_, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def is_plain(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a wheel of plain Python was built."""
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().endswith("-py3-none-any.whl")


def test_nothing_is_compiled_when_switched_off(project: Path) -> None:
    done = build(project, "wheel", "0", CC="/no/compiler")
    assert is_plain(done)
    assert "compiled" not in done.stderr


def test_a_value_that_means_nothing(project: Path) -> None:
    assert "COSTCACHE_COMPILE is 'yes': give 1 to compile, 0 not to" in build(project, "wheel", "yes").stderr


def test_an_editable_install(project: Path) -> None:
    said = build(project, "editable", "1").stderr
    assert "COSTCACHE_COMPILE is 1: an editable install is not compiled" in said
    assert "leave out -e" in said
    # What an editable wheel needs besides may be missing here; the hook has run by then.
    assert "compiled" not in build(project, "editable", "").stderr


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        pytest.param({}, "What the tools said:", id="fails"),
        pytest.param(
            {"CC": "/no/compiler -m64"}, "there is no C compiler '/no/compiler'", id="without a compiler"
        ),
    ],
)
def test_a_failed_compilation_is_explained(project: Path, variables: dict[str, str], why: str) -> None:
    done = build(project, "wheel", "1", **variables)
    assert done.returncode
    assert "costcache was not compiled" in done.stderr
    assert why in done.stderr
    done = build(project, "wheel", "", **variables)
    assert is_plain(done)
    assert why in done.stderr
    assert "It is installed as plain Python, which decides the same." in done.stderr
    assert not list(project.rglob("*.so"))


@pytest.mark.parametrize(("value", "has"), [("0", False), ("", True), ("1", True)])
def test_build_tools_are_fetched_only_when_needed(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch, value: str, has: bool
) -> None:
    from hatchling.build import get_requires_for_build_wheel

    monkeypatch.chdir(repo_root)
    monkeypatch.setenv("COSTCACHE_COMPILE", value)
    assert any(line.startswith("mypy==") for line in get_requires_for_build_wheel()) is has


def test_compiled_modules_exist(repo_root: Path) -> None:
    import tomllib

    with (repo_root / "pyproject.toml").open("rb") as file:
        hook = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert [name for name in hook["modules"] if not (repo_root / name).is_file()] == []
