"""Storage backends: what they keep, what they refuse, and what a seal finds."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from costcache.errors import PluginError, SettingsError
from costcache.storage import (
    FileStore,
    FileStoreSettings,
    LmdbStore,
    SealedStore,
    StorageBackend,
    StorageSpec,
)
from costcache.testing import StorageContract
from costcache.testing.fixes import fix_of
from costcache.testing.trial import try_storage
from tests.property.kit import Plugin, manager
from tests.stores import BUILT_IN, FAST, need, opened

KEY, OTHER = b"k" * 20, b"o" * 20


both = pytest.mark.parametrize("name", BUILT_IN)


@both
def test_what_was_put_is_there_after_opening_it_again(name: str, tmp_path: Path) -> None:
    store = opened(name, tmp_path / "s")
    chance, values = random.Random(3), {}
    for number in range(60):
        key, value = chance.randbytes(20), chance.randbytes(chance.randrange(3000))
        assert store.put(key, value) is True
        values[key] = value
        if number % 5 == 0:
            gone = chance.choice(sorted(values))
            store.delete(gone)
            del values[gone]
    store.close()
    store = opened(name, tmp_path / "s")
    assert dict(store.keys()) == {key: len(value) for key, value in values.items()}
    assert {key: bytes(store.get(key)) for key in values} == values
    assert store.get(b"never put") is None
    store.close()


@both
def test_it_never_keeps_more_than_its_capacity(name: str, tmp_path: Path) -> None:
    store: Any = opened(name, tmp_path / "s", 100_000)
    chance = random.Random(5)
    for number in range(200):
        store.get(number.to_bytes(4) if number % 3 else (number // 2).to_bytes(4))
        assert store.put(number.to_bytes(4), chance.randbytes(chance.randrange(1, 9000)))
        assert store.used <= 100_000
        assert store.used == sum(size for _, size in list(store.keys()))
    assert store.used > 50_000, "it evicts no more than it has to"
    assert store.put(b"huge", bytes(100_001)) is False
    assert store.get((199).to_bytes(4)) is not None, "the last value stays"
    store.close()


@both
def test_what_was_used_last_is_evicted_last(name: str, tmp_path: Path) -> None:
    store = opened(name, tmp_path / "s", 100_000)
    for number in range(9):
        store.put(bytes([number]), bytes(10_000))
    assert store.get(bytes([0])) is not None
    for number in range(9, 14):
        store.put(bytes([number]), bytes(10_000))
    kept = {key[0] for key, _ in list(store.keys())}
    assert 0 in kept
    assert 1 not in kept
    store.close()


@both
def test_a_folder_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(SettingsError, match=r"disk tier .* give an empty folder, or a new one"):
        opened(name, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


@both
def test_a_path_that_is_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"disk tier '.*file' cannot be .*: give a folder"):
        opened(name, tmp_path / "file")


def test_a_newer_format_of_the_file_store_is_refused(tmp_path: Path) -> None:
    opened("file", tmp_path).close()
    (tmp_path / "FORMAT").write_text(json.dumps({"format": "costcache file store", "version": 2}))
    with pytest.raises(SettingsError, match=r"has format version 2, and this costcache reads 1: empty the"):
        opened("file", tmp_path)
    (tmp_path / "FORMAT").write_text("something")
    with pytest.raises(SettingsError, match=r"is no file store"):
        opened("file", tmp_path)


def test_a_newer_format_of_the_lmdb_store_is_refused(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    for value, why in ((b"costcache lmdb store 9", "has the format"), (None, "of another program")):
        path = tmp_path / why.split()[0]
        env = lmdb.open(str(path))
        with env.begin(write=True) as transaction:
            transaction.put(b"x", b"y")
            if value is not None:
                transaction.put(b"costcache:format", value)
        env.close()
        with pytest.raises(SettingsError, match=why):
            opened("lmdb", path)


def test_two_processes_do_not_share_a_file_store(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = opened("file", tmp_path)
    with pytest.raises(SettingsError, match=r"in use by another process: give each process, and each rank"):
        opened("file", tmp_path)
    first.close()
    opened("file", tmp_path).close()


def test_what_is_left_of_a_cut_off_write_is_removed(tmp_path: Path) -> None:
    store = opened("file", tmp_path)
    store.put(KEY, b"whole")
    store.close()
    (tmp_path / "partial" / "7").write_bytes(b"half")
    (tmp_path / "values" / "no hex").write_bytes(b"of somebody else")
    (tmp_path / "values" / KEY.hex()[:2] / "no hex").write_bytes(b"of somebody else")
    store = opened("file", tmp_path)
    assert list(store.keys()) == [(KEY, 5)]
    assert not list((tmp_path / "partial").iterdir())
    store.close()


def test_a_failed_write_leaves_the_old_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, 1 << 20)
    store.put(KEY, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.put(KEY, b"new")
    assert store.get(KEY) == b"old"
    assert not list((tmp_path / "partial").iterdir()), "no part of the new one stays"
    assert store.used == 3
    store.close()


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    store: Any = opened("file", tmp_path)
    store.put(KEY, b"value")
    store._file(KEY).unlink()
    assert store.get(KEY) is None
    assert store.used == 0
    store.delete(KEY)
    store.close()


def test_lmdb_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(SettingsError, match=r"needs the package lmdb: pip install 'costcache\[tiers\]'"):
        LmdbStore(tmp_path, 1 << 20)


# -- kills ---------------------------------------------------------------------------------------

WRITER = """
import random, sys
from pathlib import Path
from costcache.plugins import PluginManager
store = PluginManager().open_storage(sys.argv[1], Path(sys.argv[2]), 1 << 27, {"durable": False})
chance = random.Random(int(sys.argv[3]))
print("ready", flush=True)
while True:
    key = chance.randbytes(20)
    value = random.Random(key).randbytes(chance.randrange(1, 60_000))
    if store.put(key, [value[:100], value[100:]]):
        print(key.hex(), flush=True)
