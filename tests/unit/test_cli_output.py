"""Output of the program: on terminals of any width, in logs, into closed pipes and full disks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from costcache.model import ModelSpec
from costcache.sim.traces import write_trace
from costcache.sim.workloads import generate, workload_settings

pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
import fcntl  # noqa: E402 # as pty
import termios  # noqa: E402 # as pty

PROGRAM = (sys.executable, "-m", "costcache")
MODEL = ("--model", "deepseek-v3")
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment() -> dict[str, str]:
    """Clear the variables from which rich takes a width or colours."""
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    return {name: value for name, value in os.environ.items() if name not in unset} | {"TERM": "xterm"}


def on_terminal(columns: int, *arguments: str | Path, piped: bool = False) -> tuple[str, str]:
    """Return the text that a terminal shows, and standard output where that is a pipe."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        stdin=theirs,
        stdout=subprocess.PIPE if piped else theirs,
        stderr=theirs,
        env=environment(),
    )
    os.close(theirs)
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    output, _ = process.communicate(timeout=60)
    reader.join(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    return b"".join(chunks).decode().replace("\r\n", "\n"), (output or b"").decode()


def words(text: str) -> list[list[str]]:
    return [line.split() for line in STYLES.sub("", text).splitlines()]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "[red]chat.jsonl"
    write_trace(generate("chat", workload_settings("chat", {"requests": 1500})), path)
    return path


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_tables_are_whole_at_any_width(chat: Path, columns: int) -> None:
    simulate = ("simulate", chat, *MODEL, "--policy", "costcache,lru", "--capacity", "14054pages,unlimited")
    found = json.loads(subprocess.check_output([*PROGRAM, *map(str, simulate), "--json"]))
    screen, _ = on_terminal(columns, *simulate)
    shown = screen.rpartition("\x1b[?25h")[2]  # after the progress display, which may shorten a path
    assert "…" not in shown
    rows = words(shown)
    for run in found["runs"]:
        pool = "unlimited" if run["capacity_tokens"] is None else f"{run['capacity_tokens']:,}"
        rates = [f"{run['token_hit_rate']:.2%}", f"{run['flops_saved_rate']:.2%}"]
        mine = [row for row in rows if row[:5] == [run["capacity"], pool, run["policy"], *rates]]
        assert [row[-2] for row in mine] == [f"{run['evicted_tokens']:,}"]
    assert any(row[0] == "[red]chat:" for row in rows if row)

    models = json.loads(subprocess.check_output([*PROGRAM, "models", "--json"]))["models"]
    shown, _ = on_terminal(columns, "models")
    assert "…" not in shown
    for row in models:
        expected = [row["name"], row["plugin"], str(row["layers"]), f"{row['active_params'] / 1e9:.1f}B"]
        state = f"{row['state_bytes']:,}" if row["state_bytes"] else "-"
        expected += [f"{row['kv_bytes_per_token']:,}", state]
        assert expected in [line[:6] for line in words(shown)]
    if columns >= 80:
        assert max(len(line) for line in STYLES.sub("", shown).splitlines() if "deepseek" in line) <= columns

    shown, _ = on_terminal(columns, "plugins")
    assert "…" not in shown
    # Names are never broken; where the columns are wide enough for them, sentences are.
    for name in ("costcache_mamba_seglen.plugin", "adjust_eviction_count,", "next_prompt_estimate"):
        assert any(name in line for line in words(shown)), name


def test_the_largest_numbers_of_a_real_replay_fit_80_columns() -> None:
    from io import StringIO

    from rich.console import Console

    from costcache.cli.output import new_table, show

    table = new_table(">capacity", ">pool\ntokens", "policy", ">tokens\nhit", ">evicted\ntokens", "~text")
    row = ("14054pages", "7,195,648", "costcache", "100.00%", "96,916,992")
    table.add_row(*row, "a sentence that may go on in the next line")
    out = Console(width=80, file=StringIO())
    show(out, table)
    assert out.width == 80
    text = out.file.getvalue()  # type: ignore[attr-defined] # the StringIO above
    assert list(row) in [line[:5] for line in words(text)]
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_terminal_lines_have_100_columns() -> None:
    shown = subprocess.check_output([*PROGRAM, "plugins"], env=environment(), text=True)
    longest = max(len(line.rstrip()) for line in shown.splitlines())
    assert 80 < longest <= 100
    assert "\x1b" not in shown
    # A wider COLUMNS is used, a narrower one is not.
    narrow = {**environment(), "COLUMNS": "60"}
    assert subprocess.check_output([*PROGRAM, "plugins"], env=narrow, text=True) == shown
    wide = {**environment(), "COLUMNS": "160"}
    assert len(subprocess.check_output([*PROGRAM, "plugins"], env=wide, text=True).splitlines()) < len(
        shown.splitlines()
    )


def test_progress_is_shown_on_a_terminal_and_stays_out_of_the_output(chat: Path) -> None:
    line = ("simulate", chat, *MODEL, "--policy", "lru,lfu", "--capacity", "5%,20%", "--json")
    screen, output = on_terminal(80, *line, piped=True)
    assert len(json.loads(output)["runs"]) == 4
    assert "\x1b" not in output
    shown = STYLES.sub("", screen)
    for task in ("lru at 5%", "lfu at 5%", "lru at 20%", "lfu at 20%"):
        assert task in shown
    assert screen.rstrip().endswith("\x1b[?25h")  # the cursor is back
    plain = subprocess.run([*PROGRAM, *map(str, line)], capture_output=True, text=True, check=True)
    assert plain.stderr == ""


@pytest.mark.parametrize(
    "line",
    [
        ("models",),
        ("models", "--json"),
        ("plugins",),
        ("plan", *MODEL, "--memory", "80GiB"),
        ("--help",),
        ("workload", "chat", "--out", "-", "--requests", "300"),
    ],
)
def test_a_closed_pipe_ends_quietly(line: tuple[str, ...]) -> None:
    read, write = os.pipe()
    process = subprocess.Popen([*PROGRAM, *line], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.close(read)
    _, errors = process.communicate(timeout=60)
    assert errors == ""
    assert process.returncode != 0


def test_a_reader_that_has_enough_ends_a_long_output(tmp_path: Path) -> None:
    # More than fits a pipe, so that writing is under way when the reader closes it.
    done = subprocess.run(
        f"{sys.executable} -m costcache workload chat --out - --requests 3000 | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["block_size"] == 16
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("line", [("models",), ("models", "--json"), ("workload", "chat", "--out", "-")])
def test_a_full_disk_is_one_clear_line(line: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*PROGRAM, *line], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        ("--help",),
        ("simulate", "--help"),
        ("explain", "--help"),
        ("trace", "info", "--help"),
        ("plan", *MODEL, "--memory", "80GiB"),
    ],
)
def test_the_program_starts_without_numpy_or_torch(line: tuple[str, ...]) -> None:
    code = (
        "import sys; from costcache.cli import cli\n"
        "try: cli(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(','.join(sorted({'numpy', 'torch', 'sglang'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_names_of_presets_are_short_enough_for_the_table() -> None:
    assert max(map(len, ModelSpec.presets())) <= 16  # with more the table no longer fits 80 columns


def test_an_interrupt_ends_without_a_traceback(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # A shell starts what runs in the background with interrupts ignored, and its children inherit that.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from costcache.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "simulate", str(fifo), *MODEL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    writer = None
    while writer is None and process.poll() is None:
        with contextlib.suppress(OSError):  # until the program has begun to read
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.05)
    assert writer is not None, process.communicate()
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "Aborted" in errors
