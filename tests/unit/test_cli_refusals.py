"""Wrong input to every command that reads or writes a file: one line that names it and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from costcache.cli import cli
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings
from tests.unit.commands import costcache_

MODEL = ("--model", "llama-3-8b")
HYBRID = ("--model", "qwen3-next")
SIMULATE = ("simulate", *MODEL, "--policy", "lru")
EXPLAIN = ("explain", *MODEL)
PLAN = ("plan", *HYBRID, "--memory", "80GiB", "--weights", "79GiB", "--trace")
CONVERT = ("trace", "convert", "--out", "converted.jsonl")
INFO = ("trace", "info")
READERS = pytest.mark.parametrize("command", [SIMULATE, EXPLAIN, PLAN, CONVERT, INFO], ids=" ".join)
HUGE = str(10**26)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in; it has a trace, ``good.jsonl``."""
    monkeypatch.chdir(tmp_path)
    write_trace(generate("chat", workload_settings("chat", {"requests": 20})), "good.jsonl")
    return tmp_path


def refusal(*arguments: str) -> str:
    """The one line that a wrong use ends with; a wrong option has click's usage above it."""
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit)  # nothing was raised through the program
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert result.exit_code == 2 or len(lines) == 1
    assert lines[-1].startswith("Error: ")
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before
    return lines[-1].removeprefix("Error: ")


@READERS
def test_a_file_that_is_no_trace_is_named(command: tuple[str, ...], folder: Path) -> None:
    good = Path("good.jsonl").read_bytes().splitlines(keepends=True)
    files = {
        "empty": (b"", "holds no request; give a file with one JSON object a line"),
        "blank": (b"\n \n", "holds no request; give a file with one JSON object a line"),
        "binary": (b"\xa5\x00\x1b[31m\xff", r"line 1: is not JSON"),
        "text": (b"hello\n", "line 1: is not JSON"),
        "cut": (b"".join(good[:5]) + good[5][:30], "line 6: is not JSON"),
        "list": (
            b"[1, 2]\n",
            "line 1: the line is [1, 2]; expected a JSON object with the fields timestamp,",
        ),
        "other": (b"{}\n", "line 1: the line is {}; expected the fields of a known format"),
        "packed": (b"\x1f\x8b\x08\x00", "is cut off or damaged"),
    }
    for name, (content, expected) in files.items():
        (folder / name).write_bytes(content)
        message = refusal(*command, name)
        assert message.startswith(name)
        assert expected in message
        assert message.isprintable()  # nothing that a terminal would obey
    Path("inside").mkdir()
    assert refusal(*command, "inside") == "inside: cannot be read, being a folder; give a file in it"
    assert (
        refusal(*command, "missing") == "missing: cannot be read (No such file or directory); check the path"
    )
    assert refusal(*command, "").startswith("'': cannot be read")


@READERS
def test_options_of_reading_are_checked(command: tuple[str, ...]) -> None:
    for options, expected in (
        (("--seed", "-1"), "seed is -1; give 0 or more"),
        (("--block-size", HUGE), f"block size is {HUGE}; give 1 to 1,048,576 tokens"),
        (("--arrivals", "soon"), "arrivals are 'soon'; give uniform:6h"),
        (("--retime", "missing.csv"), "missing.csv: cannot be read"),
    ):
        assert refusal(*command, "good.jsonl", *options).startswith(expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"timestamp": 0, "input_length": 4, "output_length": 1, "block_size": 1048577, "hash_ids": []}',
            "block_size is 1048577; expected tokens per hash id, a whole number from 1 to 1048576",
        ),
        (
            b'{"timestamp": 1e300, "input_length": 4, "output_length": 1, "hash_ids": [1]}',
            "timestamp is 1e+300; expected milliseconds from the start, from 0 to 1e+15",
        ),
    ],
)
def test_sizes_and_times_that_nothing_has_are_refused(folder: Path, line: bytes, message: str) -> None:
    (folder / "odd.jsonl").write_bytes(line)
    assert refusal(*INFO, "odd.jsonl") == f"odd.jsonl, line 1: {message}"