"""
ROUNDS = 4


@both
def test_what_was_acknowledged_survives_a_kill_at_any_moment(name: str, tmp_path: Path) -> None:
    need(name)
    chance, acknowledged = random.Random(17), []
    for turn in range(ROUNDS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, name, str(tmp_path / "s"), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for _ in range(chance.randrange(1, 25)):
            acknowledged += [bytes.fromhex(writer.stdout.readline())]
        # Killed while it writes the next one; what it still acknowledges before that counts too.
        writer.send_signal(signal.SIGKILL)
        acknowledged += [bytes.fromhex(line) for line in writer.stdout if len(line) == 41]
        writer.stdout.close()
        assert writer.wait(timeout=120) == -signal.SIGKILL
        store = manager().open_storage(name, tmp_path / "s", 1 << 27, FAST)
        kept = {key for key, _ in list(store.keys())}
        for key in kept:
            payload = store.get(key)
            assert payload is not None, "what is there is whole"
            value = bytes(payload)
            assert value == random.Random(key).randbytes(len(value))
        assert kept.issuperset(acknowledged), "an acknowledged value was lost"
        store.close()


# -- the seal ------------------------------------------------------------------------------------


class Answers(StorageBackend):
    """A backend whose answers a test chooses: values to return, or errors to raise."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def _answer(self, what: str) -> Any:
        self.calls.append(what)
        answer = self.answers.get(what)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def get(self, key: bytes) -> Any:
        return self._answer("get")

    def put(self, key: bytes, value: bytes) -> bool:
        self.value = value
        answer: bool = self._answer("put")
        return answer

    def delete(self, key: bytes) -> None:
        self._answer("delete")

    def keys(self) -> Iterator[tuple[bytes, int]]:
        answer: Iterator[tuple[bytes, int]] = self._answer("keys")
        return answer

    def close(self) -> None:
        self._answer("close")


def sealed(payload: bytes = b"payload", key: bytes = KEY) -> bytes:
    backend = Answers(put=True)
    assert SealedStore("x", backend).put(key, [payload[:3], memoryview(payload)[3:]])
    return backend.value


def test_a_payload_comes_back_in_any_kind_of_buffer() -> None:
    for kind in (bytes, bytearray, memoryview):
        found = SealedStore("x", Answers(get=kind(sealed()))).get(KEY)
        assert found is not None
        assert bytes(found) == b"payload"
    empty = SealedStore("x", Answers(get=sealed(b""))).get(KEY)
    assert empty is not None
    assert not len(empty)


def test_every_flipped_bit_and_every_cut_is_found(caplog: pytest.LogCaptureFixture) -> None:
    whole = sealed()
    wrong = [whole[:size] for size in range(len(whole))]
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        wrong.append(bytes(flipped))
    wrong += [whole + b"x", sealed(key=OTHER)]
    for value in wrong:
        caplog.clear()
        backend = Answers(get=value)
        store = SealedStore("x", backend)
        assert store.get(KEY) is None
        assert backend.calls == ["get", "delete"], "it is deleted"
        assert len(caplog.records) == 1
        assert "storage backend 'x' returned a damaged value" in caplog.text
        assert (store.damaged, store.bypassed) == (1, False)


