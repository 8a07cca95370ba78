"""A small server over a tiered cache, which knows what every row of its memory has to be."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costcache import Deployment, ModelSpec, RadixCache
from costcache.model import FullAttention, LatentAttention, SlidingWindow, StateSpace
from costcache.plugins import PluginManager
from costcache.pool import Pool
from costcache.radix import StateCache
from costcache.radix.tree import RadixTree
from costcache.radix.windows import WindowTree
from costcache.storage import StorageBackend, StorageSpec
from costcache.tiers import Buffers, Layout, Ranks, TieredCache
from tests.property.kit import Plugin, manager
from tests.stores import BUILT_IN, FAST

PAGE = 4
DEVICE = os.environ.get("COSTCACHE_TEST_DEVICE", "cpu")
"""Where the device's tier is, unless a test says otherwise; ``cuda`` on a machine with a GPU."""
_MHA = FullAttention(heads=4, kv_heads=2, head_dim=8)
_SSM = StateSpace(variant="mamba2", conv_dim=32, conv_kernel=4, heads=2, head_dim=8, state_size=8, groups=1)
LAYERS: dict[str, tuple[Any, ...]] = {
    "mha": (_MHA, _MHA),
    "mla": (LatentAttention(heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),)
    * 3,
    "windows": (_MHA, SlidingWindow(heads=4, kv_heads=1, head_dim=8, window=8)),
    "apart": (_MHA, SlidingWindow(heads=4, kv_heads=1, head_dim=8, window=8)),
    "hybrid": (_SSM, _MHA, _SSM),
}
"""Layers of a small model for each layout; ``apart`` evicts its sliding windows apart."""
WINDOW = 8


def model(layout: str) -> ModelSpec:
    return ModelSpec(
        name=f"small-{layout}",
        architecture="Small",
        hidden_size=32,
        vocab_size=128,
        layers=LAYERS[layout],
        active_params=10**9,
    )


def rows(tokens: NDArray[np.int64], sizes: tuple[int, ...], salt: int = 0) -> NDArray[np.uint8]:
    """The bytes that the rows of a prompt's tokens have to be, of shape [tokens, bytes].

    Each row depends on the whole prefix, and its parts differ.
    """
    value, values = 0x9E3779B97F4A7C15 ^ salt, np.empty(tokens.size, np.uint64)
    for at, token in enumerate(tokens.tolist()):
        value = (value * 6364136223846793005 + 2 * token + 1) % 2**64
        values[at] = value
    found = []
    for number, size in enumerate(sizes):
        column = np.arange(size, dtype=np.uint64)
        with np.errstate(over="ignore"):
            mixed = (values[:, None] >> ((column * np.uint64(5)) % np.uint64(57))) + column * np.uint64(
                2 * number + 3
            )
        found.append(mixed.astype(np.uint8))
    return np.concatenate(found, axis=1)


