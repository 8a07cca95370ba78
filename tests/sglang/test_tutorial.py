"""The policy of the tutorial, in a server as its last step starts it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests import tutorial
from tests.sglang.test_serve import ask, serving


@pytest.mark.engine
def test_the_tutorials_policy_serves(tmp_path: Path) -> None:
    tutorial.install(tmp_path)
    rng = random.Random(0)
    with serving(tmp_path, "--radix-eviction-policy", "costcache:loyal") as (url, log):
        for _ in range(12):  # more than the pool's 1,024 tokens
            prompt = {
                "input_ids": [rng.randrange(3, 500) for _ in range(200)],
                "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
            }
            assert json.loads(ask(f"{url}/generate", prompt))["output_ids"]
        metrics = ask(f"{url}/metrics")
    assert "policy 'loyal'" in log.read_text()
    found = {
        name: [line for line in metrics.splitlines() if line.startswith(f"costcache:{name}{{")]
        for name in ("policy_info", "evictions_total", "fallbacks_total")
    }
    (info,) = found["policy_info"]
    for label in ('policy="loyal"', 'lru="no"', 'pool="kv"', 'core="rust"'):
        assert label in info
    assert float(info.rsplit(" ", 1)[1]) == 1
    assert float(found["evictions_total"][0].rsplit(" ", 1)[1]) > 0
    assert float(found["fallbacks_total"][0].rsplit(" ", 1)[1]) == 0
