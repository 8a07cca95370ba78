"""Folders of tests that need a package which most environments lack: each file is one skip that says why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

__all__ = ["OptionalFolder", "missing"]


def missing(names: Sequence[str], target: str) -> str | None:
    """Say which packages are not installed, and which make target has them; None if all are."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return (
        f"{' and '.join(absent)} {verb} not installed: `make {target}` makes an environment for these tests"
    )


class OptionalFolder:
    """A plugin for one folder; its ``conftest.py`` registers it.

    Args:
        folder: The folder.
        why: Why its tests cannot run here; None if they can.
        ignored: Categories of warnings that are not errors there: what other packages deprecate is not ours.
    """

    def __init__(self, folder: Path, why: str | None, ignored: Sequence[str] = ()) -> None:
        self._folder = folder
        self._why = why
        self._ignored = ignored

    def pytest_report_header(self) -> str | None:
        """Say so before the first test."""
        return None if self._why is None else f"tests/{self._folder.name}: all skipped: {self._why}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        """One skip in place of a file that cannot be imported."""
        if self._why is None or self._folder not in module_path.parents:
            return None
        made: _SkippedFile = _SkippedFile.from_parent(parent, path=module_path)
        made.why = self._why
        return made

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let these warnings be none."""
        for item in items:
            if self._folder in item.path.parents:
                for category in self._ignored:
                    item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))


class _SkippedFile(pytest.File):
    why = ""

    def collect(self) -> Iterator[pytest.Item]:
        item: _SkippedItem = _SkippedItem.from_parent(self, name="all")
        item.why = self.why
        yield item


class _SkippedItem(pytest.Item):
    why = ""

    def runtest(self) -> None:
        pytest.skip(self.why)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.path.name
