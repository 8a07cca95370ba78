"""A tiered cache under random calls and injected faults, against what its memory has to be.

The model knows every byte: a row is a function of the prefix up to its token. So whatever is served is
compared, and so is everything that a tier holds, with what it has to be.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from costcache.tiers.copies import Copies
from costcache.tiers.tier import place_of
from costcache.tiers.writing import WRITINGS
from tests.tiers import LAYERS, PAGE, MemoryStore, Server, plugins_with, rows, window_pool

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)
POLICIES = {True: ("lru", "hazard"), False: ("lru", "hazard", "s3fifo", "gdsf")}


class Tiers(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(sorted(LAYERS)),
        write=st.sampled_from(sorted(WRITINGS)),
        policy=st.integers(0, 7),
        slots=st.sampled_from([24, 32, 64, 160]),
        host=st.sampled_from([16, 32, 96, 300]),
        disk=st.sampled_from([0, 24, 64, 400]),
        in_flight=st.sampled_from([1 << 12, 1 << 30]),
        merge_from=st.sampled_from([1, 64]),
    )
    def start(
        self,
        layout: str,
        write: str,
        policy: int,
        slots: int,
        host: int,
        disk: int,
        in_flight: int,
        merge_from: int,
    ) -> None:
        self.merge_from = merge_from
        self.store = MemoryStore()
        names = POLICIES[layout == "hybrid"]
        self.made: dict[str, Any] = {
            "layout": layout,
            "write": write,
            "policy": names[policy % len(names)],
            "slots": slots,
            "host": max(host, 48) if layout == "hybrid" else host,
            "disk": disk,
            "path": Path("unused") if disk else None,
            "in_flight": in_flight,
            "storage": "tested",
            "plugins": plugins_with(self.store),
        }
        self.faulty = False  # whether storage may have lost what was acknowledged
        self.most: int | None = None
        self.begun: list[Any] = []
        self._serve_anew()

    def _serve_anew(self) -> None:
        """Make a server whose copies end when the test says so, each after a millisecond."""
        self.server = Server(**self.made)
        mover: Any = self.server.tiers._mover
        for tier in (mover.host, mover.disk):
            if tier is not None:
                tier.tree.merge_from = tier.tree.merge_alike = self.merge_from
        tree = self.server.tiers.device._tree
        tree.merge_from = tree.merge_alike = self.merge_from
        for line in self.server.tiers._lines:

            def ready(copies: Copies = line.copies) -> int:
                copies.wait(copies.submitted)
                for job in copies._jobs:
                    job.seconds = 1e-3
                waiting = copies.submitted - copies.taken
                return waiting if self.most is None else min(waiting, self.most)

            setattr(line.copies, "ready", ready)  # noqa: B010 # a method, to the type checker

    # -- requests ----------------------------------------------------------------------------

    @rule(tokens=TOKENS)
    def serve(self, tokens: list[int]) -> None:
        self.server.serve(tokens)

    @rule(page=st.lists(st.integers(0, 2), min_size=PAGE, max_size=PAGE), pages=st.integers(3, 6))
    def grow(self, page: list[int], pages: int) -> None:
        """A prompt that grows page by page: a chain of nodes, which are merged."""
        for count in range(1, pages + 1):
            self.server.serve(page * count)
            self.server.tiers.drain()  # so that slower tiers have one, too

    @rule(tokens=TOKENS)
    def begin(self, tokens: list[int]) -> None:
        if len(self.begun) < 3:
            self.begun.append(self.server.begin(tokens))

    @precondition(lambda self: self.begun)
    @rule(which=st.integers(0, 2), cancel=st.booleans())
    def end(self, which: int, cancel: bool) -> None:
        self.server.end(self.begun.pop(which % len(self.begun)), cancel=cancel)

    @rule(tokens=TOKENS)
    def prefetch(self, tokens: list[int]) -> None:
        self.server.tiers.prefetch(tokens)

    @rule(most=st.integers(0, 3))
    def step(self, most: int) -> None:
        self.most = most
        self.server.tiers.step()
        self.most = None

    @rule()
    def drain(self) -> None:
        tiers = self.server.tiers
        tiers.drain()
        mover = tiers._mover
        assert mover is not None
        if mover.disk is not None and not self.faulty:
            assert _known(mover.disk) == set(self.store.values)

    @rule()
    def reset(self) -> None:
        self.server.tiers.drain()
        if not self.server.cache.stats().protected:
            self.server.tiers.reset()

    # -- faults ------------------------------------------------------------------------------

    @rule(full=st.sampled_from([None, "no room", OSError(errno.ENOSPC, "no space left")]))
    def disk_full(self, full: Any) -> None:
        self.server.tiers.drain()
        self.store.full = full == "no room"
        self.store.refused = full if isinstance(full, OSError) else None

    @rule(denied=st.booleans())
    def permission(self, denied: bool) -> None:
        self.server.tiers.drain()
        error = PermissionError(errno.EACCES, "permission denied") if denied else None
        self.store.denied = self.store.refused = self.store.kept = error
        self.faulty |= denied

    @rule(
        which=st.integers(0, 200),
        how=st.sampled_from(["flip", "cut", "lose", "swap"]),
        at=st.integers(0, 900),
    )
    def damage(self, which: int, how: str, at: int) -> None:
        self.server.tiers.drain()
        values = self.store.values
        keys = list(values)
        if not keys:
            return
        self.faulty = True
        key = keys[which % len(keys)]
        value = bytearray(values[key])
        if not value:  # it was cut before
            how = "lose"
        if how == "flip":
            value[at % len(value)] ^= 1 << at % 8
        elif how == "cut":
            del value[at % max(1, len(value)) :]
        elif how == "swap":
            value = bytearray(values[keys[at % len(keys)]])
        values[key] = bytes(value)
        if how == "lose":
            del values[key]

    @rule(line=st.integers(0, 1), times=st.integers(1, 3))
    def copy_fails(self, line: int, times: int) -> None:
        lines = self.server.tiers._lines
        left = [times]

        def before(_: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("injected")

        self.faulty |= line == 1  # a delete may be lost
        if line < len(lines):
            lines[line].copies.before = before

    @rule()
    def restart(self) -> None:
        for begun in self.begun:
            self.server.end(begun, cancel=True)
        self.begun = []
        self.server.tiers.close()
        self._serve_anew()

    # -- what holds ----------------------------------------------------------------------------

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "server"):
            return
        cache, mover = self.server.cache, self.server.tiers._mover
        assert cache.free + cache.reserved + cache.cached == cache.pool_size
        assert mover is not None
        slots = mover.host.slots
        assert slots.free + slots.reserved + slots.cached == slots.capacity
        assert slots.cached == mover.host.pool.cached == sum(n.tokens for n in mover.host.tree.walk())
        for tier in (mover.device, mover.host, mover.disk):
            if tier is None:
                continue
            assert tier.pool.used + tier.pool.reserved <= tier.pool.capacity
            pool = getattr(tier.tree, "windows", None)
            if pool is not None:
                assert pool.used + pool.reserved <= pool.capacity
                if tier.windows is not None:
                    assert tier.windows.used == pool.used + pool.reserved
        if mover.disk is not None:
            assert mover.disk.pool.cached == sum(n.tokens for n in mover.disk.tree.walk())

    @invariant()
    def every_order_is_in_force(self) -> None:
        if not hasattr(self, "server"):
            return
        mover = self.server.tiers._mover
        assert mover is not None
        for tier in (mover.device, mover.host, mover.disk):
            if tier is not None:
                assert not tier.pool.fallbacks
                windows = getattr(tier.tree, "windows", None)
                assert windows is None or not windows.fallbacks

    @invariant()
    def room_ahead_is_bounded(self) -> None:
        if hasattr(self, "server") and self.server.tiers._mover is not None:
            ahead = self.server.tiers._mover._ahead
            assert (ahead is None) == (self.made["write"] != "by_cost")
            assert ahead is None or ahead.room <= self.server.cache.pool_size // 10

    @invariant()
    def every_byte_is_right(self) -> None:
        if not hasattr(self, "server"):
            return
        server, mover = self.server, self.server.tiers._mover
        assert mover is not None
        sizes = server.buffers.tokens.sizes
        for node in mover.host.tree.walk():
            assert node.slots is not None
            tokens = np.frombuffer(place_of(node).key, np.int64)
            got = mover.host.buffers.tokens.gather(node.slots).numpy()
            assert np.array_equal(got, rows(tokens, sizes)[node.depth :])
            windows, held = mover.host.buffers.windows, mover.host.windows
            if node.window is not None and windows is not None and held is not None:
                got = windows.gather(held.of(node.slots)).numpy()
                want = rows(tokens, self._window_sizes(), 2)
                assert np.array_equal(got, want[node.depth :])

    def _window_sizes(self) -> tuple[int, ...]:
        windows = self.server.buffers.windows
        return () if windows is None else windows.sizes

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        server, store = self.server, self.store
        for begun in self.begun:
            server.end(begun)
        tiers = server.tiers
        tiers.drain()
        mover = tiers._mover
        assert mover is not None
        assert server.cache.reserved == 0
        assert server.cache.stats().protected == 0, "a copy left a pin on the device"
        assert mover.host.slots.reserved == 0
        assert mover.host.pool.pinned == 0
        if server.buffers.windows is not None:
            assert window_pool(server.cache._tree).reserved == 0
            pool = window_pool(mover.host.tree)
            assert pool.pinned == pool.reserved == 0
        if mover.disk is not None:
            assert mover.disk.pool.pinned == 0
            self._storage_agrees(mover.disk, store)
        tiers.close()

    def _storage_agrees(self, disk: Any, store: MemoryStore) -> None:
        if not self.faulty:
            assert _known(disk) == set(store.values), "what was acknowledged is there, and nothing else"
        sizes = self.server.buffers.tokens.sizes
        store.denied = None
        for node in disk.tree.walk():
            tokens = np.frombuffer(place_of(node).key, np.int64)
            want = rows(tokens, sizes)
            for number, value in enumerate(node.hashes):
                payload = disk.store.get(disk.page_key(value))
                if payload is None:
                    assert self.faulty, "an acknowledged page was lost"
                    continue
                start = node.depth + number * disk.page_size
                page = want[start : start + disk.page_size].tobytes()
                assert bytes(payload) == page, "a page has wrong bytes"
            if node.window is None:
                continue
            want = rows(tokens, self._window_sizes(), 2)
            for number, value in enumerate(node.hashes):
                payload = disk.store.get(disk.window_key(value))
                start = node.depth + number * disk.page_size
                assert payload is not None or self.faulty, "acknowledged window KV was lost"
                assert payload is None or bytes(payload) == want[start : start + disk.page_size].tobytes()


def _known(disk: Any) -> set[bytes]:
    """Keys of everything that the tier believes to be in storage."""
    pages = {disk.page_key(value) for node in disk.tree.walk() for value in node.hashes}
    windows = {
        disk.window_key(value)
        for node in disk.tree.walk()
        if node.window is not None
        for value in node.hashes
    }
    return pages | windows | set(disk._states.values()) | set(disk.left)


logging.getLogger("costcache").addFilter(lambda record: "injected" not in record.getMessage())
TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    suppress_health_check=[HealthCheck.too_slow], max_examples=50, stateful_step_count=30, deadline=None
)