@pytest.mark.parametrize("command", [SIMULATE, EXPLAIN, INFO], ids=" ".join)
@pytest.mark.parametrize("size", ["1048577", "1000000000000", HUGE])
def test_a_page_size_that_nothing_has_is_refused(command: tuple[str, ...], size: str) -> None:
    message = refusal(*command, "good.jsonl", "--page-size", size)
    assert message == f"page size is {size}; give 1 to 1,048,576 tokens"


def test_other_sizes_that_nothing_has_are_refused() -> None:
    assert "give 1 to 1,048,576 tokens" in refusal(*PLAN, "good.jsonl", "--page-size", HUGE)
    message = refusal(*CONVERT, "good.jsonl", "--out-block-size", str(16 * 10**17))
    assert message.endswith("give a multiple of the trace's own, 16, up to 1,048,576 tokens")


@pytest.mark.parametrize("command", [SIMULATE, EXPLAIN], ids=" ".join)
@pytest.mark.parametrize(
    ("ratio", "why"),
    [
        ("nan", "input should be greater than or equal to 0"),
        ("-1.0", "input should be greater than or equal to 0"),
        ("inf", "leaves nothing for KV; give 0, or a ratio such as 0.9"),
        ("1e+30", "leaves nothing for KV; give 0, or a ratio such as 0.9"),
    ],
)
def test_a_ratio_that_leaves_no_memory_for_kv_is_refused(
    command: tuple[str, ...], ratio: str, why: str
) -> None:
    message = refusal(*command, "good.jsonl", "--mamba-full-memory-ratio", ratio)
    assert message == f"--mamba-full-memory-ratio is {ratio}: {why}"


def test_memory_too_small_for_a_state_names_its_size() -> None:
    message = refusal("simulate", *HYBRID, "good.jsonl", "--capacity", "5%")
    assert "a page of 16 tokens takes 393,216 and a state 77,266,944; give more, or divide it" in message


MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "--capacity", "5%"),
        ("simulate", "--capacity", "1000pages", "--mamba-full-memory-ratio", "0"),
        ("simulate", "--capacity", "1000pages", "--serving"),
        ("simulate", "--capacity", "1000pages", "--host", "1GB"),
        ("explain", "--capacity", "1000pages"),
        ("plan", "--memory", "80GiB", "--trace"),
    ],
    ids=" ".join,
)
def test_a_model_of_states_alone_is_not_replayed(command: tuple[str, ...]) -> None:
    Path("mamba.json").write_text(json.dumps(MAMBA))
    name, *options = command
    message = refusal(name, "--model", "mamba.json", *options, "good.jsonl")
    assert "mamba" in message
    assert "states" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--decode-seconds", "1e308"), "--decode-seconds is 1e+308: input should be less than"),
        (("--rate", "1e-308"), "--rate is 1e-308: input should be greater than"),
    ],
)
def test_times_of_a_server_stay_finite(options: tuple[str, ...], message: str) -> None:
    assert refusal(*SIMULATE, "good.jsonl", "--serving", *options).startswith(message)


def test_a_bad_assignment_names_the_expected_form() -> None:
    assert refusal(*SIMULATE, "good.jsonl", "--set", "x") == "--set 'x' is not WHERE.FIELD=VALUE"
    assert refusal(*PLAN, "good.jsonl", "--set", "x") == "--set 'x' is not architecture.FIELD=VALUE"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ((*SIMULATE, "good.jsonl", "--report", "./good.jsonl"), "--report good.jsonl is an input"),
        ((*SIMULATE, "good.jsonl", "--plot", "linked.png"), "--plot linked.png is an input"),
        (
            (*SIMULATE, "good.jsonl", "--report", "a.svg", "--plot", "a.svg"),
            "--plot a.svg is also written by --report",
        ),
        ((*EXPLAIN, "good.jsonl", "--save-tables", "good.jsonl"), "--save-tables good.jsonl is an input"),
        (
            (*EXPLAIN, "good.jsonl", "--plot", "a.svg", "--save-tables", "a.svg"),
            "--save-tables a.svg is also written by --plot",
        ),
        (("trace", "convert", "good.jsonl", "--out", "good.jsonl"), "--out good.jsonl is an input"),
    ],
)
def test_a_result_never_overwrites_the_trace(line: tuple[str, ...], message: str) -> None:
    Path("linked.png").symlink_to("good.jsonl")
    assert refusal(*line) == f"{message}: give another name"


