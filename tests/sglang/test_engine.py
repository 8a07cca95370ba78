"""The Engine under memory pressure: ours answers as stock does, and reuses as much under its order."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings
from costcache.sim.traces.files import open_source
from costcache.sim.traces.recording import Recorded, read_recorded
from tests.sglang.engine import Run, run_engine
from tests.sglang.streams import chats_and_scans
from tests.sglang.tiny_models import write_model

OPTIONS: dict[str, dict[str, Any]] = {
    "mha": {"max_total_tokens": 1024},
    "mla": {"max_total_tokens": 1024},
    # States at chunk ends, not only at sequence ends: without them nothing shared is ever reused.
    "hybrid": {
        "max_total_tokens": 2048,
        "mamba_radix_cache_strategy": "extra_buffer",
        "page_size": 64,
        "max_mamba_cache_size": 16,
    },
}
COST = {"mha": 512, "mla": 384, "hybrid": 256}
"""Bytes per token of each model in float32: attention layers x (keys + values, or latent + rope) x 4."""


def conversations(chats: int, turns: int, first: int, more: int, seed: int) -> list[list[int]]:
    """Prompts of chats in turn, each its last prompt and some more: matches end where prompts ended."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    latest = [[rng.randrange(3, 500) for _ in range(first)] for _ in range(chats)]
    # Uneven: some chats continue soon and some late, so that a policy matters.
    order = [rng.choice([i, i, rng.randrange(chats)]) for _ in range(turns) for i in range(chats)]
    for chat in order:
        prompts.append(latest[chat])
        latest[chat] = latest[chat] + [rng.randrange(3, 500) for _ in range(more)]
    return prompts


def both(
    model: Path, prompts: list[list[int]], folder: Path, ours: dict[str, Any], **options: Any
) -> list[Run]:
    """Stock's run and ours, side by side."""
    jobs: list[dict[str, Any]] = [{}, ours]
    for number in range(2):
        (folder / str(number)).mkdir()
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda number: run_engine(model, prompts, folder / str(number), **options, **jobs[number]),
                range(2),
            )
        )


def replayed(recorded: Recorded, model: Path, settings: Settings) -> float:
    """Hit rate of a recording, replayed one request at a time at the engine's capacity and page size."""
    (header,) = recorded.headers
    simulator = Simulator(
        recorded.trace, ModelSpec.from_config(model), Deployment(page_size=header.page_size)
    )
    return simulator.run(settings, header.capacity, serving=ServingSettings(concurrency=1)).token_hit_rate


@pytest.mark.engine
@pytest.mark.parametrize("name", OPTIONS)
def test_answers_and_reuse_equal_stocks(name: str, tmp_path: Path) -> None:
    first, more = (192, 64) if name == "hybrid" else (120, 40)
    prompts = conversations(chats=6, turns=5, first=first, more=more, seed=4)
    # With pages of one token, each has a hash: then no match is cut at the start of a block.
    record = {"folder": str(tmp_path / "recorded"), "block_size": OPTIONS[name].get("page_size", 1)}
    ours = {
        "radix_eviction_policy": "costcache:lru",
        "radix_eviction_policy_config": {"trim": "off", "core": "python", "record": record},
    }
    model = write_model(name, tmp_path)
    stock, run = both(model, prompts, tmp_path, ours, **OPTIONS[name])
    assert [a.output for a in run.answers] == [a.output for a in stock.answers]
    assert len({a.output for a in stock.answers}) > len(prompts) // 2, (
        "equality of like answers means nothing"
    )
    assert [a.cached for a in run.answers] == [a.cached for a in stock.answers]
    assert 0 < sum(a.cached for a in run.answers) < sum(len(p) for p in prompts) - first * 6, "no pressure"
    (line,) = [line for line in run.log.splitlines() if ": plugin " in line]
    for words in (
        f"plugin '{'mla' if name == 'mla' else 'mha' if name == 'mha' else ''}",
        "policy 'lru'",
        "python core (asked for)",
        f"{COST[name]} B per token of pool 'kv' (cost model: {COST[name]})",
        "class CostCache",
    ):
        assert words in line
    assert "costcache" not in stock.log.split("server_args=")[-1].split("\n", 1)[-1]

    (path,) = (tmp_path / "recorded").iterdir()
    with open_source(path) as source:
        recorded = read_recorded(source)
    # An Engine's processes are killed at its end, perhaps before the last line is written.
    done = len(recorded.trace)
    assert len(prompts) - 1 <= done <= len(prompts)
    assert recorded.cached.tolist() == [a.cached for a in run.answers[:done]]
    if name != "hybrid":
        assert abs(replayed(recorded, model, Settings(policy="lru", trim="off")) - recorded.hit_rate) < 0.005


@pytest.mark.engine
def test_more_reuse_of_states_than_stock(tmp_path: Path) -> None:
    """Five streams of a hybrid model's users: the same answers, from more cached tokens in the sum."""
    prompts = [prompt for seed in range(5) for prompt in chats_and_scans(seed, 70)]
    ours = {"radix_eviction_policy": "costcache"}
    stock, run = both(
        write_model("hybrid", tmp_path), prompts, tmp_path, ours, output_tokens=2, **OPTIONS["hybrid"]
    )
    assert [a.output for a in run.answers] == [a.output for a in stock.answers]
    assert len({a.output for a in stock.answers}) > len(prompts) // 2
    assert "policy 'hazard'" in run.log
    found = [sum(a.cached for a in each.answers) for each in (stock, run)]
    assert 0 < found[0] < found[1], found
