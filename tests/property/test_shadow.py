"""The shadow against LRU itself, in a cache beside it that is fed the same requests."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from costcache import RadixCache, RequestInfo
from costcache.policies.hazard import Hazard
from costcache.radix import Node
from tests.property.kit import MODEL, manager

PLUGINS = manager()

requests = st.fixed_dictionaries(
    {
        "after": st.integers(0, 30),  # the prompt that this one continues, counted from the last
        "shares": st.integers(0, 60),  # pages of it
        "more": st.lists(st.integers(0, 2), max_size=10),
        "salt": st.sampled_from([None, None, None, "a"]),
        "output": st.integers(0, 900),
        "stays": st.sampled_from([False, False, True]),  # runs, and pins its prompt, while others come
        "ends": st.integers(0, 3),  # of those that run, the one that ends after this one; 3 for none
        "reset": st.integers(0, 40),
    }
)


class Beside:
    """A cache under hazard, and one under LRU that is fed the same requests."""

    def __init__(self, pages: int, page: int, merge_from: int) -> None:
        self.page = page
        self.caches = [
            RadixCache(MODEL, pages * page, page, policy=policy, plugins=PLUGINS, policy_settings=settings)
            for policy, settings in (("hazard", {"refresh": 7}), ("lru", {}))
        ]
        for cache in self.caches:
            cache._tree.merge_from, cache._tree.merge_alike = merge_from, 2
        self.hits = [0, 0]
        self.prompts: list[list[int]] = [[]]
        self.running: list[tuple[int, list[Node]]] = []
        self.served = 0

    def serve(self, *, after: int, shares: int, more: list[int], stays: bool, **other: Any) -> None:
        """One request, from both caches."""
        self.served += 1
        prompt = self.prompts[-1 - after % len(self.prompts)][:shares] + more
        self.prompts.append(prompt)
        tokens = [token for token in prompt for _ in range(self.page)]
        nodes = []
        for at, cache in enumerate(self.caches):
            cache.clock.advance(float(self.served))
            salt = other["salt"]
            self.hits[at] += cache.match_prefix(tokens, self.served, cache_salt=salt).matched_len
            node = cache.insert(tokens, request=self.served, cache_salt=salt).node
            if stays:
                cache.lock(node)
                nodes.append(node)
            else:
                cache.finish(self.served, RequestInfo(output_tokens=other["output"]))
        if stays:
            self.running.append((self.served, nodes))
        if other["ends"] < len(self.running):
            self.end(other["ends"])
        if not other["reset"] and not self.running:
            for cache in self.caches:
                cache.reset()
            self.hits = [0, 0]

    def end(self, which: int) -> None:
        """A running request ends."""
        name, nodes = self.running.pop(which)
        for cache, node in zip(self.caches, nodes, strict=True):
            cache.unlock(node)
            cache.finish(name, RequestInfo(output_tokens=5))

    def check(self) -> None:
        """The account is that of the two caches, and the shadow as full as LRU."""
        order = self.caches[0]._pool.order
        assert isinstance(order, Hazard)
        account = order.snapshot().against_lru
        assert account.gained - account.lost == self.hits[0] - self.hits[1]
        shadow = order.learner.shadow
        assert min(shadow.tokens, shadow.room) == self.caches[1].cached


@given(
    st.lists(requests, max_size=120),
    st.integers(3, 40),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([1, 2, 64]),
)
def test_the_account_is_the_difference_to_lru(
    stream: list[dict[str, Any]], pages: int, page: int, merge_from: int
) -> None:
    beside = Beside(pages, page, merge_from)
    for request in stream:
        beside.serve(**request)
        beside.check()
