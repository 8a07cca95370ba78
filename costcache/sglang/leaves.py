"""Taking a leaf out of a tree core, where its slots are all that is to be freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costcache.sglang.pool import PoolRecord

__all__ = ["LeafTaking"]


class LeafTaking:
    """A base of the tree cores, which say how a victim of the pool ``kv`` is claimed and dropped."""

    def claim(self, record: PoolRecord, needed: int) -> tuple[int, int]:
        """Make a victim ready to be evicted.

        Args:
            record: The victim.
            needed: Tokens that are to be freed; a core that trims claims no more of the victim.

        Returns:
            1 and the id of the leaf to evict; or the pipeline's answer for one that cannot go, and 0.
        """
        raise NotImplementedError

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Evict a leaf that was claimed; its slots, its tokens, and SGLang's actions that must follow."""
        raise NotImplementedError

    def take_leaf(self, record: PoolRecord, needed: int) -> tuple[int, list[Any], list[Any]]:
        """Claim a victim and drop it.

        Returns:
            The tokens that it held, or the pipeline's answer for one that cannot go; its slots; and SGLang's
            actions that must follow.
        """
        answer, node_id = self.claim(record, needed)
        if answer <= 0:
            return answer, [], []
        slots, tokens, actions = self.drop_leaf(node_id)
        return tokens, slots, actions
