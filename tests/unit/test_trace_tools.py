"""Tokenizers, ids by path, summaries, and ``costcache trace``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from costcache.cli import cli
from costcache.errors import TraceError
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.traces.convert import with_path_ids
from costcache.sim.traces.summary import ideal_with_outputs, summarize
from costcache.sim.traces.tokens import BUILT_IN, load_tokenizer

TEXT = "Hello world, it's 12345 o'clock.\n\n\tüber  naïve_x 🙂"


def make(block_size: int, prompts: list[tuple[int, list[int]]], times: list[float] | None = None) -> Trace:
    n = len(prompts)
    return Trace(
        name="made",
        block_size=block_size,
        timestamps=np.array(times if times is not None else range(n), dtype=np.float64),
        input_tokens=np.array([tokens for tokens, _ in prompts], dtype=np.int64),
        output_tokens=np.zeros(n, dtype=np.int64),
        ids=np.array([i for _, ids in prompts for i in ids], dtype=np.int64),
        offsets=np.cumsum([0, *(len(ids) for _, ids in prompts)], dtype=np.int64),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    size = draw(st.sampled_from([1, 2, 4]))
    prompts = []
    for _ in range(draw(st.integers(1, 8))):
        tokens = draw(st.integers(0, 6 * size))
        blocks = -(-tokens // size)
        prompts.append((tokens, draw(st.lists(st.integers(-1, 1), min_size=blocks, max_size=blocks))))
    return make(size, prompts)


def prompts_of(trace: Trace) -> list[list[int]]:
    return [trace.ids[a:b].tolist() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]


# -- tokenizers ----------------------------------------------------------------------------------


def test_words_are_whole_and_lose_nothing() -> None:
    encode = load_tokenizer("words", "t")
    first = list(encode(TEXT))
    assert first == list(encode(TEXT))
    assert len(first) == 21
    assert encode("Hello world")[:2] == first[:2]


@given(st.text(max_size=40))
def test_built_in_tokenizers_distinguish_texts(text: str) -> None:
    for name in BUILT_IN:
        encode = load_tokenizer(name, "t")
        assert list(encode(text)) == list(encode(text))
        assert list(encode(text)) != list(encode(text + "!"))


def tokenizer_file(folder: Path) -> Path:
    """A byte-pair vocabulary of two merges."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "abab": 3}, [("a", "b"), ("ab", "ab")])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_file_is_read_by_path_or_folder(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path)
    for name in (str(path), str(tmp_path)):
        encode = load_tokenizer(name, "t")
        assert list(encode("abababa")) == [3, 2, 0]
        assert list(encode("ab\ud800")) == [2]  # half a surrogate pair is not text


def test_missing_tokenizers_are_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"^t: holds text; give a tokenizer: the path of a tokenizer\.json"):
        load_tokenizer(None, "t")
    with pytest.raises(TraceError, match=r"tokenizer is 'gpt5', which is no file; give the path"):
        load_tokenizer("gpt5", "t")
    path = tokenizer_file(tmp_path)
    path.write_text("{}")
    with pytest.raises(TraceError, match=r"tokenizer\.json: is no tokenizer\.json that can be read"):
        load_tokenizer(str(path), "t")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TraceError, match=r"pip install 'costcache\[tokenizer\]'"):
        load_tokenizer(str(path), "t")


# -- ids by path ---------------------------------------------------------------------------------


@given(traces(), st.sampled_from([1, 2, 3]))
def test_path_ids_have_one_predecessor_and_share_the_same_pages(trace: Trace, multiple: int) -> None:
    size = trace.block_size * multiple
    converted = with_path_ids(trace, size)
    assert converted.block_size == size
    assert converted.input_tokens.tolist() == trace.input_tokens.tolist()
    before: dict[int, int] = {}
    for ids in prompts_of(converted):
        for parent, block in zip([-1, *ids], ids, strict=False):
            assert before.setdefault(block, parent) == parent
    # Numbered from 0, in the order of their first use.
    seen = list(dict.fromkeys(converted.ids.tolist()))
    assert seen == list(range(len(seen)))
    for page in (size, 2 * size):
        assert converted.distinct_pages(page) == trace.distinct_pages(page)
    # Any two prompts share as many whole blocks as before.
    old, new = ([bytes(key) for key in each.page_keys(size)] for each in (trace, converted))
    step = trace.page_keys(size).bytes_per_page
    for i in range(len(trace)):
        for j in range(i):
            assert common(old[i], old[j], step) == common(new[i], new[j], 8)


def common(left: bytes, right: bytes, step: int) -> int:
    pages = min(len(left), len(right)) // step
    return next((p for p in range(pages) if left[: (p + 1) * step] != right[: (p + 1) * step]), pages)


def test_path_ids_need_a_multiple() -> None:
    with pytest.raises(TraceError, match="block size is 6; give a multiple of the trace's own, 4"):
        with_path_ids(make(4, [(4, [1])]), 6)


# -- summaries -----------------------------------------------------------------------------------


