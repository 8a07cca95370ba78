"""A tiered cache: what is copied, loaded, cancelled and found again, and what faults do."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costcache import Asker, Deployment, ModelSpec, RadixCache, RequestInfo
from costcache.errors import PluginError, SettingsError
from costcache.model import CompressedAttention
from costcache.policies.hazard.order import Hazard
from costcache.radix import StateCache
from costcache.records import MOST_NAME
from costcache.storage import StorageSpec
from costcache.tiers import WRITINGS, Buffers, Layout, TieredCache
from tests.property.kit import Finishing, Plugin, manager, policy
from tests.stores import BUILT_IN, FAST, need
from tests.tiers import LAYERS, PAGE, MemoryStore, Prompts, Server, model, plugins_with, window_pool
from tests.tiers_schedules import schedule

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

A, B = list(range(32)), list(range(100, 132))


def server(layout: str = "mla", **made: Any) -> tuple[Server, MemoryStore]:
    store = MemoryStore()
    made = {"disk": 400, "path": Path("unused"), **made}
    return Server(layout, storage="tested", plugins=plugins_with(store), **made), store


# -- layouts -------------------------------------------------------------------------------------


def test_a_layout_has_the_parts_of_each_kind_of_layer() -> None:
    def parts(name: str) -> dict[str, int]:
        layout = Layout.of(model(name), Deployment())
        return {part.name: part.bytes for part in (*layout.tokens, *layout.states)}

    assert parts("mha") == {"0.k": 32, "0.v": 32, "1.k": 32, "1.v": 32}
    assert parts("mla") == {"0.latent": 48, "1.latent": 48, "2.latent": 48}
    assert parts("windows") == {"0.k": 32, "0.v": 32, "1.k": 16, "1.v": 16}
    hybrid = parts("hybrid")
    assert list(hybrid) == ["1.k", "1.v", "0.state", "2.state"]
    assert hybrid["0.state"] == 2 * 3 * 32 + 4 * 2 * 8 * 8


def test_a_layout_is_that_of_one_rank() -> None:
    two = Layout.of(model("mha"), Deployment(tp=2))
    assert two.token_bytes * 2 == Layout.of(model("mha"), Deployment()).token_bytes
    assert two.fingerprint() != Layout.of(model("mha"), Deployment()).fingerprint()
    assert two.fingerprint("a") != two.fingerprint("b")


def test_rows_that_stand_for_several_tokens_are_refused() -> None:
    layer = CompressedAttention(heads=4, head_dim=6, rope_head_dim=2, ratio=8)
    spec = model("mha").model_copy(update={"layers": (layer, layer)})
    with pytest.raises(SettingsError, match=r"a row of layer 0 \(compressed_attention\) stands for several"):
        Layout.of(spec, Deployment())


def test_tensors_of_any_type_come_back_bit_equal() -> None:
    bits = torch.randint(-(2**15), 2**15, (16, 2, 8), dtype=torch.int16)
    mine = [bits.view(torch.bfloat16), torch.full((16, 3), float("nan"), dtype=torch.float32)]
    source, target = Buffers(mine), Buffers.allocate(Buffers(mine).layout(), 20)
    slots, others = np.array([3, 15, 0]), np.array([7, 2, 19])
    source.tokens.copy(slots, target.tokens, others)
    want = torch.cat([part.reshape(16, -1).view(torch.uint8)[slots] for part in mine], dim=1)
    assert torch.equal(target.tokens.gather(others), want)


# -- schedules -----------------------------------------------------------------------------------


def test_contents_come_back_bit_equal_through_every_tier_and_layout(tmp_path: Path) -> None:
    total: dict[str, int] = {}
    for seed in range(12):
        found = schedule(seed, tmp_path / str(seed))
        total = {name: total.get(name, 0) + found[name] for name in ("device", "host", "disk")}
    assert min(total.values()) > 50, "each tier gave some"


def test_contents_come_back_bit_equal_through_lmdb(tmp_path: Path) -> None:
    need("lmdb")
    assert sum(schedule(seed, tmp_path / str(seed), storage="lmdb")["disk"] for seed in range(4)) > 10


# -- what is copied ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sorted(LAYERS))
def test_write_through_copies_at_once_and_what_was_evicted_is_loaded(layout: str) -> None:
    made, _ = server(layout, slots=40, host=200)
    made.serve(A)
    made.tiers.drain()
    assert made.tiers.cached("host") == made.tiers.cached("disk") == 32
    assert made.serve(B) == 0  # evicts most of A from the device
    made.tiers.drain()
    assert made.tiers.cached("device") < 64
    assert made.serve(A) == 32
    counters = made.tiers.counters["host"]
    assert counters.loaded > 0
    assert counters.bytes_out == counters.loaded * made.layout.token_bytes
    made.tiers.close()


def test_write_back_copies_what_is_evicted_and_nothing_before() -> None:
    made, _ = server(slots=40, host=200, write="write_back")
    made.serve(A)
    made.tiers.drain()
    assert made.tiers.cached("host") == 0
    made.serve(B)
    made.tiers.drain()
    assert made.tiers.cached("host") == 32, "the victim's whole prefix"
    assert made.tiers.cached("disk") == 0
    assert made.tiers.counters["host"].demoted == 32
    assert made.serve(A) == 32
    made.tiers.close()


def test_write_back_reaches_the_disk_when_the_host_evicts() -> None:
    made, store = server(slots=40, host=40, write="write_back")
    for start in range(0, 400, 100):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    assert made.tiers.counters["disk"].demoted > 0
    assert len(store.values) * PAGE == made.tiers.cached("disk")
    assert made.serve(A) == 32
    assert made.tiers.counters["disk"].loaded > 0
    made.tiers.close()


def test_selective_writing_copies_what_is_used_twice() -> None:
    made, _ = server(write="write_through_selective")
    made.serve(A)
    made.tiers.drain()
    assert made.tiers.cached("host") == 0
    made.serve(A)
    made.tiers.drain()
    assert made.tiers.cached("host") == 32
    made.tiers.close()


def test_by_cost_loads_nothing_that_is_faster_to_compute() -> None:
    made, _ = server(slots=40, host=200, write="by_cost")
    mover = made.tiers._mover
    assert mover is not None
    made.serve(A)
    made.tiers.drain()
    made.serve(B)
    made.tiers.drain()
    mover.lines[0].link.bytes_per_second = 1.0  # as slow as can be
    assert made.serve(A) < 32
    assert mover.counters["host"].loaded == 0
    made.tiers.close()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_without_a_forecast_no_copy_pays_for_what_it_displaces(policy: str) -> None:
    """All prompts are worth the same by the prior, so the price would be that of the copy itself."""
    made, _ = server(slots=40, host=100, disk=100, write="by_cost", policy=policy)
    for start in range(0, 3200, 100):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    for counters in made.tiers.counters.values():
        assert counters.written > 600
        assert counters.refused == 0
    made.tiers.close()


def test_the_device_above_a_tier_weighs_all_tokens_alike_also_after_a_reset() -> None:
    """A token that is lost costs a reload, at any depth; below the last tier it costs its FLOPs."""
    spec = ModelSpec.preset("llama-3-70b")
    layout = Layout.of(model("mha"), Deployment())
    cache = RadixCache(spec, 64, policy="hazard", policy_settings={"objective": "flops"})

    def order_of(cache: RadixCache) -> Hazard:
        order = cache._tree.pool.order
        assert isinstance(order, Hazard)
        return order

    def depths(cache: RadixCache) -> int:
        return order_of(cache).learner.depths.count

    assert depths(cache) > 1
    cache.insert([1, 2, 3], cache.allocate(3))  # used, and empty again
    cache.reset()
    buffers = Buffers.allocate(layout, 64)
    with closing(TieredCache(cache, buffers, host=64 * layout.token_bytes)) as tiers:
        assert depths(cache) == 1
        tiers.insert([1, 2, 3], tiers.allocate(3))
        tiers.reset()
        assert depths(cache) == 1
        assert tiers._mover is not None
        host: Any = tiers._mover.host.pool.order
        assert host.upper is order_of(cache)
        assert host.upper.depths.count > 1


def test_what_would_exceed_the_bytes_in_flight_is_not_copied() -> None:
    made, _ = server(in_flight=10)
    made.serve(A)
    made.tiers.drain()
    assert made.tiers.cached("host") == 0
    assert made.tiers.counters["host"].skipped == 32
    made.tiers.close()


def test_a_pin_protects_what_is_being_copied() -> None:
    made, _ = server(slots=40, host=200)
    gate = threading.Event()
    made.tiers._lines[0].copies.before = lambda _: gate.wait(120)
    made.serve(A)
    assert made.cache.stats().protected == 32
    assert made.tiers.allocate(16) is None, "it cannot be evicted yet"
    assert made.tiers.step() == 0
    gate.set()
    made.tiers.drain()
    assert made.cache.stats().protected == 0
    made.tiers.release(made.tiers.allocate(16))
    made.tiers.close()


# -- sliding windows that are evicted apart ------------------------------------------------------


def nodes(tree: Any) -> list[tuple[int, int, bool]]:
    """Where each node begins and ends, and whether it has window KV."""
    return [(node.depth, node.end, node.window is not None) for node in tree.walk()]


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_window_kv_that_is_evicted_alone_is_loaded_alone(write: str) -> None:
    made, _ = server("apart", slots=96, host=300, write=write)
    longer = [*A, *B[:16]]
    made.serve(A)
    made.serve(longer)
    made.tiers.drain()
    window_pool(made.cache._tree).evict(1000)
    made.cache._collect()
    made.tiers.drain()
    mover = made.tiers._mover
    assert mover is not None
    assert [end for _, end, window in nodes(mover.host.tree) if window] == [32, 48], "a window at each end"
    assert [window for *_, window in nodes(made.cache._tree)] == [False] * 5
    assert made.tiers.match_prefix(A).matched_len == 0, "the device has its KV, and cannot resume"
    assert made.serve(A) == 32
    assert mover.counters["host"].loaded == 0, "no token but window KV"
    assert made.serve(longer) == 48
    assert mover.counters["host"].loaded == 8, "the last page left with its window"
    made.tiers.close()


def test_a_window_that_two_prompts_share_is_in_storage_once() -> None:
    made, store = server("apart", slots=96, host=300)
    made.serve(A)
    made.serve([*A, *B[:4]])
    made.tiers.drain()
    mover = made.tiers._mover
    assert mover is not None
    assert mover.disk is not None
    windows = [key for key in store.values if key.endswith(b"w")]
    assert len(windows) == 3, "two pages of window before token 32, and one more before token 36"
    assert len(store.values) - len(windows) == 9
    assert window_pool(mover.disk.tree).cached == 12
    made.tiers.close()


def test_lost_window_kv_is_a_miss_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    made, store = server("apart", slots=40, host=40)
    made.serve(A)
    for start in (100, 200):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    mover = made.tiers._mover
    assert mover is not None
    assert mover.disk is not None
    key = mover.disk.ending_keys(made.tiers._place(A, None, None), 32)[1]
    store.values[key] = store.values[key][:-1]
    assert made.serve(A) == 0, "there is nothing to resume from"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    made.tiers.drain()
    assert made.serve(A) == 32, "it was computed again"
    made.tiers.drain()
    assert key in store.values, "and written again"
    made.tiers.close()


def test_window_rows_are_held_freed_and_given_to_the_cache() -> None:
    made, _ = server("apart")
    tiers, pool = made.tiers, window_pool(made.cache._tree)
    slots = np.asarray(tiers.allocate(16))
    assert (tiers.window_rows(slots) == -1).all()
    assert tiers.hold_windows(slots)
    assert not tiers.hold_windows(np.asarray(tiers.allocate(32))), "the pool has 32 rows"
    cached = made.cache.insert([7] * PAGE).node.slots
    for wrong, why in (
        (slots[:4], "holds window KV already"),
        ([*slots[:3], -1], "slot -1 is not in the pool"),
        (slots[:3], "whole pages of 4"),
        (cached, "in the cache: only slots that a request has reserved can hold window KV"),
    ):
        with pytest.raises(ValueError, match=why):
            tiers.hold_windows(wrong)
    with pytest.raises(ValueError, match="can free window KV"):
        tiers.free_windows(cached)
    with pytest.raises(ValueError, match="a slot is not in the pool"):
        tiers.window_rows([64])
    tiers.free_windows(slots[:4])
    assert pool.reserved == 12
    with pytest.raises(ValueError, match="slot 99 is not in the pool"):
        tiers.insert(range(16), [*slots[:-1], 99])
    assert pool.reserved == 12, "nothing changed"
    tiers.insert(range(16), slots)
    assert pool.reserved == 0
    assert (tiers.window_rows(slots) >= 0).tolist() == [False] * 4 + [True] * 12
    again = np.asarray(tiers.allocate(16))
    assert tiers.hold_windows(again)
    tiers.release(tiers.insert(range(16), again).duplicates)
    assert (tiers.window_rows(again) == -1).all(), "the cache had its own"
    tiers.reset()
    assert (tiers.window_rows(slots) == -1).all()
    tiers.close()


@pytest.mark.parametrize("layout", ["mla", "apart", "hybrid"])
def test_what_has_to_be_evicted_is_counted_in_every_pool(layout: str) -> None:
    made, _ = server(layout, slots=64, host=64, disk=64)
    mover = made.tiers._mover
    assert mover is not None
    assert mover.disk is not None
    token = made.layout.token_bytes
    for tier in (mover.host, mover.disk):
        each = made.layout.state_bytes or made.layout.window_bytes
        pool = tier.pool
        fits = pool.free // pool.token_units
        assert tier.missing_bytes(0, 0) == tier.missing_bytes(fits, 0) == 0
        more = tier.missing_bytes(fits + 10, 0)
        assert 9 * token < more <= 10 * token
        if each:
            assert tier.missing_bytes(0, 1000) > 500 * each, "endings have a room of their own, or share it"
    made.tiers.close()


# -- who asks ------------------------------------------------------------------------------------


def test_the_policies_of_all_tiers_hear_who_asks_and_how_requests_end() -> None:
    ended: list[tuple[Any, RequestInfo]] = []
    store = MemoryStore()
    spec = StorageSpec(lambda path, capacity, settings: store, "for a test")
    plugins = manager(
        tested=Plugin(storage_backend=lambda: {"tested": spec}),
        own=policy("own", lambda: Finishing(lambda request, info: ended.append((request.asker, info)))),
    )
    made = Server(
        "mla", disk=400, path=Path("u"), storage="tested", plugins=plugins, policy="own", slots=64, host=96
    )
    tiers = made.tiers
    first, second = Asker("a", "acme"), Asker("b", "x" * 300)
    for number, asker in enumerate((first, second)):
        match = tiers.match_prefix(A, number, asker=asker)
        if not match.matched_len:
            tiers.insert(A, tiers.allocate(32), number)
        tiers.drain()
        if number:
            tiers.match_prefix(A, number)  # as a server that looks again: it need not say who asks twice
        tiers.finish(number, RequestInfo(output_tokens=7, session=asker.session))
    mover = tiers._mover
    assert mover is not None
    assert mover.disk is not None
    for tier in (mover.device, mover.host, mover.disk):
        (node,) = tier.tree.walk()
        assert node.made_by == first
        assert node.used_by is not None
        assert node.used_by.session == "b"
        assert len(node.used_by.tenant or "") == MOST_NAME
    assert [(asker and asker.session, info.output_tokens) for asker, info in ended] == [
        *[("a", 7)] * 3,
        *[("b", 7)] * 3,
    ]
    assert not mover.host._requests
    assert not mover.disk._requests
    made.tiers.close()


# -- loads ---------------------------------------------------------------------------------------


def test_a_load_reserves_its_slots_until_it_is_resumed() -> None:
    made, _ = server(slots=40, host=200)
    made.serve(A)
    made.tiers.drain()
    made.serve(B)
    made.tiers.drain()
    match = made.tiers.match_prefix(A, "r")
    assert match.loadable == 32 - match.matched_len
    load = made.tiers.load(match)
    assert not load.done
    assert made.cache.reserved == 32 - match.matched_len
    made.tiers.wait(load)
    assert (load.done, load.loaded, made.cache.reserved) == (True, match.loadable, 0)
    assert made.cache.stats().protected == 32, "nobody evicts it before it is resumed"
    resumed = made.tiers.resume(load)
    assert resumed.matched_len == 32
    made.check(resumed.device, np.array(A))
    assert made.cache.stats().protected == 0
    made.tiers.finish("r")
    made.tiers.close()


@pytest.mark.parametrize("layout", ["mla", "hybrid"])
def test_a_cancelled_load_gives_everything_back(layout: str) -> None:
    made, _ = server(layout, slots=40, host=200)
    made.serve(A)
    made.tiers.drain()
    made.serve(B)
    made.tiers.drain()
    gate = threading.Event()
    made.tiers._lines[0].copies.before = lambda _: gate.wait(120)
    load = made.tiers.load(made.tiers.match_prefix(A))
    made.tiers.cancel(load)
    gate.set()
    made.tiers.drain()
    assert (load.done, load.cancelled, load.loaded) == (True, True, 0)
    assert made.cache.reserved == 0
    assert made.cache.stats().protected == 0
    mover = made.tiers._mover
    assert mover is not None
    assert mover.host.pool.pinned == 0
    made.tiers.close()


def test_a_load_that_finds_no_room_is_done_at_once() -> None:
    made, _ = server(slots=40, host=200)
    made.serve(A)
    made.tiers.drain()
    made.serve(B)
    made.tiers.drain()
    held = made.tiers.match_prefix(B, "held")
    made.tiers.lock(held.device.node)
    load = made.tiers.load(made.tiers.match_prefix(A))
    assert load.done
    assert made.tiers.resume(load).matched_len < 32
    made.tiers.unlock(held.device.node)
    made.tiers.close()


def test_a_prefetch_brings_storage_to_the_host() -> None:
    made, store = server(slots=40, host=40)
    made.serve(A)
    made.tiers.drain()
    made.tiers.close()
    again, _ = server(slots=40, host=40)
    again.tiers.close()
    made = Server(
        "mla", slots=40, host=40, disk=400, path=Path("u"), storage="tested", plugins=plugins_with(store)
    )
    load = made.tiers.prefetch(A)
    assert load is not None
    made.tiers.wait(load)
    assert made.tiers.cached("host") == 32
    assert made.tiers.cached("device") == 0
    assert made.tiers.prefetch(A) is None, "there is nothing more to copy"
    assert made.serve(A) == 32
    made.tiers.close()


def test_namespaces_do_not_share_memory() -> None:
    made, _ = server()
    tiers = made.tiers
    tiers.insert(A, tiers.allocate(32), extra_key="one")
    tiers.drain()
    kinds: tuple[dict[str, Any], ...] = ({}, {"extra_key": "two"}, {"cache_salt": "one"})
    for names in kinds:
        match = tiers.match_prefix(A, **names)
        assert (match.matched_len, match.host_len, match.disk_len) == (0, 0, 0)
    match = tiers.match_prefix(A, extra_key="one")
    assert (match.matched_len, match.host_len, match.disk_len) == (32, 32, 32)
    tiers.close()


# -- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sorted(LAYERS))
def test_storage_is_found_again_after_a_restart(layout: str, tmp_path: Path) -> None:
    made: dict[str, Any] = {"disk": 400, "path": tmp_path / "s"}
    first = Server(layout, **made)
    first.serve(A)
    first.tiers.drain()
    first.serve([*A, *B])
    first.tiers.close()
    second = Server(layout, **made)
    assert second.serve([*A, *B]) == 64
    assert second.tiers.counters["disk"].loaded == 64
    second.tiers.close()
    other = "mha" if layout == "mla" else "mla"
    third = Server(other, **made)  # other memory never matches
    assert third.serve([*A, *B]) == 0
    third.tiers.close()


def test_what_an_earlier_run_left_is_evicted_before_anything_else() -> None:
    made, store = server(slots=64, host=200, disk=64)
    made.serve(A)
    made.tiers.close()
    left = set(store.values)
    made = Server(
        "mla", slots=64, host=200, disk=64, path=Path("u"), storage="tested", plugins=plugins_with(store)
    )
    made.serve(B)
    made.tiers.drain()
    made.serve(list(range(200, 216)))
    made.tiers.drain()
    assert made.tiers.cached("disk") == 48
    assert 0 < len(left & set(store.values)) < len(left)
    made.tiers.close()


def test_what_is_written_again_is_no_leftover_any_more() -> None:
    made, store = server("apart")
    made.serve(A)
    made.tiers.close()
    pages = sorted(store.values)
    first = made.tiers._place(A, None, None)
    again = Server("apart", disk=400, path=Path("u"), storage="tested", plugins=plugins_with(store))
    mover = again.tiers._mover
    assert mover is not None
    disk = mover.disk
    assert disk is not None
    del store.values[disk.page_key(disk.hashes(first, 4, 8)[0])]
    again.tiers.close()
    again = Server("apart", disk=400, path=Path("u"), storage="tested", plugins=plugins_with(store))
    mover = again.tiers._mover
    assert mover is not None
    disk = mover.disk
    assert disk is not None
    assert again.serve(A) == 0, "the chain is broken at its second page"
    again.tiers.drain()
    assert not disk.left, "what follows the gap was written again"
    disk._evict_leftovers(10**6, 10**6)
    again.tiers.drain()
    assert sorted(store.values) == pages
    assert again.serve(A) == 32
    again.tiers.close()


SERVER = """
import sys
from pathlib import Path
from tests.tiers import Prompts, Server
server = Server(sys.argv[1], write=sys.argv[2], slots=48, host=64, disk=100_000, path=Path(sys.argv[3]),
                storage=sys.argv[5])
