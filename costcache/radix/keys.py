"""Tokens and slots as users have them: lists, numpy arrays, torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_int64", "as_key"]


def as_int64(values: Any, what: str) -> NDArray[np.int64]:
    """``values`` as a contiguous int64 array of one dimension, without a copy where possible.

    Args:
        values: A list or tuple of ints, a numpy array of integers, or a torch tensor of integers
            (moved to the CPU if it is not there).
        what: What they are, for the error (``"tokens"``).

    Raises:
        TypeError: Not integers.
        ValueError: Not one dimension.
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
    """The bytes of the whole pages of ``tokens``, without a copy."""
    whole = tokens.size - tokens.size % page_size
    if not whole:
        return memoryview(b"")  # an empty array cannot be cast
    return (tokens[:whole] if whole != tokens.size else tokens).data.cast("B")
