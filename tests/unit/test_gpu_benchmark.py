"""Policies of the benchmark on a GPU: the forms it reads, and their names and commands in its report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of the benchmark, as running it would; none of them stays imported."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER.parent) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "name", "settings", "folder"),
    [
        ("lru", "lru", {}, ""),
        ("costcache:lru", "costcache:lru", {}, ""),
        ("costcache@plain", "costcache", {}, "plain"),
        ('costcache{"headroom": 0.005}', "costcache", {"headroom": 0.005}, ""),
        ('costcache{"headroom": 0.005}@a/b', "costcache", {"headroom": 0.005}, "a/b"),
        ("costcache@a{b}", "costcache", {}, "a{b}"),
        ("costcache{}@plain", "costcache", {}, "plain"),
        (
            'costcache:hazard{"policy_settings": {"tables": "a@b.json"}}@plain',
            "costcache:hazard",
            {"policy_settings": {"tables": "a@b.json"}},
            "plain",
        ),
    ],
)
def test_a_policy_has_settings_and_a_folder(
    load: Any, text: str, name: str, settings: dict[str, Any], folder: str
) -> None:
    policy = load("replay").Policy.read(text)
    assert policy == (text, name, settings, folder)
    config = {"radix_eviction_policy_config": settings} if settings else {}
    assert policy.arguments == {"radix_eviction_policy": name, **config}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('costcache{"headroom": 0.005', ["not a JSON object", "delimiter"]),
        ("costcache{headroom: 0.005}", ["not a JSON object", "column 2", '{"SETTING": VALUE}']),
        ("costcache{'headroom': 0.005}@plain", ["not a JSON object"]),
        ('costcache{"headroom": 0.005}plain', ["'plain' after its settings", "@FOLDER"]),
        ('{"headroom": 0.005}', ["no policy name"]),
        ("@plain", ["no policy name"]),
        ("costcache@", ["no folder"]),
    ],
)
def test_a_bad_policy_is_refused_by_name(
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    parts: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay.py", "--out", "gpu.jsonl", "--policies", "lru", text])
    with pytest.raises(SystemExit):
        load("replay").options()
    error = capsys.readouterr().err
    for part in ["argument --policies", repr(text), *parts]:
        assert part in error


def test_a_run_with_settings_or_of_another_build_is_reported_apart(load: Any) -> None:
    report = load("report")
    line = {
        "model": "llama-3-8b",
        "workload": {"source": "chat", "requests": 1500, "shrink": 1, "outputs": 0.125, "rate": 18.0},
        "clients": None,
        "pool": 32730,
        "engine": load("replay").ENGINE,
        "packages": {"costcache": "0.1.0 (compiled)"},
        "order": ["costcache", 'costcache{"headroom": 0.005}'],
        "policy": "costcache",
    }
    older = report.Run(line)
    bare = report.Run({**line, "settings": {}})
    with_headroom = report.Run({**line, "settings": {"headroom": 0.005}})
    before = report.Run({**line, "folder": "before"})
    assert older.label == bare.label == "costcache (compiled)"
    assert with_headroom.label == 'costcache{"headroom": 0.005} (compiled)'
    assert before.label == "costcache@before (compiled)"
    assert len({bare.policy, with_headroom.policy, before.policy}) == 3
    assert bare.policy == "costcache"
    assert report.settings_of(bare).headroom == 0.0
    assert report.settings_of(with_headroom).headroom == 0.005
    assert report.command(line).endswith("""--policies costcache 'costcache{"headroom": 0.005}'""")
