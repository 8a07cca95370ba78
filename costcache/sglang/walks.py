"""Fast match, lock, insert and removal for SGLang's Python tree core.

They serve trees with FULL attention alone on the device: no HiCache, no storage, no external linker. There
each node has its KV on the device, so a walk compares keys and nothing else. Every other tree, and every key
or request that these walks do not support, takes SGLang's own.

They are fast because the key is copied to bytes once, a node is compared by one ``memcmp`` against the array
that it has anyway, children are found by the bytes of their first page, and nothing is sliced, concatenated
or called per node. EAGLE's keys are no exception: a bigram node of n bigrams has n + 1 tokens, and matches
where those n + 1 tokens do.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import get_and_increase_time_counter
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceLeafResult,
    InsertStepResult,
)

__all__ = ["FastWalks", "leaf_result", "take_result"]

FULL = ComponentType.FULL
TOKEN_BYTES = 8
# SGLang gives the deepest node of a path the newest time and each ancestor this much less.
TIME_STEP = 0.00001
_NO_CHILDREN: dict[Any, Any] = {}


def take_result(result: Any) -> tuple[list[Any], int, list[Any]]:
    """Take slots, tokens and actions out of an eviction step's result; SGLang checks that none remain."""
    actions = list(result.cache_actions)
    result.cache_actions.clear()
    return result.device_frees.pop(FULL, []), result.tracker[FULL], actions


def leaf_result(slots: list[Any], tokens: int, actions: list[Any]) -> EvictDeviceLeafResult:
    """Wrap a dropped leaf's slots as SGLang's result, without a host tier and other components."""
    return EvictDeviceLeafResult(
        device_frees={FULL: slots},
        host_frees={},
        tracker={FULL: tokens},
        cache_actions=actions,
        unbacked_tokens=tokens,
    )


class PageName:
    """A node's key in its parent's ``children``, equal to the one that SGLang gives it.

    SGLang's is a tuple of the first page's tokens: 2.6 kB a node at pages of 64, hashed, compared and freed
    int by int. This one stores its hash, and reads the tokens only where SGLang compares its own key with it.

    Attributes:
        key: The node's key.
    """

    __slots__ = ("_hash", "_page_size", "key")

    def __init__(self, hashed: int, key: Any, page_size: int) -> None:
        self._hash = hashed
        self._page_size = page_size
        self.key = key

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return bool(self.key.child_key(self._page_size) == other)


