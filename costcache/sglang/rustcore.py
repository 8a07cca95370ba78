"""SGLang's Rust tree core, with victims that our orders name.

The core keeps the tree; we keep one record per node id that we have seen, and name leaves from the records.
That is enough because of how the core hands out ids: a split leaves the id with the tail, so the end of a
node never changes; ids are never reused; and in a tree of FULL attention alone only inserts and evictions
make a node a leaf, and both pass through here.

**Histories.** A walk is noted at the deepest node that it reached. When a leaf is evicted, its parent takes
over its history: the sum of the uses, the latest recency, the earliest creation, the highest priority. So by
the time a node is a leaf, its record counts every walk through it, as in the Python core, where each walk
notes every node. When a request walks deeper, its use moves along, so each request counts once per node. The
history of an interior node is incomplete until then, and depth and tokens of a node that was split are
corrected only when it is named. So orders that look at more than leaves, or at these two, need the Python
core.

**Trimming.** The core cannot split a node by its id and does not expose its key, so a new leaf is cut into
chunks at once, while its key is available; victims are then chunks.

**Safety.** Evicting a node that is locked or has children makes the core panic, and every later call too.
So before each eviction the core is asked whether the node is a leaf, and whether one more lock on it would
protect anything new.

**Speed.** Matches and locks call the core's binding directly: for FULL alone most of what SGLang's adapter
translates is empty, and the time saved pays for the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
    InsertStepResult,
)

from costcache.errors import SettingsError
from costcache.eviction import Refused
from costcache.sglang.leaves import LeafTaking
from costcache.sglang.records import PoolRecord, add_record, drop_record
from costcache.sglang.walks import leaf_result

if TYPE_CHECKING:
    from costcache.records import NodeRecord, Victim
    from costcache.sglang.pools import Pools

__all__ = ["CORE", "CostRustCore"]

CORE = "costcache-rust"
"""Name under which the core is registered."""

FULL = ComponentType.FULL
LOWEST = -(1 << 63)
_NO_SKIPS: list[int] = []
_MATCH = MatchResult._make

Path = Sequence[tuple[int, int, int, int, int | None, int]]
"""From the root's child down: id, parent's id, start and end in tokens, tokens on the device, children."""


class CostRustCore(LeafTaking, RustUnifiedTreeCore):
    """The Rust tree core for FULL attention alone, with records.

    Attributes:
        pools: The pools to which every change is reported; only ``kv`` exists here.
        kv: The pool of full-attention KV.
        own_walks: Evictions that ran out of records, so that the core chose victims by its own order.
        refused: Victims that were locked in the core and not in our records.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        """Build the core.

        Args:
            params: SGLang's parameters.
            components: SGLang's own components, which this core only uses to reach the cache.
        """
        self.pools: Pools = next(iter(components.values())).cache.pools
        self.kv = self.pools.kv
        self._chunk = self.pools.trim_step
        self.own_walks = 0
        self.refused = 0
        self._clear()
        super().__init__(params)
        # Read by every eviction: bound once.
        self.full_evictable_size = self._binding.full_evictable_size
        self.full_protected_size = self._binding.full_protected_size

    def _clear(self) -> None:
        # Records in kv.live have been leaves at least once; the others only gather history.
        self._records: dict[int, PoolRecord] = {}
        self._pins: dict[int, int] = {}
        self._inserting = False
        self._claimed: Path | None = None
        self._quota = 0
        self._passed: dict[int, Victim] = {}
        self._own_walk = False

    def reset(self) -> None:
        """Forget every node and every record."""
        self.pools.reset()
        self._clear()
        super().reset()

    def set_hicache_enabled(self) -> None:
        """Refuse a host tier: the core does not expose which nodes are leaves on the device.

        Raises:
            SettingsError: Always.
        """
        raise SettingsError(
            "setting 'core' is 'rust' and a host tier is attached: set it to 'auto' or 'python'"
        )

    # ---- walks -----------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """Match as SGLang does, and note the use."""
        key = params.key
        found = self._binding.match_prefix(
            self._bindings.MatchParamsBinding(key.raw_token_ids(), key.extra_key, key.cache_salt)
        )
        tokens, node_id, actions = found.device_prefix_len, found.last_device_node_id, found.cache_actions
        if tokens:
            self._note_use(node_id, tokens)
        # Without a host tier and other components all nodes and lengths are the same. By position: this
        # version of SGLang alone is supported, and keywords cost as much as our records.
        return _MATCH(
            (
                tokens,
                node_id,
                node_id,
                node_id,
                0,
                0,
                None,
                0,
                None,
                None,
                tokens,
                self._cache_actions_from_tagged(actions) if actions else [],
                found.last_visited_node_id,
                found.full_device_match_len,
            )
        )

    def begin_insert(self, params: Any) -> Any:
        """Insert as SGLang does, and note the node where it ended.

        Without a host tier and other components, an insert waits for nothing and takes one step.
        """
        key, value, priority = params.key, params.value, params.priority or 0
        self._inserting = True
        if value is None or params.track_adopted_ranges or params.rotation_base is not None:
            step = super().begin_insert(params)
            result = step.result
        else:
            done = self._binding.begin_insert(
                self._bindings.InsertParamsBinding(
                    key.raw_token_ids(),
                    value,
                    key.extra_key,
                    key.cache_salt,
                    params.session_id,
                    params.prev_prefix_len,
                    0,  # no sliding window: nothing of it was evicted,
                    None,  # and no branch of it ends here
                    params.inserted_len,
                    priority,
                )
            )
            node, actions = done.result, done.actions
            result = InsertResult(node.prefix_len, 0, node.last_device_node, node.mamba_exist)
            step = InsertStepResult(self._cache_actions_from_tagged(actions) if actions else [], result)
        self._inserting = False
        found = result.prefix_len
        size = (key._raw_len() - self.is_eagle) // self._page_size * self._page_size
        if found < size and not result.rotation_tail_declined:
            self._new_leaf(result.last_device_node, key, found, size, priority)
        elif found:
            record = self._note_use(result.last_device_node, found, inserting=True)
            if record.priority < priority:
                record.priority = priority
                self._refresh(record)
        return step

    def has_ongoing_insert(self) -> bool:
        """Whether an insert is under way: only within :meth:`begin_insert`, or after it has failed."""
        return self._inserting

    def end_insert(self) -> list[Any]:
        """Actions that a failed insert still needs."""
        if not self._inserting:
            return []
        self._inserting = False
        actions: list[Any] = super().end_insert()
        return actions

    def _new_leaf(self, node_id: int, key: Any, start: int, end: int, priority: int) -> None:
        request = self.kv.request
        before = None if request is None else self._move_use(request.end)
        if start and (before is None or before.end != start):
            # It is not below the node where the request ended last: look up its parent, which may
            # have been a leaf.
            above = self._records.get(self._binding.collect_path_info([node_id])[0][-2][0])
            if above is not None:
                above.live_children = above.live_children or 1
        if self._chunk and end - start > self._chunk:
            start = self._cut(key, start, end)
        self._records[node_id] = add_record(self.kv, node_id, end - start, start, priority=priority)

    def _cut(self, key: Any, start: int, end: int) -> int:
        """Split the new leaf [start, end) into chunks; the last keeps the id. Returns where it starts."""
        ids, eagle, bindings = key.raw_token_ids(), int(self.is_eagle), self._bindings
        cut = start
        for cut in range(start + self._chunk, end, self._chunk):
            # A match that ends inside a node splits it there.
            self._binding.match_prefix(
                bindings.MatchParamsBinding(
                    key=ids[: cut + eagle], extra_key=key.extra_key, cache_salt=key.cache_salt
                )
            )
        return cut

    # ---- locks -----------------------------------------------------------------------------

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        """Lock the node and its ancestors."""
        if skip_lock_components:
            result = super().inc_lock_ref(node_id, skip_lock_components)
        else:
            # FULL alone has no lock segments, so the receipt has nothing more.
            result = IncLockRefResult(self._binding.inc_lock_ref(node_id, _NO_SKIPS).delta, node_id)
        self._pin(node_id)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        """Undo one lock."""
        if params.skipped_lock_components:
            super().dec_lock_ref(node_id, params, skip_swa)
        else:
            receipt = self._bindings.DecLockRefParamsBinding(params.node_id)
            self._binding.dec_lock_ref(node_id, receipt, skip_swa)
        self._unpin(node_id)
        return DecLockRefResult()

    def inc_full_pin(self, node_id: int) -> None:
        """Pin the KV of the node and its ancestors."""
        super().inc_full_pin(node_id)
        self._pin(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        """Undo one pin."""
        super().dec_full_pin(node_id)
        self._unpin(node_id)

    # ---- histories -------------------------------------------------------------------------

    def _note_use(self, node_id: int, end: int, *, inserting: bool = False) -> PoolRecord:
        """Note a walk that ended at a node, ``end`` tokens from the root."""
        kv = self.kv
        request = kv.request
        record = self._records.get(node_id)
        if record is None:
            record = self._records[node_id] = self._unseen(node_id, end)
        before = None if request is None else request.end
        deeper = request is not None and end > request.counted
        if deeper and before is not None:
            self._move_use(before)
        if record.parent is not None:
            kv.use([record], request, again=inserting)
        else:  # not in the order
            record.recency = kv.clock.accesses
            if request is not None and deeper:
                record.uses += 1
                record.last_use = kv.clock.now
                request.counted = end
        if request is not None:
            # SGLang inserts the prompt once more after the whole: the request ends deeper.
            shorter = inserting and before is not None and before.end > end
            request.end = before if not deeper and shorter and self._current(before) is not None else record
        return record

    def _current(self, record: NodeRecord | None) -> PoolRecord | None:
        """The record that its node has now; None if the node was evicted."""
        node_id = getattr(record, "node", None)
        return None if node_id is None else self._records.get(node_id)

    def _move_use(self, end: NodeRecord | None) -> PoolRecord | None:
        """Move a request's use from the node where it ended, if any, as it walks on below."""
        record = self._current(end)
        if record is not None:
            record.uses -= 1
            record.live_children = record.live_children or 1
        return record

    def _unseen(self, node_id: int, end: int) -> PoolRecord:
        """Make a record for an interior node, of which only the end is known."""
        record = PoolRecord(None, 0, end, node_id)
        record.live_children = 1
        record.created = self.kv.clock.accesses
        record.priority = LOWEST
        record.locks = int(node_id in self._pins)
        return record

    def _refresh(self, record: PoolRecord) -> None:
        if record.parent is not None:
            self.kv.refresh(record)

    def _pin(self, node_id: int) -> None:
        pins = self._pins
        count = pins.get(node_id, 0)
        pins[node_id] = count + 1
        if not count:
            record = self._records.get(node_id)
            if record is not None:
                self.kv.lock(record)

    def _unpin(self, node_id: int) -> None:
        pins = self._pins
        count = pins[node_id] - 1
        if count:
            pins[node_id] = count
            return
        del pins[node_id]
        record = self._records.get(node_id)
        if record is None:
            return
        if record.parent is None:
            record.locks = 0
        else:
            self.kv.unlock(record)

    def _evicted(self, path: Path) -> None:
        """Note that the leaf at the end of a path was evicted: its parent takes over its history."""
        records, kv = self._records, self.kv
        record = records.pop(path[-1][0], None)
        parent = leaf = None
        if len(path) > 1:
            parent_id, _, start, end, _, children = path[-2]
            parent = records.get(parent_id)
            if parent is None:
                parent = records[parent_id] = self._unseen(parent_id, end)
            if record is not None:
                _merge(parent, record)
                self._refresh(parent)
            parent.live_children = children - 1
            if children == 1:
                parent.depth, parent.tokens, leaf = start, end - start, parent
        if record is not None and record.parent is not None:
            if leaf is not None and leaf.parent is not None:
                # The order offers the parent once its last child is reported evicted.
                kv.root.live_children -= 1
                leaf.live_children, record.parent = 1, leaf
            drop_record(kv, record)
        if leaf is not None and leaf.parent is None:
            records[leaf.node] = add_record(
                kv, leaf.node, leaf.tokens, leaf.depth, priority=leaf.priority, history=leaf, locks=leaf.locks
            )

    # ---- victims ---------------------------------------------------------------------------

    def claim(self, record: PoolRecord, needed: int) -> int | Refused:  # noqa: ARG002  # evicted whole
        """Check that a victim of the pool ``kv`` can be evicted.

        Returns:
            The id of the leaf to evict; or why it cannot be evicted.
        """
        node_id = record.node
        if node_id is None or self._records.get(node_id) is not record or record.live_children:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        try:
            path: Path = self._binding.collect_path_info([node_id])[0]
        except KeyError:  # it left the tree without an event
            del self._records[node_id]
            drop_record(self.kv, record)
            return Refused.NOT_NOW
        _, _, start, end, _, children = path[-1]
        record.depth, record.tokens = start, end - start
        if children:
            record.live_children = children
            return Refused.NOT_NOW
        lock = self._binding.inc_lock_ref(node_id, _NO_SKIPS)
        self._binding.dec_lock_ref(node_id, self._bindings.DecLockRefParamsBinding(node_id), False)
        if not lock.delta:
            self.refused += 1
            return Refused.NOT_NOW
        self._claimed = path
        return int(node_id)

    def unclaim(self, node_id: int) -> None:
        """Do nothing for a victim that was not evicted after all: claiming it changed nothing."""

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Evict a leaf; its parent takes over its history.

        Returns:
            Its slots, its tokens, and SGLang's actions that must follow.
        """
        path, self._claimed = self._claimed, None
        if path is None or path[-1][0] != node_id:
            path = self._binding.collect_path_info([node_id])[0]
        freed = self._binding.evict_device_leaf(node_id)
        self._evicted(path)
        # Without a host tier and other components: the slots of the leaf, and nothing else.
        actions = freed.cache_actions
        if actions:
            actions = self._cache_actions_from_tagged(actions)
        return freed.new_device_frees[0], freed.tracker[0], actions

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:  # noqa: ARG002  # no host tier
        """Evict a leaf in the form that SGLang expects."""
        return leaf_result(*self.drop_leaf(node_id))

    # ---- walks that stay SGLang's ------------------------------------------------------------

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:  # noqa: ARG002  # FULL alone
        """Begin a walk that SGLang drives: it decides when to stop, and we name the victims."""
        self._quota = request_cnt
        self._passed = {}

    def evict_device_next_node(self, component_type: Any, tracker: dict[Any, int]) -> Any:
        """Name the next leaf of SGLang's walk."""
        if tracker[component_type] >= self._quota:
            return EvictDeviceNextNodeResult()
        if not self._own_walk:
            kv, passed = self.kv, self._passed
            while (victim := kv.next_victim(passed)) is not None:
                record = victim.record
                if isinstance(record, PoolRecord):
                    node_id = self.claim(record, self._quota)
                    if not isinstance(node_id, Refused):
                        return EvictDeviceNextNodeResult(node_id=node_id, made_progress=True)
                passed[record.serial] = victim
            if not self.full_evictable_size():
                return EvictDeviceNextNodeResult()
            self._own_walk = True
            self.own_walks += 1
            super().evict_device_start(component_type, self._quota)
        return super().evict_device_next_node(component_type, tracker)

    def evict_device_end(self, component_type: Any) -> None:
        """End the walk."""
        if self._own_walk:
            self._own_walk = False
            super().evict_device_end(component_type)
        for victim in self._passed.values():
            self.kv.defer(victim)
        self._passed = {}


def _merge(parent: PoolRecord, record: PoolRecord) -> None:
    """Add the history of an evicted child to its parent's."""
    parent.uses += record.uses
    parent.last_use = max(parent.last_use, record.last_use)
    parent.recency = max(parent.recency, record.recency)
    parent.priority = max(parent.priority, record.priority)
    if record.created <= parent.created:
        parent.created, parent.creator = record.created, record.creator
