"""Tests against real vLLM classes, on CPU. Without vLLM every file here is skipped, saying why."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

import pytest

from costcache.vllm import SUPPORTED

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))

from tests.optional import OptionalFolder, missing  # noqa: E402  # after the path

os.environ["HF_HUB_OFFLINE"] = "1"


def _missing() -> str | None:
    """Why these tests cannot run here, or None."""
    why = missing(("torch", "vllm"), "test-vllm")
    if why is not None:
        return why
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: str = importlib.import_module("vllm").__version__
    if found.partition("+")[0] not in SUPPORTED:
        return f"vllm {found} is installed, and these tests are for {', '.join(SUPPORTED)}"
    return None


WHY = _missing()
if WHY is None:
    # What other packages deprecate is not ours to fix, and pytest makes warnings errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.core.sched.scheduler")  # 15 s, once


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: starts real engines, half a minute each")
    config.pluginmanager.register(
        OptionalFolder(HERE, WHY, ("DeprecationWarning", "FutureWarning", "UserWarning"))
    )
