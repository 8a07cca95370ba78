"""The example plugin in SGLang's real cache: retention by what its requests say of their senders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from costcache.plugins import PluginManager
from costcache.records import Asker
from tests.sglang.pools import Shape, bind, cost_cache
from tests.sglang.serving import Server


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """The built-in plugins and the example."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "costcache-example")
    from costcache_example import plugin

    manager = PluginManager()
    manager.register(plugin, "example", plugin.__name__)
    return manager


def serve(server: Server, tokens: range, told: dict[str, Any], **more: Any) -> None:
    req = server.request(tokens, **more)
    req.sampling_params.custom_params = {"costcache": told}
    server.start(req)
    server.decode(req, [1])
    server.finish(req)


def test_prefixes_stay_by_tenant_and_session(plugins: PluginManager) -> None:
    shape = Shape()
    weights = {"gold": 5.0, "salted": 4.0}
    binding = bind(shape, plugins=plugins, policy="retention", policy_settings={"weights": weights})
    server = Server(cost_cache(shape, binding=binding), shape)
    serve(server, range(100), {"tenant": "gold", "user": "eve"}, session_id="a")
    serve(server, range(200, 300), {}, cache_salt="salted")
    serve(server, range(400, 500), {"session": "b"})
    serve(server, range(600, 700), {"session": "c", "session_ends": True})
    records = [record for record in server.cache.pools.kv.records() if not record.depth]
    assert [record.made_by for record in records] == [
        Asker("a", "gold", "eve"),
        Asker(None, "salted"),
        Asker("b"),
        Asker("c"),
    ]
    order: list[Asker | None] = []
    while len(order) < len(records):
        server.cache.evict(EvictParams(num_tokens=101))
        order += [
            record.made_by for record in records if record.parent is None and record.made_by not in order
        ]
    # A session that ended, then a live one, then the tenants by their weights.
    assert order == [Asker("c"), Asker("b"), Asker(None, "salted"), Asker("a", "gold", "eve")]
    assert not server.cache.pools.kv.fell_back
    server.drain()
