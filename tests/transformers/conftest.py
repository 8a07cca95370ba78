"""Tests against transformers' own classes. Without torch and transformers every file is skipped."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if importlib.util.find_spec("torchvision") is not None:
    # The CPU build of torchvision lacks operators that it looks for when transformers imports it.
    sys.path.append(str(HERE.parent.parent))
    importlib.import_module("tests.sglang.shims.torchvision_ops")
MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip the files, which import both at their top."""
    if MISSING and collection_path.suffix == ".py" and collection_path.parent == HERE:
        return collection_path.name.startswith("test_")
    return None


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f"tests/transformers: skipped, {' and '.join(MISSING)} not installed: `make test-sglang` has them"