@given(traces(), st.sampled_from([1, 2, 4, 8]))
def test_a_summary_equals_a_naive_one(trace: Trace, page_size: int) -> None:
    summary = summarize(trace, page_size)
    last: dict[bytes, float] = {}
    intervals: Counter[int] = Counter()
    found: Counter[int] = Counter()
    pages = 0
    step = trace.page_keys(page_size).bytes_per_page
    for key, time in zip(trace.page_keys(page_size), trace.timestamps.tolist(), strict=True):
        for stop in range(step, len(key) + 1, step):
            path = bytes(key[:stop])
            pages += 1
            if path in last:
                gap = time - last[path]
                intervals[0 if gap < 1 else int(gap).bit_length()] += 1
                found[stop // step - 1] += 1
            last[path] = time
    assert summary.pages == pages
    assert summary.distinct_pages == len(last) == trace.distinct_pages(page_size)
    assert summary.ideal_token_hit_rate == pytest.approx(trace.ideal_hit_rate(page_size))
    mine = {(0 if b.start == 0 else int(b.start).bit_length()): b.uses for b in summary.reuse_intervals}
    assert {k: n for k, n in mine.items() if n} == dict(intervals)
    for each in summary.depths:
        depths = range(each.start // page_size, each.stop // page_size)
        assert each.found == sum(found[depth] for depth in depths)
    assert sum(each.pages for each in summary.depths) == pages
    assert summary.ideal_with_outputs is None is ideal_with_outputs(trace, page_size)


def test_an_empty_trace_has_a_summary() -> None:
    summary = summarize(make(4, []), 4)
    assert (summary.requests, summary.pages, summary.ideal_token_hit_rate) == (0, 0, 0.0)
    assert (summary.depths, summary.reuse_intervals) == ((), ())


# -- the command ---------------------------------------------------------------------------------

ROWS = [
    {"id": "c", "block_size": 64, "hash_id_scope": "global", "requests": requests}
    for requests in (
        [
            {"t": 0, "type": "n", "in": 130, "out": 5, "hash_ids": [7, 7], "stop": "tool_use"},
            {"t": 9, "type": "n", "in": 192, "out": 5, "hash_ids": [7, 7, 3], "think_time": 40},
        ],
        [{"t": 0, "type": "s", "in": 64, "out": 5, "hash_ids": [7]}],
    )
]


@pytest.fixture
def weka(tmp_path: Path) -> Path:
    path = tmp_path / "weka.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def test_info_prints_sizes_rates_and_histograms(weka: Path) -> None:
    result = CliRunner().invoke(cli, ["trace", "info", str(weka), "--arrivals", "together"])
    assert result.exit_code == 0, result.output
    text = result.output
    assert "weka: weka, blocks of 64, pages of 64" in text
    for line in (
        "requests        3",
        "sessions        2",
        "duration        40 s",
        "input tokens    386, 192 in the longest prompt",
        "distinct pages  3 of 6 whole pages",
        "ideal hit rate  49.74% of the input tokens",
        "stop reasons    tool_use 1",
    ):
        assert line in text
    assert "\n  64 s      2" in text  # after 40 s
    assert "100.0%" in text


def test_info_in_json(weka: Path) -> None:
    result = CliRunner().invoke(
        cli, ["trace", "info", str(weka), "--json", "--page-size", "128", "--seed", "5"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["format"], found["sessions"], found["page_size"], found["pages"]) == ("weka", 2, 128, 2)
    assert found["finish"] == {"tool_use": 1}
    assert sum(each["uses"] for each in found["reuse_intervals"]) == 1


def test_convert_writes_ids_by_path_and_equal_bytes(weka: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (out, again):
        result = CliRunner().invoke(cli, ["trace", "convert", str(weka), "--out", str(path), "--seed", "3"])
        assert result.exit_code == 0, result.output
    assert "wrote 3 requests of weka, 386 prompt tokens, in blocks of 64" in result.output
    assert out.read_bytes() == again.read_bytes()
    converted, original = load_trace(out), load_trace(weka, seed=3)
    assert converted.block_size == 64
    assert converted.distinct_pages(64) == original.distinct_pages(64) == 3
    assert len(np.unique(converted.ids)) == 4  # 7 first, 7 after 7, 3, and the partial one
    assert converted.timestamps == pytest.approx(original.timestamps)
    CliRunner().invoke(cli, ["trace", "convert", str(weka), "--out", str(again), "--seed", "4"])
    assert out.read_bytes() != again.read_bytes()


def test_convert_gives_text_blocks_of_16(tmp_path: Path) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input": "ab" * 20, "output": ""}))
    arguments = ["trace", "convert", str(path), "--out", str(out), "--tokenizer", "bytes"]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert json.loads(out.read_text())["hash_ids"] == [0, 1, 2]
    assert CliRunner().invoke(cli, [*arguments, "--out-block-size", "40"]).exit_code == 0
    assert json.loads(out.read_text())["hash_ids"] == [0]


def test_errors_are_one_line(weka: Path) -> None:
    for arguments, message in (
        (["--arrivals", "soon"], "Error: arrivals are 'soon'; give uniform:6h"),
        (["--retime", "no.csv"], "Error: no.csv: cannot be read"),
        (["--block-size", "32"], "weka.jsonl, line 1: block_size is 64; expected 32, as asked for"),
    ):
        result = CliRunner().invoke(cli, ["trace", "info", str(weka), *arguments])
        assert result.exit_code == 1
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1
