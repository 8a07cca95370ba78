"""Our orders on SGLang's Rust tree core: the core never gets a node that it cannot evict."""

from __future__ import annotations

import logging
import random
from array import array
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from costcache.binding import Binding
from costcache.errors import SettingsError
from costcache.eviction import Refused
from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.plugins import PluginManager
from costcache.policies import PolicySpec
from costcache.records import NodeRecord
from costcache.sglang import build
from costcache.sglang.build import choose_core
from costcache.sglang.rustcore import CostRustCore
from tests.sglang.pools import Shape, bind, cost_cache, init_params, publish_args
from tests.sglang.serving import Server

FULL = ComponentType.FULL
SPACES: tuple[dict[str, Any], ...] = ({}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "s"})


def leaves(core: CostRustCore) -> set[int]:
    """Every leaf that could go now: the core's own walk names them, and nothing is evicted."""
    binding = core._binding
    binding.evict_device_start(0, 1 << 60)
    found = set()
    while (step := binding.evict_device_next_node(0, {0: 0})).node_id is not None:
        found.add(step.node_id)
    binding.evict_device_end(0)
    return found


def check_records(cache: Any) -> None:
    """The order can name exactly what the core could evict; each record has the right end."""
    core, kv = cache.tree_core, cache.pools.kv
    actual = leaves(core)
    assert actual == {record.node for record in kv.records() if record.is_evictable}
    for record in kv.records():
        assert core._records[record.node] is record
        assert kv.live[record.serial] is record
        if record.node in actual:
            _, _, start, end, held, _ = core._binding.collect_path_info([record.node])[0][-1]
            assert record.end == end
            assert held == end - start
            assert record.uses >= 1


def tokens_of(rng: random.Random, page_size: int) -> list[int]:
    base, size = rng.randrange(3) * 1000, rng.randrange(1, 12 * page_size + 2)
    tokens = list(range(base, base + size))
    for _ in range(rng.randrange(3)):
        cut = rng.randrange(4) * 3 * page_size + rng.choice((0, 0, page_size // 3))
        tokens[cut:] = [base + 100_000 * rng.randrange(1, 3) + i for i in range(cut, size)]
    return tokens[:size]


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("chunk", [0, 2], ids=["whole", "chunks"])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("policy", ["lru", "mru", "lfu"])
def test_random_operations(policy: str, page_size: int, chunk: int, eagle: bool) -> None:
    rng = random.Random(f"{policy} {page_size} {chunk} {eagle}")
    pool = 60 * page_size
    trim = {"trim": "chunk", "trim_chunk": chunk * page_size} if chunk else {"trim": "off"}
    shape = Shape(page_size=page_size, tokens=pool, core="rust", params={"is_eagle": eagle})
    cache = cost_cache(shape, policy=policy, **trim)
    core, allocator = cache.tree_core, cache.token_to_kv_pool_allocator
    assert type(core) is CostRustCore
    locks: list[Any] = []

    def match(tokens: list[int], space: dict[str, Any]) -> Any:
        return cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **space)))

    for _ in range(300):
        action, tokens = rng.random(), tokens_of(rng, page_size)
        space = SPACES[0] if rng.random() < 0.7 else rng.choice(SPACES)
        if action < 0.4:
            size = max(0, len(tokens) - eagle) // page_size * page_size
            found = match(tokens, space)
            held = cache.inc_lock_ref(found.last_device_node).to_dec_params()
            known, short = (
                found.device_prefix_len,
                size - found.device_prefix_len - allocator.available_size(),
            )
            if short > 0:
                cache.evict_for_alloc(EvictParams(num_tokens=short))
            if size and size - known <= allocator.available_size():
                prefix = cache.path_device_indices(found.last_device_node)[:known]
                fresh = allocator.alloc(size - known) if size > known else torch.empty(0, dtype=torch.int64)
                cache.insert(
                    InsertParams(
                        key=RadixKey(array("q", tokens), **space),
                        value=torch.cat([prefix, fresh]),
                        prev_prefix_len=known,
                        priority=rng.randrange(3),
                    )
                )
            cache.dec_lock_ref(found.last_device_node, held)
        elif action < 0.6:
            match(tokens, space)
        elif action < 0.72:
            found = match(tokens, space)
            locks.append((found.last_device_node, cache.inc_lock_ref(found.last_device_node).to_dec_params()))
        elif action < 0.9 and locks:
            cache.dec_lock_ref(*locks.pop(rng.randrange(len(locks))))
        else:
            count, before = rng.choice((1, 2, 5)) * page_size, allocator.available_size()
            evictable = cache.full_evictable_size()
            enough = min(count, evictable)
            if action < 0.97:
                freed = cache.evict(EvictParams(num_tokens=count)).num_tokens_evicted
            else:  # SGLang's own walk, over nodes that we name
                freed = cache.evict_for_alloc(
                    EvictParams(num_tokens=count),
                    allocation_reclaim_satisfied=lambda: allocator.available_size() >= before + enough,  # noqa: B023 # called at once
                ).num_tokens_evicted
            assert enough <= freed <= evictable
            assert allocator.available_size() == before + freed
        assert pool - allocator.available_size() == cache.full_evictable_size() + cache.full_protected_size()
        core.sanity_check([], [])
        check_records(cache)
    for lock in locks:
        cache.dec_lock_ref(*lock)
    check_records(cache)
    cache.evict(EvictParams(num_tokens=1 << 40))
    assert allocator.available_size() == pool
    assert not core._records
    assert not cache.pools.kv.live
    assert core.own_walks == core.refused == cache.pools.kv.fallbacks == 0


