"""The commands and their answers, as a user gives and reads them."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import costcache.plugins
from costcache import hookimpl
from costcache._version import __version__
from costcache.cli import COMMANDS, cli
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.policies import BUILTIN, PolicySpec
from costcache.policies.lru import LRU
from costcache.records import NodeRecord
from costcache.sim.traces import load_trace, write_trace
from costcache.sim.workloads import WORKLOADS, generate, workload_settings

MODEL = ("--model", "deepseek-v3")
RUN_FIELDS = {
    "policy",
    "capacity_tokens",
    "token_hit_rate",
    "flops_saved_rate",
    "evicted_tokens",
    "requests_per_second",
}
TIMING = ("seconds", "requests_per_second")


def costcache_(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], input=stdin)


def answer(*arguments: str | Path, stdin: bytes | None = None) -> str:
    result = costcache_(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str | Path, stdin: bytes | None = None) -> str:
    """The one line that a wrong use ends with."""
    result = costcache_(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)  # nothing was raised through the program
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated trace."""
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(generate("chat", workload_settings("chat", {"requests": 200})), path)
    return path


# -- simulate --------------------------------------------------------------------------------


@pytest.mark.traces
def test_the_recorded_conversation_has_its_published_hit_rates(traces_dir: Path) -> None:
    trace = traces_dir / "mooncake_conversation.jsonl.gz"
    capacity = ("--capacity", "unlimited,14054pages")
    found = json.loads(answer("simulate", trace, *MODEL, "--policy", "lru,costcache", *capacity, "--json"))
    assert found["trace"]["requests"] == 12_031
    assert found["deployment"]["page_size"] == 512
    runs = {(run["policy"], run["capacity_tokens"]): run for run in found["runs"]}
    assert runs.keys() == {(p, c) for p in ("lru", "costcache") for c in (None, 14_054 * 512)}
    for (_, capacity_tokens), run in runs.items():
        rate = "37.34%" if capacity_tokens is None else "25.86%"
        assert f"{run['token_hit_rate']:.2%}" == rate
        assert run["policy_in_force"] == "lru"
    assert runs["lru", None]["evicted_tokens"] == 0


def test_runs_have_the_promised_fields_for_each_policy_and_capacity(chat: Path) -> None:
    policies = ("--policy", "lru,lfu", "--policy", "slru")
    found = json.loads(answer("simulate", chat, *MODEL, *policies, "--capacity", "5%,unlimited", "--json"))
    assert [(run["capacity"], run["policy"]) for run in found["runs"]] == [
        (capacity, policy) for capacity in ("5%", "unlimited") for policy in ("lru", "lfu", "slru")
    ]
    for run in found["runs"]:
        assert run.keys() >= RUN_FIELDS
        assert run["requests_per_second"] > 0
        assert 0 < run["flops_saved_rate"] < run["token_hit_rate"] < 1
    assert [run["capacity_tokens"] for run in found["runs"][3:]] == [None] * 3
    assert found["trace"]["ideal_token_hit_rate"] == pytest.approx(found["runs"][-1]["token_hit_rate"])
    assert found["kv_bytes_per_token"] == 70_272


def test_every_rerun_prints_the_same_but_for_timing(repo_root: Path, chat: Path) -> None:
    line = [sys.executable, "-m", "costcache", "simulate", str(chat), *MODEL, "--json"]
    line += ["--policy", ",".join(("costcache", *BUILTIN)), "--capacity", "5%,1GB,unlimited"]
    outputs = []
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(line, cwd=repo_root, env=env, check=True, capture_output=True, text=True)
        assert done.stderr == ""  # no progress display without a terminal
        outputs.append(json.loads(done.stdout))
    for output in outputs:
        for run in output["runs"]:
            for name in TIMING:
                assert run.pop(name) > 0
    assert len(outputs[0]["runs"]) == 27
    assert outputs[0] == outputs[1]


