"""The commands and their answers, as a user gives and reads them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import costcache.plugins
from costcache import hookimpl, records
from costcache._version import __version__
from costcache.cli import COMMANDS
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.policies import BUILTIN, PolicySpec
from costcache.policies.keyed import LRU
from costcache.sim.traces import load_trace
from costcache.sim.workloads import WORKLOADS
from tests.unit.commands import answer, costcache_, refusal

MODEL = ("--model", "deepseek-v3")


class Odd:
    """A policy whose summary looks like markup."""

    @hookimpl
    def policies(self) -> dict[str, PolicySpec]:
        return {"odd": PolicySpec(lambda cost, pools, settings: LRU(), "Evicts [red]x[/red] :smile:.")}


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """The built-in plugins and :class:`Odd`."""
    manager = PluginManager()
    manager.register(Odd(), "odd", "tests:Odd")
    monkeypatch.setattr(costcache.plugins, "get_plugins", lambda: manager)
    return manager


# -- plan ------------------------------------------------------------------------------------


def test_plan_shows_the_arithmetic() -> None:
    shown = answer("plan", *MODEL, "--memory", "80GiB", "--weights", "40GiB")
    for part in (
        "85,899,345,920 - 42,949,672,960 = 42,949,672,960 B (40.00 GiB)",
        "61 layers x ((512 + 64)·2 B) = 70,272 B per token",
        "42,949,672,960 / 70,272 = 611,191 tokens",
        "42,949,672,960 / 4,997,120 = 8,594 tokens if keys and values were cached decompressed",
        "compression ratio 71.1",
    ):
        assert part in shown
    targets = [line.split() for line in shown.splitlines() if line.startswith("  ")]
    assert ["headroom", "20", "%,", "floor", "0.05", "5.00%", "30,559", "tokens"] in targets
    assert ["headroom", "20", "%,", "floor", "0.0", "0.28%", "1,718", "tokens"] in targets


def test_plan_prints_json() -> None:
    found = json.loads(answer("plan", *MODEL, "--memory", "80GiB", "--weights", "40GiB", "--json"))
    assert (found["tokens"], found["decompressed_tokens"]) == (611_191, 8_594)
    assert found["cost"]["compression_ratio"] == pytest.approx(71.111, abs=1e-3)
    assert [target["architecture"]["floor"] for target in found["free_targets"]] == [0.0, 0.05, 0.0]
    assert found["cost"]["terms"][0]["formula"] == "(512 + 64)·2 B"


def test_plan_of_a_hybrid_says_that_states_and_tokens_share_the_memory() -> None:
    shown = answer("plan", "--model", "qwen3-next", "--memory", "40GiB")
    assert "42,949,672,960 / 24,576 = 1,747,626 tokens, if no states are cached" in shown
    assert "42,949,672,960 / 77,266,944 = 555 states, if no tokens are cached" in shown
    assert "one state takes as much memory as 3,144 tokens" in shown


def test_plan_reads_a_config_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
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
    by_folder = answer("plan", "--model", folder, "--memory", "16GiB")
    assert by_folder == answer("plan", "--model", folder / "config.json", "--memory", "16GiB")
    assert by_folder.startswith("my-model (plugin mha)")
    assert "131,072 tokens" in by_folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "40GiB", "--weights", "40GiB"), "nothing is left for the cache"),
        (("--memory", "40GiB", "--weights", "80GiB"), "weights 85,899,345,920: nothing is left"),
        (("--memory", "40"), "--memory '40' is not a size in bytes: give 80GiB"),
        (("--memory", "40GiB", "--weights", "5%"), "--weights '5%' is not a size in bytes"),
        (("--memory", "9" * 400 + "GB"), "is larger than any memory"),
        (("--memory", "40GiB", "--set", "floor=1"), "--set 'floor=1' is not architecture.FIELD=VALUE"),
        (
            ("--memory", "40GiB", "--set", "architecture.floor=1"),
            "'architecture.floor' is 1: input should be less",
        ),
        (
            ("--memory", "40GiB", "--headroom", "-1"),
            "--headroom is -1.0: input should be greater than or equal to 0",
        ),
        (("--memory", "40GiB", "--tp", "5"), "tp is 5"),
    ],
)
def test_plan_refuses_in_one_line(options: tuple[str, ...], message: str) -> None:
    assert message in refusal("plan", *MODEL, *options)


# -- models, plugins, workload ---------------------------------------------------------------


def test_models_lists_every_preset() -> None:
    found = json.loads(answer("models", "--json"))
    assert [row["name"] for row in found["models"]] == list(ModelSpec.presets())
    rows = {row["name"]: row for row in found["models"]}
    assert rows["deepseek-v3"]["kv_bytes_per_token"] == 70_272
    assert rows["qwen3-next"]["state_bytes"] == 77_266_944
    shown = answer("models")
    for row in found["models"]:
        line = next(line.split() for line in shown.splitlines() if line.startswith(f"{row['name']} "))
        assert f"{row['kv_bytes_per_token']:,}" in line
        assert (f"{row['state_bytes']:,}" if row["state_bytes"] else "-") in line


def test_models_that_a_deployment_does_not_fit_are_marked() -> None:
    found = json.loads(answer("models", "--pp", "50", "--json"))
    failed = [row for row in found["models"] if "error" in row]
    assert 0 < len(failed) < len(found["models"])
    assert all(row["layers"] < 50 for row in failed)
    shown = answer("models", "--pp", "50")
    for row in failed:
        assert f"{row['name']}: pp is 50 for {row['layers']} layers; use at most {row['layers']}" in shown


def test_plugins_lists_plugins_and_policies() -> None:
    found = json.loads(answer("plugins", "--json"))
    assert {policy["name"] for policy in found["policies"]} >= set(BUILTIN)
    assert {plugin["name"] for plugin in found["plugins"]} >= {"generic", "mla", "mha", "mamba_seglen"}
    assert found["failures"] == []
    slru = next(policy for policy in found["policies"] if policy["name"] == "slru")
    assert slru["settings"]["protected_threshold"]["default"] == 2
    shown = answer("plugins")
    for name in (*BUILTIN, "mla", "costcache_mamba_seglen.plugin", "protected_threshold"):
        assert name in shown


def test_plugins_shows_failures_and_takes_text_as_it_is(odd: PluginManager) -> None:
    odd._failed("broken", "broken.plugin", "import failed: [bold]no[/bold] module")
    for options in ((), ("--json",)):
        result = costcache_("plugins", *options)
        assert result.exit_code == 1
        assert "import failed: [bold]no[/bold] module" in result.stdout
        assert "Evicts [red]x[/red] :smile:." in result.stdout


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_written_and_rewritten_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl.gz"]
    for path in paths:
        result = costcache_("workload", name, "--out", path, "--requests", "50", "--seed", "7")
        assert result.exit_code == 0, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("wrote 50 requests, ")
        assert result.stderr.endswith(f"in blocks of 16 to {path}\n")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(load_trace(paths[2])) == 50
    piped = costcache_("workload", name, "--out", "-", "--requests", "50", "--seed", "7")
    assert piped.stdout_bytes == paths[0].read_bytes()
    other = tmp_path / "other.jsonl"
    assert costcache_("workload", name, "--out", other, "--requests", "50").exit_code == 0
    assert other.read_bytes() != paths[0].read_bytes()
    assert "costcache" in answer("simulate", paths[0], *MODEL, "--capacity", "2000tok")


def test_workload_parameters_are_set_by_name(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    options = (
        "--requests",
        "20",
        "--set",
        "user.median=300",
        "--set",
        "user.shape=0",
        "--set",
        "system.count=1",
    )
    answer("workload", "chat", "--out", path, *options)
    assert len(set(load_trace(path).input_tokens.tolist())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("caht",),
            "there is no workload 'caht'; did you mean 'chat'? choose one of agentic, agents-documents, chat",
        ),
        (("chat", "--requests", "0"), "setting 'chat.requests' is 0"),
        (("chat", "--seed", "-1"), "setting 'chat.seed' is -1"),
        (("chat", "--set", "user"), "--set 'user' is not FIELD=VALUE"),
        (("chat", "--set", "user.median=abc"), "setting 'chat.user.median' is 'abc'"),
        (("chat", "--set", "usr.median=3"), "unknown setting 'chat.usr'"),
    ],
)
def test_workload_refuses_in_one_line(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    path = tmp_path / "out.jsonl"
    assert message in refusal("workload", *options, "--out", path)
    assert not path.exists()


def test_a_workload_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "out.jsonl"
    message = refusal("workload", "chat", "--requests", "5", "--out", path)
    assert message.startswith(f"{path}: cannot be written (No such file or directory)")


# -- help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_with_its_summary(flag: str) -> None:
    shown = " ".join(answer(flag).split())  # a long summary wraps
    for name, summary in COMMANDS.items():
        assert f" {name} {summary}" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_its_options(name: str) -> None:
    shown = answer(name, "--help")
    assert shown.startswith(f"Usage: cli {name} ")
    module = name.replace("-", "_")
    command = getattr(importlib.import_module(f"costcache.cli.{module}"), module)
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), parameter.name


def test_version() -> None:
    build = "plain Python" if records.__file__.endswith(".py") else "compiled"
    assert answer("--version") == f"costcache, version {__version__} ({build})\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = costcache_("simulat")
    assert result.exit_code == 2
    assert "No such command 'simulat'" in result.stderr