prompts = Prompts(int(sys.argv[4]))
print("ready", flush=True)
while True:
    server.serve(prompts.next())
    server.tiers.step()
    disk = server.tiers._mover.disk
    print(*(disk.page_key(value).hex() for node in disk.tree.walk() for value in node.hashes), flush=True)
"""


def test_a_kill_during_a_write_back_loses_nothing_that_was_acknowledged(
    tmp_path: Path, repo_root: Path
) -> None:
    chance = random.Random(5)
    for turn in range(2):
        path, layout, storage = tmp_path / str(turn), ("apart", "hybrid")[turn], BUILT_IN[turn]
        need(storage)
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, layout, "write_back", str(path), str(turn), storage],
            stdout=subprocess.PIPE,
            text=True,
            cwd=repo_root,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        acknowledged: set[str] = set()
        steps = chance.randrange(30, 60)
        while steps > 0 or len(acknowledged) < 10:
            line = process.stdout.readline()
            assert line, "the server ended by itself"
            acknowledged.update(line.split())
            steps -= 1
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait(timeout=120)
        again = Server(
            layout,
            write="write_back",
            slots=48,
            host=64,
            disk=100_000,
            path=path,
            storage=storage,
        )
        mover = again.tiers._mover
        assert mover is not None
        assert mover.disk is not None
        for key in map(bytes.fromhex, acknowledged):
            assert key in mover.disk.left
            assert mover.disk.store.get(key) is not None
        prompts = Prompts(turn)
        for _ in range(30):
            again.serve(prompts.next())  # compares every byte
        again.tiers.drain()
        assert again.tiers.counters["disk"].lost == 0
        again.tiers.close()


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", sorted(WRITINGS))
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "no space left on device"), False])
def test_a_full_disk_is_a_miss_and_one_line(write: str, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    made, store = server(slots=40, host=40, write=write)
    store.refused, store.full = fault or None, not fault
    for start in range(0, 400, 100):
        made.serve(list(range(start, start + 32)))
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    assert made.tiers.cached("disk") == 0
    assert not store.values
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 1
    assert all("put failed: OSError: [Errno 28]" in line for line in lines)
    store.refused, store.full = None, False
    made.serve(A)
    made.tiers.close()


def test_a_damaged_page_ends_the_load_before_it_and_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    made, store = server(slots=40, host=40)
    made.serve(A)
    made.tiers.drain()
    for start in (100, 200):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    mover = made.tiers._mover
    assert mover is not None
    disk = mover.disk
    assert disk is not None
    place = made.tiers._place(A, None, None)
    third = disk.page_key(disk.hashes(place, 0, 32)[2])
    store.values[third] = store.values[third][:-1]
    assert made.serve(A) == 8, "two pages are good"
    assert made.tiers.counters["disk"].lost == 24
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged value" in caplog.text
    made.tiers.drain()
    assert made.serve(A) == 32, "it was computed again"
    made.tiers.drain()
    assert third in store.values, "and written again"
    made.tiers.close()


def test_lost_permission_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    made, store = server(slots=40, host=40)
    for start in (0, 100, 200):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    store.denied = PermissionError(errno.EACCES, "permission denied")
    assert made.serve(A) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "get failed: PermissionError" in caplog.text
    made.tiers.close()


def test_a_backend_that_breaks_its_contract_is_bypassed(caplog: pytest.LogCaptureFixture) -> None:
    made, store = server(slots=40, host=40)
    store.refused = ValueError("a bug")
    for start in (0, 100, 200, 0):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    assert made.tiers.cached("disk") == 0
    assert "storage backend 'tested' is bypassed from now on: put raised ValueError: a bug" in caplog.text
    assert len(caplog.records) == 1
    made.tiers.close()


def test_host_memory_that_is_refused_turns_the_tiers_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.empty

    def refuse(size: Any, **how: Any) -> Any:
        if size[0] == 96:
            raise RuntimeError("CUDA error: out of memory")
        return real(size, **how)

    monkeypatch.setattr(torch, "empty", refuse)
    made, _ = server(host=96)
    assert made.tiers.tiers == ("device",)
    assert "the host tier is off: " in caplog.text
    assert "bytes of cpu memory were refused: CUDA error: out of memory" in caplog.text
    made.serve(A)
    assert made.serve(A) == 32
    assert made.tiers.step() == 0
    made.tiers.close()


def test_a_tier_that_is_off_leaves_no_trace_in_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order neither weighs tokens as above a tier, nor remembers what one would hold."""

    def refuse(*_: Any, **__: Any) -> Buffers:
        raise MemoryError("no memory")

    layout, spec = Layout.of(model("mha"), Deployment()), ModelSpec.preset("llama-3-70b")
    cache = RadixCache(spec, 64, policy="hazard", policy_settings={"objective": "flops"})
    buffers = Buffers.allocate(layout, 64)
    monkeypatch.setattr(Buffers, "allocate", refuse)
    with closing(TieredCache(cache, buffers, host=64 * layout.token_bytes)) as tiers:
        assert tiers.tiers == ("device",)
        order = cache._tree.pool.order
        assert isinstance(order, Hazard)
        assert order.learner.depths.count > 1
        assert order.intake.ghosts._room == 6.0 * 64


