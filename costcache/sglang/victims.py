"""Owners of the pools' memory inside SGLang: each measures its pool and frees its victims.

A victim is freed by one step of SGLang's code, which makes every state change; write-back to the host tier,
and the fallbacks if it fails, are SGLang's too. The exception is full attention alone: there the tree core
removes the leaf itself, see ``take_leaf``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from costcache.eviction import Refused
from costcache.records import PoolState, Victim, tuple_maker
from costcache.sglang.records import PoolRecord

if TYPE_CHECKING:
    from costcache.pool import Pool
    from costcache.sglang.cache import CostCache

__all__ = ["HostValueVictims", "HostVictims", "KvVictims", "ValueVictims", "make_victims"]

_pool_state = tuple_maker(PoolState)

HOST_VALUES = {
    "host_swa": ("swa", ComponentType.SWA, PoolName.SWA),
    "host_state": ("state", ComponentType.MAMBA, PoolName.MAMBA),
}
"""Of each pool of values on the host: the pool on the device, SGLang's component and its memory."""

EVERYTHING = 1 << 62
"""A quota that never ends a walk: the pool does."""


def make_victims(cache: CostCache, name: str) -> KvVictims | ValueVictims | HostVictims | HostValueVictims:
    """The owner of one pool's memory."""
    if name == "kv":
        return KvVictims(cache)
    if name == "host":
        return HostVictims(cache)
    if name in HOST_VALUES:
        return HostValueVictims(cache, name)
    if name == "state" and cache.binding.ranks_states:
        return StateVictims(cache, name, ComponentType.MAMBA)
    return ValueVictims(cache, name, {"swa": ComponentType.SWA, "state": ComponentType.MAMBA}[name])


