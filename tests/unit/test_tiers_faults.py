"""Faults of real storage under the tiers: a miss and one line in the log, no wrong byte, and no crash."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stores import BUILT_IN, need
from tests.tiers import PAGE, Server

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

A = list(range(32))
LAYOUTS = ("apart", "hybrid", "mla")


def server(storage: str, path: Path, layout: str) -> Server:
    return Server(
        layout,
        slots=40,
        host=48,
        disk=2000,
        path=path,
        storage=storage,
    )


def fill(made: Server) -> None:
    """Serve prompts until the first is in storage alone."""
    for start in (0, 100, 200, 300):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()


def payload(made: Server, token: int) -> tuple[bytes, bytes]:
    """The key of the page of ``A`` that has a token, and the bytes of the page."""
    mover = made.tiers._mover
    assert mover is not None
    assert mover.disk is not None
    (value,) = mover.disk.hashes(made.tiers._place(A, None, None), token, token + PAGE)
    key = mover.disk.page_key(value)
    found = mover.disk.store.get(key)
    assert found is not None
    return key, bytes(found)


def in_file(path: Path, key: bytes) -> Path:
    return path / "values" / key.hex()[:2] / key.hex()


def flip(storage: str, path: Path, key: bytes, value: bytes) -> None:
    target = in_file(path, key) if storage == "file" else path / "data.mdb"
    content = bytearray(target.read_bytes())
    at, bit = content.find(value), random.Random(3).randrange(len(value))
    assert at >= 0
    while at >= 0:  # LMDB leaves copies in pages that it has given up
        content[at + bit] ^= 4
        at = content.find(value, at + 1)
    target.write_bytes(content)


def cut(storage: str, path: Path, key: bytes, value: bytes) -> None:
    target = in_file(path, key) if storage == "file" else path / "data.mdb"
    os.truncate(target, target.stat().st_size - len(value) // 2)


def empty(storage: str, path: Path, key: bytes, value: bytes) -> None:
    os.truncate(in_file(path, key) if storage == "file" else path / "data.mdb", 0)


def exchange(storage: str, path: Path, key: bytes, value: bytes) -> None:
    """The value of another key."""
    target = in_file(path, key)
    others = [each for each in (path / "values").rglob("*") if each.is_file() and each != target]
    target.write_bytes(others[0].read_bytes())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("storage", "damage", "lines"),
    [
        ("file", flip, 1),
        ("file", cut, 1),
        ("file", empty, 1),
        ("file", exchange, 1),
        ("lmdb", flip, 1),
        ("lmdb", cut, 1),
        ("lmdb", empty, 0),  # as if it had never been
    ],
)
def test_damage_is_a_miss_and_one_line(
    storage: str,
    damage: Callable[[str, Path, bytes, bytes], None],
    lines: int,
    layout: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    need(storage)
    path = tmp_path / "s"
    made = server(storage, path, layout)
    fill(made)
    key, value = payload(made, 8)
    made.tiers.close()
    damage(storage, path, key, value)
    made = server(storage, path, layout)
    assert made.serve(A) < 32  # compares every byte that it resumes from
    assert [record.levelname for record in caplog.records] == ["WARNING"] * lines
    made.tiers.drain()
    assert made.serve(A) == 32, "it was computed again"
    made.tiers.close()
    again = server(storage, path, layout)
    assert again.serve(A) == 32, "and written again"
    assert len(caplog.records) == lines
    again.tiers.close()


REFUSING = """
import logging, resource, sys
from pathlib import Path
from tests.unit.test_tiers_faults import A, fill, server
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
made = server(sys.argv[1], Path(sys.argv[2]), "mla")
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
fill(made)
fill(made)
made.tiers.drain()
print("on disk", made.tiers.cached("disk"))
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
fill(made)
made.tiers.drain()
print("on disk", made.tiers.cached("disk"))
made.tiers.close()
made = server(sys.argv[1], Path(sys.argv[2]), "mla")
print("found", made.serve(A))
made.tiers.close()
"""


@pytest.mark.parametrize("storage", BUILT_IN)
def test_a_disk_that_takes_no_more_is_a_miss_and_one_line(
    storage: str, tmp_path: Path, repo_root: Path
) -> None:
    pytest.importorskip("resource")
    need(storage)
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, storage, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        cwd=repo_root,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("WARNING")]) == 1, done.stdout
    assert f"storage backend '{storage}': put failed: " in done.stdout
    assert [line for line in lines if not line.startswith("WARNING")] == [
        "on disk 0",
        "on disk 128",
        "found 32",
    ]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is denied to root")
def test_lost_permission_is_a_miss_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    made = server("file", path, "mla")
    fill(made)
    values = path / "values"
    values.chmod(0)
    try:
        assert made.serve(A) == 0
        made.tiers.drain()
        told = {record.getMessage().split(":")[1].strip() for record in caplog.records}
        assert told <= {"get failed", "put failed", "delete failed"}
        assert len(caplog.records) == len(told), "one line for each thing that it may not do"
    finally:
        values.chmod(0o755)
    assert made.serve(A) == 32
    made.tiers.close()


def test_a_folder_that_goes_away_is_a_miss_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    made = server("file", path, "mla")
    fill(made)
    (path / "values").rename(tmp_path / "elsewhere")
    (path / "values").write_bytes(b"")
    found: Any = made.serve(A)
    made.tiers.drain()
    assert found == 0
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert all("failed: NotADirectoryError" in line for line in told)
    assert len(set(told)) == len(told), "one line for each thing that fails"
    assert made.serve(A) == 32
    made.tiers.close()
