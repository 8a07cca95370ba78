"""The example plugin, installed as a user installs it, next to the core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def site(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed example; nothing is fetched and the environment is left alone."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    source = repo_root / "examples" / "costcache-example"
    done = subprocess.run(
        [*pip, "--target", str(target), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def _given() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [given] if given else []


def costcache(site: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "costcache", *map(str, arguments)],
        cwd=site,  # the checkout is not in the way
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *_given()])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_contains_the_package_and_its_entry_point(site: Path) -> None:
    package = {path.name for path in (site / "costcache_example").iterdir() if path.is_file()}
    assert package == {"__init__.py", "plugin.py", "py.typed", "retention.py"}
    (points,) = site.glob("costcache_example-*.dist-info/entry_points.txt")
    assert points.read_text().split() == ["[costcache]", "example", "=", "costcache_example.plugin"]


def test_the_program_finds_the_plugin_by_itself(site: Path) -> None:
    found = json.loads(costcache(site, "plugins", "--json"))
    assert found["failures"] == []
    (plugin,) = (entry for entry in found["plugins"] if entry["name"] == "example")
    assert plugin["source"] == "costcache_example.plugin"
    assert plugin["hooks"] == ["policies"]
    (policy,) = (entry for entry in found["policies"] if entry["name"] == "retention")
    assert policy["plugin"] == "example"
    assert policy["settings"]["period"]["default"] == 1000


def test_the_policy_is_replayed_by_name_with_the_weights_of_tenants(site: Path) -> None:
    trace = site / "tenants.jsonl"
    costcache(site, "workload", "tenants", "--out", trace, "--requests", "600")
    simulate = ("simulate", trace, "--model", "llama-3-8b", "--policy", "lru,retention", "--capacity", "10%")
    lru, even = json.loads(costcache(site, *simulate, "--json"))["runs"]
    assert (even["policy"], even["policy_in_force"], even["fallbacks"]) == ("retention", "retention", 0)
    assert even["hit_tokens"] == lru["hit_tokens"], "with equal weights, and without sessions, it is LRU"
    weights = 'retention.weights={"tenant-9": 20}'
    _, weighted = json.loads(costcache(site, *simulate, "--set", weights, "--json"))["runs"]
    assert weighted["hit_tokens"] != even["hit_tokens"]
