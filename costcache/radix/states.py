"""A radix tree with checkpoints of recurrent states at the ends of nodes.

Hybrid models can go on from a cached prefix only where a state was kept: the KV behind the last state of a
path is dead until one is kept there. A state belongs to a node's end, and stays there through splits, since
the tail of a split keeps the node's identity. A node whose state went and whose children stay is a tombstone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.radix.node import Node
from costcache.radix.tree import RadixTree
from costcache.records import State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["StateTree"]


class StateTree(RadixTree):
    """The radix tree of a model with states.

    Attributes:
        states: States in the tree.
        protected_states: Those under a lock.
        freed_states: Slots of states that left with their node, until the owner collects them.
    """

    def __init__(self, page_size: int, page_bytes: int, token_bytes: int = 0) -> None:
        super().__init__(page_size, page_bytes, token_bytes)
        self.states = 0
        self.protected_states = 0
        self.freed_states: list[int] = []

    @property
    def evictable_states(self) -> int:
        """States that no lock protects."""
        return self.states - self.protected_states

    def usable(self, node: Node) -> Node:
        """The deepest node with a state on the path to ``node``, itself included; the root without any."""
        while node.state is None and node.parent is not None:
            node = node.parent
        return node

    def attach(self, node: Node, slot: int) -> None:
        """Keep a state at the end of ``node``, which has none.

        Args:
            node: The node; its locks on itself protect the state as well.
            slot: Slot of the state pool.
        """
        if node.parent is None:
            raise ValueError(f"{node!r} is a root, or has been evicted: a state belongs to a prefix")
        if node.state is not None:
            raise ValueError(f"{node!r} has a state already: free the other one")
        state = node.state = State(slot, self.clock)
        state.locks = node.holds
        self.states += 1
        self.protected_states += state.locks > 0
        if self.events.attach is not None:
            self.events.attach(node)

    def detach(self, node: Node) -> int:
        """Take the state of ``node`` away and leave the node, a tombstone; return the state's slot."""
        state = node.state
        if state is None:
            raise ValueError(f"{node!r} has no state")
        node.state = None
        self.states -= 1
        self.protected_states -= state.locks > 0
        if self.events.detach is not None:
            self.events.detach(node)
        return state.slot

    def consume(self, node: Node, request_counts: bool = True) -> None:
        """A request goes on from the state of ``node``; it copies the state first, which stays as it is.

        Args:
            node: A node with a state.
            request_counts: Count a use; False when the same request did so before.
        """
        state, clock = node.state, self.clock
        if state is None:
            raise ValueError(f"{node!r} has no state to go on from")
        state.recency = clock.accesses
        if request_counts:
            state.uses += 1
            state.last_use = clock.now
        if self.events.consume is not None:
            self.events.consume(node)

    def remove(self, node: Node) -> NDArray[np.int64] | None:
        """Take an unlocked leaf out of the tree, and its state with it."""
        state = node.state
        if state is not None:
            self.states -= 1
            self.freed_states.append(state.slot)
        slots = super().remove(node)
        node.state = None
        return slots

    def lock(self, node: Node) -> None:
        """Protect the KV of ``node`` and its ancestors, and the state of ``node``."""
        super().lock(node)
        state = node.state
        if state is not None:
            state.locks += 1
            self.protected_states += state.locks == 1

    def hold(self, node: Node) -> None:
        """Protect ``node``, its ancestors and its state until :meth:`release`."""
        self.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock` of ``node``."""
        state = node.state
        if state is not None and state.locks:
            state.locks -= 1
            self.protected_states -= state.locks == 0
        super().unlock(node)

    def clear(self) -> None:
        """Forget every node and state; their slots go to ``freed_states``."""
        for node in self.walk():
            if node.state is not None:
                self.freed_states.append(node.state.slot)
                node.state = None
        super().clear()
        self.states = self.protected_states = 0
