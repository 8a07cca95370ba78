"""Recordings: what is in the files, and what is not, whatever happens to the disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.deployment import Deployment
from costcache.errors import SettingsError, TraceError
from costcache.model import ModelSpec
from costcache.recording.files import Files
from costcache.recording.hashes import Content, Hashed, Hasher, Tokens
from costcache.recording.recorder import Ended, Recorder
from costcache.recording.settings import (
    ENVIRONMENT,
    SALT,
    RecordSettings,
    ServerSettings,
    read_salt,
    recording_asked,
)
from costcache.records import RequestInfo
from costcache.settings import Settings, read_settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings
from costcache.sim.traces import load_trace
from costcache.sim.traces.files import open_source
from costcache.sim.traces.recording import read_recorded

SECRET = "Alice's secret prompt"
SALTED = "a salt of enough characters"


def raw(tokens: list[int]) -> bytes:
    return array("q", tokens).tobytes()


def ended(prompt: list[int], output: list[int], at: float = 0.0, **more: Any) -> Ended:
    cached = more.pop("cached", None)
    info = RequestInfo(output_tokens=len(output), finish_reason="stop", **more)
    return Ended(Tokens(b"", raw(prompt), raw(output)), len(prompt), cached, 1000.0 + at, 1001.0 + at, info)


def record(folder: Path, requests: list[Ended], page_size: int = 4, **settings: Any) -> Path:
    """Record requests; returns the first file."""
    recorder = Recorder(
        RecordSettings(folder=str(folder), **settings), page_size, server="test 1", capacity=64
    )
    for request in requests:
        recorder.add(request)
    recorder.close()
    return min(folder.iterdir())


def test_a_recording_is_a_trace_of_the_same_prefixes(tmp_path: Path) -> None:
    first = list(range(100, 140))
    path = record(
        tmp_path,
        [
            ended(first, [1, 2, 3], cached=0, session="s"),
            ended([*first, 1, 2, 3, 4], [5], 1.0, cached=40, session="s", tenant="t"),
            ended([9, *first], [], 0.5, cached=0, returns_after="tool", keep_seconds=3.0),
        ],
        block_size=4,
    )
    trace = load_trace(path)
    assert trace.input_tokens.tolist() == [40, 41, 44]
    assert trace.output_tokens.tolist() == [3, 0, 1]
    assert trace.timestamps.tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert trace.ids[:10].tolist() == trace.ids[21:31].tolist()
    assert not set(trace.ids[:10]) & set(trace.ids[10:21])
    assert trace.output_ids is not None
    # The block that the first output begins is the one that the longer prompt ends with, once it is full.
    assert trace.sessions is not None
    assert trace.sessions.tolist()[0] == trace.sessions.tolist()[2]
    assert trace.names_sessions
    assert trace.tenants is not None
    assert trace.tenants.tolist() == [-1, -1, 0]
    assert trace.service_seconds is not None
    assert trace.service_seconds.tolist() == pytest.approx([1.0] * 3)
    with open_source(path) as source:
        recorded = read_recorded(source)
    assert recorded.cached.tolist() == [0, 0, 40]
    assert recorded.headers[0].server == "test 1"


def test_generated_tokens_are_found_in_the_next_prompt(tmp_path: Path) -> None:
    prompt, output = list(range(10)), list(range(50, 60))
    path = record(
        tmp_path, [ended(prompt, output), ended([*prompt, *output, *range(70, 75)], [], 2.0)], block_size=4
    )
    simulator = Simulator(load_trace(path), ModelSpec.preset("llama-3-8b"), Deployment(page_size=4))
    run = simulator.run(Settings(policy="lru"), 64, serving=ServingSettings(concurrency=1))
    # 10 + 10 tokens, of which the last one is never computed: four whole pages of four.
    assert run.hit_tokens == 16


def test_no_token_and_no_name_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hashes under a random salt, and the time, contain the digits of a token now and then.
    monkeypatch.setenv(SALT, SALTED)
    monkeypatch.setattr("costcache.recording.recorder.EPOCH", 0.0)
    monkeypatch.setattr("costcache.recording.recorder.time", SimpleNamespace(perf_counter=lambda: 1000.0))
    prompt = [ord(letter) + 70_000 for letter in SECRET]
    path = record(
        tmp_path, [ended(prompt, [80_123], session="Alice", tenant="ACME", returns_after="dig")], block_size=4
    )
    text = path.read_text()
    for secret in ("Alice", "ACME", "dig", *map(str, prompt), "80123"):
        assert secret not in text
    assert path.stat().st_mode & 0o077 == 0, "others may read it"


def test_a_random_salt_makes_two_recordings_incomparable_and_a_given_one_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(name: str) -> list[int]:
        path = record(tmp_path / name, [ended(list(range(64)), [])])
        found: list[int] = load_trace(path).ids.tolist()
        return found

    assert not set(ids("a")) & set(ids("b"))
    monkeypatch.setenv(SALT, SALTED)
    assert ids("c") == ids("d")
    monkeypatch.setenv(SALT, "short")
    with pytest.raises(SettingsError, match=f"{SALT} has 5 characters: give 16 or more"):
        read_salt()


TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, TOKENS, TOKENS, TOKENS, st.sampled_from([1, 4, 16]))
def test_blocks_are_equal_exactly_if_all_tokens_up_to_their_end_are(
    one: list[int], one_output: list[int], two: list[int], two_output: list[int], size: int
) -> None:
    """Against the prefixes themselves."""
    hasher = Hasher(b"salt")
    known: dict[int, tuple[int, ...]] = {}
    for prompt, output in ((one, one_output), (two, two_output)):
        ids, output_ids = Tokens(b"", raw(prompt), raw(output)).numbers(hasher, size)
        assert output_ids is not None
        both = [*prompt, *output]
        whole = len(prompt) // size
        assert len(ids) == -(-len(prompt) // size)
        assert len(output_ids) == -(-len(both) // size) - whole
        for number, at in zip(ids, range(size, len(prompt) + size, size), strict=True):
            assert known.setdefault(number, tuple(prompt[:at])) == tuple(prompt[:at])
        for number, at in zip(output_ids, range((whole + 1) * size, len(both) + size, size), strict=True):
            assert known.setdefault(number, tuple(both[:at])) == tuple(both[:at])
    assert len(set(known.values())) == len(known), "one prefix has two numbers"


@given(TOKENS, TOKENS, st.sampled_from([4, 8, 16]))
def test_hashes_of_a_server_give_blocks_of_the_same_shape(
    prompt: list[int], output: list[int], size: int
) -> None:
    both = [*prompt, *output]
    hashes = [repr(both[: at + 4]).encode() for at in range(0, len(both) - 3, 4)]
    hasher = Hasher(b"salt")
    ids, output_ids = Hashed(hashes, len(prompt), len(output), 4, b"r1").numbers(hasher, size)
    assert len(ids) == -(-len(prompt) // size)
    assert len(output_ids) == -(-len(both) // size) - len(prompt) // size
    other, _ = Hashed(hashes, len(prompt), len(output), 4, b"r2").numbers(hasher, size)
    whole = len(prompt) // size
    assert ids[:whole] == other[:whole]
    assert not set(ids[whole:]) & set(other[whole:])


def test_what_is_remembered_changes_no_number_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costcache.recording.hashes._MOST_STRIDES", 5)
    rng, remembers = random.Random(2), Hasher(b"salt")
    prompts = [[rng.randrange(9) for _ in range(1500)] for _ in range(2)]
    for _ in range(30):
        prompt = rng.choice(prompts)
        prompt = prompt[: rng.randrange(len(prompt) + 1)] + [
            rng.randrange(9) for _ in range(rng.randrange(300))
        ]
        size = rng.choice([4, 8])
        hashes = [repr(prompt[: at + 4]).encode() for at in range(0, len(prompt) - 3, 4)]
        contents: tuple[Content, ...] = (
            Tokens(rng.choice([b"a", b"b"]), raw(prompt), raw([1] * 20)),
            Hashed(hashes, len(prompt), 0, 4, b"r"),
        )
        for content in contents:
            assert content.numbers(remembers, size) == content.numbers(Hasher(b"salt"), size)
    assert len(remembers._strides) == 5


def test_namespaces_share_nothing() -> None:
    hasher = Hasher(b"salt")
    one, two = (Tokens(name, raw([1] * 32), b"").numbers(hasher, 16)[0] for name in (b"a", b"b"))
    assert not set(one) & set(two)


# -- bounds and failures -------------------------------------------------------------------------


def many(count: int, tokens: int = 640) -> list[Ended]:
    rng = np.random.default_rng(0)
    return [ended(rng.integers(0, 1000, tokens).tolist(), [], float(at)) for at in range(count)]


def test_a_full_recording_stops_with_one_line_and_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = record(tmp_path, many(300), most_bytes="64KiB")
    assert path.stat().st_size <= 1 << 16
    assert 10 < len(load_trace(path)) < 300
    assert [r.levelname for r in caplog.records if "is full and ends" in r.message] == ["WARNING"]


def test_rotation_keeps_the_latest_within_the_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(tmp_path, many(300), most_bytes=1 << 16, when_full="rotate")
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) <= 1 << 16
    joined = tmp_path / "joined"
    joined.write_bytes(b"".join(path.read_bytes() for path in files))
    arrivals = [
        json.loads(line)["request"]["timestamp"]
        for line in joined.read_text().splitlines()
        if "request" in line
    ]
    assert sorted(round(at) for at in np.diff(sorted(arrivals))) == [1000] * (len(arrivals) - 1), "a gap"
    with open_source(joined) as source:
        assert len(read_recorded(source).trace) == len(arrivals) > 10
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_disk_that_fails_ends_the_recording_with_one_line(
    failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(RecordSettings(folder=str(tmp_path)), 16)
    real, written = os.write, []

    def write(file: int, data: bytes) -> int:
        """The disk takes two lines and half of the third."""
        written.append(data)
        if len(written) <= 2:
            return real(file, data)
        if len(written) == 3:
            return real(file, data[: len(data) // 2])
        raise OSError(failure, os.strerror(failure))

    with monkeypatch.context() as patched:
        patched.setattr("costcache.recording.files.os.write", write)
        for request in many(10):
            recorder.add(request)
        recorder.close()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "the server goes on" in line
    assert os.strerror(failure) in line
    recorder.add(many(1)[0])  # the server goes on
    (path,) = tmp_path.iterdir()
    assert len(load_trace(path)) == 2


def test_a_request_that_cannot_be_recorded_ends_the_recording_and_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        size = 8

        def numbers(self, hasher: Hasher, block_size: int) -> tuple[list[int], list[int]]:
            raise ValueError("broken")

    good = many(1)[0]
    path = record(tmp_path, [good, Ended(Broken(), 1, 0, 1.0, 1.0, RequestInfo()), good])
    assert len(load_trace(path)) == 1
    assert [r.levelname for r in caplog.records if "goes on: broken" in r.getMessage()] == ["ERROR"]


def test_a_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    path = record(tmp_path, many(3))
    whole = path.read_bytes()
    for cut in (1, 2, 50):
        path.write_bytes(whole[:-cut])
        assert len(load_trace(path)) == (3 if cut == 1 else 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"input_length":640', '"input_length":641', "the number of request.hash_ids is 40; expected 41"),
        ('"version":1', '"version":99', "a version that this costcache reads, 1 or less"),
        ('"hash_ids":[', '"hash_ids":["x",', "hash_ids"),
        ('{"recording"', '{"recordings"', "known format"),
    ],
)
def test_wrong_lines_are_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = record(tmp_path, many(2))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TraceError, match=message):
        load_trace(path)


# -- settings ------------------------------------------------------------------------------------


def test_the_setting_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert recording_asked(None) is None
    one, other = str(tmp_path / "of the setting"), str(tmp_path / "of the environment")
    monkeypatch.setenv(ENVIRONMENT, other)
    settings = read_settings(ServerSettings, {"record": one})
    assert recording_asked(settings.record) == RecordSettings(folder=one)
    assert recording_asked(None) == RecordSettings(folder=other)
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"folder": one, "most_bytes": "1MiB"}))
    assert recording_asked(None) == RecordSettings(folder=one, most_bytes=1 << 20)
    monkeypatch.setenv(SALT, "short")
    with pytest.raises(SettingsError, match=f"{SALT} has 5 characters"):
        recording_asked(settings.record)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", f"the variable {ENVIRONMENT} is '{{', which is not JSON"),
        ('{"folder": "x", "size": 1}', f"unknown setting '{ENVIRONMENT}.size'"),
        ('{"folder": "x", "most_bytes": "1tok"}', f"setting '{ENVIRONMENT}.most_bytes' is '1tok'"),
        ('{"folder": "x", "most_bytes": 5}', f"setting '{ENVIRONMENT}.most_bytes' is 5"),
    ],
)
def test_wrong_settings_are_named(given: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, given)
    with pytest.raises(SettingsError) as caught:
        recording_asked(None)
    assert message in str(caught.value)


def test_a_block_is_a_multiple_of_a_page() -> None:
    def block(page: int, **more: Any) -> int:
        return RecordSettings(folder="x", **more).tokens_per_hash(page)

    assert [block(page) for page in (1, 16, 5, 64)] == [16, 16, 20, 64]
    assert block(1, block_size=1) == 1
    with pytest.raises(SettingsError, match=r"block_size' is 24: give a multiple of the page size, 16"):
        block(16, block_size=24)


def test_a_folder_that_cannot_be_written_to_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"'record\.folder' is .*file/x', which cannot be written to"):
        Files(str(tmp_path / "file" / "x"), b"", 1 << 20, rotate=False)
