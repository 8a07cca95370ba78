"""The policy of the tutorial, in a server as its last step starts it, and what watch says of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from costcache.monitor.figures import figures
from costcache.monitor.reasons import reasons
from costcache.monitor.samples import parse
from costcache.monitor.subscribing import Subscription
from tests import tutorial
from tests.sglang.test_serve import ask, free_port, serving


@pytest.mark.engine
def test_the_tutorials_policy_serves(tmp_path: Path) -> None:
    tutorial.install(tmp_path)
    rng = random.Random(0)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    publisher = json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": True})
    policy = ("--radix-eviction-policy", "costcache:loyal")
    prompts = [[rng.randrange(3, 500) for _ in range(200)] for _ in range(12)]  # the pool has 1,024 tokens
    with serving(tmp_path, *policy, "--kv-events-config", publisher) as (url, log):

        def answer(ids: list[int]) -> None:
            sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert json.loads(ask(f"{url}/generate", {"input_ids": ids, "sampling_params": sampling}))[
                "output_ids"
            ]

        with Subscription((endpoint,)) as subscription:
            subscription.listen(1)
            for prompt in prompts:
                answer(prompt)
            metrics = ask(f"{url}/metrics")
            ask(f"{url}/flush_cache", {})
            answer(prompts[-1])
            subscription.listen(1)
            events = subscription.counts.take(1.0)
        watched = figures(parse(ask(f"{url}/metrics"), 0.0, url), events=events)
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
    (kv,) = watched.pools
    assert kv.victims == kv.by_uses["1"] > 0  # no prompt came twice but the last one
    assert (kv.resets, events.resets) == (1, 1)
    assert events.stored > 12 * 200 > events.removed > 0
    assert events.after_reset >= 200
    assert [reason.name for reason in reasons(watched)][:2] == ["reset", "nothing-shared"]
