"""Random use of the cache, compared with the naive one after every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from costcache import RadixCache, RequestInfo
from costcache.radix import Cleared, Event, Node, Removed, Stored
from tests.property.kit import MODEL, check_structure, drain, manager, nodes_of
from tests.property.naive import KEYS, Gone, NaiveCache, Place, Prefix
from tests.property.prompts import GROWING, Prompts, prompts

PLUGINS = manager()
SPACES = [(None, None), ("lora", None), (None, "salt"), ("", None)]
NAMES = st.sampled_from([None, None, "a", "b", "c"])
CHUNK = 6


@dataclass
class Handle:
    """A node in a caller's hands, its position in the model, and its locks."""

    node: Node
    place: Place
    locks: int = 0
    lost: bool = False


class Observer:
    """Rebuilds the cache's content from its events alone."""

    def __init__(self, known: dict[int, Prefix], content: set[Prefix]) -> None:
        self.known = known
        self.content = content

    def __call__(self, event: Event) -> None:
        if isinstance(event, Cleared):
            self.content.clear()
        elif isinstance(event, Removed):
            for name in event.hashes:
                space, tokens = self.known[name]
                assert space == event.namespace
                self.content.remove((space, tokens))
            _, first = self.known[event.hashes[0]]
            behind = [t for s, t in self.content if s == event.namespace and t[: len(first)] == first]
            assert not behind, "a page went before the pages behind it"
        else:
            self.stored(event)

    def stored(self, event: Stored) -> None:
        space: Any = event.namespace
        before: tuple[int, ...] = ()
        if event.parent is not None:
            assert self.known[event.parent] in self.content
            before = self.known[event.parent][1]
        assert len(event.tokens) == len(event.hashes) * event.page_size
        for page, name in enumerate(event.hashes, 1):
            prefix = (space, before + tuple(event.tokens[: page * event.page_size].tolist()))
            assert self.known.setdefault(name, prefix) == prefix, "one name for two prefixes"
            assert prefix not in self.content
            self.content.add(prefix)


