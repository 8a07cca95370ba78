"""The benchmark on a GPU drives vLLM's real engine, here on the CPU, and reports what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engine import MODEL

pytestmark = pytest.mark.engine

REPO = Path(__file__).resolve().parents[2]
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 28,
}


def test_requests_are_replayed_through_an_engine_under_pressure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "gpu_vllm.jsonl"
    arguments = [
        "--requests",
        "60",
        "--shrink",
        "16",
        "--outputs",
        "0.01",
        "--clients",
        "2",
        "--pool",
        "2560",
    ]
    policy = ["--policies", "hazard", "--engine", json.dumps(ENGINE)]
    given = ["--server", "vllm", "--out", str(file), "--model", str(tmp_path), *arguments, *policy]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/replay.py", *given],
        cwd=REPO,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["server"], line["policy"], line["pool"]) == ("vllm", "hazard", 2560)
    requests = line["requests"]
    assert len(requests) == 60
    assert 0 < sum(each["cached"] for each in requests) < sum(each["prompt"] for each in requests)
    assert all(0 < each["ttft"] <= each["seconds"] for each in requests)
    assert all(each["output"] >= 1 for each in requests)
    assert line["metrics"]["costcache:evictions_total"] > 10
    assert line["metrics"]["costcache:fallbacks_total"] == 0
    assert (line["host"], line["took_over"]) == (0, 0)

    report = subprocess.run(
        [sys.executable, "benchmarks/gpu/report.py", str(file)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    assert report.stdout.startswith("# vLLM on a GPU\n")
    assert "| hazard (" in report.stdout
    assert "Predictions of the simulator." in report.stdout
