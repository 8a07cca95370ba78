"""What the tiers below the device share: a tree over pools of their own, ranked by the device's policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from costcache.binding import Binding
from costcache.errors import SettingsError
from costcache.radix.node import Node
from costcache.radix.states import StateTree
from costcache.radix.tree import RadixTree
from costcache.radix.windows import WindowTree
from costcache.records import Clock, RequestInfo, RequestRecord
from costcache.tiers.shared import SharedForecast
from costcache.tiers.tier import Place, Tier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.orders import VictimOrder
    from costcache.pool import Pool
    from costcache.records import Asker, PoolState
    from costcache.tiers.layout import Layout
    from costcache.tiers.tier import Source

__all__ = ["Landing", "LowerBinding", "LowerTier"]


class Landing(Protocol):
    """Room on a tier for a prefix that is on its way there. What was there before it is pinned."""

    @property
    def size(self) -> int:
        """Bytes to copy."""

    def write(self, source: Source) -> int:
        """Copy; in the thread of the link. Returns the pages copied, plus one if the ending is there too."""

    def settle(self, done: int, history: Node) -> tuple[Node | None, int]:
        """Take over what every rank has copied, and give back the rest of the room.

        Args:
            done: What :meth:`write` returned, the least of all ranks.
            history: The node that was copied, whose history the new one continues.

        Returns:
            The node at the end of what arrived, and the tokens that did. No node if nothing did, or if the
            prefix before it is no longer here.
        """


@dataclass(frozen=True)
class LowerBinding(Binding):
    """The binding of a lower tier: the same model and policy, on the clock of the device's pool.

    Attributes:
        clock: The device pool's clock.
        window_ratio: Tokens with window KV for each token, where windows are evicted apart; 0 elsewhere.
        device: The device's pool; None if no order is shared with it.
        shared: The forecast that a tier's order shares with the device's; None if it has one of its own.
    """

    clock: Clock = field(default_factory=Clock)
    window_ratio: float = 0.0
    device: Pool | None = None
    shared: SharedForecast | None = None

    @classmethod
    def under(cls, binding: Binding, device: Pool, layout: Layout, window_ratio: float) -> LowerBinding:
        """The binding of a tier below the device; costs are those of the layout.

        Where a state or a window is evicted apart from the KV before it, each tier's order learns by itself.

        Args:
            binding: The binding of the device.
            device: The pool of its tokens.
            layout: The layout of the memory.
            window_ratio: See the attribute.
        """
        token = binding.cost.token.model_copy(
            update={
                "kv_bytes": layout.token_bytes,
                "state_bytes": layout.state_bytes,
                "swa_bytes": layout.window_bytes,
            }
        )
        values = {f.name: getattr(binding, f.name) for f in dataclasses.fields(binding)}
        values["cost"] = binding.cost.model_copy(update={"token": token})
        shares = not layout.state_bytes and not window_ratio
        return cls(
            **values,
            clock=device.clock,
            window_ratio=window_ratio,
            device=device if shares else None,
        )

    def make_order(self, pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        """Make an order that shares the device's forecast, or one of the policy that learns by itself."""
        made = None if self.shared is None else self.shared.make(pools[0])
        return super().make_order(pools) if made is None else made

    def pool(self, name: str, take: Any, **options: Any) -> Pool:
        """Make a pool of the tier: without headroom, since whoever adds to it asks for room first."""
        return super().pool(name, take, **{**options, "clock": self.clock, "lower_tier": True})

    def tree(self, memory: int, state_share: float | None, overhead: float = 0.0) -> RadixTree:
        """Make the tree of a tier.

        Args:
            memory: Bytes of the tier.
            state_share: Share of them that is for states; None for one pool of both.
            overhead: Bytes that a token takes besides its KV.

        Raises:
            SettingsError: There is no room for a page and what a request resumes from.
        """
        token = self.cost.token
        size = token.kv_bytes + overhead
        if token.state_bytes:
            return StateTree(self, int(memory * token.kv_bytes / size), state_share=state_share)
        if not self.window_ratio:
            own = self
            if self.device is not None:
                own = dataclasses.replace(self, shared=SharedForecast(self.device))
            return RadixTree(own, int(memory // size))
        window = token.swa_bytes + overhead
        tokens = int(memory // (size + self.window_ratio * window))
        tree = WindowTree(self, tokens, window_capacity=max(int(tokens * self.window_ratio), self.page_size))
        if (tree.window_capacity or 0) < tree.tail:
            least = int(tree.tail / self.window_ratio * (size + self.window_ratio * window)) + 1
            raise SettingsError(
                f"a tier of {memory:,} bytes has room for window KV of {tree.window_capacity} tokens, and a "
                f"request resumes from {tree.tail}: give {least:,} bytes, or a larger window_pool_size"
            )
        return tree


class LowerTier(Tier):
    """The tree of one lower tier. A prefix that is in it is there from its first token on.

    Attributes:
        binding: Model, policy and clock.
        leaving: Called with a node, just before it, its last pages or its ending are evicted from the tier.
    """

    def __init__(self, name: str, binding: LowerBinding, tree: RadixTree) -> None:
        super().__init__(name, tree)
        self.binding = binding
        own = tree.binding
        self._shared = own.shared if isinstance(own, LowerBinding) else None
        self.leaving: Callable[[Node], object] | None = None
        self._requests: dict[Hashable, RequestRecord] = {}
        tree.on_remove = self._node_leaves
        if isinstance(tree, StateTree):
            tree.on_free_state = self._free_state
            tree.on_tombstone = self._ending_leaves
        elif isinstance(tree, WindowTree):
            tree.on_window_leaves = self._ending_leaves

    # -- forecast ----------------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        """Whether the tier's order shares what the device's has learned."""
        return self._shared is not None and self._shared.made_by is not None

    def forecaster(self, device: Pool) -> Pool:
        """See :class:`Tier`: the tier's own pool, if its order shares the device's forecast."""
        return self.pool if self.shares and self.pool.order.forecasts else device

    def follow(self) -> None:
        """Rank by the order that is in force on the device by now, if the tier's was made by another one."""
        if self._shared is not None:
            self._shared.follow(self.pool)

    def remember(self, node: Node) -> Node:
        """The history of a node of the tier above, which is about to be evicted there.

        Its copy arrives here later, when the order above has let its record go.
        """
        past = Node(None, node.tokens, node.depth, b"", bytearray(), None)
        past.inherit(node)
        self.pool.inherit(past, node)
        return past

    def renew(self, at: Node, above: Node) -> None:
        """A node of the tier above is about to be evicted there, and is here: take over what is known of it.

        Args:
            at: The node here at the end of its prefix.
            above: The node of the tier above.
        """
        while at.parent is not None and at.end > above.depth:
            self.pool.inherit(at, above)
            at = at.parent

    # -- requests ----------------------------------------------------------------------------

    def use(self, place: Place, request: Hashable, number: int, asker: Asker | None = None) -> Node:
        """Find a prefix and use it; returns the node from whose end a request can resume.

        Args:
            place: The prefix.
            request: The request's name, or None for one of its own.
            number: The request's number on the device.
            asker: Who sent it.
        """
        record = self._requests.get(request) if request is not None else None
        first = record is None
        if record is None:
            record = RequestRecord(number, self.binding.clock.in_seconds, asker)
            if request is not None:
                self._requests[request] = record
        tree = self.tree
        walk = tree.find if isinstance(tree, WindowTree) else tree.match
        usable = self.usable(walk(tree.root(place.namespace), memoryview(place.key), record))
        if usable.state is not None:
            tree.pool.consume(usable, counts=first)
        return usable

    def finish(self, request: Hashable, info: RequestInfo) -> None:
        """A request has ended: its policy hears how, and it is forgotten."""
        record = self._requests.pop(request, None)
        if record is not None:
            if isinstance(record.end, Node):
                record.end = record.end.current()
            self.tree.finish(record, info)

    # -- changes -----------------------------------------------------------------------------

    def land(self, place: Place, start: int, rows: int) -> Landing | None:
        """Reserve room for a prefix from token ``start`` on, and for an ending of so many rows.

        What is before it is pinned until the landing is settled.

        Returns:
            None, and nothing is reserved, if there is no room for all of it.
        """
        raise NotImplementedError

    def room(self, keep: Node, tokens: int, rows: int) -> tuple[int, int]:
        """Make room below a node for more tokens and rows of an ending; returns how many of both fit."""
        self.follow()
        tree = self.tree
        if isinstance(tree, StateTree):
            return tree.make_room((keep,), tokens, rows)
        if isinstance(tree, WindowTree):
            return tree.make_room(keep, tokens, rows)
        return tree.pool.make_room(tokens, keep), 0

    def missing_bytes(self, tokens: int, rows: int) -> int:
        """Bytes that have to be evicted for so many tokens, and rows of an ending."""
        tree, token = self.tree, self.binding.cost.token
        if isinstance(tree, StateTree) and tree.state_capacity is None:  # one pool, in bytes
            return max(0, tokens * token.kv_bytes + rows * token.state_bytes - tree.pool.free)
        missing = max(0, tokens - tree.pool.free) * token.kv_bytes
        if isinstance(tree, StateTree):
            missing += max(0, rows - tree.free_states) * token.state_bytes
        elif isinstance(tree, WindowTree):
            missing += max(0, rows - tree.windows.free) * token.swa_bytes
        return missing

    def extend(
        self, place: Place, start: int, slots: NDArray[np.int64] | None, history: Node | None
    ) -> tuple[Node, int] | None:
        """Add the rest of a prefix, from token ``start`` on.

        Returns:
            The node at its end, and the tokens from ``start`` on that were here already. None if what is
            before ``start`` is no longer here.
        """
        tree = self.tree
        end = len(place.key) // tree.page_bytes * self.page_size
        node = self.find(place)
        if node.end < start:
            return None
        before = node.end - start
        if node.end < end:
            key = tree.part(place.key, node.end, end - node.end)
            node = tree.append(node, key, None if slots is None else slots[before:], None, history=history)
        return node, before

    def _node_leaves(self, node: Node, pages: int) -> None:  # noqa: ARG002 # the disk tier's needs the pages
        if self.leaving is not None:
            self.leaving(node)

    def _ending_leaves(self, node: Node) -> None:
        if self.leaving is not None:
            for each in self.resting_on(node):
                self.leaving(each)

    def _free_state(self, slot: int) -> None:
        raise NotImplementedError
