"""``costcache simulate``: the recorded rates, fields, determinism, settings, and wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import costcache.plugins
from costcache import hookimpl
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.policies import BUILTIN, PolicySpec
from costcache.policies.keyed import LRU
from costcache.records import NodeRecord
from costcache.sim.traces import load_trace, write_trace
from costcache.sim.workloads import generate, workload_settings
from tests.unit.commands import answer, costcache_, refusal

MODEL = ("--model", "deepseek-v3")
RUN_FIELDS = {
    "policy",
    "capacity_tokens",
    "token_hit_rate",
    "flops_saved_rate",
    "evicted_tokens",
    "shortfall_tokens",
    "kv_bytes_avoided",
    "ttft_mean",
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "gap_closed",
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated trace."""
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(generate("chat", workload_settings("chat", {"requests": 200})), path)
    return path


@pytest.mark.traces
def test_the_recorded_conversation_has_its_published_hit_rates(traces_dir: Path) -> None:
    trace = traces_dir / "mooncake_conversation.jsonl.gz"
    capacity = ("--capacity", "unlimited,14054pages")
    found = json.loads(answer("simulate", trace, *MODEL, "--policy", "lru,costcache", *capacity, "--json"))
    assert found["trace"]["requests"] == 12_031
    assert found["deployment"]["page_size"] == 512
    runs = {(run["policy"], run["capacity_tokens"]): run for run in found["runs"]}
    assert runs.keys() == {(p, c) for p in ("lru", "costcache") for c in (None, 14_054 * 512)}
    for (policy, capacity_tokens), run in runs.items():
        if capacity_tokens is None:
            assert f"{run['token_hit_rate']:.2%}" == "37.34%"
        elif policy == "lru":
            assert f"{run['token_hit_rate']:.2%}" == "25.86%"
        else:
            assert run["token_hit_rate"] > 0.27  # more than LRU
        assert run["policy_in_force"] == ("lru" if policy == "lru" else "hazard")
    assert runs["lru", None]["evicted_tokens"] == 0


def test_partial_blocks_can_be_counted_as_whole_ones(chat: Path) -> None:
    line = ("simulate", chat, *MODEL, "--policy", "lru", "--capacity", "unlimited", "--json")
    plain, rounded = (json.loads(answer(*line, *more)) for more in ((), ("--round-up",)))
    trace = load_trace(chat)
    assert (plain["trace"]["rounded_up"], rounded["trace"]["rounded_up"]) == (False, True)
    assert plain["trace"]["input_tokens"] == int(trace.input_tokens.sum())
    assert rounded["trace"]["input_tokens"] == 16 * len(trace.ids)
    # The ends of generated prompts are not shared: each is one more page.
    partial = int((trace.input_tokens % 16 > 0).sum())
    assert rounded["trace"]["distinct_pages"] == plain["trace"]["distinct_pages"] + partial
    assert rounded["runs"][0]["hit_tokens"] == plain["runs"][0]["hit_tokens"]


def test_runs_have_the_promised_fields_for_each_policy_and_capacity(chat: Path) -> None:
    policies = ("--policy", "lru,lfu", "--policy", "slru")
    found = json.loads(answer("simulate", chat, *MODEL, *policies, "--capacity", "5%,unlimited", "--json"))
    assert [(run["capacity"], run["policy"]) for run in found["runs"]] == [
        (capacity, policy) for capacity in ("5%", "unlimited") for policy in ("lru", "lfu", "slru")
    ]
    for run in found["runs"]:
        assert run.keys() >= RUN_FIELDS
        assert 0 < run["flops_saved_rate"] < run["token_hit_rate"] < 1
    assert [run["capacity_tokens"] for run in found["runs"][3:]] == [None] * 3
    assert found["trace"]["ideal_token_hit_rate"] == pytest.approx(found["runs"][-1]["token_hit_rate"])
    assert found["kv_bytes_per_token"] == 70_272


def test_every_rerun_prints_the_same_but_for_timing(repo_root: Path, chat: Path) -> None:
    line = [sys.executable, "-m", "costcache", "simulate", str(chat), *MODEL, "--json"]
    line += ["--policy", ",".join(("costcache", *BUILTIN)), "--capacity", "5%,1GB,unlimited"]
    outputs = []
    for seed, more in (("0", []), ("1", []), ("1", ["--details"])):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [*line, *more], cwd=repo_root, env=env, check=True, capture_output=True, text=True
        )
        assert done.stderr == ""  # no progress display without a terminal
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]  # to the byte
    plain, detailed = json.loads(outputs[0]), json.loads(outputs[2])
    assert len(plain["runs"]) == 3 * (len(BUILTIN) + 1)
    for run in detailed["runs"]:
        deciding = run.pop("decision_microseconds")
        assert deciding is None or deciding > 0
        seconds, rate = run.pop("seconds"), run.pop("requests_per_second")
        assert seconds > 0
        assert rate == (pytest.approx(run["requests"] / seconds) if run["tree"] else None)
    assert detailed == plain


