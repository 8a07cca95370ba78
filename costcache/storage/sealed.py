"""Keeps a storage backend from hurting the cache: seals every value, and checks every answer."""

from __future__ import annotations

import logging
import reprlib
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from costcache.errors import one_line
from costcache.storage.backend import StorageBackend

__all__ = ["SealedStore"]

logger = logging.getLogger("costcache")

_MAGIC = b"CCKV"
_VERSION = 1
_HEADER = struct.Struct("<4sHHQI")
"""Magic, version, bytes of the key, bytes of the payload, CRC-32 of key and payload."""


class SealedStore:
    """A backend whose values are checked when they come back, and whose faults are misses.

    A value is kept behind a header with its key, its length and its CRC-32, so that one that was cut short,
    damaged or mixed up is never served: it is deleted, logged and missed. An ``OSError`` is logged when it
    begins, and the next call tries again. Anything else that a backend should not do is reported by its name,
    and the backend is bypassed from then on.

    Attributes:
        name: The backend's name, for messages.
        bypassed: Whether it broke its contract, and is used no more.
        damaged: Values that came back wrong.
        failed: Calls that raised.
        fault: The last thing that the backend did wrong, damage aside; empty if nothing.
    """

    def __init__(self, name: str, backend: StorageBackend) -> None:
        self.name = name
        self.bypassed = False
        self.damaged = 0
        self.failed = 0
        self.fault = ""
        self._backend = backend
        self._told: set[tuple[str, int | None]] = set()

    @staticmethod
    def overhead(key: bytes) -> int:
        """Bytes that a value takes beside its payload."""
        return _HEADER.size + len(key)

    def get(self, key: bytes) -> memoryview | None:
        """Return the payload of a key, exactly as it was put; None if it is not there or not whole."""
        answer = self._call("get", lambda: self._backend.get(key), None)
        if answer is None:
            return None
        try:
            value = memoryview(answer).cast("B")
        except TypeError:
            self._bypass(f"get returned {reprlib.repr(answer)}, not bytes or None")
            return None
        wrong = _fault(key, value)
        if wrong is None:
            return value[self.overhead(key) :]
        self.damaged += 1
        logger.warning(
            "storage backend %r returned a damaged value for key %s: %s; it is deleted, and the prefix is "
            "computed again",
            self.name,
            key.hex()[:16],
            wrong,
        )
        self.delete(key)
        return None

    def put(self, key: bytes, parts: Iterable[bytes | memoryview]) -> bool:
        """Keep a payload, given in parts; returns whether it outlives the process from now on."""
        pieces = [memoryview(part).cast("B") for part in parts]
        checksum, size = zlib.crc32(key), 0
        for piece in pieces:
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        value = b"".join([_HEADER.pack(_MAGIC, _VERSION, len(key), size, checksum), key, *pieces])
        answer = self._call("put", lambda: self._backend.put(key, value), False)
        if answer is True or answer is False:
            return bool(answer)
        self._bypass(f"put returned {reprlib.repr(answer)}, not True or False")
        return False

    def delete(self, key: bytes) -> None:
        """Forget a key."""
        self._call("delete", lambda: self._backend.delete(key), None)

    def keys(self) -> list[tuple[bytes, int]]:
        """Every key and the bytes of its value, those that may go first first."""
        answer = self._call("keys", lambda: list(self._backend.keys()), [])
        found: list[tuple[bytes, int]] = []
        for entry in answer:
            if not (isinstance(entry, tuple) and len(entry) == 2):
                self._bypass(f"keys gave {reprlib.repr(entry)}, not a key and its bytes")
                return []
            key, size = entry
            if not isinstance(key, bytes) or type(size) is not int:
                self._bypass(f"keys gave {reprlib.repr(entry)}, not a key and its bytes")
                return []
            found.append((key, size))
        return found

    def close(self) -> None:
        """Close the backend."""
        self._call("close", self._backend.close, None, always=True)

    def _call(self, what: str, call: Callable[[], Any], otherwise: Any, *, always: bool = False) -> Any:
        if self.bypassed and not always:
            return otherwise
        try:
            answer = call()
        except OSError as error:
            self.failed += 1
            self.fault = f"{what} failed: {one_line(error)}"
            fault = (what, error.errno)
            if fault not in self._told:
                self._told.add(fault)
                logger.warning(
                    "storage backend %r: %s failed: %s; the tier goes on without what it could not %s",
                    self.name,
                    what,
                    one_line(error),
                    "keep" if what == "put" else "read",
                )
            return otherwise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's SystemExit ends no server
            self.failed += 1
            self._bypass(f"{what} raised {one_line(error)}")
            return otherwise
        self._told = {fault for fault in self._told if fault[0] != what}
        return answer

    def _bypass(self, why: str) -> None:
        if not self.bypassed:
            self.bypassed = True
            self.fault = why
            logger.error("storage backend %r is bypassed from now on: %s", self.name, why)


def _fault(key: bytes, value: memoryview) -> str | None:
    """Say in a few words what is wrong with a value; None if it is whole."""
    if len(value) < _HEADER.size:
        return f"{len(value)} bytes, cut short"
    magic, version, key_size, size, checksum = _HEADER.unpack_from(value)
    if magic != _MAGIC:
        return "it does not begin as a value of costcache"
    if version != _VERSION:
        return f"it has format version {version}, and this costcache reads {_VERSION}"
    start = _HEADER.size + key_size
    if len(value) != start + size:
        return f"{len(value)} bytes instead of {start + size}"
    if value[_HEADER.size : start] != key:
        return "it is the value of another key"
    if zlib.crc32(value[_HEADER.size :]) != checksum:
        return "its checksum is wrong"
    return None
