"""Reads and writes the bytes of trace files: plain, gzip or xz, and the standard streams."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from costcache.errors import TraceError
from costcache.files import open_to_read, open_whole, probe
from costcache.sim.traces.limits import Limits

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "Progress",
    "Source",
    "check_output",
    "check_suffix",
    "open_output",
    "open_source",
    "shown",
    "trace_name",
]

Progress = Callable[[int, int | None], None]
"""Called now and then with the bytes read so far, as stored, and their total (None if unknown)."""

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_UNREAD = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
"""First bytes of other kinds of compression: their names, and the programs that unpack them."""
_WRITTEN = (".gz", ".xz")
_UTF8_MARK = b"\xef\xbb\xbf"
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_BUFFER = 1 << 20
_LINES_PER_REPORT = 256
_MOST_BLANK = 1 << 20
"""Blank lines in a row: more are no trace, but a device or a program that never ends."""


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


class _Counted(io.RawIOBase):
    """A stream that counts the bytes read from it.

    Attributes:
        taken: Bytes read so far.
    """

    def __init__(self, stream: IO[bytes], check: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.taken = 0
        self._read: Callable[[int], bytes | None] = getattr(stream, "read1", stream.read)
        self._check = check

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        data = self._read(len(view))
        if data is None:  # a pipe that somebody told not to wait
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        view[: len(data)] = data
        self.taken += len(data)
        if self._check is not None:
            self._check(self.taken)
        return len(data)


class Source:
    """An open trace file: its names, and its decompressed bytes or lines.

    Attributes:
        label: Name of the file for errors.
        name: Name of the trace for reports.
        path: Path of the file; None for standard input.
        stream: The decompressed bytes.
        number: Lines read so far.
        limits: Bounds of the file.
        timed: Whether requests have times on one clock; None until a reader whose format may lack them says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        unpacked: _Counted,
        report: Callable[[], None],
        limits: Limits,
    ) -> None:
        self.label = shown(path)
        self.name = trace_name(path)
        self.path = None if str(path) == "-" else Path(path)
        self.stream = io.BufferedReader(unpacked, _BUFFER)
        self.number = 0
        self.limits = limits
        self.timed: bool | None = None
        self._unpacked = unpacked
        self._report = report
        self._first: tuple[int, bytes] | None = None
        self._rest = self._lines()

    def starts(self) -> bytes:
        """The first bytes, or all of them, without consuming any."""
        return self.stream.peek(_BUFFER)

    def first(self) -> bytes:
        """The first line that is not blank, empty if there is none; it is not consumed."""
        if self._first is None:
            self._first = next(self._rest, None)
        return self._first[1] if self._first is not None else b""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers, from 1, and lines; blank lines are counted and skipped.

        Of a file that is one JSON array, the items, as if each were a line.

        Raises:
            TraceError: If a line is too long, or too many are blank.
        """
        if self._first is not None:
            yield self._first
            self._first = None
        yield from self._rest

    def allow(self, tokens: int) -> None:
        """Check, before they are unfolded, that the file justifies so many prompt tokens in all.

        Raises:
            TraceError: If it does not.
        """
        self.limits.check_tokens(self.label, self._unpacked.taken, tokens)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        most = self.limits.line
        blank = 0
        if _ARRAY.match(self.starts()):
            document = self.stream.read(most + 1)
            if len(document) > most:
                raise TraceError(
                    f"{self.label}: is a JSON array longer than {most:,} bytes; give a file with one JSON "
                    "object a line, or allow more with --max-line"
                )
            yield from self._items(document)
            return
        for line in iter(partial(self.stream.readline, most + 1), b""):
            self.number += 1
            if len(line) > most:
                raise TraceError(
                    f"{self.label}, line {self.number}: is longer than {most:,} bytes; give a file with one "
                    "JSON object a line, or allow more with --max-line"
                )
            if self.number == 1:
                line = line.removeprefix(_UTF8_MARK)  # noqa: PLW2901 # the mark is no part of the line
            if self.number % _LINES_PER_REPORT == 0:
                self._report()
            if line.isspace():
                blank += 1
                if blank > _MOST_BLANK:
                    raise TraceError(
                        f"{self.label}, line {self.number}: is blank, as the {_MOST_BLANK:,} lines before; "
                        "give a file with one JSON object a line"
                    )
                continue
            blank = 0
            yield self.number, line
        self._report()

    def _items(self, document: bytes) -> Iterator[tuple[int, bytes]]:
        """The items of an array, one by one: as objects, all of them would take many times its bytes."""
        self.label += " (an array, whose items are the lines)"
        at = self.number = 0
        try:
            text = document.decode("utf-8-sig")
            at = text.index("[") + 1
            mark = ","
            while mark == ",":
                self.number += 1
                start = _BLANKS.match(text, at).end()  # type: ignore[union-attr] # matches nothing, too
                _, at = _DECODER.raw_decode(text, start)
                yield self.number, text[start:at].encode()
                start = _BLANKS.match(text, at).end()  # type: ignore[union-attr] # as above
                mark, at = text[start : start + 1], start + 1
            if mark != "]" or text[at:].strip():
                raise ValueError("no ']' and end of the file after the item")
        except (ValueError, RecursionError) as error:
            raise TraceError(
                f"{self.label}, line {self.number}: is not JSON ({error}); the array is cut off or damaged"
            ) from error
        self._report()


@contextlib.contextmanager
def open_source(
    path: str | os.PathLike[str], progress: Progress | None = None, limits: Limits | None = None
) -> Iterator[Source]:
    """Open a trace file.

    Its compression is detected from its first bytes, not from its name; ``-`` is standard input, compressed
    or not.

    Args:
        path: The file.
        progress: Called now and then with bytes read and total bytes (None if unknown).
        limits: Bounds of the file; the default ones if None.

    Raises:
        TraceError: If the file cannot be opened or read, is truncated, is compressed in an unknown way, or
            exceeds its limits; also while it is open.
    """
    label = shown(path)
    bounds = Limits() if limits is None else limits
    source: Source | None = None
    try:
        with contextlib.ExitStack() as stack:
            if str(path) == "-":
                raw: IO[bytes] = sys.stdin.buffer  # not closed here
            else:
                raw = stack.enter_context(io.FileIO(open_to_read(path), "rb"))
            total = _size(raw)
            taken = _Counted(raw)
            # A buffer of our own, so that any binary stream can be peeked at.
            stored = io.BufferedReader(taken, _BUFFER)

            def report() -> None:
                if progress is not None:
                    progress(taken.taken, total)

            def check(unpacked: int) -> None:
                bounds.check_bytes(label, taken.taken, unpacked)
                if total is None:
                    bounds.check_stream(label, unpacked)

            source = Source(path, _Counted(_decompressed(stored, label), check), report, bounds)
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


def _size(stream: IO[bytes]) -> int | None:
    """Bytes of a regular file; None for what need not have an end."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:  # a stream in memory, which stands for standard input
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _decompressed(stored: io.BufferedReader[_Counted], label: str) -> IO[bytes]:
    start = stored.peek(len(_XZ))
    packed = cast("IO[bytes]", stored)
    if start.startswith(_GZIP):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=packed, mode="rb"))
    if start.startswith(_XZ):
        return lzma.LZMAFile(packed, "rb")
    for mark, (name, unpack) in _UNREAD.items():
        if start.startswith(mark):
            raise TraceError(
                f"{label}: {name} is not read here; unpack it, or give - as file and pipe `{unpack}` in"
            )
    return packed