def test_the_arrivals_that_are_read_are_not_written_over(folder: Path) -> None:
    (folder / "times.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    line = ("trace", "convert", "good.jsonl", "--retime", "times.csv", "--out", "times.csv")
    assert refusal(*line) == "--out times.csv is an input: give another name"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--requests", HUGE), f"setting 'chat.requests' is {HUGE}: input should be less than or equal to"),
        (("--set", "rate=0"), "setting 'chat.rate' is 0: input should be greater than or equal to"),
        (("--set", "rate=1e-320"), "setting 'chat.rate' is 1e-320: input should be greater than"),
        (("--set", "user.median=1e300"), "setting 'chat.user.median' is 1e+300: input should be less than"),
        (
            ("--set", f"system.tokens.high={HUGE}"),
            f"setting 'chat.system.tokens.high' is {HUGE}: input should be",
        ),
        (("--set", f"system.count={HUGE}"), f"setting 'chat.system.count' is {HUGE}: input should be"),
    ],
)
def test_a_workload_larger_than_memory_is_refused(options: tuple[str, ...], message: str) -> None:
    assert refusal("workload", "chat", "--out", "new.jsonl", *options).startswith(message)


def test_lengths_are_bounded_however_wide_they_are_drawn() -> None:
    trace = generate("random", workload_settings("random", {"requests": 20, "prompt.shape": 10}))
    assert trace.input_tokens.max() <= 16_000
    wide = {"requests": 20, "prompt.shape": 0, "prompt.high": None, "prompt.median": 1e9}
    assert set(generate("random", workload_settings("random", wide)).input_tokens.tolist()) == {2**20}


@pytest.mark.parametrize("command", [("workload", "chat"), ("trace", "convert", "good.jsonl")], ids=" ".join)
def test_a_place_that_cannot_be_written_is_named(command: tuple[str, ...]) -> None:
    Path("inside").mkdir()
    assert (
        refusal(*command, "--out", "inside") == "inside: cannot be written, being a folder; name a file in it"
    )
    message = refusal(*command, "--out", str(Path("missing", "x")))
    assert message.endswith(": cannot be written (No such file or directory); check the path")
    assert refusal(*command, "--out", "").startswith("''")


@pytest.mark.parametrize(
    "said",
    [
        ("--policy", "hazard"),
        ("--policy", "none-such"),
        ("--policy", "lru"),  # the default, but somebody said it
        ("--tokenizer", "qwen"),
        ("--retime", "good.jsonl"),
        ("--gaps", "recorded"),
        ("--seed", "3"),
        ("--arrivals", "poisson:2"),
        ("--block-size", "16"),
    ],
    ids=" ".join,
)
def test_replay_options_without_a_replay_are_refused(said: tuple[str, str]) -> None:
    plan = PLAN[: PLAN.index("--trace")]
    assert refusal(*plan, *said) == f"{said[0]} applies to a replay: give --trace FILE, or leave it out"


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e30", HUGE])
@pytest.mark.parametrize(
    "command",
    [
        ("plugins", "doctor", "--seconds"),
        ("plugins", "doctor", "--limit"),
        ("watch", "--url", "http://127.0.0.1:9", "--interval"),
    ],
    ids=" ".join,
)
def test_seconds_that_no_clock_can_wait_are_refused(command: tuple[str, ...], seconds: str) -> None:
    done = costcache_(*command, seconds)
    assert done.exit_code == 2
    assert f"Invalid value for '{command[-1]}'" in done.stderr
