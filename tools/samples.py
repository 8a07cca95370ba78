"""Writes the sample traces: one small made-up workload in each format that costcache reads.

    python tools/samples.py

The texts are random words, so that the files belong to nobody. They show the formats and exercise the
readers; their hit rates say nothing about real traffic.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "traces"
SESSIONS, MOST_TURNS = 10, 4
SYSTEM_WORDS, PASSAGE_WORDS, USER_WORDS, ANSWER_WORDS = 560, 160, (15, 60), (20, 90)
STARTS_SECONDS, THINK_SECONDS, SERVICE_SECONDS = 120.0, (5.0, 40.0), (1.0, 4.0)
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll")

Row = dict[str, Any]


class Turn(NamedTuple):
    """A request: one token a word.

    Attributes:
        session: Number of its session.
        number: Its place in its session, from 0.
        seconds: When it arrives.
        think: Seconds since the answer before; 0 for the first.
        service: Seconds to the end of its answer.
        user: What is asked.
        answer: What is answered.
        prompt: All words of the prompt.
    """

    session: int
    number: int
    seconds: float
    think: float
    service: float
    user: list[str]
    answer: list[str]
    prompt: list[str]


def words(draw: random.Random, count: int) -> list[str]:
    """Draw words; a number now and then, so that texts differ."""
    return [draw.choice(WORDS) if draw.random() < 0.9 else str(draw.randrange(1000)) for _ in range(count)]


def systems() -> list[list[str]]:
    """The two system prompts that sessions share."""
    return [words(random.Random(seed), SYSTEM_WORDS) for seed in (1, 2)]


def workload() -> list[Turn]:
    """All requests, in order of time."""
    draw = random.Random(7)
    turns = []
    for session in range(SESSIONS):
        history = list(systems()[session % 2])
        seconds, think = draw.uniform(0, STARTS_SECONDS), 0.0
        for number in range(draw.randint(1, MOST_TURNS)):
            user, answer = (words(draw, draw.randint(*size)) for size in (USER_WORDS, ANSWER_WORDS))
            service = draw.uniform(*SERVICE_SECONDS)
            prompt = [*history, *user]
            turns.append(
                Turn(
                    session,
                    number,
                    round(seconds, 3),
                    round(think, 3),
                    round(service, 3),
                    user,
                    answer,
                    prompt,
                )
            )
            history = [*prompt, *answer]
            think = draw.uniform(*THINK_SECONDS)
            seconds += service + think
    return sorted(turns, key=lambda turn: turn.seconds)


def sessions(turns: Iterable[Turn]) -> list[list[Turn]]:
    """The requests of each session, in order."""
    found: list[list[Turn]] = [[] for _ in range(SESSIONS)]
    for turn in turns:
        found[turn.session].append(turn)
    return found


class Blocks:
    """Numbers blocks of prompts: equal numbers mean equal blocks, or equal prefixes up to their end."""

    def __init__(self, size: int, *, prefixes: bool, partial: bool) -> None:
        self._size = size
        self._prefixes = prefixes
        self._partial = partial
        self._numbers: dict[tuple[str, ...], int] = {}

    def ids(self, prompt: list[str]) -> list[int]:
        """The number of each block of a prompt."""
        end = len(prompt) if self._partial else len(prompt) // self._size * self._size
        blocks = []
        for start in range(0, end, self._size):
            stop = min(start + self._size, len(prompt))
            block = tuple(prompt[0 if self._prefixes else start : stop])
            blocks.append(self._numbers.setdefault(block, len(self._numbers)))
        return blocks


def mooncake(turns: list[Turn]) -> Iterator[Row]:
    """One request a line, blocks of 512."""
    blocks = Blocks(512, prefixes=True, partial=True)
    for turn in turns:
        yield {
            "timestamp": round(turn.seconds * 1000),
            "input_length": len(turn.prompt),
            "output_length": len(turn.answer),
            "hash_ids": blocks.ids(turn.prompt),
        }


def bailian(turns: list[Turn]) -> Iterator[Row]:
    """One request a line, with the request that it continues; blocks of 16 by their content."""
    blocks = Blocks(16, prefixes=False, partial=True)
    for turn in turns:
        chat = turn.session * 100 + turn.number
        yield {
            "chat_id": chat,
            "parent_chat_id": chat - 1 if turn.number else -1,
            "timestamp": turn.seconds,
            "input_length": len(turn.prompt),
            "output_length": len(turn.answer),
            "type": "text",
            "turn": turn.number + 1,
            "hash_ids": blocks.ids(turn.prompt),
        }


def weka(turns: list[Turn]) -> Iterator[Row]:
    """One session a line, on its own clock; whole blocks of 64 by their content."""
    blocks = Blocks(64, prefixes=False, partial=False)
    for number, session in enumerate(sessions(turns)):
        requests = [
            {
                "t": round(turn.seconds - session[0].seconds, 3),
                "type": "n",
                "in": len(turn.prompt),
                "out": len(turn.answer),
                "hash_ids": blocks.ids(turn.prompt),
                "stop": "end_turn",
                "api_time": turn.service,
                "think_time": turn.think,
            }
            for turn in session
        ]
        yield {"id": f"session-{number}", "block_size": 64, "hash_id_scope": "global", "requests": requests}


def ragpulse(turns: list[Turn]) -> dict[str, list[Row]]:
    """Prompts of chunks of any length: the trace, and five tables of the chunks' lengths.

    The last words of each system prompt stand for a passage that was retrieved.
    """
    numbers = {(turn.session, turn.number): number for number, turn in enumerate(turns)}
    trace = [
        {
            "timestamp": str(turn.seconds),
            "input_length": len(turn.prompt),
            "output_length": len(turn.answer),
            "hash_ids": {
                "sys_prompt": [turn.session % 2],
                "passages_ids": [turn.session % 2],
                "history": [numbers[turn.session, earlier] for earlier in range(turn.number)],
                "web_search": [],
                "user_input": [numbers[turn.session, turn.number]],
            },
            "session_id": f"session-{turn.session}",
        }
        for turn in turns
    ]
    said = [(number, len(turn.user), len(turn.answer)) for number, turn in enumerate(turns)]
    return {
        "0_trace": trace,
        "1_sys_prompt": [{"sys_prompt_id": n, "token_length": SYSTEM_WORDS - PASSAGE_WORDS} for n in (0, 1)],
        "2_passages": [{"passage_id": n, "token_length": PASSAGE_WORDS} for n in (0, 1)],
        "3_history": [{"history_id": n, "token_length": user + answer} for n, user, answer in said],
        "4_user_input": [{"user_input_id": n, "token_length": user} for n, user, _ in said],
        "5_web_search": [{"web_search_id": 0, "token_length": PASSAGE_WORDS}],
    }


def sharegpt(turns: list[Turn]) -> Iterator[Row]:
    """Lengths of turns: one conversation a line. The system prompt is part of the first turn."""
    for number, session in enumerate(sessions(turns)):
        lengths: list[list[str | int]] = []
        for turn in session:
            asked = len(turn.user) + (0 if turn.number else SYSTEM_WORDS)
            lengths += [["human", asked, asked - 1], ["gpt", len(turn.answer), len(turn.answer) - 1]]
        yield {"id": f"made-up-{number}_0", "turns": lengths}


def dynamo(turns: list[Turn]) -> Iterator[Row]:
    """One event a line; blocks of 16 by a hash of the whole prefix."""
    for turn in turns:
        starts = range(0, len(turn.prompt), 16)
        prefixes = (" ".join(turn.prompt[: start + 16]).encode() for start in starts)
        hashes = [int.from_bytes(hashlib.sha256(prefix).digest()[:8], "big") for prefix in prefixes]
        replay = {"trace_block_size": 16, "input_length": len(turn.prompt), "input_sequence_hashes": hashes}
        request = {
            "output_tokens": len(turn.answer),
            "request_received_ms": round(turn.seconds * 1000),
            "total_time_ms": round(turn.service * 1000),
            "replay": replay,
        }
        context = {"session_id": f"session-{turn.session}"}
        yield {"event": {"event_type": "request_end", "agent_context": context, "request": request}}


def chat(turn: Turn, session: list[Turn]) -> list[Row]:
    """The messages of a request."""
    messages: list[Row] = [{"role": "system", "content": " ".join(systems()[turn.session % 2])}]
    for earlier in session[: turn.number + 1]:
        messages.append({"role": "user", "content": " ".join(earlier.user)})
        if earlier is not turn:
            messages.append({"role": "assistant", "content": " ".join(earlier.answer)})
    return messages


def messages(turns: list[Turn]) -> Iterator[Row]:
    """Chat requests of OpenAI's API with their answers, one a line."""
    by_session = sessions(turns)
    for turn in turns:
        answer = {"role": "assistant", "content": " ".join(turn.answer)}
        yield {
            "timestamp": turn.seconds,
            "session_id": f"session-{turn.session}",
            "messages": chat(turn, by_session[turn.session]),
            "response": {"choices": [{"message": answer, "finish_reason": "stop"}]},
        }


