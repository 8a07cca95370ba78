"""The file store: the disk tier in one folder, one file a value."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from costcache.errors import SettingsError
from costcache.storage.backend import DurableSettings, StorageBackend

__all__ = ["FileStore", "FileStoreSettings"]

_FORMAT = "costcache file store"
_VERSION = 1
_FORMAT_FILE, _LOCK_FILE, _VALUES, _PARTIAL = "FORMAT", "LOCK", "values", "partial"
_OURS = {_FORMAT_FILE, _LOCK_FILE, _VALUES, _PARTIAL}


class FileStoreSettings(DurableSettings):
    """Settings of the file store."""


class FileStore(StorageBackend):
    """Values in files of one folder, bounded, the least recently used evicted first.

    A value is written to a file of its own under ``partial/``, flushed to the disk and renamed to its place
    under ``values/``, so a reader finds all of it or nothing, whenever the process is killed. The index is in
    memory and is read from the names and sizes of the files at the start; what was left of a write is removed
    then. One process at a time has the folder.
    """

    def __init__(self, path: Path, capacity: int, settings: FileStoreSettings | None = None) -> None:
        """Open a store, or make one.

        Args:
            path: Its folder.
            capacity: Bytes of values that it keeps at most.
            settings: Settings.

        Raises:
            SettingsError: The folder has something else in it, was written by a newer version, is in use by
                another process, or cannot be read and written.
        """
        self.path = path
        self.capacity = capacity
        self._durable = settings is None or settings.durable
        self._values, self._partial = path / _VALUES, path / _PARTIAL
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._used = 0
        self._number = 0
        self._lock = -1
        try:
            self._open()
        except OSError as error:
            self.close()
            raise SettingsError(
                f"disk tier {str(path)!r} cannot be used: {error.strerror or error}: give a folder that this "
                "process may read and write"
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        foreign = sorted(entry.name for entry in os.scandir(path) if entry.name not in _OURS)
        format_file = path / _FORMAT_FILE
        if foreign and not format_file.exists():
            raise SettingsError(
                f"disk tier {str(path)!r} has {foreign[0]!r} in it, which is not of a file store: give an "
                "empty folder, or a new one"
            )
        self._lock = _locked(path / _LOCK_FILE)
        if format_file.exists():
            _check_format(format_file)
        else:
            self._write(format_file, json.dumps({"format": _FORMAT, "version": _VERSION}).encode())
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(exist_ok=True)
        self._values.mkdir(exist_ok=True)
        found: list[tuple[int, bytes, int]] = []
        for folder in os.scandir(self._values):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder.path):
                with contextlib.suppress(ValueError, FileNotFoundError):
                    facts = entry.stat()
                    found.append((facts.st_mtime_ns, bytes.fromhex(entry.name), facts.st_size))
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._used += size

    def get(self, key: bytes) -> bytes | None:
        """See :class:`StorageBackend`."""
        if key not in self._sizes:
            return None
        try:
            value = self._file(key).read_bytes()
        except FileNotFoundError:
            self._forget(key)
            return None
        self._sizes.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> bool:
        """See :class:`StorageBackend`; evicts what was not used for longest if there is no room."""
        size = len(value)
        if size > self.capacity:
            return False
        before = self._sizes.get(key, 0)
        while self._used - before + size > self.capacity:
            oldest = next(iter(self._sizes))
            if oldest == key:
                before = 0
            self.delete(oldest)
        target = self._file(key)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            if self._durable:
                _flush_folder(self._values)
        self._write(target, value)
        self._forget(key)
        self._sizes[key] = size
        self._used += size
        return True

    def delete(self, key: bytes) -> None:
        """See :class:`StorageBackend`."""
        if key in self._sizes:
            with contextlib.suppress(FileNotFoundError):
                self._file(key).unlink()
            self._forget(key)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        """See :class:`StorageBackend`."""
        yield from list(self._sizes.items())

    def close(self) -> None:
        """See :class:`StorageBackend`."""
        if self._lock >= 0:
            os.close(self._lock)  # releases the lock
            self._lock = -1

    @property
    def used(self) -> int:
        """Bytes of the values that are kept."""
        return self._used

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self._values / name[:2] / name

    def _forget(self, key: bytes) -> None:
        self._used -= self._sizes.pop(key, 0)

    def _write(self, target: Path, value: bytes) -> None:
        """Write a file whole or not at all."""
        self._partial.mkdir(exist_ok=True)
        self._number += 1
        partial = self._partial / str(self._number)
        try:
            with partial.open("wb") as stream:
                stream.write(value)
                stream.flush()
                if self._durable:
                    os.fsync(stream.fileno())
            partial.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        if self._durable:
            _flush_folder(target.parent)


def _locked(path: Path) -> int:
    """Lock a file for this process; the lock ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody checks
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    opened = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(opened)
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise
        raise SettingsError(
            f"disk tier {str(path.parent)!r} is in use by another process: give each process, and each rank, "
            "a "
            "folder of its own"
        ) from None
    return opened


def _check_format(path: Path) -> None:
    try:
        data = json.loads(path.read_bytes())
        found, version = data["format"], data["version"]
    except (ValueError, KeyError, TypeError):
        found, version = None, 0
    if found != _FORMAT or not isinstance(version, int):
        raise SettingsError(
            f"disk tier {str(path.parent)!r} is no file store: its {_FORMAT_FILE} does not say "
            f"{_FORMAT!r}: give an empty folder, or a new one"
        )
    if version != _VERSION:
        raise SettingsError(
            f"disk tier {str(path.parent)!r} has format version {version}, and this costcache reads "
            f"{_VERSION}: empty the folder, or use the version of costcache that wrote it"
        )


def _flush_folder(path: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    if os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