def test_a_copy_that_fails_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = server(slots=40, host=200)

    def fails(_: Any) -> None:
        raise RuntimeError("the device has gone")

    made.tiers._lines[0].copies.before = fails
    for start in (0, 100, 0):
        made.serve(list(range(start, start + 32)))
        made.tiers.drain()
    assert made.tiers.cached("host") == 0
    assert made.tiers.counters["host"].lost > 0
    assert len(caplog.records) == 1
    assert "a copy over link 'host' failed: RuntimeError: the device has gone" in caplog.text
    made.tiers.close()


# -- settings ------------------------------------------------------------------------------------


def build(cache: Any, buffers: Buffers, **settings: Any) -> TieredCache:
    return TieredCache(cache, buffers, **{"host": 1 << 16, **settings})


def small(slots: int = 64, **settings: Any) -> RadixCache:
    return RadixCache(model("mla"), slots, PAGE, "lru", deployment=Deployment(page_size=PAGE), **settings)


def buffers_of(slots: int = 64, name: str = "mla") -> Buffers:
    return Buffers.allocate(Layout.of(model(name), Deployment()), slots)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"host": "lots"}, "setting 'host' is 'lots': host 'lots' is not a size in bytes"),
        ({"host": -1}, "setting 'host' is -1"),
        ({"write": "never"}, "setting 'write' is 'never': choose by_cost, write_back"),
        ({"disk": "1GB"}, "disk is 1000000000 bytes and path is None: name the folder"),
        ({"speed": 3}, "unknown setting 'speed'"),
        ({"state_share": 1.0}, "setting 'state_share' is 1.0"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build(small(), buffers_of(), **settings)
    assert why in str(caught.value)


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="there is no storage backend 'tape'"):
        build(small(), buffers_of(), disk="1MB", path=tmp_path, storage="tape")