class MemoryStore(StorageBackend):
    """Storage in a dict, which outlives its caches; with faults, when a test wants some.

    Attributes:
        values: The values by key.
        refused: Error that every put raises; None for none.
        denied: Error that every get raises; None for none.
        kept: Error that every delete raises; None for none.
        full: Whether puts find no room.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.refused: BaseException | None = None
        self.denied: BaseException | None = None
        self.kept: BaseException | None = None
        self.full = False

    def get(self, key: bytes) -> bytes | None:
        if self.denied is not None:
            raise self.denied
        return self.values.get(key)

    def put(self, key: bytes, value: bytes) -> bool:
        if self.refused is not None:
            raise self.refused
        if not self.full:
            self.values[key] = value
        return not self.full

    def delete(self, key: bytes) -> None:
        if self.kept is not None:
            raise self.kept
        self.values.pop(key, None)

    def keys(self) -> Iterator[tuple[bytes, int]]:
        yield from [(key, len(value)) for key, value in self.values.items()]

    def close(self) -> None:
        """Nothing to release."""


def window_pool(tree: RadixTree) -> Pool:
    """The pool of window KV of a tree that evicts it apart."""
    assert isinstance(tree, WindowTree)
    return tree.windows


def plugins_with(store: StorageBackend) -> PluginManager:
    """The built-in plugins, and a storage backend ``tested`` that is this one."""
    spec = StorageSpec(lambda path, capacity, settings: store, "for a test")
    return manager(tested=Plugin(storage_backend=lambda: {"tested": spec}))


class Server:
    """Serves prompts, checks every byte that it resumes from, and counts them."""

    def __init__(
        self,
        layout: str,
        *,
        slots: int = 64,
        host: int = 96,
        disk: int = 0,
        path: Path | None = None,
        policy: str = "lru",
        device: str = DEVICE,
        plugins: PluginManager | None = None,
        ranks: Ranks | None = None,
        storage: str = "file",
        **settings: Any,
    ) -> None:
        """Make one; ``slots``, ``host`` and ``disk`` are tokens (and a state for each eight)."""
        spec, deployment = model(layout), Deployment(page_size=PAGE)
        self.layout = Layout.of(spec, deployment, windows_apart=layout == "apart")
        kv, state = self.layout.token_bytes, self.layout.state_bytes
        self.cache: RadixCache | StateCache
        if state:
            states = max(2, slots // 8)
            memory = kv * slots + state * states
            # A little more, so that rounding leaves as many of both.
            self.cache = StateCache(
                spec,
                memory + kv + state,
                PAGE,
                policy,
                state_share=(state * states + state / 2) / (memory + kv + state),
                deployment=deployment,
                plugins=plugins,
            )
            self.buffers = Buffers.allocate(
                self.layout, self.cache.pool_size, self.cache._state_slots, device=device
            )
            settings.setdefault("state_share", 0.5)
            beside, per = kv, 1
        else:
            windows = max(32, slots // 2) if layout == "apart" else None
            self.cache = RadixCache(
                spec,
                slots,
                PAGE,
                policy,
                window_pool_size=windows,
                deployment=deployment,
                plugins=plugins,
            )
            self.buffers = Buffers.allocate(self.layout, slots, 0, windows or 0, device=device)
            beside, per = self.layout.window_bytes * (windows or 0), slots

        def size(tokens: int) -> int:
            """Bytes of so many tokens, with what a request resumes from beside them."""
            return tokens * kv + tokens * beside // per

        if storage in BUILT_IN:
            settings["storage_settings"] = FAST
        self.tiers = TieredCache(
            self.cache,
            self.buffers,
            ranks=ranks,
            host=size(host),
            disk=size(disk),
            path=path,
            storage=storage,
            **settings,
        )
        self.checked = 0
        self._number = 0

    def check(self, match: Any, tokens: NDArray[np.int64]) -> None:
        """Check that the device has the right bytes for a match."""
        slots = np.asarray(match.slots)
        want = rows(tokens[: slots.size], self.buffers.tokens.sizes)
        got = self.buffers.tokens.gather(slots).cpu().numpy()
        assert np.array_equal(got, want), f"wrong bytes among the first {slots.size} tokens"
        self.checked += slots.size
        state = getattr(match, "state", None)
        if state is not None and self.buffers.states is not None:
            want = rows(tokens[: slots.size], self.buffers.states.sizes, 1)[-1]
            got = self.buffers.states.gather(np.array([state])).cpu().numpy()[0]
            assert np.array_equal(got, want), f"wrong state after {slots.size} tokens"
        if self.buffers.windows is not None and slots.size:
            held = self.tiers.window_rows(slots[-WINDOW:])
            assert (held >= 0).all(), "a match without its window"
            want = rows(tokens[: slots.size], self.buffers.windows.sizes, 2)[-WINDOW:]
            got = self.buffers.windows.gather(held).cpu().numpy()
            assert np.array_equal(got, want), f"wrong window KV before token {slots.size}"

    def begin(self, tokens: Any) -> Any:
        """Match a prompt and begin to load what slower tiers have of it."""
        self._number += 1
        match = self.tiers.match_prefix(tokens, self._number)
        self.check(match.device, np.asarray(tokens))
        return self._number, np.asarray(tokens, np.int64), self.tiers.load(match)

    def end(self, begun: Any, *, cancel: bool = False) -> int:
        """Serve a prompt whose load is done; returns the tokens that it did not have to compute."""
        request, tokens, load = begun
        tiers, cache = self.tiers, self.cache
        if cancel:
            tiers.cancel(load)
        else:
            tiers.wait(load)
        match = tiers.resume(load).device
        self.check(match, tokens)
        tiers.lock(match.node)
        whole = tokens.size // PAGE * PAGE
        slots = tiers.allocate(whole - match.matched_len)
        state = cache.allocate_state() if isinstance(cache, StateCache) else None
        if slots is not None and self.buffers.windows is not None and not self._windows(tiers, slots):
            tiers.release(slots)
            slots = None
        if slots is not None:
            self._compute(tokens, match.matched_len, np.asarray(slots), state)
            given = np.concatenate((np.asarray(match.slots), slots))
            more = {} if state is None else {"state": state}
            done = tiers.insert(tokens[:whole], given, request, **more)
            tiers.release(done.duplicates)
        if state is not None and isinstance(cache, StateCache) and state in cache._reserved_slots:
            cache.release_state(state)
        tiers.unlock(match.node)
        tiers.finish(request)
        return int(match.matched_len)

    def serve(self, tokens: Any) -> int:
        """Serve a prompt."""
        return self.end(self.begin(tokens))

    def _windows(self, tiers: TieredCache, slots: Any) -> bool:
        """Reserve window KV like a server that computes in chunks: the first have left by the end."""
        first = np.asarray(slots)[:-24]
        held = tiers.hold_windows(slots[-24:])
        if held and tiers.hold_windows(first):
            tiers.free_windows(first)
        return held

    def _compute(
        self, tokens: NDArray[np.int64], start: int, slots: NDArray[np.int64], state: int | None
    ) -> None:
        import torch

        whole = start + slots.size
        found = rows(tokens[:whole], self.buffers.tokens.sizes)[start:]
        self.buffers.tokens.scatter(slots, torch.from_numpy(found))
        if state is not None and self.buffers.states is not None and whole:
            last = rows(tokens[:whole], self.buffers.states.sizes, 1)[-1:]
            self.buffers.states.scatter(np.array([state]), torch.from_numpy(last))
        if self.buffers.windows is not None:
            held = self.tiers.window_rows(slots)
            found = rows(tokens[:whole], self.buffers.windows.sizes, 2)[start:]
            self.buffers.windows.scatter(held[held >= 0], torch.from_numpy(found[held >= 0]))


class Prompts:
    """Random prompts that share prefixes."""

    def __init__(self, seed: int, longest: int = 40) -> None:
        self.chance = random.Random(seed)
        self.longest = longest
        self.seen: list[list[int]] = []

    def next(self) -> list[int]:
        chance = self.chance
        tokens: list[int] = []
        if self.seen and chance.random() < 0.8:
            tokens = list(chance.choice(self.seen[-40:]))
            if chance.random() < 0.3:
                tokens = tokens[: chance.randrange(len(tokens)) + 1]
        fresh = max(1, min(self.longest - len(tokens), chance.randrange(1, 20)))
        tokens = [*tokens, *(chance.randrange(5) for _ in range(fresh))][: self.longest]
        self.seen.append(tokens)
        return tokens
