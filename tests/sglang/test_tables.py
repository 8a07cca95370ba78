"""Tables that hazard learned before, in SGLang's cache: read from the config, the same on every rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from costcache.errors import SettingsError
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.tables import Tables, tables_of
from costcache.sglang.build import read_policy
from tests.sglang.pools import Shape, cost_cache
from tests.sglang.serving import Server
from tests.sglang.test_two_cores import Watched, run

TABLES: dict[str, Any] = {
    "clock": "seconds",
    "watched": 600.0,
    "seconds_per_request": 0.5,
    "tokens": 40_000.0,
    "squares": 4_000_000.0,
    "classes": [
        {
            "uses": 1,
            "new_tokens": 0,
            "ended": {"output_tokens": 0},
            "used": [0.0] * 20 + [9_000.0],
            "lost": [0.0] * 30 + [1_000.0],
        },
        {"uses": 2, "interval": 3.0, "used": [0.0] * 4 + [20_000.0], "lost": []},
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tables.json"
    path.write_text(Tables.model_validate(TABLES).text())
    return path


def hazard_of(server: Server) -> Hazard:
    order = server.cache.pools.kv.order
    assert isinstance(order, Hazard)
    return order


def seen(order: Hazard) -> float:
    return sum(sum(each.used) for each in order.snapshot().classes)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_the_config_names_the_file_and_two_ranks_agree(file: Path, core: Any) -> None:
    config = json.loads(json.dumps({"policy_settings": {"tables": str(file)}, "core": core, "trim": "off"}))
    settings = read_policy("costcache:hazard", config)
    assert settings.policy_settings == {"tables": str(file)}
    ranks = [
        Watched(
            Shape("mha", 1, tokens=1200, core=core),
            policy="hazard",
            trim="off",
            policy_settings=settings.policy_settings,
        )
        for _ in range(2)
    ]
    found = [run(server, "tables", 1, 100) for server in ranks]
    assert found[0] == found[1]
    assert ranks[0].gone == ranks[1].gone
    assert len(ranks[0].gone) > 5
    first, second = map(hazard_of, ranks)
    assert first.learner.tables is None  # they have been taken over
    assert seen(first) > 29_000
    assert tables_of(first.snapshot()) == tables_of(second.snapshot())
    # SGLang's clock counts requests: an age of a second is one of two.
    names = [each.name for each in first.snapshot().classes]
    assert "used 2 times, every 4 to 8" in names
    assert all(not server.cache.pools.kv.fallbacks for server in ranks)


def test_a_malformed_file_stops_the_server_at_its_start(file: Path) -> None:
    file.write_text(file.read_text().replace('"uses": 2', '"uses": -2'))
    with pytest.raises(SettingsError, match=r"field 'classes\.1\.uses' is -2"):
        cost_cache(Shape("mha"), policy="hazard", policy_settings={"tables": str(file)})


def test_loaded_tables_count_as_seen_tokens(file: Path) -> None:
    servers = [
        Server(cost_cache(shape := Shape("mha", 1, tokens=1200), policy="hazard", policy_settings=own), shape)
        for own in ({}, {"tables": str(file)})
    ]
    draw = random.Random(1)
    prompts = [[draw.randrange(1 << 20) for _ in range(200)] for _ in range(8)]
    for server in servers:
        for prompt in prompts:
            server.serve(prompt)
    empty, loaded = map(hazard_of, servers)
    assert seen(loaded) - seen(empty) == 29_000.0
