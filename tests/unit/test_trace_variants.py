"""Variants of the formats: JSON arrays, whole conversations, rows of Dynamo and AIPerf, think times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costcache.errors import TraceError
from costcache.sim.trace import Trace
from costcache.sim.traces.reading import Reading, read_trace

Row = dict[str, Any]

TURNS = [
    ("system", "You help."),
    ("user", "One?"),
    ("assistant", "1."),
    ("user", "Two?"),
    ("assistant", "2."),
]


def read(path: Path, rows: object, **options: Any) -> tuple[Trace, str]:
    """Write rows, a line each or as one array, and read them."""
    if isinstance(rows, list):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(str(rows))
    trace, form = read_trace(path, Reading(tokenizer="words"), **options)
    return trace, form.name


def prompts(trace: Trace) -> list[list[int]]:
    return [trace.ids[a:b].tolist() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]


MOONCAKE: list[Row] = [
    {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]},
    {"timestamp": 5, "input_length": 512, "output_length": 2, "hash_ids": [1]},
]
CHATS: list[Row] = [
    {"task_id": 0, "reward": 0.0, "traj": [{"role": role, "content": text} for role, text in TURNS]},
    {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"session_id": "s", "turns": [{"text": "First"}, {"text": "Second", "delay": 1500}]},
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("rows", [MOONCAKE, *([chat] for chat in CHATS)])
def test_an_array_is_read_as_its_items_a_line_each(
    tmp_path: Path, rows: list[Row], indent: int | None
) -> None:
    one, name = read(tmp_path / "lines.json", rows, arrivals="together")
    text = "\ufeff\n" * (indent is None) + json.dumps(rows, indent=indent) + "\n"
    other, same = read(tmp_path / "array.json", text.replace("\n", "\r\n"), arrivals="together")
    assert name == same
    assert prompts(one) == prompts(other)
    assert one.output_tokens.tolist() == other.output_tokens.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"timestamp": 0, ', r"array, whose items are the lines\), line 1: is not JSON"),
        (json.dumps(MOONCAKE)[:-1], "line 2: is not JSON .no '.' and end"),
        (json.dumps(MOONCAKE) + "{}", "line 2: is not JSON .no '.' and end"),
        (
            json.dumps(MOONCAKE).replace("512,", '"x",'),
            r"lines\), line 2: input_length is 'x'; expected tokens",
        ),
        ("[" + '{"a":' * 100_000, "line 1: is not JSON"),
    ],
)
def test_a_damaged_array_is_named_with_its_item(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "array.json", text)


def test_a_turn_of_the_assistant_is_a_request_after_all_turns_before_it(tmp_path: Path) -> None:
    trace, name = read(tmp_path / "tau.json", CHATS[:1], arrivals="together")
    assert name == "conversations"
    first, second = prompts(trace)
    opening = "<|im_start|>assistant\n"
    assert second[: len(first)] == first  # the prompt, the opening of the answer included
    words, _ = read(tmp_path / "words.json", [{"text": opening, "session_id": "x"}])
    assert 0 < int(words.input_tokens[0]) < len(first)
    assert trace.output_ids is not None
    # The answer recurs in the next prompt, token by token, from where the first prompt ended.
    answer = trace.output_ids[: trace.output_tokens[0]].tolist()
    assert second[len(first) : len(first) + len(answer)] == answer


def test_a_conversation_without_answers_is_a_request_a_turn(tmp_path: Path) -> None:
    trace, _ = read(tmp_path / "aiperf.json", CHATS[2:], arrivals="together")
    assert trace.timestamps.tolist() == [0.0, 1.5]
    assert trace.output_tokens.tolist() == [0, 0]
    timed = [{"session_id": "s", "turns": [{"text": "a", "timestamp": 2000}, {"text": "b", "delay": 500}]}]
    timed += [{"session_id": "t", "turns": [{"text": "a", "timestamp": 1000}]}]
    trace, _ = read(tmp_path / "timed.json", timed)
    assert trace.timestamps.tolist() == [0.0, 1.0, 1.5]


def test_a_delay_counts_from_the_answer_of_the_session_before(tmp_path: Path) -> None:
    row = {"input_length": 512, "output_length": 1, "hash_ids": [7]}
    rows = [
        {"session_id": "a", "timestamp": 1000, **row},
        {"session_id": "b", "timestamp": 1500, **row},
        {"session_id": "a", "delay": 2000, **row},
    ]
    trace, name = read(tmp_path / "dynamo.jsonl", rows)
    assert name == "mooncake"
    assert trace.timestamps.tolist() == [1.0, 1.5, 3.0]
    assert trace.think_seconds is not None
    assert trace.think_seconds.tolist() == [0.0, 0.0, 2.0]
    # Without any time, sessions get arrivals, and keep their delays.
    rows = [{key: value for key, value in each.items() if key != "timestamp"} for each in rows]
    trace, _ = read(tmp_path / "untimed.jsonl", rows, arrivals="even:0.1")
    assert trace.timestamps.tolist() == [0.0, 2.0, 10.0]
    assert len(set(read(tmp_path / "untimed.jsonl", rows)[0].timestamps.tolist())) == 3


def test_a_time_in_some_lines_alone_is_refused(tmp_path: Path) -> None:
    row = {"input_length": 512, "output_length": 1, "hash_ids": [7]}
    with pytest.raises(TraceError, match="line 2: timestamp is missing; expected milliseconds"):
        read(tmp_path / "x.jsonl", [{"timestamp": 0, **row}, row])
    with pytest.raises(TraceError, match=r"line 2: timestamp is 3\.0; expected none, as in the lines before"):
        read(tmp_path / "x.jsonl", [{"session_id": "a", **row}, {"session_id": "b", "timestamp": 3, **row}])
    with pytest.raises(TraceError, match="line 1: timestamp is missing"):
        read(tmp_path / "x.jsonl", [row])


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("messages", [{"role": "user", "content": "Hi"}]),
        ("text_input", "Hi"),
        ("text", "Hi"),
        ("texts", ["Hi"]),
        ("texts", ["H", "i"]),
        ("texts", [{"name": "text", "contents": ["H", "i"]}]),
    ],
)
def test_rows_of_aiperf_are_in_milliseconds(tmp_path: Path, field: str, text: Any) -> None:
    rows = [
        {"session_id": "s", field: text, "output_length": 50, "timestamp": 1000},
        {"session_id": "s", field: text, "output_length": 30, "delay": 2500},
    ]
    trace, name = read(tmp_path / "aiperf.jsonl", rows)
    assert name == "messages"
    assert trace.timestamps.tolist() == [0.0, 2.5]
    assert trace.output_tokens.tolist() == [50, 30]
    plain, _ = read(tmp_path / "plain.jsonl", [{**row, field: None, "text": "Hi"} for row in rows])
    assert trace.ids.tolist() == plain.ids.tolist()
    with pytest.raises(TraceError, match="message_mode is 'delta'; expected 'history', with whole prompts"):
        read(tmp_path / "delta.jsonl", [{**rows[0], "message_mode": "delta"}])


CHAT: list[Row] = [{"messages": [{"role": "user", "content": "Hi"}], "session_id": "s"}] * 3


def test_think_time_spaces_the_requests_of_a_session_without_times(tmp_path: Path) -> None:
    trace, _ = read(tmp_path / "chat.jsonl", CHAT, arrivals="together", think=2.5)
    assert trace.timestamps.tolist() == [0.0, 2.5, 5.0]
    trace, _ = read(tmp_path / "chat.jsonl", CHAT, arrivals="together")
    assert trace.timestamps.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (MOONCAKE, "records the times of requests, so think 2 cannot apply; leave it out"),
        (CHATS[2:], "records think times, so think 2 cannot apply"),
        ([{"messages": [{"role": "user", "content": "Hi"}]}], "records no sessions, so think 2 cannot apply"),
    ],
)
def test_think_time_is_refused_where_it_cannot_apply(tmp_path: Path, rows: list[Row], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "x.jsonl", rows, think=2.0)


@pytest.mark.parametrize("arrivals", ["together", "even:0.5"])
def test_a_seed_without_random_numbers_is_refused(tmp_path: Path, arrivals: str) -> None:
    with pytest.raises(TraceError, match=f"seed is 3, and arrivals '{arrivals}' draw no random numbers"):
        read(tmp_path / "x.jsonl", MOONCAKE, arrivals=arrivals, seed=3)
    for random in ("uniform:1h", "poisson:2"):
        read(tmp_path / "x.jsonl", MOONCAKE, arrivals=random, seed=3)
