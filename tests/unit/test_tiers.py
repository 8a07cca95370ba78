"""A tiered cache: what is copied, loaded, cancelled and found again, and what faults do."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costcache import Deployment, ModelSpec, RadixCache
from costcache.errors import PluginError, SettingsError
from costcache.model import CompressedAttention
from costcache.radix import StateCache
from costcache.tiers import WRITINGS, Buffers, Layout, TieredCache
from tests.tiers import LAYERS, PAGE, MemoryStore, Prompts, Server, model, plugins_with
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
    for part, got in zip(mine, target.tokens.read(others), strict=True):
        assert torch.equal(got, part.reshape(16, -1).view(torch.uint8)[slots])


# -- schedules -----------------------------------------------------------------------------------


def test_contents_come_back_bit_equal_through_every_tier_and_layout(tmp_path: Path) -> None:
    total: dict[str, int] = {}
    for seed in range(12):
        found = schedule(seed, tmp_path / str(seed))
        total = {name: total.get(name, 0) + found[name] for name in ("device", "host", "disk")}
    assert min(total.values()) > 50, "each tier gave some"


def test_contents_come_back_bit_equal_through_lmdb(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
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
    mover._host_line.link.bytes_per_second = 1.0  # as slow as can be
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
    for names in ({}, {"extra_key": "two"}, {"cache_salt": "one"}):
        match = tiers.match_prefix(A, **names)
        assert (match.matched_len, match.host_len, match.disk_len) == (0, 0, 0)
    match = tiers.match_prefix(A, extra_key="one")
    assert (match.matched_len, match.host_len, match.disk_len) == (32, 32, 32)
    tiers.close()


# -- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sorted(LAYERS))
def test_storage_is_found_again_after_a_restart(layout: str, tmp_path: Path) -> None:
    made: dict[str, Any] = {"disk": 400, "path": tmp_path / "s", "storage_settings": {"durable": False}}
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


SERVER = """
import sys
from pathlib import Path
from tests.tiers import Prompts, Server
server = Server(sys.argv[1], write=sys.argv[2], slots=48, host=64, disk=100_000, path=Path(sys.argv[3]),
                storage_settings={"durable": False})
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
        path, layout = tmp_path / str(turn), ("mla", "hybrid")[turn]
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, layout, "write_back", str(path), str(turn)],
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
            storage_settings={"durable": False},
        )
        mover = again.tiers._mover
        assert mover is not None
        assert mover.disk is not None
        for key in map(bytes.fromhex, acknowledged):
            assert key in mover.disk._orphans
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


def test_a_cache_with_tokens_or_with_windows_apart_is_refused() -> None:
    used = small()
    used.insert(A)
    with pytest.raises(SettingsError, match="the cache has 32 tokens: put the tiers below an empty one"):
        build(used, buffers_of())
    apart = RadixCache(
        model("windows"), 64, PAGE, "lru", window_pool_size=32, deployment=Deployment(page_size=PAGE)
    )
    with pytest.raises(SettingsError, match="evicts sliding windows apart"):
        build(apart, buffers_of(64, "windows"))


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
        tiers = build(cache, buffers_of(), disk="1MB", path=tmp_path, storage_settings={"durable": False})
        assert tiers.match_prefix(A).disk_len == found
        tiers.insert(A, tiers.allocate(32))
        tiers.close()


def test_a_victim_that_cannot_be_read_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = server(slots=40, host=200, write="write_back")
    made.serve(A)
    rows = made.buffers.tokens

    def refuse(slots: Any) -> list[Any]:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "read", refuse)
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
