"""Which rows of window KV the tokens of a tier have, where sliding windows are evicted apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from costcache.radix.slots import Slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WindowRows"]


class WindowRows:
    """The rows of a tier's window KV, each of them free or of one token, which is known by its slot.

    Whether there is room is for the pool of windows to say; what it has room for, has rows here.
    """

    def __init__(self, slots: int, rows: int, page_size: int) -> None:
        """Make the rows of a tier, all free.

        Args:
            slots: Slots of its tokens.
            rows: Tokens that it has room for window KV of.
            page_size: Tokens per page.
        """
        self._rows = Slots(rows, page_size)
        self._of: NDArray[np.int64] = np.full(slots, -1, np.int64)
        self._held: NDArray[np.bool_] = np.zeros(slots, np.bool_)

    @property
    def used(self) -> int:
        """Rows that are not free."""
        return self._rows.reserved

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of tokens by their slots; -1 for tokens without window KV."""
        return self._of[slots]

    def held(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens have window KV that is a running request's, and not the cache's."""
        return self._held[slots]

    def allocate(self, tokens: int) -> NDArray[np.int64] | None:
        """Take rows, which are no token's yet; None if too few are free."""
        return self._rows.allocate(tokens)

    def release(self, rows: NDArray[np.int64]) -> None:
        """Free rows that are no token's."""
        self._rows.release(rows)

    def hold(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Give allocated rows to tokens of a running request."""
        self._of[slots] = rows
        self._held[slots] = True

    def keep(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Give allocated rows to tokens of the cache."""
        self._of[slots] = rows

    def take(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take the rows of tokens from them."""
        rows = self._of[slots]
        self._of[slots] = -1
        self._held[slots] = False
        return rows[rows >= 0]

    def free(self, slots: NDArray[np.int64]) -> None:
        """Free the rows of tokens."""
        self._rows.release(self.take(slots))

    def forget_cached(self) -> None:
        """Free every row that is the cache's."""
        self.free(np.flatnonzero((self._of >= 0) & ~self._held))