def test_an_os_error_is_a_miss_that_is_logged_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    backend = Answers(get=PermissionError(errno.EACCES, "denied"), put=OSError(errno.ENOSPC, "full"))
    store = SealedStore("mine", backend)
    for _ in range(3):
        assert store.get(KEY) is None
        assert store.put(KEY, [b"x"]) is False
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "storage backend 'mine': get failed: PermissionError" in caplog.text
    assert store.failed == 6
    assert not store.bypassed
    backend.answers = {"put": True, "get": sealed()}
    assert store.put(KEY, [b"x"]) is True
    assert store.get(KEY) is not None
    backend.answers = {"put": OSError(errno.ENOSPC, "full")}
    assert store.put(KEY, [b"x"]) is False
    assert len(caplog.records) == 3, "it began again"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"get": "text"}, "get returned 'text', not bytes or None"),
        ({"get": 7}, "get returned 7, not bytes or None"),
        ({"get": KeyError("k")}, "get raised KeyError"),
        ({"get": SystemExit(3)}, "get raised SystemExit"),
        ({"put": None}, "put returned None, not True or False"),
        ({"put": ValueError("v")}, "put raised ValueError"),
        ({"keys": [("text", 3)]}, "keys gave ('text', 3), not a key and its bytes"),
        ({"keys": [(KEY, "3")]}, "not a key and its bytes"),
        ({"keys": [KEY]}, "not a key and its bytes"),
        ({"keys": 3}, "keys raised TypeError"),
    ],
)
def test_a_bad_answer_is_reported_by_name_and_the_backend_bypassed(
    answers: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Answers(**{"get": None, "put": True, "keys": [], **answers})
    store = SealedStore("mine", backend)
    store.keys()
    store.get(KEY)
    store.put(KEY, [b"x"])
    assert store.bypassed
    assert "storage backend 'mine' is bypassed from now on: " in caplog.text
    assert why in caplog.text
    assert len(caplog.records) == 1
    calls = len(backend.calls)
    assert (store.keys(), store.get(KEY), store.put(KEY, [b"x"])) == ([], None, False)
    assert len(backend.calls) == calls, "it is asked no more"
    store.close()
    assert backend.calls[-1] == "close"


def test_the_users_interrupt_is_not_the_backends_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        SealedStore("x", Answers(get=KeyboardInterrupt())).get(KEY)


# -- the hook ------------------------------------------------------------------------------------


def offering(**offer: Any) -> Any:
    return manager(own=Plugin(storage_backend=lambda: offer))


def test_a_plugin_offers_a_backend(tmp_path: Path) -> None:
    told: list[Any] = []

    def make(path: Path, capacity: int, settings: Any) -> StorageBackend:
        told.append((path, capacity, settings.durable))
        return Answers(put=True)

    made = offering(mine=StorageSpec(make, "Mine.", FileStoreSettings))
    assert list(made.storage_backends()) == ["file", "lmdb", "mine"]
    store = made.open_storage("mine", tmp_path, 99, {"durable": False})
    assert (store.name, told) == ("mine", [(tmp_path, 99, False)])


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        ({"mine": 3}, "'mine': 3 is not a StorageSpec"),
        ({"my name": StorageSpec(lambda *a: Answers(), "")}, "is no name"),
        ({"mine": StorageSpec(lambda *a: Answers(), "two\nlines")}, "not one line of text"),
        ({"mine": StorageSpec(3, "")}, "open is 3, not a function"),  # type: ignore[arg-type] # the fault
        ({"mine": StorageSpec(lambda *a: Answers(), "", dict)}, "not a pydantic model"),  # type: ignore[arg-type] # as above
    ],
)
def test_a_bad_offer_is_refused(offer: dict[str, Any], why: str) -> None:
    with pytest.raises(PluginError, match="storage_backend failed") as caught:
        offering(**offer)
    assert why in str(caught.value)


def test_an_offer_that_is_no_dict_is_refused() -> None:
    def answer() -> Any:
        return ["file"]

    with pytest.raises(PluginError, match=r"storage_backend returned \['file'\], not a dict"):
        manager(own=Plugin(storage_backend=answer))


def test_a_name_that_is_taken_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    made = offering(file=StorageSpec(lambda *a: Answers(), ""))
    assert [failure.reason for failure in made.failures] == ["storage backend 'file' is taken by 'storage'"]
    assert "skipped" in caplog.text


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    def broken(*_: Any) -> StorageBackend:
        raise ValueError("no luck")

    made = offering(broken=StorageSpec(broken, ""), other=StorageSpec(lambda *a: 3, ""))  # type: ignore[arg-type] # the fault
    with pytest.raises(PluginError, match=r"'broken' of plugin 'own' cannot be opened: ValueError: no luck"):
        made.open_storage("broken", tmp_path, 1)
    with pytest.raises(PluginError, match="open returned 3, not a StorageBackend"):
        made.open_storage("other", tmp_path, 1)
    with pytest.raises(
        PluginError, match=r"no storage backend 'fil': did you mean 'file'\? The backends are"
    ):
        made.open_storage("fil", tmp_path, 1)
    with pytest.raises(SettingsError, match=r"unknown setting 'storage_settings\.sync'"):
        made.open_storage("file", tmp_path, 1, {"sync": True})