def conversations(turns: list[Turn]) -> Iterator[Row]:
    """Whole conversations, one a line."""
    for session in sessions(turns):
        last = {"role": "assistant", "content": " ".join(session[-1].answer)}
        yield {"traj": [*chat(session[-1], session), last]}


def lmcache(turns: list[Turn]) -> Iterator[Row]:
    """Prompts and answers as text, one request a line."""
    for turn in turns:
        yield {
            "timestamp": round(turn.seconds * 1e6),
            "input": " ".join(turn.prompt) + " ",
            "output": " ".join(turn.answer) + " ",
            "session_id": f"session-{turn.session}",
        }


def recording(turns: list[Turn]) -> Iterator[Row]:
    """What a server records: it, then one request a line; blocks of 16 by their prefix."""
    blocks = Blocks(16, prefixes=True, partial=True)
    yield {"recording": {"version": 1, "started": 1767268800, "block_size": 16, "salt": "made-up"}}
    for turn in turns:
        ids, whole = blocks.ids(turn.prompt), blocks.ids([*turn.prompt, *turn.answer])
        yield {
            "request": {
                "timestamp": round(turn.seconds * 1000),
                "input_length": len(turn.prompt),
                "output_length": len(turn.answer),
                "hash_ids": ids,
                "output_ids": whole[len(turn.prompt) // 16 :],
                "service_ms": round(turn.service * 1000),
                "finish_reason": "stop",
                "session": f"session-{turn.session}",
            }
        }


def few_shot() -> bytes:
    """An archive of questions after worked examples, laid out as BIG-Bench-Hard."""
    draw = random.Random(3)
    files = {}
    for task, sign in (("sums", "plus"), ("differences", "minus")):
        asked = [f"What is {draw.randrange(900)} {sign} {draw.randrange(900)}?" for _ in range(20)]
        worked = (f"Q: {question}\nA: Count it out, step by step.\n" for question in asked[:8])
        examples = [{"input": question, "target": ""} for question in asked]
        files[f"bbh/{task}.json"] = json.dumps({"examples": examples}).encode()
        files[f"cot-prompts/{task}.txt"] = f"Made-up questions.\n-----\n{''.join(worked)}".encode()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def azure(turns: list[Turn]) -> bytes:
    """Arrival times and lengths, as CSV."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for turn in turns:
        minute, second = divmod(turn.seconds, 60)
        time = f"2026-01-01 12:{int(minute):02}:{second:010.7f}"
        lines.append(f"{time},{len(turn.prompt)},{len(turn.answer)}")
    return "".join(f"{line}\n" for line in lines).encode()


def jsonl(rows: Iterable[Row]) -> bytes:
    """Rows as lines."""
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def samples() -> dict[str, bytes]:
    """The content of each file by name; a name that ends in .gz is that of its compressed form."""
    turns = workload()
    return {
        "mooncake.jsonl": jsonl(mooncake(turns)),
        "bailian.jsonl": jsonl(bailian(turns)),
        "weka.jsonl": jsonl(weka(turns)),
        **{f"ragpulse_{table}.jsonl": jsonl(rows) for table, rows in ragpulse(turns).items()},
        "sharegpt.jsonl": jsonl(sharegpt(turns)),
        "dynamo.jsonl": jsonl(dynamo(turns)),
        "messages.jsonl.gz": jsonl(messages(turns)),
        "conversations.jsonl": jsonl(conversations(turns)),
        "lmcache.jsonl.gz": jsonl(lmcache(turns)),
        "recording.jsonl": jsonl(recording(turns)),
        "few_shot.tar.gz": few_shot(),
        "azure.csv": azure(turns),
    }


def main() -> None:
    """Write the files."""
    for name, data in samples().items():
        stored = gzip.compress(data, mtime=0) if name.endswith(".gz") else data
        (FOLDER / name).write_bytes(stored)


if __name__ == "__main__":
    main()
