"""The generic radix cache: prefixes of tokens and the slots that hold their KV."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costcache.deployment import Deployment
from costcache.eviction import Eviction, EvictionCounters
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.radix.events import Event, EventStream
from costcache.radix.keys import as_count, as_int64, as_key, as_whole
from costcache.radix.node import Node, Root
from costcache.radix.pool import SlotPool
from costcache.radix.store import PrefixStore
from costcache.records import Clock, NodeRecord, RequestInfo, RequestRecord
from costcache.settings import Settings, read_settings

__all__ = ["CacheStats", "Inserted", "Match", "RadixCache", "deployment_in_pages"]


class Match:
    """What :meth:`RadixCache.match_prefix` found.

    Attributes:
        matched_len: Tokens that are cached, whole pages.
        node: The node at the end of the match: what to lock while the slots are in use.
    """

    __slots__ = ("_cache", "_parts", "matched_len", "node")

    def __init__(self, cache: RadixCache, node: Node) -> None:
        self.matched_len = node.depth + node.tokens
        self.node = node
        self._cache = cache
        # Captured now: what happens to the tree later does not change what was found.
        self._parts = _slots(node)

    @property
    def slots(self) -> Any:
        """Slots of the matched tokens, int64 of shape [matched_len]; a tensor if tensors were inserted.

        The caller's own copy: writing to it changes nothing in the cache.
        """
        return self._cache._out(np.concatenate(self._parts) if self._parts else np.empty(0, np.int64))

    def __repr__(self) -> str:
        return f"Match(matched_len={self.matched_len}, node={self.node!r})"


class Inserted:
    """What :meth:`RadixCache.insert` did.

    Attributes:
        node: The node at the end of what is cached now.
        matched_len: Tokens that were cached before.
        inserted_len: Tokens that were added.
    """

    __slots__ = ("_cache", "_given", "_parts", "inserted_len", "matched_len", "node")

    def __init__(
        self,
        cache: RadixCache,
        node: Node,
        matched_len: int,
        inserted_len: int,
        given: NDArray[np.int64] | None,
        parts: list[NDArray[np.int64]],
    ) -> None:
        self.node = node
        self.matched_len = matched_len
        self.inserted_len = inserted_len
        self._cache = cache
        self._given = given
        self._parts = parts

    @property
    def duplicates(self) -> Any:
        """The caller's slots that the cache does not need: it has these tokens in other slots.

        int64 of shape [n]; they stay the caller's, to free or to use again.
        """
        if self._given is None:
            return self._cache._out(np.empty(0, np.int64))
        mine = self._given[: self.matched_len]
        return self._cache._out(mine[mine != _joined(self._parts)])

    @property
    def unused(self) -> Any:
        """The caller's slots of tokens that are not cached: the rest of a page at the end."""
        if self._given is None:
            return self._cache._out(np.empty(0, np.int64))
        return self._cache._out(self._given[self.matched_len + self.inserted_len :])

    def __repr__(self) -> str:
        return f"Inserted(matched_len={self.matched_len}, inserted_len={self.inserted_len})"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made; tokens unless said.

    Attributes:
        hits: Matches that found something.
        misses: Matches that found nothing.
        hit_tokens: Tokens found by matches.
        asked_tokens: Tokens that matches asked for.
        cached: Tokens in the cache now.
        free: Slots that nobody uses now.
        held: Slots that requests own now.
        protected: Cached tokens under a lock now.
        nodes: Nodes in the tree now.
        evictions: Evictions that had a shortfall.
        evicted: Tokens evicted.
        trimmed: Victims of which only the tail went.
        clamped: Answers of plugins that were out of bounds and replaced.
        fallbacks: Policies dropped for LRU: 0 or 1 since the last reset.
        oversized: Requests longer than the whole pool.
        policy: Name of the policy in force.
    """

    hits: int
    misses: int
    hit_tokens: int
    asked_tokens: int
    cached: int
    free: int
    held: int
    protected: int
    nodes: int
    evictions: int
    evicted: int
    trimmed: int
    clamped: int
    fallbacks: int
    oversized: int
    policy: str


class RadixCache:
    """A prefix cache with pluggable eviction, for any model.

    The cache keeps, for each prefix of tokens, the slots of its KV. It does not touch the KV itself.
    Not thread-safe: one scheduler owns it.

    A request is one sequence of tokens, which may grow. Pass the same ``request`` to its calls,
    so that it counts as one use of each node, and :meth:`finish` it once.
    """

    def __init__(
        self,
        model: ModelSpec | str,
        pool_size: int,
        page_size: int = 1,
        policy: str = "costcache",
        *,
        deployment: Deployment | None = None,
        plugins: PluginManager | None = None,
        **settings: Any,
    ) -> None:
        """Make an empty cache.

        Args:
            model: A model spec, or a preset's name or a path for :meth:`ModelSpec.resolve`.
            pool_size: Slots in the pool, one per token.
            page_size: Tokens per page; only whole pages are cached.
            policy: Name of the eviction policy; ``costcache`` is what the model's plugin prefers.
            deployment: How the model is served; its page size must be ``page_size``.
            plugins: Where to look for plugins; the process's own by default.
            **settings: Further fields of :class:`costcache.settings.Settings`.

        Raises:
            SettingsError: A setting is wrong.
            PluginError: No plugin or policy can serve the model.
            ConfigError: The model cannot be read.
        """
        pool_size, page_size = as_count(pool_size, "pool_size"), as_whole(page_size, "page_size")
        deployment = deployment_in_pages(deployment, page_size)
        if pool_size < page_size:
            raise ValueError(f"pool_size is {pool_size}: give at least one page of {page_size} tokens")
        spec = ModelSpec.resolve(model) if isinstance(model, str) else model
        store = PrefixStore(
            spec,
            pool_size,
            read_settings(Settings, {"policy": policy, **settings}),
            deployment,
            plugins=plugins,
        )
        self._begin(spec, store, pool_size, page_size)

    def _begin(self, model: ModelSpec, store: PrefixStore, pool_size: int, page_size: int) -> None:
        self.model = model
        self._store = store
        self._tree = store.tree
        self._pool = SlotPool(pool_size, page_size)
        self._page_size = page_size
        self._requests: dict[Hashable, RequestRecord] = {}
        self._events = EventStream(self._tree.page_bytes, page_size)
        self._device: Any = None
        self._hits = self._misses = self._hit_tokens = self._asked_tokens = 0

    # -- facts -------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def pool_size(self) -> int:
        """Slots in the pool, whole pages."""
        return self._pool.capacity

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        return self._pool.free

    @property
    def held(self) -> int:
        """Slots that requests own outside the cache."""
        return self._pool.held

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self._tree.cached

    @property
    def evictable(self) -> int:
        """Cached tokens that no lock protects."""
        return self._tree.evictable

    @property
    def policy(self) -> str:
        """Name of the policy in force: ``lru`` after a fallback."""
        return self._store.guard.name

    @property
    def plugin(self) -> str:
        """Name of the plugin that serves the model."""
        return self._store.architecture.name

    @property
    def clock(self) -> Clock:
        """Logical time; call ``clock.advance(seconds)`` to give it the stream's own."""
        return self._tree.clock

    @property
    def counters(self) -> EvictionCounters:
        """Counts of the eviction pipeline."""
        return self._store.pipeline.counters

    def stats(self) -> CacheStats:
        """All counts, as they are now."""
        tree, counters, guard = self._tree, self.counters, self._store.guard
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            asked_tokens=self._asked_tokens,
            cached=tree.cached,
            free=self._pool.free,
            held=self._pool.held,
            protected=tree.protected,
            nodes=tree.nodes,
            evictions=counters.evictions,
            evicted=counters.evicted,
            trimmed=counters.trimmed,
            clamped=counters.clamped,
            fallbacks=guard.fallbacks,
            oversized=self._store.oversized,
            policy=guard.name,
        )

    # -- requests ----------------------------------------------------------------------------

    def match_prefix(
        self,
        tokens: Any,
        request: Hashable = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Match:
        """Find the longest cached prefix of ``tokens``, and use it.

        A server recomputes the last token of a prompt: it asks for ``tokens[:-1]``.

        Args:
            tokens: Integers of shape [n]: a list, a numpy array or a torch tensor.
            request: Whose match it is; anything hashable. Without it, the match is a request of its own.
            extra_key: Prefixes of different extra keys (an adapter, say) never match.
            cache_salt: Nor do prefixes of different salts.
        """
        array = as_int64(tokens, "tokens")
        record = self._request(request)
        first = record.end is None
        tree = self._tree
        root = tree.root((extra_key, cache_salt))
        match = self._found(tree.match(root, as_key(array, self._page_size), record), first)
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

    def insert(
        self,
        tokens: Any,
        slots: Any = None,
        request: Hashable = None,
        *,
        priority: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Inserted:
        """Cache ``tokens``: the whole pages of them that are not cached yet.

        Args:
            tokens: Integers of shape [n]: a list, a numpy array or a torch tensor.
            slots: Their slots, integers of shape [n], held by the caller or free. Those of added tokens
                become the cache's; the others stay the caller's: see :class:`Inserted`. Without
                slots the cache takes its own, evicts for them, and adds the head that fits.
            request: Whose tokens they are; without it, a request of its own.
            priority: For the ``priority`` order; a node has the highest of its requests.
            extra_key: See :meth:`match_prefix`.
            cache_salt: See :meth:`match_prefix`.

        Raises:
            ValueError: Slots are missing, out of range, in the cache already or named twice.
            TypeError: Tokens or slots are not integers, or the priority is no whole number.
        """
        array = as_int64(tokens, "tokens")
        given = self._given(slots, array.size)
        priority = as_whole(priority, "priority")
        record = self._request(request)
        tree, store, page_size = self._tree, self._store, self._page_size
        namespace = (extra_key, cache_salt)
        key = as_key(array, page_size)
        node = tree.match(tree.root(namespace), key, record)
        matched = node.depth + node.tokens
        parts = [] if given is None or not matched else _slots(node)
        if node.priority < priority:  # then no node in front has more either
            tree.raise_priority(node, priority)
        whole = array.size - array.size % page_size
        added = whole - matched
        if whole > self._pool.capacity and not record.oversized:
            record.oversized = True
            store.oversized += 1
        if added and given is None:
            added = store.fit(node, added)
            self._collect()
        if added:
            if given is None:
                taken = self._pool.allocate(added)
                added = 0 if taken is None else taken.size
            else:
                taken = given[matched:whole]
            if taken is not None and added:
                taken = self._pool.cache(taken)
                node = tree.append(node, tree.part(key, matched, added), taken, record, priority)
                store.held = self._pool.held
                if self._events:
                    self._events.stored(node, namespace)
        return Inserted(self, node, matched, added, given, parts)

    def finish(self, request: Hashable, info: RequestInfo | None = None) -> None:
        """Tell that a request ended, once, and what is known of it; policies learn from it.

        Raises:
            ValueError: No running request has that name, or a count is below 0.
            TypeError: A count or the priority is not a whole number.
        """
        info = RequestInfo() if info is None else _checked(info)
        record = self._requests.pop(request, None)
        if record is None:
            raise ValueError(f"request {request!r} is not running: finish each request once")
        if info.priority and record.end is not None:
            self._tree.raise_priority(record.end, info.priority)
        heard = self._store.guard.finish
        if heard is not None:
            heard(record, info)

    def lock(self, node: Node) -> None:
        """Protect a node and the prefix in front of it from eviction, until :meth:`unlock`.

        Lock right after the match: an eviction in between may have trimmed the node.

        Raises:
            ValueError: The node has been evicted.
        """
        if node.parent is None and not isinstance(node, Root):
            raise ValueError(f"{node!r} has been evicted: match its prefix again, then lock")
        self._tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`; nothing happens for a node that a reset took away.

        Raises:
            ValueError: The node is not locked.
        """
        if node.parent is None and not isinstance(node, Root):
            return
        if not node.holds:
            raise ValueError(f"{node!r} is not locked: unlock as often as you lock")
        self._tree.unlock(node)

    def refresh(self, node: Node) -> None:
        """A waiting request still wants this prefix: make it recent, without counting a use."""
        self._tree.refresh(node)

    # -- slots -------------------------------------------------------------------------------

    def allocate(self, tokens: int) -> Any:
        """Take slots for a running request, evicting the shortfall.

        Args:
            tokens: How many; rounded up to whole pages.

        Returns:
            Slots, int64 of shape [tokens rounded up], to :meth:`insert` or :meth:`release`; or None: with
            nothing evicted, when the pool cannot hold them beside what is locked and held; else when
            slots that callers chose themselves leave too few pages whole.

        Raises:
            TypeError: Not a whole number.
            ValueError: Below 0.
        """
        wanted = -(-as_count(tokens, "tokens") // self._page_size) * self._page_size
        shortfall = wanted - self._pool.free
        if shortfall > self._tree.evictable:
            return None
        if shortfall > 0:
            self._store.evict(shortfall)
            self._collect()
        slots = self._pool.allocate(wanted)
        self._store.held = self._pool.held
        return None if slots is None else self._out(slots)

    def release(self, slots: Any) -> None:
        """Free slots that a request holds: duplicates, or what it did not use.

        Raises:
            ValueError: A slot is free already, in the cache or out of range.
        """
        self._pool.release(as_int64(slots, "slots"))
        self._store.held = self._pool.held

    def evict(self, num_tokens: int) -> Eviction:
        """Free at least ``num_tokens`` tokens, or all that is evictable if that is less.

        Args:
            num_tokens: The shortfall, in tokens. The free target may add headroom.

        Returns:
            What went and why; ``slots`` has the freed slots, which are free from now on.

        Raises:
            TypeError: Not a whole number.
            ValueError: Below 0.
        """
        eviction = self._store.evict(as_count(num_tokens, "num_tokens"))
        eviction.slots = self._out(self._collect())
        return eviction

    def reset(self, *, force: bool = False) -> None:
        """Forget every prefix; its slots become free, held ones stay held.

        Args:
            force: Also when prefixes are locked; their unlocks are then ignored.

        Raises:
            ValueError: Prefixes are locked, and ``force`` is not given.
        """
        if self._tree.protected and not force:
            raise ValueError(
                f"{self._tree.protected} cached tokens are locked: unlock them, or reset(force=True)"
            )
        parts = [node.slots for node in self._tree.walk() if node.slots is not None]
        self._pool.evict(_joined(parts))
        self._store.reset()
        for record in self._requests.values():
            record.end, record.counted = None, 0
        self._events.cleared()

    # -- observers ---------------------------------------------------------------------------

    def subscribe(self, observer: Callable[[Event], None]) -> Callable[[], None]:
        """Send ``observer`` every event (stored, removed, cleared) from now on.

        Returns:
            A function that ends the subscription.
        """
        if not self._events:
            self._store.on_remove = self._removed
            for namespace, root in self._tree.roots.items():
                for node in root.walk():
                    self._events.hash(node, namespace)
        return self._events.subscribe(observer)

    def pretty(self) -> str:
        """The tree as text, one node a line, for people."""
        guard, pool = self._store.guard, self._pool
        top = f"RadixCache({self.model.name}, plugin {self.plugin}, policy {guard.name}): "
        top += f"{pool.cached} cached + {pool.held} held + {pool.free} free = {pool.capacity} slots"
        lines = [top]
        for namespace, root in self._tree.roots.items():
            lines.append("/".join(part or "-" for part in namespace))
            lines.extend("  " * _height(node) + _line(node) for node in root.walk())
        return "\n".join(lines)

    __str__ = pretty

    # -- internals ---------------------------------------------------------------------------

    def _found(self, node: Node, first: bool) -> Match:  # noqa: ARG002  # caches with states count uses by it
        """What a walk that ended at ``node`` found; ``first`` where it was its request's first."""
        return Match(self, node)

    def _request(self, name: Hashable) -> RequestRecord:
        if name is None:
            return self._store.request()
        record = self._requests.get(name)
        if record is None:
            record = self._requests[name] = self._store.request()
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
            slots = slots.copy()  # a part of the pool's own array
        if self._device is None:
            return slots
        import torch

        return torch.from_numpy(slots).to(self._device)

    def _collect(self) -> NDArray[np.int64]:
        """Give the slots that an eviction freed back to the pool."""
        freed = self._store.freed
        slots = freed[0] if len(freed) == 1 else _joined(freed)
        freed.clear()
        self._pool.evict(slots)
        return slots

    def _removed(self, node: Node, pages: int) -> None:
        if self._events:
            root: NodeRecord = node
            while root.parent is not None:
                root = root.parent
            if isinstance(root, Root):
                self._events.removed(node, root.namespace, pages)


def deployment_in_pages(deployment: Deployment | None, page_size: int) -> Deployment:
    """The deployment of a cache in pages of ``page_size`` tokens; a plain one where none is given.

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


def _checked(info: RequestInfo) -> RequestInfo:
    new_tokens = info.new_tokens
    return info._replace(
        output_tokens=as_count(info.output_tokens, "output_tokens"),
        new_tokens=None if new_tokens is None else as_count(new_tokens, "new_tokens"),
        priority=as_whole(info.priority, "priority"),
    )


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _slots(node: Node) -> list[NDArray[np.int64]]:
    return [part.slots for part in node.path() if part.slots is not None]


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
