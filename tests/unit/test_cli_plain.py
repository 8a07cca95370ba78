"""What a terminal gets: no control characters, any encoding, near names, completion, quiet interrupts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from costcache.cli import cli
from costcache.cli.plain import Formatter, plain
from costcache.model import ModelSpec
from costcache.sim.workloads import WORKLOADS
from tests.unit.commands import answer, costcache_, refusal

PROGRAM = (sys.executable, "-m", "costcache")
ATTACK = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\u2028"
MODEL = ("--model", "llama-3-8b")


def row(at: int, **more: object) -> dict[str, object]:
    return {"timestamp": at, "input_length": 64, "output_length": 600, "block_size": 16, **more}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A trace whose name and texts have control characters."""
    path = tmp_path / f"{ATTACK}.jsonl"
    rows = [
        row(at, hash_ids=[at % 3, *range(4 * at + 3, 4 * at + 6)], finish_reason=ATTACK, tenant=ATTACK)
        for at in range(40)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    "line",
    [
        ("trace", "info", "TRACE"),
        ("trace", "info", "TRACE", "--json"),
        ("simulate", "TRACE", *MODEL, "--policy", "lru,hazard", "--capacity", "20%"),
        ("explain", "TRACE", *MODEL, "--known", "all", "--capacity", "20%"),
        ("trace", "convert", "TRACE", "--out", "OUT"),
        ("trace", "info", "MISSING"),
        ("simulate", "TRACE", "--model", "MODEL"),
        ("simulate", "TRACE", *MODEL, "--policy", ATTACK),
        ("simulate", "TRACE", *MODEL, "--capacity", ATTACK),
        ("simulate", "TRACE", *MODEL, "--known", ATTACK),
        ("simulate", "TRACE", *MODEL, "--report", "FOLDER"),
        ("workload", ATTACK, "--out", "OUT"),
        (ATTACK,),
        ("trace", ATTACK),
        ("simulate", f"--{ATTACK}"),
    ],
    ids=lambda line: "-".join(word for word in line if word.isprintable()),
)
def test_no_control_character_reaches_the_terminal(
    line: tuple[str, ...], hostile: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"folder{ATTACK}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": ATTACK}))
    words = {
        "TRACE": str(hostile),
        "OUT": str(tmp_path / f"out{ATTACK}"),
        "MISSING": str(tmp_path / f"missing{ATTACK}"),
        "MODEL": str(folder),
        "FOLDER": str(folder),
    }
    result = costcache_(*(words.get(word, word) for word in line))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert harmless(result.stdout)
    assert harmless(result.stderr)
    assert r"\x1b" in result.output or "--json" in line  # it is shown, escaped
    assert not result.stderr.startswith("Traceback")


def test_names_that_are_no_text_are_escaped() -> None:
    assert plain("a\udcff\x1b\n\u00e9") == r"a\udcff\x1b\n" + "\u00e9"


def test_a_log_line_is_plain() -> None:
    record = logging.LogRecord("costcache", 30, "", 1, "plugin %s", (ATTACK,), None)
    assert harmless(Formatter().format(record))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "line",
    [
        ("plugins",),
        ("plan", "--model", "qwen3-next", "--memory", "80GiB"),
        ("trace", "info", "été.jsonl"),
        ("simulate", "été.jsonl", *MODEL, "--details"),
    ],
    ids=" ".join,
)
def test_output_is_plain_in_narrow_encodings(tmp_path: Path, encoding: str, line: tuple[str, ...]) -> None:
    answer("workload", "chat", "--requests", "60", "--out", tmp_path / "été.jsonl")
    # As under a locale of that encoding.
    narrow = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict", "PYTHONUTF8": "0"}
    wide = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    shown = [
        subprocess.run([*PROGRAM, *line], cwd=tmp_path, env=env, capture_output=True, check=True)
        for env in (narrow, wide)
    ]
    text, whole = shown[0].stdout.decode(encoding), shown[1].stdout.decode()
    assert shown[0].stderr == b""
    assert "?" not in text
    assert [len(row) for row in text.splitlines() if "t" not in row] == [
        len(row) for row in whole.splitlines() if "t" not in row
    ]  # rules and bars keep their width


