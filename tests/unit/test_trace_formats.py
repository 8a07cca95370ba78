"""Each trace format: what a small file of it means, and that no damage to one ends in a traceback."""

from __future__ import annotations

import copy
import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.errors import TraceError
from costcache.records import Asker
from costcache.sim.requests import RequestInfos
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace, write_trace
from costcache.sim.traces.convert import with_path_ids
from costcache.sim.traces.files import open_source
from costcache.sim.traces.reading import FORMATS, Format, Reading, detect, read_trace
from costcache.sim.traces.summary import ideal_with_outputs
from costcache.sim.traces.weka import read_weka

Row = dict[str, Any]


def call(kind: str, t: float, tokens: int, ids: list[int], **more: Any) -> Row:
    return {"t": t, "type": kind, "in": tokens, "out": 5, "hash_ids": ids, **more}


def session(requests: list[Row], scope: str = "global", **more: Any) -> Row:
    return {"id": "a", "block_size": 64, "hash_id_scope": scope, "requests": requests, **more}


def event(session_id: str, received: float, tokens: int, hashes: list[int]) -> Row:
    replay = {"trace_block_size": 16, "input_length": tokens, "input_sequence_hashes": hashes}
    request = {
        "output_tokens": 3,
        "request_received_ms": received,
        "total_time_ms": 500.0,
        "replay": replay,
    }
    context = {"session_id": session_id}
    return {"event": {"event_type": "request_end", "agent_context": context, "request": request}}


