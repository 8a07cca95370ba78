"""What CONTRIBUTING.md asks of the code, where neither ruff nor mypy does."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("costcache", "plugins", "examples", "tests", "benchmarks", "docs", "tools")
WITHOUT_A_REASON = re.compile(r"# (type: ignore\[[\w, -]+\]|noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*)\s*$")


def test_an_ignore_states_its_reason() -> None:
    files = [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.py"))]
    assert len(files) > 500
    found = [
        f"{path.relative_to(REPO)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WITHOUT_A_REASON.search(line)
    ]
    assert not found, "write # and the reason after the ignore"
