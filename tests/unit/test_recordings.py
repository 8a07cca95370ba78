"""Recordings of several files, why tokens were not found, and servers' own logs."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from costcache.cli import cli
from costcache.errors import SettingsError, TraceError
from costcache.recording.hashes import Tokens
from costcache.recording.recorder import Ended, Recorder
from costcache.recording.settings import SALT, RecordSettings
from costcache.records import RequestInfo
from costcache.sim.recordings.converting import FORMS, Form, convert
from costcache.sim.recordings.joining import read_recordings
from costcache.sim.recordings.misses import Misses, find_misses
from costcache.sim.recordings.packed import split
from costcache.sim.trace import RecordedServer
from costcache.sim.traces import load_trace

SALTED = "a salt of enough characters"
BLOCK = 16


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def record(
    folder: Path,
    requests: Sequence[tuple[list[int], list[int], float, int | None]],
    page: int = BLOCK,
    **facts: Any,
) -> Path:
    """Record requests (prompt, output, arrival, found), each of which takes a second."""
    facts = {"server": "test 1", "policy": "lru"} | facts
    recorder = Recorder(RecordSettings(folder=str(folder)), page, **facts)
    for prompt, output, at, cached in requests:
        content = Tokens(b"", array("q", prompt).tobytes(), array("q", output).tobytes())
        info = RequestInfo(output_tokens=len(output), session=f"s{at:g}")
        recorder.add(Ended(content, len(prompt), cached, 5000.0 + at, 5001.0 + at, info))
    recorder.close()
    return sorted(folder.iterdir())[-1]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["record", *words])


# -- why -----------------------------------------------------------------------------------------


def test_each_token_that_was_not_found_has_its_reason(tmp_path: Path) -> None:
    a, b = words(1, 64), words(2, 64)
    path = record(
        tmp_path,
        [
            (a, [], 0.0, 0),  # 64 in a prompt that begins as no other
            ([*a, *words(3, 10)], [], 10.0, 64),  # 64 found, 10 new
            ([*a, *words(4, 10)], [], 20.0, 16),  # 16 found, 48 gone, 10 new
            (a, [], 30.0, 48),  # 48 found, 16 cut: the last token is always computed
            (b, [], 40.0, 0),  # 64 in a prompt that begins as no other
            (b[:40], [], 40.5, 0),  # 32 running, 8 new
            ([5], [], 50.0, None),  # unknown
        ],
    )
    recording, _ = read_recordings([path])
    assert find_misses(recording) == Misses(
        tokens=380, found=128, gone=48, running=32, cut=16, other_start=128, new=28
    )
    assert recording.hit_rate == 128 / 380


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 12)), max_size=12))
def test_the_reasons_add_up(requests: list[tuple[list[int], int]]) -> None:
    rows: list[tuple[list[int], list[int], float, int | None]] = [
        ([*prompt], [], float(at), min(cached, len(prompt))) for at, (prompt, cached) in enumerate(requests)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder), [([7], [], -1.0, 0), *rows], page=2)
        misses = find_misses(read_recordings([path])[0])
    parts = (misses.found, misses.gone, misses.running, misses.cut, misses.other_start, misses.new)
    assert sum(parts) == misses.tokens
    assert min(parts) >= 0


# -- several files -------------------------------------------------------------------------------


def test_ranks_are_merged_in_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SALT, SALTED)
    shared = words(1, 64)
    one = record(tmp_path / "one", [(shared, [1], 0.0, 0), (shared, [2], 20.0, 48)], capacity=512)
    two = record(tmp_path / "two", [(shared, [3], 10.0, 0)], capacity=512)
    done = run("merge", str(one), str(tmp_path / "two"), "--out", str(tmp_path / "all.jsonl.gz"))
    assert (done.exit_code, done.output) == (0, f"wrote 3 requests to {tmp_path}/all.jsonl.gz\n")
    trace = load_trace(tmp_path / "all.jsonl.gz")
    assert trace.timestamps.tolist() == pytest.approx([0.0, 10.0, 20.0])
    assert len(set(trace.ids.tolist())) == 4
    merged = read_recordings([tmp_path / "all.jsonl.gz"])[0]
    assert merged.cached.tolist() == [0, 0, 48]
    (header,) = merged.headers
    assert (header.capacity, header.page_size, header.policy) == (512, BLOCK, "lru")
    assert two.exists()


def test_a_replay_knows_what_the_recorded_servers_have_in_common(tmp_path: Path) -> None:
    prompt = (words(0, 40), [1], 0.0, 0)
    servers = ["sglang 0.5.23", "sglang 0.5.24", "vllm 0.20.0", "a server 1"]
    paths = [
        record(tmp_path / str(at), [prompt], server=server, chunk=2048, trim=16 if at else 0)
        for at, server in enumerate(servers)
    ]
    names = [load_trace(path).server for path in paths]
    assert [server.name for server in names if server] == ["sglang", "sglang", "vllm", ""]
    assert names[0] == RecordedServer("sglang", "lru", 2048, 0)
    merged = tmp_path / "merged.jsonl"
    for others, expected in (
        (paths[:2], RecordedServer("sglang", "lru", 2048, None)),
        (paths[1:3], RecordedServer("", "lru", 2048, 16)),
    ):
        assert run("merge", *map(str, others), "--out", str(merged)).exit_code == 0
        assert load_trace(merged).server == expected
        assert read_recordings(others)[0].trace.server == expected
        merged.unlink()


def test_a_replay_takes_the_chunk_of_the_recording(tmp_path: Path) -> None:
    """Each chunk that finds the pool full is an eviction of its own; answers of one token need none."""
    requests = [(words(seed, 256), [1], float(10 * seed), 0) for seed in range(4)]
    path = record(tmp_path, requests, server="vllm 0.20.0", chunk=64)
    options = ("--model", "llama-3-8b", "--policy", "lru", "--capacity", "256tok", "--serving", "--json")

    def evictions(*more: str) -> int:
        done = CliRunner().invoke(cli, ["simulate", str(path), *options, *more])
        assert done.exit_code == 0, done.output
        count: int = json.loads(done.stdout)["runs"][0]["evictions"]
        return count

    assert [evictions(), evictions("--chunk", "128"), evictions("--chunk", "0")] == [3 * 4, 3 * 2, 3]


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    one = record(tmp_path / "one", [(words(1, 64), [], 0.0, 0)])
    other = record(tmp_path / "other", [(words(1, 64), [], 0.0, 0)], page=32)
    third = record(tmp_path / "third", [(words(1, 64), [], 0.0, 0)])
    done = run("merge", str(one), str(other), "--out", str(tmp_path / "x"))
    assert done.exit_code == 1
    assert "recording.block_size is 32; expected 16, as asked for" in done.output
    done = run("merge", str(one), str(third), "--out", str(tmp_path / "x"))
    assert done.exit_code == 0
    assert "their salts differ" in done.output
    (tmp_path / "empty").mkdir()
    done = run("info", str(tmp_path / "empty"))
    assert done.exit_code == 1
    assert "holds no recording" in done.output


def test_info_says_what_the_server_found_and_how_to_replay(tmp_path: Path) -> None:
    path = record(
        tmp_path, [(words(1, 64), [1, 2], 0.0, 0), ([*words(1, 64), 5], [1], 3.0, 64)], capacity=4096
    )
    done = run("info", str(path))
    assert done.exit_code == 0
    for text in (
        "server          test 1, policy lru",
        "pool            4,096 tokens in pages of 16",
        "requests        2, 0 more were not recorded",
        "hit rate        49.61% of input tokens",
        "A cache of unlimited size would have found 49.61%.",
        f"costcache simulate {path} --model MODEL --serving --page-size 16",
        "--capacity 4096tok,8192tok",
    ):
        assert text in done.output
    facts = json.loads(run("info", str(tmp_path), "--json").output)
    assert facts["hit_rate"] == pytest.approx(64 / 129)
    assert facts["misses"]["found"] == 64


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "pool            not recorded\n"),
        ({"capacity": 4096, "page_size": 16}, "pool            4,096 tokens in pages of 16\n"),
        ({"capacity": 4096}, "pool            4,096 tokens, page size not recorded\n"),
        ({"page_size": 16}, "pool            size not recorded, pages of 16\n"),
    ],
)
def test_info_of_a_pool_of_which_little_is_recorded(tmp_path: Path, facts: dict[str, int], says: str) -> None:
    path = record(tmp_path, [(words(1, 64), [1], 0.0, 0)])
    head, *rest = path.read_text().splitlines()
    fields = json.loads(head)
    for name in ("capacity", "page_size"):
        fields["recording"].pop(name, None)
    fields["recording"] |= facts
    path.write_text("\n".join([json.dumps(fields), *rest]) + "\n")
    assert says in run("info", str(path)).output


@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_setup_names_the_folder(server: str) -> None:
    done = run("setup", server, "/var/recorded")
    assert done.exit_code == 0
    assert "/var/recorded" in done.output
    assert SALT in done.output


# -- logs ----------------------------------------------------------------------------------------


def finished(prompt: Any, output: list[int], cached: int, **more: Any) -> dict[str, Any]:
    meta = {
        "prompt_tokens": 64,
        "completion_tokens": len(output),
        "cached_tokens": cached,
        "e2e_latency": 2.0,
        "finish_reason": {"type": "stop", "matched": 2},
    }
    return {
        "timestamp": "2026-11-29T10:00:02",
        "event": "request.finished",
        "obj": {"input_ids": prompt, **more},
        "out": {"output_ids": output, "meta_info": meta},
    }


def test_a_log_in_json_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SALT, SALTED)
    log = tmp_path / "log"
    rows = [
        finished(words(1, 64), [1, 2], 0, session_id="Alice"),
        {"event": "request.received", "obj": {}},
        finished([*words(1, 64), 1], [3], 48),
        finished(None, [3], 0, text="a question that was sent as text"),
    ]
    log.write_text("\n".join(["INFO: begins", *(f"[2026-11-29 10:00:00] {json.dumps(row)}" for row in rows)]))
    done = run("convert", "--from", "sglang-log", str(log), "--out", str(tmp_path / "out.jsonl"))
    assert done.exit_code == 1
    assert "holds text; give a tokenizer" in done.output
    words_too = ("--tokenizer", "words", "--block-size", "32")
    done = run("convert", "--from", "sglang-log", str(log), "--out", str(tmp_path / "out.jsonl"), *words_too)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out.jsonl").read_text()
    assert "Alice" not in text
    trace = load_trace(tmp_path / "out.jsonl")
    assert trace.block_size == 32
    assert sorted(trace.input_tokens.tolist()) == [7, 64, 65]
    assert trace.service_seconds is not None
    assert trace.service_seconds.tolist() == pytest.approx([2.0] * 3)
    assert trace.finish_names == ("stop",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(finished(None, [1], 0)), "has no prompt; run the server with --log-requests"),
        (json.dumps(finished([1, 2, "...", 3], [1], 0)), "its prompt is shortened; run the server with"),
        ("[2026-11-29 10:00:00] Finish: obj=GenerateReqInput(x=<object>), out={}", "cannot be taken apart"),
        ("nothing of the kind", "holds no finished request that can be used; run the server with"),
    ],
)
def test_a_log_without_prompts_says_which_level_has_them(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line + "\n")
    with pytest.raises(TraceError) as caught:
        convert("sglang-log", [tmp_path / "log"])
    assert message in str(caught.value)
    assert "--log-requests-level 3" in str(caught.value)


class Harmful:
    """A pickle that runs a command when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return (os.system, ("touch harmed",))


