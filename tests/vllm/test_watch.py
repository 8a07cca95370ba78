"""``costcache watch`` follows the KV events that vLLM's own publisher sends of vLLM's own cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch

from costcache.monitor.events import read_events
from costcache.monitor.figures import figures
from costcache.monitor.reasons import reasons
from costcache.monitor.samples import NOTHING
from costcache.sim.recordings.converting import convert
from tests.publishing import Followed
from tests.vllm.serving import Server, manager
from tests.vllm.stepping import SIZE

BLOCKS = 40


def made(endpoint: str) -> Any:
    return EventPublisherFactory.create(
        KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    )


@pytest.mark.parametrize("policy", [None, "lru", "hazard"])
def test_what_vllm_publishes_is_followed(policy: str | None, tmp_path: Path) -> None:
    server = Server(manager(BLOCKS, events=True), policy)
    endpoint, save = f"ipc://{tmp_path}/e", tmp_path / "events"
    publisher = made(endpoint)
    sent: list[Any] = []

    def publish(events: list[Any]) -> None:
        publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def serve(name: str, prompt: list[int]) -> None:
        server.serve(name, prompt)
        sent.extend(events := server.manager.take_events())
        publish(events)

    followed = Followed(endpoint, publish, save)
    prompts = [[number] * 16 * SIZE for number in range(5)]
    try:
        for number in (0, 1, 2, 3, 4, 0):  # two fit, so the first is stored again
            serve(f"r{number}-{len(sent)}", prompts[number])
        found = followed.figures(6)
        cached = len(server.pool.cached_block_hash_to_block)
        assert (found.batches, found.lost, found.block_size) == (6, 0, SIZE)
        assert found.stored == 6 * 16 * SIZE
        assert found.cached == found.stored - found.removed == cached * SIZE
        assert found.after_eviction == 16 * SIZE
        assert [reason.name for reason in reasons(figures(NOTHING, events=found))][-1] == "nothing-shared"
        assert server.manager.reset_prefix_cache()
        serve("again", prompts[0])
        found = followed.figures(1)
        assert (found.resets, found.after_reset, found.cached) == (1, 16 * SIZE, 16 * SIZE)
        assert reasons(figures(NOTHING, events=found))[0].name == "reset"
        # The file holds the same, for watch and for a conversion to a trace.
        whole = read_events(save)
        assert (whole.stored, whole.resets, whole.cached) == (7 * 16 * SIZE, 1, 16 * SIZE)
        assert len(convert("vllm-kv-events", [save])[1]) > 0
        assert save.stat().st_mode & 0o777 == 0o600
        next(publisher._seq_gen)  # as if a batch had been dropped on the way
        serve("next", prompts[1])
        assert followed.figures(1).lost == 1
        publisher.shutdown()
        publisher = made(endpoint)  # of a server that is started again, with an empty cache
        followed.join()
        again = followed.figures(0)
        assert (again.lost, again.resets, again.cached) == (0, 0, 0)
    finally:
        followed.subscription.close()
        publisher.shutdown()
