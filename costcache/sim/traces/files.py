"""Reads and writes the bytes of trace files: plain, gzip or xz, and the standard streams."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias, cast

from costcache.errors import TraceError
from costcache.files import open_whole

__all__ = ["Progress", "Source", "open_output", "open_source", "read_lines", "shown", "trace_name"]

Progress = Callable[[int, int | None], None]
"""Called now and then with the bytes read so far, as stored, and their total (None if unknown)."""

_Stored: TypeAlias = "io.BufferedReader[io.RawIOBase]"

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_UTF8_MARK = b"\xef\xbb\xbf"
_BUFFER = 1 << 20
_LINES_PER_REPORT = 256


def shown(path: str | os.PathLike[str], stream: str = "standard input") -> str:
    """Name of the file for an error."""
    return stream if str(path) == "-" else str(path) or "''"


def trace_name(path: str | os.PathLike[str]) -> str:
    """The file's name without folder, compression, ``.jsonl`` and ``.tar``; ``stdin`` for ``-``."""
    name = Path(path).name
    if name == "-":
        return "stdin"
    for suffix in (".gz", ".xz", ".jsonl", ".json", ".tar"):
        name = name.removesuffix(suffix)
    return name or Path(path).name


class Source:
    """An open trace file: its names, and its decompressed bytes or lines.

    Attributes:
        label: Name of the file for errors.
        name: Name of the trace for reports.
        path: Path of the file; None for standard input.
        stream: The decompressed bytes.
        number: Lines read so far.
    """

    def __init__(
        self, path: str | os.PathLike[str], stream: io.BufferedIOBase, report: Callable[[], None]
    ) -> None:
        self.label = shown(path)
        self.name = trace_name(path)
        self.path = None if str(path) == "-" else Path(path)
        self.stream = stream
        self.number = 0
        self._report = report
        self._first: tuple[int, bytes] | None = None
        self._rest = self._lines()

    def starts(self) -> bytes:
        """The first bytes, or all of them, without consuming any."""
        return cast("io.BufferedReader[io.RawIOBase]", self.stream).peek(_BUFFER)

    def first(self) -> bytes:
        """The first line that is not blank, empty if there is none; it is not consumed."""
        if self._first is None:
            self._first = next(self._rest, None)
        return self._first[1] if self._first is not None else b""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers, from 1, and lines; blank lines are counted and skipped."""
        if self._first is not None:
            yield self._first
            self._first = None
        yield from self._rest

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        for line in self.stream:
            self.number += 1
            if self.number == 1:
                line = line.removeprefix(_UTF8_MARK)  # noqa: PLW2901 # the mark is no part of the line
            if self.number % _LINES_PER_REPORT == 0:
                self._report()
            if not line.isspace():
                yield self.number, line
        self._report()


@contextlib.contextmanager
def open_source(path: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[Source]:
    """Open a trace file.

    Its compression is detected from its first bytes, not from its name; ``-`` is standard input, compressed
    or not.

    Raises:
        TraceError: If the file cannot be opened or read, is truncated, or is compressed in an unknown way;
            also while it is open.
    """
    label = shown(path)
    source: Source | None = None
    try:
        with contextlib.ExitStack() as stack:
            if str(path) == "-":
                # A buffer of our own, so that any binary stream can be peeked at; it must not close
                # standard input when it is collected.
                stored: _Stored = io.BufferedReader(cast("io.RawIOBase", sys.stdin.buffer), _BUFFER)
                stack.callback(stored.detach)
                total = None
            else:
                stored = stack.enter_context(io.BufferedReader(io.FileIO(path, "rb"), _BUFFER))
                status = os.fstat(stored.fileno())
                total = status.st_size if stat.S_ISREG(status.st_mode) else None

            def report() -> None:
                if progress is not None:
                    progress(_position(stored), total)

            source = Source(path, _decompressed(stored, label), report)
            yield source
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        number = source.number if source is not None else 0
        raise TraceError(
            f"{label}: the compressed data is cut off or damaged after line {number} ({error}); "
            f"fetch the file again"
        ) from error
    except IsADirectoryError as error:
        raise TraceError(f"{label}: cannot be read, being a folder; give a file in it") from error
    except OSError as error:
        raise TraceError(f"{label}: cannot be read ({error.strerror or error}); check the path") from error


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Line numbers, from 1, and lines of a file; blank lines are counted and skipped.

    Raises:
        TraceError: As :func:`open_source` does.
    """
    with open_source(path) as source:
        yield from source.lines()


def _decompressed(stored: _Stored, label: str) -> io.BufferedIOBase:
    start = stored.peek(len(_XZ))
    if start.startswith(_GZIP):
        return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=stored, mode="rb")), _BUFFER)
    if start.startswith(_XZ):
        return io.BufferedReader(cast("io.RawIOBase", lzma.LZMAFile(stored, "rb")), _BUFFER)
    if start.startswith(_ZSTD):
        raise TraceError(
            f"{label}: zstd is not read here; unpack it, or give - as file and pipe `zstd -dc` in"
        )
    return stored


def _position(stored: _Stored) -> int:
    try:
        return stored.tell()
    except OSError:  # A pipe has no position.
        return 0


@contextlib.contextmanager
def open_output(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing; it appears under its name only once it is complete.

    The name's ending decides the compression (``.gz``, ``.xz``). Equal bytes written give equal files, since
    headers hold no time and no name. ``-`` is standard output; a pipe or device is written to directly.

    Raises:
        TraceError: If the file cannot be written.
    """
    label = shown(path, "standard output")
    try:
        if str(path) == "-":
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        suffix = Path(os.path.realpath(path)).suffix
        with open_whole(path) as stored, _compressed(stored, suffix) as stream:
            yield stream
    except BrokenPipeError:
        raise  # the reader closed the pipe: no error of the file
    except IsADirectoryError as error:
        raise TraceError(f"{label}: cannot be written, being a folder; name a file in it") from error
    except OSError as error:
        raise TraceError(f"{label}: cannot be written ({error.strerror or error}); check the path") from error


@contextlib.contextmanager
def _compressed(stored: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    if suffix == ".gz":
        with gzip.GzipFile("", "wb", compresslevel=4, fileobj=stored, mtime=0) as packed:
            yield cast("IO[bytes]", packed)
    elif suffix == ".xz":
        with lzma.LZMAFile(stored, "wb", preset=1) as xz:
            yield xz
    else:
        yield stored
