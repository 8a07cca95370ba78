"""The figures for recorded traces on the page about policies are what the policies do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from costcache.cli import cli
from tests.unit.test_policies_literature_trees import LITERATURE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "policies.md"


def table(first: str) -> dict[tuple[str, str], dict[str, float]]:
    """The page's table whose first column of figures is ``first``: (trace, capacity) to policy to rate."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| | {first} |"))
    columns = [tuple(cell.strip().split(" ", 1)) for cell in lines[start].split("|")[2:-1]]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *figures = (cell.strip() for cell in line.split("|")[1:-1])
        for (trace, capacity), figure in zip(columns, figures, strict=True):
            found.setdefault((trace, capacity.replace(" ", "")), {})[name.strip("`")] = float(figure)
    return found


@pytest.mark.traces
@pytest.mark.parametrize(("trace", "capacity"), [("conversation", "5%"), ("synthetic", "10%")])
def test_the_pages_figures_equal_a_replay(traces_dir: Path, trace: str, capacity: str) -> None:
    expected = table("conversation 2 %")[trace, capacity]
    assert expected.keys() >= {"lru", "optimum", *LITERATURE}
    file = traces_dir / f"mooncake_{trace}.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"{file} is missing")
    line = ["simulate", str(file), "--model", "deepseek-v3", "--page-size", "512", "--json"]
    result = CliRunner().invoke(cli, [*line, "--policy", ",".join(expected), "--capacity", capacity])
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    assert {run["policy"]: round(100 * run["token_hit_rate"], 2) for run in runs} == expected
    assert all(run["fallbacks"] == 0 for run in runs)