class CacheMachine(Prompts, RuleBasedStateMachine):
    """Every public call of the cache, in any order."""

    @initialize(
        policy=st.sampled_from(sorted(KEYS)),
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(2, 14),
        rest=st.integers(0, 3),
        trim=st.sampled_from(["auto", "exact", "chunk", "off"]),
        headroom=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        slack=st.integers(1, 12),
        merge_from=st.sampled_from([1, 2, 64]),
        merge_alike=st.sampled_from([1, 2, 8]),
    )
    def make(
        self,
        policy: str,
        page_size: int,
        pages: int,
        rest: int,
        trim: str,
        headroom: float,
        slack: int,
        merge_from: int,
        merge_alike: int,
    ) -> None:
        policy_settings: dict[str, int] = {}
        if policy == "slru":
            policy_settings = {"protected_threshold": slack}
        elif policy == "tlru":
            policy_settings = {"threshold": slack + 2, "next_prompt_estimate": 2}
        capacity = pages * page_size + min(rest, page_size - 1)
        self.cache = RadixCache(
            MODEL,
            capacity,
            page_size,
            policy,
            plugins=PLUGINS,
            trim=trim,
            trim_chunk=CHUNK,
            headroom=headroom,
            policy_settings=policy_settings,
        )
        step = {"off": 0, "chunk": -(-CHUNK // page_size) * page_size}.get(trim, page_size)
        self.model = NaiveCache(
            capacity,
            page_size,
            policy,
            trim_step=step,
            slack=slack,
            headroom=headroom,
            merge_from=merge_from if step else math.inf,
            merge_alike=merge_alike,
        )
        if step:
            self.cache._tree.merge_from = merge_from
        self.cache._tree.merge_alike = merge_alike
        self.policy = policy
        self.history: list[tuple[int, ...]] = [()]
        self.handles: list[Handle] = []
        self.known: dict[int, Prefix] = {}
        self.observer = Observer(self.known, set())
        self.unsubscribe: Callable[[], None] | None = self.cache.subscribe(self.observer)
        self.matches = self.hits = self.hit_tokens = self.asked = 0
        self.evicted = self.trimmed = self.evictions = 0

    def hold(self, node: Node, prefix: Prefix) -> None:
        if prefix[1]:
            self.handles.append(Handle(node, self.model.place(prefix)))

    def went(self, gone: list[Gone]) -> None:
        self.evicted += sum(victim[1] for victim in gone)
        self.trimmed += sum(victim[2] for victim in gone)

    # -- requests ----------------------------------------------------------------------------

    @rule(**prompts(SPACES, NAMES))
    def match(
        self,
        base: int,
        cut: int,
        more: list[int],
        tail: int,
        space: tuple[str | None, str | None],
        name: str | None,
    ) -> None:
        tokens = self.tokens(base, cut, more, tail)
        found = self.cache.match_prefix(
            np.asarray(tokens, np.int32), name, extra_key=space[0], cache_salt=space[1]
        )
        matched = self.model.match(space, tokens, name)
        assert found.matched_len == matched
        size = self.cache.page_size
        expected = [
            slot for n in range(size, matched + 1, size) for slot in self.model.pages[space, tokens[:n]].slots
        ]
        assert found.slots.tolist() == expected
        assert found.slots.dtype == np.int64
        self.hold(found.node, (space, tokens[:matched]))
        self.matches += 1
        self.hits += matched > 0
        self.hit_tokens += matched
        self.asked += len(tokens)

    @rule(
        **prompts(SPACES, NAMES),
        how=st.sampled_from(["free", "held", "own"]),
        priority=st.integers(-2, 2),
        lot=st.randoms(),
    )
    def insert(
        self,
        base: int,
        cut: int,
        more: list[int],
        tail: int,
        space: tuple[str | None, str | None],
        name: str | None,
        how: str,
        priority: int,
        lot: Any,
    ) -> None:
        tokens = self.tokens(base, cut, more, tail)
        given = None if how == "own" else self.slots(how, lot)[: len(tokens)]
        if given is not None and len(given) < len(tokens):
            given = None  # too few are free or reserved: the cache allocates its own
        done = self.cache.insert(
            list(tokens), given, name, priority=priority, extra_key=space[0], cache_salt=space[1]
        )
        old = {page.slots for page in self.model.pages.values()}

        def took() -> list[int]:
            assert done.node.slots is not None
            return [int(slot) for slot in done.node.slots]

        matched, added, gone = self.model.insert(space, tokens, name, priority, given, took)
        assert (done.matched_len, done.inserted_len) == (matched, added)
        if given is None:
            assert done.duplicates.size == done.unused.size == 0
        else:
            assert done.duplicates.tolist() == given[:matched]  # none of them was in the cache
            assert done.unused.tolist() == given[matched + added :]
            assert old <= {page.slots for page in self.model.pages.values()}
        self.went(gone)
        self.evictions += bool(gone)
        self.hold(done.node, (space, tokens[: matched + added]))

    @rule(**GROWING, space=st.sampled_from(SPACES))
    def grow(self, base: int, cut: int, more: list[int], space: tuple[str | None, str | None]) -> None:
        """A prompt that grows page by page: a chain of nodes, which are merged."""
        base %= len(self.history)
        for pages in range(1, len(more) + 1):
            self.insert(base, cut, more[:pages], 0, space, None, "own", 0, None)

    def slots(self, how: str, lot: Any) -> list[int]:
        """Free or reserved slots in whole pages, shuffled page by page."""
        size = self.cache.page_size
        mine = self.model.free if how == "free" else self.model.reserved
        pages = [n for n in range(0, self.model.capacity, size) if set(range(n, n + size)) <= mine]
        lot.shuffle(pages)
        return [slot for page in pages for slot in range(page, page + size)]

    @rule(name=st.sampled_from(["a", "b", "c"]), priority=st.integers(0, 3))
    def finish(self, name: str, priority: int) -> None:
        if name in self.model.requests:
            self.cache.finish(name, RequestInfo(priority=priority) if priority else None)
            self.model.finish(name, priority)
        else:
            with pytest.raises(ValueError, match="not running"):
                self.cache.finish(name)

    @rule(later=st.sampled_from([-1.0, 0.0, 0.5, 10.0]))
    def advance(self, later: float) -> None:
        seconds = self.model.now + later
        self.cache.clock.advance(seconds)
        self.model.advance(seconds)

    # -- locks -------------------------------------------------------------------------------

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 200))
    def lock(self, which: int) -> None:
        handle = self.handles[which % len(self.handles)]
        if handle.place.prefix is None:
            with pytest.raises(ValueError, match="evicted"):
                self.cache.lock(handle.node)
            return
        self.cache.lock(handle.node)
        self.model.pins[handle.place.prefix] += 1
        handle.locks += 1

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 200))
    def unlock(self, which: int) -> None:
        held = [handle for handle in self.handles if handle.locks]
        handle = (held or self.handles)[which % len(held or self.handles)]
        if handle.place.prefix is None:
            self.cache.unlock(handle.node)  # a reset took it: nothing happens
            handle.locks = max(0, handle.locks - 1)
        elif self.model.pins[handle.place.prefix]:
            self.cache.unlock(handle.node)
            self.model.pins[handle.place.prefix] -= 1
            handle.locks -= 1
        else:
            with pytest.raises(ValueError, match="not locked"):
                self.cache.unlock(handle.node)

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 200))
    def refresh(self, which: int) -> None:
        handle = self.handles[which % len(self.handles)]
        self.cache.refresh(handle.node)
        self.model.refresh(handle.place.prefix)

    # -- slots -------------------------------------------------------------------------------

    @rule(tokens=st.integers(0, 60))
    def evict(self, tokens: int) -> None:
        eviction = self.cache.evict(tokens)
        before = {slot for page in self.model.pages.values() for slot in page.slots}
        evictable = self.model.evictable
        gone = self.model.evict(tokens)
        after = {slot for page in self.model.pages.values() for slot in page.slots}
        assert [(v.start, v.tokens, v.trimmed, v.uses, v.recency) for v in eviction.victims] == gone
        assert set(eviction.slots.tolist()) == before - after
        assert len(eviction.slots) == eviction.freed == sum(victim[1] for victim in gone)
        assert min(tokens, evictable) <= eviction.freed <= evictable
        assert eviction.shortfall == tokens
        assert eviction.policy == self.policy
        self.went(gone)
        self.evictions += tokens > 0

    @rule(tokens=st.integers(0, 60))
    def allocate(self, tokens: int) -> None:
        size, model = self.cache.page_size, self.model
        whole = -(-tokens // size) * size
        fits = whole - len(model.free) <= model.evictable
        slots = self.cache.allocate(tokens)
        if not fits:
            assert slots is None
            return
        gone = model.evict(whole - len(model.free))
        self.went(gone)
        self.evictions += bool(gone)
        taken = slots.tolist()
        assert len(taken) == len(set(taken)) == whole
        assert set(taken) <= model.free
        for n in range(0, whole, size):
            assert taken[n] % size == 0
            assert taken[n : n + size] == list(range(taken[n], taken[n] + size))
        model.free -= set(taken)
        model.reserved |= set(taken)

    @precondition(lambda self: self.model.reserved)
    @rule(share=st.integers(1, 3), twice=st.booleans())
    def release(self, share: int, twice: bool) -> None:
        size = self.cache.page_size
        pages = sorted({slot // size for slot in self.model.reserved})[::share]
        slots = [
            page * size + n for page in pages for n in range(size) if page * size + n in self.model.reserved
        ]
        self.cache.release(slots * (1 + twice))  # a slot named twice is still one slot
        self.model.reserved -= set(slots)
        self.model.free |= set(slots)

    # -- the whole ---------------------------------------------------------------------------

    @rule(force=st.booleans())
    def reset(self, force: bool) -> None:
        if self.model.protected() and not force:
            with pytest.raises(ValueError, match="locked"):
                self.cache.reset()
            return
        self.cache.reset(force=force)
        self.model.reset()

    @rule()
    def subscribe(self) -> None:
        """Stop listening, or start again: names of pages must not have changed meanwhile."""
        if self.unsubscribe is not None:
            self.unsubscribe()
            self.unsubscribe()
            self.unsubscribe = None
        else:
            self.observer = Observer(self.known, set(self.model.pages))
            self.unsubscribe = self.cache.subscribe(self.observer)
            for node in nodes_of(self.cache):
                assert node.hashes is not None
            self.learn()

    def learn(self) -> None:
        """Names of the pages that were stored without observers, from the nodes themselves."""
        for space, root in self.cache._tree.roots.items():
            for node in root.walk():
                tokens = tuple(t for part in node.path() for t in np.frombuffer(bytes(part.key), np.int64))
                for n, name in enumerate(node.hashes or [], 1):
                    stop = node.depth + n * self.cache.page_size
                    prefix: Any = (space, tuple(int(t) for t in tokens[:stop]))
                    assert self.known.setdefault(name, prefix) == prefix

    # -- after each step ---------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        cache, model = self.cache, self.model
        check_structure(cache)
        found = {}
        for space, root in cache._tree.roots.items():
            for node in root.walk():
                keys = [np.frombuffer(bytes(part.key), np.int64).tolist() for part in node.path()]
                assert node.slots is not None
                found[space, tuple(token for key in keys for token in key)] = (
                    node.depth,
                    tuple(node.slots.tolist()),
                    node.uses,
                    node.last_use,
                    node.recency,
                    node.created,
                    node.creator,
                    node.priority,
                )
        assert found == model.nodes()
        assert (cache.free, cache.reserved) == (len(model.free), len(model.reserved))
        assert (cache.cached, cache.evictable) == (model.cached, model.evictable)
        assert (cache.clock.requests, cache.clock.accesses, cache.clock.now) == (
            model.begun,
            model.accesses,
            model.now,
        )
        if self.unsubscribe is not None:
            assert self.observer.content == set(model.pages)

    @invariant()
    def counted(self) -> None:
        stats = self.cache.stats()
        assert (stats.hits, stats.misses) == (self.hits, self.matches - self.hits)
        assert (stats.hit_tokens, stats.asked_tokens) == (self.hit_tokens, self.asked)
        assert (stats.evicted, stats.trimmed) == (self.evicted, self.trimmed)
        assert stats.nodes == len(self.model.ends)
        assert (stats.fallbacks, stats.clamped, stats.policy) == (0, 0, self.policy)
        assert self.cache.pretty().count("\n") == len(self.model.ends) + len(
            {space for space, _ in self.model.ends}
        )

    def teardown(self) -> None:
        """Every unlocked leaf is known to the order; and once nothing is locked, every leaf is."""
        if not hasattr(self, "cache"):
            return
        drain(self.cache)
        for handle in self.handles:
            for _ in range(handle.locks):
                self.cache.unlock(handle.node)
        drain(self.cache)
        assert self.cache.cached == 0
        assert self.cache._tree.roots == {}


TestCache = CacheMachine.TestCase
# One machine stands for every public call: it gets more examples than a property does.
EXAMPLES = settings().max_examples
TestCache.settings = settings(max_examples=min(2000, 3 * EXAMPLES))
