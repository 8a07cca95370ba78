"""Random use of a cache with a pool of sliding windows, compared with the naive one after every step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from costcache import ModelSpec, RadixCache, RequestInfo
from costcache.radix.windows import WindowTree
from tests.property.kit import check_structure, drain, manager, nodes_of
from tests.property.naive import Gone, Prefix
from tests.property.naive_windows import NaiveWindows, WindowGone
from tests.property.prompts import GROWING, Prompts, prompts
from tests.property.test_cache_machine import NAMES, Handle

PLUGINS = manager()
SPACES = [(None, None), ("lora", None)]
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
CHUNK = 6
SLACK = 3


def model_with_window(window: int) -> ModelSpec:
    """A model of one full and one sliding layer."""
    return ModelSpec.from_config(
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "vocab_size": 128,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": window,
        }
    )


class WindowsMachine(Prompts, RuleBasedStateMachine):
    """Every public call of a cache with two pools, in any order."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        page_size=st.sampled_from([1, 2, 4]),
        window=st.integers(1, 9),
        pages=st.integers(8, 20),
        room=st.integers(0, 8),
        trim=st.sampled_from(["auto", "exact", "chunk", "off"]),
        merge_from=st.sampled_from([1, 2, 64]),
        merge_alike=st.sampled_from([1, 2, 8]),
    )
    def make(
        self,
        policy: str,
        page_size: int,
        window: int,
        pages: int,
        room: int,
        trim: str,
        merge_from: int,
        merge_alike: int,
    ) -> None:
        kept = -(-window // page_size) * page_size + page_size
        more: dict[str, Any] = {"policy_settings": {"protected_threshold": SLACK}} if policy == "slru" else {}
        self.cache = RadixCache(
            model_with_window(window),
            pages * page_size,
            page_size,
            policy,
            window_pool_size=kept + room * page_size,
            plugins=PLUGINS,
            trim=trim,
            trim_chunk=CHUNK,
            **more,
        )
        tree = self.cache._tree
        assert isinstance(tree, WindowTree)
        self.tree = tree
        step = {"off": 0, "chunk": -(-CHUNK // page_size) * page_size}.get(trim, page_size)
        self.model = NaiveWindows(
            pages * page_size,
            page_size,
            policy,
            window=window,
            room=kept + room * page_size,
            trim_step=step,
            slack=SLACK,
            merge_from=merge_from if step else math.inf,
            merge_alike=merge_alike,
        )
        if step:
            tree.merge_from = merge_from
        tree.merge_alike = merge_alike
        self.history: list[tuple[int, ...]] = [()]
        self.handles: list[Handle] = []
        self.freed: list[int] = []
        self.cache.on_windows_freed(lambda slots: self.freed.extend(slots.tolist()))
        self.mapped: set[int] = set()

    def hold(self, node: Any, prefix: Prefix) -> None:
        if prefix[1]:
            self.handles.append(Handle(node, self.model.place(prefix)))

    def slots_with_windows(self) -> set[int]:
        return {slot for name in self.model.windows for slot in self.model.pages[name].slots}

    @rule(**prompts(SPACES, NAMES))
    def match(
        self, base: int, cut: int, more: list[int], tail: int, space: tuple[Any, Any], name: str | None
    ) -> None:
        tokens = self.tokens(base, cut, more, tail)
        found = self.cache.match_prefix(tokens, name, extra_key=space[0], cache_salt=space[1])
        matched = self.model.match(space, tokens, name)
        assert found.matched_len == matched
        size = self.cache.page_size
        assert found.slots.tolist() == [
            slot for n in range(size, matched + 1, size) for slot in self.model.pages[space, tokens[:n]].slots
        ]
        self.hold(found.node, (space, tokens[:matched]))

    @rule(
        **prompts(SPACES, NAMES),
        own=st.booleans(),
        window_from=st.sampled_from([0, 0, 0, 3, 9]),
        priority=st.integers(-1, 2),
    )
    def insert(
        self,
        base: int,
        cut: int,
        more: list[int],
        tail: int,
        space: tuple[Any, Any],
        name: str | None,
        own: bool,
        window_from: int,
        priority: int,
    ) -> None:
        tokens = self.tokens(base, cut, more, tail)
        size = self.cache.page_size
        given: list[int] | None = [slot for n in self.free_pages() for slot in range(n, n + size)]
        given = None if own or given is None or len(given) < len(tokens) else given[: len(tokens)]
        done = self.cache.insert(
            list(tokens),
            given,
            name,
            window_from=window_from,
            priority=priority,
            extra_key=space[0],
            cache_salt=space[1],
        )

        def took() -> list[int]:
            # The new leaf may have been split where its window begins.
            parts = [node.slots.tolist() for node in done.node.path() if node.slots is not None]
            return [slot for part in parts for slot in part][done.matched_len :]

        matched, added, _, _, kept = self.model.insert_both(
            space, tokens, name, priority, given, took, window_from
        )
        assert (done.matched_len, done.inserted_len) == (matched, added)
        mine, cached = done.windows.tolist()
        if given is None:
            assert mine == cached
        now = {slot for page in kept for slot in self.model.pages[page].slots}
        assert now <= set(cached)
        self.mapped -= set(self.freed)  # they may be the slots of other tokens by now
        self.freed.clear()
        self.mapped |= set(cached)
        if given is not None:
            place = {slot: at for at, slot in enumerate(given)}
            assert all(
                self.model.pages[space, tokens[: place[slot] // size * size + size]].slots[place[slot] % size]
                == other
                for slot, other in zip(mine, cached, strict=True)
            )
        self.hold(done.node, (space, tokens[: matched + added]))

    @rule(**GROWING, space=st.sampled_from(SPACES))
    def grow(self, base: int, cut: int, more: list[int], space: tuple[Any, Any]) -> None:
        """A prompt that grows page by page: a chain of nodes, which are merged."""
        base %= len(self.history)
        for pages in range(1, len(more) + 1):
            self.insert(base, cut, more[:pages], 0, space, None, True, 0, 0)

    def free_pages(self) -> list[int]:
        size = self.cache.page_size
        return [n for n in range(0, self.model.capacity, size) if set(range(n, n + size)) <= self.model.free]

    @rule(name=st.sampled_from(["a", "b", "c"]), priority=st.integers(0, 2))
    def finish(self, name: str, priority: int) -> None:
        if name in self.model.requests:
            self.cache.finish(name, RequestInfo(priority=priority))
            self.model.finish(name, priority)

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

    @precondition(lambda self: any(handle.locks for handle in self.handles))
    @rule(which=st.integers(0, 200))
    def unlock(self, which: int) -> None:
        held = [handle for handle in self.handles if handle.locks]
        handle = held[which % len(held)]
        self.cache.unlock(handle.node)
        handle.locks -= 1
        if handle.place.prefix is not None:
            self.model.pins[handle.place.prefix] -= 1

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 200))
    def refresh(self, which: int) -> None:
        handle = self.handles[which % len(self.handles)]
        self.cache.refresh(handle.node)
        self.model.refresh(handle.place.prefix)

    @rule(tokens=st.integers(0, 60))
    def evict(self, tokens: int) -> None:
        eviction = self.cache.evict(tokens)
        gone: list[Gone] = self.model.evict(tokens)
        assert [(v.start, v.tokens, v.trimmed) for v in eviction.victims] == [each[:3] for each in gone]
        assert len(eviction.slots) == eviction.freed

    @rule(tokens=st.integers(0, 40))
    def evict_windows(self, tokens: int) -> None:
        before = {slot for page in self.model.pages.values() for slot in page.slots}
        evictable = self.model.window_evictable
        eviction = self.cache.evict_windows(tokens)
        went: list[WindowGone] = self.model.evict_windows(tokens)
        after = {slot for page in self.model.pages.values() for slot in page.slots}
        assert [(v.start, v.tokens) for v in eviction.victims] == [each[:2] for each in went]
        assert set(eviction.slots.tolist()) == before - after
        assert min(tokens, evictable) <= eviction.freed <= evictable

    @rule(tokens=st.integers(0, 20))
    def reserve(self, tokens: int) -> None:
        model = self.model
        fits = tokens <= model.window_free + model.window_evictable
        assert self.cache.reserve_windows(tokens) == fits
        if fits:
            model.evict_windows(tokens - model.window_free)
            model.window_reserved += tokens

    @rule(share=st.integers(1, 3))
    def release(self, share: int) -> None:
        count = self.model.window_reserved // share
        with pytest.raises(ValueError, match="are reserved in the pool of windows"):
            self.cache.release_windows(self.model.window_reserved + 1)
        self.cache.release_windows(count)
        self.model.window_reserved -= count

    @rule()
    def reset(self) -> None:
        if self.model.protected():
            return
        self.cache.reset()
        self.model.reset()
        self.freed.clear()
        self.mapped.clear()

    # -- the whole ---------------------------------------------------------------------------

    @invariant()
    def the_same(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_structure(self.cache)
        found, windows = {}, {}
        locked = 0
        for space, root in self.tree.roots.items():
            for node in root.walk():
                tokens = tuple(np.frombuffer(b"".join(bytes(n.key) for n in node.path()), np.int64).tolist())
                found[space, tokens] = node.depth
                record = node.window
                if record is not None:
                    assert (record.depth, record.tokens) == (node.depth, node.tokens)
                    windows[space, tokens] = (
                        record.depth,
                        record.uses,
                        record.recency,
                        record.created,
                        record.priority,
                    )
                    assert record.locks == record.pins
                    locked += record.tokens if record.locks else 0
        assert found == {end: self.model.start(end) for end in self.model.ends}
        assert windows == self.model.window_nodes()
        pool = self.cache.window_pool
        assert pool is not None
        assert pool.free == self.model.window_free >= 0
        assert pool.evictable == self.model.window_evictable
        assert self.tree.window_tokens == self.tree.windows.cached
        assert self.tree.windows.pinned == locked == self.tree._pinned_windows
        assert self.tree.windows.root.locks == sum(record.locks for record in self.tree.windows.records())
        # Whoever follows the events knows whose window KV is cached.
        self.mapped -= set(self.freed)
        self.freed.clear()
        assert self.mapped == self.slots_with_windows()
        for each in (self.tree.pool, self.tree.windows):
            assert not each.fallbacks

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for handle in self.handles:
            for _ in range(handle.locks):
                self.cache.unlock(handle.node)
        pool = self.cache.window_pool
        assert pool is not None
        assert self.cache.evict_windows(pool.evictable).freed == pool.evictable
        assert self.tree.windows.cached == 0
        assert not self.tree._locked
        drain(self.cache)
        assert not list(nodes_of(self.cache))


TestWindows = WindowsMachine.TestCase
TestWindows.settings = settings(max_examples=min(2000, 2 * settings().max_examples))
