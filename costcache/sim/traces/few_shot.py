"""Few-shot question sets in a tar archive: many questions, each after the same examples.

- BIG-Bench-Hard (github.com/suzgunmirac/BIG-Bench-Hard): ``cot-prompts/TASK.txt`` before each question
  of ``bbh/TASK.json``. A prompt's first lines, up to a line of dashes, are a notice and skipped.
- GSM8K (github.com/openai/grade-school-math): the first 8 questions of ``train.jsonl`` with their
  answers before each question of ``test.jsonl``.

Requests are in the order of the files. They have no times, and each is a session of its own.
"""

from __future__ import annotations

import tarfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from costcache.errors import TraceError
from costcache.sim.traces.rows import Rows
from costcache.sim.traces.tokens import TextColumns

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["read_few_shot"]

_SHOTS = 8
_MOST_BYTES = 1 << 28
_DASHES = "-----\n"


class _Solved(msgspec.Struct):
    question: str
    answer: str


class _Example(msgspec.Struct):
    input: str


class _Task(msgspec.Struct):
    examples: list[_Example]


_SOLVED = Rows(_Solved, {"question": "the question, text", "answer": "its answer, text"})
_TASK = Rows(_Task, {"input": "the question, text", "examples": "a list of objects with an input"})


def read_few_shot(source: Source, *, block_size: int | None = None, tokenizer: str | None = None) -> Trace:
    """Read an archive.

    Args:
        source: The archive.
        block_size: Tokens per block id; 1 by default.
        tokenizer: Name or path of a tokenizer.

    Raises:
        TraceError: If the archive is damaged, is neither of the two sets, or a file in it is malformed.
    """
    columns = TextColumns(source, tokenizer, block_size)
    files = _files(source)
    train, test = files.get("data/train.jsonl"), files.get("data/test.jsonl")
    tasks = {name: data for name, data in files.items() if name.startswith("bbh/") and name.endswith(".json")}
    if train is not None and test is not None:
        shots = [_worked(row) for row in _solved(source, "train.jsonl", train)[:_SHOTS]]
        for row in _solved(source, "test.jsonl", test):
            prompt = "".join(shots) + f"Question: {row.question}\nAnswer:"
            columns.add(0.0, [prompt], [f" {row.answer}"])
    elif tasks:
        for name, data in tasks.items():
            prompt = _prompt(source, files, PurePosixPath(name).stem)
            for example in _TASK.decode(f"{source.label}: {name}", 1, data).examples:
                question = f"{prompt}\n\nQ: {example.input}\nA: Let's think step by step."
                columns.add(0.0, [question], [], output_tokens=0)
    else:
        raise TraceError(
            f"{source.label}: is an archive of neither GSM8K (train.jsonl and test.jsonl in a folder data) "
            f"nor BIG-Bench-Hard (folders bbh and cot-prompts)"
        )
    return columns.trace()


def _files(source: Source) -> dict[str, bytes]:
    """The archive's files by folder and name."""
    files: dict[str, bytes] = {}
    size = 0
    try:
        with tarfile.open(fileobj=source.stream, mode="r|") as archive:
            for member in archive:
                size += member.size
                if size > _MOST_BYTES:
                    raise TraceError(
                        f"{source.label}: holds more than {_MOST_BYTES:,} B; expected a question set"
                    )
                stored = archive.extractfile(member) if member.isfile() else None
                if stored is not None:
                    files["/".join(PurePosixPath(member.name).parts[-2:])] = stored.read()
    except tarfile.TarError as error:
        raise TraceError(f"{source.label}: the archive is damaged ({error}); fetch it again") from error
    return files


def _solved(source: Source, name: str, data: bytes) -> list[_Solved]:
    label = f"{source.label}: {name}"
    lines = enumerate(data.splitlines(), 1)
    return [_SOLVED.decode(label, number, line) for number, line in lines if line and not line.isspace()]


def _worked(row: _Solved) -> str:
    return f"Question: {row.question}\nAnswer: {row.answer}\n\n"


def _prompt(source: Source, files: dict[str, bytes], task: str) -> str:
    name = f"cot-prompts/{task}.txt"
    data = files.get(name)
    if data is None:
        raise TraceError(f"{source.label}: {name} is missing; it is the prompt before bbh/{task}.json")
    text = data.decode("utf-8", "replace")
    _, dashes, rest = text.partition(_DASHES)
    return (rest if dashes else text).strip()
