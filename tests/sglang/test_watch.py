"""``costcache watch`` follows the KV events that SGLang's own publisher sends of SGLang's own cache."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch

from costcache.cli import cli
from costcache.monitor.figures import figures
from costcache.monitor.reasons import reasons
from costcache.monitor.samples import NOTHING
from tests.publishing import Followed
from tests.sglang.pools import Shape, cost_cache
from tests.sglang.serving import Server

PAGE = 64


def free_endpoint() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{bound.getsockname()[1]}"


def made(endpoint: str) -> Any:
    return EventPublisherFactory.create(
        json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": True, "topic": "kv"})
    )


@pytest.mark.parametrize("core", ["python", "rust"])
def test_what_sglang_publishes_is_followed(core: str, tmp_path: Path) -> None:
    shape = Shape("mha", PAGE, tokens=20 * PAGE, core=core, params={"enable_kv_cache_events": True})
    server = Server(cost_cache(shape), shape)
    endpoint = free_endpoint()
    publisher = made(endpoint)

    def publish(events: list[Any]) -> None:
        publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def serve(prompt: list[int]) -> None:
        server.serve(prompt)
        publish(server.cache.take_events())

    followed = Followed(endpoint, publish, tmp_path / "events")
    prompts = [[number] * 8 * PAGE for number in range(5)]
    try:
        for number in (0, 1, 2, 3, 4, 0):  # two fit, so the first is stored again
            serve(prompts[number])
        found = followed.figures(6)
        assert (found.batches, found.lost, found.block_size, found.resets) == (6, 0, PAGE, 0)
        assert found.stored == 6 * 8 * PAGE
        assert found.after_eviction == 8 * PAGE
        assert found.cached == found.stored - found.removed <= 20 * PAGE
        # Prompts that share less than a page: nothing is found, and smaller pages would find it.
        for number in range(10, 14):
            serve([7] * (PAGE - 10) + [number] * 100)
        found = followed.figures(4)
        assert found.cut == 3 * PAGE * 3 // 4
        assert reasons(figures(NOTHING, events=found))[0].name == "page-size"
        server.cache.reset()
        server.allocator.clear()  # as SGLang's scheduler does
        serve(prompts[0])
        found = followed.figures(1)
        assert (found.resets, found.after_reset, found.cached) == (1, 8 * PAGE, 8 * PAGE)
        assert reasons(figures(NOTHING, events=found))[0].name == "reset"
    finally:
        followed.subscription.close()
        publisher.shutdown()


def test_the_command_shows_what_is_published(tmp_path: Path) -> None:
    endpoint, stop = free_endpoint(), threading.Event()
    publisher = made(endpoint)
    shape = Shape("mha", PAGE, tokens=20 * PAGE, params={"enable_kv_cache_events": True})
    server = Server(cost_cache(shape), shape)

    def serve() -> None:
        number = 0
        while not stop.wait(0.05):
            number += 1
            server.serve([number] * 2 * PAGE)
            publisher.publish(KVEventBatch(ts=time.time(), events=server.cache.take_events()))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        words = ["watch", "--events", endpoint, "--once", "--interval", "2", "--save-events"]
        done = CliRunner().invoke(cli, [*words, str(tmp_path / "events")])
        assert done.exit_code == 0, done.output
        assert "KV events, over 2 s: " in done.output
        assert "in blocks of 64" in done.output
        later = CliRunner().invoke(cli, ["watch", "--events", str(tmp_path / "events"), "--json"])
        facts = json.loads(later.output)["events"]
        assert f"stored          {facts['stored']:,} tokens" in done.output
    finally:
        stop.set()
        thread.join()
        publisher.shutdown()


def test_an_address_that_is_none_ends_in_one_line() -> None:
    done = CliRunner().invoke(cli, ["watch", "--events", "tcp://nowhere", "--once"])
    assert done.exit_code != 0
    assert "--events is 'tcp://nowhere'" in done.output
    assert "Traceback" not in done.output