def test_buffers_and_cache_have_to_fit() -> None:
    with pytest.raises(SettingsError, match="buffers have 32 rows of tokens and the cache 64 slots"):
        build(small(), buffers_of(32))
    with pytest.raises(SettingsError, match="rows of states, which RadixCache does not keep"):
        build(small(), Buffers.allocate(Layout.of(model("hybrid"), Deployment()), 64, 4))
    states = StateCache(model("hybrid"), 1 << 20, PAGE, deployment=Deployment(page_size=PAGE))
    with pytest.raises(SettingsError, match="the buffers have 0 rows of states"):
        build(states, buffers_of(states.pool_size, "mha"))
    with pytest.raises(SettingsError, match="not contiguous"):
        Buffers([torch.zeros((4, 8))[:, ::2]])


def test_a_cache_with_tokens_is_refused() -> None:
    used = small()
    used.insert(A)
    with pytest.raises(SettingsError, match="the cache has 32 tokens: put the tiers below an empty one"):
        build(used, buffers_of())


def test_windows_apart_need_rows_and_room_in_every_tier() -> None:
    spec, page = model("apart"), Deployment(page_size=PAGE)

    def apart(windows: int = 32) -> RadixCache:
        return RadixCache(spec, 64, PAGE, "lru", window_pool_size=windows, deployment=page)

    layout = Layout.of(spec, page, windows_apart=True)
    with pytest.raises(SettingsError, match="have 16 rows of windows and the cache's pool of windows has 32"):
        build(apart(), Buffers.allocate(layout, 64, 0, 16))
    with pytest.raises(SettingsError, match="have 32 rows of windows and the cache's pool of windows has 0"):
        build(
            RadixCache(spec, 64, PAGE, "lru", deployment=page),
            Buffers.allocate(layout, 64, 0, 32),
        )
    with pytest.raises(SettingsError, match=r"room for window KV of 4 tokens, and a request resumes from 8"):
        build(apart(), Buffers.allocate(layout, 64, 0, 32), host=layout.token_bytes * 16)
    with pytest.raises(SettingsError, match="rows of states and of windows"):
        Buffers([torch.zeros(4, 8)], [torch.zeros(4, 8)], [torch.zeros(4, 8)])
    with pytest.raises(ValueError, match="the cache has one pool"):
        build(small(), buffers_of()).hold_windows([0])


