"""Reads the arguments of users: tokens and slots in lists, arrays and tensors; whole numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_count", "as_int64", "as_key", "as_whole"]


def as_int64(values: Any, what: str) -> NDArray[np.int64]:
    """Return ``values`` as a contiguous int64 array of one dimension, without a copy if possible.

    Args:
        values: A list or tuple of ints, a numpy array of integers, or a torch tensor of integers
            (moved to the CPU if it is not there).
        what: Their name in errors (``"tokens"``).

    Raises:
        TypeError: If they are not integers.
        ValueError: If they do not have one dimension.
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
