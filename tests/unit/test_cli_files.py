"""Files that commands write: checked before the work, and written whole, after the result is printed."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands import answer, costcache_, refusal

MODEL = ("--model", "llama-3-8b")
WORK = {
    "report": ("simulate", "t.jsonl", *MODEL, "--policy", "lru", "--capacity", "20%", "--report", "out.html"),
    "plot": ("simulate", "t.jsonl", *MODEL, "--policy", "lru", "--capacity", "20%", "--plot", "out.svg"),
    "tables": ("explain", "t.jsonl", *MODEL, "--save-tables", "out.json"),
    "explained": ("explain", "t.jsonl", *MODEL, "--plot", "out.png"),
    "converted": ("trace", "convert", "t.jsonl", "--out", "out.jsonl"),
    "generated": ("workload", "chat", "--requests", "20", "--out", "out.jsonl"),
}
AFTER = ("report", "plot", "tables", "explained")
EVERY = pytest.mark.parametrize("name", WORK)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a trace."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    answer("workload", "chat", "--requests", "150", "--out", "t.jsonl")
    return tmp_path


def elsewhere(line: tuple[str, ...], place: str) -> tuple[str, ...]:
    """The command with its output in another place."""
    return tuple(str(Path(place, word)) if word.startswith("out.") else word for word in line)


def failing(name: str, error: OSError) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    fail.__name__ = name
    return fail


@EVERY
def test_a_place_that_takes_no_file_is_found_before_the_work(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = "costcache.sim.traces.reading.read_trace", "costcache.sim.workloads.generate"
    for work in working:
        monkeypatch.setattr(work, failing("work", OSError("the work began")))
    assert "missing" in refusal(*elsewhere(WORK[name], "missing"))
    (folder / "in.the.way").mkdir()
    line = tuple("in.the.way" if word.startswith("out.") else word for word in WORK[name])
    assert any(text in refusal(*line) for text in ("folder", "end the name with"))
    # A folder without leave to write; the tests may run as root, whom no mode stops.
    opened = Path.open

    def refused(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "x" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", refused)
    assert "cannot be written (Permission denied)" in refusal(*WORK[name])
    assert sorted(path.name for path in folder.iterdir()) == ["in.the.way", "t.jsonl"]


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("json_too", [False, True])
def test_a_full_disk_leaves_the_result_on_the_screen(
    name: str, folder: Path, json_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (*WORK[name], *(["--json"] if json_too else []))
    place = folder / next(word for word in line if word.startswith("out."))
    place.write_text("old")
    whole = answer(*line)
    assert place.read_bytes() != b"old"
    place.write_text("old")
    opened = Path.open

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def close(self) -> None:
            self.stream.close()

        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", *rest, **more: (
            Full(opened(path, mode)) if "x" in mode else opened(path, mode, *rest, **more)
        ),
    )
    result = costcache_(*line)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f"{place.name} is not written: No space left on device\n")
    if json_too:
        assert json.loads(result.stdout) == json.loads(whole)
    else:
        shown = whole.splitlines()[:-1]
        assert without_times(result.stdout.splitlines()) == without_times(shown)
    assert place.read_text() == "old"
    assert sorted(path.name for path in folder.iterdir()) == sorted([place.name, "t.jsonl"])


def without_times(lines: list[str]) -> list[str]:
    """Lines without the rate of requests, the last column."""
    return [line.rpartition(" ")[0].rstrip() for line in lines if line.strip(" ─")]


def test_a_file_that_fails_does_not_hold_up_the_other(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("costcache.report.write_report", failing("write_report", OSError(28, "full")))
    result = costcache_(*WORK["report"], "--plot", "out.svg")
    assert result.exit_code == 1
    assert result.stderr == "Error: report out.html is not written: full\n"
    assert result.stdout.endswith("plot: out.svg\n")
    assert (folder / "out.svg").stat().st_size > 0


@pytest.mark.parametrize("name", ["converted", "generated"])
@pytest.mark.parametrize(
    ("suffix", "unpack"),
    [("", bytes), (".gz", gzip.decompress), (".XZ", lzma.decompress), (".GZ", gzip.decompress)],
)
def test_a_trace_is_compressed_by_the_name_that_is_given(
    name: str, folder: Path, suffix: str, unpack: Callable[[bytes], bytes]
) -> None:
    # Where the name is a link, by the link's name.
    Path("out.jsonl" + suffix).symlink_to("target")
    line = tuple(word + suffix if word.startswith("out.") else word for word in WORK[name])
    answer(*line)
    assert json.loads(unpack((folder / "target").read_bytes()).splitlines()[0])["block_size"] == 16
    assert (folder / ("out.jsonl" + suffix)).is_symlink()


@pytest.mark.parametrize("suffix", [".zst", ".bz2", ".zip", ".ZST"])
def test_a_compression_that_is_not_written_is_refused(suffix: str) -> None:
    message = (
        f"out.jsonl{suffix}: {suffix.lower()} is not written here; name it .gz, .xz, or without compression"
    )
    for name in ("converted", "generated"):
        line = tuple(word + suffix if word.startswith("out.") else word for word in WORK[name])
        assert refusal(*line) == message


@pytest.mark.parametrize(
    ("start", "name"), [(b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh9", "bzip2"), (b"PK\x03\x04", "zip")]
)
def test_a_compression_that_is_not_read_names_the_program_that_unpacks_it(
    folder: Path, start: bytes, name: str
) -> None:
    (folder / "packed").write_bytes(start + b"...")
    assert f"packed: {name} is not read here; unpack it" in refusal("trace", "info", "packed")


def test_the_longest_name_that_a_file_can_have_is_written(folder: Path) -> None:
    name = "x" * 249 + ".jsonl"
    answer("trace", "convert", "t.jsonl", "--out", name)
    assert (folder / name).is_file()
