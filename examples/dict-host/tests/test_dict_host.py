"""The host over a dict finds what the radix cache finds under every policy, and never exceeds its room."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from dict_host import DictCache

from costcache import KeyedOrder, NodeRecord, RadixCache

SIZE = 4


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    heads = [[rng.randrange(9) for _ in range(rng.randrange(4, 24))] for _ in range(6)]
    return [rng.choice(heads) + [rng.randrange(9) for _ in range(rng.randrange(1, 16))] for _ in range(count)]


@pytest.mark.parametrize("policy", ["lru", "hazard", "lfu", "fifo", "s3fifo", "priority", "gdsf"])
def test_it_never_exceeds_its_room_and_finds_repeated_prompts(policy: str) -> None:
    cache = DictCache("llama-3-8b", 128, SIZE, policy)
    found = 0
    for prompt in prompts(1, 400):
        found += cache.serve(prompt)
        assert len(cache.blocks) * SIZE == cache.pool.cached <= 128
        assert cache.pool.pinned == 0
        assert set(map(id, cache.blocks.values())) == set(map(id, cache.pool.records()))
    assert cache.pool.policy == policy
    assert not cache.pool.fallbacks
    assert found > 1000
    everything = cache.pool.cached
    assert cache.pool.evict(everything).freed == everything
    assert not cache.blocks


def test_it_finds_what_the_radix_cache_finds_under_lru() -> None:
    """LRU over a prefix tree is LRU over its pages, whatever nodes they are in."""
    ours, radix = DictCache("llama-3-8b", 128, SIZE, "lru"), RadixCache("llama-3-8b", 128, SIZE, "lru")
    for prompt in prompts(2, 400):
        name = object()
        found = radix.match_prefix(prompt, name).matched_len
        radix.insert(prompt, request=name)
        radix.finish(name)
        assert ours.serve(prompt) == found
    assert ours.pool.counters.evicted == radix.counters.evicted > 1000


def test_the_readme_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == printed


class Broken(KeyedOrder):
    def key(self, record: NodeRecord) -> int:
        raise RuntimeError("no idea")


def test_a_broken_policy_leaves_lru_in_force(caplog: pytest.LogCaptureFixture) -> None:
    ours, radix = DictCache("llama-3-8b", 128, SIZE, "lru"), DictCache("llama-3-8b", 128, SIZE, "lru")
    ours.pool.rank_by("broken", Broken())
    for prompt in prompts(3, 200):
        assert ours.serve(prompt) == radix.serve(prompt)
    assert (ours.pool.policy, ours.pool.fallbacks) == ("lru", 1)
    assert "'broken' is dropped for 'lru'" in caplog.text