def test_a_dump_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps({"requests": [Harmful()], "server_args": Harmful()}))
    with pytest.raises(TraceError, match=r"dump.pkl"):
        convert("sglang-dump", ["dump.pkl"])
    assert not (tmp_path / "harmed").exists()
    (tmp_path / "dump.pkl").write_bytes(b"no pickle")
    with pytest.raises(TraceError, match="is no dump of SGLang's requests"):
        convert("sglang-dump", ["dump.pkl"])


# -- KV events -----------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([b"x" * 300, b"x" * 70_000, "x" * 300, [None] * 300]),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=30,
)


@given(st.lists(VALUES, max_size=5), st.integers(0, 10))
def test_a_stream_is_split_into_its_objects(values: list[Any], cut: int) -> None:
    parts = [msgspec.msgpack.encode(value) for value in values]
    data = b"".join(parts)
    assert list(split(data)) == parts
    whole = data[: len(data) - cut] if cut else data
    found = list(split(whole))
    assert found == parts[: len(found)]
    assert len(b"".join(found)) <= len(whole)


def test_long_lists_are_taken_whole() -> None:
    part = msgspec.msgpack.encode([None] * 70_000)
    assert list(split(part + part)) == [part, part]


def stored(parent: bytes | None, hashes: list[bytes], named: bool = True) -> Any:
    fields = {
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [70_001] * BLOCK * len(hashes),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }
    return {"type": "BlockStored", **fields} if named else ["BlockStored", *fields.values()]