def test_sizes_in_bytes_are_what_the_deployment_makes_of_them(chat: Path) -> None:
    def tokens(*options: str) -> int:
        found = json.loads(answer("simulate", chat, "--capacity", "1GB", "--json", *options))
        size: int = found["runs"][0]["capacity_tokens"]
        return size

    assert tokens(*MODEL) == 10**9 // 70_272 // 16 * 16
    assert tokens(*MODEL, "--page-size", "512") == 10**9 // 70_272 // 512 * 512
    assert tokens(*MODEL, "--tp", "8") == tokens(*MODEL)  # latents are not divided
    llama = ("--model", "llama-3-8b")
    assert tokens(*llama) == 10**9 // 131_072 // 16 * 16
    assert tokens(*llama, "--tp", "8") == 10**9 // 16_384 // 16 * 16
    assert tokens(*llama, "--kv-dtype", "fp8_e4m3") == 10**9 // 65_536 // 16 * 16


def test_bytes_count_sliding_layers_as_plan_does(chat: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "hidden_size": 3584,
                "num_hidden_layers": 42,
                "vocab_size": 256000,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "intermediate_size": 14336,
                "sliding_window": 4096,
            }
        )
    )
    simulated = json.loads(answer("simulate", chat, "--model", config, "--capacity", "1GB", "--json"))
    planned = json.loads(answer("plan", "--model", config, "--memory", "1GB", "--page-size", "16", "--json"))
    assert simulated["runs"][0]["capacity_tokens"] == planned["tokens"]


def test_settings_reach_the_plugin_and_the_policy(chat: Path) -> None:
    base = ("simulate", chat, *MODEL, "--capacity", "10%", "--json")

    def run(*options: str) -> dict[str, Any]:
        runs = json.loads(answer(*base, *options))["runs"]
        return {name: value for name, value in runs[0].items() if name not in TIMING}

    plain, floored = run(), run("--set", "architecture.floor=0.3")
    assert floored["evictions"] < plain["evictions"]
    assert floored["token_hit_rate"] < plain["token_hit_rate"]
    # Headroom alone is divided by the compression ratio; as a floor it is not.
    assert plain["evictions"] > run("--headroom", "0.3")["evictions"] > floored["evictions"]
    slru, once = run("--policy", "slru"), run("--policy", "slru", "--set", "slru.protected_threshold=1")
    lru = run("--policy", "lru")
    assert slru["hit_tokens"] != lru["hit_tokens"]
    assert once["hit_tokens"] == lru["hit_tokens"]  # everything is protected


def test_a_trace_comes_from_standard_input(chat: Path) -> None:
    piped = json.loads(answer("simulate", "-", *MODEL, "--json", stdin=chat.read_bytes()))
    named = json.loads(answer("simulate", chat, *MODEL, "--json"))
    assert piped["trace"].pop("name") == "stdin"
    assert named["trace"].pop("name") == "chat"
    for found in (piped, named):
        for run in found["runs"]:
            for name in TIMING:
                del run[name]
    assert piped == named


def test_the_table_says_what_costcache_means_and_which_requests_are_too_long(chat: Path) -> None:
    shown = answer("simulate", chat, *MODEL, "--capacity", "64pages")
    assert "costcache means lru for deepseek-v3" in shown
    longer = (load_trace(chat).input_tokens >= 1040).sum()
    assert f"{longer} requests are longer than the pool of 64pages" in shown
    assert "means" not in answer("simulate", chat, *MODEL, "--policy", "lru", "--capacity", "unlimited")


class Odd:
    """A policy that fails, and an architecture plugin that answers out of bounds."""

    @hookimpl
    def policies(self) -> dict[str, PolicySpec]:
        class Failing(LRU):
            def touch(self, record: NodeRecord) -> None:
                raise KeyError(record.serial)

        return {"failing": PolicySpec(lambda cost, pools, settings: Failing(), "It fails: [red]x[/red].")}

    @hookimpl
    def match_model(self, model: ModelSpec) -> int | None:
        return 99

    @hookimpl
    def adjust_eviction_count(self) -> int:
        return -1


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """The built-in plugins and :class:`Odd`."""
    manager = PluginManager()
    manager.register(Odd(), "odd", "tests:Odd")
    monkeypatch.setattr(costcache.plugins, "get_plugins", lambda: manager)
    return manager


@pytest.mark.usefixtures("odd")
def test_the_table_tells_of_policies_and_plugins_that_failed(chat: Path) -> None:
    shown = answer("simulate", chat, *MODEL, "--policy", "failing,lru", "--capacity", "10%")
    assert "policy 'failing' failed at 10% and was replaced by lru" in shown
    assert re.search(
        r"\d+ answers of plugin 'odd' were out of bounds at 10% \(lru\) and were replaced", shown
    )
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith("10%")]
    assert rows[0][3:7] == rows[1][3:7]


