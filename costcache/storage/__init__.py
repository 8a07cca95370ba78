"""Storage backends of the disk tier, offered together as the plugin ``storage``: each keeps bytes by key."""

from __future__ import annotations

from pathlib import Path

from costcache.hookspecs import hookimpl
from costcache.storage.backend import NoStorageSettings, StorageBackend, StorageSpec
from costcache.storage.files import FileStore, FileStoreSettings
from costcache.storage.lmdb_store import LmdbStore, LmdbStoreSettings
from costcache.storage.sealed import SealedStore

__all__ = [
    "FileStore",
    "FileStoreSettings",
    "LmdbStore",
    "LmdbStoreSettings",
    "NoStorageSettings",
    "SealedStore",
    "StorageBackend",
    "StorageSpec",
    "storage_backend",
]


@hookimpl
def storage_backend() -> dict[str, StorageSpec]:
    """Offer the built-in backends."""

    def files(path: Path, capacity: int, settings: FileStoreSettings) -> StorageBackend:
        return FileStore(path, capacity, settings)

    def lmdb(path: Path, capacity: int, settings: LmdbStoreSettings) -> StorageBackend:
        return LmdbStore(path, capacity, settings)

    return {
        "file": StorageSpec(files, "One folder, one file a value; needs nothing else.", FileStoreSettings),
        "lmdb": StorageSpec(
            lmdb, "One memory-mapped file of LMDB; needs costcache[tiers].", LmdbStoreSettings
        ),
    }
