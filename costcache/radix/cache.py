"""The generic prefix cache: prefixes of tokens and the slots of their KV."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from costcache.binding import Binding
from costcache.cost import longest_window
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.eviction import Eviction, EvictionCounters
from costcache.model import ModelSpec
from costcache.plugins import PluginManager, get_plugins
from costcache.radix.events import Event, EventStream
from costcache.radix.keys import as_asker, as_count, as_info, as_int64, as_key, as_whole
from costcache.radix.node import Node, Root
from costcache.radix.results import CacheStats, Inserted, Match, joined, slots_of
from costcache.radix.slots import Slots
from costcache.radix.tree import RadixTree
from costcache.radix.windows import WindowTree
from costcache.records import Asker, Askers, Clock, NodeRecord, PoolState, RequestInfo, RequestRecord
from costcache.settings import Settings, read_settings

if TYPE_CHECKING:
    from costcache.pool import Pool

__all__ = ["PrefixCache", "RadixCache", "deployment_in_pages", "exclusive"]

P = ParamSpec("P")
R = TypeVar("R")


def _at_work(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} was called while another call is at work on this cache: a cache is not thread-safe, so call "
        "it from one thread only, and from no observer or policy"
    )


def exclusive(method: Callable[P, R]) -> Callable[P, R]:
    """Refuse a call of a cache while another one is at work on it: of another thread, or of an observer.

    The methods that a server calls most do the same without this wrapper, which takes longer.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        cache: Any = args[0]
        if cache._busy:
            raise _at_work(method.__name__)
        cache._busy = True  # no other thread runs between the question and this
        try:
            return method(*args, **kwargs)
        finally:
            cache._busy = False

    return call