def events(path: Path, *batches: tuple[float, list[Any]]) -> Path:
    path.write_bytes(b"".join(msgspec.msgpack.encode([at, each, 0]) for at, each in batches))
    return path


@pytest.mark.parametrize("named", [True, False])
def test_events_become_requests(named: bool, tmp_path: Path) -> None:
    path = events(
        tmp_path / "events",
        (100.0, [stored(None, [b"a", b"b"], named)]),
        (100.5, [stored(b"b", [b"c"], named)]),  # the same request goes on
        (110.0, [stored(b"b", [b"x"], named)]),  # another one found two blocks
        (120.0, [stored(b"c", [b"d"], named)]),  # and this one three
        (130.0, [{"type": "BlockRemoved", "block_hashes": [b"a", b"b"], "medium": "GPU"}]),
        (131.0, [stored(None, [b"a", b"b"], named)]),  # evicted, and asked for again
        (140.0, [{"type": "AllBlocksCleared"}]),
    )
    _, rows = convert("vllm-kv-events", [path])
    assert [(row.input_length // BLOCK, (row.cached_tokens or 0) // BLOCK) for _, row in rows] == [
        (3, 0),
        (3, 2),
        (4, 3),
        (2, 0),
    ]
    ids = [row.hash_ids for _, row in rows]
    assert ids[0][:2] == ids[1][:2] == ids[3]
    assert ids[2][:3] == ids[0]
    out = tmp_path / "out.jsonl"
    done = run("convert", "--from", "vllm-kv-events", str(path), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "70001" not in out.read_text()
    assert len(load_trace(out)) == 4


def test_blocks_that_are_published_again_were_found(tmp_path: Path) -> None:
    path = events(
        tmp_path / "events",
        (100.0, [stored(None, [b"a", b"b"])]),
        (110.0, [stored(None, [b"a", b"b"]), stored(b"b", [b"c"])]),
    )
    _, rows = convert("vllm-kv-events", [path])
    assert [(row.input_length // BLOCK, (row.cached_tokens or 0) // BLOCK) for _, row in rows] == [
        (2, 0),
        (3, 2),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xc1", "batch 0: is no batch of KV events (byte 0 is 0xc1"),
        (msgspec.msgpack.encode({"a": 1}), "is no batch of KV events"),
        (msgspec.msgpack.encode([1.0, []]), "holds no event BlockStored"),
        (msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_size": 16}]]), "an event is malformed"),
    ],
)
def test_wrong_events_are_named(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "events").write_bytes(data)
    with pytest.raises(TraceError) as caught:
        convert("vllm-kv-events", [tmp_path / "events"])
    assert message in str(caught.value)


def test_blocks_of_events_cannot_be_cut(tmp_path: Path) -> None:
    path = events(tmp_path / "events", (1.0, [stored(None, [b"a"])]))
    with pytest.raises(SettingsError, match="--block-size is 24: give a multiple of the events' own, 16"):
        convert("vllm-kv-events", [path], block_size=24)


# -- damage --------------------------------------------------------------------------------------


def samples() -> dict[Form, bytes]:
    """A sound file of each kind."""
    batches = [[1.0 + at, [stored(None if at == 0 else b"a", [b"abc"[at : at + 1]])], 0] for at in range(3)]
    return {
        "sglang-log": f"[2026-11-29 10:00:00] {json.dumps(finished(words(1, 20), [1, 2], 0))}\n".encode(),
        "sglang-dump": pickle.dumps({"requests": [], "server_args": {"a": [1, (2,), {3}]}}),
        "vllm-kv-events": b"".join(map(msgspec.msgpack.encode, batches)),
    }


@given(st.sampled_from(list(FORMS)), st.data())
def test_no_damage_to_a_log_ends_in_a_traceback(form: Form, data: st.DataObject) -> None:
    content = bytearray(samples()[form])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        content = content or bytearray(b"x")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_bytes(content)
        with contextlib.suppress(TraceError):
            convert(form, [path])
