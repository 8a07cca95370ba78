"""SGLang's features under our orders: sessions, KV events, EAGLE keys, adapters, a raising order."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from costcache.binding import Binding
from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.plugins import PluginManager
from costcache.policies import PolicySpec
from costcache.policies.spec import Sight
from costcache.records import NodeRecord, Victim
from tests.sglang.mirror import check_records
from tests.sglang.pools import KINDS, Kind, Shape, bind, cost_cache
from tests.sglang.serving import Server

SESSIONS = {"enable_session_radix_cache": True}


def in_session(server: Server, name: str, tokens: Any) -> None:
    req = server.request(tokens, session_id=name)
    req.session_generation = server.cache.session_refs.ensure_session_generation(name)
    server.start(req)
    server.finish(req)


@pytest.mark.parametrize("kind", ["mha", "mamba", "swa"])
def test_nodes_of_open_sessions_are_evicted_last(kind: Kind) -> None:
    shape = Shape(kind, params=SESSIONS)
    server = Server(cost_cache(shape), shape)
    in_session(server, "a", range(100))
    in_session(server, "b", range(1000, 1100))
    in_session(server, "c", range(1000, 1100))
    server.serve(range(2000, 2100))
    server.serve(range(3000, 3100))
    evict = server.cache.evict

    def left() -> dict[int, int]:
        """Tokens that the device has of each prompt."""
        core, tokens = server.cache.tree_core, dict.fromkeys(range(4), 0)
        for node in core._collect_all_nodes():
            if node is not core.root_node:
                tokens[node.key.raw_token_ids()[0] // 1000] += len(node.key)
        return tokens

    evict(EvictParams(num_tokens=200))
    assert left() == {0: 100, 1: 100, 2: 0, 3: 0}  # the youngest were evicted: nothing refers to them
    evict(EvictParams(num_tokens=1))
    assert left()[0] < 100
    assert left()[1] == 100  # two references outlast one
    evict(EvictParams(num_tokens=left()[0]))
    assert left() == {0: 0, 1: 100, 2: 0, 3: 0}
    check_records(server.cache)
    server.cache.release_radix_session("b")
    server.cache.release_radix_session("c")
    assert evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 100
    server.drain()
    assert not server.cache.pools.kv.fallbacks


def test_kv_events_report_trimmed_pages() -> None:
    shape = Shape("mha", 16, params={"enable_kv_cache_events": True})
    server = Server(cost_cache(shape), shape)
    server.serve(range(320))
    _, *events = server.cache.take_events()  # the first reports an empty cache
    stored = [block for event in events for block in event.block_hashes]
    assert len(stored) == 20
    server.cache.evict(EvictParams(num_tokens=30))
    removed = [block for event in server.cache.take_events() for block in event.block_hashes]
    assert removed == stored[-2:]
    server.cache.evict(EvictParams(num_tokens=1000))
    removed += [block for event in server.cache.take_events() for block in event.block_hashes]
    assert sorted(removed) == sorted(stored)


@pytest.mark.parametrize("page_size", [1, 64])
def test_eagle_keys(page_size: int) -> None:
    shape = Shape("mha", page_size, params={"is_eagle": True})
    server = Server(cost_cache(shape), shape)
    server.serve(range(300), output=[7, 8])
    found = server.serve(range(300), output=[7, 8])
    assert found == (298 if page_size == 1 else 256)  # n tokens are n - 1 pairs, and the last is computed
    server.cache.evict(EvictParams(num_tokens=page_size))
    check_records(server.cache)
    server.drain()


def test_adapters_and_salts_separate_prefixes() -> None:
    shape = Shape("mha")
    server = Server(cost_cache(shape), shape)
    spaces: tuple[dict[str, Any], ...] = (
        {},
        {"lora_id": "l"},
        {"cache_salt": "s"},
        {"extra_key": "x", "lora_id": "l"},
    )
    for extra in spaces:
        assert server.serve(range(200), **extra) == 0
        assert server.serve(range(200), **extra) == 199
    check_records(server.cache)
    server.drain()


# -- orders that misbehave -----------------------------------------------------------------


class Moody(KeyedOrder):
    """LRU until it has named its third victim."""

    named = 0

    def key(self, record: NodeRecord) -> int:
        return record.recency

    def next_victim(self, pool: str) -> Victim | None:
        self.named += 1
        if self.named == 3:
            raise RuntimeError("enough of this")
        return super().next_victim(pool)


class Deaf(Moody):
    """Raises in an event."""

    def next_victim(self, pool: str) -> Victim | None:
        return KeyedOrder.next_victim(self, pool)

    def remove(self, record: NodeRecord) -> None:
        raise ValueError("what was removed?")


class Blind(Moody):
    """Names nodes that it must not."""

    def next_victim(self, pool: str) -> Victim | None:
        return Victim(NodeRecord(1, None, 10, 0))


class Plugin:
    @hookimpl
    def policies(self) -> dict[str, PolicySpec]:
        leaves: frozenset[Sight] = frozenset({"leaves"})
        return {
            "moody": PolicySpec(lambda cost, pools, settings: Moody(), "raises in next_victim", sees=leaves),
            "deaf": PolicySpec(lambda cost, pools, settings: Deaf(), "raises in an event", sees=leaves),
            "blind": PolicySpec(lambda cost, pools, settings: Blind(), "names strange nodes", sees=leaves),
        }


def misbehaving(shape: Shape, policy: str) -> Binding:
    plugins = PluginManager()
    plugins.register(Plugin(), "misbehaving")
    return bind(shape, plugins=plugins, policy=policy)


@pytest.mark.parametrize("policy", ["moody", "deaf", "blind"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_order_that_raises_is_dropped_for_lru(
    kind: Kind, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Shape(kind, tokens=2048, states=20)
    server = Server(cost_cache(shape, binding=misbehaving(shape, policy)), shape)
    for step in range(60):
        server.serve(range(1000 * (step % 13), 1000 * (step % 13) + 300), output=[1, 2])
        server.check()
    pools = server.cache.pools.by_name
    dropped = [pool for pool in pools.values() if pool.fallbacks]
    assert pools["kv"] in dropped or pools.get("state") in dropped
    assert all(pool.policy == "lru" for pool in dropped)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == len(dropped)
    assert all(f"policy {policy!r} is dropped for 'lru'" in error.getMessage() for error in errors)
    if policy != "blind":
        assert all(error.exc_info for error in errors)
    server.drain()
