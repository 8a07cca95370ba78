"""Tests against real SGLang classes, on CPU. Without SGLang every file here is skipped, saying why."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))

from tests.optional import OptionalFolder, missing  # noqa: E402  # after the path

SUPPORTED = "0.5.23"


def _missing() -> str | None:
    """Why these tests cannot run here, or None."""
    why = missing(("torch", "sglang"), "test-sglang")
    if why is not None:
        return why
    found = version("sglang")
    if found != SUPPORTED:
        return f"sglang {found} is installed, and these tests are for {SUPPORTED}"
    return None


WHY = _missing()
if WHY is None:
    # What other packages deprecate is not ours to fix, and pytest makes warnings errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What torchvision needs must be defined before SGLang imports it.
        importlib.import_module("tests.sglang.shims.torchvision_ops")
        importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")  # 6 s, once


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: starts real Engines, half a minute each")
    config.pluginmanager.register(OptionalFolder(HERE, WHY, ("DeprecationWarning", "FutureWarning")))
