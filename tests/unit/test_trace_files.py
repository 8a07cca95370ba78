"""Reading and writing trace files: recorded traces, round trips, malformed input."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.errors import TraceError
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace, write_trace

LINE = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}
Pack = Callable[[bytes], bytes]
COLUMNS = ("timestamps", "input_tokens", "output_tokens", "ids", "offsets")


def jsonl(*rows: dict[str, object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def same(left: Trace, right: Trace) -> bool:
    return left.block_size == right.block_size and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in COLUMNS
    )


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Requests, input tokens, output tokens, blocks, distinct ids: published with the data.
        ("mooncake_conversation", (12_031, 144_793_823, 4_122_048, 288_500, 182_790)),
        ("mooncake_synthetic", (3_993, 61_194_628, 595_432, 121_877, 43_924)),
        ("mooncake_arxiv_first1000", (1_000, 9_792_030, 199_084, 19_686, 12_207)),
    ],
)
def test_recorded_traces_have_their_published_sizes(
    traces_dir: Path, name: str, sizes: tuple[int, ...]
) -> None:
    trace = load_trace(traces_dir / f"{name}.jsonl.gz")
    assert trace.name == name
    assert trace.block_size == 512
    assert sizes == (
        len(trace),
        int(trace.input_tokens.sum()),
        int(trace.output_tokens.sum()),
        len(trace.ids),
        len(np.unique(trace.ids)),
    )


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "distinct_pages", "hit_tokens_with_partial_blocks"),
    [
        # 170,899 and 37.34 % are a reference simulator's; the token counts are published with the
        # data. The other two page counts are those of a naive count by path.
        ("mooncake_conversation", 170_899, 54_098_411),
        ("mooncake_synthetic", 40_148, 39_852_661),
        ("mooncake_arxiv_first1000", 11_221, 3_826_202),
    ],
)
def test_recorded_traces_have_their_published_reuse(
    traces_dir: Path, name: str, distinct_pages: int, hit_tokens_with_partial_blocks: int
) -> None:
    trace = load_trace(traces_dir / f"{name}.jsonl.gz")
    assert trace.distinct_pages(512) == distinct_pages
    if name == "mooncake_conversation":
        assert trace.ideal_hit_rate(512) == pytest.approx(0.3734, abs=5e-5)
    naive: set[tuple[int, int]] = set()
    number: dict[tuple[int, int], int] = {}
    hits = 0
    for i in range(len(trace)):
        parent, matched, missed = -1, 0, False
        tokens = int(trace.input_tokens[i])
        start, stop = int(trace.offsets[i]), int(trace.offsets[i + 1])
        for k, block in enumerate(trace.ids[start:stop].tolist()):
            path = (parent, block)
            missed = missed or path not in number
            matched += not missed
            parent = number.setdefault(path, len(number))
            if (k + 1) * 512 <= tokens:
                naive.add(path)
        hits += min(matched * 512, tokens)
    assert len(naive) == distinct_pages
    assert hits == hit_tokens_with_partial_blocks


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
@pytest.mark.parametrize("standard_input", [False, True])
def test_reads_plain_gzip_and_xz_from_files_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Pack, standard_input: bool
) -> None:
    data = pack(jsonl(LINE, LINE | {"timestamp": 1500.5}))
    path: Path | str = tmp_path / "some.trace"
    if standard_input:
        stream = io.BytesIO(data)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
        path = "-"
    else:
        Path(path).write_bytes(data)
    trace = load_trace(path)
    assert trace.name == ("stdin" if standard_input else "some.trace")
    assert trace.timestamps.tolist() == [1.5, 1.5005]
    assert trace.input_tokens.tolist() == [1025, 1025]
    assert trace.output_tokens.tolist() == [7, 7]
    assert trace.ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert trace.offsets.tolist() == [0, 3, 6]
    if standard_input:
        assert not stream.closed


def test_blank_lines_a_byte_order_mark_and_other_fields_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(LINE | {"session_id": "é"}) + b"\n  \r\n" + jsonl(LINE))
    assert len(load_trace(path)) == 2


def test_requests_are_put_in_time_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(jsonl(LINE, LINE | {"timestamp": 3, "hash_ids": [7, 8, 9]}))
    trace = load_trace(path)
    assert trace.timestamps.tolist() == [0.003, 1.5]
    assert trace.ids.tolist() == [7, 8, 9, 0, 1, 2]


def test_block_size_comes_from_the_lines_or_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = LINE | {"input_length": 33}
    path.write_bytes(jsonl(row | {"block_size": 16}, row))
    assert load_trace(path).block_size == 16
    assert load_trace(path, 16).block_size == 16
    with pytest.raises(TraceError, match=r"t.jsonl, line 1: block_size is 16; expected 32, as asked"):
        load_trace(path, 32)
    path.write_bytes(jsonl(row | {"block_size": 16}, row | {"block_size": 17}))
    with pytest.raises(TraceError, match=r"line 2: block_size is 17; expected 16, as in the lines"):
        load_trace(path)
    path.write_bytes(jsonl(row))
    assert load_trace(path, 16).block_size == 16
    with pytest.raises(TraceError, match="block size is 0"):
        load_trace(path, 0)


def test_unsigned_ids_keep_their_bits_and_mixed_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(jsonl(LINE | {"hash_ids": [2**64 - 1, 2**63, 2**63 - 1]}))
    assert load_trace(path).ids.tolist() == [-1, -(2**63), 2**63 - 1]
    path.write_bytes(jsonl(LINE | {"hash_ids": [2**64 - 1, 5, 6]}, LINE | {"hash_ids": [-1, 5, 6]}))
    with pytest.raises(TraceError, match="mixes negative ids with ids of"):
        load_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": -1}, "timestamp is -1; expected milliseconds"),
        ({"timestamp": "12"}, "timestamp is '12'; expected milliseconds"),
        ({"timestamp": True}, "timestamp is True; expected milliseconds"),
        ({"timestamp": None}, "timestamp is None; expected milliseconds"),
        ({"input_length": -5}, "input_length is -5; expected tokens of the prompt"),
        ({"input_length": 10.5}, "input_length is 10.5; expected tokens of the prompt"),
        ({"input_length": 2**70}, f"input_length is {2**70}; expected tokens of the prompt"),
        ({"output_length": -1}, "output_length is -1; expected generated tokens"),
        ({"output_length": "x" * 200}, "output_length is 'xxx.*\\.\\.\\.; expected generated"),
        ({"hash_ids": 3}, "hash_ids is 3; expected a list of whole numbers"),
        ({"hash_ids": [0, "a", 2]}, r"hash_ids\[1\] is 'a'; expected a whole number"),
        ({"hash_ids": [0, 1, 2.5]}, r"hash_ids\[2\] is 2.5; expected a whole number"),
        ({"hash_ids": [0, 1, True]}, r"hash_ids\[2\] is True; expected a whole number"),
        ({"hash_ids": [0, 2**64, 1]}, rf"hash_ids\[1\] is {2**64}; expected a whole number of 64"),
        ({"hash_ids": [0, 1]}, "the number of hash_ids is 2; expected 3 for input_length 1025"),
        ({"hash_ids": []}, "the number of hash_ids is 0; expected 3"),
        ({"hash_ids": [0] * 65}, "the number of hash_ids is 65; .*fits a block size of 16"),
        ({"block_size": 0}, "block_size is 0; expected tokens per hash id"),
        ({"block_size": "16"}, "block_size is '16'; expected tokens per hash id"),
    ],
)
def test_a_wrong_field_is_named_with_file_line_and_value(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(jsonl(LINE) + b"\n" + jsonl(LINE | change))
    with pytest.raises(TraceError, match=rf"^{path}, line 3: {message}"):
        load_trace(path)


@pytest.mark.parametrize("field", list(LINE))
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(jsonl({name: value for name, value in LINE.items() if name != field}))
    with pytest.raises(TraceError, match=rf"bad.jsonl, line 1: {field} is missing; expected "):
        load_trace(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b'{"timestamp": 1,,}', "is not JSON"),
        (b"timestamp,input_length", "is not JSON .*starts with 'timestamp,input_length'"),
        (b"\xff\xfe{\x00", r"is not JSON .*starts with '\\xff\\xfe"),
        (b'{"timestamp": "\xff\xfe"}', "line 1: is not JSON"),
        (b"[1, 2]", r"the line is \[1, 2\]; expected a JSON object with the fields timestamp, in"),
        (b"null", "the line is None; expected a JSON object"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(TraceError, match=rf"bad.jsonl, line 1: .*{message}|{message}"):
        load_trace(path)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_trace_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"any\.jsonl"):
        load_trace(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=4,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*LINE, "block_size"], JSON)))
def test_any_json_object_is_a_request_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(jsonl(row))
    try:
        trace = load_trace(path)
    except TraceError as error:
        assert "any.jsonl, line 1: " in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert trace.input_tokens.tolist() == [row["input_length"]]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-2] + b"??"])
def test_damaged_compression_is_one_clear_error(tmp_path: Path, pack: Pack, damage: Pack) -> None:
    rows = [LINE | {"timestamp": i, "output_length": i * i % 977} for i in range(2000)]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(damage(pack(jsonl(*rows))))
    with pytest.raises(TraceError, match=r"t.jsonl.gz: the compressed data is cut off or damaged"):
        load_trace(path)


def test_empty_missing_and_unreadable_files_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"")
    with pytest.raises(TraceError, match=r"empty.jsonl: holds no request"):
        load_trace(path)
    path.write_bytes(b"\n\n")
    with pytest.raises(TraceError, match=r"empty.jsonl: holds no request"):
        load_trace(path, 16)
    with pytest.raises(TraceError, match=r"no-such-file: cannot be read \(No such file"):
        load_trace(tmp_path / "no-such-file")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path)
    path.write_bytes(b"\x28\xb5\x2f\xfd....")
    with pytest.raises(TraceError, match="zstd is not read here"):
        load_trace(path)


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(*[LINE] * 1000)))
    calls: list[tuple[int, int | None]] = []
    load_trace(path, progress=lambda done, total: calls.append((done, total)))
    size = path.stat().st_size
    assert len(calls) > 3
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_progress_on_standard_input_has_no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jsonl(LINE)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    calls: list[tuple[int, int | None]] = []
    load_trace("-", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(len(data), None)]


def test_standard_input_is_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"{")))
    with pytest.raises(TraceError, match=r"^standard input, line 1: is not JSON"):
        load_trace("-")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(TraceError, match=r"^standard input: holds no request"):
        load_trace("-")


def odd_trace() -> Trace:
    """Times off the millisecond, ids of any 64 bits, a prompt without tokens."""
    return Trace(
        name="odd",
        block_size=7,
        timestamps=np.array([0.0, 0.1, 0.10025, 1234.567]),
        input_tokens=np.array([0, 8, 7, 1]),
        output_tokens=np.array([1, 0, 5, 9]),
        ids=np.array([-(2**63), 2**63 - 1, -1, 0]),
        offsets=np.array([0, 0, 2, 3, 4]),
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.xz"])
def test_written_traces_read_back_and_are_the_same_bytes(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    write_trace(odd_trace(), path)
    write_trace(odd_trace(), other)
    assert same(load_trace(path), odd_trace())
    assert load_trace(path).name == "t"
    assert path.read_bytes() == other.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, other.name])


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_whole_milliseconds_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, times: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "times.jsonl"
    path.write_bytes(jsonl(*({**LINE, "timestamp": time} for time in times)))
    trace = load_trace(path)
    write_trace(trace, path)
    assert same(load_trace(path), trace)
    assert [json.loads(line)["timestamp"] for line in path.read_text().splitlines()] == sorted(times)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    monkeypatch.setattr("costcache.sim.traces.mooncake._milliseconds", lambda seconds: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_trace(odd_trace(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_writes_through_a_link_and_to_standard_output(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text("old")
    link.symlink_to(real)
    write_trace(odd_trace(), link)
    assert link.is_symlink()
    assert same(load_trace(real), odd_trace())
    write_trace(odd_trace(), "-")
    assert capfdbinary.readouterr().out == real.read_bytes()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere/t.jsonl: cannot be written \(No such file"):
        write_trace(odd_trace(), tmp_path / "nowhere" / "t.jsonl")
