"""Every rank evicts on its own and must choose the same victims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import run_engine
from tests.sglang.pools import Shape
from tests.sglang.ranks import victims
from tests.sglang.test_engine import conversations
from tests.sglang.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[2]
JOBS: list[dict[str, Any]] = [
    {"kind": kind, "page_size": page, "seed": 3, "policy": policy, "core": "python"}
    for kind, page, policy in (
        ("mha", 1, "lru"),
        ("mla", 64, "slru"),
        ("mamba", 1, "lfu"),
        ("mamba", 64, "lru"),
        ("swa", 1, "priority"),
        ("swa", 64, "mru"),
        # One order for states and KV.
        ("mamba", 1, "hazard"),
        ("mamba", 64, "hazard"),
        ("mamba", 64, "seglen"),
        ("mla_mamba", 64, "marconi"),
        ("mla_mamba", 64, "consumed-lru"),
    )
]


HOST_JOBS: list[dict[str, Any]] = [
    {"kind": kind, "page_size": page, "write": write, "policy": policy, "seed": 5, "steps": 90}
    for kind, page, write, policy in (
        ("mha", 1, "write_through", "hazard"),
        ("mha", 64, "write_back", "lru"),
        ("mamba", 1, "write_back", "hazard"),
        ("swa", 1, "write_through", "slru"),
    )
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The victims of each stream, on two ranks: processes that SGLang takes its time to start in."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    # This tree before all that this process was given, such as the compiled package, which the second rank
    # does not have.
    paths = [os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), str(ROOT)]

    def rank(number: int) -> dict[str, Any]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.sglang.host_ranks", str(number), str(store)),
                *(json.dumps(JOBS), json.dumps(HOST_JOBS)),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": ("1", "4242")[number], "PYTHONPATH": paths[number]},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        result: dict[str, Any] = json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
        return result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, (0, 1)))


def test_processes_and_caches_choose_the_same_victims(two_ranks: list[dict[str, Any]]) -> None:
    one, two = two_ranks
    for job in JOBS:
        seen = one[json.dumps(job)]
        assert seen == two[json.dumps(job)]
        assert len(seen) > 20
        second = {"swa": {"swa"}, "mamba": {"state"}, "mla_mamba": {"state"}}.get(job["kind"], set())
        assert {pool for pool, *_, taken in seen if isinstance(taken, int)} == {"kv"} | second
        # A third cache, in a process that has made others before: node ids of SGLang's differ.
        shape = Shape(job["kind"], job["page_size"], tokens=2048, states=20)
        assert json.loads(json.dumps(victims(shape, job["seed"], job["policy"]))) == seen


def test_two_ranks_with_a_host_tier(two_ranks: list[dict[str, Any]]) -> None:
    """Copies end at other times on each rank; the victims are the same, and nobody waits for ever."""
    one, two = ([rank[json.dumps(job)] for job in HOST_JOBS] for rank in two_ranks)
    assert one == two
    tiers = {pool for seen in one for pool, *_, taken in seen if isinstance(taken, int)}
    assert tiers == {"kv", "swa", "state", "host", "host_swa", "host_state"}


@pytest.mark.engine
def test_two_ranks_of_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "victims"
    folder.mkdir()
    monkeypatch.setenv("RECORD_VICTIMS", str(folder))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # more ranks than NUMA nodes
    run = run_engine(
        write_model("mha", tmp_path),
        conversations(6, 4, 120, 40, 4),
        tmp_path,
        max_total_tokens=1024,
        radix_eviction_policy="costcache",
        tp_size=2,  # two processes, which talk over torch.distributed's gloo
    )
    files = sorted(folder.iterdir())
    assert len(files) == 2
    first, second = (file.read_text().splitlines() for file in files)
    assert first == second
    assert len(first) > 5
    assert run.log.count("class CostCache") == 2
