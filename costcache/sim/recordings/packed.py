"""Splits a stream of MessagePack objects, one after another, into the objects."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["split"]

# By first byte: bytes that follow it, or bytes of a length, the bytes per unit of that, and the objects.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_BYTES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_BYTES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_OBJECTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def split(data: bytes) -> Iterator[bytes]:
    """The objects in the order of the stream; the last one is left out if it is cut off.

    Raises:
        ValueError: A byte begins no object; the first argument says where.
    """
    at = 0
    while at < len(data):
        end = _end(data, at)
        if end > len(data):
            return
        yield data[at:end]
        at = end


def _end(data: bytes, at: int) -> int:
    """End of the object at a place; beyond the data if it is cut off."""
    length = len(data)
    missing = 1
    while missing:
        if at >= length:
            return length + 1
        first = data[at]
        at += 1
        missing -= 1
        if first <= 0x7F or first >= 0xE0:
            continue
        if first <= 0x8F:
            missing += 2 * (first & 0x0F)
        elif first <= 0x9F:
            missing += first & 0x0F
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _BYTES:
            size, more = _BYTES[first]
            at += size + more + int.from_bytes(data[at : at + size], "big")
        elif first in _OBJECTS:
            size, each = _OBJECTS[first]
            missing += each * int.from_bytes(data[at : at + size], "big")
            at += size
        else:
            raise ValueError(f"byte {at - 1:,} is {first:#x}, which begins no MessagePack object")
    return at
