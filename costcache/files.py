"""Files that are written whole or not at all, and files that are read without waiting for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["open_to_read", "open_whole", "probe", "read_whole"]

_PATIENCE = 5.0
"""Seconds to wait for the program at the other end of a named pipe."""
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # Windows has neither it nor named pipes of this kind
_MOST_BYTES = 64 << 20


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Open a file for reading, and return its descriptor.

    Raises:
        OSError: The file cannot be opened, or is a named pipe that no program writes to.
    """
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | _NONBLOCK)
    try:
        if stat.S_ISFIFO(os.fstat(opened).st_mode):
            _await_writer(opened)
        if _NONBLOCK:
            os.set_blocking(opened, True)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _await_writer(pipe: int) -> None:
    """Return once there is something to read, or a writer that has not written yet."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    if waiting.poll(_PATIENCE * 1000):  # data, or a writer that has closed it
        return
    # Without a writer a pipe is at its end; with one there is nothing to read yet.
    with contextlib.suppress(BlockingIOError):
        os.read(pipe, 1)
        raise OSError(errno.ENXIO, "no program writes to this pipe")


def read_whole(path: str | os.PathLike[str], most: int = _MOST_BYTES) -> bytes:
    """Read a file that has to be small.

    Raises:
        OSError: The file cannot be read, or has more than ``most`` bytes, as a device without an end.
    """
    with open(open_to_read(path), "rb") as stream:  # a descriptor
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes")
    return content


@contextlib.contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing so that readers find the old content or the new, never a part.

    A symbolic link stays, and its target is written. A device or a pipe is written to directly.

    Raises:
        OSError: The file cannot be written; the old one is unchanged. Names the file, not the temporary one.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(_open_special(target), "wb") as stream:  # a descriptor
            yield stream
        return
    partial = _partial(target)
    try:
        with partial.open("xb") as stream:
            yield stream
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename == str(partial):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def probe(path: str | os.PathLike[str]) -> None:
    """Check, without changing anything, that a file can be written.

    Raises:
        OSError: It cannot.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    partial = _partial(target)
    try:
        partial.open("xb").close()
        partial.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _partial(target: Path) -> Path:
    # A name of its own length: the target's may already be as long as a name can be.
    return target.with_name(f".costcache-{os.urandom(8).hex()}")


def _open_special(target: Path) -> int:
    """Open a device, or a named pipe once a program reads from it."""
    flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
    if not target.is_fifo():
        return os.open(target, flags)
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            opened = os.open(target, flags | _NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, "no program reads from this pipe", str(target)) from error
            time.sleep(0.05)
        else:
            os.set_blocking(opened, True)
            return opened