class _Sessions:
    """Evicts nodes that open sessions refer to only when nothing else is evictable.

    SGLang's rule under ``--enable-session-radix-cache``: nodes that fewer sessions refer to are evicted
    first, before any other order.

    Attributes:
        limit: References that a victim may have now.
        waiting: References of the victims kept in this pass.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.waiting: set[int] = set()

    def keeps(self, references: int) -> bool:
        """Whether a victim must wait for a later pass."""
        if references <= self.limit:
            return False
        self.waiting.add(references)
        return True

    def evict(self, pool: Pool, shortfall: int) -> int:
        """Evict in passes, each with more references allowed; returns the units freed."""
        self.limit = freed = 0
        while True:
            self.waiting.clear()
            # Headroom does not justify evicting a node that a session refers to.
            freed += pool.evict(shortfall - freed, watermark=not self.limit).freed
            if freed >= shortfall or not self.waiting:
                return freed
            self.limit = min(self.waiting)


class _Device:
    """Base of the owners of memory on the device."""

    name: str
    component: Any

    def __init__(self, cache: CostCache) -> None:
        self._cache = cache
        self._sessions = _Sessions() if cache.enable_session_radix_cache else None
        self.tracker: dict[Any, int] = {}

    def evict(self, pool: Pool, shortfall: int, tracker: dict[Any, int]) -> None:
        """Run an eviction; the units that it frees of each component are added to ``tracker``."""
        self.tracker = tracker
        run = _evict if self._sessions is None else self._sessions.evict
        metrics = self._cache.cost_metrics
        if metrics is None:
            run(pool, shortfall)
        else:
            metrics.evict(pool, run, shortfall)

    def pool_state(self) -> PoolState:
        """Measure the pool as it is now."""
        cache = self._cache
        capacity, unit, evictable, cached = self._sizes()
        free = int(cache._component_available_size(self.component))
        reserved = max(0, capacity - free - cached)
        return PoolState(self.name, unit, capacity, free, evictable, reserved, cache.binding.page_size)

    def _sizes(self) -> tuple[int, str, int, int]:
        raise NotImplementedError


class KvVictims(_Device):
    """Full-attention KV: leaves, trimmed where the tree core can."""

    name = "kv"
    component = ComponentType.FULL

    def __init__(self, cache: CostCache) -> None:
        super().__init__(cache)
        self._slots: list[Any] = []

    def evict(self, pool: Pool, shortfall: int, tracker: dict[Any, int]) -> None:
        """Run an eviction; the units that it frees of each component are added to ``tracker``."""
        try:
            super().evict(pool, shortfall, tracker)
        finally:
            self.return_slots()

    def return_slots(self) -> None:
        """Return the slots of the evicted leaves to the allocator, all at once, which costs less."""
        if self._slots:
            slots, self._slots = self._slots, []
            self._cache.free_slots(slots)

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Evict a leaf, or as much of its tail as ``needed`` asks for."""
        record, full, tracker = victim.record, self.component, self.tracker
        if not isinstance(record, PoolRecord):
            return Refused.NOT_A_LEAF
        if self._sessions is not None and self._sessions.keeps(_references(record, full)):
            return Refused.NOT_NOW
        cache = self._cache
        core = cache.tree_core
        if victim.tokens is not None:
            needed = victim.at_most(needed)
        if cache.only_frees:
            freed: int | Refused
            freed, slots, actions = core.take_leaf(record, needed)
            if not isinstance(freed, Refused):
                tracker[full] += freed
                self._slots += slots
                if actions:
                    self.return_slots()
                    cache._apply_cache_actions(actions)
            return freed
        if cache.full_alone:
            taken = cache.take_hosted(record, needed)
            if taken is not None:
                tracker[full] += taken[1]
                self._slots.append(taken[0])
                return int(taken[1])
        node_id = core.claim(record, needed)
        if isinstance(node_id, Refused):
            return node_id
        before = tracker[full]
        slots = cache.evict_leaf(node_id, tracker, needed)
        if slots is not None:
            self._slots.append(slots)
        if tracker[full] == before:
            core.unclaim(node_id)
            return Refused.NOT_NOW
        return int(tracker[full] - before)

    def _sizes(self) -> tuple[int, str, int, int]:
        cache = self._cache
        evictable, protected = cache.device_sizes(self.component)
        return int(cache.token_to_kv_pool_allocator.size_full), "tokens", evictable, evictable + protected

    def pool_state(self) -> PoolState:
        """Measure the pool as it is now."""
        cache = self._cache
        if cache.tree_core is None or not cache.full_alone:
            return super().pool_state()
        # As above, without the indirections: every eviction reads it.
        allocator, core = cache.token_to_kv_pool_allocator, cache.tree_core
        capacity, free = allocator.size_full, allocator.available_size()
        evictable, protected = core.full_evictable_size(), core.full_protected_size()
        reserved = capacity - free - evictable - protected
        return _pool_state(
            ("kv", "tokens", capacity, free, evictable, reserved if reserved > 0 else 0, allocator.page_size)
        )


