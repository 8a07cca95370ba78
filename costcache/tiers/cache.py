"""The tiered prefix cache: the generic cache of the device, with host memory and storage below it."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from costcache.errors import SettingsError
from costcache.radix.cache import RadixCache, exclusive
from costcache.radix.keys import as_int64, as_key
from costcache.radix.statecache import StateCache
from costcache.radix.states import StateTree
from costcache.radix.windows import WindowTree
from costcache.records import RequestInfo
from costcache.settings import read_settings
from costcache.tiers.copies import Copies
from costcache.tiers.device import DeviceTier
from costcache.tiers.disk import DiskTier
from costcache.tiers.host import HostTier
from costcache.tiers.line import Line
from costcache.tiers.lower import LowerBinding
from costcache.tiers.moving import Mover
from costcache.tiers.ranks import Alone
from costcache.tiers.settings import TierSettings
from costcache.tiers.tier import Place
from costcache.tiers.up import Load
from costcache.tiers.writing import make_writing

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from costcache.radix.node import Node
    from costcache.radix.results import Inserted, Match
    from costcache.records import Asker
    from costcache.storage import SealedStore
    from costcache.tiers.buffers import Buffers
    from costcache.tiers.counters import TierCounters
    from costcache.tiers.ranks import Ranks

__all__ = ["TieredCache", "TieredMatch"]

logger = logging.getLogger("costcache")

_DISK_SPEED = 2e9
"""Bytes per second of the disk until it is measured, if the deployment does not say."""


class TieredMatch:
    """The result of :meth:`TieredCache.match_prefix`.

    Attributes:
        device: The match on the device; its slots can be used at once.
        host_len: Tokens from which a request can resume once they are loaded from host memory.
        disk_len: The same of storage.
        place: The prefix that was asked for.
        request: Name of the request.
    """

    __slots__ = ("device", "disk_len", "host_len", "place", "request")

    def __init__(self, device: Match, host_len: int, disk_len: int, place: Place, request: Hashable) -> None:
        self.device = device
        self.host_len = host_len
        self.disk_len = disk_len
        self.place = place
        self.request = request

    @property
    def matched_len(self) -> int:
        """Tokens that the device has."""
        return self.device.matched_len

    @property
    def loadable(self) -> int:
        """Tokens after those that slower tiers have."""
        return max(0, self.host_len - self.matched_len, self.disk_len - self.matched_len)

    def __repr__(self) -> str:
        return f"TieredMatch(device={self.matched_len}, host={self.host_len}, disk={self.disk_len})"


class TieredCache:
    """A prefix cache in three tiers: the device, host memory, and storage.

    Each tier is a tree over a pool of its own, ranked by the cache's policy; a prefix may be in several.
    What a tier has of a prefix, it has from the first token on. The chance of reuse that decides what is
    moved is the forecast of the device's order, for all tiers; where that order can be shared
    (:meth:`costcache.orders.VictimOrder.below`), and neither states nor windows are evicted apart, it ranks
    the lower tiers, too.

    Copies are asynchronous. Call :meth:`step` once per step of the server: it takes over what has been
    copied, and may evict. Between two calls of it nothing changes but by the calls made. Not thread-safe: one
    scheduler owns it; the threads that copy touch memory and storage alone.

    Several ranks make the same calls in the same order. :meth:`step`, :meth:`wait` and :meth:`drain` are then
    collective: a copy counts once it is done on every rank, as far as it succeeded on all of them.
    """

    def __init__(
        self,
        cache: RadixCache | StateCache,
        buffers: Buffers,
        *,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> None:
        """Put tiers below a cache that is empty.

        Args:
            cache: The device's cache.
            buffers: The memory that its slots are of; and that of its states, or of window KV if the cache
                evicts sliding windows apart.
            ranks: The other ranks of the model; none by default.
            **settings: The fields of :class:`TierSettings`.

        Raises:
            SettingsError: A setting is wrong, the folder of the disk tier cannot be used, the buffers do not
                fit the cache, a tier has no room for what a request resumes from, or the cache is not empty.
            PluginError: There is no such storage backend, or it cannot be opened.
        """
        chosen = read_settings(TierSettings, settings)
        if cache.cached:
            raise SettingsError(f"the cache has {cache.cached} tokens: put the tiers below an empty one")
        _check_buffers(cache, buffers)
        if chosen.disk and chosen.path is None:
            raise SettingsError(
                f"disk is {chosen.disk} bytes and path is None: name the folder of the disk tier"
            )
        self.settings = chosen
        self.device = cache
        self._device = DeviceTier(cache, buffers)
        self._ranks: Ranks = Alone() if ranks is None else ranks
        self._mover: Mover | None = None
        self._store: SealedStore | None = None
        self._lines: list[Line] = []
        self._busy = False
        try:
            self._build(buffers)
        except BaseException:
            self.close()
            cache._tree.pool.reset()  # its order has heard of tiers that are not there
            raise

    def _build(self, buffers: Buffers) -> None:
        chosen, cache, tree = self.settings, self.device, self.device._tree
        binding = tree.binding
        layout = buffers.layout()
        ratio = (tree.window_capacity or 0) / cache.pool_size if isinstance(tree, WindowTree) else 0.0
        lower = LowerBinding.under(binding, tree.pool, layout, ratio)
        deployment = binding.cost.deployment
        store = None
        if chosen.disk and chosen.path is not None:
            folder = chosen.path if self._ranks.size == 1 else chosen.path / f"rank{self._ranks.rank}"
            store = self._store = binding.plugins.open_storage(
                chosen.storage, folder, chosen.disk, chosen.storage_settings
            )
        host: HostTier | None = None
        tree.pool.reset()  # tiers that the cache had before are of no account
        try:
            if chosen.host:
                host = HostTier(lower, chosen.host, chosen.state_share, layout)
        except MemoryError as error:
            logger.warning("the host tier is off: %s", error)
        (has_host,) = self._ranks.least([int(host is not None)])
        if host is None or not has_host:
            if lower.device is not None:
                tree.pool.reset()  # its order has heard of a tier that is not there
            return  # without host memory there is nothing to copy through
        device = buffers.tokens.device
        on_device = device if device.type == "cuda" else None
        self._lines = [Line(Copies("host", on_device), deployment.host_link_bytes_per_second)]
        disk = None
        if store is not None:
            line = Line(Copies("disk"), deployment.disk_bytes_per_second or _DISK_SPEED)
            self._lines.append(line)
            fingerprint = layout.fingerprint(
                binding.architecture.model.name, binding.page_size, deployment.kv_dtype, self._ranks.size
            )
            disk = DiskTier(lower, chosen.disk, store, fingerprint, self._ranks, self._deleting(store, line))
        self._mover = mover = Mover(
            self._device,
            host,
            disk,
            self._lines,
            layout,
            lower.cost,
            make_writing(chosen.write),
            chosen.in_flight,
            self._ranks,
        )
        tree.pool.over_tier()
        mover.follow()
        cache.before_eviction(lambda node, _: mover.demote(node))
        if isinstance(tree, StateTree):
            tree.on_tombstone = mover.demote
        elif isinstance(tree, WindowTree):
            tree.on_window_leaves = self._window_leaves

    def _window_leaves(self, node: Node) -> None:
        if self._mover is not None:
            for each in self._device.resting_on(node):
                self._mover.demote(each)

    @staticmethod
    def _deleting(store: SealedStore, line: Line) -> Callable[[list[bytes]], None]:
        """A function that deletes entries from storage, in the thread of its link."""

        def delete(keys: list[bytes]) -> None:
            def work() -> int:
                for key in keys:
                    store.delete(key)
                return len(keys)

            line.submit(work, lambda _: None, 0)

        return delete

    # -- facts -------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that are on, the fastest first."""
        if self._mover is None:
            return ("device",)
        return ("device", "host") if self._mover.disk is None else ("device", "host", "disk")

    @property
    def counters(self) -> dict[str, TierCounters]:
        """Counts of each lower tier, by its name."""
        return {} if self._mover is None else self._mover.counters

    def cached(self, tier: str) -> int:
        """Tokens in a tier, by its name; 0 in one that is off."""
        mover = self._mover
        if tier == "device":
            return self.device.cached
        lower = None if mover is None else {"host": mover.host, "disk": mover.disk}.get(tier)
        return 0 if lower is None else lower.pool.cached

    # -- requests ----------------------------------------------------------------------------

    @exclusive
    def match_prefix(
        self,
        tokens: Any,
        request: Hashable = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        asker: Asker | None = None,
    ) -> TieredMatch:
        """Find the longest cached prefix of ``tokens`` on each tier, and use it.

        The arguments are those of :meth:`costcache.RadixCache.match_prefix`.
        """
        return self._match(tokens, request, extra_key, cache_salt, asker)

    def _match(
        self,
        tokens: Any,
        request: Hashable,
        extra_key: str | None,
        cache_salt: str | None,
        asker: Asker | None = None,
    ) -> TieredMatch:
        device = self.device.match_prefix(
            tokens, request, extra_key=extra_key, cache_salt=cache_salt, asker=asker
        )
        place = self._place(tokens, extra_key, cache_salt)
        mover = self._mover
        if mover is None:
            return TieredMatch(device, 0, 0, place, request)
        number, known = self.device.clock.requests, self.device.asker_of(request, asker)
        host = mover.host.use(place, request, number, known)
        disk_len = 0
        if mover.disk is not None:
            disk_len = mover.disk.use(place, request, number, known).end
        mover.counters["host"].hits += max(0, host.end - device.matched_len)
        mover.counters["disk"].hits += max(0, disk_len - max(host.end, device.matched_len))
        mover.copy_down(device.node)
        mover.copy_to_disk(host)
        return TieredMatch(device, host.end, disk_len, place, request)

    @exclusive
    def load(self, match: TieredMatch) -> Load:
        """Begin to load what slower tiers have of a match, as far as the policy finds it worth it.

        Slots are reserved on the device for it, and its sources are pinned, until it is done.

        Returns:
            The load; ``done`` at once if nothing is loaded. When it is done, :meth:`resume` it.

        Raises:
            TypeError: Not a match of a tiered cache.
        """
        if not isinstance(match, TieredMatch):
            raise TypeError(f"match is {match!r}: give the result of match_prefix")
        load = Load(match.place, match.matched_len, max(match.host_len, match.disk_len), match.request)
        load.owner = self
        if self._mover is None or not match.loadable:
            load.done = True
        else:
            self._mover.load(load)
        return load

    @exclusive
    def prefetch(
        self, tokens: Any, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> Load | None:
        """Begin to copy what only storage has of a prefix to host memory, for a request that still waits.

        Returns:
            The load, which ends in host memory; None if there is nothing to copy.
        """
        place, mover = self._place(tokens, extra_key, cache_salt), self._mover
        load = None if mover is None else mover.prefetch(place)
        if load is not None:
            load.owner = self
        return load

    @exclusive
    def cancel(self, load: Load) -> None:
        """Nobody wants a load any more: what it reserved is given back once its copies are over.

        Raises:
            TypeError: Not a load.
            ValueError: It is one of another cache.
        """
        self._check_load(load)
        load.cancelled = True
        self._unlock(load)

    @exclusive
    def resume(self, load: Load) -> TieredMatch:
        """Match the prefix of a load again, now that it is done, and give up the lock that the load had.

        Lock the node of the result, as after any match. Call it when the load is ``done``; if it has failed,
        the match is what the device has.

        Raises:
            TypeError: Not a load.
            ValueError: It is one of another cache, or still under way.
        """
        self._check_load(load)
        if not load.done and not load.cancelled:
            raise ValueError(f"{load!r} is under way: step() until it is done, or wait for it, or cancel it")
        running = load.request if load.request in self.device._requests else None
        names = load.place.names
        match = self._match(load.place.tokens, running, names["extra_key"], names["cache_salt"])
        self._unlock(load)
        return match

    @exclusive
    def insert(self, tokens: Any, slots: Any, request: Hashable = None, **options: Any) -> Inserted:
        """Cache ``tokens`` on the device, and copy them down if the policy of writing does that now.

        The KV must have been written to the slots, on the current stream of the device. The arguments are
        those of the device's cache. Where sliding windows are evicted apart, the window KV that the slots
        hold (:meth:`hold_windows`) becomes the cache's or is freed.
        """
        done = self._device.insert(tokens, slots, request, **options)
        if self._mover is not None:
            self._mover.copy_down(done.node)
        return done

    @exclusive
    def finish(self, request: Hashable, info: RequestInfo | None = None) -> None:
        """End a request; see :meth:`costcache.RadixCache.finish`. The policies of all tiers hear of it."""
        self.device.finish(request, info)
        mover, info = self._mover, info or RequestInfo()
        if mover is not None:
            mover.host.finish(request, info)
            if mover.disk is not None:
                mover.disk.finish(request, info)

    # -- the device's cache ------------------------------------------------------------------

    @exclusive
    def allocate(self, tokens: int) -> Any:
        """Reserve slots on the device; see :meth:`costcache.RadixCache.allocate`.

        What is evicted for them is copied down first, if the policy of writing does that.
        """
        return self._device.allocate(tokens)

    @exclusive
    def release(self, slots: Any) -> None:
        """Free reserved slots of the device, with the window KV that they hold."""
        self._device.release(slots)

    # -- sliding windows that are evicted apart ----------------------------------------------

    @exclusive
    def hold_windows(self, slots: Any) -> bool:
        """Reserve rows of window KV for reserved slots of a running request, evicting for them.

        Args:
            slots: Slots of whole pages, from :meth:`allocate`.

        Returns:
            Whether there is room; if not, none has any. The rows are then :meth:`window_rows`.

        Raises:
            ValueError: The cache has one pool; or a slot is not reserved, holds window KV already, or is part
                of a page.
        """
        return self._device.hold_windows(as_int64(slots, "slots"))

    @exclusive
    def free_windows(self, slots: Any) -> None:
        """Free the window KV of a running request's slots that have left its window.

        Raises:
            ValueError: The cache has one pool, or a slot is not reserved.
        """
        self._device.free_windows(as_int64(slots, "slots"))

    @exclusive
    def window_rows(self, slots: Any) -> NDArray[np.int64]:
        """The rows of the buffers' windows that tokens have, by their slots; -1 for those without window KV.

        Raises:
            ValueError: The cache has one pool.
        """
        return self._device.window_rows(as_int64(slots, "slots"))

    @exclusive
    def lock(self, node: Node) -> None:
        """Protect a node of the device, and the prefix before it."""
        self.device.lock(node)

    @exclusive
    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        self.device.unlock(node)

    # -- time --------------------------------------------------------------------------------

    @exclusive
    def step(self) -> int:
        """Take over the copies that every rank has finished; returns how many. Call it once per step.

        Where the policy of writing works ahead of need (``by_cost``), this also evicts until as much is free
        as the largest allocation of late took: one counts 2 % less with each request after it, and a tenth
        of the device at most. A victim that a slower tier has already is left, if it has as many tokens as
        are missing, and so is one that cannot be copied now because of ``in_flight``. So lock what a request
        has matched before the next step, as before any eviction.
        """
        if self._mover is None:
            return 0
        taken = self._mover.step()
        self._mover.make_ahead()
        return taken

    @exclusive
    def wait(self, load: Load) -> None:
        """Wait until a load is done.

        Raises:
            TypeError: Not a load.
            ValueError: It is one of another cache.
        """
        self._check_load(load)
        if self._mover is not None:
            self._mover.wait(load)

    @exclusive
    def drain(self) -> None:
        """Wait until no copy is under way; what was written is then in its tier."""
        self._drain()

    def _drain(self) -> None:
        if self._mover is not None:
            self._mover.drain()

    @exclusive
    def reset(self, *, force: bool = False) -> None:
        """Forget what the device has, once no copy is under way; slower tiers keep what they have.

        Args:
            force: Also when prefixes are locked; their unlocks are then ignored.

        Raises:
            ValueError: Prefixes are locked, and ``force`` is not given.
        """
        self._drain()
        self.device.reset(force=force)
        if self._device.windows is not None:
            self._device.windows.forget_cached()
        if self._mover is not None:
            self._mover.follow()

    @exclusive
    def close(self) -> None:
        """Finish the copies that are under way, end the threads and close storage. No call may follow.

        What is in storage is found again by the next cache of the same model and layout.
        """
        self._drain()
        for line in self._lines:
            line.copies.close()
        self._lines = []
        self._mover = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _place(self, tokens: Any, extra_key: str | None, cache_salt: str | None) -> Place:
        key = as_key(as_int64(tokens, "tokens"), self.device.page_size)
        return Place((extra_key, cache_salt), bytes(key))

    def _check_load(self, load: Load) -> None:
        if not isinstance(load, Load):
            raise TypeError(f"load is {load!r}: give the result of load or prefetch")
        if load.owner is not self:
            raise ValueError(f"{load!r} is a load of another cache: give it to the cache that began it")

    def _unlock(self, load: Load) -> None:
        if load.node is not None:
            self.device.unlock(load.node)
            load.node = None


def _check_buffers(cache: RadixCache | StateCache, buffers: Buffers) -> None:
    if buffers.tokens.slots < cache.pool_size:
        raise SettingsError(
            f"the buffers have {buffers.tokens.slots} rows of tokens and the cache {cache.pool_size} slots: "
            "give a row for each slot"
        )
    if isinstance(cache, StateCache):
        rows = 0 if buffers.states is None else buffers.states.slots
        if rows < cache._state_slots:
            raise SettingsError(
                f"the buffers have {rows} rows of states and the cache {cache._state_slots} state slots: "
                "give a row for each"
            )
    elif buffers.states is not None:
        raise SettingsError("the buffers have rows of states, which RadixCache does not keep: use StateCache")
    tree = cache._tree
    wanted = (tree.window_capacity or 0) if isinstance(tree, WindowTree) else 0
    rows = 0 if buffers.windows is None else buffers.windows.slots
    if rows < wanted or (rows and not wanted):
        raise SettingsError(
            f"the buffers have {rows} rows of windows and the cache's pool of windows has {wanted}: give a "
            "row for each; a cache without window_pool_size needs none"
        )
    if wanted and not buffers.tokens.row_bytes:
        raise SettingsError(f"every layer of {cache.model.name!r} slides: give no window_pool_size")