@contextlib.contextmanager
def open_output(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing; it appears under its name only once it is complete.

    The ending of the name that is given, not of a link's target, decides the compression (``.gz``, ``.xz``).
    Equal bytes written give equal files, since headers hold no time and no name. ``-`` is standard output; a
    pipe or device is written to directly.

    Raises:
        TraceError: If the file cannot be written.
    """
    with _writing(shown(path, "standard output")):
        if str(path) == "-":
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        suffix = check_suffix(path)
        with open_whole(path) as stored, _compressed(stored, suffix) as stream:
            yield stream


def check_output(path: str | os.PathLike[str]) -> None:
    """Check, before the work, that :func:`open_output` can write a file; ``-`` is standard output.

    Raises:
        TraceError: If it cannot.
    """
    if str(path) == "-":
        return
    with _writing(shown(path, "standard output")):
        check_suffix(path)
        probe(path)


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The ending of a name if it is one of compression, in lower case, else an empty text.

    Raises:
        TraceError: If it is of a compression that is not written here.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (".zst", ".bz2", ".zip", ".lz4", ".7z"):
        raise TraceError(
            f"{shown(path)}: {suffix} is not written here; name it .gz, .xz, or without compression"
        )
    return suffix if suffix in _WRITTEN else ""


@contextlib.contextmanager
def _writing(label: str) -> Iterator[None]:
    """Word the errors of writing a file."""
    try:
        yield
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