class FastWalks(UnifiedTreeCore):
    """SGLang's Python tree core with faster walks; its state is exactly that of SGLang's own.

    Every node of a tree that they support has three more attributes: ``edge``, by which its parent finds it,
    ``edges``, its children by their ``edge``, and ``name``, its key in its parent's ``children``.

    A subclass is told of them through four methods that do nothing here: :meth:`path_walked`,
    :meth:`nodes_locked`, :meth:`nodes_unlocked` and :meth:`leaf_removed`.
    """

    # ---- for a subclass to override --------------------------------------------------------

    def path_walked(self, path: list[Any], inserting: bool) -> None:
        """A fast match or insert walked over these nodes, root's child first; all of each matched.

        It comes after a split and before a new leaf: the last node is the deepest that matched, and
        ``node.priority`` already has the request's when inserting.
        """

    def nodes_locked(self, nodes: list[Any]) -> None:
        """A fast walk locked these nodes, which were unlocked; deepest first."""

    def nodes_unlocked(self, nodes: list[Any]) -> None:
        """A fast walk released the last lock of these nodes; deepest first."""

    def leaf_removed(self, node: Any) -> None:
        """A leaf was removed by a fast eviction; ``node.parent`` is still its parent."""

    # ---- the walks -------------------------------------------------------------------------

    @property
    def has_fast_walks(self) -> bool:
        """Whether the fast walks support this tree."""
        return not (self.enable_hicache or self.enable_external_cache_linker) and len(self.components) == 1

    def match_prefix(self, params: Any) -> Any:
        """Find the longest prefix of ``params.key`` in the tree, in whole pages; see SGLang's interface."""
        key = params.key
        key.maybe_to_bigram_view(self.is_eagle)
        if not self._can_walk(key):
            return super().match_prefix(params)
        if len(key) < self.page_size:
            return self._empty_match_result
        path, matched, action = self._descend(key)
        self._touch(path)
        if path:
            self.path_walked(path, False)
        end = path[-1].id if path else self.root_node.id
        return MatchResult(
            device_prefix_len=matched,
            last_device_node=end,
            last_host_node=end,
            best_match_node=end,
            full_kv_hit_length=matched,
            cache_actions=[] if action is None else [action],
            last_visited_node_id=end if path else None,
        )

    def begin_insert(self, params: Any) -> Any:
        """Insert in one step: no supported walk waits for anything."""
        key, value = params.key, params.value
        key.maybe_to_bigram_view(self.is_eagle)
        page_size = self.page_size
        size = len(key) // page_size * page_size
        if (
            not size
            or value is None
            or params.rotation_base is not None
            or params.component_evicted_seqlens
            or self._ongoing_insert_walk_state is not None
            or not self._can_walk(key)
        ):
            return super().begin_insert(params)
        priority, counted = params.priority or 0, params.inserted_len
        root = self.root_node
        root.priority = max(root.priority, priority)
        path, matched, action = self._descend(key)
        self._touch(path)
        start, bigram, own, twice = 0, self.is_eagle, params.prev_prefix_len, []
        for node in path:
            end = start + len(node.key.token_ids) - bigram
            if node.priority < priority:  # noqa: PLR1730 - no call per node
                node.priority = priority
            if end > counted:
                node.hit_count += 1
            if end > own:  # the request computed what the tree has too
                twice.append(value[max(start, own) : end])
            start = end
        if path:
            self.path_walked(path, True)
        actions = [] if action is None else [action]
        if twice:
            actions.append(FreeDeviceKV(twice))
        result = InsertResult(matched, adopted_ranges={} if params.track_adopted_ranges else None)
        node = path[-1] if path else root
        if matched < size:
            result.record_adopted_range(FULL, matched, size)
            node = self._add_new_node(
                node,
                key[matched:size],
                value[matched:size],
                priority=priority,
                session_id=params.session_id,
                rotation_base=None,
            )
            if size > counted:
                node.hit_count += 1
        result.last_device_node = node.id
        return InsertStepResult(actions=actions, result=result)

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        """Lock the node and its ancestors; ``delta`` is the tokens that became protected."""
        if skip_lock_components or not self.has_fast_walks:
            return super().inc_lock_ref(node_id, skip_lock_components)
        root, node = self.root_node, self._node_arena[node_id]
        # Only the deepest can be a leaf.
        self.evictable_device_leaves.discard(node)
        tokens, bigram, fresh = 0, self.is_eagle, []
        while node is not root:
            data = node.component_data[FULL]
            if not data.lock_ref:
                tokens += len(node.key.token_ids) - bigram
                fresh.append(node)
            data.lock_ref += 1
            node = node.parent
        if fresh:
            self.component_evictable_size_[FULL] -= tokens
            self.component_protected_size_[FULL] += tokens
            self.nodes_locked(fresh)
        return IncLockRefResult(delta=tokens, node_id=node_id)

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        """Undo one :meth:`inc_lock_ref`.

        Raises:
            AssertionError: The receipt is not of this node, or a node was not locked, as in SGLang.
        """
        if params.skipped_lock_components or not self.has_fast_walks:
            return super().dec_lock_ref(node_id, params, skip_swa)
        root, first = self.root_node, self._node_arena[node_id]
        self._assert_receipt_anchor(first, params)
        node, tokens, bigram, freed = first, 0, self.is_eagle, []
        while node is not root:
            data = node.component_data[FULL]
            left = data.lock_ref - 1
            if left < 0:
                raise AssertionError(f"node {node.id} is released and was not locked")
            data.lock_ref = left
            if not left:
                tokens += len(node.key.token_ids) - bigram
                freed.append(node)
            node = node.parent
        if freed:
            self.component_evictable_size_[FULL] += tokens
            self.component_protected_size_[FULL] -= tokens
            if not first.children and freed[0] is first:
                self.evictable_device_leaves.add(first)
            self.nodes_unlocked(freed)
        return DecLockRefResult()

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Take a leaf out of the tree.

        Returns:
            Its slots, its tokens, and SGLang's actions that must follow.
        """
        node = self._node_arena[node_id]
        if node not in self.evictable_device_leaves or not self.has_fast_walks:
            return take_result(super().evict_device_leaf(node_id, False))
        self.kv_events.record_remove(node)
        self._take_out(node)
        slots = node.component_data[FULL].value
        tokens = self._count_evicted(slots)
        self.leaf_removed(node)
        return [slots], tokens, []

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        """Take a leaf out of the tree; returns SGLang's own form of the result."""
        if not self.has_fast_walks:
            return super().evict_device_leaf(node_id, is_write_back)
        return leaf_result(*self.drop_leaf(node_id))

    def _take_out(self, node: Any) -> None:
        """Take an unlocked leaf out of the tree."""
        parent, leaves = node.parent, self.evictable_device_leaves
        leaves.discard(node)
        if self.enable_session_radix_cache:
            self._remove_leaf_from_parent(node)
        else:
            if parent.children.pop(node.name) is not node:
                raise AssertionError(f"node {node.id} is not where its parent has it")
            del parent.edges[node.edge]
            del self._node_arena[node.id]
        if not parent.children and not parent.component_data[FULL].lock_ref and parent is not self.root_node:
            leaves.add(parent)

    def _count_evicted(self, slots: Any) -> int:
        """Count the unlocked slots that one eviction step frees; returns their number."""
        tokens = int(slots.shape[0])
        self.component_evictable_size_[FULL] -= tokens
        return tokens

    def _can_walk(self, key: Any) -> bool:
        ids = key.token_ids
        return (
            type(ids) is array
            and ids.typecode == "q"
            and key.is_bigram == self.is_eagle
            and self.has_fast_walks
        )

    def _descend(self, key: Any) -> tuple[list[Any], int, Any]:
        """Walk down as far as ``key`` matches, splitting the node inside which it ends.

        Returns:
            The nodes that matched, root's child first; their length in tokens (bigrams for EAGLE), whole
            pages; and the action that a split requires, or None.
        """
        ids, limit = key.token_ids, key.limit
        # A partial page at the end matches nothing: no edge is that short.
        wanted = (ids if limit is None or limit >= len(ids) else ids[:limit]).tobytes()
        spare = TOKEN_BYTES if key.is_bigram else 0
        width = TOKEN_BYTES * self.page_size + spare
        node, at = self.root_node, 0
        path: list[Any] = []
        edge: Any = (wanted[:width], key.extra_key, key.cache_salt)
        while True:
            child = node.edges.get(edge)
            if child is None:
                return path, at // TOKEN_BYTES, None
            tokens = child.key.token_ids
            if not wanted.startswith(tokens, at):
                break
            path.append(child)
            node = child
            at += TOKEN_BYTES * len(tokens) - spare
            edge = wanted[at : at + width]
        matched = at // TOKEN_BYTES
        shared = child.key.match_at(key, matched, page_size=self.page_size)
        prefix, action = self._split_node(child.key, child, shared)
        path.append(prefix)
        return path, matched + shared, action

    def _touch(self, path: list[Any]) -> None:
        now = float(get_and_increase_time_counter())
        for node in reversed(path):
            node.last_access_time = now
            now -= TIME_STEP
        self.root_node.last_access_time = now

    # ---- structure: the only places where SGLang adds, splits and removes nodes ----------------

    def _register_node(self, node: Any) -> None:
        super()._register_node(node)
        node.edge, node.edges, node.name = None, _NO_CHILDREN, None

    def _add_new_node(self, parent: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        node = super()._add_new_node(parent, key, *args, **kwargs)
        if self.has_fast_walks:
            self._link_child(parent, node)
        return node

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        parent = child.parent
        prefix, action = super()._split_node(key, child, split_len)
        name = prefix.name = child.name  # SGLang has overwritten the value, and the key stays
        if type(name) is PageName:
            name.key = prefix.key
        if self.has_fast_walks:
            prefix.edge = child.edge
            parent.edges[prefix.edge] = prefix
            self._link_child(prefix, child)
        return prefix, action

    def _remove_leaf_from_parent(self, node: Any) -> None:
        super()._remove_leaf_from_parent(node)
        node.parent.edges.pop(node.edge, None)

    def _link_child(self, parent: Any, node: Any) -> None:
        """Link ``node`` as a child of ``parent``."""
        key = node.key
        first = key.token_ids[: self.page_size + key.is_bigram]
        edge = (first if isinstance(first, array) else array("q", first)).tobytes()
        # Below the root all nodes of a path are of one namespace.
        node.edge = (edge, key.extra_key, key.cache_salt) if parent is self.root_node else edge
        if parent.edges is _NO_CHILDREN:
            parent.edges = {}
        parent.edges[node.edge] = node
        name, last = parent.children.popitem()
        if last is not node:
            raise AssertionError(f"node {node.id} is not the last that its parent was given")
        if self.page_size > 1:
            name = PageName(hash(name), key, self.page_size)
        node.name = name
        parent.children[name] = node
