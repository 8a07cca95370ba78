"""The harness's host tier: stock SGLang backs up, evicts, and gets the same bytes back."""

from __future__ import annotations

import random

import pytest

from tests.sglang import hicache
from tests.sglang.pools import Kind, Shape, stock_cache
from tests.sglang.serving import Server

POLICIES = ("write_through", "write_through_selective", "write_back")
HOST_KINDS: tuple[Kind, ...] = ("mha", "mla", "mamba", "mla_mamba")


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_kv_demoted_to_the_host_is_loaded_back(
    kind: Kind, policy: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hicache.patch(monkeypatch)
    shape = Shape(kind, page_size, tokens=1024, states=24, hicache=policy)
    server = Server(stock_cache(shape), shape)
    prompt = list(range(320))
    for _ in range(2):  # the selective policy writes at the second use
        server.serve(prompt, output=[5, 6])  # of which the last is never computed
    prompt += [5, 6]  # a state of page 1 is at the end of a sequence, and a match never takes a prompt whole
    for other in range(1, 5):
        server.serve(range(10_000 * other, 10_000 * other + 300))
    found = server.match(prompt)
    assert found.host_hit_length + found.mamba_host_hit_length > 0
    expected = 321 if page_size == 1 else 320
    assert server.serve(prompt) == expected  # and the server checks every byte of it
    server.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_pressure_on_both_tiers(kind: Kind, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hicache.patch(monkeypatch)
    shape = Shape(kind, 1, tokens=1024, states=20, hicache=policy)
    server = Server(stock_cache(shape), shape)
    rng = random.Random(2)
    for step in range(80):
        start = rng.randrange(12) * 1000
        server.serve([*range(start, start + rng.choice((70, 200, 400))), 90_000 + step], output=[1, 2])
        server.check()
