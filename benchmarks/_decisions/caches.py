"""Random operations on ``RadixCache`` and ``StateCache``, as several clients of one server would do them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from _decisions.log import Case, Log
from _decisions.policies import policies
from _decisions.prompts import Prompt, Prompts, Tokens
from costcache import RadixCache, RequestInfo
from costcache.radix import Cleared, Removed, StateCache, Stored

__all__ = ["cache_cases", "state_cases"]

REASONS = ("stop", "stop", "tool_call", "length", "abort", None)
MOST_RUNNING = 4
MOST_LOCKED = 5
FIGURES = (
    "hits",
    "misses",
    "hit_tokens",
    "asked_tokens",
    "cached",
    "free",
    "protected",
    "nodes",
    "evictions",
    "evicted",
    "trimmed",
    "clamped",
    "fallbacks",
    "oversized",
    "policy",
)
"""Fields of ``CacheStats`` that are recorded."""
KEPT = ("hit_tokens", "evictions", "evicted", "trimmed", "clamped", "fallbacks", "policy")
"""Those that stand beside the digests."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One cache and how it is used.

    Attributes:
        model: A preset.
        page_size: Tokens per page.
        size: Slots, or bytes of a cache with states.
        scale: Factor of the lengths of prompts.
        operations: How many there are.
        seeds: Seeds of the streams.
        variants: Run policies with other settings, too.
        seconds: Advance the clock.
        observed: Subscribe to events from the start.
        settings: More arguments for the cache.
    """

    model: str
    page_size: int
    size: int
    scale: int
    operations: int = 1200
    seeds: tuple[int, ...] = (0,)
    variants: bool = False
    seconds: bool = False
    observed: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


CACHES = {
    "mla-1": Setup("deepseek-v3", 1, 2500, 1, seeds=(0, 1), variants=True),
    "mla-16": Setup(
        "deepseek-v3",
        16,
        20_000,
        8,
        seconds=True,
        settings={"headroom": 0.04, "architecture": {"floor": 0.01}},
    ),
    "mha-1-chunk": Setup(
        "llama-3-8b", 1, 2500, 1, seconds=True, settings={"trim": "chunk", "trim_chunk": 32}
    ),
    "mha-16-off": Setup("llama-3-8b", 16, 20_000, 8, settings={"trim": "off"}),
    "mha-16-exact": Setup(
        "llama-3-8b",
        16,
        20_000,
        8,
        2000,
        seeds=(2,),
        variants=True,
        seconds=True,
        observed=False,
        settings={"trim": "exact", "headroom": 0.02},
    ),
}

STATE_CACHES = {
    "one-pool": Setup("qwen3-next", 16, 3_000_000_000, 8, 1000, variants=True),
    "one-pool-seconds": Setup(
        "kimi-linear", 16, 1_600_000_000, 8, 800, seconds=True, settings={"headroom": 0.03}
    ),
    "shares": Setup("qwen3-next", 64, 3_000_000_000, 32, 1000, variants=True, settings={"state_share": 0.47}),
    "shares-off": Setup(
        "qwen3-next",
        16,
        1_800_000_000,
        8,
        800,
        seconds=True,
        observed=False,
        settings={"state_share": 0.9, "trim": "off"},
    ),
}


@dataclass(eq=False, slots=True)
class Running:
    """A request that runs.

    Attributes:
        name: Its name to the cache.
        prompt: What it asked.
        node: The node that it locks.
        tokens: Prompt and output up to now.
        stored: Tokens that are in the cache.
        found: Tokens that its first match found.
        own: Its slots: of the tokens after those, and further ones.
        state: Its state slot (models with states).
    """

    name: str
    prompt: Prompt
    node: Any
    tokens: Tokens
    stored: int
    found: int
    own: Tokens
    state: int | None = None


class Clients:
    """Several clients of one cache; the same seed does the same operations."""

    def __init__(self, cache: RadixCache, setup: Setup, seed: int, log: Log) -> None:
        self.cache: Any = cache
        self.setup = setup
        self.log = log
        self.rng = random.Random(f"{seed} {setup.page_size} {setup.scale}")
        self.prompts = Prompts(self.rng, setup.scale)
        self.running: list[Running] = []
        self.locked: list[Any] = []
        self.held: list[Tokens] = []
        self.now = 0.0
        self.fallbacks = 0  # before the latest reset
        self._names = 0
        if setup.observed:
            cache.subscribe(self._event)

    def _event(self, event: object) -> None:
        if isinstance(event, Removed):
            self.log("removed", event.namespace, np.array(event.hashes, np.uint64))
        elif isinstance(event, Stored):
            hashes = np.array(event.hashes, np.uint64)
            self.log("stored", event.namespace, event.parent, hashes, event.tokens, event.page_size)
        elif isinstance(event, Cleared):
            self.log("cleared")

    # -- operations --------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """One operation."""
        weights = {"look": 6, "add": 6, "lock": 3, "refresh": 5, "evict": 2, "hold": 3}
        if len(self.running) < MOST_RUNNING:
            weights["start"] = 34
        if self.running:
            weights |= {"decode": 12, "finish": 26}
        if self.locked:
            weights["unlock"] = 3
        if self.held:
            weights["release"] = 3
        name = self.rng.choices(list(weights), list(weights.values()))[0]
        if number == self.setup.operations * 3 // 4:
            name = "reset"
        if self.setup.seconds:
            self.now += self.rng.expovariate(0.5)
            self.cache.clock.advance(self.now - (3.0 if self.rng.random() < 0.05 else 0.0))
        self.log(f"{number} {name}")
        getattr(self, name)()
        self.log("=", *self.sizes())

    def sizes(self) -> tuple[int, ...]:
        """Room of the cache."""
        return self.cache.cached, self.cache.free, self.cache.evictable

    def start(self) -> None:
        """A request begins: match, lock, allocate, insert."""
        cache, log = self.cache, self.log
        prompt = self.prompts.next()
        self._names += 1
        name = f"r{self._names}"
        match = cache.match_prefix(prompt.tokens[:-1], name, **prompt.space)
        log("found", match.matched_len, match.slots)
        cache.lock(match.node)
        slots = cache.allocate(len(prompt.tokens) - match.matched_len)
        log("allocated", slots)
        if slots is None:
            cache.unlock(match.node)
            cache.finish(name, RequestInfo(finish_reason="abort"))
            return
        self._store(name, prompt, match, slots)

    def _store(self, name: str, prompt: Prompt, match: Any, slots: Tokens) -> None:
        cache, size = self.cache, len(prompt.tokens)
        needed = size - match.matched_len
        given = np.concatenate((match.slots, slots[:needed]))
        done = cache.insert(prompt.tokens, given, name, priority=prompt.priority, **prompt.space)
        self._inserted(done)
        cache.release(done.duplicates)
        cache.lock(done.node)
        cache.unlock(match.node)
        own = np.concatenate((done.unused, slots[needed:]))
        self.running.append(
            Running(name, prompt, done.node, prompt.tokens, size - len(done.unused), match.matched_len, own)
        )

    def _inserted(self, done: Any) -> None:
        self.log("inserted", done.matched_len, done.inserted_len, done.duplicates, done.unused)

    def decode(self) -> None:
        """A request generates some tokens."""
        request = self.rng.choice(self.running)
        output = self.prompts.words(1, 8)
        missing = len(request.tokens) + len(output) - request.stored - len(request.own)
        if missing > 0:
            slots = self.cache.allocate(missing)
            self.log("allocated", slots)
            if slots is None:
                return
            request.own = np.concatenate((request.own, slots))
        request.tokens = np.concatenate((request.tokens, output))

    def finish(self) -> None:
        """A request ends, and may leave its output."""
        rng = self.rng
        request = self.running.pop(rng.randrange(len(self.running)))
        outputs = len(request.tokens) - len(request.prompt.tokens)
        reason = rng.choice(REASONS)
        if reason != "abort" and rng.random() < 0.8:
            self._leave(request)
            self.prompts.add(request.prompt, request.tokens[len(request.prompt.tokens) :])
        else:
            self.cache.release(request.own)
        self._end(request)
        info = RequestInfo(
            output_tokens=outputs,
            new_tokens=len(request.prompt.tokens) - request.found if rng.random() < 0.9 else None,
            finish_reason=reason,
            priority=request.prompt.priority,
            session=request.prompt.session,
        )
        self.cache.finish(request.name, info)

    def _end(self, request: Running) -> None:
        self.cache.unlock(request.node)

    def _leave(self, request: Running) -> None:
        cache, tokens, stored = self.cache, request.tokens, request.stored
        base = cache.match_prefix(tokens[:stored], request.name, **request.prompt.space)
        self.log("again", base.matched_len, base.slots)
        if base.matched_len != stored:  # a model with states: the prefix lasts, but no state at its end does
            cache.release(request.own)
            return
        own = len(tokens) - stored
        given = np.concatenate((base.slots, request.own[:own]))
        done = cache.insert(tokens, given, request.name, **request.prompt.space)
        self._inserted(done)
        for slots in (done.duplicates, done.unused, request.own[own:]):
            cache.release(slots)

    def look(self) -> None:
        """A match without a request."""
        prompt = self.prompts.next()
        match = self.cache.match_prefix(prompt.tokens, **prompt.space)
        self.log("found", match.matched_len, match.slots)

    def add(self) -> None:
        """An insert without a request or slots."""
        prompt = self.prompts.next()
        done = self.cache.insert(prompt.tokens, priority=self.rng.randrange(-2, 4), **prompt.space)
        self._inserted(done)

    def lock(self) -> None:
        """Something outside uses a prefix for a while."""
        prompt = self.prompts.next()
        match = self.cache.match_prefix(prompt.tokens, **prompt.space)
        self.log("found", match.matched_len)
        if len(self.locked) < MOST_LOCKED:
            self.cache.lock(match.node)
            self.locked.append(match.node)

    def unlock(self) -> None:
        """And no longer."""
        self.cache.unlock(self.locked.pop(self.rng.randrange(len(self.locked))))

    def refresh(self) -> None:
        """A request waits for a prefix."""
        nodes = [*self.locked, *(request.node for request in self.running)]
        if nodes and self.rng.random() < 0.5:
            self.cache.refresh(self.rng.choice(nodes))
        else:
            prompt = self.prompts.next()
            self.cache.refresh(self.cache.match_prefix(prompt.tokens, **prompt.space).node)

    def evict(self) -> None:
        """Somebody wants room."""
        self._evicted(self.cache.evict(self.rng.choice((0, 1, 33, 300)) * self.setup.scale))

    def _evicted(self, eviction: Any) -> None:
        self.log(
            "evicted",
            eviction.pool,
            eviction.policy,
            eviction.shortfall,
            eviction.headroom,
            eviction.goal,
            eviction.freed,
            eviction.trimmed,
            eviction.slots,
        )
        for victim in eviction.victims:
            self.log("victim", victim.start, victim.tokens, victim.trimmed, victim.uses, victim.recency)

    def hold(self) -> None:
        """Slots are taken that no prompt will fill."""
        slots = self.cache.allocate(self.rng.randint(1, 60) * self.setup.scale)
        self.log("allocated", slots)
        if slots is not None:
            self.held.append(slots)

    def release(self) -> None:
        """And given back."""
        self.cache.release(self.held.pop(self.rng.randrange(len(self.held))))

    def reset(self) -> None:
        """Everything that runs is dropped; prefixes may be locked."""
        while self.running:
            request = self.running.pop()
            self.cache.release(request.own)
            self._end(request)
            self.cache.finish(request.name, RequestInfo(finish_reason="abort"))
        self.fallbacks += self.cache.stats().fallbacks
        self.cache.reset(force=True)

    def drain(self) -> None:
        """End all that runs and evict everything."""
        while self.running:
            self.finish()
        while self.locked:
            self.unlock()
        while self.held:
            self.release()
        self._evicted(self.cache.evict(self.setup.size))
        self.log("=", *self.sizes())


class StateClients(Clients):
    """Clients that go on from states, and leave some."""

    def sizes(self) -> tuple[int, ...]:
        """Room of the cache."""
        return *super().sizes(), self.cache.states

    def step(self, number: int) -> None:
        """One operation, or an eviction of states."""
        if self.rng.random() < 0.02:
            self.log(f"{number} states")
            self._evicted(self.cache.evict_states(self.rng.choice((1, 1, 3))))
            self.log("=", *self.sizes())
        else:
            super().step(number)

    def start(self) -> None:
        """A request begins: match, lock, copy the state, allocate, insert with a state."""
        cache, log, rng = self.cache, self.log, self.rng
        prompt = self.prompts.next()
        self._names += 1
        name = f"r{self._names}"
        match = cache.match_prefix(prompt.tokens[:-1], name, **prompt.space)
        log("found", match.matched_len, match.state, match.beyond, match.branch is not None, match.slots)
        cache.lock(match.node)
        if match.branch is not None:
            cache.lock(match.branch)
        if match.state is None:
            state = cache.allocate_state()
        else:
            copied = cache.fork(match.node)
            log("copied", copied)
            state = None if copied is None else copied[1]
        slots = None if state is None else cache.allocate(len(prompt.tokens) - match.matched_len)
        log("allocated", state, slots)
        if match.branch is not None:
            further = cache.allocate_state() if slots is not None and rng.random() < 0.7 else None
            log("branch", further)
            if further is not None:
                cache.attach(match.branch, further)
            cache.unlock(match.branch)
        if slots is None:
            if state is not None:
                cache.release_state(state)
            cache.unlock(match.node)
            cache.finish(name, RequestInfo(finish_reason="abort"))
            return
        self._store(name, prompt, match, slots)
        request = self.running[-1]
        request.state = self._keep(prompt.tokens[: request.stored], name, state, prompt)

    def _keep(self, tokens: Tokens, name: str, state: int | None, prompt: Prompt) -> int | None:
        """Offer a state of cached tokens, which are whole pages; returns it if the cache does not take it."""
        if state is None or not len(tokens):
            return state
        self._inserted(self.cache.insert(tokens, None, name, state=state, **prompt.space))
        try:
            self.cache.release_state(state)
        except ValueError:
            self.log("state kept")
            return None
        state = self.cache.allocate_state()
        self.log("state left", state)
        return state

    def finish(self) -> None:
        """A request ends, and may leave its output and a state."""
        for request in self.running:  # what one that ends needs: a state of its own
            if request.state is None and self.rng.random() < 0.3:
                request.state = self.cache.allocate_state()
                self.log("state", request.state)
        super().finish()

    def _leave(self, request: Running) -> None:
        cache, tokens, stored = self.cache, request.tokens, request.stored
        whole = len(tokens) - len(tokens) % self.setup.page_size
        base = cache.match_prefix(tokens[:stored], request.name, **request.prompt.space)
        self.log("again", base.matched_len, base.state, base.beyond, base.slots)
        if base.matched_len != stored:  # its KV lasts, but no state at its end does
            cache.release(request.own)
            return
        given = np.concatenate((base.slots, request.own[: whole - stored]))
        state, request.state = request.state, None
        done = cache.insert(tokens[:whole], given, request.name, state=state, **request.prompt.space)
        self._inserted(done)
        for slots in (done.duplicates, done.unused, request.own[whole - stored :]):
            cache.release(slots)
        if state is not None:
            try:
                cache.release_state(state)
            except ValueError:
                self.log("state kept")

    def _end(self, request: Running) -> None:
        super()._end(request)
        if request.state is not None:
            self.cache.release_state(request.state)
            request.state = None


def _figures(clients: Clients, log: Log) -> Mapping[str, Any]:
    stats = clients.cache.stats()
    log("stats", *(getattr(stats, name) for name in FIGURES))
    figures = {name: getattr(stats, name) for name in KEPT}
    return {**figures, "fallbacks": stats.fallbacks + clients.fallbacks}


def _run(setup: Setup, seed: int, policy: str, settings: dict[str, Any], log: Log) -> Mapping[str, Any]:
    kind = StateCache if setup.model in ("qwen3-next", "kimi-linear") else RadixCache
    cache = kind(setup.model, setup.size, setup.page_size, policy, policy_settings=settings, **setup.settings)
    clients = (StateClients if kind is StateCache else Clients)(cache, setup, seed, log)
    for number in range(setup.operations):
        clients.step(number)
    clients.drain()
    return _figures(clients, log)


def _cases(setups: Mapping[str, Setup]) -> Iterator[tuple[str, Case]]:
    for name, setup in setups.items():
        for policy, variant, settings in policies(variants=setup.variants):
            for seed in setup.seeds:
                key = "/".join(filter(None, (policy, variant, name, f"seed {seed}")))
                yield key, functools.partial(_run, setup, seed, policy, settings)


def cache_cases() -> Iterator[tuple[str, Case]]:
    """Cases of ``RadixCache``."""
    return _cases(CACHES)


def state_cases() -> Iterator[tuple[str, Case]]:
    """Cases of ``StateCache``."""
    return _cases(STATE_CACHES)
