"""What ``make release-check`` is told. Running it, for minutes on each Python, shows that it works."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

from tests.scripts import load_script


@pytest.fixture(scope="module")
def tool(repo_root: Path) -> ModuleType:
    return load_script(repo_root / "tools" / "release_check.py")


def test_wheels_are_made_for_pythons_that_the_package_allows(tool: ModuleType, repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert tool.pythons() == ["3.11", "3.12", "3.13", "3.14"]
    assert all(version in allowed for version in tool.pythons())


def test_every_distribution_is_built(tool: ModuleType, repo_root: Path) -> None:
    assert {path.name for path in tool.PLUGINS} == {"mla", "mha", "mamba_seglen"}
    assert (tool.EXAMPLE / "pyproject.toml").is_file()


def test_a_python_that_is_not_here_is_not_found(tool: ModuleType) -> None:
    assert tool.find("9.9") is None


def test_a_failed_step_says_what_was_said(tool: ModuleType) -> None:
    with pytest.raises(tool.CheckError, match="ended with 3:\nit broke"):
        tool.run(sys.executable, "-c", "print('it broke'); raise SystemExit(3)")
    assert tool.run(sys.executable, "-c", "print('fine')") == "fine\n"


def test_developers_can_build_the_documentation(repo_root: Path) -> None:
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["docs"]) <= set(extras["dev"])
