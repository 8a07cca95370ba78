"""A radix tree whose sliding-window KV is evicted apart from the rest.

Layers of full attention need the KV of the whole prefix; sliding layers need that of its last ``window``
tokens. So a prefix can be reused up to the last point before which a whole window is cached. In a pool of
their own, windows are kept where requests ended and where prompts branched, as in SGLang 0.5.23: one window
and one page before that point. In shared pages all that was computed is kept until it is evicted, as in vLLM.

Window KV is evicted from any node, which then has full KV alone. A leaf whose window KV is evicted leaves the
tree, since nothing could resume from it; a leaf that leaves the tree takes its window KV along.

Each node with window KV has a record of it, a leaf of its pool whatever its depth. Full and window KV have a
pool of tokens each (SGLang), or share one that is counted in bytes (vLLM); there one order ranks both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from costcache.cost import longest_window
from costcache.errors import SettingsError
from costcache.eviction import Refused
from costcache.radix.node import Node
from costcache.radix.tree import RadixTree
from costcache.records import NodeRecord, PoolState, RequestInfo, RequestRecord, Victim

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.binding import Binding
    from costcache.orders import VictimOrder
    from costcache.pool import Pool

__all__ = ["WindowRecord", "WindowTree"]

_MARK = 1 << 62
"""Tells a window's hash from that of the same prefix's full KV, which one order may see too."""


class WindowRecord(NodeRecord):
    """The window KV of a node.

    Attributes:
        node: The node.
        mark: Added to hashes, in a pool that it shares with full KV.
    """

    __slots__ = ("mark", "node")

    def __init__(self, node: Node, mark: int) -> None:
        super().__init__(0, None, node.tokens, node.depth)
        self.node = node
        self.mark = mark

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`."""
        found = self.node.prefix_hash(offset)
        return None if found is None else found ^ self.mark

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int | None:
        """See :class:`costcache.records.NodeRecord`."""
        found = self.node.prefix_hash_with(offset, content)
        return None if found is None else found ^ self.mark

    def content(self, start: int, end: int) -> bytes | bytearray | None:
        """See :class:`costcache.records.NodeRecord`."""
        # A copy: the node, and its key, may stay when the window is evicted.
        key = self.node.content(start, end)
        return None if key is None else bytes(key)

    def shared(self, offset: int, content: bytes | bytearray) -> int:
        """See :class:`costcache.records.NodeRecord`."""
        return self.node.shared(offset, content)


