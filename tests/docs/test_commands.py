"""Every command in a block that is not run as it stands does what the page says, with files that stand in.

They run as for a new user: 80 columns, a pipe, no locale and no network. Servers' commands are checked beside
their servers, in ``tests/sglang`` and ``tests/vllm``.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from costcache.cli import cli
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings
from tests.docs.commands import Command, commands
from tests.docs.pages import REPO
from tests.docs.test_blocks import ENVIRONMENT, UNSET

SAMPLES = REPO / "examples" / "traces"
# What a page's file is here: a sample of the same format.
STANDINS = {
    "Mooncake/FAST25-release/traces/conversation_trace.jsonl": "mooncake.jsonl",
    "conversation.jsonl": "mooncake.jsonl",
    "qwen-bailian-usagetraces-anon/qwen_thinking_blksz_16.jsonl": "bailian.jsonl",
    "kv-cache-tester/traces/all.json": "weka.jsonl",
    "RAGPulse/data/0_trace.jsonl": "ragpulse_0_trace.jsonl",
    **{
        f"RAGPulse/data/{name.removeprefix('ragpulse_')}": name
        for name in (
            "ragpulse_1_sys_prompt.jsonl",
            "ragpulse_2_passages.jsonl",
            "ragpulse_3_history.jsonl",
            "ragpulse_4_user_input.jsonl",
            "ragpulse_5_web_search.jsonl",
        )
    },
    "lmcache-agent-trace/miniswe/one.jsonl": "lmcache.jsonl.gz",
    "pi_request_trace.jsonl.gz": "dynamo.jsonl",
    "bbh.tar": "few_shot.tar.gz",
    "gsm8k.tar": "few_shot.tar.gz",
    "ShareGPT_V3_unfiltered_cleaned_split.json": "conversations.jsonl",
    "AzureLLMInferenceTrace_conv.csv": "azure.csv",
}
# Larger than a sample: shares of it have to be pools.
REPLAYED = ("trace.jsonl", "trace.jsonl.gz", "mooncake_conversation.jsonl.gz")
WORDS = {"TRACE": "trace.jsonl", "MODEL": "llama-3-8b"}
# These need something that is not here, so that only their options are checked.
NEED = {"watch": "a server", "doctor": "the plugin of an example", "retention": "the same"}

RUN = commands("costcache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages name."""
    found = tmp_path_factory.mktemp("reader")
    for name, sample in STANDINS.items():
        data = (SAMPLES / sample).read_bytes()
        if sample.endswith(".jsonl.gz"):
            data = gzip.decompress(data)
        if name.endswith(".gz"):
            data = gzip.compress(data)
        if name.endswith(".json") and "ShareGPT" in name:  # one array, as data set hubs have it
            data = b"[" + b",".join(data.strip().splitlines()) + b"]"
        if name.endswith(".tar"):
            data = gzip.decompress(data)
        path = found / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    trace = generate("chat", workload_settings("chat", {"requests": 300}))
    for name in REPLAYED:
        write_trace(trace, found / name)
    ids = {"obj": {"input_ids": [*range(64)]}, "out": {"output_ids": [1, 2], "meta_info": {}}}
    row = {"timestamp": "2026-11-29T10:00:02", "event": "request.finished", **ids}
    (found / "server.log").write_text(f"[2026-11-29 10:00:00] {json.dumps(row)}\n", encoding="utf-8")
    return found


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_ends_well(command: Command, folder: Path) -> None:
    needed = NEED.keys() & {*command.words, *",".join(command.words).split(",")}
    if needed:
        parsed(command.words[1:])
        return
    line = command.text
    if "tokenizer.json" in line:
        pytest.importorskip("tokenizers")
        tokenizer(folder)
    if "--plot" in line:
        pytest.importorskip("matplotlib")
    if "jq " in line and not shutil.which("jq"):
        line = line.replace("jq -c .", "cat")  # the sample has a session a line already
    for word, instead in WORDS.items():
        line = re.sub(rf"\b{word}\b", instead, line)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env={**env, **ENVIRONMENT, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    said = done.stdout.decode()
    assert done.returncode == 0, said
    for option in ("--out", "--report", "--plot", "--save-tables"):
        if option in command.words:
            assert (folder / command.words[command.words.index(option) + 1]).stat().st_size


def parsed(words: tuple[str, ...]) -> None:
    """Let click read the options of a command that is not run; it raises if one is not there."""
    command: click.Command = cli
    rest, context = list(words), None
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        context = click.Context(command, parent=context, info_name=rest[0])
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest, parent=context, resilient_parsing=False)


def tokenizer(folder: Path) -> None:
    from tests.unit.test_trace_tools import tokenizer_file

    tokenizer_file(folder)


@pytest.mark.parametrize("command", commands("make"), ids=str)
def test_a_target_is_in_the_makefile(command: Command) -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    target = next(word for word in command.words[1:] if "=" not in word and not word.startswith("-"))
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("command", commands("pip"), ids=str)
def test_what_is_installed_is_there(command: Command) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert command.words[1] == "install"
    for word in command.words[2:]:
        extra = re.fullmatch(r"(?:costcache|\.)\[(\w+)\]", word)
        if extra:
            assert extra[1] in project["optional-dependencies"]
        elif word.startswith(("./", "plugins/")) and word != "./costcache-loyal":  # the tutorial's own
            assert (REPO / word / "pyproject.toml").is_file()


def scripts() -> list[Command]:
    """The commands of results, which name what made them."""
    return [
        Command(page.name, tuple(shlex.split(line)), line)
        for page in sorted((REPO / "benchmarks" / "results").glob("*.md"))
        for line in re.findall(r"^ {4}(python benchmarks/.*)$", page.read_text("utf-8"), re.MULTILINE)
    ]


@pytest.mark.parametrize("command", scripts(), ids=str)
def test_a_benchmark_has_the_options_that_its_page_names(command: Command) -> None:
    script = REPO / command.words[1]
    source = script.read_text(encoding="utf-8")
    source += "".join(path.read_text(encoding="utf-8") for path in script.parent.glob("_*.py"))
    for word in command.words[2:]:
        if word.startswith("--"):
            assert word in source
