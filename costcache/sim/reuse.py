"""Reuse of pages: for each use of a page, the use of the same page before or after it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Positions", "index_type", "previous_use", "reuse_pairs"]

Int64 = NDArray[np.int64]
Positions = NDArray[np.signedinteger[Any]]
"""Positions among pages, in as few bytes as they need: a trace has many."""


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The smaller type of positions among so many, and of -1: half the memory, mostly."""
    return np.int32 if count < 2**31 else np.int64


def reuse_pairs(names: Int64) -> tuple[Int64, Int64]:
    """Every pair of consecutive uses of one name: the positions of the earlier and of the later use.

    Args:
        names: The name used at each position, int64 of shape [uses].
    """
    narrow = not names.size or (names.min() >= -(2**31) and names.max() < 2**31)
    keys = names.astype(np.int32) if narrow else names  # half the memory to sort
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    same = keys[1:] == keys[:-1]
    return order[:-1][same], order[1:][same]


def previous_use(names: Int64) -> Positions:
    """Position of the previous use of the same name, -1 for a first use; int32 or int64 of shape [uses].

    Args:
        names: The name used at each position, int64 of shape [uses].
    """
    earlier, later = reuse_pairs(names)
    previous = np.full(names.size, -1, index_type(names.size))
    previous[later] = earlier
    return previous
