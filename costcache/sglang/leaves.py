"""Eviction of a leaf from a tree core, where only its slots have to be freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused

if TYPE_CHECKING:
    from costcache.sglang.records import PoolRecord

__all__ = ["LeafTaking"]


class LeafTaking:
    """Base of the tree cores, which define how a victim of the pool ``kv`` is claimed and dropped."""

    def claim(self, record: PoolRecord, needed: int) -> int | Refused:
        """Make a victim ready to be evicted.

        Args:
            record: The victim.
            needed: Tokens that are to be freed; a core that trims claims no more of the victim.

        Returns:
            The id of the leaf to evict; or why it cannot be evicted.
        """
        raise NotImplementedError

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Evict a claimed leaf; returns its slots, its tokens, and SGLang's actions that must follow."""
        raise NotImplementedError

    def take_leaf(self, record: PoolRecord, needed: int) -> tuple[int | Refused, list[Any], list[Any]]:
        """Claim a victim and drop it.

        Returns:
            Its tokens, or why it cannot be evicted; its slots; and SGLang's actions that must follow.
        """
        node_id = self.claim(record, needed)
        if isinstance(node_id, Refused):
            return node_id, [], []
        slots, tokens, actions = self.drop_leaf(node_id)
        return tokens, slots, actions