def small(**settings: Any) -> tuple[Server, CostRustCore]:
    shape = Shape(tokens=2000, core="rust")
    server = Server(cost_cache(shape, **settings), shape)
    return server, server.cache.tree_core


def test_a_giant_leaf_is_evicted_chunk_by_chunk() -> None:
    shape = Shape("mla", 64, tokens=40_000, context=40_000, core="rust")
    server = Server(cost_cache(shape, trim="auto"), shape)
    server.serve(range(30_016))
    freed = server.cache.evict_for_alloc(EvictParams(num_tokens=1)).num_tokens_evicted
    assert freed == 30_016 % 2048  # the last chunk, whole
    assert server.serve(range(30_016)) == 30_016 - freed
    server.check()
    server.drain()


def test_locked_victims_are_refused_without_a_panic() -> None:
    """A wrong guess would make the core panic, so the core is asked first."""
    server, core = small()
    server.serve(range(100))
    server.serve(range(1000, 1100))
    record = min(core.kv.records(), key=lambda r: r.recency)
    lock = core._binding.inc_lock_ref(record.node, [])  # without an event
    assert core.claim(record, 1) is Refused.NOT_NOW
    assert core.refused == 1
    assert server.cache.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 100
    core._binding.dec_lock_ref(
        record.node,
        core._bindings.DecLockRefParamsBinding(
            node_id=record.node,
            skipped_lock_components=[],
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        ),
        False,
    )
    server.drain()


def test_bad_victims_are_refused_with_their_reason() -> None:
    server, core = small()
    server.serve(range(100))
    (record,) = core.kv.records()
    core.inc_lock_ref(record.node)
    assert core.claim(record, 1) is Refused.LOCKED
    core._unpin(record.node)
    record.live_children = 1
    assert core.claim(record, 1) is Refused.NOT_A_LEAF


def test_a_record_without_a_node_is_dropped() -> None:
    server, core = small()
    server.serve(range(100))
    (record,) = core.kv.records()
    stale = record.node
    core._records[10**6] = core._records.pop(stale)
    record.node = 10**6
    assert core.claim(record, 1) is Refused.NOT_NOW
    assert not core.kv.live
    # Now the leaf has no record: the core walks by its own order.
    assert server.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 100
    assert core.own_walks == 1
    server.check()


class Raising(KeyedOrder):
    def key(self, record: NodeRecord) -> int:
        if record.recency > 5:
            raise RuntimeError("no idea")
        return record.recency


def test_an_order_that_raises_is_dropped_for_lru(caplog: pytest.LogCaptureFixture) -> None:
    server, core = small()
    server.cache.pools.kv.rank_by("raising", Raising())
    with caplog.at_level(logging.ERROR, "costcache"):
        for i in range(30):
            server.serve(range(1000 * i, 1000 * i + 150))
            server.check()
            check_records(server.cache)
    assert core.kv.fallbacks == 1
    assert core.kv.policy == "lru"
    assert sum("is dropped for 'lru'" in r.message for r in caplog.records) == 1
    kept = [i for i in range(30) if server.match(range(1000 * i, 1000 * i + 150)).device_prefix_len >= 149]
    assert kept == list(range(30))[-len(kept) :]
    server.drain()


def test_a_host_tier_is_refused() -> None:
    server, core = small()
    with pytest.raises(SettingsError, match="'auto' or 'python'"):
        core.set_hicache_enabled()
    server.drain()


def test_reset_forgets_all() -> None:
    server, core = small()
    for i in range(5):
        server.serve(range(1000 * i, 1000 * i + 150))
    held = core.kv.records()
    server.cache.reset()
    server.allocator.clear()
    assert not core._records
    assert not core.kv.live
    assert all(record.parent is None for record in held)
    assert server.serve(range(150)) == 0
    server.drain()


