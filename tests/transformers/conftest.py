"""Tests against transformers' own classes. Without torch and transformers every file here is skipped."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent.parent))

from tests.optional import OptionalFolder, missing  # noqa: E402  # after the path

if importlib.util.find_spec("torchvision") is not None:
    # The CPU build of torchvision lacks operators that it looks for when transformers imports it.
    importlib.import_module("tests.sglang.shims.torchvision_ops")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OptionalFolder(HERE, missing(("torch", "transformers"), "test-sglang")))