# -- the contract --------------------------------------------------------------------------------


class TestFile(StorageContract):
    backend = "file"
    settings = FAST


class TestLmdb(StorageContract):
    backend = "lmdb"
    settings = FAST

    @pytest.fixture(autouse=True)
    def _needs_lmdb(self) -> None:
        need("lmdb")


class InMemory(StorageBackend):
    """Keeps values, but for the fault that a test chooses."""

    kept: ClassVar[dict[Path, dict[bytes, bytes]]] = {}

    def __init__(self, path: Path, capacity: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.values, self.capacity = self.kept.setdefault(path, {}), capacity
        self.thread = threading.get_ident()

    def get(self, key: bytes) -> Any:
        return self.values.get(key)

    def put(self, key: bytes, value: bytes) -> Any:
        self.values.pop(key, None)
        if len(value) > self.capacity:
            return False
        self.values[key] = value
        while sum(map(len, self.values.values())) > self.capacity:
            del self.values[next(iter(self.values))]
        return True

    def delete(self, key: bytes) -> None:
        self.values.pop(key, None)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        yield from ((key, len(value)) for key, value in self.values.items())

    def close(self) -> None:
        pass


class Forgets(InMemory):
    def close(self) -> None:
        self.values.clear()


class Unbounded(InMemory):
    def put(self, key: bytes, value: bytes) -> Any:
        self.values[key] = value
        return True


class Evicts(InMemory):
    def put(self, key: bytes, value: bytes) -> Any:
        done = super().put(key, value)
        if sum(map(len, self.values.values())) > self.capacity // 8:
            self.values.clear()
        return done


class Keeps(InMemory):
    def delete(self, key: bytes) -> None:
        pass


class OfOneThread(InMemory):
    def get(self, key: bytes) -> Any:
        if threading.get_ident() != self.thread:
            raise RuntimeError("made in another thread")
        return super().get(key)


class Shortens(InMemory):
    def keys(self) -> Iterator[tuple[bytes, int]]:
        yield from ((key, 1) for key in self.values)


class Refuses(InMemory):
    def put(self, key: bytes, value: bytes) -> Any:
        return False


class Talks(InMemory):
    def put(self, key: bytes, value: bytes) -> Any:
        return super().put(key, value) and "done"


class Lies(InMemory):
    """Answers another value of the same length."""

    def get(self, key: bytes) -> Any:
        value = super().get(key)
        return value and value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize(
    ("made", "test", "why", "fix"),
    [
        (Forgets, "it_keeps_and_lists_all", "keys lists 0 values", "outlives the process"),
        (InMemory, "what_is_acknowledged", "a value that was put is missed", "outlives the process"),
        (Unbounded, "it_never_keeps_more", "and the capacity is", "let put evict"),
        (Evicts, "it_never_keeps_more", "a value that was just put is missed", "names"),
        (Keeps, "a_key_has_its_latest", "was deleted is still there", "names"),
        (OfOneThread, "it_may_be_called", "in another thread", "any thread"),
        (Shortens, "it_keeps_and_lists_all", "keys lists 23 values of 23 bytes", "under its size"),
        (Refuses, "it_gives_back", "put answered False", "names"),
        (Talks, "it_gives_back", "put returned 'done'", "put a bool"),
        (Lies, "it_gives_back", "a value that was put is missed", "outlives the process"),
    ],
)
def test_a_backend_with_one_fault_fails_the_test_of_that_fault(
    made: type[InMemory], test: str, why: str, fix: str
) -> None:
    plugins = offering(mine=StorageSpec(lambda path, capacity, _: made(path, capacity), "Mine."))
    problems, results = try_storage(plugins, "mine", math.inf, lambda _: None)
    contract = type(
        "Tested", (StorageContract,), {"backend": "mine", "plugins": classmethod(lambda _: plugins)}
    )()
    (name,) = [each for each in dir(contract) if each.startswith(f"test_{test}")]
    with pytest.raises(AssertionError, match=re.escape(why)) as caught:
        getattr(contract, name)()
    assert fix in fix_of(f"storage backend: {' '.join(str(caught.value).split())}")
    assert "failed" in results.values()
    assert problems
