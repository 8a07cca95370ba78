"""A radix tree with checkpoints of recurrent states at the ends of nodes.

Hybrid models can resume from a cached prefix only where a state was kept: the KV after the last state of a
path is dead until a state is kept there. A state belongs to a node's end, and stays there through splits,
since the tail of a split keeps the node's identity. A node with children whose state was evicted is a
tombstone.

KV and states have a pool each, or share one that is counted in bytes. One order ranks both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from costcache.errors import SettingsError
from costcache.eviction import Refused
from costcache.policies.states import make_state_order
from costcache.radix.node import Node
from costcache.radix.tree import LONG, RadixTree
from costcache.records import Action, State

if TYPE_CHECKING:
    from costcache.binding import Binding
    from costcache.orders import VictimOrder
    from costcache.pool import Pool
    from costcache.records import PoolState, Victim

__all__ = ["StateTree"]


class StateTree(RadixTree):
    """The radix tree of a model with states.

    Attributes:
        memory: Bytes of all pools together.
        kv_bytes: Bytes of the KV of one token.
        state_bytes: Bytes of one state.
        capacity: Tokens that fit if there are no states, whole pages.
        state_capacity: States that the state pool has room for; None if one pool has both.
        pools: The pools by name: ``"kv"`` and ``"state"``, or ``"memory"``.
        on_free_state: Called with the slot of each state that is freed.
        on_tombstone: Called with a node just before its state is evicted alone.
    """

    def __init__(
        self,
        binding: Binding,
        memory: int,
        *,
        state_share: float | None = None,
        page_bytes: int | None = None,
    ) -> None:
        """Make an empty tree. Victims are evicted whole: states are at the ends of nodes.

        Args:
            binding: The model, its policy and its plugin.
            memory: Bytes for KV and states, per rank.
            state_share: Share of the bytes for states alone; None for one pool of bytes.
            page_bytes: Key bytes per page; 8 per token by default.

        Raises:
            PluginError: The policy's order cannot be made.
            SettingsError: The share is not between 0 and 1, the memory has no room for a page and a state, or
                the model keeps no KV.
        """
        if state_share is not None and not 0.0 < state_share < 1.0:
            raise SettingsError(f"state_share is {state_share}: give a share between 0 and 1, or None")
        token, page_size = binding.cost.token, binding.page_size
        self.memory = memory
        self.kv_bytes, self.state_bytes = token.kv_bytes, token.state_bytes
        if not self.kv_bytes:
            raise SettingsError(
                f"model {binding.architecture.model.name!r} keeps states and no KV, which is not supported; "
                "'costcache plan' says how many states fit"
            )
        kv_memory = memory if state_share is None else int(memory * (1 - state_share))
        self.state_capacity = None if state_share is None else (memory - kv_memory) // self.state_bytes
        self.capacity = kv_memory // (self.kv_bytes * page_size) * page_size
        least = page_size * self.kv_bytes + (self.state_bytes if state_share is None else 0)
        if kv_memory < least or self.state_capacity == 0:
            shared = "" if state_share is None else f", {kv_memory:,} of them for KV"
            divide = "" if state_share is None else ", or divide it otherwise between KV and states"
            raise SettingsError(
                f"memory is {memory:,} bytes{shared}: a page of {page_size} tokens takes "
                f"{page_size * self.kv_bytes:,} and a state {self.state_bytes:,}; give more{divide}"
            )
        self.on_free_state: Callable[[int], object] | None = None
        self.on_tombstone: Callable[[Node], object] | None = None
        self.pools: dict[str, Pool] = {}
        super().__init__(binding, self.capacity, page_bytes=page_bytes)
        self.merge_from = LONG  # though victims are evicted whole: see joins

    def _make_pool(self, capacity: int) -> Pool:
        if self.state_capacity is None:
            memory = self.binding.pool(
                "memory",
                partial(self._take_from, "memory"),
                unit="bytes",
                capacity=self.memory,
                token_units=self.kv_bytes,
                state_units=self.state_bytes,
                make_order=self._make_order,
            )
            self.pools["memory"] = memory
            return memory
        states = self.binding.pool(
            "state",
            partial(self._take_from, "state"),
            unit="states",
            capacity=self.state_capacity,
            token_units=0,
            state_units=1,
            ranked=False,
        )
        kv = self.binding.pool(
            "kv",
            partial(self._take_from, "kv"),
            capacity=capacity,
            make_order=self._make_order,
            also=(states,),
        )
        self.pools.update(kv=kv, state=states)
        return kv

    def _make_order(self, pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        name, order = self.binding.make_order(pools)
        return name, make_state_order(order)

    # -- counts ------------------------------------------------------------------------------

    def reserve(self, tokens: int, states: int) -> None:
        """Set the tokens and states that running requests own outside the tree."""
        for pool in self.pools.values():
            pool.reserved = tokens * pool.token_units + states * pool.state_units

    @property
    def free_states(self) -> int:
        """States that fit into the free memory; in one pool, as if only states were added."""
        if self.state_capacity is None:
            return max(0, self.pool.free) // self.state_bytes
        return self.pools["state"].free

    # -- structure ---------------------------------------------------------------------------

    def joins(self, first: Node, before: Node, node: Node) -> bool:  # noqa: ARG002 # a state is enough
        """Whether a node may take over the tokens before it: no state is kept among them.

        What is merged is evicted at once, and would be evicted one after the other: without the state that
        follows it, KV is dead.
        """
        return before.state is None

    def ending_at(self, node: Node, end: int) -> Node:
        """The node that ends ``end`` tokens after the root, on the path to ``node``; split off if need be."""
        while node.depth >= end and node.parent is not None:
            node = node.parent
        return self.split(node, end - node.depth) if node.depth < end < node.end else node

    # -- states ------------------------------------------------------------------------------

    def usable(self, node: Node) -> Node:
        """The deepest node with a state on the path to ``node``, inclusive; the root if there is none."""
        while node.state is None and node.parent is not None:
            node = node.parent
        return node

    def attach(self, node: Node, slot: int) -> None:
        """Keep a state at the end of ``node``, which has none.

        Args:
            node: The node; its pins protect the state as well.
            slot: Slot of the state pool.

        Raises:
            ValueError: The node is a root or evicted, or has a state.
        """
        if node.parent is None:
            raise ValueError(f"{node!r} is a root, or has been evicted: a state belongs to a prefix")
        if node.state is not None:
            raise ValueError(f"{node!r} has a state already: free the other one")
        state = State(slot, self.pool.clock)
        state.locks = node.pins
        self.pool.attach(node, state)

    def make_room(self, nodes: tuple[Node, ...], tokens: int, states: int) -> tuple[int, int]:
        """Make room for more tokens and states.

        Args:
            nodes: The nodes that the request uses: their paths and states are not evicted.
            tokens: Tokens to add, whole pages.
            states: States to add.

        Returns:
            Tokens and states that fit: all, unless the memory is too small or too much of it is locked or
            reserved. If not, states come first, since tokens after the last state are dead.
        """
        pool = self.pool
        for node in nodes:
            pool.pin(node)
        if self.state_capacity is None:
            pool.evict(tokens * self.kv_bytes + states * self.state_bytes - pool.free)
        else:
            self.pools["state"].evict(states - self.free_states)
            pool.evict(tokens - pool.free)
        for node in nodes:
            pool.unpin(node)
        states = min(states, self.free_states)
        if self.state_capacity is None:
            room = (pool.free - states * self.state_bytes) // self.kv_bytes
        else:
            room = pool.free
        if tokens > room:
            tokens = max(0, room) // self.page_size * self.page_size
        return tokens, states

    def remove(self, node: Node) -> None:
        """Take an unlocked leaf out of the tree, and free its slots and its state."""
        state = node.state
        super().remove(node)
        self._freed(state)

    def _freed(self, state: State | None) -> None:
        if state is not None and self.on_free_state is not None:
            self.on_free_state(state.slot)

    def _take_from(self, name: str, victim: Victim, needed: int) -> int | Refused:  # noqa: ARG002  # evicted whole
        """Free a victim for a pool; returns the units freed, in the pool's unit."""
        node = victim.record
        if not isinstance(node, Node) or node.parent is None:
            return Refused.NOT_A_LEAF
        pool, state = self.pools[name], node.state
        if node.live_children:
            if victim.action is not Action.TOMBSTONE or state is None or name == "kv":
                return Refused.NOT_A_LEAF
            if state.locks:
                return Refused.LOCKED
            if self.on_tombstone is not None:
                self.on_tombstone(node)
            self.pool.detach(node)
            self._freed(state)
            return pool.state_units
        # A leaf without its state is dead: it is evicted whole, however little was asked for.
        if node.locks:
            return Refused.LOCKED
        if name == "state" and state is None:
            return Refused.NOT_A_LEAF
        tokens = node.tokens
        if self.on_remove is not None:
            self.on_remove(node, tokens // self.page_size)
        self.remove(node)
        return tokens * pool.token_units + (0 if state is None else pool.state_units)

    def clear(self) -> None:
        """Forget every node and state and start the policy afresh; logical time goes on."""
        for node in self.walk():
            self._freed(node.state)
        super().clear()