def test_a_pipe_a_file_and_a_small_terminal_get_the_same_text(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    import fcntl
    import struct
    import termios

    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    texts = []
    for columns in (40, 250):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        # Standard input and standard error are the terminal, as in `costcache plugins | cat`.
        texts.append(
            subprocess.run(
                [*PROGRAM, "plugins"],
                stdin=theirs,
                stderr=theirs,
                stdout=subprocess.PIPE,
                env=env,
                check=True,
            ).stdout
        )
        os.close(ours)
        os.close(theirs)
    file = tmp_path / "file"
    with file.open("wb") as stream:
        subprocess.run([*PROGRAM, "plugins"], stdin=subprocess.DEVNULL, stdout=stream, env=env, check=True)
    assert texts[0] == texts[1] == file.read_bytes()


@pytest.mark.parametrize(
    ("line", "near"),
    [
        (("simulat",), "Did you mean 'simulate'?"),
        (("modles",), "Did you mean 'models'?"),
        (("zzz",), None),
        (("workload", "multiturn", "--out", "x"), "did you mean 'multi-turn'?"),
        (("workload", "zzz", "--out", "x"), None),
        (("plan", "--memory", "1GiB", "--model", "deepseekv3"), "did you mean deepseek-v3"),
        (("plan", "--memory", "1GiB", "--model", "zzz"), None),
        (("plan", "--memory", "1GiB", "--model", "gpt-2"), None),
        (("explain", "x", *MODEL, "--policy", "hasard"), "did you mean 'hazard'?"),
        (("explain", "x", *MODEL, "--policy", "zzz"), None),
    ],
)
def test_a_suggestion_is_near_or_there_is_none(line: tuple[str, ...], near: str | None) -> None:
    result = costcache_(*line)
    assert result.exit_code in (1, 2)
    if near is None:
        assert "did you mean" not in result.stderr.lower()
        assert len(result.stderr) < 600
    else:
        assert near in result.stderr


def completed(*words: str) -> list[str]:
    complete = ShellComplete(cli, {}, "costcache", "_COSTCACHE_COMPLETE")
    found = complete.get_completions(list(words[:-1]), words[-1])
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in found]


def test_values_are_completed() -> None:
    assert completed("si") == ["simulate"]
    assert completed("simulate", "") == ["<file>"]
    assert completed("simulate", "x", "--model", "deepseek-v3.2") == ["<file>", "deepseek-v3.2"]
    assert set(completed("plan", "--model", "")) == {"<file>", *ModelSpec.presets()}
    assert completed("simulate", "x", "--policy", "lru,opt") == ["lru,optimum"]
    assert "costcache,lru" not in completed("simulate", "x", "--policy", "costcache,lru,l")
    assert {"lfu", "lru", "lru2", "lhd"} <= set(completed("explain", "x", "--policy", "l"))
    assert completed("workload", "") == sorted(WORKLOADS)
    assert completed("simulate", "x", "--known", "") == ["server", "all"]
    for line in (
        ("trace", "convert", "x", "--out"),
        ("trace", "info", "x", "--retime"),
        ("simulate", "x", "--report"),
        ("plan", "--trace"),
        ("workload", "chat", "--out"),
    ):
        assert completed(*line, "a") == ["<file>"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    script = answer("completion", shell)
    assert "_COSTCACHE_COMPLETE" in script
    assert f"{shell}_complete" in script
    assert costcache_("completion", "csh").exit_code == 2


def test_bash_completes_through_the_script(tmp_path: Path) -> None:
    program = tmp_path / "costcache"
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from costcache.cli import main; main()' \"$@\"\n"
    )
    program.chmod(0o755)
    script = (
        'eval "$(costcache completion bash)"\n'
        "COMP_WORDS=(costcache workload mul) COMP_CWORD=2\n"
        '_costcache_completion costcache; echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    if "Bash" in done.stderr:
        pytest.skip("needs bash 4.4")
    assert done.stdout == "multi-turn\n"


SWEEP = ("simulate", "t.jsonl", *MODEL, "--policy", "lru,hazard,lfu,gdsf", "--tree", "--jobs", "2")


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep of several processes, in a group of its own, as a shell starts it."""
    answer("workload", "chat", "--requests", "15000", "--out", tmp_path / "t.jsonl")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if __name__ == '__main__':\n    from costcache.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *SWEEP],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def children(process: subprocess.Popen[str]) -> list[int]:
    """Its workers: two processes, once they run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or process that ended
            pids = [int(pid) for task in tasks for pid in task.read_text().split()]
            workers = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            if len(workers) == 2:
                return workers
        time.sleep(0.02)
    raise AssertionError(process.communicate(timeout=60))


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_an_interrupt_of_several_processes_is_one_line(sweep: subprocess.Popen[str], delay: float) -> None:
    process = sweep
    workers = children(process)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert output == ""
    assert errors.strip() == "Aborted!"
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@needs_proc
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_process_that_dies_is_one_line(sweep: subprocess.Popen[str], delay: float) -> None:
    process = sweep
    workers = children(process)
    time.sleep(delay)
    os.kill(workers[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert output == ""
    assert errors == (
        "Error: jobs is 2, and one of the processes died, which is mostly for want of memory: give fewer\n"
    )


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_sweep_that_is_killed(sweep: subprocess.Popen[str], number: int) -> None:
    children(sweep)
    time.sleep(0.5)
    os.kill(sweep.pid, number)
    sweep.communicate(timeout=60)  # workers have the same streams: this fails if one goes on
    assert sweep.returncode == -number


def test_options_that_have_no_effect_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    answer("workload", "chat", "--requests", "5", "--out", trace)
    message = "seed is 3, and arrivals 'together' draw no random numbers; leave the seed out"
    assert refusal("trace", "info", trace, "--arrivals", "together", "--seed", "3") == message
    assert "records the times of requests, so think 2 cannot apply" in refusal(
        "trace", "info", trace, "--think", "2"
    )
