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


def costcache(site: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "costcache", *map(str, arguments)],
        cwd=site,  # the checkout is not in the way
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_contains_the_package_and_its_entry_point(site: Path) -> None:
    package = {path.name for path in (site / "costcache_example").iterdir() if path.is_file()}
    assert package == {"__init__.py", "plugin.py", "py.typed", "worth.py"}
    (points,) = site.glob("costcache_example-*.dist-info/entry_points.txt")
    assert points.read_text().split() == ["[costcache]", "example", "=", "costcache_example.plugin"]


def test_the_program_finds_the_plugin_by_itself(site: Path) -> None:
    found = json.loads(costcache(site, "plugins", "--json"))
    assert found["failures"] == []
    (plugin,) = (entry for entry in found["plugins"] if entry["name"] == "example")
    assert plugin["source"] == "costcache_example.plugin"
    assert plugin["hooks"] == ["default_policy", "match_model", "policies", "read_config", "token_cost"]
    (policy,) = (entry for entry in found["policies"] if entry["name"] == "worth")
    assert policy["plugin"] == "example"
    assert policy["settings"]["most_uses"]["default"] == 8


def test_the_policy_is_replayed_by_name_with_its_setting(site: Path) -> None:
    trace = site / "agentic.jsonl"
    costcache(site, "workload", "agentic", "--out", trace, "--requests", "150")
    simulate = ("simulate", trace, "--model", "llama-3-8b", "--policy", "lru,worth", "--capacity", "20%")
    lru, worth = json.loads(costcache(site, *simulate, "--json"))["runs"]
    assert (worth["policy"], worth["policy_in_force"], worth["fallbacks"]) == ("worth", "worth", 0)
    assert worth["evicted_tokens"] > 0
    assert worth["hit_tokens"] != lru["hit_tokens"]
    _, capped = json.loads(costcache(site, *simulate, "--set", "worth.most_uses=1", "--json"))["runs"]
    assert capped["hit_tokens"] != worth["hit_tokens"]


def test_models_of_the_house_get_the_policy_by_default(site: Path) -> None:
    folder = site / "acme-chat-8b"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
            }
        )
    )
    trace = site / "chat.jsonl"
    costcache(site, "workload", "chat", "--out", trace, "--requests", "50")
    found = json.loads(costcache(site, "simulate", trace, "--model", folder, "--capacity", "10%", "--json"))
    assert (found["runs"][0]["plugin"], found["runs"][0]["policy_in_force"]) == ("example", "worth")
