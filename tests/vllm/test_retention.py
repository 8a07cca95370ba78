"""The example plugin over vLLM's real block pool: retention by what its requests say of their senders."""

from __future__ import annotations

from pathlib import Path

import pytest

from costcache.plugins import PluginManager
from costcache.records import Asker
from tests.vllm.serving import Server, bind, manager


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """The built-in plugins and the example."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "costcache-example")
    from costcache_example import plugin

    manager = PluginManager()
    manager.register(plugin, "example", plugin.__name__)
    return manager


def test_prefixes_stay_by_tenant_and_session(plugins: PluginManager) -> None:
    weights = {"gold": 5.0, "salted": 4.0}
    binding = bind("retention", plugins=plugins, policy_settings={"weights": weights})
    server = Server(manager(40), binding)
    told = {"tenant": "gold", "user": "eve"}
    server.serve("1", list(range(160)), session_id="a", extra_args={"costcache": told})
    server.serve("2", list(range(200, 360)), cache_salt="salted")
    server.serve("3", list(range(400, 560)), session_id="b")
    server.serve("4", list(range(600, 760)), session_id="c", extra_args={"costcache": {"session_ends": True}})
    pool = server.pool.costcache.runs.pool
    records = pool.records()
    assert [record.made_by for record in records] == [
        Asker("a", "gold", "eve"),
        Asker(None, "salted"),
        Asker("b"),
        Asker("c"),
    ]
    gone = []
    for number in range(4):  # each takes the place of one
        new = list(range(1000 * (number + 1), 1000 * (number + 1) + 160))
        server.serve(f"new {number}", new, session_id="d", cache_salt="gold")
        gone += [record.made_by for record in records if record.parent is None and record.made_by not in gone]
    # A session that ended, then a live one, then the tenants by their weights.
    assert gone == [Asker("c"), Asker("b"), Asker(None, "salted"), Asker("a", "gold", "eve")]
    assert not pool.fell_back
    server.check()
