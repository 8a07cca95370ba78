"""A vLLM whose offload tier tells its policies too little: the start is refused, or its own LRU serves."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from costcache.errors import CostcacheError
from tests.vllm.tier import Request, keys_of, ours, stock

pytestmark = pytest.mark.skipif(
    hasattr(CachePolicy, "on_request_access"), reason="vLLM tells its policies enough since 0.33"
)


def test_it_is_refused() -> None:
    with pytest.raises(CostcacheError, match=r"use vLLM 0\.33\.0, or set 'untested' to 'lru'"):
        ours(20, "hazard")


def test_its_own_lru_serves_if_that_is_asked_for() -> None:
    managers = [stock(20), ours(20, "hazard", settings={"untested": "lru"})]
    for number in range(30):
        keys = keys_of([number % 3, number, number + 1, number + 2])
        requests = [Request(manager, str(number), keys) for manager in managers]
        assert len({request.serve() for request in requests}) == 1
        assert requests[0].evicted == requests[1].evicted
