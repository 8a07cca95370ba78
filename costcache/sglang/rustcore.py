"""SGLang's Rust tree core, with victims that our orders name.

The core keeps the tree; we keep one record per node id that we have met and name leaves from it (see
:mod:`costcache.sglang.history`). That is enough because of how the core hands out ids: a split leaves the
id with the tail, so the end of a node never changes; ids are never used again; and a tree of FULL attention
alone gets its leaves in two ways only, by an insert and by an eviction, both of which pass here.

**Trimming.** The core cannot split a node by its id and does not give its key away, so a new leaf is cut into
chunks at once, while its key is at hand; victims are then chunks.

**Safety.** Evicting a node that is locked or has children makes the core panic, and every later call too.
So before each eviction the core itself is asked: is it a leaf, and does one more lock on it protect anything
new?

**Speed.** Matches and locks call the core's binding themselves: for FULL alone most of what SGLang's adapter
translates is empty, and what is saved pays for the records.
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
from costcache.eviction import LOCKED, NOT_A_LEAF, NOT_NOW
from costcache.sglang.history import LeafHistory, Path
from costcache.sglang.leaves import LeafTaking
from costcache.sglang.pool import PoolRecord
from costcache.sglang.walks import leaf_result

if TYPE_CHECKING:
    from costcache.records import Victim
    from costcache.sglang.pools import Pools

__all__ = ["CORE", "CostRustCore"]

CORE = "costcache-rust"
"""Name under which the core is registered."""

FULL = ComponentType.FULL
_NO_SKIPS: list[int] = []
_MATCH = MatchResult._make


class CostRustCore(LeafTaking, LeafHistory, RustUnifiedTreeCore):
    """The Rust tree core for FULL attention alone, with records.

    Attributes:
        pools: The pools that hear of every change; only ``kv`` exists here.
        kv: The pool of full-attention KV.
        own_walks: How often no record was left and the core chose victims by its own order.
        refused: Victims that the core knew to be locked and we did not.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        """Build the core.

        Args:
            params: SGLang's parameters.
            components: SGLang's own components, which this core does not use; they lead to the cache.
        """
        self.pools: Pools = next(iter(components.values())).cache.pools
        self.kv = self.pools.kv
        self._chunk = self.pools.plan.trim_step
        self.own_walks = 0
        self.refused = 0
        self._clear()
        super().__init__(params)
        # An eviction asks: without the detour.
        self.full_evictable_size = self._binding.full_evictable_size
        self.full_protected_size = self._binding.full_protected_size

    def _clear(self) -> None:
        self.forget()
        self._inserting = False
        self._claimed: Path | None = None
        self._quota = 0
        self._passed: dict[int, Victim] = {}
        self._own_walk = False

    def reset(self) -> None:
        """Forget every node, and what the orders know."""
        self.pools.reset()
        self._clear()
        super().reset()

    def set_hicache_enabled(self) -> None:
        """Refuse a host tier: what is a leaf on the device alone cannot be told here.

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
            self._use(node_id, tokens)
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

        Without a host tier and other components, an insert has nothing to wait for: one step is all.
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
            record = self._use(result.last_device_node, found, inserting=True)
            if record.priority < priority:
                record.priority = priority
                self._refreshed(record)
        return step

    def has_ongoing_insert(self) -> bool:
        """Whether an insert is under way: only within :meth:`begin_insert`, or after it has failed."""
        return self._inserting

    def end_insert(self) -> list[Any]:
        """What a failed insert still has to free."""
        if not self._inserting:
            return []
        self._inserting = False
        actions: list[Any] = super().end_insert()
        return actions

    def _new_leaf(self, node_id: int, key: Any, start: int, end: int, priority: int) -> None:
        request = self.kv.request
        before = None if request is None else self._move_use(request.end)
        if start and (before is None or before.end != start):
            # Not below the node that the request ended at last: look up what it is below, which may
            # have been a leaf.
            above = self._records.get(self._binding.collect_path_info([node_id])[0][-2][0])
            if above is not None:
                above.live_children = above.live_children or 1
        if self._chunk and end - start > self._chunk:
            start = self._cut(key, start, end)
        self._records[node_id] = self.kv.insert(node_id, end - start, start, priority=priority)

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
        self._hold(node_id)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        """Undo one lock."""
        if params.skipped_lock_components:
            super().dec_lock_ref(node_id, params, skip_swa)
        else:
            receipt = self._bindings.DecLockRefParamsBinding(params.node_id)
            self._binding.dec_lock_ref(node_id, receipt, skip_swa)
        self._release(node_id)
        return DecLockRefResult()

    def inc_full_pin(self, node_id: int) -> None:
        """Pin the KV of the node and its ancestors."""
        super().inc_full_pin(node_id)
        self._hold(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        """Undo one pin."""
        super().dec_full_pin(node_id)
        self._release(node_id)

    # ---- victims ---------------------------------------------------------------------------

    def claim(self, record: PoolRecord, needed: int) -> tuple[int, int]:  # noqa: ARG002  # chunks go whole
        """See that a victim of the pool ``kv`` can be evicted.

        Returns:
            1 and the id of the leaf to evict; or the pipeline's answer for one that cannot go, and 0.
        """
        node_id = record.node
        if node_id is None or self._records.get(node_id) is not record or record.live_children:
            return NOT_A_LEAF, 0
        if record.locks:
            return LOCKED, 0
        try:
            path: Path = self._binding.collect_path_info([node_id])[0]
        except KeyError:  # gone, by a way that we do not know
            del self._records[node_id]
            self.kv.remove(record)
            return NOT_NOW, 0
        _, _, start, end, _, children = path[-1]
        record.depth, record.tokens = start, end - start
        if children:
            record.live_children = children
            return NOT_NOW, 0
        lock = self._binding.inc_lock_ref(node_id, _NO_SKIPS)
        self._binding.dec_lock_ref(node_id, self._bindings.DecLockRefParamsBinding(node_id), False)
        if not lock.delta:
            self.refused += 1
            return NOT_NOW, 0
        self._claimed = path
        return 1, node_id

    def put_back(self, node_id: int) -> None:
        """A victim could not go after all: nothing was changed for it."""

    def drop_leaf(self, node_id: int) -> tuple[list[Any], int, list[Any]]:
        """Evict a leaf; its parent takes over its history.

        Returns:
            Its slots, its tokens, and SGLang's actions that must follow.
        """
        path, self._claimed = self._claimed, None
        if path is None or path[-1][0] != node_id:
            path = self._binding.collect_path_info([node_id])[0]
        freed = self._binding.evict_device_leaf(node_id)
        self._gone(path)
        # Without a host tier and other components: the slots of the leaf, and nothing else.
        actions = freed.cache_actions
        if actions:
            actions = self._cache_actions_from_tagged(actions)
        return freed.new_device_frees[0], freed.tracker[0], actions

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:  # noqa: ARG002  # no host tier
        """The same, as SGLang asks for it."""
        return leaf_result(*self.drop_leaf(node_id))

    # ---- walks that stay SGLang's ------------------------------------------------------------

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:  # noqa: ARG002  # FULL alone
        """Begin a walk that SGLang drives: it says when to stop, we say what goes."""
        self._quota = request_cnt
        self._passed = {}

    def evict_device_next_node(self, component_type: Any, tracker: dict[Any, int]) -> Any:
        """Name the next leaf of SGLang's walk."""
        if tracker[component_type] >= self._quota:
            return EvictDeviceNextNodeResult()
        if not self._own_walk:
            guard, passed = self.kv.guard, self._passed
            while (victim := guard.next_victim("kv")) is not None and victim.record.serial not in passed:
                record = victim.record
                if isinstance(record, PoolRecord):
                    answer, node_id = self.claim(record, self._quota)
                    if answer > 0:
                        return EvictDeviceNextNodeResult(node_id=node_id, made_progress=True)
                passed[record.serial] = victim
            if not self.full_evictable_size():
                return EvictDeviceNextNodeResult()
            self._own_walk = True
            self.own_walks += 1
            super().evict_device_start(component_type, self._quota)
        return super().evict_device_next_node(component_type, tracker)

    def evict_device_end(self, component_type: Any) -> None:
        """The walk is over."""
        if self._own_walk:
            self._own_walk = False
            super().evict_device_end(component_type)
        defer = self.kv.guard.defer
        if defer is not None:
            for victim in self._passed.values():
                defer(victim)
        self._passed = {}
