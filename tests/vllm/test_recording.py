"""Recordings of vLLM's requests, made by its real schedulers."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.distributed.kv_events import KVEventBatch

from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.recording.settings import ENVIRONMENT
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.recordings.converting import convert
from costcache.sim.settings import ServingSettings
from costcache.sim.trace import RecordedServer
from costcache.sim.traces.files import open_source
from costcache.sim.traces.recording import Recorded, read_recorded
from costcache.vllm.registration import chunk_of
from tests.vllm.engine import MODEL
from tests.vllm.serving import Server, manager
from tests.vllm.stepping import SIZE, Stepper


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "recorded"))
    return tmp_path / "recorded"


def read(stepper: Stepper, folder: Path) -> Recorded:
    """What was recorded, once all of it is written."""
    stepper.scheduler._costcache_recording._recorder.close()
    (path,) = folder.iterdir()
    with open_source(path) as source:
        return read_recorded(source)


@pytest.mark.parametrize("policy", [None, "hazard"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_recorded_is_what_the_scheduler_did(
    policy: str | None, asynchronous: bool, folder: Path
) -> None:
    stepper, rng = Stepper(policy, asynchronous=asynchronous), random.Random(0)
    systems = [[rng.randrange(3, 50) for _ in range(96)] for _ in range(2)]
    prompts = [rng.choice(systems) + [rng.randrange(50) for _ in range(40)] for _ in range(40)]
    for number, prompt in enumerate(prompts):
        stepper.add(f"r{number}", prompt, 5)
        stepper.step()
    stepper.drain()
    recorded = read(stepper, folder)
    (header,) = recorded.headers
    assert (header.policy, header.page_size, header.capacity) == (policy or "vllm", SIZE, 44 * SIZE)
    trace = recorded.trace
    assert sorted(trace.input_tokens.tolist()) == sorted(map(len, prompts))
    assert trace.output_tokens.tolist() == [5] * 40
    assert 0 < int(recorded.cached.sum()) <= stepper.found  # preempted requests find their own tokens
    # Blocks are the same exactly if the prompts are, up to their end.
    whole = len(prompts[0]) // SIZE
    starts = {tuple(prompt[: (at + 1) * SIZE]) for prompt in prompts for at in range(whole)}
    ids = {number for at in range(40) for number in trace.take(np.array([at])).ids[:whole].tolist()}
    assert len(ids) == len(starts)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("budget", [2048, 250])
def test_a_replay_finds_what_the_scheduler_found(policy: str, budget: int, folder: Path) -> None:
    """Request by request: the policy counts requests in both, and room is made in the same steps."""
    stepper, rng = Stepper(policy, blocks=201, budget=budget), random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 50) for _ in range(count)]

    chats = [words(100) for _ in range(12)]
    for number in range(250):
        chat = rng.randrange(12)
        chats[chat] = (chats[chat] if len(chats[chat]) < 900 else words(100)) + words(40)
        # Every other answer ends where a block does, or a token after it.
        output = 20 if number % 2 else rng.randrange(1, 40)
        stepper.add(f"r{number}", chats[chat] if rng.random() < 0.7 else words(500), output)
        stepper.drain()
    recorded = read(stepper, folder)
    (header,) = recorded.headers
    assert header.capacity is not None
    assert recorded.trace.server == RecordedServer("vllm", policy, budget, SIZE)
    simulator = Simulator(recorded.trace, ModelSpec.from_config(MODEL), Deployment(page_size=SIZE))
    found = simulator.outcome(
        Settings(policy=policy), header.capacity, serving=ServingSettings(concurrency=1)
    )
    assert 0.1 < recorded.hit_rate < 0.6
    assert found.matched.tolist() == recorded.cached.tolist()


def test_a_chunk_is_what_a_step_computes_of_one_prompt(folder: Path) -> None:
    stepper = Stepper(budget=200)
    stepper.drain()
    config = stepper.scheduler.vllm_config.scheduler_config
    assert chunk_of(config) == 200
    config.long_prefill_token_threshold = 64
    assert chunk_of(config) == 64


def test_a_request_that_never_ran_is_not_recorded(folder: Path) -> None:
    stepper = Stepper(blocks=20)
    stepper.add("long", list(range(3, 250)), 4)
    stepper.step()
    stepper.add("waits", list(range(300, 500)), 4)
    stepper.abort("waits")
    stepper.abort("long")
    stepper.drain()
    recorded = read(stepper, folder)
    assert recorded.trace.input_tokens.tolist() == [247]
    assert recorded.trace.finish_names == ("abort",)


def test_a_failure_ends_the_recording_and_not_the_server(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(request: Any, record: Any) -> Any:
        return request.what_vllm_called_it_before

    monkeypatch.setattr("costcache.vllm.recording.info", renamed)
    stepper = Stepper()
    stepper.add("a", list(range(3, 50)), 2)
    stepper.drain()
    assert [r.levelname for r in caplog.records if "recording ends, and the server goes on" in r.message] == [
        "ERROR"
    ]


def test_wrong_settings_stop_the_server_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'costcache.record.size'"):
        Stepper({"record": {"folder": str(tmp_path), "size": 1}})
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"'record.folder' is .*, which cannot be written to"):
        Stepper({"policy": "lru", "record": str(tmp_path / "file" / "x")})
    monkeypatch.setenv(ENVIRONMENT, "{")
    with pytest.raises(SettingsError, match=f"the variable {ENVIRONMENT} is '{{', which is not JSON"):
        Stepper()
    monkeypatch.setenv(ENVIRONMENT, "")
    with caplog.at_level(logging.INFO, "costcache"):
        assert Stepper().scheduler._costcache_recording is None


def test_vllms_kv_events_are_converted(tmp_path: Path) -> None:
    """The batches that its publisher would send, of a cache in which nothing is evicted."""
    server = Server(manager(200, events=True))
    rng = random.Random(1)
    system = [rng.randrange(50) for _ in range(64)]
    prompts = [system + [rng.randrange(50) for _ in range(32 + 16 * at)] for at in range(4)]
    path, found = tmp_path / "events", []
    with path.open("wb") as file:
        for at, prompt in enumerate(prompts):
            found.append(server.serve(f"r{at}", prompt))
            batch = KVEventBatch(ts=100.0 + 10 * at, events=server.manager.take_events())
            file.write(msgspec.msgpack.encode(batch))
        server.manager.reset_prefix_cache()
        file.write(msgspec.msgpack.encode(KVEventBatch(ts=200.0, events=server.manager.take_events())))
        server.serve("again", prompts[0])
        file.write(msgspec.msgpack.encode(KVEventBatch(ts=210.0, events=server.manager.take_events())))
    header, rows = convert("vllm-kv-events", [path])
    assert header.page_size == SIZE
    assert found == [0, 64, 64, 64]
    assert [row.input_length for _, row in rows] == [*map(len, prompts), len(prompts[0])]
    assert [row.cached_tokens for _, row in rows] == [*found, 0]
    assert rows[0][1].hash_ids == rows[-1][1].hash_ids
