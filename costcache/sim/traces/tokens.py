"""Tokenizers, for traces of text.

A real tokenizer is read from a ``tokenizer.json`` with the package ``tokenizers`` (the extra
``tokenizer``); nothing is downloaded. Two approximate ones are built in and need no package: they find shared
prefixes as well as any, but count a different number of tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from costcache.errors import TraceError
from costcache.sim.traces.columns import Columns

if TYPE_CHECKING:
    from costcache.sim.trace import Trace
    from costcache.sim.traces.files import Source

__all__ = ["BUILT_IN", "Encode", "TextColumns", "load_tokenizer"]

Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""

BUILT_IN = {
    "bytes": "one token per byte of UTF-8",
    "words": "words with the blank before them, groups of 3 digits, runs of signs or blanks; no vocabulary",
}
"""Tokenizers that need no package and no file."""

# The pre-tokenization of byte-pair encodings; their merges would need a vocabulary.
_WORD = re.compile(r" ?[^\W\d_]+|\d{1,3}| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s")
_CACHED_TEXTS = 4096


def load_tokenizer(name: str | None, label: str) -> Encode:
    """A tokenizer by name or path.

    Args:
        name: ``words``, ``bytes``, a ``tokenizer.json``, or the folder of one.
        label: Name of the trace file, for the error.

    Raises:
        TraceError: If there is no tokenizer of this name or path, it cannot be read, or the extra is missing.
    """
    ways = f"the path of a tokenizer.json or its folder, or {' or '.join(BUILT_IN)} ({BUILT_IN['words']})"
    if name is None:
        raise TraceError(f"{label}: holds text; give a tokenizer: {ways}")
    if name == "bytes":
        return lambda text: text.encode("utf-8", "replace")
    if name == "words":
        numbers: dict[str, int] = {}
        return lambda text: [numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text)]
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        raise TraceError(f"tokenizer is {name!r}, which is no file; give {ways}")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TraceError(
            f"tokenizer {name!r} needs the package tokenizers: pip install 'costcache[tokenizer]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower class
        raise TraceError(f"{path}: is no tokenizer.json that can be read ({error})") from error

    def encode(text: str) -> Sequence[int]:
        clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no text
        ids: list[int] = tokenizer.encode(clean, add_special_tokens=False).ids
        return ids

    return encode


class TextColumns:
    """Builds the columns of a trace of text.

    With blocks of one token, block ids are token ids, which is exact at every page size. With larger blocks,
    which take less memory, an id stands for the block and all before it.

    Args:
        source: The file.
        tokenizer: Name or path of a tokenizer.
        block_size: Tokens per block id; 1 by default.

    Raises:
        TraceError: If the tokenizer cannot be loaded.
    """

    def __init__(self, source: Source, tokenizer: str | None, block_size: int | None) -> None:
        self.columns = Columns(source)
        self._encode = lru_cache(_CACHED_TEXTS)(load_tokenizer(tokenizer, source.label))
        self._size = block_size or 1
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(
        self,
        seconds: float,
        prompt: Sequence[str],
        output: Sequence[str],
        *,
        output_tokens: int | None = None,
        session: object = None,
        finish: str | None = None,
        priority: int = 0,
        think: float | None = None,
    ) -> None:
        """Add a request.

        Args:
            seconds: Arrival time, on any clock.
            prompt: Its text in pieces, each of which is encoded on its own.
            output: The answer's text, likewise.
            output_tokens: Tokens of the answer, if its text is unknown.
            session: Key of its session; None if it has none.
            finish: The stop reason.
            priority: Higher is kept longer.
            think: Seconds since the answer of its predecessor; None if unknown.
        """
        tokens = list(itertools.chain.from_iterable(map(self._encode, prompt)))
        answer = list(itertools.chain.from_iterable(map(self._encode, output)))
        columns = self.columns
        columns.allow(len(tokens))
        columns.ids.extend(self._blocks(tokens))
        if output_tokens is None:
            output_tokens = len(answer)
        if answer and len(answer) == output_tokens:
            columns.output_ids.extend(self._blocks(tokens + answer)[len(tokens) // self._size :])
        else:
            self.columns.no_outputs()
        columns.add(
            seconds,
            len(tokens),
            output_tokens,
            session=session,
            finish=finish,
            priority=priority,
            think=think,
        )

    def trace(self, *, from_zero: bool = False) -> Trace:
        """The requests sorted by time.

        Raises:
            TraceError: If there is no request.
        """
        return self.columns.trace(self._size, from_zero=from_zero)

    def _blocks(self, tokens: list[int]) -> list[int]:
        if self._size == 1:
            return tokens
        ids: list[int] = []
        before = -1
        for start in range(0, len(tokens), self._size):
            block = (before, tuple(tokens[start : start + self._size]))
            before = self._names.setdefault(block, len(self._names))
            ids.append(before)
        return ids