class WindowTree(RadixTree):
    """The radix tree of a model whose windows are cached apart.

    Attributes:
        window: Tokens before the end of a match whose window KV must be cached.
        tail: The same in whole pages.
        kept: Tokens before the end of a request, whole pages, whose window KV is kept, and that a match uses;
            in shared pages all that the request computed is kept, as in vLLM.
        kv_bytes: Bytes of the full KV of one token.
        window_bytes: Bytes of the window KV of one token, over all sliding layers.
        window_capacity: Tokens that the pool of windows has room for; None if one pool has both.
        pools: The pools by name: ``"kv"`` and ``"swa"``, or ``"memory"``.
        windows: The pool of window KV; the only one if both share it.
        chunk: Tokens of a prompt that are computed at once, whole pages; 0 if that is left out.
        window_tokens: Tokens with window KV.
        on_free_window: Called with the slots of tokens whose window KV is freed, int64 of shape [tokens];
            their full KV may stay.
        on_window_leaves: Called with a node just before its window KV is evicted alone.
    """

    def __init__(
        self,
        binding: Binding,
        capacity: int,
        *,
        window_capacity: int | None = None,
        page_bytes: int | None = None,
    ) -> None:
        """Make an empty tree.

        Args:
            binding: The model, its policy and its plugin.
            capacity: Tokens of full KV that the pool has room for; if windows share it, tokens with full and
                window KV.
            window_capacity: Tokens of window KV that their own pool has room for; None to share one pool.
            page_bytes: Key bytes per page; 8 per token by default.

        Raises:
            PluginError: The policy's order cannot be made.
            SettingsError: The model has no sliding windows, or their pool has no room for a page.
        """
        token, page = binding.cost.token, binding.page_size
        longest = longest_window(binding.cost.spec)
        if not longest or not token.swa_bytes:
            raise SettingsError(f"model {binding.cost.spec.name!r} has no sliding windows to cache apart")
        # The token that is computed next attends to itself, which vLLM counts and SGLang does not.
        self.window = max(1, longest - 1) if window_capacity is None else longest
        self.tail = -(-self.window // page) * page
        self.kept = self.tail + page
        self.chunk = -(-binding.cost.deployment.window_chunk // page) * page
        self.kv_bytes, self.window_bytes = token.kv_bytes, token.swa_bytes
        self.window_capacity = None if window_capacity is None else window_capacity // page * page
        self.memory = capacity // page * page * (self.kv_bytes + self.window_bytes)
        if self.window_capacity is not None and self.window_capacity < page:
            raise SettingsError(
                f"the pool of windows has room for {window_capacity:,} tokens, less than a page of {page}: "
                "give more memory, a higher swa_full_tokens_ratio, or another window_layout"
            )
        self.pools: dict[str, Pool] = {}
        self.on_free_window: Callable[[NDArray[np.int64]], object] | None = None
        self.on_window_leaves: Callable[[Node], object] | None = None
        self.window_tokens = 0
        self._pinned_windows = 0
        # Starts of the locked windows that reach into a node, by its serial number.
        self._locked: dict[int, list[int]] = {}
        super().__init__(binding, capacity, page_bytes=page_bytes)

    def _make_pool(self, capacity: int) -> Pool:
        binding = self.binding
        if self.window_capacity is None:
            pool = binding.pool(
                "memory",
                self._take,
                unit="bytes",
                capacity=self.memory,
                measure=self._measure,
                make_order=partial(self._make_order, capacity),
            )
            self.windows = pool
            self.pools["memory"] = pool
            return pool
        kv = binding.pool("kv", self._take, capacity=capacity)
        self.windows = binding.pool(
            "swa",
            self._take,
            capacity=self.window_capacity,
            clock=kv.clock,
            flat=True,
            make_order=binding.make_window_order,
        )
        self.pools.update(kv=kv, swa=self.windows)
        return kv

    def _make_order(self, tokens: int, _: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        """Make the order of a shared pool, which counts tokens of both kinds where the pool counts bytes."""
        state = PoolState("kv", "tokens", tokens, tokens, 0, 0, self.binding.page_size)
        return self.binding.make_window_order((state,), shared=True)

    # -- counts ------------------------------------------------------------------------------

    def _measure(self) -> PoolState:
        """The one pool that full and window KV share, in bytes."""
        return PoolState(
            "memory", "bytes", self.memory, self.free_bytes, self.evictable_bytes, self._reserved(), 1
        )

    def _reserved(self) -> int:
        pool = getattr(self, "pool", None)  # the first measure is of a pool that is being made
        return 0 if pool is None else pool.reserved

    @property
    def full_tokens(self) -> int:
        """Tokens with full KV: all that are cached."""
        cached = self.pool.cached
        return cached if self.windows is not self.pool else cached - self.window_tokens

    @property
    def free_bytes(self) -> int:
        """Bytes of the shared pool that are neither cached nor reserved."""
        if not self.pools:
            return self.memory
        used = self.full_tokens * self.kv_bytes + self.window_tokens * self.window_bytes
        return self.memory - used - self._reserved()

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the shared pool that no lock protects."""
        if not self.pools:
            return 0
        pinned, windows = self.pool.pinned, self._pinned_windows
        full = self.full_tokens - (pinned - windows)
        return full * self.kv_bytes + (self.window_tokens - windows) * self.window_bytes

    def reserve(self, tokens: int, window_tokens: int) -> None:
        """Set the tokens, with full and with window KV, that running requests own outside the tree."""
        if self.windows is self.pool:
            self.pool.reserved = tokens * self.kv_bytes + window_tokens * self.window_bytes
        else:
            self.pool.reserved, self.windows.reserved = tokens, window_tokens

    def has_room(self, tokens: int, window_tokens: int) -> bool:
        """Whether so many tokens with full KV, and with window KV, are free or can be freed."""
        if self.windows is self.pool:
            wanted = tokens * self.kv_bytes + window_tokens * self.window_bytes
            return wanted <= self.free_bytes + self.evictable_bytes
        return all(
            wanted <= pool.free + pool.evictable
            for pool, wanted in ((self.pool, tokens), (self.windows, window_tokens))
        )

    def room(self, tokens: int, window_tokens: int) -> tuple[int, int]:
        """Tokens with full KV, and with window KV, of so many, that fit into what is free now."""
        if self.windows is not self.pool:
            return min(tokens, self._whole(self.pool.free)), min(
                window_tokens, self._whole(self.windows.free)
            )
        left = self.free_bytes
        # Windows first: full KV without a window at its end is of no use.
        windows = min(window_tokens, self._whole(left // self.window_bytes))
        left -= windows * self.window_bytes
        if not self.kv_bytes:
            return tokens, windows
        return min(tokens, self._whole(left // self.kv_bytes)), windows

    def _whole(self, tokens: int) -> int:
        return max(0, tokens) // self.page_size * self.page_size

    def make_room(
        self, node: Node, tokens: int, window_tokens: int, *, watermark: bool = True
    ) -> tuple[int, int]:
        """Evict the shortfall for more tokens, in both pools.

        Args:
            node: The node that the request resumes from: its path and its window are not evicted.
            tokens: Tokens of full KV to add, whole pages.
            window_tokens: Tokens of window KV to add, whole pages.
            watermark: Also free up to the free target, if anything has to be evicted.

        Returns:
            What fits of both: all, unless the memory is too small or too much of it is locked or reserved.
        """
        self.pin(node)
        if self.windows is self.pool:
            wanted = tokens * self.kv_bytes + window_tokens * self.window_bytes
            self.pool.evict(wanted - self.free_bytes, watermark=watermark)
        else:
            self.pool.evict(tokens - self.pool.free, watermark=watermark)
            self.windows.evict(window_tokens - self.windows.free, watermark=watermark)
        self.unpin(node)
        return self.room(tokens, window_tokens)

    # -- requests ----------------------------------------------------------------------------

    def match(
        self,
        root: Node,
        key: bytes | memoryview,
        request: RequestRecord,
        unused: list[NodeRecord] | None = None,
    ) -> Node:
        """Walk down as far as ``key`` matches, to add what follows; uses the nodes and the usable window."""
        node = super().match(root, key, request, unused)
        if unused is None:
            self.use_window(self.usable(node), request)
        return node

    def find(self, root: Node, key: bytes | memoryview, request: RequestRecord) -> Node:
        """Walk down as far as ``key`` matches, to resume; uses the nodes and the window up to the usable end.

        What is cached beyond that end is of no use to the request, unless it adds tokens there.

        Returns:
            The deepest node that matched; the request resumes from :meth:`usable` of it.
        """
        path: list[NodeRecord] = []
        node = super().match(root, key, request, path)
        usable = self.usable(node)
        end = usable.depth + usable.tokens
        pool = self.pool
        pool.clock.accesses += 1
        pool.use([each for each in path if each.depth < end], request)
        request.end, request.branch = usable, node.depth + node.tokens
        self.use_window(usable, request)
        return node

    def usable(self, node: Node) -> Node:
        """The deepest node on the path to ``node``, inclusive, before which a whole window is cached."""
        window, covered, end, current = self.window, 0, node, node
        while current.parent is not None:
            if current.window is None:
                end, covered = current.parent, 0
            else:
                covered += current.tokens
                if covered >= window:
                    return end
            current = current.parent
        return end

    def use_window(self, node: Node, request: RequestRecord | None) -> None:
        """Use the window KV that is kept before the end of a node; on no request's behalf it is no use."""
        used: list[NodeRecord] = []
        covered, kept = 0, self.kept
        while node.parent is not None and covered < kept:
            if node.window is not None:
                used.append(node.window)
            covered += node.tokens
            node = node.parent
        if not used:
            return
        used.reverse()
        self.windows.use(used, None if request is None else self._beside(request), again=False)

    def refresh(self, node: Node) -> None:
        """Make ``node``, its ancestors and its window recent without counting a use."""
        super().refresh(node)
        self.use_window(node, None)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """A request ended."""
        super().finish(request, info)
        if self.windows is not self.pool:
            self.windows.finish(self._beside(request), info)

    def _beside(self, request: RequestRecord) -> RequestRecord:
        beside = request.windows
        if beside is None:
            beside = request.windows = RequestRecord(request.number, request.in_seconds, request.asker)
        beside.matched = request.matched
        return beside

    # -- locks -------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Protect a node, the prefix before it and the window before its end, until :meth:`unpin`."""
        self.pool.pin(node)
        start, locked = node.depth + node.tokens - self.window, self._locked
        while node.parent is not None and node.depth + node.tokens > start:
            starts = locked.get(node.serial)
            if starts is None:
                locked[node.serial] = [start]
                if node.window is not None:
                    self._pin_window(node.window)
            else:
                starts.append(start)
            node = node.parent

    def unpin(self, node: Node) -> None:
        """Undo one :meth:`pin`."""
        start, locked, current = node.depth + node.tokens - self.window, self._locked, node
        while current.parent is not None and current.depth + current.tokens > start:
            starts = locked[current.serial]
            starts.remove(start)
            if not starts:
                del locked[current.serial]
                if current.window is not None:
                    self._pinned_windows -= current.window.tokens
                    self.windows.unpin(current.window)
            current = current.parent
        self.pool.unpin(node)

    def _pin_window(self, record: NodeRecord) -> None:
        self._pinned_windows += record.tokens
        self.windows.pin(record)

    # -- structure ---------------------------------------------------------------------------

    def split(self, node: Node, tokens: int) -> Node:
        """Split the first ``tokens`` tokens off ``node``, with their window KV; returns the new prefix."""
        prefix = super().split(node, tokens)
        end = prefix.depth + prefix.tokens
        starts = [start for start in self._locked.get(node.serial, ()) if start < end]
        if starts:
            self._locked[prefix.serial] = starts
        record = node.window
        if record is None:
            return prefix
        windows = self.windows
        part = WindowRecord(prefix, _MARK if windows is self.pool else 0)
        prefix.window = part
        # An order takes the prefix of a split for a node with a child, never a victim; here it can be one.
        windows.split(part, record, locked=True, flat=True)
        if record.pins:  # the lock of the tail covered the prefix too, so far
            windows.pinned -= tokens
            self._pinned_windows -= tokens
        if starts:
            part.locks = 0
            self._pin_window(part)
        else:
            windows.unlock(part)
        return prefix

    def joins(self, first: Node, before: Node, node: Node) -> bool:
        """Whether a node may take over the tokens before it: either all have window KV, or none has.

        Window KV is joined if it is of the same age, about as often used and as much locked, and within one
        window, so that a lock still takes little more than that.
        """
        part, record = before.window, node.window
        if part is None or record is None:
            return part is record
        oldest = first.window
        return (
            oldest is not None
            and part.recency == record.recency
            and part.priority == record.priority
            and part.pins == record.pins
            # Unlike nodes, windows may be used more often than those before them.
            and self.merge_alike * abs(oldest.uses - record.uses) <= max(oldest.uses, record.uses)
            and node.depth + node.tokens - first.depth <= self.tail
        )

    def take_over(self, prefix: Node, tail: Node) -> None:
        """Give the tokens of a node, and their window KV, to its only child."""
        super().take_over(prefix, tail)
        self._locked.pop(prefix.serial, None)  # whatever reaches into the prefix reaches into the tail
        part, record = prefix.window, tail.window
        if part is not None and record is not None:
            prefix.window = None
            self.windows.merge(part, record, flat=True)

    def keep_window(
        self, node: Node, start: int, request: RequestRecord, *, fresh: bool = False, watermark: bool = True
    ) -> list[Node]:
        """Keep the window KV before the end of a node, which a request has just computed; evicts for it.

        A whole window is kept, or none if there is no room for it.

        Args:
            node: The node at which the request ended, or prompts branch.
            start: First token of which the request has window KV, a whole page.
            request: The request.
            fresh: The node has just been added.
            watermark: Also free up to the free target, if anything has to be evicted.

        Returns:
            Nodes whose window KV was added.
        """
        end = node.depth + node.tokens
        # As much as there is room for: all (in shared pages), one window and a page, or one window.
        firsts = [max(start, end - self.kept), max(start, end - self.tail)]
        if self.windows is self.pool:
            firsts.insert(0, start)
        for first in dict.fromkeys(firsts):
            missing, wanted = self._missing(node, first)
            if not wanted or self._make_window_room(node, wanted, watermark):
                break
        else:
            return []
        beside, added = self._beside(request), []
        for each in reversed(missing):
            if each.depth < first:
                self.split(each, first - each.depth)
            if fresh and each is node and each.tokens > self.tail:
                # So that a lock takes one window, and no more.
                added.append(self.split(each, each.tokens - self.tail))
                self._add_window(added[-1], beside)
            added.append(each)
            self._add_window(each, beside)
        self.use_window(node, request)
        return added

    def keep_both(
        self, leaf: Node, cached: int, start: int, request: RequestRecord, *, watermark: bool = True
    ) -> list[Node]:
        """Keep windows where prompts branch, if there is room for two, and where a request ended.

        Args:
            leaf: The node at which the request ended.
            cached: Tokens of its prefix that had been cached before.
            start: First token of which the request has window KV, a whole page.
            request: The request.
            watermark: Also free up to the free target, if anything has to be evicted.

        Returns:
            Nodes whose window KV was added.
        """
        end, at = leaf.depth + leaf.tokens, cached if request.branch < 0 else request.branch
        request.branch = 0
        if not start < at < end or not self._has_room_for_two():
            return self.keep_window(leaf, start, request, fresh=cached < end, watermark=watermark)
        branch = leaf
        while branch.depth >= at and branch.parent is not None:
            branch = branch.parent
        if branch.depth + branch.tokens > at:
            branch = self.split(branch, at - branch.depth)
        self.pin(leaf)
        added = self.keep_window(branch, start, request, fresh=cached < at, watermark=watermark)
        self.unpin(leaf)
        self.pin(branch)
        added += self.keep_window(leaf, start, request, fresh=cached < end, watermark=watermark)
        self.unpin(branch)
        return added

    def _has_room_for_two(self) -> bool:
        if self.windows is self.pool:
            return 2 * self.kept * self.window_bytes <= self.free_bytes + self.evictable_bytes
        return 2 * self.kept <= self.windows.free + self.windows.evictable

    def in_flight(self, tokens: int) -> int:
        """Tokens of window KV that a request takes while it computes ``tokens`` tokens of its prompt."""
        return min(tokens, self.kept + self.chunk)

    def restore(self) -> None:
        """Restore the free target of each pool, as far as locks allow."""
        for pool in self.pools.values():
            state = pool.state()
            pool.evict(min(pool.reserve() - state.free, state.evictable), watermark=False)

    def _missing(self, node: Node, start: int) -> tuple[list[Node], int]:
        """Nodes on the path to ``node`` without window KV after ``start``, deepest first; their tokens."""
        missing, wanted = [], 0
        while node.parent is not None and node.depth + node.tokens > start:
            if node.window is None:
                missing.append(node)
                wanted += node.depth + node.tokens - max(start, node.depth)
            node = node.parent
        return missing, wanted

    def _make_window_room(self, node: Node, tokens: int, watermark: bool) -> bool:
        shared = self.windows is self.pool
        free = self.free_bytes if shared else self.windows.free
        wanted = tokens * self.window_bytes if shared else tokens
        if wanted <= free:
            return True
        self.pin(node)
        possible = wanted - free <= (self.evictable_bytes if shared else self.windows.evictable)
        if possible:
            self.windows.evict(wanted - free, watermark=watermark)
        self.unpin(node)
        return possible

    def restore_window(self, node: Node, start: int, history: Node | None = None) -> list[Node]:
        """Keep window KV before the end of a node that was copied into memory reserved for it.

        Args:
            node: The node.
            start: First token of the window KV, a whole page.
            history: Node at the same place of another tier, whose window's history it continues.

        Returns:
            Nodes whose window KV was added: those that had none.
        """
        missing, _ = self._missing(node, start)
        for each in missing:
            if each.depth < start:
                self.split(each, start - each.depth)
            self._add_window(each, None, None if history is None else history.window)
        return missing

    def resting_on(self, node: Node) -> list[Node]:
        """The nodes that a request can resume from only while the window KV of ``node`` is cached."""
        found, waiting = [], [node]
        while waiting:
            each = waiting.pop()
            if each is node or each.depth + each.tokens - self.window < node.depth + node.tokens:
                if self.usable(each) is each:
                    found.append(each)
                waiting.extend(each.children.values())
        return found

    def _add_window(
        self, node: Node, request: RequestRecord | None, history: NodeRecord | None = None
    ) -> None:
        node.window = record = WindowRecord(node, _MARK if self.windows is self.pool else 0)
        self.window_tokens += node.tokens
        self.windows.insert(record, request, priority=node.priority, history=history)
        if node.serial in self._locked:
            self._pin_window(record)

    def drop_window(self, node: Node) -> None:
        """Free the window KV of a node, which stays."""
        record = node.window
        if record is not None:
            self.window_tokens -= record.tokens
            self.windows.remove(record)
            node.window = None
            if self.on_free_window is not None and node.slots is not None:
                self.on_free_window(node.slots)

    def trim(self, node: Node, tokens: int) -> None:
        """Cut the last ``tokens`` tokens, whole pages but not all, off a leaf, with their window KV."""
        record = node.window
        if record is not None:
            self.window_tokens -= tokens
            self.windows.trim(record, tokens)
            if self.on_free_window is not None and node.slots is not None:
                self.on_free_window(node.slots[node.tokens - tokens :])
        super().trim(node, tokens)

    def remove(self, node: Node) -> None:
        """Take an unlocked leaf out of the tree, with its window KV, and free its slots."""
        self.drop_window(node)
        super().remove(node)

    # -- victims -----------------------------------------------------------------------------

    def _take(self, victim: Victim, needed: int) -> int | Refused:
        """Free a victim for a pool; returns the units freed, in the pool's unit."""
        record, shared = victim.record, self.windows is self.pool
        if not isinstance(record, WindowRecord):
            return self._take_node(victim, needed, shared)
        node = record.node
        if record.parent is None or node.window is not record:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        tokens = record.tokens
        if node.children or node.locks:
            if self.on_window_leaves is not None:
                self.on_window_leaves(node)
            self.drop_window(node)
            return tokens * self.window_bytes if shared else tokens
        # A leaf without its window is dead.
        if self.on_remove is not None:
            self.on_remove(node, tokens // self.page_size)
        self.remove(node)
        return tokens * (self.kv_bytes + self.window_bytes) if shared else tokens

    def _take_node(self, victim: Victim, needed: int, shared: bool) -> int | Refused:
        node = victim.record
        if not isinstance(node, Node):
            return Refused.NOT_A_LEAF
        size = 1
        if shared:
            size = self.kv_bytes + (0 if node.window is None else self.window_bytes)
            needed = -(-needed // size)
        wanted = victim.at_most(needed)
        step = self._trim_step
        keep = (node.tokens - wanted) // step * step if step and wanted < node.tokens else 0
        if not keep or not self._reaches(node, keep):
            wanted = node.tokens
        freed = self.take(Victim(node, victim.action, None), wanted)
        return freed if isinstance(freed, Refused) else freed * size

    def _reaches(self, node: Node, keep: int) -> bool:
        """Whether a match that ends ``keep`` tokens into a leaf has its whole window."""
        covered, length = 0, keep
        while node.parent is not None:
            if node.window is None:
                return False
            covered += length
            if covered >= self.window:
                return True
            node = node.parent
            length = node.tokens
        return True

    def clear(self) -> None:
        """Forget every node and its window, and start the policy afresh; logical time goes on."""
        for node in self.walk():
            node.window = None
        self.window_tokens = self._pinned_windows = 0
        self._locked.clear()
        super().clear()
        if self.windows is not self.pool:
            self.windows.reset()