def test_it_works_without_a_host_tier_or_a_disk() -> None:
    none = TieredCache(small(), buffers_of(), host=0)
    assert none.tiers == ("device",)
    none.insert(A, none.allocate(32))
    match = none.match_prefix(A)
    assert (match.matched_len, match.loadable) == (32, 0)
    assert none.load(match).done
    assert none.prefetch(A) is None
    none.drain()
    none.close()
    host = TieredCache(small(), buffers_of(), host="64KiB")
    assert host.tiers == ("device", "host")
    assert (host.cached("disk"), host.prefetch(A)) == (0, None)
    host.close()


def test_model_names_keep_storage_apart(tmp_path: Path) -> None:
    spec: ModelSpec = model("mla")
    for name, found in (("one", 0), ("two", 0), ("one", 32)):
        cache = RadixCache(
            spec.model_copy(update={"name": name}), 64, PAGE, deployment=Deployment(page_size=PAGE)
        )
        tiers = build(cache, buffers_of(), disk="1MB", path=tmp_path, storage_settings=FAST)
        assert tiers.match_prefix(A).disk_len == found
        tiers.insert(A, tiers.allocate(32))
        tiers.close()


def test_a_victim_that_cannot_be_read_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = server(slots=40, host=200, write="write_back")
    made.serve(A)
    rows = made.buffers.tokens

    def refuse(slots: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "gather", refuse)
        made.tiers.release(made.tiers.allocate(40))
        made.tiers.drain()
    assert made.tiers.cached("host") == 0
    assert made.tiers.counters["host"].lost == 32
    assert len(caplog.records) == 1
    assert "a copy over link 'host' failed: RuntimeError: CUDA out of memory" in caplog.text
    assert made.serve(A) == 0
    made.tiers.close()


def test_a_reset_keeps_what_slower_tiers_have() -> None:
    made, _ = server(slots=40, host=200)
    made.serve(A)
    made.tiers.reset()
    assert (made.tiers.cached("device"), made.tiers.cached("host")) == (0, 32)
    assert made.serve(A) == 32
    made.tiers.close()
