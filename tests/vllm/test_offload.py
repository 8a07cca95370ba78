"""Policies in vLLM's CPU offload tier, on its real manager."""

from __future__ import annotations

import gzip
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs vllm")
pytest.importorskip("vllm.v1.kv_offload.cpu.policies.base", reason="needs vllm's offload tier")

from costcache.errors import CostcacheError, PluginError, SettingsError
from costcache.plugins import PluginManager
from costcache.policies import BUILTIN
from costcache.policies.keyed import LRU
from costcache.records import NodeRecord, Victim
from costcache.vllm import build, offload
from tests.property.kit import manager as plugins
from tests.property.kit import policy as offering
from tests.vllm.tier import MODULE, Request, check, config, keys_of, ours, prompts, stock

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager


# -- the victims of LRU -----------------------------------------------------------------------


def fuzz(managers: list[Any], seed: int, steps: int, *, overlap: int = 4) -> list[list[Any]]:
    """The same requests for all managers, of which several run at once; returns the victims of each.

    A request waits for transfers of its own prefix, as vLLM's scheduler lets it.
    """
    rng, stream = random.Random(seed), prompts(seed)
    running: list[list[Request]] = []
    ended: list[list[Request]] = []
    victims: list[list[Any]] = [[] for _ in managers]

    def same(answers: list[Any]) -> Any:
        assert answers == answers[:1] * len(managers)
        return answers[0]

    def complete(several: list[Request]) -> None:
        success = rng.random() > 0.05
        for each in several:
            each.complete(success=success)

    def wait_for(keys: list[Any]) -> None:
        for several in running + ended:
            while any(not set(keys).isdisjoint(their) for _, their in several[0].transfers):
                complete(several)

    for step in range(steps):
        if len(running) < overlap and rng.random() < 0.5:
            keys = keys_of(next(stream))
            wait_for(keys)
            running.append([Request(manager, str(step), keys) for manager in managers])
            same([each.find() for each in running[-1]])
        elif running:
            several = rng.choice(running)
            if several[0].transfers and rng.random() < 0.5:
                complete(several)
            elif several[0].stored < len(several[0].keys):
                wait_for(several[0].keys)
                count = rng.randrange(1, 8)
                same([each.store(count) for each in several])
            else:
                for each in several:
                    each.finish()
                running.remove(several)
                ended.append(several)
        for several in [each for each in ended if rng.random() < 0.3]:
            while several[0].transfers:
                complete(several)
            ended.remove(several)
        for several in running:
            same([each.evicted for each in several])
            for at, each in enumerate(several):
                victims[at] += each.evicted
                each.evicted = []
    return victims


@pytest.mark.parametrize("seed", range(8))
def test_the_victims_of_our_lru_are_those_of_vllms(seed: int) -> None:
    managers = [stock(150), ours(150, "lru")]
    victims = fuzz(managers, seed, 6000, overlap=1 + seed % 4)
    assert victims[0] == victims[1]
    assert len(victims[0]) > 1000
    check(managers[1])
    assert managers[1]._policy.chunks.pool.policy == "lru"


@pytest.mark.traces
def test_the_victims_of_our_lru_are_those_of_vllms_on_a_recorded_trace(traces_dir: Path) -> None:
    file = traces_dir / "mooncake_conversation.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"{file} is missing")
    managers, victims = [stock(3417), ours(3417, "lru", 512)], [[], []]
    with gzip.open(file) as lines:
        for number, line in zip(range(2000), lines, strict=False):
            request = json.loads(line)
            keys = keys_of(request["hash_ids"][: request["input_length"] // 512])[:3417]
            for at, manager in enumerate(managers):
                served = Request(manager, str(number), keys, 512)
                served.serve()
                victims[at] += served.evicted
    assert victims[0] == victims[1]
    assert len(victims[0]) > 30_000
