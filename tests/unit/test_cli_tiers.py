"""``costcache simulate --host``: its figures, its report, and combinations that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costcache.errors import SettingsError
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings
from costcache.sizes import parse_rate
from tests.unit.commands import answer, refusal

MODEL = ("--model", "deepseek-v3", "--tp", "8")
HOST = ("--capacity", "5%", "--host", "2GB")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "agents.jsonl"
    write_trace(generate("agentic", workload_settings("agentic", {"requests": 120})), path)
    return path


def test_figures_by_tier(agents: Path) -> None:
    disk = ("--disk", "5GB", "--disk-bandwidth", "6GB/s", "--write", "write_back")
    found = json.loads(answer("simulate", agents, *MODEL, *HOST, *disk, "--policy", "lru,hazard", "--json"))
    assert found["tiers"] == {
        "host": 2 * 10**9,
        "link": 55e9,
        "disk": 5 * 10**9,
        "disk_bandwidth": 6e9,
        "write": "write_back",
    }
    bound = found["bounds"]["5%"]
    for run in found["runs"]:
        host, disk_ = run["tiers"]
        assert (host["name"], disk_["name"]) == ("host", "disk")
        assert host["hit_tokens"] > 0
        assert host["peak_bytes"] <= 2 * 10**9
        assert host["up_bytes"] >= host["hit_tokens"] * found["kv_bytes_per_token"]
        assert run["moved_bytes"] == sum(t["down_bytes"] + t["up_bytes"] for t in run["tiers"])
        assert run["ttft_p50"] <= run["ttft_p99"]
        assert run["device_hit_rate"] + run["tier_hit_rate"] <= bound["hit_rate"] + 0.05  # the order differs
    shown = answer("simulate", agents, *MODEL, *HOST, *disk, "--policy", "lru")
    assert "2 GB of host memory at 55 GB/s, 5 GB of disk at 6 GB/s; writing: write_back" in shown
    assert "Offline bound at 5%, of hits, not of times" in shown


def test_a_pool_that_running_requests_fill_is_named(agents: Path) -> None:
    """Its times are those of waiting, which no policy can help."""
    command = ("simulate", agents, *MODEL, *HOST, "--policy", "lru")
    waits = [run["memory_waits"] for run in json.loads(answer(*command, "--json"))["runs"]]
    assert waits[0] > 12
    shown = " ".join(answer(*command).split())
    assert f"{waits[0]} of 120 requests (lru at 5%) waited until running ones left room" in shown
    for enough in (("--running", "beside"), ("--rate", "0.001")):
        assert "left room" not in answer(*command, *enough)


def test_the_report_says_how_much_host_memory_pays(agents: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    prices = ("--host-price", "4", "--gpu-price", "200")
    answer("simulate", agents, *MODEL, *HOST, "--policy", "lru", "--report", page, *prices)
    text = page.read_text()
    assert "How much host memory pays" in text
    assert "2 GB of host memory below a device pool of" in text
    assert "host memory pays if a GB of it costs less than" in text
    assert "At 4 and 200 per GB, it costs 8" in text
    assert "With a larger device pool instead" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link", "55GB/s"), "--link is for tiers: give --host too"),
        (("--disk", "2TB"), "--disk is for tiers: give --host too"),
        (("--write", "by_cost"), "--write is for tiers: give --host too"),
        (("--running", "beside"), "--running is for tiers: give --host too"),
        (("--gpu-price", "4"), "--gpu-price is for tiers: give --host too"),
        ((*HOST, "--disk", "2TB"), "--disk needs its speed: give --disk-bandwidth, such as 6GB/s"),
        ((*HOST, "--disk-bandwidth", "6GB/s"), "--disk-bandwidth is for a disk: give --disk too"),
        ((*HOST, "--host-price", "4"), "--host-price and --gpu-price go together"),
        (
            (*HOST, "--host-price", "4", "--gpu-price", "9"),
            "are for the report: give --report too, or neither",
        ),
        ((*HOST, "--link", "55GB"), "--link '55GB' is not a rate above 0: give 55GB/s"),
        ((*HOST, "--jobs", "2"), "--jobs does not go with --host"),
        ((*HOST, "--always-free"), "--always-free does not go with --host"),
        (("--host", "0GB"), "--host '0GB' is no memory: give more, or leave it out"),
        (("--host", "5%"), "--host '5%' is not a size in bytes"),
        ((*HOST, "--policy", "optimum"), "policy 'optimum' has no tiers"),
        (("--host", "2GB", "--capacity", "unlimited"), "--capacity unlimited leaves nothing for a host"),
    ],
)
def test_impossible_combinations(agents: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refusal("simulate", agents, *MODEL, *options)


def test_rates() -> None:
    assert parse_rate("55GB/s", "--link") == 55 * 10**9
    assert parse_rate("1.5 GiB / s", "--link") == 3 * 2**29
    for wrong in ("55", "GB/s", "0GB/s", "55GB/h", "-1GB/s", "55%/s"):
        with pytest.raises(SettingsError, match="is not a rate above 0: give 55GB/s"):
            parse_rate(wrong, "--link")