RECORDING = [
    {"recording": {"version": 1, "started": 1000.5, "block_size": 16, "salt": "a", "page_size": 16}},
    {
        "request": {
            "timestamp": 250,
            "input_length": 40,
            "output_length": 10,
            "hash_ids": [4, 5, 6],
            "output_ids": [7, 8],
            "cached_tokens": 0,
            "service_ms": 50.5,
            "session": "s",
            "tenant": "t",
            "returns_after": 3.5,
        }
    },
    {"recording": {"version": 1, "started": 1001, "block_size": 16, "salt": "b"}},
    {
        "request": {
            "timestamp": -10,
            "input_length": 32,
            "output_length": 0,
            "hash_ids": [4, 5],
            "output_ids": [],
            "session_ends": True,
            "dropped": 2,
        }
    },
]
MOONCAKE = [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}]
BAILIAN = [
    {
        "chat_id": 7,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 40,
        "output_length": 2,
        "type": "text",
        "turn": 1,
        "hash_ids": [4, 5, 6],
    },
    {
        "chat_id": 9,
        "parent_chat_id": 7,
        "timestamp": 3,
        "input_length": 40,
        "output_length": 2,
        "hash_ids": [4, 5],
    },
    {
        "chat_id": 8,
        "parent_chat_id": -1,
        "timestamp": 2,
        "input_length": 32,
        "output_length": 2,
        "hash_ids": [4, 5],
    },
]
WEKA = [
    session(
        [
            call("s", 0.0, 130, [3, 4], api_time=2.0, think_time=0.0, stop=""),
            call("n", 2.0, 130, [3, 4], api_time=3.0, think_time=0.0, stop="tool_use"),
            {"t": 4.0, "type": "subagent", "requests": [call("n", 1.0, 64, [3], api_time=1.0)]},
            call("n", 9.0, 200, [3, 4, 5], api_time=2.0, think_time=4.0, stop="end_turn"),
        ]
    ),
    session([call("s", 0.0, 64, [4]), call("n", 1.0, 128, [4, 4])]),
]
RAGPULSE = [
    {
        "timestamp": "5",
        "input_length": 20,
        "output_length": 1,
        "hash_ids": {"sys_prompt": [1], "passages_ids": [2, 1], "history": [], "user_input": [9]},
        "session_id": "s",
    },
    {
        "timestamp": "3",
        "input_length": 9,
        "output_length": 1,
        "hash_ids": {"sys_prompt": [1], "web_search": [4]},
        "session_id": "s",
    },
]
TABLES = {
    "1_sys_prompt": [{"sys_prompt_id": 1, "token_length": 3}],
    "2_passages": [{"passage_id": 1, "token_length": 2}, {"passage_id": 2, "token_length": 4}],
    "3_history": [{"history_id": 5, "token_length": 1}],
    "4_user_input": [{"user_input_id": 9, "token_length": 1}],
    "5_web_search": [{"web_search_id": 4, "token_length": 2}],
}
SHAREGPT = [
    {"id": "x_0", "turns": [["human", 20, 9], ["gpt", 30, 20], ["human", 5, 3], ["gpt", 4, 2]]},
    {"id": "y_0", "turns": [["gpt", 9, 9], ["human", 7, 6], ["gpt", 1, 0]]},
]
DYNAMO = [
    event("root", 5000.0, 20, [2**64 - 1, 7]),
    {"event": {"event_type": "tool_start", "tool": {"name": "x"}}},
    event("root", 7000.0, 33, [2**64 - 1, 7, 8]),
    event("other", 6000.0, 16, [2**64 - 1]),
]
LMCACHE = [
    {"timestamp": 3_000_000, "input": "one two three", "output": "four", "session_id": "s"},
    {"timestamp": 1_000_000, "input": "one two", "output": " three", "session_id": "s"},
]
CHAT: list[Row] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 12345"}]
MESSAGES: list[Row] = [
    {"messages": CHAT, "timestamp": "2026-01-31T12:00:00Z", "response": {"usage": {"completion_tokens": 7}}},
    {
        "custom_id": "1",
        "body": {
            "messages": [*CHAT, {"role": "assistant", "content": "Yes."}],
            "tools": [{"type": "function"}],
            "priority": -2,
        },
        "timestamp": 1769860801.5,
        "response": {
            "body": {
                "choices": [
                    {
                        "message": {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
                        "finish_reason": "tool_calls",
                    }
                ]
            }
        },
    },
]

TRAJECTORY: list[Row] = [
    {"role": "system", "content": "Policy of the shop."},
    {"role": "user", "content": "Where is my order?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "on its way"},
    {"role": "assistant", "content": "On its way."},
]
SAMPLES: dict[str, list[Row]] = {
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "weka": WEKA,
    "ragpulse": RAGPULSE,
    "sharegpt": SHAREGPT,
    "dynamo": DYNAMO,
    "recording": RECORDING,
    "lmcache": LMCACHE,
    "messages": MESSAGES,
    "conversations": [{"task_id": 0, "reward": 1.0, "traj": TRAJECTORY}],
}
FEW_SHOT = {
    "gsm8k": {
        "./grade_school_math/data/test.jsonl": b'{"question": "2+2?", "answer": "#### 4"}\n',
        "./grade_school_math/data/train.jsonl": b'{"question": "1+1?", "answer": "#### 2"}\n' * 9,
    },
    "bbh": {
        "./bbh/words.json": b'{"examples": [{"input": "a b", "target": "b"}, {"input": "c", "target": "d"}]}',
        "./cot-prompts/words.txt": b"notice\n-----\nSort.\n\nQ: x\nA: y\n",
    },
}


def lines(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def write(folder: Path, name: str, rows: list[Row]) -> Path:
    path = folder / f"{name}_0_trace.jsonl"
    path.write_bytes(lines(rows))
    if name == "ragpulse":
        for table, chunks in TABLES.items():
            (folder / f"{name}_{table}.jsonl.gz").write_bytes(gzip.compress(lines(chunks)))
    return path


def read(folder: Path, name: str, rows: list[Row], **options: Any) -> Trace:
    return load_trace(write(folder, name, rows), tokenizer="words", **options)


def prompts(trace: Trace) -> list[list[int]]:
    return [trace.ids[a:b].tolist() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_each_format_is_recognised_by_its_first_line(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    path = write(tmp_path, name, SAMPLES[name])
    path.write_bytes(b"\n" + pack(path.read_bytes()) if pack is bytes else pack(path.read_bytes()))
    trace, found = read_trace(path, Reading(tokenizer="words"))
    assert found.name == name
    assert len(trace) > 0
    assert bool((np.diff(trace.timestamps) >= 0).all())


def test_every_format_has_a_sample() -> None:
    assert {form.name for form in FORMATS} == {*SAMPLES, "few_shot"}


def test_recordings_count_from_each_servers_start(tmp_path: Path) -> None:
    trace = read(tmp_path, "recording", RECORDING)
    assert prompts(trace) == [[4, 5, 6], [4, 5]]
    assert trace.timestamps.tolist() == pytest.approx([0.0, 0.24])
    assert trace.output_ids is not None
    assert trace.output_ids.tolist() == [7, 8]
    assert trace.service_seconds is not None
    assert trace.service_seconds[0] == pytest.approx(0.0505)
    assert trace.tenant_names == ("t",)


def test_bailian_chats_follow_their_parents_and_partial_blocks_may_have_no_id(tmp_path: Path) -> None:
    trace = read(tmp_path, "bailian", BAILIAN)
    assert trace.block_size == 16
    assert trace.timestamps.tolist() == [1.5, 2.0, 3.0]
    assert trace.input_tokens.tolist() == [40, 32, 40]
    assert prompts(trace) == [[4, 5, 6], [4, 5], [4, 5, -2]]
    assert trace.sessions is not None
    assert trace.sessions[0] == trace.sessions[2] != trace.sessions[1]


def test_weka_drops_turns_logged_twice_and_orders_agents_by_time(tmp_path: Path) -> None:
    trace = read(tmp_path, "weka", WEKA, arrivals="together")
    assert trace.sessions is not None
    assert trace.finish is not None
    # First session: s at 0 for 2 s, n for 3 s, 4 s of thought; the sub-agent's request at 5 in between.
    first = trace.sessions == 0
    assert trace.input_tokens[first].tolist() == [130, 64, 200]
    assert trace.timestamps[first].tolist() == [0.0, 5.0, 9.0]
    # The dropped record's stop reason is its turn's.
    names = [trace.finish_names[i] if i >= 0 else "" for i in trace.finish[first]]
    assert names == ["tool_use", "", "end_turn"]
    ids = [each for each, own in zip(prompts(trace), first, strict=True) if own]
    assert ids[0][:2] == [3, 4]
    assert ids[0][2] < 0  # tokens after the last whole block are not shared
    assert ids[1] == [3]
    assert trace.service_seconds is not None
    assert trace.service_seconds[first].tolist() == [5.0, 1.0, 2.0]
    assert np.isnan(trace.service_seconds[~first]).all()


@pytest.mark.parametrize(
    ("times", "turn"), [((2.0, None), [2.0]), ((None, 3.0), [3.0]), ((None, None), None)]
)
def test_weka_turn_logged_twice_takes_the_time_that_is_known(
    tmp_path: Path, times: tuple[float | None, float | None], turn: list[float] | None
) -> None:
    records = [call(kind, 0.0, 64, [3], api_time=time) for kind, time in zip("sn", times, strict=True)]
    service = read(tmp_path, "weka", [session(records)]).service_seconds
    assert (service if service is None else service.tolist()) == turn


def test_weka_sessions_keep_their_own_clock_when_asked(tmp_path: Path) -> None:
    trace = read(tmp_path, "weka", WEKA, arrivals="together", gaps="recorded")
    assert trace.sessions is not None
    assert trace.timestamps[trace.sessions == 0].tolist() == [0.0, 5.0, 9.0]


def test_weka_keeps_turns_logged_twice_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, "weka", WEKA)
    with open_source(path) as source:
        assert len(read_weka(source, duplicates=True)) == 6
    with open_source(path) as source:
        assert len(read_weka(source)) == 5


def test_weka_local_ids_are_apart_and_global_ones_go_by_path(tmp_path: Path) -> None:
    requests = [call("s", 0.0, 128, [1, 2])]
    shared = read(tmp_path, "weka", [session(requests), session(requests)])
    apart = read(tmp_path, "weka", [session(requests, "local"), session(requests, "local")])
    assert shared.distinct_pages(64) == 2
    assert apart.distinct_pages(64) == 4
    # Content 4 occurs in three places: after 3, first, and after itself.
    trace = read(tmp_path, "weka", WEKA)
    assert trace.distinct_pages(64) == 5


def test_ragpulse_chunks_are_as_long_as_the_tables_say(tmp_path: Path) -> None:
    trace = read(tmp_path, "ragpulse", RAGPULSE)
    assert trace.block_size == 1
    assert trace.timestamps.tolist() == [3.0, 5.0]
    assert trace.input_tokens.tolist() == [5, 10]
    short, long = prompts(trace)
    assert short[:3] == long[:3]  # the system prompt
    assert len({*short, *long}) == 3 + 2 + 7
    assert trace.ideal_hit_rate(1) == pytest.approx(3 / 15)


def test_ragpulse_needs_its_tables(tmp_path: Path) -> None:
    path = write(tmp_path, "ragpulse", RAGPULSE)
    with pytest.raises(TraceError, match=r"block size is 16; chunks have any length"):
        load_trace(path, 16)
    (tmp_path / "ragpulse_3_history.jsonl.gz").unlink()
    with pytest.raises(TraceError, match=r"the table .*ragpulse_3_history\.jsonl is missing"):
        load_trace(path)
    other = path.rename(tmp_path / "other.jsonl")
    with pytest.raises(TraceError, match="give a file with 0_trace in its name"):
        load_trace(other)


def test_sharegpt_turns_continue_the_ones_before(tmp_path: Path) -> None:
    trace = read(tmp_path, "sharegpt", SHAREGPT, arrivals="even:0.001")
    assert trace.input_tokens.tolist() == [20, 55, 16]
    assert trace.output_tokens.tolist() == [30, 4, 1]
    assert trace.think_seconds is not None
    assert trace.timestamps.tolist() == pytest.approx([0.0, 2.0, 1000.0])  # 3 words at 90 a minute
    assert prompts(trace) == [[0, 1], [0, 1, 2, 3], [4]]
    assert trace.output_ids is not None
    assert trace.output_ids.tolist() == [1, 2, 3, 3, 5]
    # At one token a page: the second prompt finds input and output of the first.
    assert ideal_with_outputs(trace, 1) == pytest.approx(50 / 91)
    assert trace.ideal_hit_rate(1) == pytest.approx(20 / 91)


def test_dynamo_reads_ends_of_requests(tmp_path: Path) -> None:
    trace = read(tmp_path, "dynamo", DYNAMO)
    assert trace.timestamps.tolist() == [0.0, 1.0, 2.0]
    assert prompts(trace) == [[-1, 7], [-1], [-1, 7, 8]]
    assert trace.think_seconds is not None
    assert trace.think_seconds.tolist() == [0.0, 0.0, 1.5]
    assert trace.service_seconds is not None
    assert trace.service_seconds.tolist() == [0.5, 0.5, 0.5]


def test_lmcache_prompts_are_tokens_in_time_order(tmp_path: Path) -> None:
    trace = read(tmp_path, "lmcache", LMCACHE)
    assert trace.timestamps.tolist() == [0.0, 2.0]
    assert trace.input_tokens.tolist() == [2, 3]
    first, second = prompts(trace)
    assert second[:2] == first
    assert ideal_with_outputs(trace, 1) == pytest.approx(3 / 5)
    assert trace.sessions is not None


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_of_text_share_what_tokens_share(tmp_path: Path, block_size: int) -> None:
    rows = [{"timestamp": i, "input": "a b c d e f g"[: 2 * i + 1], "output": ""} for i in range(6)]
    whole = read(tmp_path, "lmcache", rows)
    trace = read(tmp_path, "lmcache", rows, block_size=block_size)
    assert trace.block_size == block_size
    assert trace.distinct_pages(block_size) == whole.distinct_pages(block_size)


def test_messages_are_one_text_each(tmp_path: Path) -> None:
    trace = read(tmp_path, "messages", MESSAGES)
    assert trace.timestamps.tolist() == [0.0, 1.5]
    assert trace.output_tokens[0] == 7
    assert trace.output_ids is None  # the text of the first answer is not known
    assert trace.finish_names == ("tool_calls",)
    assert trace.priorities is not None
    assert trace.priorities.tolist() == [0, -2]
    plain: list[Row] = [
        {"messages": CHAT[:1]},
        {"messages": CHAT},
        {"messages": [*CHAT, {"role": "assistant", "content": "Yes."}]},
    ]
    trace, found = read_trace(
        write(tmp_path, "messages", plain), Reading(tokenizer="bytes"), arrivals="together"
    )
    assert found.clock is None
    texts = [bytes(each).decode() for each in prompts(trace)]
    assert texts[0] == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    assert texts[1] == texts[2]  # a last message of the assistant is the answer
    assert trace.output_tokens.tolist() == [0, 0, len("Yes.<|im_end|>")]


def test_messages_without_times_get_arrivals(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "session_id": f"s{i % 2}"} for i in range(4)]
    assert read(tmp_path, "messages", rows).timestamps.max() > 60.0
    assert read(tmp_path, "messages", rows, arrivals="together").timestamps.max() == 0.0
    with pytest.raises(
        TraceError, match=r"line 2: timestamp is 1.0; expected a time in every line or in none"
    ):
        read(tmp_path, "messages", [rows[0], {**rows[1], "timestamp": 1}])


def test_few_shot_sets_put_one_prompt_before_many_questions(tmp_path: Path) -> None:
    path = tmp_path / "set.tar.gz"
    path.write_bytes(gzip.compress(archive(FEW_SHOT["gsm8k"])))
    trace = load_trace(path, tokenizer="bytes", arrivals="together")
    assert trace.name == "set"
    worked = "Question: 1+1?\nAnswer: #### 2\n\n" * 8
    assert bytes(prompts(trace)[0]).decode() == worked + "Question: 2+2?\nAnswer:"
    assert trace.output_tokens.tolist() == [len(" #### 4")]
    path.write_bytes(archive(FEW_SHOT["bbh"]))
    trace = load_trace(path, tokenizer="bytes", arrivals="together")
    texts = [bytes(each).decode() for each in prompts(trace)]
    assert texts[0] == "Sort.\n\nQ: x\nA: y\n\nQ: a b\nA: Let's think step by step."
    assert len(texts) == 2
    path.write_bytes(archive({"bbh/words.json": FEW_SHOT["bbh"]["./bbh/words.json"]}))
    with pytest.raises(TraceError, match=r"cot-prompts/words\.txt is missing"):
        load_trace(path, tokenizer="bytes")
    path.write_bytes(archive({"readme": b"x"}))
    with pytest.raises(TraceError, match="is an archive of neither"):
        load_trace(path, tokenizer="bytes")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n', r"t.jsonl, line 1: the line is \{'a': 1\}; expected the fields of a known format"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "has arrivals and lengths but no prefixes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_files_that_are_no_trace_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "line", "change", "message"),
    [
        ("bailian", 2, {"timestamp": "x"}, "timestamp is 'x'; expected seconds from the start"),
        ("bailian", 2, {"hash_ids": [1]}, "the number of hash_ids is 1; expected 3 for input_length 40"),
        (
            "bailian",
            3,
            {"hash_ids": [1, -1]},
            r"hash_ids\[1\] is -1; expected a list of whole numbers from 0",
        ),
        ("bailian", 1, {"input_length": None}, "input_length is None; expected tokens of the prompt"),
        ("weka", 2, {"block_size": 32}, "block_size is 32; expected 64, as in the lines before"),
        ("weka", 2, {"requests": 3}, "requests is 3; expected a list of requests"),
        (
            "weka",
            2,
            {"requests": [{"t": 1}]},
            r"requests\[0\].type is missing; expected 'n', 's' or 'subagent'",
        ),
        ("weka", 2, {"requests": [call("n", -1, 64, [1])]}, r"requests\[0\].t is -1; expected seconds from"),
        ("weka", 2, {"requests": [call("q", 1, 64, [1])]}, r"requests\[0\].type is 'q'; expected 'n'"),
        ("weka", 2, {"requests": [call("n", 1, 64, [])]}, "the number of hash_ids at t 1.0 is 0; expected 1"),
        ("ragpulse", 2, {"timestamp": "soon"}, "timestamp is 'soon'; expected seconds from the start"),
        ("ragpulse", 2, {"timestamp": "nan"}, "timestamp is 'nan'; expected seconds from the start"),
        (
            "ragpulse",
            2,
            {"hash_ids": {"x": [1]}},
            r"a part of hash_ids \('x'\) is \[1\]; expected one of sys",
        ),
        (
            "ragpulse",
            2,
            {"hash_ids": {"history": [1]}},
            "hash_ids.history is 1; expected an id of the table 3_",
        ),
        ("sharegpt", 2, {"turns": [["gpt", 3]]}, r"turns\[0\] is \['gpt', 3\]; expected a list of \[speaker"),
        ("dynamo", 3, {"event": {"event_type": "request_end"}}, "event.request is None; expected an object"),
        ("dynamo", 3, event("a", 1.0, 16, [2**64]), rf"hashes is {2**64}; expected whole numbers of 64 bits"),
        ("dynamo", 3, event("a", 1.0, 17, [1]), "the number of input_sequence_hashes is 1; expected 2 for"),
        ("lmcache", 2, {"input": 3}, "input is 3; expected the prompt, text"),
        (
            "messages",
            2,
            {"body": {"messages": [{}]}},
            r"body.messages\[0\].role is missing; expected the speaker",
        ),
        ("messages", 1, {"priority": 2**31}, "priority is 2147483648; expected a whole number of 32 bits"),
        ("messages", 2, {"timestamp": "noon"}, "timestamp is 'noon'; expected seconds, 0 or more, or a date"),
    ],
)
def test_a_wrong_field_is_named_with_file_line_and_value(
    tmp_path: Path, name: str, line: int, change: Row, message: str
) -> None:
    rows = copy.deepcopy(SAMPLES[name])
    rows[line - 1].update(change)
    with pytest.raises(TraceError, match=rf"0_trace\.jsonl, line {line}: .*{message}"):
        read(tmp_path, name, rows)


def test_a_wrong_table_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "ragpulse", RAGPULSE)
    (tmp_path / "ragpulse_2_passages.jsonl").write_bytes(lines([{"passage_id": 1, "token_length": -4}]))
    with pytest.raises(
        TraceError, match=r"2_passages\.jsonl, line 1: token_length is -4; expected its tokens"
    ):
        load_trace(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inner, (*path, key))
    return found


@st.composite
def mangled(draw: st.DrawFn, rows: list[Row]) -> bytes:
    """Lines with a few values changed or taken away, then perhaps a few bytes."""
    rows = copy.deepcopy(rows)
    for _ in range(draw(st.integers(0, 2))):
        *path, last = draw(st.sampled_from(places(rows) or [(0,)]))
        holder: Any = rows
        for key in path:
            holder = holder[key]
        if path and draw(st.booleans()):
            del holder[last]
        else:
            holder[last] = draw(JSON)
    data = bytearray(lines(rows))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


def check(path: Path, form: Format | None = None) -> None:
    try:
        if form is None:
            load_trace(path, tokenizer="words")
        else:
            with open_source(path) as source:
                form.read(source, Reading(tokenizer="words"))
    except TraceError as error:
        text = str(error)
        assert path.parent.name in text, text
        assert "\n" not in text


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
def test_mangled_lines_are_a_trace_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mangled"
    folder.mkdir(exist_ok=True)
    path = write(folder, name, SAMPLES[name])
    which = data.draw(st.sampled_from([None, *TABLES])) if name == "ragpulse" else None
    if which is None:
        path.write_bytes(data.draw(mangled(SAMPLES[name])))
    else:
        (folder / f"{name}_{which}.jsonl.gz").write_bytes(data.draw(mangled(TABLES[which])))
    check(path)
    check(path, next(form for form in FORMATS if form.name == name))


@pytest.mark.parametrize("name", FEW_SHOT)
@given(data=st.data())
def test_mangled_archives_are_a_trace_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mangled"
    folder.mkdir(exist_ok=True)
    path = folder / "set.tar"
    files = dict(FEW_SHOT[name])
    which = data.draw(st.sampled_from(sorted(files)))
    inner = bytearray(files[which])
    at = data.draw(st.integers(0, len(inner) - 1))
    inner[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=3))
    packed = bytearray(archive({**files, which: bytes(inner)}))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path.write_bytes(packed)
    check(path)