def test_policies_are_checked_before_the_trace_is_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    message = refusal("simulate", missing, *MODEL, "--policy", "lru,lur")
    assert message.startswith("there is no policy 'lur': did you mean 'lru'?")
    message = refusal("simulate", missing, *MODEL, "--policy", "slru", "--set", "slru.protected_threshold=0")
    assert "protected_threshold' is 0: input should be greater than or equal to 1" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--model", "deepseek-v4"),
            "'deepseek-v4' is neither a preset nor a file; did you mean deepseek-v3",
        ),
        (("--model", ""), "the model is empty"),
        (("--model", "/no/config.json"), "/no/config.json: no such file"),
        ((*MODEL, "--policy", "lru,nothing"), "there is no policy 'nothing'"),
        ((*MODEL, "--policy", ","), "--policy is ',': give one or more"),
        ((*MODEL, "--capacity", ""), "--capacity is '': give one or more"),
        ((*MODEL, "--capacity", "5%,lots"), "capacity 'lots' is not a size: give 5%, 14054pages"),
        ((*MODEL, "--capacity", "0.001%"), "capacity '0.001%' of the trace's"),
        ((*MODEL, "--capacity", "9" * 400 + "pages"), "is larger than any memory"),
        ((*MODEL, "--headroom", "1"), "setting 'headroom' is 1.0: input should be less than 1"),
        ((*MODEL, "--headroom", "nan"), "setting 'headroom' is nan"),
        ((*MODEL, "--tp", "0"), "tp is 0; input should be greater than 0"),
        ((*MODEL, "--tp", "3", "--dp-attention", "2"), "dp_attention is 2, which does not divide tp 3"),
        ((*MODEL, "--pp", "100"), "pp is 100 for 61 layers; use at most 61"),
        ((*MODEL, "--block-size", "17"), "block_size is 16; expected 17, as asked for"),
        ((*MODEL, "--set", "floor"), "--set 'floor' is not FIELD=VALUE"),
        ((*MODEL, "--set", "=3"), "--set '=3' is not FIELD=VALUE"),
        ((*MODEL, "--set", "floor=3"), "--set 'floor=3' is for 'floor': write architecture.FIELD=VALUE"),
        ((*MODEL, "--set", "lfu.x=3"), "--set 'lfu.x=3' is for 'lfu': write"),
        ((*MODEL, "--set", "costcache.x=3"), "unknown setting 'policy_settings.x': known settings are none"),
        ((*MODEL, "--set", "architecture.flor=3"), "known settings are architecture.floor"),
        ((*MODEL, "--set", "architecture.floor=many"), "setting 'architecture.floor' is 'many'"),
        (("--model", "llama-3-8b", "--set", "architecture.floor=0.1"), "known settings are none"),
    ],
)
def test_a_wrong_option_is_one_clear_line(chat: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refusal("simulate", chat, *options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"garbage", "line 2: is not JSON"),
        (b'{"timestamp": 1, "input_length": 5, "hash_ids": [1]}', "line 2: output_length is missing"),
        (
            b'{"timestamp": 1, "input_length": "5", "output_length": 1, "hash_ids": [1]}',
            "line 2: input_length is '5'; expected tokens of the prompt",
        ),
        (
            b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}',
            "line 2: the number of hash_ids is 2; expected 1 for input_length 5",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    good = b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    path = tmp_path / "bad.jsonl"
    path.write_bytes(good + line + b"\n")
    assert refusal("simulate", path, *MODEL).startswith(f"{path}, {message}")
    assert refusal("simulate", "-", *MODEL, stdin=path.read_bytes()).startswith(f"standard input, {message}")


def test_a_trace_without_whole_pages_says_so(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    message = refusal("simulate", path, *MODEL)
    assert message.startswith("capacity '5%' of the trace's 0 distinct whole pages is less than one page")
    assert "0.00%" in answer("simulate", path, *MODEL, "--capacity", "unlimited")


@pytest.mark.parametrize("path", ["/", "missing.jsonl", "[bold]missing.jsonl"])
def test_a_trace_that_cannot_be_read_is_named(path: str) -> None:
    assert refusal("simulate", path, *MODEL).startswith(f"{path}: cannot be read")


# -- plan ------------------------------------------------------------------------------------


def test_plan_shows_the_arithmetic() -> None:
    shown = answer("plan", *MODEL, "--memory", "80GiB", "--weights", "40GiB")
    for part in (
        "85,899,345,920 - 42,949,672,960 = 42,949,672,960 B (40.00 GiB)",
        "61 layers x ((512 + 64)·2 B) = 70,272 B per token",
        "42,949,672,960 / 70,272 = 611,191 tokens",
        "42,949,672,960 / 4,997,120 = 8,594 tokens if keys and values were kept decompressed",
        "compression ratio 71.1",
    ):
        assert part in shown
    targets = [line.split() for line in shown.splitlines() if line.startswith("  ")]
    assert [
        "headroom",
        "20",
        "%",
        "with",
        "a",
        "floor",
        "of",
        "5",
        "%",
        "5.00%",
        "30,559",
        "tokens",
    ] in targets
    assert ["headroom", "20", "%", "without", "a", "floor", "0.28%", "1,718", "tokens"] in targets


def test_plan_prints_json() -> None:
    found = json.loads(answer("plan", *MODEL, "--memory", "80GiB", "--weights", "40GiB", "--json"))
    assert (found["tokens"], found["decompressed_tokens"]) == (611_191, 8_594)
    assert found["cost"]["compression_ratio"] == pytest.approx(71.111, abs=1e-3)
    assert [target["floor"] for target in found["free_targets"]] == [0.0, 0.05, 0.0]
    assert found["cost"]["terms"][0]["formula"] == "(512 + 64)·2 B"


def test_plan_of_a_hybrid_says_that_states_and_tokens_share_the_memory() -> None:
    shown = answer("plan", "--model", "qwen3-next", "--memory", "40GiB")
    assert "42,949,672,960 / 24,576 = 1,747,626 tokens, if no state is kept" in shown
    assert "42,949,672,960 / 77,266,944 = 555 states, if no token is kept" in shown
    assert "one state holds as much memory as 3,144 tokens" in shown


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
        (("--memory", "40GiB", "--weights", "40GiB"), "nothing is left to cache in"),
        (("--memory", "40GiB", "--weights", "80GiB"), "weights 85,899,345,920: nothing is left"),
        (("--memory", "40"), "--memory '40' is not a size in bytes: give 80GiB"),
        (("--memory", "40GiB", "--weights", "5%"), "--weights '5%' is not a size in bytes"),
        (("--memory", "9" * 400 + "GB"), "is larger than any memory"),
        (("--memory", "40GiB", "--set", "floor=1"), "--set 'floor=1' is not architecture.FIELD=VALUE"),
        (
            ("--memory", "40GiB", "--set", "architecture.floor=1"),
            "'architecture.floor' is 1: input should be less",
        ),
        (("--memory", "40GiB", "--headroom", "-1"), "setting 'headroom' is -1.0"),
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


def test_models_that_a_deployment_does_not_fit_are_told_apart() -> None:
    found = json.loads(answer("models", "--pp", "50", "--json"))
    failed = [row for row in found["models"] if "error" in row]
    assert 0 < len(failed) < len(found["models"])
    assert all(row["layers"] < 50 for row in failed)
    shown = answer("models", "--pp", "50")
    for row in failed:
        assert f"{row['name']}: pp is 50 for {row['layers']} layers; use at most {row['layers']}" in shown


def test_plugins_lists_what_is_there() -> None:
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
        assert "It fails: [red]x[/red]." in result.stdout


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
        (("caht",), "there is no workload 'caht'; choose one of agentic, chat, few-shot"),
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
    shown = answer(flag)
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_its_options(name: str) -> None:
    shown = answer(name, "--help")
    assert shown.startswith(f"Usage: cli {name} ")
    command = getattr(importlib.import_module(f"costcache.cli.{name}"), name)
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), parameter.name


def test_version() -> None:
    assert answer("--version") == f"costcache, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = costcache_("simulat")
    assert result.exit_code == 2
    assert "No such command 'simulat'" in result.stderr
