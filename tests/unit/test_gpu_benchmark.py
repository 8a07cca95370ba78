"""Policies of the benchmark on a GPU: the forms it reads, and their names and commands in its report."""

from __future__ import annotations

import importlib
import json
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
    chosen = load("sglang_server").SglangServer.arguments(Path("model"), 100, name, settings, 2, {"port": 9})
    config = {"radix_eviction_policy_config": settings} if settings else {}
    arguments = {"model_path": "model", "max_total_tokens": 100, "radix_eviction_policy": name, "port": 9}
    assert chosen == {**arguments, **config}


@pytest.mark.parametrize(
    ("name", "settings", "asks"),
    [
        ("stock", {}, None),
        ("hazard", {}, {"policy": "hazard"}),
        (
            "hazard",
            {"policy_settings": {"probes": 2}},
            {"policy": "hazard", "policy_settings": {"probes": 2}},
        ),
    ],
)
def test_vllm_is_asked_for_a_policy_and_a_pool(
    load: Any, name: str, settings: dict[str, Any], asks: dict[str, Any] | None
) -> None:
    server = load("vllm_server").VllmServer
    chosen = server.arguments(Path("model"), 330, name, settings, 0, {"block_size": 32})
    # One block more than the pool has: vLLM keeps it for itself.
    assert chosen == {"model": "model", "num_gpu_blocks_override": 11, "costcache": asks, "block_size": 32}


@pytest.mark.parametrize(
    ("name", "asks", "tier"),
    [
        ("stock+vllm-arc", None, {"eviction_policy": "arc"}),
        (
            "stock+hazard",
            None,
            {"eviction_policy": "hazard", "cache_policy_module_path": "costcache.vllm.offload"},
        ),
        (
            "lru+costcache",
            {"policy": "lru"},
            {"eviction_policy": "costcache", "cache_policy_module_path": "costcache.vllm.offload"},
        ),
    ],
)
def test_vllms_tier_has_a_policy_of_its_own(
    load: Any, name: str, asks: dict[str, Any] | None, tier: dict[str, Any]
) -> None:
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1000},
    }
    more = {"kv_transfer_config": connector}
    chosen = load("vllm_server").VllmServer.arguments(Path("model"), 320, name, {}, 0, more)
    assert chosen["costcache"] == asks
    assert chosen["kv_transfer_config"] == {
        **connector,
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1000, **tier},
    }
    assert connector["kv_connector_extra_config"] == {"cpu_bytes_to_use": 1000}


@pytest.mark.parametrize(("name", "more"), [("hazard+lru", {}), ("hazard", {"kv_transfer_config": {}})])
def test_a_tier_and_its_policy_go_together(load: Any, name: str, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"NAME\+TIER"):
        load("vllm_server").VllmServer.arguments(Path("model"), 320, name, {}, 0, more)


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
        "engine": load("sglang_server").ENGINE,
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


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        ("stock", "stock"),
        ("hazard", "hazard (compiled)"),
        ("stock+vllm-arc", "stock+vllm-arc"),
        ("stock+hazard", "stock+hazard (compiled)"),
        ("lru+vllm-lru", "lru+vllm-lru (compiled)"),
    ],
)
def test_costcaches_build_is_named_where_it_runs_in_vllm(load: Any, policy: str, label: str) -> None:
    run = load("report").Run(
        {"server": "vllm", "packages": {"costcache": "0.1.0 (compiled)"}, "policy": policy}
    )
    assert run.label == label


def test_the_report_on_vllm_has_its_tier_and_the_simulators_prediction(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = load("vllm_server").VllmServer
    extra = {"cpu_bytes_to_use": 2_000_000_000}
    workload = {"source": "chat", "requests": 40, "shrink": 4, "outputs": 0.1, "rate": 10.0}
    one = {"prompt": 500, "cached": 200, "output": 3, "ttft": 0.05, "seconds": 0.07}
    line: dict[str, Any] = {
        "server": "vllm",
        "model": "llama-3-8b",
        "workload": {**workload, "vocabulary": 128256, "seed": 0},
        "clients": None,
        "pool": 8000,
        "distinct": 20_000,
        "engine": {**server.defaults, "kv_transfer_config": {"kv_connector_extra_config": extra}},
        "packages": {"costcache": "0.1.0 (compiled)"},
        "order": ["stock+vllm-lru", "stock+hazard", "hazard+hazard"],
        "settings": {},
        "folder": "",
        "took_over": 0,
        "seconds": 4.0,
        "requests": [one] * 40,
        "host": 40 * 50,
        "metrics": {"vllm:num_preemptions_total": 3.0},
    }
    decided = {"costcache:decision_seconds_count": 10.0, "costcache:decision_seconds_sum": 0.001}
    lines = [{**line, "policy": name} for name in line["order"]]
    lines[1]["took_over"] = 1
    lines[2]["metrics"] = {**decided, "costcache:evictions_total": 10.0}
    file = tmp_path / "gpu_vllm.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    monkeypatch.setattr(sys, "argv", ["report.py", str(file)])
    load("report").main()
    page = capsys.readouterr().out
    assert page.startswith("# vLLM on a GPU\n")
    assert "replay.py --server vllm --out gpu_vllm.jsonl --model llama-3-8b" in page
    assert "The tier in host memory has 2.0 GB" in page
    assert "| stock+vllm-lru | 40.00 | 30.00 | 10.00 |" in page
    # One policy in both tiers is predicted, and no other.
    predicted = page[page.index("Predictions of") : page.index("Evictions.")]
    assert "| stock+vllm-lru | 40.00 |" in predicted
    assert "| hazard+hazard | 40.00 |" in predicted
    assert "stock+hazard" not in predicted
    assert "| stock+hazard (compiled) |  |  |  |  |  | 1 |  | 3 |" in page
    assert "| hazard+hazard (compiled) | 10 | 0 | 0 | 100 | 0.03 | 0 | 0 | 0 |" in page
