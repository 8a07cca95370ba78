"""Recordings of SGLang's requests: what is in them is what the cache did."""

from __future__ import annotations

import logging
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache import registry
from sglang.srt.plugins import load_plugins
from sglang.srt.utils.request_logger import RequestLogger

from costcache.deployment import Deployment
from costcache.errors import SettingsError, TraceError
from costcache.model import ModelSpec
from costcache.recording.settings import ENVIRONMENT
from costcache.settings import Settings
from costcache.sglang.arguments import check_arguments
from costcache.sim.engine import Simulator
from costcache.sim.recordings.converting import convert
from costcache.sim.settings import ServingSettings
from costcache.sim.trace import RecordedServer
from costcache.sim.traces.files import open_source
from costcache.sim.traces.recording import Recorded, read_recorded
from tests.sglang.pools import CONFIG, CONFIGS, Shape, publish_args
from tests.sglang.serving import Server
from tests.sglang.streams import chats_and_scans
from tests.sglang.test_registration import context

PAGE = 16
SHAPE = Shape("mha", PAGE, tokens=2048)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_plugins()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def build(folder: Path, policy: str, shape: Shape = SHAPE, **config: Any) -> Any:
    return registry.create_tree_cache(context(shape, folder, f"costcache:{policy}", config))


def read(cache: Any, folder: Path) -> Recorded:
    """What was recorded, once all of it is written."""
    cache.recorder.close()
    (path,) = folder.iterdir()
    with open_source(path) as source:
        return read_recorded(source)


@pytest.mark.parametrize(
    ("policy", "core", "page", "chunk", "trim"),
    [
        ("lru", "python", 16, None, "off"),
        ("lru", "rust", 16, 150, "auto"),
        ("lru", "python", 1, 150, "auto"),
        ("hazard", "python", 16, None, "auto"),
        ("hazard", "python", 16, 150, "off"),
        ("hazard", "python", 1, 150, "auto"),
    ],
)
def test_a_replay_finds_what_the_cache_found(
    policy: str, core: str, page: int, chunk: int | None, trim: str, tmp_path: Path
) -> None:
    """Request by request: room is made in the same steps."""
    shape = replace(SHAPE, page_size=page, params={"chunked_prefill_size": chunk or -1})
    record = {"folder": str(tmp_path / "recorded"), "block_size": page}
    cache = build(tmp_path, policy, shape, core=core, trim=trim, record=record)
    server, rng = Server(cache, shape, chunk=chunk), random.Random(0)
    prompts = [prompt for seed in range(2) for prompt in chats_and_scans(seed, 50)]
    served = [
        server.serve(prompt, [rng.randrange(500) for _ in range(rng.randrange(1, 40))]) for prompt in prompts
    ]
    recorded = read(cache, tmp_path / "recorded")
    assert recorded.cached.tolist() == served
    assert recorded.trace.input_tokens.tolist() == [len(prompt) for prompt in prompts]
    (header,) = recorded.headers
    assert (header.policy, header.page_size, header.capacity) == (policy, page, SHAPE.tokens)
    step = page if core == "python" else 2048
    assert recorded.trace.server == RecordedServer("sglang", policy, chunk or 0, 0 if trim == "off" else step)
    simulator = Simulator(
        recorded.trace, ModelSpec.from_config(CONFIG | CONFIGS["mha"]), Deployment(page_size=page)
    )
    found = simulator.outcome(
        Settings(policy=policy), header.capacity, serving=ServingSettings(concurrency=1)
    )
    assert 0.2 < recorded.hit_rate < 0.9
    assert found.matched.tolist() == served


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = build(tmp_path, "lru", record=str(tmp_path / "recorded"))
    server, now = Server(cache, SHAPE), time.time()
    lengths = list(range(20, 50))
    for length in lengths:
        monkeypatch.setattr(time, "time", lambda length=length: now - length)
        server.serve(range(length), [7])
    assert read(cache, tmp_path / "recorded").trace.input_tokens.tolist() == lengths


def test_names_are_salted_and_namespaces_kept_apart(tmp_path: Path) -> None:
    cache = build(tmp_path, "lru", record=str(tmp_path / "recorded"))
    server = Server(cache, SHAPE)
    tokens = range(70_000, 70_100)
    found = [
        server.serve(tokens, [80_123], session_id="Alice"),
        server.serve(tokens, session_id="Alice"),
        server.serve(tokens, extra_key="ACME"),
        server.serve(tokens, cache_salt="ACME"),
    ]
    assert found == [0, 96, 0, 0]
    recorded = read(cache, tmp_path / "recorded")
    assert recorded.cached.tolist() == found
    ids = [set(part.tolist()) for part in (recorded.trace.take(np.array([n])).ids for n in range(4))]
    assert ids[0] == ids[1]
    assert not ids[1] & ids[2]
    assert not ids[2] & ids[3]
    assert not ids[1] & ids[3]
    assert recorded.trace.sessions is not None
    assert recorded.trace.sessions[0] == recorded.trace.sessions[1] != recorded.trace.sessions[2]
    (path,) = (tmp_path / "recorded").iterdir()
    text = path.read_text()
    assert not any(secret in text for secret in ("Alice", "ACME", "70001", "80123"))


