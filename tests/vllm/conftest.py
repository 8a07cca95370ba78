"""Tests against real vLLM classes, on CPU. Without vLLM every file here is skipped, saying why."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from costcache.vllm import SUPPORTED

HERE = Path(__file__).resolve().parent
os.environ["HF_HUB_OFFLINE"] = "1"


def _missing() -> str | None:
    """Why these tests cannot run here, or None."""
    for name in ("torch", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: `make test-vllm` makes environments that have it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: str = importlib.import_module("vllm").__version__
    if found.partition("+")[0] not in SUPPORTED:
        return f"vllm {found} is installed, and these tests are for {', '.join(SUPPORTED)}"
    return None


WHY = _missing()
if WHY is None:
    sys.path.append(str(HERE.parent.parent))
    # What other packages deprecate is not ours to fix, and pytest makes warnings errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.sched.scheduler")  # 15 s, once


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: starts real engines, half a minute each")


def pytest_report_header() -> str | None:
    return None if WHY is None else f"tests/vllm: all skipped: {WHY}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Without vLLM: one skip in place of a file that cannot be imported."""
    if WHY is not None and HERE in module_path.parents:
        return _SkippedFile.from_parent(parent, path=module_path)
    return None


class _SkippedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield _SkippedItem.from_parent(self, name="all")


class _SkippedItem(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(WHY or "")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.path.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))