def test_the_speed_of_a_replay_is_its_own_or_not_printed(chat: Path) -> None:
    # LRU by pages reads its later capacities off a pass that the second one paid for.
    shown = answer("simulate", chat, *MODEL, "--policy", "lru,slru,optimum", "--capacity", "5%,10%,20%")
    rows = [line.split() for line in shown.splitlines() if "ms" in line]
    speeds = {policy: {row[-1] for row in rows if row[2] == policy} for policy in ("lru", "slru", "optimum")}
    assert speeds["lru"] == speeds["optimum"] == {"-"}
    assert "-" not in speeds["slru"]
    assert (
        "requests"
        not in answer("simulate", chat, *MODEL, "--policy", "lru", "--capacity", "5%").split("\n\n")[1]
    )


def test_details_are_a_second_table(chat: Path) -> None:
    line = ("simulate", chat, *MODEL, "--policy", "lru,slru", "--capacity", "5%", "--tree")
    plain, detailed = answer(*line), answer(*line, "--details")
    words = ("shortfall", "KV not", "eviction", " µs")
    assert not any(word in plain for word in words)
    assert all(word in detailed for word in words)
    run = json.loads(answer(*line, "--json"))["runs"][1]
    assert f"{run['shortfall_tokens']:,}" in detailed
    assert f"{run['kv_bytes_avoided'] / 2**30:,.1f} GiB" in detailed


def test_sizes_in_bytes_depend_on_the_deployment(chat: Path) -> None:
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


def test_bytes_count_sliding_layers_as_plan_does_in_one_pool(chat: Path, tmp_path: Path) -> None:
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
    layout = ("--window-layout", "one-pool")
    simulated = json.loads(
        answer("simulate", chat, "--model", config, "--capacity", "1GB", *layout, "--json")
    )
    own = ("--memory", "1GB", "--page-size", "16", *layout)
    planned = json.loads(answer("plan", "--model", config, *own, "--json"))
    assert simulated["runs"][0]["capacity_tokens"] == planned["tokens"]