def test_a_request_counts_once() -> None:
    """Chunked prefill, the prompt's second insert, output and re-matches are one use of each node."""
    server, core = small(policy="lfu")
    req = server.request(range(100))
    server.match(range(100))
    server.start(req)
    server.decode(req, range(50))
    server.finish(req)
    server.serve(range(100))  # ends one token before the end of the prompt
    server.cache.evict(EvictParams(num_tokens=49))  # the output but for its last token, never computed
    server.check()
    by_end = {record.end: record for record in core._records.values()}
    assert by_end[100].uses == 2
    server.drain()


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "bigrams"])
def test_answers_are_those_of_the_adapter(eagle: bool) -> None:
    """Matches, locks and inserts go past SGLang's adapter: it must not have had more to say."""
    adapter = RustUnifiedTreeCore
    cache = cost_cache(Shape(page_size=4, tokens=4000, core="rust", params={"is_eagle": eagle}))
    core = cache.tree_core
    rng = random.Random(6)
    slots = iter(range(1 << 20))
    for _ in range(60):
        tokens = tokens_of(rng, 4)
        key = RadixKey(array("q", tokens), **rng.choice(SPACES), limit=rng.choice((None, len(tokens) // 2)))
        params = MatchPrefixParams(key=key)
        adapter.match_prefix(core, params)  # whatever there is to split is split now
        ours, theirs = core.match_prefix(params), adapter.match_prefix(core, params)
        assert ours == theirs
        node_id = ours.last_device_node
        receipts = []
        for inc in (core.inc_lock_ref, lambda node: adapter.inc_lock_ref(core, node)):
            receipts.append(inc(node_id))
            adapter.dec_lock_ref(core, node_id, receipts[-1].to_dec_params())
        core._unpin(node_id)
        assert receipts[0] == receipts[1]
        value = torch.tensor([next(slots) for _ in tokens], dtype=torch.int64)
        insert = InsertParams(key=RadixKey(array("q", tokens)), value=value)
        core.begin_insert(insert)
        again, once_more = core.begin_insert(insert), adapter.begin_insert(core, insert)
        assert again.result == once_more.result
        assert [type(a) for a in again.actions] == [type(a) for a in once_more.actions]
        freed = [[t.tolist() for t in step.actions[0].indices] for step in (again, once_more) if step.actions]
        assert not freed or freed[0] == freed[1]
        assert not core.has_ongoing_insert()
        assert core.end_insert() == []


def test_a_failed_insert_ends() -> None:
    server, core = small()
    server.serve(range(100))
    with pytest.raises(TypeError):
        server.cache.insert(InsertParams(key=RadixKey(array("q", [1, 2])), value="no tensor"))
    assert not core.has_ongoing_insert()
    server.check()
    server.drain()


# ---- the choice of the core ------------------------------------------------------------------


def params_of(kind: Any = "mha", **more: Any) -> Any:
    shape = Shape(kind, 1, core="rust", params=more)
    publish_args(shape)
    return init_params(shape)


class Longest(KeyedOrder):
    def key(self, record: NodeRecord) -> int:
        return -record.tokens


class Marked(KeyedOrder):
    def key(self, record: NodeRecord) -> int:
        return record.uses


class Plugin:
    """Two policies of a third party."""

    @hookimpl
    def policies(self) -> dict[str, PolicySpec]:
        return {
            "longest": PolicySpec(lambda cost, pools, settings: Longest(), "Longest first."),
            "marked": PolicySpec(
                lambda cost, pools, settings: Marked(), "Ranks leaves alone.", sees=frozenset({"leaves"})
            ),
        }


def bound(policy: str = "lru", **settings: Any) -> Binding:
    """A binding of full attention alone."""
    plugins = PluginManager()
    plugins.register(Plugin(), "third")
    return bind(Shape(), plugins=plugins, policy=policy, **settings)


def test_rust_where_stock_picks_it_and_nothing_needs_python() -> None:
    core, reason = choose_core(params_of(), bound())
    assert core == "rust"
    assert "full attention" in reason
    assert choose_core(params_of(), bound(core="rust")) == ("rust", "asked for")
    assert choose_core(params_of(), bound(core="python")) == ("python", "asked for")
    assert choose_core(params_of(), bound("marked"))[0] == "rust"


@pytest.mark.parametrize(
    ("make", "settings", "more", "why"),
    [
        (lambda: params_of("mamba"), {}, {}, "FULL.MAMBA"),
        (lambda: params_of("swa"), {}, {}, "FULL.SWA"),
        (params_of, {}, {"host_tier": True}, "host tier"),
        (params_of, {}, {"linker": True}, "linker"),
        (params_of, {"trim": "exact"}, {}, "'trim' is 'exact'"),
        (params_of, {"policy": "tlru"}, {}, "'tlru' looks at more"),
        (params_of, {"policy": "longest"}, {}, "'longest' looks at more"),
        (lambda: params_of(enable_session_radix_cache=True), {}, {}, "session"),
        (lambda: params_of(tree_core_backend="python"), {}, {}, "'python'"),
        (lambda: params_of(component_registry_override={FULL: object}), {}, {}, "custom components"),
    ],
)
def test_python_where_rust_cannot_and_an_error_where_it_is_forced(
    make: Any, settings: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    params = make()
    core, reason = choose_core(params, bound(**settings), **more)
    assert core == "python"
    assert why.replace(".", "+") in reason
    with pytest.raises(SettingsError, match=why) as raised:
        choose_core(params, bound(core="rust", **settings), **more)
    assert "set it to 'auto' or 'python'" in str(raised.value)


def test_a_rust_core_that_panics_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        pass

    def panic(*args: Any) -> None:
        raise PanicError("UnknownKind(16)")

    build._broken.cache_clear()
    monkeypatch.setattr(RustUnifiedTreeCore, "begin_insert", panic)
    core, reason = choose_core(params_of(), bound())
    assert core == "python"
    assert "UnknownKind(16)" in reason
    assert torch.__version__ in reason
    build._broken.cache_clear()
