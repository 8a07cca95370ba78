"""The four distributions agree with each other before anything is built."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from costcache._version import __version__

SIBLINGS = ("mla", "mha", "mamba-seglen")


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def sibling_folder(root: Path, extra: str) -> Path:
    return root / "plugins" / extra.replace("-", "_")


@pytest.mark.parametrize("extra", SIBLINGS)
def test_siblings_share_the_version_and_pin_it_both_ways(repo_root: Path, extra: str) -> None:
    core = pyproject(repo_root)["project"]
    sibling = pyproject(sibling_folder(repo_root, extra))["project"]
    assert sibling["name"] == f"costcache-{extra}"
    assert sibling["version"] == __version__
    assert sibling["dependencies"] == [f"costcache=={__version__}"]
    assert core["optional-dependencies"][extra] == [f"costcache-{extra}=={__version__}"]


def test_extra_all_names_every_sibling(repo_root: Path) -> None:
    extras = pyproject(repo_root)["project"]["optional-dependencies"]
    assert extras["all"] == [f"costcache[{','.join(SIBLINGS)}]"]
    assert {folder.parent.name for folder in (repo_root / "plugins").glob("*/pyproject.toml")} == {
        extra.replace("-", "_") for extra in SIBLINGS
    }


@pytest.mark.parametrize("extra", SIBLINGS)
def test_siblings_carry_the_same_license(repo_root: Path, extra: str) -> None:
    copy = sibling_folder(repo_root, extra) / "LICENSE"
    assert copy.read_text() == (repo_root / "LICENSE").read_text()


@pytest.mark.parametrize("extra", SIBLINGS)
def test_siblings_ask_for_the_same_python_as_the_core(repo_root: Path, extra: str) -> None:
    core, sibling = pyproject(repo_root), pyproject(sibling_folder(repo_root, extra))
    assert sibling["project"]["requires-python"] == core["project"]["requires-python"]
    assert sibling["build-system"] == core["build-system"]


def test_changelog_has_a_section_for_the_version(repo_root: Path) -> None:
    assert f"## [{__version__}]" in (repo_root / "CHANGELOG.md").read_text()