def test_settings_reach_the_plugin_and_the_policy(chat: Path) -> None:
    base = ("simulate", chat, *MODEL, "--capacity", "10%", "--json")

    def run(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(answer(*base, *options))["runs"][0]
        return found

    plain, floored = run(), run("--set", "architecture.floor=0.3")
    assert floored["evictions"] < plain["evictions"]
    assert floored["token_hit_rate"] < plain["token_hit_rate"]
    # Headroom alone is divided by the compression ratio; as a floor it is not.
    assert plain["evictions"] > run("--headroom", "0.3")["evictions"] > floored["evictions"]
    slru, once = run("--policy", "slru"), run("--policy", "slru", "--set", "slru.protected_threshold=1")
    lru = run("--policy", "lru")
    assert slru["hit_tokens"] != lru["hit_tokens"]
    assert once["hit_tokens"] == lru["hit_tokens"]  # everything is protected


def test_a_setting_of_the_default_policy_has_either_name(chat: Path) -> None:
    line = ("simulate", chat, *MODEL, "--capacity", "10%", "--json")
    own = ("--set", "hazard.refresh=3")
    renamed = json.loads(answer(*line, "--set", "costcache.refresh=3"))
    assert json.loads(answer(*line, *own)) == renamed
    assert renamed["settings"]["own"] == {"costcache": {"refresh": 3}}
    # Where both are replayed, each has the settings under its own name.
    both = json.loads(answer(*line, "--policy", "hazard,costcache", *own))
    assert both["settings"]["own"] == {"hazard": {"refresh": 3}}
    assert "is for 'hazard'" in refusal(*line, "--policy", "lru", *own)


def test_a_trace_comes_from_standard_input(chat: Path) -> None:
    piped = json.loads(answer("simulate", "-", *MODEL, "--json", stdin=chat.read_bytes()))
    named = json.loads(answer("simulate", chat, *MODEL, "--json"))
    assert piped["trace"].pop("name") == "stdin"
    assert named["trace"].pop("name") == "chat"
    assert piped == named


def test_the_table_resolves_costcache_and_names_oversized_requests(chat: Path) -> None:
    shown = answer("simulate", chat, *MODEL, "--capacity", "64pages")
    assert "costcache means hazard for deepseek-v3" in shown
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

        def no_answer(model: ModelSpec) -> str | None:
            raise ZeroDivisionError("no answer")

        def lru(cost: Any, pools: Any, settings: Any) -> LRU:
            return LRU()

        def nothing(cost: Any, pools: Any, settings: Any) -> Any:
            return None

        return {
            "failing": PolicySpec(lambda cost, pools, settings: Failing(), "It fails."),
            "choosy": PolicySpec(lru, "For hybrids.", supports=lambda model: "it has no states"),
            "puzzled": PolicySpec(lru, "For nobody knows whom.", supports=no_answer),
            "nothing": PolicySpec(nothing, "It makes no order."),
        }

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
def test_the_table_names_policies_and_plugins_that_failed(chat: Path) -> None:
    result = costcache_("simulate", chat, *MODEL, "--policy", "failing,lru", "--capacity", "10%", "--details")
    assert result.exit_code == 3
    shown = result.stdout
    assert re.search(r"10% .* failing \(failed, then lru\) ", shown)
    assert shown.count("(failed,") == 2, "in both tables"
    assert "policy 'failing' failed at 10% and was replaced by lru" in shown
    assert re.search(
        r"\d+ answers of plugin 'odd' were out of bounds at 10% \(lru\) and were replaced", shown
    )
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith("10%")]
    assert rows[0][6:10] == rows[1][3:7]


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_tells_a_script_that_a_policy_failed(chat: Path, status: int) -> None:
    policy = "failing,lru" if status else "slru,lru"
    result = costcache_("simulate", chat, *MODEL, "--policy", policy, "--capacity", "10%", "--json")
    assert result.exit_code == status
    runs = json.loads(result.stdout)["runs"]
    assert [run["fallbacks"] for run in runs] == [int(status > 0), 0]


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("choosy", "policy 'choosy' does not serve model 'deepseek-v3': it has no states"),
        ("puzzled", "policy 'puzzled' of plugin 'odd': supports raised ZeroDivisionError('no answer')"),
        ("nothing", "policy 'nothing' of plugin 'odd': make_order returned None, not a VictimOrder"),
    ],
)
def test_a_policy_that_cannot_be_used_says_why(chat: Path, policy: str, message: str) -> None:
    assert refusal("simulate", chat, *MODEL, "--policy", policy) == message


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
        ((*MODEL, "--headroom", "1"), "--headroom is 1.0: input should be less than 1"),
        ((*MODEL, "--headroom", "nan"), "--headroom is nan"),
        ((*MODEL, "--tp", "0"), "tp is 0; input should be greater than 0"),
        ((*MODEL, "--tp", "3", "--dp-attention", "2"), "dp_attention is 2, which does not divide tp 3"),
        ((*MODEL, "--pp", "100"), "pp is 100 for 61 layers; use at most 61"),
        ((*MODEL, "--block-size", "17"), "block_size is 16; expected 17, as asked for"),
        ((*MODEL, "--set", "floor"), "--set 'floor' is not WHERE.FIELD=VALUE"),
        ((*MODEL, "--set", "=3"), "--set '=3' is not WHERE.FIELD=VALUE"),
        ((*MODEL, "--set", "floor=3"), "--set 'floor=3' is for 'floor': write architecture.FIELD=VALUE"),
        ((*MODEL, "--set", "lfu.x=3"), "--set 'lfu.x=3' is for 'lfu': write"),
        (
            (*MODEL, "--set", "costcache.x=3"),
            "unknown setting 'policy_settings.x': known settings are policy_settings",
        ),
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


def test_a_log_of_messages_is_replayed_through_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    chat = [{"role": "user", "content": " ".join(f"word{i}" for i in range(200))}]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(5)))
    line = ("simulate", path, *MODEL, "--capacity", "unlimited", "--page-size", "16", "--json")
    found = json.loads(answer(*line, "--tokenizer", "words"))
    assert found["trace"]["requests"] == 5
    assert 0.7 < found["runs"][0]["token_hit_rate"] < 0.8


@pytest.mark.parametrize(
    ("known", "told"), [((), ["ending 1", "ending 2"]), (("all",), ["tool_call", "stop"])]
)
def test_known_says_what_policies_are_told(tmp_path: Path, known: tuple[str, ...], told: list[str]) -> None:
    trace = tmp_path / "agents.jsonl"
    with trace.open("w") as file:
        for n in range(300):
            ids = [n % 40 * 10 + k for k in range(4)]
            line = {"timestamp": n * 1000, "input_length": 64, "output_length": 9, "hash_ids": ids}
            line |= {"block_size": 16, "finish_reason": "tool_use" if n % 40 < 20 else "end_turn"}
            file.write(json.dumps(line) + "\n")
    options = (*MODEL, "--capacity", "50%", *(f"--known={each}" for each in known), "--json")
    found = json.loads(answer("explain", trace, *options))
    assert found["known"] == (known[0] if known else "server")
    classes = " ".join(each["name"] for each in found["classes"])
    assert all(each in classes for each in told)
    assert ("tool_call" in classes) == bool(known)
    assert json.loads(answer("simulate", trace, *options))["known"] == found["known"]