class PrefixCache:
    """A tree of prefixes and the slots of their KV; base of :class:`RadixCache` and of ``StateCache``."""

    _windows: WindowTree | None = None  # the tree, if it caches sliding windows apart

    def __init__(self, tree: RadixTree, slots: Slots) -> None:
        """Make a cache of an empty tree.

        Args:
            tree: The tree; its pool ranks and evicts.
            slots: The slots of its tokens.
        """
        self.model = tree.binding.architecture.model
        self._tree = tree
        self._pool = tree.pool
        self._slots = slots
        self._page_size = tree.page_size
        self._requests: dict[Hashable, RequestRecord] = {}
        self._askers = Askers()
        self._events = EventStream(tree.page_bytes, tree.page_size)
        self._leaving: Callable[[Node, int], object] | None = None
        self._freed: list[NDArray[np.int64]] = []
        tree.on_free = self._freed.append
        self._given_out = self._out  # bound once
        self._find: Callable[[Node, memoryview, RequestRecord], Node] = tree.match
        self._device: Any = None
        self._busy = False
        self._hits = self._misses = self._hit_tokens = self._asked_tokens = 0

    # -- facts -------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def pool_size(self) -> int:
        """Slots in the pool, whole pages."""
        return self._slots.capacity

    @property
    def free(self) -> int:
        """Unused slots."""
        return self._slots.free

    @property
    def reserved(self) -> int:
        """Slots that running requests own outside the cache."""
        return self._slots.reserved

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self._pool.cached

    @property
    def evictable(self) -> int:
        """Cached tokens that no lock protects."""
        return self._pool.cached - self._pool.pinned

    @property
    def policy(self) -> str:
        """Name of the policy in force: ``lru`` after a fallback."""
        return self._pool.policy

    @property
    def plugin(self) -> str:
        """Name of the plugin that serves the model."""
        return self._tree.binding.architecture.name

    @property
    def clock(self) -> Clock:
        """Logical time; call ``clock.advance(seconds)`` to run it on the stream's time."""
        return self._pool.clock

    @property
    def counters(self) -> EvictionCounters:
        """Counts of the evictions."""
        return self._pool.counters

    def stats(self) -> CacheStats:
        """All counts, as they are now."""
        pool, slots, counters = self._pool, self._slots, self._pool.counters
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            asked_tokens=self._asked_tokens,
            cached=pool.cached,
            free=slots.free,
            reserved=slots.reserved,
            protected=pool.pinned,
            nodes=len(pool.live),
            evictions=counters.evictions,
            evicted=counters.evicted,
            trimmed=counters.trimmed,
            clamped=counters.clamped,
            fallbacks=int(pool.fell_back),
            oversized=counters.oversized,
            policy=pool.policy,
        )

    # -- requests ----------------------------------------------------------------------------

    def match_prefix(
        self,
        tokens: Any,
        request: Hashable = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        asker: Asker | None = None,
    ) -> Match:
        """Find the longest cached prefix of ``tokens``, and use it.

        A server recomputes the last token of a prompt, so it asks for ``tokens[:-1]``.

        Args:
            tokens: Integers of shape [n]: a list, a numpy array or a torch tensor.
            request: The request's name, anything hashable. Without it, the match counts as a separate
                request.
            extra_key: Prefixes of different extra keys (an adapter, say) never match.
            cache_salt: Nor do prefixes of different salts.
            asker: Who sent the request, for policies that ask; see :class:`~costcache.records.Asker`.

        Raises:
            TypeError: Tokens are not integers, or the asker is not an Asker of texts.
        """
        if self._busy:
            raise _at_work("match_prefix")
        self._busy = True  # see exclusive()
        try:
            array = as_int64(tokens, "tokens")
            if asker is not None:
                record = self._asked(request, asker)
            else:
                record = self._pool.begin() if request is None else self._request(request)
            first = record.end is None
            root = self._tree.root((extra_key, cache_salt))
            match = self._found(self._find(root, as_key(array, self._page_size), record), first)
            found = match.matched_len
            if first:
                record.matched = found  # a later match finds what the request itself inserted
            if found:
                self._hits += 1
                self._hit_tokens += found
            else:
                self._misses += 1
            self._asked_tokens += array.size
            return match
        finally:
            self._busy = False

    def insert(
        self,
        tokens: Any,
        slots: Any = None,
        request: Hashable = None,
        *,
        window_from: int = 0,
        priority: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        asker: Asker | None = None,
    ) -> Inserted:
        """Cache the whole pages of ``tokens`` that are not cached yet.

        Args:
            tokens: Integers of shape [n]: a list, a numpy array or a torch tensor.
            slots: Their slots, integers of shape [n], reserved by the caller or free. Those of added tokens
                become the cache's; the others stay the caller's: see :class:`Inserted`. Without
                slots the cache allocates its own, evicts for them, and adds the head that fits.
            request: The request's name; without it, the insert counts as a separate request.
            window_from: With a pool of windows: first token whose window KV the request still has, of those
                that it computed. The cache keeps one window and one page of it, before the end and where
                prompts branch.
            priority: For the ``priority`` order; a node has the highest of its requests.
            extra_key: See :meth:`match_prefix`.
            cache_salt: See :meth:`match_prefix`.
            asker: See :meth:`match_prefix`; a request keeps the first one that it is given.

        Raises:
            ValueError: Slots are missing, out of range, in the cache already or named twice.
            TypeError: Tokens or slots are not integers, or the priority is not a whole number.
        """
        if self._busy:
            raise _at_work("insert")
        self._busy = True  # see exclusive()
        try:
            return self._insert(tokens, slots, request, window_from, priority, (extra_key, cache_salt), asker)
        finally:
            self._busy = False

    def _insert(
        self,
        tokens: Any,
        slots: Any,
        request: Hashable,
        window_from: int,
        priority: int,
        namespace: tuple[str | None, str | None],
        asker: Asker | None,
    ) -> Inserted:
        array = as_int64(tokens, "tokens")
        given = self._given(slots, array.size)
        priority = as_whole(priority, "priority")
        if asker is not None:
            record = self._asked(request, asker)
        else:
            record = self._pool.begin() if request is None else self._request(request)
        tree, pool, page_size, windows = self._tree, self._pool, self._page_size, self._windows
        computed = 0 if windows is None else -(-as_count(window_from, "window_from") // page_size) * page_size
        key = as_key(array, page_size)
        node = tree.match(tree.root(namespace), key, record)
        matched = node.depth + node.tokens
        if windows is not None:
            computed = max(computed, windows.usable(node).end)
        parts = [] if given is None or not matched else slots_of(node)
        if node.priority < priority:  # then no ancestor has more either
            pool.raise_priority(node, priority)
        whole = array.size - array.size % page_size
        added = whole - matched
        if whole > self._slots.capacity and not record.oversized:
            record.oversized = True
            pool.counters.oversized += 1
        if added and given is None:
            added = self._fit(node, added)
            self._collect()
        if added:
            if given is None:
                taken = self._slots.allocate(added)
                added = 0 if taken is None else taken.size
            else:
                taken = given[matched:whole]
            if taken is not None and added:
                taken = self._slots.cache(taken)
                node = tree.append(node, tree.part(key, matched, added), taken, record, priority)
                self._reserve()
                if self._events:
                    self._events.stored(node, namespace)
        done = Inserted(node, matched, added, given, parts, self._given_out)
        if windows is not None:
            done._keep(windows.keep_both(node, matched, computed, record))
            self._collect()
        return done

    @exclusive
    def finish(self, request: Hashable, info: RequestInfo | None = None) -> None:
        """End a request, once, with the facts known of it; policies learn from them.

        Raises:
            ValueError: No running request has that name, or a count or time of ``info`` is below 0.
            TypeError: A field of ``info`` is of a wrong type; names the field.
        """
        info = RequestInfo() if info is None else as_info(info)
        record = self._requests.pop(request, None)
        if record is None:
            raise ValueError(f"request {request!r} is not running: finish each request once")
        end = record.end
        if isinstance(end, Node):
            record.end = end = end.current()
            if info.priority:
                self._pool.raise_priority(end, info.priority)
        self._tree.finish(record, info)

    def lock(self, node: Node) -> None:
        """Protect a node and the prefix before it from eviction, until :meth:`unlock`.

        Lock right after the match: an eviction in between may have trimmed the node.

        Raises:
            ValueError: The node has been evicted, or is of another cache.
        """
        if self._busy:
            raise _at_work("lock")
        self._busy = True  # see exclusive()
        try:
            node = self._checked_node(node)
            if node.parent is None and not isinstance(node, Root):
                raise ValueError(f"{node!r} has been evicted: match its prefix again, then lock")
            self._tree.pin(node)
        finally:
            self._busy = False

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`; nothing happens for a node that a reset dropped.

        Raises:
            ValueError: The node is not locked, or is of another cache.
        """
        if self._busy:
            raise _at_work("unlock")
        self._busy = True  # see exclusive()
        try:
            node = self._checked_node(node)
            if node.parent is None and not isinstance(node, Root):
                return
            if not node.pins:
                raise ValueError(f"{node!r} is not locked: unlock as often as you lock")
            self._tree.unpin(node)
        finally:
            self._busy = False

    @exclusive
    def refresh(self, node: Node) -> None:
        """Make a prefix recent without counting a use: a waiting request still wants it.

        Raises:
            ValueError: The node is of another cache.
        """
        self._tree.refresh(self._checked_node(node))

    # -- slots -------------------------------------------------------------------------------

    def allocate(self, tokens: int) -> Any:
        """Reserve slots for a running request, evicting the shortfall.

        Args:
            tokens: Tokens to reserve slots for; rounded up to whole pages.

        Returns:
            Slots, int64 of shape [tokens rounded up], to :meth:`insert` or :meth:`release`. None, with
            nothing evicted, if locked and reserved slots leave no room for them; also if slots that callers
            chose themselves leave too few whole pages.

        Raises:
            TypeError: Not a whole number.
            ValueError: Below 0.
        """
        if self._busy:
            raise _at_work("allocate")
        self._busy = True  # see exclusive()
        try:
            wanted = -(-as_count(tokens, "tokens") // self._page_size) * self._page_size
            shortfall = wanted - self._slots.free
            if shortfall > self.evictable:
                return None
            if shortfall > 0:
                self._pool.evict(shortfall)
                self._collect()
            slots = self._slots.allocate(wanted)
            self._reserve()
            return None if slots is None else self._out(slots)
        finally:
            self._busy = False

    @exclusive
    def release(self, slots: Any) -> None:
        """Free reserved slots: duplicates, or slots that the request did not use.

        Raises:
            ValueError: A slot is free already, in the cache or out of range.
        """
        self._slots.release(as_int64(slots, "slots"))
        self._reserve()

    def evict(self, num_tokens: int, *, watermark: bool = True) -> Eviction:
        """Free at least ``num_tokens`` tokens, or all that is evictable if that is less.

        Args:
            num_tokens: The shortfall, in tokens. The free target may add headroom.
            watermark: False to add none.

        Returns:
            The victims and the reasons; ``slots`` has the freed slots, which are free from now on.

        Raises:
            TypeError: Not a whole number.
            ValueError: Below 0.
        """
        if self._busy:
            raise _at_work("evict")
        self._busy = True  # see exclusive()
        try:
            eviction = self._pool.evict(as_count(num_tokens, "num_tokens"), watermark=watermark)
            eviction.slots = self._out(self._collect())
            return eviction
        finally:
            self._busy = False

    @exclusive
    def reset(self, *, force: bool = False) -> None:
        """Forget every prefix; their slots become free, reserved ones stay reserved.

        Args:
            force: Also when prefixes are locked; their unlocks are then ignored.

        Raises:
            ValueError: Prefixes are locked, and ``force`` is not given.
        """
        if self._pool.pinned and not force:
            raise ValueError(
                f"{self._pool.pinned} cached tokens are locked: unlock them, or reset(force=True)"
            )
        parts = [node.slots for node in self._tree.walk() if node.slots is not None]
        self._slots.evict(joined(parts))
        self._tree.clear()
        for record in self._requests.values():
            record.end, record.counted, record.branch, record.windows = None, 0, -1, None
        self._events.cleared()

    # -- observers ---------------------------------------------------------------------------

    @exclusive
    def subscribe(self, observer: Callable[[Event], None]) -> Callable[[], None]:
        """Send ``observer`` every event (stored, removed, cleared) from now on.

        Returns:
            A function that ends the subscription.
        """
        if not self._events:
            self._tree.on_remove = self._removed
            for namespace, root in self._tree.roots.items():
                for node in root.walk():
                    self._events.hash(node, namespace)
        return self._events.subscribe(observer)

    @exclusive
    def before_eviction(self, leaving: Callable[[Node, int], object]) -> None:
        """Call ``leaving`` with a node and the number of its last pages, just before they are evicted.

        Their slots are still theirs, and free once it returns. It must not call the cache.
        """
        self._leaving = leaving
        self._tree.on_remove = self._removed

    def pretty(self) -> str:
        """The tree as text for people, one node a line."""
        slots = self._slots
        top = f"{type(self).__name__}({self.model.name}, plugin {self.plugin}, policy {self.policy}): "
        top += (
            f"{slots.cached} cached + {slots.reserved} reserved + {slots.free} free = {slots.capacity} slots"
        )
        lines = [top]
        for namespace, root in self._tree.roots.items():
            lines.append("/".join(part or "-" for part in namespace))
            lines.extend("  " * _height(node) + _line(node) for node in root.walk())
        return "\n".join(lines)

    __str__ = pretty

    # -- internals ---------------------------------------------------------------------------

    def _found(self, node: Node, first: bool) -> Match:  # noqa: ARG002  # caches with states count uses by it
        """The result of a walk that ended at ``node``; ``first`` if it was its request's first."""
        return Match(node, self._given_out)

    def _fit(self, node: Node, tokens: int) -> int:
        """Make room under ``node`` for ``tokens`` more tokens; returns how many fit."""
        return self._pool.make_room(tokens, node)

    def _reserve(self) -> None:
        """Tell the pool how many slots running requests have reserved."""
        self._pool.reserved = self._slots.reserved

    def _checked_node(self, node: Any) -> Node:
        """The node that has a caller's node by now, which must be one of this cache, or have been."""
        if not isinstance(node, Node):
            raise TypeError(f"node is {node!r}: give the node of a match or of an insert")
        current = node.current()
        if isinstance(current, Root):  # an empty one is of no cache yet
            foreign = bool(current.children) and self._tree.roots.get(current.namespace) is not current
        else:
            foreign = current.parent is not None and self._pool.live.get(current.serial) is not current
        if foreign:
            raise ValueError(f"{node!r} is a node of another cache: give it to the cache that it is from")
        return current

    def _request(self, name: Hashable) -> RequestRecord:
        record = self._requests.get(name)
        if record is None:
            record = self._requests[name] = self._pool.begin()
        return record

    def asker_of(self, request: Hashable, asker: Asker | None = None) -> Asker | None:
        """Who sent a running request, as policies see it; ``asker``, checked, if that is not known yet."""
        record = None if request is None else self._requests.get(request)
        if record is not None and record.asker is not None:
            return record.asker
        return None if asker is None else self._askers.of(*as_asker(asker))

    def _asked(self, name: Hashable, asker: Asker) -> RequestRecord:
        """The record of a request of which it is known who sent it."""
        known = self._askers.of(*as_asker(asker))
        if name is None:
            return self._pool.begin(known)
        record = self._request(name)
        if record.asker is None:
            record.asker = known
        return record

    def _given(self, slots: Any, tokens: int) -> NDArray[np.int64] | None:
        if slots is None:
            return None
        if type(slots) is not np.ndarray and hasattr(slots, "detach"):
            self._device = slots.device
        given = as_int64(slots, "slots")
        if given.size != tokens:
            raise ValueError(f"there are {given.size} slots for {tokens} tokens: give one per token")
        return given

    def _out(self, slots: NDArray[np.int64]) -> Any:
        if not slots.flags.writeable:
            slots = slots.copy()  # a slice of the shared array of all slots
        if self._device is None:
            return slots
        import torch

        return torch.from_numpy(slots).to(self._device)

    def _collect(self) -> NDArray[np.int64]:
        """Free the slots of an eviction's victims, and return them."""
        freed = self._freed
        slots = freed[0] if len(freed) == 1 else joined(freed)
        freed.clear()
        self._slots.evict(slots)
        return slots

    def _removed(self, node: Node, pages: int) -> None:
        if self._leaving is not None:
            self._leaving(node, pages)
        if self._events:
            root: NodeRecord = node
            while root.parent is not None:
                root = root.parent
            if isinstance(root, Root):
                self._events.removed(node, root.namespace, pages)


class RadixCache(PrefixCache):
    """A prefix cache with pluggable eviction, for any model.

    The cache keeps, for each prefix of tokens, the slots of its KV. It does not touch the KV itself.
    Not thread-safe: one scheduler owns it.

    A request is one sequence of tokens, which may grow. Pass the same ``request`` to its calls,
    so that it counts as one use of each node, and :meth:`finish` it once.

    By default a slot holds a token's KV in all layers. With ``window_pool_size`` the KV of sliding-window
    layers is cached in a pool of its own and evicted apart: a prefix then matches up to the last point before
    which a whole window is cached. The window KV of a token is known by the token's slot, as in SGLang's
    mapping from slots to window slots; the cache counts it and says when it is free
    (:meth:`on_windows_freed`).
    """

    def __init__(
        self,
        model: ModelSpec | str,
        pool_size: int,
        page_size: int = 1,
        policy: str = "costcache",
        *,
        window_pool_size: int | None = None,
        deployment: Deployment | None = None,
        plugins: PluginManager | None = None,
        **settings: Any,
    ) -> None:
        """Make an empty cache.

        Args:
            model: A model spec, or a preset's name, or the path of a config.
            pool_size: Slots in the pool, one per token.
            page_size: Tokens per page; only whole pages are cached.
            policy: Name of the eviction policy; ``costcache`` is the one that the model's plugin prefers.
            window_pool_size: Tokens that the pool of sliding-window KV has room for; None if every slot of
                the one pool holds all layers. SGLang's ``--swa-full-tokens-ratio`` times ``pool_size``.
            deployment: How the model is served; its page size must be ``page_size``.
            plugins: Where to look for plugins; the process's own by default.
            **settings: Further fields of :class:`costcache.settings.Settings`.

        Raises:
            SettingsError: A setting is wrong; the model has no sliding windows, or their pool has no room
                for one.
            PluginError: No plugin or policy can serve the model.
            ConfigError: The model cannot be read.
        """
        pool_size, page_size = as_count(pool_size, "pool_size"), as_whole(page_size, "page_size")
        deployment = deployment_in_pages(deployment, page_size)
        if pool_size < page_size:
            raise ValueError(f"pool_size is {pool_size}: give at least one page of {page_size} tokens")
        plugins = get_plugins() if plugins is None else plugins
        spec = plugins.resolve(model) if isinstance(model, str) else model
        chosen = read_settings(Settings, {"policy": policy, **settings})
        binding = Binding.of(spec, deployment, chosen, plugins=plugins)
        if window_pool_size is None:
            super().__init__(RadixTree(binding, pool_size), Slots(pool_size, page_size))
            return
        room, window = as_count(window_pool_size, "window_pool_size"), longest_window(spec)
        if room < window:
            raise SettingsError(
                f"window_pool_size is {room}: give room for a window of {window} tokens or more"
            )
        tree = WindowTree(binding, pool_size, window_capacity=room)
        super().__init__(tree, Slots(pool_size, page_size))
        self._windows = tree
        self._find = tree.find

    # -- sliding windows ---------------------------------------------------------------------

    @property
    def window_pool(self) -> PoolState | None:
        """The pool of sliding-window KV as it is now; None if there is one pool."""
        return None if self._windows is None else self._windows.windows.state()

    @exclusive
    def reserve_windows(self, tokens: int) -> bool:
        """Reserve room for the window KV of a running request, evicting the shortfall.

        Release it before the insert that hands the request's tokens over.

        Returns:
            Whether there is room; if not, nothing is evicted or reserved.

        Raises:
            ValueError: Below 0, or the cache has one pool.
            TypeError: Not a whole number.
        """
        pool, wanted = self._window_pool(), as_count(tokens, "tokens")
        if wanted > pool.free + pool.evictable:
            return False
        pool.evict(wanted - pool.free)
        self._collect()
        pool.reserved += wanted
        return True

    @exclusive
    def release_windows(self, tokens: int) -> None:
        """Release reserved room for window KV.

        Raises:
            ValueError: Below 0 or more than is reserved, or the cache has one pool.
            TypeError: Not a whole number.
        """
        pool, count = self._window_pool(), as_count(tokens, "tokens")
        if count > pool.reserved:
            raise ValueError(f"tokens is {count}: {pool.reserved} are reserved in the pool of windows")
        pool.reserved -= count

    @exclusive
    def evict_windows(self, tokens: int) -> Eviction:
        """Free the window KV of at least ``tokens`` tokens, or all that is evictable if that is less.

        Full KV stays, except that of leaves, from which nothing could resume.

        Returns:
            As :meth:`evict`; counts are of window KV, ``slots`` has the slots freed with their leaves.

        Raises:
            ValueError: Below 0, or the cache has one pool.
            TypeError: Not a whole number.
        """
        eviction = self._window_pool().evict(as_count(tokens, "tokens"))
        eviction.slots = self._out(self._collect())
        return eviction

    @exclusive
    def on_windows_freed(self, freed: Callable[[Any], object]) -> None:
        """Call ``freed`` with the slots of tokens whose window KV is free from now on.

        Raises:
            ValueError: The cache has one pool.
        """
        self._window_pool()
        if self._windows is not None:
            self._windows.on_free_window = lambda slots: freed(self._out(slots))

    def _window_pool(self) -> Pool:
        if self._windows is None:
            raise ValueError("the cache has one pool: give window_pool_size for one of sliding windows")
        return self._windows.windows

    def _found(self, node: Node, first: bool) -> Match:
        windows = self._windows
        return super()._found(node if windows is None else windows.usable(node), first)

    def _fit(self, node: Node, tokens: int) -> int:
        if self._windows is None:
            return super()._fit(node, tokens)
        return self._windows.make_room(node, tokens, 0)[0]


def deployment_in_pages(deployment: Deployment | None, page_size: int) -> Deployment:
    """The deployment of a cache in pages of ``page_size`` tokens; a plain one if none is given.

    Raises:
        ValueError: The page size is below 1, or not the deployment's.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}: give 1 or more tokens per page")
    if deployment is None:
        return Deployment(page_size=page_size)
    if deployment.page_size != page_size:
        raise ValueError(
            f"page_size is {page_size} but deployment.page_size is {deployment.page_size}: give the same"
        )
    return deployment


def _height(node: Node) -> int:
    height, parent = 0, node.parent
    while parent is not None:
        height, parent = height + 1, parent.parent
    return height


def _line(node: Node) -> str:
    tokens = np.frombuffer(bytes(node.key[:32]), np.int64).tolist()
    more = ", ..." if node.tokens > len(tokens) else ""
    marks = f" locks={node.locks}" if node.locks else ""
    return (
        f"[{node.depth}:{node.depth + node.tokens}] {', '.join(map(str, tokens))}{more}"
        f"  uses={node.uses} recency={node.recency}{marks}"
    )
