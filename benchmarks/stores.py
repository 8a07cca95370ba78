"""Embedded stores for the disk tier, compared: ``python benchmarks/stores.py``.

Each store takes values of one page's KV, is bounded, and evicts the oldest itself. Measured for each size of
a
value: puts that survive a crash of the machine, gets in random order, a churn of three times the bound (what
the files then take on disk), and the time to open a full store and list its keys. Reads come from the page
cache where it is large enough, as they do after a restart of a server. Needs ``pip install
'costcache[tiers]' diskcache rocksdict``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from costcache.sizes import parse_bytes
from costcache.storage.files import FileStore, FileStoreSettings

SIZES = (64 << 10, 1 << 20, 4 << 20)


class Lmdb:
    """LMDB: a memory-mapped B+ tree, copy on write."""

    def __init__(self, path: Path, capacity: int) -> None:
        import lmdb

        self.env = lmdb.open(str(path), map_size=capacity * 5 // 4, readahead=False, max_spare_txns=1)
        self.most = capacity

    def put(self, key: bytes, value: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(key, value)

    def get(self, key: bytes) -> bytes | None:
        with self.env.begin() as txn:
            found: bytes | None = txn.get(key)
            return found

    def delete(self, key: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.delete(key)

    def keys(self) -> Iterator[bytes]:
        with self.env.begin() as txn, txn.cursor() as cursor:
            yield from cursor.iternext(keys=True, values=False)

    def close(self) -> None:
        self.env.close()


class _Mapping:
    """A store that is a mapping of bytes."""

    store: Any

    def put(self, key: bytes, value: bytes) -> None:
        self.store[key] = value

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self.store.get(key)
        return found

    def delete(self, key: bytes) -> None:
        self.store.delete(key)

    def close(self) -> None:
        self.store.close()


class DiskCache(_Mapping):
    """diskcache: an index in SQLite, large values in files."""

    def __init__(self, path: Path, capacity: int) -> None:
        import diskcache

        self.store = diskcache.Cache(
            str(path), size_limit=2 * capacity, eviction_policy="none", sqlite_synchronous=2
        )

    def keys(self) -> Iterator[bytes]:
        yield from self.store.iterkeys()


class Rocks(_Mapping):
    """rocksdict: RocksDB, a log-structured merge tree."""

    def __init__(self, path: Path, capacity: int) -> None:  # noqa: ARG002 # as the others
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_enable_blob_gc(True)
        options.set_blob_gc_age_cutoff(1.0)
        self.store = rocksdict.Rdict(str(path), options=options)
        sync = rocksdict.WriteOptions()
        sync.sync = True
        self.store.set_write_options(sync)

    def keys(self) -> Iterator[bytes]:
        yield from self.store.keys()


class Files:
    """Ours: one file a value."""

    durable = True

    def __init__(self, path: Path, capacity: int) -> None:
        self.store = FileStore(path, 2 * capacity, FileStoreSettings(durable=self.durable))
        self.delete, self.get, self.close = self.store.delete, self.store.get, self.store.close

    def put(self, key: bytes, value: bytes) -> None:
        self.store.put(key, value)

    def keys(self) -> Iterator[bytes]:
        return (key for key, _ in self.store.keys())  # noqa: SIM118 # of a store, no dict


class FilesNotFlushed(Files):
    """Ours, whose values survive a kill of the process and not a crash of the machine."""

    durable = False


STORES: dict[str, Callable[[Path, int], Any]] = {
    "file": Files,
    "file-fast": FilesNotFlushed,
    "lmdb": Lmdb,
    "diskcache": DiskCache,
    "rocksdict": Rocks,
}


def on_disk(path: Path) -> int:
    """Bytes that the files under ``path`` take."""
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def measure(make: Callable[[Path, int], Any], path: Path, size: int, total: int) -> dict[str, float]:
    """Fill, read, churn and reopen one store."""
    count, chance = total // size, random.Random(1)
    value = bytearray(os.urandom(size))
    store = make(path, total)
    live: OrderedDict[bytes, int] = OrderedDict()

    def put(number: int) -> None:
        value[:8] = number.to_bytes(8, "little")
        key = chance.randbytes(20)
        store.put(key, bytes(value))
        live[key] = number

    began = time.perf_counter()
    for number in range(count):
        put(number)
    filled = time.perf_counter() - began
    keys = list(live)
    chance.shuffle(keys)
    began = time.perf_counter()
    for key in keys:
        found = store.get(key)
        if found is None or int.from_bytes(found[:8], "little") != live[key]:
            raise SystemExit(f"{type(store).__name__} lost a value")
    read = time.perf_counter() - began
    began = time.perf_counter()
    for number in range(count, 3 * count):
        store.delete(live.popitem(last=False)[0])
        put(number)
    churned = time.perf_counter() - began
    store.close()
    gc.collect()
    began = time.perf_counter()
    store = make(path, total)
    listed = sum(1 for _ in store.keys())  # noqa: SIM118 # of a store, no dict
    opened = time.perf_counter() - began
    store.close()
    return {
        "put_mb_s": total / filled / 1e6,
        "get_mb_s": total / read / 1e6,
        "churn_mb_s": 2 * total / churned / 1e6,
        "open_ms": opened * 1e3,
        "kept": listed / count,
        "disk": on_disk(path) / total,
    }


def main() -> None:
    """Print one line for each store and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", default="64MiB", help="bound of each store")
    parser.add_argument("--store", choices=STORES, action="append", help="only these")
    parser.add_argument("--folder", help="where to write; the system's temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    total, rows = parse_bytes(options.bytes, "--bytes"), []
    print(
        f"{'store':10} {'value':>8} {'put MB/s':>9} {'get MB/s':>9} {'churn MB/s':>10} {'open ms':>8} "
        f"{'disk':>6}"
    )
    for size in SIZES:
        for name in options.store or STORES:
            folder = Path(tempfile.mkdtemp(prefix="stores-", dir=options.folder))
            try:
                row = measure(STORES[name], folder / "store", size, total)
            except ImportError as error:
                print(f"{name:10} is left out: {error}")
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            rows.append({"store": name, "size": size, **row})
            print(
                f"{name:10} {size >> 10:5} KiB {row['put_mb_s']:9.0f} {row['get_mb_s']:9.0f} "
                f"{row['churn_mb_s']:10.0f} {row['open_ms']:8.1f} {row['disk']:5.2f}x",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
