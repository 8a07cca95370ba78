"""What vLLM and SGLang publish of their caches: batches of KV events, each in MessagePack.

An event says that blocks were stored or removed, or that all were cleared. Format:
``vllm/distributed/kv_events.py`` and ``sglang/srt/disaggregation/kv_events.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from costcache.errors import TraceError
from costcache.recording.lines import MOST_BLOCK
from costcache.sim.recordings.packed import split
from costcache.sim.traces.files import open_source

__all__ = ["CLEARED", "REMOVED", "STORED", "Batch", "block_size_of", "decode", "hash_of", "read_batches"]

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
"""Types of events."""
_FIELDS = {
    STORED: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    REMOVED: ("block_hashes", "medium"),
    CLEARED: (),
}
_DEVICE = (None, "GPU")
_LATEST = 1e12
"""Unix time, in seconds, after that of any batch."""


class Batch(NamedTuple):
    """The events of one step of a server.

    Attributes:
        time: Unix time, in seconds.
        events: Those of the device's memory and of one kind of layers, by their fields.
        rank: Number of the data-parallel rank; None without any.
    """

    time: float
    events: list[dict[str, Any]]
    rank: int | None


def decode(payload: bytes) -> Batch:
    """A batch as it was published.

    Raises:
        ValueError: It is none; TypeError and msgspec.DecodeError likewise.
    """
    at, events, *more = msgspec.msgpack.decode(payload)
    rank = more[0] if more else None
    if not isinstance(at, int | float) or not 0.0 <= at < _LATEST or not isinstance(rank, int | None):
        raise ValueError(f"its time is {at!r} and its rank {rank!r}")
    named = map(_fields, list(events))
    # Other events are of another tier, or of another kind of layers over the same tokens.
    return Batch(float(at), [e for e in named if e.get("medium") in _DEVICE and not e.get("group_idx")], rank)


def _fields(event: Any) -> dict[str, Any]:
    """An event by its fields: vLLM and SGLang send them with names, older versions without."""
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        return {}
    name, *values = event
    return {"type": name, **dict(zip(_FIELDS.get(name, ()), values, strict=False))}


def hash_of(value: Any) -> bytes:
    """The hash of a block as bytes; some servers publish numbers."""
    return value if isinstance(value, bytes) else str(value).encode()


def block_size_of(event: dict[str, Any], before: int) -> int:
    """Tokens per block of an event :data:`STORED`.

    Args:
        event: The event.
        before: Those of the events before; 0 if there are none.

    Raises:
        ValueError: It has none, or another one than before.
    """
    size = event.get("block_size")
    if not isinstance(size, int) or not 1 <= size <= MOST_BLOCK or (before and size != before):
        raise ValueError(f"block_size is {size}; expected {before or '1 or more'}, as before")
    return size


def read_batches(path: str | os.PathLike[str]) -> Iterator[tuple[int, Batch]]:
    """The batches of a file, which holds published payloads one after another, by number from 1.

    Raises:
        TraceError: The file cannot be read, or a batch is malformed.
    """
    with open_source(path) as source:
        data = source.stream.read()
    number = 0
    try:
        for number, payload in enumerate(split(data), 1):
            yield number, decode(payload)
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise TraceError(
            f"{path}, batch {number}: is no batch of KV events ({error}); give a file of the published "
            "payloads, one after another, without their sequence numbers"
        ) from None
