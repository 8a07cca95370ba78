"""Plugins, caches and looks inside them, for tests of the plain cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from costcache import PolicySpec, RadixCache, VictimOrder, hookimpl
from costcache.plugins import PluginManager
from costcache.policies.keyed import LRU
from costcache.radix import Node
from costcache.records import RequestInfo, RequestRecord

MODEL = "llama-3-8b"


class Plugin:
    """A plugin of the given hook implementations."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            setattr(self, name, hookimpl(function))


def manager(**plugins: object) -> PluginManager:
    """The built-in plugins and these; nothing that happens to be installed."""
    made = PluginManager()
    for name, plugin in plugins.items():
        made.register(plugin, name, f"tests:{name}")
    return made


def policy(name: str, make: Callable[[], VictimOrder], **spec: Any) -> Plugin:
    """A plugin that offers one policy."""
    offer = {name: PolicySpec(lambda cost, pools, settings: make(), "for a test", **spec)}
    return Plugin(policies=lambda: offer)


def cache_with(
    make: Callable[[], VictimOrder], pool_size: int = 100, page_size: int = 1, **settings: Any
) -> RadixCache:
    """A cache under the test's own order, named ``tested``."""
    return RadixCache(
        MODEL, pool_size, page_size, "tested", plugins=manager(own=policy("tested", make)), **settings
    )


class Finishing(LRU):
    """LRU that calls a function of the test's whenever a request ends."""

    def __init__(self, ended: Callable[[RequestRecord, RequestInfo], None]) -> None:
        super().__init__()
        self._ended = ended

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        self._ended(request, info)


def claiming(**hooks: Callable[..., Any]) -> PluginManager:
    """The built-in plugins and an architecture plugin ``hostile`` that claims every model."""
    return manager(hostile=Plugin(**{"match_model": lambda: 1, **hooks}))


def nodes_of(cache: RadixCache) -> Iterator[Node]:
    """Every node, parents first."""
    return cache._tree.walk()


def cached_slots(cache: RadixCache) -> list[int]:
    """Every slot in the tree, sorted."""
    return sorted(s for node in nodes_of(cache) if node.slots is not None for s in node.slots.tolist())


def seen(eviction: Any) -> list[tuple[int, int, bool]]:
    """An eviction's victims as first token, tokens, trimmed."""
    return [(victim.start, victim.tokens, victim.trimmed) for victim in eviction.victims]


def check_structure(cache: RadixCache) -> None:
    """Whatever happened: the tree is well formed and every count is the sum of what is there."""
    tree, page_bytes = cache._tree, 8 * cache.page_size
    nodes = list(nodes_of(cache))
    serials = [node.serial for node in nodes]
    assert len(set(serials)) == len(serials) == len(tree.pool.live)
    for root in tree.roots.values():
        assert root.children, "a root without nodes stayed"
        assert (root.parent, root.tokens, root.depth) == (None, 0, 0)
    for node in (*tree.roots.values(), *nodes):
        assert node.live_children == len(node.children)
        assert node.locks == node.pins + sum(1 for child in node.children.values() if child.locks)
        for first, child in node.children.items():
            assert child.parent is node
            assert child.depth == node.depth + node.tokens
            assert first == bytes(child.key[:page_bytes])
    for node in nodes:
        assert node.tokens > 0
        assert node.tokens % cache.page_size == 0
        assert len(node.key) == 8 * node.tokens
        assert node.slots is not None
        assert node.slots.size == node.tokens
        assert tree.pool.live[node.serial] is node
    slots = cached_slots(cache)
    assert len(set(slots)) == len(slots), "a slot has two tokens"
    assert cache.cached == len(slots) == sum(node.tokens for node in nodes)
    assert cache.free + cache.reserved + cache.cached == cache.pool_size
    assert cache.free >= 0
    assert cache.reserved >= 0
    assert cache.evictable == sum(node.tokens for node in nodes if not node.locks)
    assert cache.stats().protected == cache.cached - cache.evictable


def drain(cache: RadixCache) -> Any:
    """Evict everything evictable, and check that nothing of it is left: the order has every leaf."""
    evictable = cache.evictable
    eviction = cache.evict(evictable)
    assert eviction.freed == evictable
    assert cache.evictable == 0
    check_structure(cache)
    return eviction


def insert_all(cache: RadixCache, prompts: Iterable[Iterable[int]]) -> None:
    """Insert each prompt as a separate request."""
    for prompt in prompts:
        cache.insert(list(prompt))