class ValueVictims(_Device):
    """States and sliding-window KV: the value of any node, or the leaf that it is on."""

    def __init__(self, cache: CostCache, name: str, component: ComponentType) -> None:
        super().__init__(cache)
        self.name = name
        self.component = component
        # Locks are read when a victim is named, and again at the next eviction: SGLang changes them in many
        # places. There are never more nodes here than are locked.
        self._parked: dict[int, PoolRecord] = {}

    def evict(self, pool: Pool, shortfall: int, tracker: dict[Any, int]) -> None:
        """Run an eviction; the units that it frees of each component are added to ``tracker``."""
        for serial, record in list(self._parked.items()):
            if record.node is None:
                del self._parked[serial]
            elif record.node.component_data[self.component].lock_ref == 0:
                del self._parked[serial]
                pool.unlock(record)
        super().evict(pool, shortfall, tracker)

    def take(self, victim: Victim, needed: int) -> int | Refused:  # noqa: ARG002  # freed whole
        """Free the value of a node by one step of SGLang's own walk."""
        cache, record, component = self._cache, victim.record, self.component
        pool = cache.pools.by_name[self.name]
        if not isinstance(record, PoolRecord) or pool.live.get(record.serial) is not record:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        data = record.node.component_data[component]
        if data.lock_ref > 0:
            self._parked[record.serial] = record
            pool.lock(record)
            return Refused.NOT_NOW
        if self._sessions is not None and self._sessions.keeps(min(data.session_ref, 1)):
            return Refused.NOT_NOW
        return self._free_value(record)

    def _free_value(self, record: PoolRecord) -> int | Refused:
        """Run one step of SGLang's walk, on the node of a record."""
        cache, component, tracker = self._cache, self.component, self.tracker
        core, before, node = cache.tree_core, tracker[component], record.node
        core.evict_device_start(component, EVERYTHING)
        try:
            progressed = True
            # A step that first backs the value up to the host may find the node changed, and then asks for
            # another step.
            while progressed and tracker[component] == before and record.parent is not None:
                cache.components[component].name(node)
                node_id, progressed = cache._evict_device_next_node(component, tracker)
                if node_id is not None:
                    cache.evict_leaf(node_id, tracker)
                    break
        finally:
            core.evict_device_end(component)
        return tracker[component] - before or Refused.NOT_NOW

    def _sizes(self) -> tuple[int, str, int, int]:
        cache = self._cache
        evictable, protected = cache.device_sizes(self.component)
        if self.name == "swa":
            return int(cache.token_to_kv_pool_allocator.size_swa), "tokens", evictable, evictable + protected
        return (
            int(cache.req_to_token_pool.mamba_allocator.size),
            "states",
            evictable,
            evictable + protected,
        )


class StateVictims(ValueVictims):
    """States on the records of their KV: one order names them, to evict alone or with their leaf."""

    def take(self, victim: Victim, needed: int) -> int | Refused:  # noqa: ARG002  # freed whole
        """Free the state of a node by one step of SGLang's own walk, which takes a leaf along."""
        record = victim.record
        if not isinstance(record, PoolRecord) or record.node is None or record.state is None:
            return Refused.NOT_A_LEAF
        if record.state.locks:
            return Refused.NOT_NOW
        if self._sessions is not None and self._sessions.keeps(
            min(record.node.component_data[self.component].session_ref, 1)
        ):
            return Refused.NOT_NOW
        return self._free_value(record)


def _evict(pool: Pool, shortfall: int) -> int:
    return pool.evict(shortfall).freed


def _references(record: PoolRecord, component: Any) -> int:
    """Open sessions that refer to a node; the Rust core serves no sessions."""
    return 0 if record.node is None else int(record.node.component_data[component].session_ref)


class _Host:
    """Base of the owners of memory on the host.

    Attributes:
        sinks: The collections that SGLang's code adds to while it frees: tracker, device frees,
            host frees and actions.
    """

    name: str
    component: Any
    memory: Any

    def __init__(self, cache: CostCache) -> None:
        self._cache = cache
        self._sessions = _Sessions() if cache.enable_session_radix_cache else None
        self.sinks: tuple[Any, Any, Any, Any] | None = None

    def evict(self, wanted: int, sinks: tuple[Any, Any, Any, Any]) -> None:
        """Free ``wanted`` units of the component, those included that the tracker already has.

        Args:
            wanted: The units.
            sinks: See :attr:`sinks`.
        """
        self._cache.pools.follow(self.name)
        pool = self._cache.pools.by_name[self.name]
        run = _evict if self._sessions is None else self._sessions.evict
        metrics = self._cache.cost_metrics
        self.sinks = sinks
        tracker = sinks[0]
        try:
            # What is evictable now is less than what is in the end: parents become leaves on the way.
            while (short := wanted - tracker[self.component]) > 0:
                before = tracker[self.component]
                step = min(short, self._evictable()) or short
                if metrics is None:
                    run(pool, step)
                else:
                    metrics.evict(pool, run, step)
                if tracker[self.component] == before:
                    break
        finally:
            self.sinks = None

    def pool_state(self) -> PoolState:
        """Measure the pool as it is now."""
        cache = self._cache
        group, page_size = cache.host_pool_group, cache.binding.page_size
        unit = "states" if self.name == "host_state" else "tokens"
        host = None if group is None else group.get_pool(self.memory)
        if host is None:
            return PoolState(self.name, unit, 0, 0, 0, 0, page_size)
        capacity, free, evictable = int(host.size), int(host.available_size()), self._evictable()
        reserved = max(0, capacity - free - evictable)
        return PoolState(self.name, unit, capacity, free, evictable, reserved, page_size)

    def _evictable(self) -> int:
        raise NotImplementedError


