"""Published failures of prefix caches, those that depend on victims, under the default policy."""

from __future__ import annotations

from costcache import RadixCache, RequestInfo
from tests.property.kit import MODEL, manager

PLUGINS = manager()


def ask(cache: RadixCache, name: object, tokens: list[int], output: int = 100) -> int:
    """One request, whole; how many tokens it found."""
    found = cache.match_prefix(tokens, name).matched_len
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo(output_tokens=output))
    return found


def scan(policy: str, rounds: int, cold: tuple[int, int]) -> float:
    """Share of the hot prompts' tokens that is found in the second half (sglang 18843)."""
    cache = RadixCache(MODEL, 60_000, policy=policy, plugins=PLUGINS)
    found = asked = n = 0
    for turn in range(rounds):
        for hot in range(20):
            hit = ask(cache, n, [hot] * 1000)
            n += 1
            if turn >= rounds // 2:
                found, asked = found + hit, asked + 1000
            for _ in range(cold[hot % 2]):
                ask(cache, n, [1_000_000 + n] * 1000)
                n += 1
    return found / asked


def test_one_shot_scan() -> None:
    assert scan("costcache", 66, (1, 2)) > 0.9  # each hot prompt every 50 requests, 1,980 others
    assert scan("lru", 24, (4, 4)) == 0.0  # every 100 requests: more than fits the pool
    assert scan("costcache", 24, (4, 4)) > 0.8


def test_hot_set_and_cold_scan() -> None:
    """LMCache 4994, an eighth of the size: LRU finds nothing of the hot set."""
    found = {}
    for policy in ("lru", "costcache"):
        cache = RadixCache(MODEL, 256 * 16, 16, policy=policy, plugins=PLUGINS)
        n = 0
        hits = []
        for cycle in range(12):
            hot = 0
            for chunk in range(128):
                hot += ask(cache, n, [chunk] * 16) > 0
                n += 1
            for chunk in range(512):
                ask(cache, n, [10_000 + 512 * cycle + chunk] * 16)
                n += 1
            hits.append(hot)
        found[policy] = hits
    assert sum(found["lru"]) == 0
    assert found["costcache"][-1] > 110
    assert sum(found["costcache"][6:]) > 0.95 * 6 * 128


def test_documents_asked_once_are_evicted_before_chats() -> None:
    """sglang 30300: many chats of short turns, and few huge documents."""
    found = {}
    for policy in ("lru", "costcache"):
        cache = RadixCache(MODEL, 100_000, policy=policy, plugins=PLUGINS)
        n = hits = asked = 0
        chats = {chat: [chat] * 100 for chat in range(30)}
        for turn in range(40):
            for chat in range(30):
                tokens = chats[chat]
                hit = ask(cache, n, tokens)
                if turn > 10:
                    hits, asked = hits + hit, asked + len(tokens) - 100
                chats[chat] = tokens + [chat] * 100
                n += 1
                if n % 10 == 0:
                    ask(cache, n, [1_000_000 + n] * 20_000)
                    n += 1
        found[policy] = hits / asked
    assert found["costcache"] > 0.8
    assert found["costcache"] > found["lru"] + 0.3