def test_detection_uses_nothing_up(tmp_path: Path) -> None:
    path = write(tmp_path, "bailian", BAILIAN)
    with open_source(path) as source:
        assert detect(source).name == "bailian"
        assert [number for number, _ in source.lines()] == [1, 2, 3]


def test_lines_may_say_what_the_server_and_the_client_know(tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = [
        {
            "session_id": "a",
            "tenant": "acme",
            "user": "eve",
            "returns_after": 2.5,
            "finish_reason": "tool_calls",
        },
        {"session_id": 7, "priority": -3, "session_ends": True},
        {"returns_after": "search", "keep_seconds": 60},
        {},
    ]
    path = tmp_path / "mine.jsonl"
    lines = [
        {"timestamp": at, "input_length": 4, "output_length": 1, "hash_ids": [at], "block_size": 16} | each
        for at, each in enumerate(facts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = load_trace(path)
    assert trace.names_sessions
    assert trace.finish_names == ("tool_calls",)
    infos = RequestInfos(trace)
    assert [infos.of(i, 4)[4:] for i in range(4)] == [
        ("0", infos.of(0, 4).ending, "acme", False, 2.5, None, "eve"),
        ("1", (), None, True, None, None, None),
        ("2", (), None, False, "search", 60.0, None),
        ("3", (), None, False, None, None, None),
    ]
    assert infos.askers == [
        Asker("0", "acme", "eve"),
        Asker("1"),
        Asker("2"),
        Asker("3"),
    ]
    assert [infos.of(i, 4).priority for i in range(4)] == [0, -3, 0, 0]
    again = tmp_path / "again.jsonl"
    write_trace(trace, again)
    written = RequestInfos(load_trace(again))
    # Reasons are the server's, not the client's, and are not written.
    unsaid = [infos.of(i, 4)._replace(finish_reason=None, ending=()) for i in range(4)]
    assert [written.of(i, 4) for i in range(4)] == unsaid
    converted = with_path_ids(trace, 32)
    assert converted.returns_after is trace.returns_after


def test_sessions_that_only_the_recorder_knew_are_written_as_such(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "bailian", BAILIAN))
    assert trace.sessions is not None
    assert not trace.names_sessions
    write_trace(trace, tmp_path / "again.jsonl")
    again = load_trace(tmp_path / "again.jsonl")
    assert again.sessions is not None
    assert again.sessions.tolist() == trace.sessions.tolist()
    assert not again.names_sessions
    assert RequestInfos(again).askers is None  # a server would not know them
    assert RequestInfos(again, "all").askers == [Asker(str(number)) for number in trace.sessions.tolist()]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("user", 5, "the end user's name, text"),
        ("names_session", "no", "true, or false if only the recorder knew the session"),
        ("finish_reason", ["stop"], "the stop reason, text"),
        ("tenant", 5, "the tenant's name, text"),
        ("priority", 1.5, "a whole number; higher is kept longer"),
        ("session_ends", 1, "true or false"),
        ("returns_after", -1, "seconds, 0 or more, or a label"),
        ("returns_after", [1], "seconds, 0 or more, or a label"),
        ("keep_seconds", "long", "seconds, 0 or more"),
    ],
)
def test_a_wrong_hint_is_named(tmp_path: Path, field: str, value: object, expected: str) -> None:
    path = tmp_path / "wrong.jsonl"
    line = {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1], field: value}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(TraceError, match=re.escape(f"line 1: {field} is {value!r}; expected {expected}")):
        load_trace(path)


def test_last_tokens_of_recorded_texts_are_told() -> None:
    trace = Trace(
        name="text",
        block_size=1,
        timestamps=np.arange(3.0),
        input_tokens=np.array([1, 1, 1]),
        output_tokens=np.array([6, 2, 0]),
        ids=np.array([9, 9, 9]),
        offsets=np.arange(4),
        output_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8]),
        output_offsets=np.array([0, 6, 8, 8]),
    )
    infos = RequestInfos(trace)
    assert [infos.of(i, 0).ending for i in range(3)] == [(3, 4, 5, 6), (7, 8), ()]
