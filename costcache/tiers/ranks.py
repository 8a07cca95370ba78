"""Agreement of the ranks: what a copy did counts only once it is done on every rank.

Tensor-parallel ranks see one stream of requests and must evict the same victims. Copies end at different
times on each rank, and may fail on one of them. So nothing that a copy did reaches a tree until all ranks
have agreed on it, at the same call of each of them.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Alone", "GroupRanks", "Ranks"]


class Ranks(Protocol):
    """The ranks of one model; every method is called by all of them at the same point of the stream."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def least(self, values: list[int]) -> list[int]:
        """The least value at each place, over all ranks; the lists have the same length."""

    def common(self, keys: list[bytes]) -> list[bytes]:
        """The keys that every rank has, in the order of the first rank."""


class Alone:
    """One rank, which agrees with itself."""

    rank = 0
    size = 1

    def least(self, values: list[int]) -> list[int]:
        """The values."""
        return values

    def common(self, keys: list[bytes]) -> list[bytes]:
        """The keys."""
        return keys


class GroupRanks:
    """The ranks of a process group of torch.distributed whose backend works on the CPU, such as gloo."""

    def __init__(self, group: Any = None) -> None:
        """Take a group; None for the default one, which must have been initialised."""
        from torch import distributed

        self._distributed: Any = distributed
        self._group = group
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)

    def least(self, values: list[int]) -> list[int]:
        """One all-reduce of integers on the CPU."""
        if not values:
            return values
        import torch

        agreed = torch.tensor(values, dtype=torch.int64)
        self._distributed.all_reduce(agreed, self._distributed.ReduceOp.MIN, group=self._group)
        least: list[int] = agreed.tolist()
        return least

    def common(self, keys: list[bytes]) -> list[bytes]:
        """One gathering of all keys; at the start only."""
        gathered: list[list[bytes]] = [[] for _ in range(self.size)]
        self._distributed.all_gather_object(gathered, keys, group=self._group)
        others = [set(found) for found in gathered[1:]]
        return [key for key in gathered[0] if all(key in found for found in others)]
