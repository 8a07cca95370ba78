"""Reads the arguments of users: tokens and slots in lists, arrays and tensors; numbers; request infos."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costcache.records import MOST_ENDING, Asker, RequestInfo

__all__ = ["as_asker", "as_count", "as_info", "as_int64", "as_key", "as_whole"]

_WIDEST = 8  # bytes


def as_int64(values: Any, what: str) -> NDArray[np.int64]:
    """Return ``values`` as a contiguous int64 array of one dimension, without a copy if possible.

    Args:
        values: A list or tuple of ints, a numpy array of integers, or a torch tensor of integers
            (moved to the CPU if it is not there).
        what: Their name in errors (``"tokens"``).

    Raises:
        TypeError: If they are not integers.
        ValueError: If they do not have one dimension, or one is 2**63 or more.
    """
    if type(values) is not np.ndarray:
        if hasattr(values, "detach"):  # a torch tensor; torch itself is not needed here
            values = values.detach().cpu().numpy()
        else:
            values = np.asarray(values)
            if not values.size:
                values = values.astype(np.int64)
    if values.ndim != 1:
        raise ValueError(f"{what} have shape {list(values.shape)}: give one dimension")
    if values.dtype != np.int64:
        if values.dtype.kind not in "iu":
            raise TypeError(f"{what} have type {values.dtype}: give integers")
        if values.dtype.kind == "u" and values.dtype.itemsize == _WIDEST and values.size:
            highest = int(values.max())
            if highest >= 1 << 63:
                raise ValueError(f"{what} have {highest}, which no int64 can hold: give numbers below 2**63")
        values = values.astype(np.int64)
    return values if values.flags.c_contiguous else np.ascontiguousarray(values)


def as_key(tokens: NDArray[np.int64], page_size: int) -> memoryview:
    """Return the bytes of the whole pages of ``tokens``, without a copy."""
    size = tokens.size
    whole = size - size % page_size
    if not whole:
        return memoryview(b"")  # an empty array cannot be cast
    return (tokens[:whole] if whole != size else tokens).data.cast("B")


def as_whole(value: Any, what: str) -> int:
    """Return a whole number of any kind, numpy's too, as an int.

    Raises:
        TypeError: If it is not a whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}: give a whole number") from None


def as_count(value: Any, what: str) -> int:
    """Return a whole number of 0 or more as an int.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is below 0.
    """
    count = as_whole(value, what)
    if count < 0:
        raise ValueError(f"{what} is {value!r}: give 0 or more")
    return count


def as_asker(asker: Asker) -> Asker:
    """Return an asker, once its type and those of its names have been checked.

    Raises:
        TypeError: It is not an Asker, or a name is not text.
    """
    if not isinstance(asker, Asker):
        raise TypeError(f"asker is {asker!r}: give an Asker")
    names: dict[str, Any] = asker._asdict()  # whatever the caller put in
    for field, name in names.items():
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{field} is {name!r}: give text, or None if it is unknown")
    return asker


def as_info(info: RequestInfo) -> RequestInfo:
    """Return the facts of a request, once their types have been checked.

    Raises:
        TypeError: If a field is of a wrong type; names it.
        ValueError: If a count or a time is below 0, or a time is not finite; names the field.
    """
    if not isinstance(info, RequestInfo):
        raise TypeError(f"info is {info!r}: give a RequestInfo")
    facts: dict[str, Any] = info._asdict()  # whatever the caller put in
    for name in ("finish_reason", "session", "tenant", "user"):
        text = facts[name]
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} is {text!r}: give text, or None if it is unknown")
    ending, ends = facts["ending"], facts["session_ends"]
    if not isinstance(ending, tuple) or len(ending) > MOST_ENDING:
        raise TypeError(f"ending is {ending!r}: give a tuple of at most {MOST_ENDING} token ids")
    if not isinstance(ends, bool):
        raise TypeError(f"session_ends is {ends!r}: give True or False")
    new_tokens, returns, keep = facts["new_tokens"], facts["returns_after"], facts["keep_seconds"]
    return RequestInfo(
        output_tokens=as_count(facts["output_tokens"], "output_tokens"),
        new_tokens=None if new_tokens is None else as_count(new_tokens, "new_tokens"),
        finish_reason=facts["finish_reason"],
        priority=as_whole(facts["priority"], "priority"),
        session=facts["session"],
        ending=tuple(as_whole(token, "ending") for token in ending),
        tenant=facts["tenant"],
        session_ends=ends,
        returns_after=returns if isinstance(returns, str) else _as_seconds(returns, "returns_after"),
        keep_seconds=_as_seconds(keep, "keep_seconds"),
        user=facts["user"],
    )


def _as_seconds(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r}: give seconds, or None if they are unknown")
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{what} is {value!r}: give a finite number of seconds, 0 or more")
    return float(value)
