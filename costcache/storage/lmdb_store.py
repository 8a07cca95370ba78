"""The disk tier in LMDB: one memory-mapped file, copy on write."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from costcache.errors import SettingsError
from costcache.storage.backend import DurableSettings, StorageBackend

__all__ = ["LmdbStore", "LmdbStoreSettings"]

logger = logging.getLogger("costcache")

_FILE = "data.mdb"
_META = b"costcache:format"
_FORMAT = b"costcache lmdb store 1"
_SPARE = 1.25
"""Bytes of the file per byte of values: LMDB writes a copy before it frees, and needs room in one piece."""
_LEAST = 1 << 20
"""Bytes of the smallest file."""
_TRIES = 8


class LmdbStoreSettings(DurableSettings):
    """Settings of the LMDB store."""


class LmdbStore(StorageBackend):
    """Values in one file of LMDB, bounded, the least recently used evicted first.

    LMDB never overwrites a page that a committed transaction uses, so a kill at any moment leaves the last
    committed values. Values take up to ``capacity`` bytes, and the file a quarter more. LMDB trusts its own
    pages: a file that was cut short is found out when it is opened, but nothing else may write to it.
    """

    def __init__(self, path: Path, capacity: int, settings: LmdbStoreSettings | None = None) -> None:
        """Open a store, or make one.

        Args:
            path: Its folder.
            capacity: Bytes of values that it keeps at most.
            settings: Settings.

        Raises:
            SettingsError: lmdb is not installed; or the folder has something else in it, was written by a
                newer version, or cannot be read and written.
        """
        try:
            import lmdb
        except ImportError as error:
            raise SettingsError(
                "storage backend 'lmdb' needs the package lmdb: pip install 'costcache[tiers]', or take the "
                "backend 'file'"
            ) from error
        self._lmdb: Any = lmdb
        self._most = capacity
        self._used = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        durable = settings is None or settings.durable
        fresh = not (path / _FILE).exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if fresh and any(path.iterdir()):
                raise SettingsError(
                    f"disk tier {str(path)!r} has files in it that are not of an LMDB store: give an empty "
                    "folder, or a new one"
                )
            self._env: Any = self._opened(path, durable)
            if self._is_cut_short(path):
                logger.warning(
                    "storage backend 'lmdb': %s was cut short: it begins anew, and its prefixes are missed",
                    path / _FILE,
                )
                self._env.close()
                (path / _FILE).unlink()
                self._env = self._opened(path, durable)
        except (lmdb.Error, OSError) as error:
            raise SettingsError(
                f"disk tier {str(path)!r} cannot be opened as an LMDB store: {error}: give a folder that "
                "this process may read and write, and that nothing else is in"
            ) from error
        try:
            self._index(path)
        except BaseException:
            self._env.close()
            raise

    def _opened(self, path: Path, durable: bool) -> Any:
        return self._lmdb.open(
            str(path),
            map_size=max(int(self._most * _SPARE), _LEAST),
            readahead=False,
            sync=durable,
            metasync=durable,
        )

    def _is_cut_short(self, path: Path) -> bool:
        """Whether the file ends before its last page: to read there would kill the process."""
        pages: int = self._env.info()["last_pgno"] + 1
        size: int = self._env.stat()["psize"]
        return (path / _FILE).stat().st_size < pages * size

    def _index(self, path: Path) -> None:
        with self._env.begin(write=True) as transaction:
            found = transaction.get(_META)
            if found is None and transaction.stat()["entries"]:
                raise SettingsError(
                    f"disk tier {str(path)!r} is an LMDB store of another program: give an empty folder, or "
                    "a new one"
                )
            if found is None:
                transaction.put(_META, _FORMAT)
            elif found != _FORMAT:
                raise SettingsError(
                    f"disk tier {str(path)!r} has the format {found.decode(errors='replace')!r}, and this "
                    f"costcache reads {_FORMAT.decode()!r}: empty the folder, or use the version of "
                    "costcache that wrote it"
                )
        with self._env.begin(buffers=True) as transaction, transaction.cursor() as cursor:
            for key, value in cursor:  # a view: no value is read
                if bytes(key) != _META:
                    self._sizes[bytes(key)] = len(value)
                    self._used += len(value)

    def get(self, key: bytes) -> bytes | None:
        """See :class:`StorageBackend`."""
        if key not in self._sizes:
            return None
        with self._reading(), self._env.begin() as transaction:
            value: bytes | None = transaction.get(key)
        if value is None:
            self._forget(key)
        else:
            self._sizes.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> bool:
        """See :class:`StorageBackend`; evicts what was not used for longest if there is no room."""
        size = len(value)
        if size > self._most:
            return False
        self._evict(self._used - self._sizes.get(key, 0) + size - self._most)
        for _ in range(_TRIES):
            try:
                with self._reading(), self._env.begin(write=True) as transaction:
                    transaction.put(key, value)
            except self._lmdb.MapFullError:  # no room in one piece
                if not self._sizes:
                    return False
                self._evict(max(size, self._most // 16))
                continue
            self._forget(key)
            self._sizes[key] = size
            self._used += size
            return True
        return False

    def delete(self, key: bytes) -> None:
        """See :class:`StorageBackend`."""
        if key in self._sizes:
            with self._reading(), self._env.begin(write=True) as transaction:
                transaction.delete(key)
            self._forget(key)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        """See :class:`StorageBackend`; after opening, in the order of the keys."""
        yield from list(self._sizes.items())

    def close(self) -> None:
        """See :class:`StorageBackend`."""
        self._env.close()

    @property
    def used(self) -> int:
        """Bytes of the values that are kept."""
        return self._used

    def _evict(self, missing: int) -> None:
        """Delete the oldest values, of ``missing`` bytes or more, in one transaction."""
        gone: list[bytes] = []
        for key, size in self._sizes.items():
            if missing <= 0:
                break
            gone.append(key)
            missing -= size
        if gone:
            with self._reading(), self._env.begin(write=True) as transaction:
                for key in gone:
                    transaction.delete(key)
            for key in gone:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._used -= self._sizes.pop(key, 0)

    def _reading(self) -> _Translated:
        return _Translated(self._lmdb)


class _Translated:
    """Turns LMDB's errors, but for a full map, into those that a tier expects."""

    def __init__(self, lmdb: Any) -> None:
        self._lmdb = lmdb

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._lmdb.Error) and not isinstance(error, self._lmdb.MapFullError):
            raise OSError(str(error)) from error
