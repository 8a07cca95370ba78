"""The contract of storage backends, as a class of tests to subclass."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from costcache.storage import SealedStore
from costcache.testing.offered import Offered

__all__ = ["StorageContract"]

_ROOM = 1 << 20
_SMALL = 100_000
"""Capacities, in bytes."""
_VALUES = 24
_MARK = b"a mark by which a value is found in the files of a backend, whatever is around it"


class StorageContract(Offered):
    """Tests that every storage backend must pass.

    Subclass it, and name the backend::

        class TestSqlite(StorageContract):
            backend = "sqlite"
            plugin = sqlite_backend

    Attributes:
        backend: The backend's name.
        plugin: The module or object that offers it; None if an installed entry point or costcache does.
        settings: Its settings, by name, where the defaults are not what is to be tested.
    """

    backend: ClassVar[str]

    # -- what the tests stand on -------------------------------------------------------------

    @classmethod
    @contextmanager
    def opened(cls, path: Path, capacity: int = _ROOM) -> Iterator[SealedStore]:
        """The backend, sealed as a cache has it; it must have broken no rule by the end."""
        store = cls.plugins().open_storage(cls.backend, path, capacity, cls.settings)
        try:
            yield store
        finally:
            store.close()
        assert not store.fault, f"{store.fault}, which was not to be expected"

    # -- tests -------------------------------------------------------------------------------

    def test_it_is_offered_with_a_summary_and_default_settings(self) -> None:
        spec = self.plugins().storage_backends().get(self.backend)
        assert spec is not None, f"no plugin offers {self.backend!r}: {self.plugins().failures}"
        assert spec.summary.strip(), "the summary is empty: say in a line where values are kept"
        spec.settings()  # can be made without arguments
        for name, field in spec.settings.model_fields.items():
            assert field.description, f"the setting {name!r} has no description, which its help text needs"

    def test_it_gives_back_what_was_put(self) -> None:
        with _folder() as path, self.opened(path) as store:
            values = _fill(store)
            _check(store, values)
            assert store.get(b"never put") is None, "a key that was never put has a value"

    def test_a_key_has_its_latest_value_until_it_is_deleted(self) -> None:
        with _folder() as path, self.opened(path) as store:
            values = _fill(store)
            changed = {key: value + b" again" for key, value in list(values.items())[::2]}
            for key, value in changed.items():
                assert store.put(key, [value]), "a value that fits was not put in place of an older one"
            values |= changed
            for key in list(values)[::3]:
                store.delete(key)
                del values[key]
                assert store.get(key) is None, "a value that was deleted is still there"
                store.delete(key)  # of nothing
            _check(store, values)

    def test_it_keeps_and_lists_all_of_it_after_opening_it_again(self) -> None:
        with _folder() as path:
            with self.opened(path) as store:
                values = _fill(store)
                store.delete(next(iter(values)))
                del values[next(iter(values))]
            with self.opened(path) as store:
                _listed(store, values)
                _check(store, values)

    def test_what_is_acknowledged_survives_the_end_of_the_process(self) -> None:
        """A copy of the files, made before anything is closed, is what a kill would leave."""
        with _folder() as path:
            with self.opened(path) as store:
                values = _fill(store)
                killed = path.parent / "killed"
                shutil.copytree(path, killed)
            with self.opened(killed) as store:
                _check(store, values)

    def test_it_never_keeps_more_than_its_capacity(self) -> None:
        chance, key = random.Random(5), b""
        with _folder() as path:
            with self.opened(path, _SMALL) as store:
                for number in range(100):
                    key = number.to_bytes(4, "big")
                    put = store.put(key, [chance.randbytes(chance.randrange(1, 9000))])
                    assert put or not store.fault, store.fault
                    assert store.get(key) is not None or not put, "a value that was just put is missed"
                assert not store.put(b"huge", [bytes(2 * _SMALL)]), (
                    f"a value of {2 * _SMALL:,} bytes was put, and the capacity is {_SMALL:,}"
                )
            with self.opened(path, _SMALL) as store:
                kept = sum(dict(store.keys()).values())
                assert kept <= _SMALL, f"it keeps {kept:,} bytes, and its capacity is {_SMALL:,}"
                assert kept > _SMALL // 4, f"it keeps {kept:,} bytes of {_SMALL:,}: it evicts far too much"

    def test_a_damaged_value_is_missed_and_the_others_are_not(self) -> None:
        """A bit flips in the file that holds the value; if none holds it as it is, the backend cuts it."""
        with _folder() as path:
            with self.opened(path) as store:
                values = _fill(store)
                assert store.put(b"damaged", [_MARK])
            if not _damage_files(path):
                with self.opened(path) as store:
                    whole = bytes(store._backend.get(b"damaged"))
                    store._backend.put(b"damaged", whole[:-1])
            with self.opened(path) as store:
                assert store.get(b"damaged") is None, "a damaged value was served"
                _check(store, values)

    def test_it_may_be_called_from_any_thread(self) -> None:
        with _folder() as path, self.opened(path) as store:
            values: dict[bytes, bytes] = {}
            faults: list[BaseException] = []

            def work() -> None:
                try:
                    values.update(_fill(store))
                    _check(store, values)
                except BaseException as error:
                    faults.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert not faults, f"in another thread than that which opened it: {store.fault or faults[0]}"


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that does not exist yet, in one that will be removed."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "kv"


def _fill(store: SealedStore) -> dict[bytes, bytes]:
    """Put values of many sizes; returns them by key."""
    chance, values = random.Random(3), {}
    for number in range(_VALUES):
        key, value = chance.randbytes(1 + number * 63 // _VALUES), chance.randbytes(chance.randrange(6000))
        value = value if number else b""
        assert store.put(key, [value[:9], memoryview(value)[9:]]), (
            f"a value of {len(value):,} bytes was not put: {store.fault or 'put answered False'}"
        )
        values[key] = value
    return values


def _check(store: SealedStore, values: Mapping[bytes, bytes]) -> None:
    for key, value in values.items():
        found = store.get(key)
        assert found is not None, f"a value that was put is missed: {store.fault or 'get answered None'}"
        assert bytes(found) == value


def _listed(store: SealedStore, values: Mapping[bytes, bytes]) -> None:
    sizes = {key: len(value) + store.overhead(key) for key, value in values.items()}
    listed = dict(store.keys())
    assert listed == sizes, (
        f"after opening it again, keys lists {len(listed)} values of {sum(listed.values()):,} bytes, and "
        f"{len(sizes)} of {sum(sizes.values()):,} were put: {store.fault or 'none of another size'}"
    )


def _damage_files(path: Path) -> bool:
    """Flip a bit of the marked value wherever it is in the files."""
    found = False
    for file in path.rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(_MARK)) >= 0:
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(bytes([_MARK[0] ^ 1]))
            found = True
    return found