class HostVictims(_Host):
    """Full-attention KV of the host tier: leaves that are on the host alone."""

    name = "host"
    component = ComponentType.FULL
    memory = PoolName.KV

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Evict a host leaf, or as much of its tail as ``needed`` asks for."""
        cache, record = self._cache, victim.record
        pool = cache.pools.by_name["host"]
        if not isinstance(record, PoolRecord) or pool.live.get(record.serial) is not record:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        if record.node not in cache.tree_core.evictable_host_leaves or self.sinks is None:
            return Refused.NOT_NOW
        if self._sessions is not None and self._sessions.keeps(_references(record, self.component)):
            return Refused.NOT_NOW
        tracker, device_frees, host_frees, actions = self.sinks
        before = tracker[ComponentType.FULL]
        if cache.admission is not None:
            cache.admission.evicted(record, min(record.tokens, victim.at_most(needed)))
        cut = cache.tree_core.shorten_host_leaf(record, victim.at_most(needed))
        if cut is not None:
            host_frees[ComponentType.FULL].append(cut)
            tracker[ComponentType.FULL] += len(cut)
            return len(cut)
        leaf = cache.tree_core.cut_host_leaf(record, victim.at_most(needed))
        cache.tree_core._evict_host_leaf(leaf, tracker, device_frees, host_frees, cache_actions=actions)
        return int(tracker[ComponentType.FULL] - before)

    def _evictable(self) -> int:
        # A plain set while the tier is being attached.
        return int(getattr(self._cache.tree_core.evictable_host_leaves, "tokens", 0))


class HostValueVictims(_Host):
    """States and sliding-window KV on the host alone: the value of any node, or the leaf that it is on."""

    def __init__(self, cache: CostCache, name: str) -> None:
        super().__init__(cache)
        self.name = name
        self._of, self.component, self.memory = HOST_VALUES[name]
        # As of the device: SGLang may lock a value that stays in its list.
        self._parked: dict[int, PoolRecord] = {}

    def evict(self, wanted: int, sinks: tuple[Any, Any, Any, Any]) -> None:
        """See :class:`_Host`."""
        pool, component = self._cache.pools.by_name[self.name], self.component
        for serial, record in list(self._parked.items()):
            if record.node is None or not record.node.component_data[component].host_lock_ref:
                del self._parked[serial]
                if record.node is not None:
                    pool.unlock(record)
        super().evict(wanted, sinks)

    def take(self, victim: Victim, needed: int) -> int | Refused:  # noqa: ARG002  # freed whole
        """Free the value of a node by one step of SGLang's own walk."""
        cache, record, component = self._cache, victim.record, self.component
        pool = cache.pools.by_name[self.name]
        if not isinstance(record, PoolRecord) or pool.live.get(record.serial) is not record:
            return Refused.NOT_A_LEAF
        if record.locks:
            return Refused.LOCKED
        node = record.node
        data, values = node.component_data[component], cache.tree_core.host_lru_lists[component]
        if data.host_lock_ref:
            self._parked[record.serial] = record
            pool.lock(record)
            return Refused.NOT_NOW
        if self.sinks is None or not values.in_list(node):
            return Refused.NOT_NOW
        if self._sessions is not None and self._sessions.keeps(min(data.session_ref, 1)):
            return Refused.NOT_NOW
        tracker = self.sinks[0]
        before = tracker[component]
        values.named = node
        cache.components[component].evict_host_value(before + 1, *self.sinks)
        return tracker[component] - before or Refused.NOT_NOW

    def _evictable(self) -> int:
        values = self._cache.tree_core.host_lru_lists[self.component]
        return int(getattr(values, "tokens", 0)) - sum(record.tokens for record in self._parked.values())
