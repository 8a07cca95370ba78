"""The files of one recording: bounded, and whole up to the last line whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from costcache.errors import SettingsError

__all__ = ["ENDING", "Files", "FilesFullError", "make_folder"]

ENDING = ".recording.jsonl"
_KEPT = 4
"""Files among which the latest requests are spread under ``rotate``."""


class FilesFullError(Exception):
    """The files have reached their bound."""


def make_folder(folder: str) -> Path:
    """Make the folder of a recording, if it is missing.

    Raises:
        SettingsError: It cannot be made or written to.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(folder, error) from None
    return path


def _unwritable(folder: str, error: OSError) -> SettingsError:
    return SettingsError(
        f"setting 'record.folder' is {folder!r}, which cannot be written to ({error.strerror or error}): "
        "name a folder that the server may write to"
    )


class Files:
    """Appends lines to files of a folder.

    Args:
        folder: The folder; made if it is missing.
        header: First line of each file.
        most_bytes: Bytes of all files together.
        rotate: Delete the oldest file when they are full, instead of raising :class:`FilesFullError`.

    Attributes:
        path: The file that is written.

    Raises:
        SettingsError: The folder cannot be made or written to.
    """

    def __init__(self, folder: str, header: bytes, most_bytes: int, *, rotate: bool) -> None:
        self._folder = make_folder(folder)
        self._header = header
        self._rotate = rotate
        self._most = most_bytes // _KEPT if rotate else most_bytes
        self._older: list[Path] = []
        self._name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{os.urandom(3).hex()}"
        self._number = 0
        try:
            self._open()
        except OSError as error:
            raise _unwritable(folder, error) from None

    def _open(self) -> None:
        self._number += 1
        self.path = self._folder / f"{self._name}-{self._number}{ENDING}"
        # Nobody else may read it: hashes and lengths say something of what users do.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
        self._write(self._header)

    def append(self, line: bytes) -> None:
        """Append a line.

        Raises:
            FilesFullError: The files would become too large.
            OSError: The file cannot be written; it ends with the last whole line.
        """
        if self._size + len(line) > self._most:
            if not self._rotate or len(self._header) + len(line) > self._most:
                raise FilesFullError
            os.close(self._file)
            self._older.append(self.path)
            if len(self._older) >= _KEPT:
                with contextlib.suppress(FileNotFoundError):
                    self._older.pop(0).unlink()
            self._open()
        self._write(line)

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
            while written < len(line):  # the disk is nearly full: the next call says so
                written += os.write(self._file, line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._file)
