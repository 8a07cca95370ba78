"""The policy of the tutorial, in an engine as its last step configures it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import tutorial
from tests.vllm.engine import run_engine

pytestmark = pytest.mark.engine


def test_the_tutorials_policy_serves(tmp_path: Path) -> None:
    plugins, model = tmp_path / "plugins", tmp_path / "model"
    plugins.mkdir()
    model.mkdir()
    tutorial.install(plugins)
    path = os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH")]))
    result, log = run_engine(model, {"policy": "loyal"}, {"PYTHONPATH": path}, rounds=20)
    assert result.get("reset"), log  # no block is in use at the end
    assert "policy 'loyal'" in log
    assert result["metrics"]["costcache:policy_info"] == 1
    assert result["metrics"]["costcache:evictions_total"] > 0
    assert result["metrics"]["costcache:fallbacks_total"] == 0
