"""Decodes one JSON object a line into a struct, with errors of one clear line.

Errors name the file, the line, the field, its value and the valid values. The types of fields are the
struct's; each format describes them in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, NoReturn, TypeVar

import msgspec

from costcache.errors import TraceError

if TYPE_CHECKING:
    from costcache.sim.traces.files import Source

__all__ = [
    "MOST_SHOWN",
    "MOST_TOKENS",
    "NOT_JSON",
    "BlockId",
    "Milliseconds",
    "PieceTokens",
    "Rows",
    "Seconds",
    "Tokens",
    "fail",
    "fail_block_size",
    "note_time",
]

MOST_TOKENS = 2**40
"""More tokens than any request has; keeps every sum of a trace within 64 bits."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
# Lengths that are expanded into ids: a damaged one must not exhaust the memory.
PieceTokens = Annotated[int, msgspec.Meta(ge=0, le=2**22)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

T = TypeVar("T")

MOST_SHOWN = 1 << 20
"""Bytes of the longest line whose values an error shows: as objects they may take 20 times as much."""
_SHOWN = 80
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no JSON, or not of the struct."""


class Rows(Generic[T]):
    """Decodes lines into ``kind``.

    Args:
        kind: A msgspec struct.
        expected: A description of each field's valid values, by the field's name in the file, at any depth;
            of the items of a list, by its name and ``[]``.
    """

    def __init__(self, kind: type[T], expected: Mapping[str, str]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._expected = expected

    def read(self, source: Source) -> Iterator[tuple[int, T]]:
        """All lines of a file, with their numbers.

        Raises:
            TraceError: If a line does not match the struct; or as
                :func:`costcache.sim.traces.files.open_source` does.
        """
        label = source.label
        for number, line in source.lines():
            yield number, self.decode(label, number, line)

    def decode(self, label: str, number: int, line: bytes) -> T:
        """Decode one line.

        Raises:
            TraceError: If it does not match the struct.
        """
        try:
            return self._decode(line)
        except NOT_JSON as error:
            self._explain(label, number, line, error)

    def _explain(self, label: str, number: int, line: bytes, error: Exception) -> NoReturn:
        where = f"{label}, line {number}"
        try:
            if len(line) <= MOST_SHOWN:
                row = msgspec.json.decode(line)
            else:
                msgspec.json.decode(line, type=msgspec.Raw)
                row = _Unshown()
        except NOT_JSON:
            _not_json(label, number, line, error)
        text, _, path = str(error).partition(" - at `$")
        path = path.removesuffix("`")
        missing = _MISSING.fullmatch(text)
        if missing is not None:
            field = f"{path}.{missing[1]}".lstrip(".")
            raise TraceError(f"{where}: {field} is missing; expected {self._of(field, '')}") from error
        if not path:
            names = ", ".join(name for name in self._expected if not name.endswith("[]"))
            fail(label, number, "the line", row, f"a JSON object with the fields {names}", error)
        fail(label, number, path.lstrip("."), _value(row, path), self._of(path, text), error)

    def _of(self, path: str, text: str) -> str:
        """Valid values of a field, in the words of the format or else of the decoder."""
        names = [name for name, _ in _STEP.findall(path) if name] or [path]
        if path.endswith("]"):
            names.append(f"{names[-1]}[]")
        for name in reversed(names):
            if name in self._expected:
                return self._expected[name]
        return text.replace("`", "").removeprefix("Expected ") or "a value"


class _Unshown:
    """Stands for a value of a long line."""

    def __repr__(self) -> str:
        return "(in a line too long to show)"


def fail(
    label: str, number: int, field: str, value: object, expected: str, error: Exception | None = None
) -> NoReturn:
    """Report a wrong field of a line.

    Raises:
        TraceError: Always.
    """
    text = repr(value)
    if len(text) > _SHOWN:
        text = text[: _SHOWN - 3] + "..."
    raise TraceError(f"{label}, line {number}: {field} is {text}; expected {expected}") from error


def note_time(source: Source, number: int, timestamp: object, expected: str) -> None:
    """Note in ``source.timed`` whether a line has a time; all of a file do, or none.

    Raises:
        TraceError: The lines before say otherwise.
    """
    timed = timestamp is not None
    if source.timed is None:
        source.timed = timed
    elif source.timed != timed:
        fail(source.label, number, "timestamp", timestamp, expected)


def fail_block_size(label: str, number: int, field: str, value: int, size: int, *, asked: bool) -> NoReturn:
    """Report a line whose block size differs from the file's.

    Args:
        label: The file.
        number: The line.
        field: The field's name.
        value: Its value.
        size: The file's block size.
        asked: Whether the user gave ``size``, and not an earlier line.

    Raises:
        TraceError: Always.
    """
    fail(label, number, field, value, f"{size}, as {'asked for' if asked else 'in the lines before'}")


def _not_json(label: str, number: int, line: bytes, error: Exception) -> NoReturn:
    """Report a line that is no JSON.

    Raises:
        TraceError: Always.
    """
    start = line[:60].rstrip()
    try:
        shown = repr(start.decode())
    except UnicodeDecodeError:
        shown = repr(start)[1:]
    raise TraceError(
        f"{label}, line {number}: is not JSON ({error}); it starts with {shown}; give a file with one JSON "
        "object a line, plain, gzip or xz"
    ) from error


def _value(row: Any, path: str) -> Any:
    """The value at a path, or at the longest part of it that exists."""
    for name, index in _STEP.findall(path):
        try:
            row = row[name] if name else row[int(index)]
        except (LookupError, TypeError):
            break
    return row