def test_one_of_the_ranks_that_serve_the_same_requests_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "recorded"))
    for rank, recording in ((1, 0), (0, 1)):
        ctx = replace(context(SHAPE, tmp_path, "costcache:lru"), tp_rank=rank, tp_size=2)
        cache: Any = registry.create_tree_cache(ctx)
        assert (cache.recorder is not None) == bool(recording)
    cache.recorder.close()
    assert len(list((tmp_path / "recorded").iterdir())) == 1


def test_a_wrong_recording_stops_the_server_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"'record.folder' is .*, which cannot be written to"):
        build(tmp_path, "lru", record=str(tmp_path / "file" / "x"))
    with pytest.raises(
        SettingsError, match=r"'record.block_size' is 24: give a multiple of the page size, 16"
    ):
        build(tmp_path, "lru", record={"folder": str(tmp_path / "y"), "block_size": 24})
    with pytest.raises(SettingsError, match=r"unknown setting 'record.size'"):
        build(tmp_path, "lru", record={"folder": str(tmp_path / "y"), "size": 24})


def test_a_request_that_cannot_be_recorded_does_not_stop_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = build(tmp_path, "lru", record=str(tmp_path / "recorded"))
    server = Server(cache, SHAPE)
    server.serve(range(100))
    req = server.request(range(200))
    server.start(req)
    del req.cached_tokens  # as if SGLang had renamed it
    server.finish(req)
    server.serve(range(100))
    assert [r.levelname for r in caplog.records if "recording ends, and the server goes on" in r.message] == [
        "ERROR"
    ]
    server.drain()


def test_stock_sglang_is_told_that_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = SimpleNamespace(
        radix_eviction_policy="lru",
        radix_cache_backend=None,
        radix_eviction_policy_config=None,
        disable_radix_cache=False,
        _radix_eviction_policy_explicitly_set=False,
    )
    check_arguments(args)
    assert not caplog.records
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    with caplog.at_level(logging.WARNING, "costcache"):
        check_arguments(args)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{ENVIRONMENT} is set: add --radix-eviction-policy costcache:lru" in line


# -- SGLang's own logs ---------------------------------------------------------------------------


def answer(output: list[int], prompt: int, cached: int) -> dict[str, Any]:
    """What SGLang's tokenizer manager hands to the log."""
    meta = {
        "id": "r",
        "finish_reason": FINISH_LENGTH(len(output)).to_json(),
        "prompt_tokens": prompt,
        "completion_tokens": len(output),
        "cached_tokens": cached,
        "e2e_latency": 0.5,
    }
    return {"text": "it's an 'answer'", "output_ids": output, "meta_info": meta}


PROMPTS = [list(range(100, 3100)), [*range(100, 3100), 7, 8, 9], list(range(900, 960))]
FOUND = [0, 2992, 0]


def requests() -> list[tuple[GenerateReqInput, dict[str, Any]]]:
    made = []
    for number, (prompt, found) in enumerate(zip(PROMPTS, FOUND, strict=True)):
        request = GenerateReqInput(
            rid=f"r{number}",
            input_ids=prompt,
            sampling_params={"max_new_tokens": 3, "stop": ["it's"]},
            session_id="Alice",
        )
        made.append((request, answer([1, 2, 3 + number], len(prompt), found)))
    return made


def check(rows: list[tuple[float, Any]]) -> None:
    assert [row.input_length for _, row in rows] == [len(prompt) for prompt in PROMPTS]
    assert [row.output_length for _, row in rows] == [3, 3, 3]
    assert [row.cached_tokens for _, row in rows] == FOUND
    ids = [row.hash_ids for _, row in rows]
    assert ids[0][:187] == ids[1][:187]
    assert not set(ids[0]) & set(ids[2])
    assert len({row.session for _, row in rows}) == 1
    assert {row.finish_reason for _, row in rows} == {"length"}
    assert all(row.output_ids for _, row in rows)


@pytest.mark.parametrize("form", ["json", "text"])
def test_sglangs_request_log_is_converted(form: str, tmp_path: Path) -> None:
    logger = RequestLogger(True, 3, form, [str(tmp_path)])
    for request, out in requests():
        logger.log_received_request(request)
        logger.log_finished_request(request, out)
    (path,) = tmp_path.iterdir()
    _, rows = convert("sglang-log", [path])
    check(rows)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("form", ["json", "text"])
def test_a_lower_level_has_no_prompts(form: str, level: int, tmp_path: Path) -> None:
    logger = RequestLogger(True, level, form, [str(tmp_path)])
    for request, out in requests()[:2]:
        logger.log_finished_request(request, out)
    (path,) = tmp_path.iterdir()
    with pytest.raises(TraceError, match=r"--log-requests-level 3"):
        convert("sglang-log", [path])


def test_sglangs_dump_is_converted(tmp_path: Path) -> None:
    """As its tokenizer manager writes it, with arguments that are objects of many classes."""
    dumped = [(request, out, 1000.0 + at, 1001.0 + at) for at, (request, out) in enumerate(requests())]
    args = publish_args(SHAPE)
    path = tmp_path / "dump.pkl"
    path.write_bytes(pickle.dumps({"server_args": args, "config_updates": [], "requests": dumped}))
    _, rows = convert("sglang-dump", [path])
    check(rows)
    assert [seconds for seconds, _ in rows] == [1000.0, 1001.0, 1002.0]
    # Before a crash it keeps prompts as tuples.
    for request, *_ in dumped:
        request.input_ids = tuple(request.input_ids)
    path.write_bytes(pickle.dumps({"server_args": None, "requests": dumped}))
    check(convert("sglang-dump", [path])[1])
