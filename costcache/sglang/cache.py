"""SGLang's unified radix cache, with our pools choosing the victims."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictResult
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

from costcache.sglang.admission import Admission
from costcache.sglang.metrics import CostMetrics
from costcache.sglang.patches import exact_reclaims, slot_freer
from costcache.sglang.pools import Pools
from costcache.sglang.requests import Life, ended, info, life_of
from costcache.sglang.victims import KvVictims, ValueVictims, make_victims

if TYPE_CHECKING:
    from costcache.binding import Binding
    from costcache.recording.recorder import Recorder
    from costcache.records import RequestInfo, RequestRecord

__all__ = ["CostCache"]

logger = logging.getLogger("costcache")

POOL_OF = {ComponentType.FULL: "kv", ComponentType.SWA: "swa", ComponentType.MAMBA: "state"}

HOST_MEMORY = {
    ComponentType.FULL: PoolName.KV,
    ComponentType.SWA: PoolName.SWA,
    ComponentType.MAMBA: PoolName.MAMBA,
}


class CostCache(UnifiedRadixCache):
    """The cache that SGLang's scheduler talks to.

    Attributes:
        binding: The model, its policy and its plugin.
        core: Tree core of the cache, ``"python"`` or ``"rust"``.
        pools: Its pools.
        admission: Says what the host tier copies and loads, by cost; None for all that SGLang would.
        cost_metrics: Counts evictions for Prometheus; None unless metrics are on.
        recorder: Records the requests; None unless that was asked for.
        full_alone: Whether full attention is the model's only component.
        free_slots: Returns the slots of evicted nodes to the allocator; see
            :func:`costcache.sglang.patches.slot_freer`.
    """

    def __init__(self, params: Any, binding: Binding, core: str = "python") -> None:
        """Build the cache.

        Args:
            params: SGLang's parameters; they name our components and tree core, and the policy "lru".
            binding: The model, its policy and its plugin.
            core: Tree core that the parameters name, ``"python"`` or ``"rust"``.
        """
        self.binding = binding
        self.core = core
        # The tree core reports its nodes to the pools from its first reset on, within super().__init__.
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.enable_session_radix_cache = params.enable_session_radix_cache
        self.is_swa_enabled = ComponentType.SWA in params.tree_components
        self.tree_core: Any = None
        self.host_pool_group: Any = None
        self.cost_metrics: CostMetrics | None = None
        self.recorder: Recorder | None = None
        self._victims: dict[str, Any] = {}
        self._walking = False
        self._shares_memory = False
        self._demands_all = False
        self.admission: Admission | None = None
        self.full_alone = tuple(params.tree_components) == (ComponentType.FULL,)
        names = [POOL_OF[component] for component in params.tree_components if component in POOL_OF]
        trim_step = binding.trim_step(auto="chunk" if core == "rust" else "exact")
        self.pools = Pools(binding, trim_step, self.victims, names)
        super().__init__(params)
        self.free_slots = slot_freer(self.token_to_kv_pool_allocator)
        self._shares_memory = bool(get_memory().enable_unified_memory)
        if self.metrics_collector is not None:
            self.cost_metrics = metrics = CostMetrics(self.metrics_collector, binding.policy, core)
            for pool in self.pools.by_name.values():
                pool.take = metrics.timed(pool.take)
            metrics.publish(self.pools.by_name)

    def reset(self) -> None:
        """Drop all that is cached, as SGLang does for ``/flush_cache`` and after new weights."""
        super().reset()
        if self.cost_metrics is not None:
            self.cost_metrics.publish(self.pools.by_name)

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Attach SGLang's host tier."""
        before = set(self.pools.by_name)
        super().init_hicache(server_args, params)
        exact_reclaims(self)
        if getattr(self.binding.settings, "host_tier", "stock") == "by_cost":
            self.admission = Admission(self.binding.cost, self.pools)
        if self.cost_metrics is not None:
            for name in set(self.pools.by_name) - before:
                pool = self.pools.by_name[name]
                pool.take = self.cost_metrics.timed(pool.take)
            self.cost_metrics.publish(self.pools.by_name)

    def victims(self, name: str) -> Any:
        """The owner of a pool's memory."""
        if name not in self._victims:
            self._victims[name] = make_victims(self, name)
        return self._victims[name]

    # -- requests ----------------------------------------------------------------------------

    def _match_tree(self, params: Any) -> Any:
        if self.disable:
            return super()._match_tree(params)
        req = params.req
        life = None if req is None else life_of(req, self.pools)
        self.pools.walk(None if life is None else life.records)
        try:
            if self.only_frees:  # then nothing is left to finalize
                result = self.tree_core.match_prefix(params)
                if result.cache_actions:
                    self._apply_cache_actions(result.cache_actions)
            else:
                result = super()._match_tree(params)
        finally:
            self.pools.end_walk()
        if life is not None and not life.stored:
            life.matched(result.device_prefix_len + result.host_hit_length)
        return result

    def touch_prefix(self, key: Any) -> None:
        """Make a prefix recent without counting a use: a waiting request still needs it."""
        self.pools.walk(None)
        super().touch_prefix(key)

    def insert(self, params: Any) -> Any:
        """Cache a sequence; outside a request it counts as a separate one."""
        if self._walking or self.disable:
            return super().insert(params)
        return self._on_behalf(self.pools.begin(), super().insert, params)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **more: Any) -> None:
        """Cache the tokens that a request has computed: one walk, though SGLang inserts its prompt twice."""
        if self.disable:
            super().checkpoint_into_tree(req, up_to=up_to, **more)
            return
        life = life_of(req, self.pools)
        life.stored = True
        self._on_behalf(life.records, super().checkpoint_into_tree, req, up_to=up_to, **more)

    def _on_behalf(self, request: dict[str, RequestRecord], work: Any, *args: Any, **named: Any) -> Any:
        self.pools.walk(request)
        self._walking = True
        try:
            return work(*args, **named)
        finally:
            self._walking = False
            self.pools.end_walk()

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Release a request's memory: at its end, or because it is retracted."""
        super().on_release(req, checkpointed=checkpointed)
        self._finished(req)

    def claim_kv_row(self, req: Any) -> bool:
        """Let a streaming session take over the request's memory."""
        claimed = bool(super().claim_kv_row(req))
        if claimed:
            self._finished(req)
        return claimed

    def _finished(self, req: Any) -> None:
        if self.disable or not req.finished():
            return
        life: Life = life_of(req, self.pools)
        if not life.finished:
            life.finished = True
            told = info(req, life)
            self.pools.finish(life.records, told)
            if self.recorder is not None:
                self._record(self.recorder, req, told)

    def _record(self, recorder: Recorder, req: Any, told: RequestInfo) -> None:
        try:
            recorder.add(ended(req, told))
        except Exception as error:
            logger.error("costcache: recording ends, and the server goes on", exc_info=error)
            self.recorder = None

    # -- evictions ---------------------------------------------------------------------------

    def device_sizes(self, component: Any) -> tuple[int, int]:
        """Evictable units and locked units of a component."""
        core = self.tree_core
        if core is None:
            return 0, 0  # the tree core is being built
        if component is ComponentType.FULL:
            return int(self.full_evictable_size()), int(self.full_protected_size())
        if component is ComponentType.SWA:
            return int(self.swa_evictable_size()), int(self.swa_protected_size())
        return int(self.mamba_evictable_size()), int(self.mamba_protected_size())

    def _evict_components(
        self,
        request_by_type: dict[Any, int],
        tracker: dict[Any, int],
        available_size_targets: dict[Any, tuple[Any, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Any = None,
    ) -> None:
        targets = available_size_targets or {}
        if self._shares_memory or allocation_reclaim_satisfied is not None:
            # Pools share memory, so only SGLang can tell when enough is free: its own walk evicts the nodes
            # that our components name.
            super()._evict_components(
                request_by_type,
                tracker,
                available_size_targets,
                allocation_reclaim_satisfied=allocation_reclaim_satisfied,
            )
            return
        for component in self.tree_components:
            wanted = request_by_type[component]
            if wanted <= 0:
                continue
            if component not in POOL_OF:
                super()._evict_components(
                    {**dict.fromkeys(request_by_type, 0), component: wanted}, tracker, targets
                )
                continue
            self._evict_pool(component, wanted, tracker, targets.get(component))

    def _evict(
        self, params: Any, available_size_targets: dict[Any, tuple[Any, int]] | None = None, **reclaim: Any
    ) -> Any:
        if not self.only_frees or reclaim or self.disable:
            result = super()._evict(params, available_size_targets, **reclaim)
        else:
            result = self._evict_only_pool(params.num_tokens, available_size_targets)
        if self.cost_metrics is not None:
            self.cost_metrics.publish(self.pools.by_name)
        return result

    def _evict_only_pool(self, wanted: int, available_size_targets: dict[Any, tuple[Any, int]] | None) -> Any:
        """Free the shortfall of a cache with one pool, as SGLang does, but with fewer calls."""
        full, began = ComponentType.FULL, time.perf_counter()
        tracker = {full: 0}
        if wanted > 0:
            target = None if available_size_targets is None else available_size_targets.get(full)
            self._evict_pool(full, wanted, tracker, target)
            self.update_eviction_metrics(tracker[full], began)
        return EvictResult(tracker[full])

    def _evict_pool(
        self, component: Any, wanted: int, tracker: dict[Any, int], target: tuple[Any, int] | None
    ) -> None:
        """Free the shortfall of one pool.

        An allocator may withhold part of the freed slots (a reserve, the rest of a page): the remaining
        shortfall is evicted in another round.
        """
        pool = self.pools.by_name[POOL_OF[component]]
        victims: KvVictims | ValueVictims = self.victims(pool.name)
        while True:
            if target is None:
                short = wanted - tracker[component]
            else:
                short = target[1] - self._component_available_size(component)
            if short <= 0:
                return
            before = tracker[component]
            victims.evict(pool, short, tracker)
            if tracker[component] == before:
                if self.core == "rust" and self.full_evictable_size():
                    # Some leaf has no record: the core chooses the victims itself.
                    quota = {**dict.fromkeys(POOL_OF, 0), component: wanted}
                    super()._evict_components(quota, tracker, target and {component: target})
                return
            if target is None:
                return

    # -- the host tier -----------------------------------------------------------------------

    def evict_host(self, num_tokens: int, component_type: Any = ComponentType.FULL) -> int:
        """Evict units of a component on the host; returns the units freed."""
        if self._demands_all:
            num_tokens -= self._host_free(component_type)
            if num_tokens <= 0:
                return 0
        freed = int(super().evict_host(num_tokens, component_type))
        if self.cost_metrics is not None:
            self.cost_metrics.publish(self.pools.by_name)
        return freed

    def _execute_and_commit_kv_backup(self, action: Any, write_back: bool = False) -> int:
        if self.admission is not None and not write_back:
            # Parents come first, and a child is never copied without them.
            for count, node_id in enumerate(action.node_ids):
                if not self._is_worth_a_copy(node_id):
                    action = BackupKV(action.node_ids[:count])
                    break
        return int(super()._execute_and_commit_kv_backup(action, write_back))

    def _is_worth_a_copy(self, node_id: int) -> bool:
        node = self.tree_core.node_by_id(node_id)
        admission = self.admission
        if admission is None or node.backuped:
            return True
        states, tokens = int(node.component_data[ComponentType.MAMBA].value is not None), len(node.key)
        return admission.copies(
            node.kv or node.parent.kv,
            node.end - tokens,
            tokens,
            states,
            free=self._host_free(ComponentType.FULL),
        )

    def _keeps(self, node_id: int) -> bool:
        """Whether a leaf that is being evicted goes to the host; always if what follows it is there."""
        return bool(self.tree_core.node_by_id(node_id).children) or self._is_worth_a_copy(node_id)

    def load_back(self, node_id: int, mem_quota: int | None = None, req: Any = None) -> bool:
        """Load a prefix back to the device; under ``by_cost`` only if that is faster than computing it."""
        if self.admission is not None:
            node, tokens = self.tree_core.node_by_id(node_id), 0
            data = node.component_data[ComponentType.MAMBA]
            states, end = int(data.value is None and data.host_value is not None), node.end
            while node.evicted:
                tokens += len(node.key)
                node = node.parent
            if not self.admission.loads(end - tokens, tokens, states):
                return False
        return bool(super().load_back(node_id, mem_quota, req))

    @contextmanager
    def evicting_the_shortfall(self) -> Iterator[None]:
        """Within it, :meth:`evict_host` is asked for a whole demand, and evicts what is not free of that.

        For code of SGLang's that passes the demand where the shortfall is meant.
        """
        before, self._demands_all = self._demands_all, True
        try:
            yield
        finally:
            self._demands_all = before

    def _host_free(self, component: Any) -> int:
        host = self.host_pool_group.get_pool(HOST_MEMORY[component])
        return 0 if host is None else int(host.available_size())

    def make_host_room(self, component: Any, units: int) -> None:
        """Evict on the host what is missing for so many units of a component."""
        short = units - self._host_free(component)
        if short > 0:
            self.evict_host(short, component)

    def _execute_kv_backup(self, node_id: Any, device_value: Any, *transfers: Any) -> Any:
        # SGLang evicts first and then finds that it was not enough: for a node longer than all that can be
        # evicted, everything on the host would go for nothing.
        short = len(device_value) - self._host_free(ComponentType.FULL)
        if short > 0 and not self._can_evict_on_host(short):
            return None
        return super()._execute_kv_backup(node_id, device_value, *transfers)

    def _can_evict_on_host(self, tokens: int) -> bool:
        """Whether so many tokens may be evictable on the host, as far as that can be told at once."""
        core = self.tree_core
        tokens -= self.pools.by_name["host"].cached
        if tokens > 0 and core.is_write_back:
            copies = filter(core._can_reclaim_full_host_duplicate, core.full_host_duplicates.values())
            tokens -= sum(len(node.key) for node in copies)
        return tokens <= 0

    @property
    def only_frees(self) -> bool:
        """Whether an eviction only frees a leaf's slots: there is no other component and no other tier."""
        return (
            self.full_alone
            and self.cache_controller is None
            and self.linker is None
            and not self._shares_memory
        )

    def take_hosted(self, record: Any, needed: int) -> tuple[Any, int] | None:
        """Evict a leaf, or its tail, in one step where the tree core can; returns its slots and tokens."""
        unbacked = record.node is not None and not record.node.backuped
        taken: tuple[Any, int] | None = self.tree_core.take_hosted(
            record, needed, backs_up=self.is_write_back
        )
        if taken is not None and unbacked and self._tracks_write_through_unbacked_evictions():
            self._record_dropped_tokens(taken[1], reason="write_through_unbacked_eviction")
        return taken

    def evict_leaf(self, node_id: int, tracker: dict[Any, int], needed: int = 0) -> Any:
        """Evict one device leaf as SGLang does: delete it, demote it, or back it up first.

        Args:
            node_id: The leaf.
            tracker: Counts what is freed.
            needed: Tokens that this eviction still has to free: room is made for their copies at once.

        Returns:
            Its slots, if they are still to be freed.
        """
        slots = self._demote_alone(node_id, tracker)
        if slots is not None:
            return slots
        backup = self._evict_device_leaf(node_id, tracker)
        if backup is None:
            return None
        if not self._keeps(node_id) and self._drop_subtree_no_host(node_id, tracker):
            return None
        if self.full_alone and self.admission is None and not self.tree_core.full_host_duplicates:
            self._make_room_for_copies(needed)
        if self._execute_and_commit_kv_backup(backup, write_back=True) > 0:
            self.writing_check(write_back=True)
            slots = self._demote_alone(node_id, tracker)
            if slots is None:
                self._demote(node_id, tracker)
        elif self._drop_subtree_no_host(node_id, tracker):
            logger.warning(
                "write-back: the host tier is full; KV under node %d was evicted without a copy", node_id
            )
        else:
            logger.warning("write-back: the host tier is full and node %d is in use; it stays", node_id)
        return slots

    def _make_room_for_copies(self, tokens: int) -> None:
        short = tokens - self._host_free(ComponentType.FULL)
        if short > 0 and self._can_evict_on_host(short):
            self.evict_host(short)

    def _demote_alone(self, node_id: int, tracker: dict[Any, int]) -> Any:
        """Take a leaf that the host has, too, off the device in one step; returns its slots, or None."""
        demoted = self.tree_core.demote_leaf(node_id) if self.full_alone else None
        if demoted is None:
            return None
        tracker[ComponentType.FULL] += demoted[1]
        return demoted[0]
