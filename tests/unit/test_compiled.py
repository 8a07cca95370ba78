"""The compiled package decides what the plain one decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from costcache._version import described
from costcache.policies import BUILTIN
from tests.unit.decisions import decisions

COMPILED = "(compiled)" in described()


@pytest.mark.skipif(not COMPILED, reason="what is tested is plain Python: see `make test-compiled`")
@pytest.mark.parametrize("policy", BUILTIN)
def test_decides_as_plain_python_does(policy: str, repo_root: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-m", "tests.unit.decisions", policy]
    said = subprocess.run(command, cwd=repo_root, env=plain, capture_output=True, text=True, check=True)
    build, *expected = json.loads(said.stdout)
    assert "(plain Python)" in build
    assert expected == decisions(policy)
    assert not any(fallbacks for *_, fallbacks in expected)
