"""No small file takes the machine: lines, sizes and tokens are bounded by what the file justifies."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from costcache.errors import TraceError
from costcache.sim.traces import load_trace
from costcache.sim.traces.limits import Limits
from tests.unit.commands import answer, refusal

LINE = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
SMALL = Limits(line=1000)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" " * 1001, "line 1: is longer than 1,000 bytes"),
        (json.dumps(LINE).encode() + b"\n" + b"x" * 2000, "line 2: is longer than 1,000 bytes"),
        (
            b"[" + b",".join([json.dumps(LINE).encode()] * 30) + b"]",
            "is a JSON array longer than 1,000 bytes",
        ),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_a_long_line_is_refused(
    tmp_path: Path, content: bytes, message: str, pack: Callable[[bytes], bytes]
) -> None:
    path = write(tmp_path / "long", pack(content))
    with pytest.raises(
        TraceError, match=f"long.*{message}; give a file with one JSON object a line, or allow"
    ):
        load_trace(path, limits=SMALL)


def test_the_limits_are_options(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", json.dumps(LINE).encode() + b"\n")
    assert "is longer than 50 bytes" in refusal("trace", "info", path, "--max-line", "50B")
    assert answer("trace", "info", path, "--max-line", "1kB", "--max-expansion", "1")
    assert refusal("trace", "info", path, "--max-line", "x").startswith(
        "--max-line 'x' is not a size in bytes"
    )
    assert "--max-expansion is 0: input should be" in refusal("trace", "info", path, "--max-expansion", "0")
    with pytest.raises(TraceError, match="limit line is 0; give 1 or more"):
        Limits(line=0)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.usefixtures("little_is_free")
def test_a_file_that_unpacks_into_too_much_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    bomb = write(tmp_path / "bomb", pack((json.dumps(LINE).encode() + b" " * 1000 + b"\n") * 200))
    message = "compressed bytes unpack to more than .* allow more than 100 times with --max-expansion"
    with pytest.raises(TraceError, match=message):
        load_trace(bomb, limits=Limits(expansion=100))
    assert len(load_trace(bomb, limits=Limits(expansion=10**6))) == 200


@pytest.fixture
def little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costcache.sim.traces.limits._FREE", 1 << 16)


TURN = ["human", 2**17, 0]
UNFOLDING: dict[str, list[dict[str, Any]]] = {
    "blocks": [{**LINE, "block_size": 2**14, "input_length": 2**19, "hash_ids": list(range(32))}],
    "turns": [{"turns": [TURN, ["gpt", 1, 0]] * 40}],
    "one answer": [{"turns": [TURN] * 400 + [["gpt", 1, 0]]}],
}


@pytest.mark.usefixtures("little_is_free")
@pytest.mark.parametrize("name", UNFOLDING)
def test_few_bytes_do_not_stand_for_many_tokens(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t", b"".join(json.dumps(row).encode() + b"\n" for row in UNFOLDING[name]))
    with pytest.raises(TraceError, match=r"bytes stand for more than [\d,]+ prompt tokens; if the file"):
        load_trace(path)
    assert int(load_trace(path, limits=Limits(expansion=10**8)).input_tokens.sum()) > 2**17


@pytest.mark.usefixtures("little_is_free")
def test_chunks_of_a_table_are_bounded_too(tmp_path: Path) -> None:
    trace = {"timestamp": "0", "input_length": 1, "output_length": 1, "hash_ids": {"history": [1] * 99}}
    write(tmp_path / "0_trace.jsonl", json.dumps(trace).encode())
    ids = {
        "1_sys_prompt": "sys_prompt_id",
        "2_passages": "passage_id",
        "3_history": "history_id",
        "4_user_input": "user_input_id",
        "5_web_search": "web_search_id",
    }
    for count, tokens, message in (
        (9, 2**18, "3_history.jsonl: .* bytes stand for"),
        (1, 2**15, "0_trace.jsonl: .* bytes stand for"),
    ):
        for name, field in ids.items():
            rows = [{field: at, "token_length": tokens} for at in range(1, count + 1)]
            content = "\n".join(json.dumps(row) for row in rows if name == "3_history")
            write(tmp_path / f"{name}.jsonl", content.encode())
        with pytest.raises(TraceError, match=message):
            load_trace(tmp_path / "0_trace.jsonl")


ENDLESS = {
    "no end of a line": "/dev/zero",
    "noise": "/dev/urandom",
}


@pytest.mark.parametrize("device", ENDLESS.values(), ids=list(ENDLESS))
@pytest.mark.parametrize("command", [("trace", "info"), ("simulate", "--model", "llama-3-8b")], ids=" ".join)
def test_a_device_ends_in_an_error(device: str, command: tuple[str, ...]) -> None:
    if not Path(device).exists():
        pytest.skip(f"no {device} on this system")
    started = time.monotonic()
    assert refusal(*command, device).startswith(f"{device}, line 1: is ")
    assert time.monotonic() - started < 10


def test_blank_lines_without_end_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "blank", b"\n" * (2**20 + 10))
    assert refusal("trace", "info", path).endswith(
        "is blank, as the 1,048,576 lines before; give a file with one JSON object a line"
    )


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes on this system")
    monkeypatch.setattr("costcache.files._PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_that_nobody_writes_to_or_reads_from_is_an_error(pipe: Path, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", json.dumps(LINE).encode())
    assert refusal("trace", "info", pipe) == (
        f"{pipe}: cannot be read (no program writes to this pipe); check the path"
    )
    assert refusal("trace", "info", good, "--retime", pipe).startswith(f"{pipe}: cannot be read (no program")
    assert refusal("trace", "convert", good, "--out", pipe) == (
        f"{pipe}: cannot be written (no program reads from this pipe); check the path"
    )
    assert pipe.is_fifo()  # and not replaced by a file


def test_a_pipe_is_read_and_written_through(pipe: Path, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", json.dumps(LINE).encode() + b"\n")
    with subprocess.Popen(["sh", "-c", f"cat '{good}' > '{pipe}'"]):
        assert "requests        1" in answer("trace", "info", pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        answer("trace", "convert", good, "--out", pipe)
        assert json.loads(reader.communicate()[0])["hash_ids"] == [0, 1]


def test_a_stream_of_requests_without_end_is_an_error(pipe: Path) -> None:
    line = json.dumps(LINE).encode() + b"\n"
    with subprocess.Popen(
        ["sh", "-c", f"yes '{line.decode().strip()}' > '{pipe}'"], stderr=subprocess.DEVNULL
    ):
        assert refusal("trace", "info", pipe, "--max-stream", "1MB") == (
            f"{pipe}: has more than 1,000,000 bytes, and as a pipe or device need not end; give a file, or "
            "allow more with --max-stream"
        )
    packed = gzip.compress(line * 10_000)
    assert len(packed) < 20_000 < len(line) * 10_000
    assert "standard input: has more than 20,000" in refusal(
        "trace", "info", "-", "--max-stream", "20kB", stdin=packed
    )
    assert "requests        10,000" in answer("trace", "info", "-", "--max-stream", "1MB", stdin=packed)


def test_a_file_has_an_end_and_may_have_any_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", json.dumps(LINE).encode() + b"\n")
    assert answer("trace", "info", path, "--max-stream", "1B")
    code = "from costcache.cli import main; main()"
    command = [sys.executable, "-c", code, "trace", "info", "-", "--max-stream", "1B"]
    with path.open("rb") as stream:
        assert subprocess.run(command, stdin=stream, capture_output=True, check=False).returncode == 0


def test_want_of_memory_is_one_line(tmp_path: Path) -> None:
    rows = [{**LINE, "input_length": 512 * 3000, "hash_ids": list(range(k, k + 3000))} for k in range(1000)]
    path = write(tmp_path / "large.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    code = (
        "import resource; from costcache.cli import main\n"
        "import costcache.sim.engine, costcache.sim.traces.mooncake, costcache.sim.paths\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (25 << 20),) * 2)\n"
        "main()"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", "info", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: out of memory; give larger pages (--page-size)")
    assert done.stderr.count("\n") == 1


def test_a_model_or_tables_of_any_size_are_not_read(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", json.dumps(LINE).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "more than" in refusal("plan", "--model", "/dev/zero", "--memory", "80GiB")
    model = ("--model", "llama-3-8b", "--policy", "hazard")
    assert "more than" in refusal("simulate", good, *model, "--set", "hazard.tables=/dev/zero")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10
