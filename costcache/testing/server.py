"""The smallest server: it does to a cache what real ones do, and checks the cache after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from costcache.cost import CostModel
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.radix import RadixCache, StateCache
from costcache.radix.cache import PrefixCache
from costcache.radix.tree import NEVER
from costcache.records import Asker
from costcache.testing.steps import Evict, Finish, Request, Reset, Serve, Start, Step, Wait

__all__ = ["SmallServer", "Transcript", "made_cache"]


def made_cache(
    model: ModelSpec,
    tokens: int,
    page_size: int,
    policy: str,
    plugins: PluginManager,
    *,
    states: int = 12,
    **settings: Any,
) -> PrefixCache:
    """A cache for a model: a :class:`RadixCache`, or a :class:`StateCache` if the model has states.

    Args:
        model: The model.
        tokens: Tokens that fit, beside the states.
        page_size: Tokens per page.
        policy: The policy's name.
        plugins: Where it is looked up.
        states: States that fit, for a model with states.
        settings: Further fields of :class:`costcache.settings.Settings`.
    """
    if not model.has_states:
        return _merging(RadixCache(model, tokens, page_size, policy, plugins=plugins, **settings))
    cost: CostModel = plugins.match(model).cost(Deployment(page_size=page_size))
    memory = tokens * cost.token.kv_bytes + states * cost.token.state_bytes
    return _merging(StateCache(model, memory, page_size, policy, plugins=plugins, **settings))


def _merging(cache: PrefixCache) -> PrefixCache:
    """Have the paths of a small cache merged, too."""
    tree = cache._tree
    if tree.merge_from != NEVER:
        tree.merge_from = tree.merge_alike = 2
    return cache


@dataclass
class Running:
    """A running request: the node that it pins, the tokens that it matched, and its state's slot."""

    name: int
    request: Request
    node: Any
    matched: int
    state: int | None = None


@dataclass
class Transcript:
    """The results of a stream.

    Attributes:
        matched: Tokens found by each request.
        victims: Each victim as first token, tokens, and whether it was trimmed.
    """

    matched: list[int] = field(default_factory=list)
    victims: list[tuple[int, int, bool]] = field(default_factory=list)


class SmallServer:
    """A server of one cache, without a model.

    Attributes:
        cache: The cache.
        running: Requests that run.
        transcript: What happened so far.
    """

    def __init__(self, cache: PrefixCache) -> None:
        """Serve from an empty cache."""
        self.cache = cache
        self.running: list[Running] = []
        self.transcript = Transcript()
        self._names = 0

    def run(self, steps: list[Step]) -> Transcript:
        """Do the steps, finish what still runs, and evict all that is left."""
        for step in steps:
            self.do(step)
        while self.running:
            self.do(Finish())
        self.do(Evict(self.cache.pool_size))
        return self.transcript

    def do(self, step: Step) -> None:
        """Do one step, and check the cache."""
        if isinstance(step, Serve):
            self._finish(self._start(step.request))
        elif isinstance(step, Start):
            self.running.append(self._start(step.request))
        elif isinstance(step, Finish):
            if self.running:
                self._finish(self.running.pop(step.which % len(self.running)))
        elif isinstance(step, Evict):
            self._evict(step.tokens)
        elif isinstance(step, Wait):
            found = self.cache.match_prefix(step.prompt)
            if found.matched_len:
                self.cache.refresh(found.node)
        else:
            self._reset(step)
        self.check()

    def check(self) -> None:
        """Check that nothing is lost, no pinned token is gone, and the policy is still in force."""
        cache = self.cache
        stats = cache.stats()
        if cache.free + cache.cached + cache.reserved != cache.pool_size:
            raise AssertionError(
                f"{cache.pool_size} tokens became {cache.free} free + {cache.cached} cached + "
                f"{cache.reserved} reserved"
            )
        for request in self.running:
            if request.matched and (request.node.parent is None or request.node.end < request.matched):
                raise AssertionError(
                    f"a running request matched {request.matched} tokens, and its pin did not keep them"
                )
        if stats.fallbacks:
            raise AssertionError("LRU had to take over: the log of 'costcache' says why")

    def _start(self, request: Request) -> Running:
        cache, self._names = self.cache, self._names + 1
        info = request.info
        asker = Asker(info.session, info.tenant, info.user)
        # The last token is computed in any case.
        found = cache.match_prefix(request.prompt[:-1], self._names, asker=asker)
        cache.lock(found.node)
        self.transcript.matched.append(found.matched_len)
        state = cache.allocate_state() if isinstance(cache, StateCache) else None
        return Running(self._names, request, found.node, found.matched_len, state)

    def _finish(self, running: Running) -> None:
        cache, request = self.cache, running.request
        tokens = request.prompt + request.output
        if request.info.finish_reason == "abort":  # nothing of it is kept
            if running.state is not None and isinstance(cache, StateCache):
                cache.release_state(running.state)
        elif running.state is None:
            cache.insert(tokens, request=running.name, priority=request.priority)
        elif isinstance(cache, StateCache):
            whole = tokens[: len(tokens) - len(tokens) % cache.page_size]
            reserved = cache.reserved_states
            cache.insert(whole, request=running.name, state=running.state, priority=request.priority)
            if cache.reserved_states == reserved:  # it was not kept: its tokens did not fit, or have one
                cache.release_state(running.state)
        cache.unlock(running.node)
        cache.finish(running.name, request.info)

    def _evict(self, tokens: int) -> None:
        cache = self.cache
        before = cache.evictable
        eviction = cache.evict(tokens)
        unit = cache._pool.token_units
        if eviction.freed < min(tokens, before) * unit and not isinstance(cache, StateCache):
            raise AssertionError(
                f"a shortfall of {tokens} tokens, {before} of them evictable, freed only {eviction.freed}"
            )
        self.transcript.victims += [(v.start, v.tokens, v.trimmed) for v in eviction.victims]

    def _reset(self, _: Reset) -> None:
        while self.running:
            self._finish(self.running.pop())
        self.cache.reset()
