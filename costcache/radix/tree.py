"""The radix tree: structure, locks and counts. It knows no slot pool, no policy and no plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from costcache.radix.node import Node, Root
from costcache.records import Clock, NodeRecord, RequestRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.guard import OrderGuard

__all__ = ["RadixTree", "shared_pages"]


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixTree:
    """A forest of path-compressed prefix trees, one root per namespace.

    A key is a contiguous buffer of unsigned bytes, ``page_bytes`` for each page of ``page_size``
    tokens: eight bytes a token where keys are tokens, eight bytes a page where a trace names
    pages by id. The tree compares whole pages only.

    Attributes:
        page_size: Tokens per page.
        page_bytes: Key bytes per page.
        token_bytes: KV bytes per token, for ``NodeRecord.bytes``.
        clock: Logical time.
        events: The guarded order that hears of every change; set once by the owner.
        cached: Tokens in the tree.
        protected: Tokens of locked nodes.
        nodes: Nodes in the tree, without roots.
    """

    def __init__(self, page_size: int, page_bytes: int, token_bytes: int = 0) -> None:
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.token_bytes = token_bytes
        self.clock = Clock()
        self.events: OrderGuard
        self.roots: dict[tuple[str | None, ...], Root] = {}
        self.cached = 0
        self.protected = 0
        self.nodes = 0
        self._serial = 0
        self._held: Node | None = None

    @property
    def evictable(self) -> int:
        """Tokens that no lock protects: all of them can be evicted, leaf by leaf."""
        return self.cached - self.protected

    def root(self, namespace: tuple[str | None, ...]) -> Root:
        """The root of a namespace. A new one joins the tree with its first node."""
        root = self.roots.get(namespace)
        if root is None:
            self._serial += 1
            root = Root(self._serial, namespace)
        return root

    def records(self) -> list[Node]:
        """All nodes, in order of creation."""
        return sorted(self.walk(), key=lambda node: node.serial)

    def walk(self) -> Iterator[Node]:
        """All nodes, parents before children, namespace by namespace."""
        for root in self.roots.values():
            yield from root.walk()

    def match(self, root: Node, key: bytes | memoryview, request: RequestRecord) -> Node:
        """Walk down from ``root`` as far as ``key`` matches, and touch what it matches.

        A match that ends inside a node splits it: the part that was used and the part that was not
        have different histories from now on.

        Args:
            root: Where to start.
            key: Format ``B``, a whole number of pages.
            request: Whose use it is; each node counts one use per request.

        Returns:
            The deepest node that matched, all of it; ``node.end`` tokens match.
        """
        clock, page_bytes = self.clock, self.page_bytes
        use, touch = self.events.use, self.events.touch
        clock.accesses = recency = clock.accesses + 1
        now, counted = clock.now, request.counted
        node, at, size = root, 0, len(key)
        while at < size:
            child = node.children.get(bytes(key[at : at + page_bytes]))
            if child is None:
                break
            part = child.key
            end = at + len(part)
            if end <= size and part == key[at:end]:  # type: ignore[comparison-overlap] # any buffer
                node = child
            else:
                pages = shared_pages(part, key[at : min(end, size)], page_bytes)
                node = self.split(child, pages * self.page_size)
                end = size  # nothing further can match
            at = end
            node.recency = recency
            if node.depth + node.tokens > counted:
                node.uses += 1
                node.last_use = now
                if use is not None:
                    use(node)
            if touch is not None:
                touch(node)
        request.counted = max(counted, node.depth + node.tokens)
        request.end = node
        return node

    def part(self, key: bytes | memoryview, start: int, tokens: int) -> bytes | memoryview:
        """The part of a key that names ``tokens`` tokens from ``start`` on, both whole pages."""
        first = start // self.page_size * self.page_bytes
        return key[first : first + tokens // self.page_size * self.page_bytes]

    def append(
        self,
        parent: Node,
        key: bytes | memoryview,
        slots: NDArray[np.int64] | None,
        request: RequestRecord,
        priority: int = 0,
    ) -> Node:
        """Hang a new leaf under ``parent``.

        Args:
            parent: A node of which no child starts with the key's first page.
            key: Format ``B``, one page or more. The bytes are copied.
            slots: int64 of shape [tokens], kept as given; or None.
            request: The request that makes it.
            priority: The request's priority.
        """
        clock = self.clock
        tokens = len(key) // self.page_bytes * self.page_size
        edge, depth = bytes(key[: self.page_bytes]), parent.depth + parent.tokens
        self._serial += 1
        node = Node(self._serial, parent, tokens, depth, edge, bytearray(key), slots)
        if not parent.children and isinstance(parent, Root):
            self.roots[parent.namespace] = parent
        parent.children[edge] = node
        parent.live_children += 1
        node.uses = 1
        node.last_use = clock.now
        node.recency = node.created = clock.accesses
        node.creator = request.number
        node.priority = priority
        node.bytes = tokens * self.token_bytes
        self.cached += tokens
        self.nodes += 1
        request.counted = max(request.counted, node.depth + tokens)
        request.end = node
        if self.events.insert is not None:
            self.events.insert(node)
        return node

    def split(self, node: Node, tokens: int) -> Node:
        """Split the first ``tokens`` tokens, whole pages, off ``node`` and return the new prefix.

        ``node`` keeps its identity, and with it its locks and the order's data, as the tail.
        """
        parent = _parent(node)
        cut = tokens // self.page_size * self.page_bytes
        slots = node.slots
        self._serial += 1
        prefix = Node(
            self._serial,
            parent,
            tokens,
            node.depth,
            node.edge,
            node.key[:cut],
            None if slots is None else slots[:tokens],
        )
        prefix.inherit(node)
        prefix.bytes = tokens * self.token_bytes
        parent.children[node.edge] = prefix
        node.key = node.key[cut:]
        node.edge = bytes(node.key[: self.page_bytes])
        if slots is not None:
            node.slots = slots[tokens:]
        if node.hashes is not None:
            pages = tokens // self.page_size
            prefix.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        node.parent = prefix
        node.depth += tokens
        node.tokens -= tokens
        node.bytes -= prefix.bytes
        prefix.children[node.edge] = node
        prefix.live_children = 1
        prefix.locks = 1 if node.locks else 0
        self.nodes += 1
        if self.events.split is not None:
            self.events.split(prefix, node)
        return prefix

    def trim(self, node: Node, tokens: int) -> NDArray[np.int64] | None:
        """Cut the last ``tokens`` tokens, whole pages but not all, off a leaf; return their slots."""
        keep = node.tokens - tokens
        # In place where little goes; a copy where much does, so that the memory goes with it.
        del node.key[keep // self.page_size * self.page_bytes :]
        slots, freed = node.slots, None
        if slots is not None:
            freed = slots[keep:]
            node.slots = slots[:keep]
            if 2 * keep < _base_size(slots) and slots.flags.writeable:
                node.slots = slots[:keep].copy()
        node.checksum = None
        node.tokens = keep
        node.bytes = keep * self.token_bytes
        self.cached -= tokens
        if self.events.trim is not None:
            self.events.trim(node, tokens)
        return freed

    def remove(self, node: Node) -> NDArray[np.int64] | None:
        """Take an unlocked leaf out of the tree; return its slots."""
        parent = _parent(node)
        del parent.children[node.edge]
        parent.live_children -= 1
        self.cached -= node.tokens
        self.nodes -= 1
        if self.events.remove is not None:
            self.events.remove(node)
        slots = node.slots
        node.parent = None
        node.slots = None
        node.key = bytearray()  # the order may hold the record for a while: not its memory
        if not parent.children and isinstance(parent, Root):
            del self.roots[parent.namespace]  # one root per salt or adapter would grow without end
        return slots

    def lock(self, node: Node) -> None:
        """Protect ``node`` and its ancestors from eviction until :meth:`unlock`."""
        heard = self.events.lock
        node.holds += 1
        current: Node | None = node
        # A locked node holds one lock on its parent: the walk ends at the first that was locked.
        while current is not None:
            current.locks += 1
            if current.locks > 1:
                return
            self.protected += current.tokens
            if heard is not None and current.parent is not None:
                heard(current)
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock` of ``node``."""
        heard = self.events.unlock
        node.holds -= 1
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.locks:
                return
            self.protected -= current.tokens
            if heard is not None and not current.live_children and current.parent is not None:
                heard(current)
            current = current.parent

    def hold(self, node: Node) -> None:
        """Protect ``node`` and its ancestors until :meth:`release`, which has to come before anything else.

        The same as :meth:`lock`, but where nothing else is locked without a walk: as long as the node stays,
        what is in front of it has a child, and cannot go.
        """
        if self.protected or node.parent is None or self.events.lock is not None:
            self.lock(node)
        else:
            node.holds = node.locks = 1
            self.protected = node.depth + node.tokens
            self._held = node

    def release(self, node: Node) -> None:
        """Undo :meth:`hold`."""
        if self._held is not node:
            self.unlock(node)
            return
        self._held = None
        node.holds = node.locks = 0
        self.protected = 0
        if self.events.unlock is not None and not node.live_children:
            self.events.unlock(node)

    def refresh(self, node: Node) -> None:
        """Make ``node`` and its ancestors recent without counting a use: someone waits for them."""
        self.clock.accesses = recency = self.clock.accesses + 1
        heard = self.events.refresh
        current = node
        while current.parent is not None:
            current.recency = recency
            if heard is not None:
                heard(current)
            current = current.parent

    def raise_priority(self, node: NodeRecord, priority: int) -> None:
        """Give ``node`` and its ancestors this priority where theirs is lower."""
        heard = self.events.refresh
        current = node
        while current.parent is not None:
            if current.priority < priority:
                current.priority = priority
                if heard is not None:
                    heard(current)
            current = current.parent

    def clear(self) -> None:
        """Forget every node; the clock goes on. No event is sent: the owner resets its order."""
        for node in list(self.walk()):
            node.parent = None
            node.slots = None
            node.key = bytearray()
            node.children = {}
            node.live_children = node.locks = node.holds = 0
        self.roots.clear()
        self._held = None
        self.cached = self.protected = self.nodes = 0


def shared_pages(a: bytearray, b: bytes | memoryview, page_bytes: int) -> int:
    """Whole pages that ``a`` and ``b`` have in common at their start.

    Bisects with memory comparisons: each byte is compared about once, in O(log pages) steps.
    """
    low, high = 0, min(len(a), len(b)) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = low * page_bytes, middle * page_bytes
        if a[start:stop] == b[start:stop]:  # type: ignore[comparison-overlap] # any buffer
            low = middle
        else:
            high = middle - 1
    return low


def _base_size(slots: NDArray[np.int64]) -> int:
    return slots.size if slots.base is None else slots.base.size


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise ValueError(f"{node!r} is a root, or has been evicted: match its prefix again")
    return node.parent
