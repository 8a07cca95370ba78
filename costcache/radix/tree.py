"""The radix tree of cached prefixes. Its pool keeps their records, and asks it to free victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, SupportsIndex, cast

from mypy_extensions import mypyc_attr

from costcache.eviction import Refused
from costcache.radix.node import Node, Root, shared_pages
from costcache.records import Action, NodeRecord, RequestInfo, RequestRecord, Victim

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.binding import Binding
    from costcache.pool import Pool

__all__ = ["LONG", "NEVER", "RadixTree", "shared_pages"]

_DELETE: Final = Action.DELETE
LONG: Final = 64
"""Nodes of a path that may be many: beyond, walking them takes longer than comparing their tokens."""
_ALIKE: Final = 8
"""Nodes are merged if the uses of one are at most a part in so many fewer than those of the one before it."""
_WORTH: Final = 8
"""Merging copies keys and slots: it is done if a walk would pass one node in so many less."""
NEVER: Final = 1 << 60
"""Nodes of a path, in a tree that merges none."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixTree:
    """A forest of path-compressed prefix trees, one root per namespace.

    A key is a contiguous buffer of unsigned bytes, ``page_bytes`` for each page of ``page_size``
    tokens: eight bytes a token where keys are tokens, eight bytes a page where a trace names
    pages by id. The tree compares whole pages only.

    A prompt that grows by a token a request leaves a chain of as many nodes, each used once less than the one
    before it. So neighbours with nearly the same uses are merged when a walk has passed more than
    ``merge_from`` nodes: of a chain, as many stay as the logarithm of its uses asks for, whatever its length,
    and a match costs what its tokens cost. Only nodes that no prompt branches off from, and that carry
    nothing of their own, are merged, where leaves can be trimmed and the order has a handler of ``merge``;
    see :meth:`costcache.orders.VictimOrder.merge`. Trees whose nodes carry more say what in :meth:`joins` and
    :meth:`take_over`.

    Attributes:
        binding: The model, its policy and its plugin.
        page_size: Tokens per page.
        page_bytes: Key bytes per page.
        pool: The pool of the nodes' tokens, in whole pages.
        roots: Roots of the namespaces that have nodes.
        merge_from: Nodes of a path beyond which those with nearly the same uses are merged.
        merge_alike: Merged are nodes of which one has at most a part in so many fewer uses than the other.
        on_remove: Called with a node and the number of its last pages, just before they leave the tree.
        on_free: Called with the slots that a victim frees, int64 of shape [tokens].
    """

    def __init__(self, binding: Binding, capacity: SupportsIndex, *, page_bytes: int | None = None) -> None:
        """Make an empty tree.

        Args:
            binding: The model, its policy and its plugin.
            capacity: Tokens that the pool has room for; a part of a page at its end is not used.
            page_bytes: Key bytes per page; 8 per token by default.

        Raises:
            PluginError: The policy's order cannot be made.
        """
        self.binding = binding
        self.page_size = page_size = binding.page_size
        self.page_bytes = page_bytes or 8 * page_size
        self.roots: dict[tuple[str | None, ...], Root] = {}
        self.on_remove: Callable[[Node, int], None] | None = None
        self.on_free: Callable[[NDArray[np.int64]], object] | None = None
        self._trim_step = binding.trim_step()
        self.merge_from = LONG if self._trim_step else NEVER  # what is evicted whole must not grow
        self.merge_alike = _ALIKE
        self.pool: Pool = self._make_pool(capacity.__index__() // page_size * page_size)

    def _make_pool(self, capacity: int) -> Pool:
        return self.binding.pool("kv", self.take, capacity=capacity)

    def root(self, namespace: tuple[str | None, ...]) -> Root:
        """The root of a namespace. A new one joins the tree with its first node."""
        root = self.roots.get(namespace)
        return Root(namespace) if root is None else root

    def walk(self) -> Iterator[Node]:
        """All nodes, parents before children, namespace by namespace."""
        for root in self.roots.values():
            yield from root.walk()

    # -- requests ----------------------------------------------------------------------------

    def match(
        self,
        root: Node,
        key: bytes | memoryview,
        request: RequestRecord,
        unused: list[NodeRecord] | None = None,
    ) -> Node:
        """Walk down from ``root`` as far as ``key`` matches, and use the nodes that match.

        A match that ends inside a node splits it: the part that was used and the part that was not
        have different histories from now on.

        Args:
            root: The root to start from.
            key: Format ``B``, a whole number of pages.
            request: The request that uses them; each node counts one use per request.
            unused: Collects the nodes that match, parents first, for a caller that decides which of them are
                used; then none is, and the request has no end yet.

        Returns:
            The deepest node that matched, all of it; ``node.end`` tokens match.
        """
        page_bytes = self.page_bytes
        path: list[NodeRecord] = [] if unused is None else unused
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
            path.append(node)
        if unused is not None:
            return node
        pool = self.pool
        pool.clock.accesses += 1
        pool.use(path, request)
        if len(path) > self.merge_from and pool.merges:
            self._merge_along(path)
        request.end = node
        return node

    def refresh(self, node: Node) -> None:
        """Make ``node`` and its ancestors recent without counting a use: a waiting request needs them."""
        self.pool.clock.accesses += 1
        path: list[NodeRecord] = [*node.path()]
        path.reverse()  # the prefix last: it stays more recent than its suffix
        self.pool.use(path, None)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """A request ended."""
        self.pool.finish(request, info)

    def pin(self, node: Node) -> None:
        """Protect a node and the prefix before it from eviction until :meth:`unpin`."""
        self.pool.pin(node)

    def unpin(self, node: Node) -> None:
        """Undo one :meth:`pin`."""
        self.pool.unpin(node)

    # -- structure ---------------------------------------------------------------------------

    def part(self, key: bytes | memoryview, start: int, tokens: int) -> bytes | memoryview:
        """The part of a key that stands for ``tokens`` tokens from ``start`` on, both whole pages."""
        first = start // self.page_size * self.page_bytes
        return key[first : first + tokens // self.page_size * self.page_bytes]

    def append(
        self,
        parent: Node,
        key: bytes | memoryview,
        slots: NDArray[np.int64] | None,
        request: RequestRecord | None,
        priority: int = 0,
        history: NodeRecord | None = None,
    ) -> Node:
        """Add a new leaf under ``parent``.

        Args:
            parent: A node of which no child starts with the key's first page.
            key: Format ``B``, one page or more. The bytes are copied.
            slots: int64 of shape [tokens], kept as given; or None.
            request: The request that makes it; None for a copy of another tier's memory.
            priority: The request's priority.
            history: Record of the same tokens on another tier, whose history the leaf continues.
        """
        tokens = len(key) // self.page_bytes * self.page_size
        edge = bytes(key[: self.page_bytes])
        node = Node(parent, tokens, parent.depth + parent.tokens, edge, bytearray(key), slots)
        if not parent.children and isinstance(parent, Root):
            self.roots[parent.namespace] = parent
        parent.children[edge] = node
        self.pool.insert(node, request, priority=priority, history=history)
        return node

    def split(self, node: Node, tokens: int) -> Node:
        """Split the first ``tokens`` tokens, whole pages, off ``node`` and return the new prefix.

        ``node`` keeps its identity, and with it its locks and the order's data, as the tail.
        """
        parent = _parent(node)
        cut = tokens // self.page_size * self.page_bytes
        slots, key = node.slots, node.key
        head = None if slots is None else slots[:tokens]
        prefix = Node(parent, tokens, node.depth, node.edge, key[:cut], head)
        parent.children[node.edge] = prefix
        node.key = key[cut:]
        node.edge = bytes(node.key[: self.page_bytes])
        if slots is not None:
            node.slots = slots[tokens:]
        if node.hashes is not None:
            pages = tokens // self.page_size
            prefix.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        prefix.children[node.edge] = node
        self.pool.split(prefix, node)
        return prefix

    def _merge_along(self, path: list[NodeRecord]) -> None:
        """Merge neighbours that have nearly the same uses, on a path that a walk has just used."""
        alike, spared = self.merge_alike, 0
        runs: list[list[Node]] = []
        run: list[Node] = []
        for record in path:
            node = cast(Node, record)
            if run:
                first, before = run[0], run[-1]
                if (
                    before.live_children == 1
                    and not before.pins
                    and before.priority == node.priority
                    and alike * (first.uses - node.uses) <= first.uses
                    and self.joins(first, before, node)
                ):
                    run.append(node)
                    spared += 1
                    continue
                runs.append(run)
            run = [node]
        runs.append(run)
        if spared * _WORTH >= len(path):
            for run in runs:
                if len(run) > 1:
                    self.merge(run)

    def joins(self, first: Node, before: Node, node: Node) -> bool:  # noqa: ARG002 # for subclasses
        """Whether a node may take over the tokens of ``before``, its parent, and of all from ``first`` on."""
        return True

    def merge(self, run: list[Node]) -> None:
        """Merge nodes, of which each but the first is the only child of the one before it.

        The last one keeps its identity, and with it its locks and the order's data; the others have no pins
        of their own. See :meth:`costcache.pool.Pool.merge`.
        """
        first, node = run[0], run[0]
        parent, slots = _parent(first), [each.slots for each in run if each.slots is not None]
        for tail in run[1:]:
            self.take_over(node, tail)
            node = tail
        parent.children[node.edge] = node
        if slots:
            node.slots = _joined(slots)

    def take_over(self, prefix: Node, tail: Node) -> None:
        """Give the tokens of a node, but not their slots, to its only child."""
        key, hashes, more = prefix.key, prefix.hashes, tail.hashes
        key += tail.key
        tail.key, tail.edge = key, prefix.edge
        tail.hashes = None if hashes is None or more is None else hashes + more
        prefix.key, prefix.hashes, prefix.slots = bytearray(), None, None
        prefix.children = {}
        prefix.into = tail
        self.pool.merge(prefix, tail)

    def trim(self, node: Node, tokens: int) -> None:
        """Cut the last ``tokens`` tokens, whole pages but not all, off a leaf, and free their slots."""
        keep = node.tokens - tokens
        slots = node.slots
        if slots is not None:
            node.slots = slots[:keep]
            if 2 * keep < _base_size(slots) and slots.flags.writeable:
                node.slots = slots[:keep].copy()
        node.checksum = None
        self.pool.trim(node, tokens)
        # Only now: the order may look at what is trimmed off.
        del node.key[keep // self.page_size * self.page_bytes :]
        if slots is not None and self.on_free is not None:
            self.on_free(slots[keep:])

    def remove(self, node: Node) -> None:
        """Take an unlocked leaf out of the tree, and free its slots."""
        parent = _parent(node)
        del parent.children[node.edge]
        self.pool.remove(node)
        slots = node.slots
        node.slots = None
        node.key = bytearray()  # the order may keep the record for a while, but not its memory
        if not parent.children and isinstance(parent, Root):
            del self.roots[parent.namespace]  # one root per salt or adapter would grow without end
        if slots is not None and self.on_free is not None:
            self.on_free(slots)

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Free a leaf, or as much of its tail as ``needed`` asks for; the pool calls this."""
        node, action, limit = victim
        if not isinstance(node, Node) or node.parent is None or node.children:
            return Refused.NOT_A_LEAF
        if action is not _DELETE:
            return Refused.NOT_A_LEAF  # there are no states to tombstone here
        if node.locks:
            return Refused.LOCKED
        tokens, step = node.tokens, self._trim_step
        if limit is not None:
            needed = victim.at_most(needed)
        keep = (tokens - needed) // step * step if step and needed < tokens else 0
        freed = tokens - keep
        if self.on_remove is not None:
            self.on_remove(node, freed // self.page_size)
        if keep:
            self.trim(node, freed)
        else:
            self.remove(node)
        return freed

    def clear(self) -> None:
        """Forget every node and start the policy afresh; logical time goes on."""
        for node in list(self.walk()):
            node.slots = None
            node.key = bytearray()
            node.children = {}
        self.roots.clear()
        self.pool.reset()


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    import numpy as np

    return np.concatenate(parts)


def _base_size(slots: NDArray[np.int64]) -> int:
    return slots.size if slots.base is None else slots.base.size


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise ValueError(f"{node!r} is a root, or has been evicted: match its prefix again")
    return node.parent
