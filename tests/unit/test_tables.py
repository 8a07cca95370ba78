"""Tables that hazard learned: saved and loaded whole, of use from the first victim on, refused when wrong."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costcache import RadixCache, RequestInfo
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.bins import BINS, age_bin
from costcache.policies.hazard.classes import FAMILIES, Classes
from costcache.policies.hazard.life_table import LifeTable
from costcache.policies.hazard.tables import Tables, read_tables, tables_of
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.explain import explain
from costcache.sim.traces import load_trace
from tests.property.kit import MODEL, manager
from tests.unit.commands import answer, refusal

PLUGINS = manager()


def new(pool_size: int = 400, **settings: Any) -> RadixCache:
    return RadixCache(MODEL, pool_size, 1, policy="hazard", plugins=PLUGINS, policy_settings=settings)


def order_of(cache: RadixCache) -> Hazard:
    order = cache._pool.order
    assert isinstance(order, Hazard)
    return order


def ask(cache: RadixCache, tokens: list[int], **info: Any) -> int:
    name = object()
    found = cache.match_prefix(tokens, name).matched_len
    cache.insert(tokens, request=name)
    cache.finish(name, RequestInfo(**info))
    return found


def lived(seconds: bool = True, requests: int = 500) -> RadixCache:
    """A cache that has seen classes of all kinds."""
    cache, draw = new(refresh=20), random.Random(5)
    reasons = ("stop", "tool_call", None)
    for n in range(requests):
        if seconds:
            cache.clock.advance(n * 2.0)
        head = draw.randrange(12)
        prompt = [head] * 20 + [draw.randrange(1000) for _ in range(draw.randrange(1, 40))]
        ask(
            cache,
            prompt,
            output_tokens=draw.choice((10, 100, 300, 900)),
            finish_reason=draw.choice(reasons),
            priority=draw.choice((0, 0, 0, 1, -2)),
        )
    return cache


def saved(cache: RadixCache, path: Path) -> Path:
    text = order_of(cache).explained().tables()
    path.write_text(text)
    return path


def started(path: Path, clock: Any = "seconds") -> tuple[LifeTable, Classes, float]:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    classes = Classes(table)
    return table, classes, read_tables(path).start(table, classes, clock)


def test_tables_survive_saving_and_loading(tmp_path: Path) -> None:
    cache = lived()
    order = order_of(cache)
    path = saved(cache, tmp_path / "tables.json")
    table, classes, watched = started(path)
    learned = order.snapshot()
    assert watched == learned.watched == order.intake.now - order.intake.began
    assert (table.tokens, table.squares) == (learned.tokens, learned.squares)
    of = {each.name: number for number, each in enumerate(learned.classes)}
    assert len(classes) > 50
    for number in range(len(classes)):
        there = of[classes.label(number)]
        here, before = slice(number * BINS, (number + 1) * BINS), learned.classes[there]
        assert np.allclose(table.used[here], before.used, atol=0.06)
        assert sum(table.censored[here]) >= sum(before.censored) - 0.06 * BINS
        assert table.kin(number) == order.learner.table.kin(there)
    # Open intervals are in it as censored at their age: nothing that is at risk is left out.
    open_ = sum(cohort.at_risk for cohort in learned.cohorts)
    assert open_ > 0
    censored = sum(sum(each.censored) for each in learned.classes)
    assert sum(table.censored) == pytest.approx(censored + open_, abs=1.0)
    again = tmp_path / "again.json"
    again.write_text(read_tables(path).text())
    assert again.read_text() == path.read_text()


def test_watched_time_accumulates_over_saved_tables(tmp_path: Path) -> None:
    cache = lived()
    path = saved(cache, tmp_path / "tables.json")
    _, _, watched = started(path)
    second = RadixCache(
        MODEL, 50, policy="hazard", plugins=PLUGINS, policy_settings={"tables": str(path), "refresh": 5}
    )
    for n in range(20):
        second.clock.advance(float(n))
        ask(second, [n] * 10)
    path = saved(second, tmp_path / "second.json")
    assert started(path)[2] == pytest.approx(watched + 19.0)
    # Of its own requests, not of what others watched.
    assert read_tables(path).seconds_per_request == pytest.approx(19.0 / 20)


def test_every_kind_of_class_is_recognised_again() -> None:
    table = LifeTable(FAMILIES, 5.0, 0.02)
    classes = Classes(table)
    infos = [
        RequestInfo(output_tokens=output, finish_reason=reason, priority=priority)
        for output in (0, 60, 250, 9000)
        for reason in (None, "stop", "length")
        for priority in (0, 1, -1)
    ]
    endings = [classes.ending(info) for info in infos]
    for ending in endings:
        for tokens in (5, 3_000, 9_000, 99_000):
            classes.fresh(tokens, ending)
        for uses, interval in ((2, 0.0), (2, 1.5), (4, 100.0), (9, 7.0), (99, 1e9)):
            classes.after(classes.reused(uses, interval), ending)
    kinds = classes.kinds()
    assert [classes.number_of(kind) for kind in kinds] == list(range(len(classes)))
    other = Classes(LifeTable(FAMILIES, 5.0, 0.02))
    for number, kind in enumerate(kinds):
        assert other.label(other.number_of(kind)) == classes.label(number)


@pytest.mark.parametrize(("clock", "steps"), [("requests", 2), ("seconds", 0)])
def test_ages_in_seconds_become_counts_of_requests(tmp_path: Path, clock: Any, steps: int) -> None:
    # A request every half a second: an age of 8 s is one of 16 requests, two bins on.
    used = [0.0] * BINS
    used[age_bin(8.0)] = 40.0
    tables = {
        "format": "costcache-hazard-tables",
        "version": 1,
        "clock": "seconds",
        "watched": 100.0,
        "seconds_per_request": 0.5,
        "tokens": 40.0,
        "squares": 400.0,
        "classes": [{"uses": 2, "interval": 8.5, "used": used, "lost": []}],
    }
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(tables))
    table, classes, watched = started(path, clock)
    assert watched == (200.0 if steps else 100.0)
    (row,) = (
        number for number in range(len(classes)) if any(table.used[number * BINS : (number + 1) * BINS])
    )
    assert classes.label(row) == ("used 2 times, every 16 to 32" if steps else "used 2 times, every 8 to 16")
    assert table.used[row * BINS + age_bin(8.0) + steps] == 40.0


def test_tables_in_requests_are_ignored_by_a_clock_in_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(lived(seconds=False), tmp_path / "tables.json")
    assert read_tables(path).clock == "requests"
    with caplog.at_level(logging.WARNING):
        table, _, watched = started(path, "seconds")
    assert watched == 0.0
    assert not any(table.used)
    assert "starts from nothing" in caplog.text
    assert any(started(path, "requests")[0].used)


def hot_and_cold(cache: RadixCache, requests: int, first: int = 0) -> int:
    """Serve chats that continue later, among answers never reused; returns the chats' hit tokens."""
    found = 0
    for n in range(first, first + requests):
        cache.clock.advance(float(n))
        ask(cache, [10_000 + n] * 60, output_tokens=5)
        found += ask(cache, [n % 20] * 10, output_tokens=300)
    return found


def test_a_cache_that_starts_from_tables_uses_them_for_its_first_victims(tmp_path: Path) -> None:
    before = new(600)
    hot_and_cold(before, 400)
    path = saved(before, tmp_path / "tables.json")
    empty, loaded = new(600, prior=False), new(600, prior=False, tables=str(path))
    # Twenty chats continue after 20 requests each: LRU has evicted them by then.
    assert hot_and_cold(empty, 45) < 100
    assert hot_and_cold(loaded, 45) > 200
    assert not loaded._pool.fell_back


def test_the_same_tables_give_the_same_victims(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(lived(), tmp_path / "tables.json")
    with caplog.at_level(logging.INFO, "costcache"):
        caches = [new(300, tables=path) for _ in range(2)]
    first_line, second_line = (line for line in caplog.messages if "starts from" in line)
    assert first_line == second_line
    assert "checksum" in first_line
    draw = random.Random(2)
    prompts = [[draw.randrange(12)] * 20 + [draw.randrange(1000)] * 30 for _ in range(300)]
    first, second = ([ask(cache, prompt, output_tokens=70) for prompt in prompts] for cache in caches)
    assert first == second
    assert tables_of(order_of(caches[0]).snapshot()) == tables_of(order_of(caches[1]).snapshot())
    assert not caches[0]._pool.fell_back
    caches[0].reset()  # starts from the file once more
    assert [ask(caches[0], prompt, output_tokens=70) for prompt in prompts] == first


def test_a_file_is_parsed_once_for_all_caches_until_it_changes(tmp_path: Path) -> None:
    path = saved(lived(requests=60), tmp_path / "tables.json")
    tables = read_tables(path)
    orders = [order_of(new(tables=str(path))) for _ in range(2)]
    assert all(order.learner.tables is tables for order in orders)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))  # of the same length
    with pytest.raises(SettingsError, match="version is 2"):
        new(tables=str(path))


def test_the_setting_loads_tables_that_the_command_line_saved(tmp_path: Path) -> None:
    trace, path = tmp_path / "chat.jsonl", tmp_path / "tables.json"
    answer("workload", "chat", "--requests", "400", "--out", trace)
    options = (trace, "--model", "llama-3-8b", "--capacity", "5%")
    assert answer("explain", *options, "--save-tables", path).endswith(f"tables: {path}\n")
    sim = Simulator(load_trace(trace), ModelSpec.preset("llama-3-8b"), Deployment(page_size=16))
    capacity = sim.trace.distinct_pages(16) * 5 // 100 * 16
    found = explain(sim, Settings(policy="hazard"), capacity)
    assert path.read_text() == found.tables
    setting = ("--set", f"hazard.tables={path}", "--policy", "hazard", "--json")
    (run,) = json.loads(answer("simulate", *options, *setting))["runs"]
    empty = json.loads(answer("simulate", *options, "--policy", "hazard", "--json"))["runs"][0]
    assert run["hit_tokens"] > empty["hit_tokens"]
    assert "there is no folder" in refusal("explain", *options, "--save-tables", tmp_path / "no" / "t.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.update(version=2), "version is 2, this release reads 1"),
        (lambda t: t.update(format="x"), "field 'format' is 'x'"),
        (lambda t: t.update(clock="days"), "field 'clock' is 'days'"),
        (lambda t: t.pop("watched"), "field 'watched' is missing"),
        (lambda t: t.update(more=1), "field 'more' is unknown"),
        (lambda t: t["classes"][0].update(uses=0), "field 'classes.0.uses' is 0"),
        (lambda t: t["classes"][1]["used"].__setitem__(0, -1), "field 'classes.1.used.0' is -1"),
        (lambda t: t["classes"][1].update(lost=[0.0] * 65), "field 'classes.1.lost' is"),
        (lambda t: t.update(classes=3), "field 'classes' is 3"),
        (lambda t: t.pop("version"), "field 'version' is missing"),
        (lambda t: t.pop("format"), "field 'format' is missing"),
        (lambda t: t.update(version="1"), "version is '1', this release reads 1"),
        (lambda t: t.update(version=True), "version is True, this release reads 1"),
        (lambda t: t.update(tokens=float("nan")), "field 'tokens' is nan"),
        (lambda t: t.update(squares=float("inf")), "field 'squares' is inf"),
        (lambda t: t.update(tokens=1e300), "field 'tokens' is 1e+300"),
        (lambda t: t.update(tokens=10**400), "field 'tokens' is 1"),
        (lambda t: t.update(watched="3"), "field 'watched' is '3'"),
        (lambda t: t.update(watched=True), "field 'watched' is True"),
        (lambda t: t.update(seconds_per_request=1e-320), "field 'seconds_per_request' is 1e-320"),
        (lambda t: t["classes"][0].update(interval=1e300), "field 'classes.0.interval' is 1e+300"),
        (lambda t: t["classes"][0].update(uses=10**30), "field 'classes.0.uses' is 1"),
        (lambda t: t["classes"][1]["used"].__setitem__(0, float("-inf")), "field 'classes.1.used.0' is -inf"),
        (lambda t: t.update(classes=t["classes"][:1] * 10_001), "field 'classes' is"),
    ],
)
def test_a_malformed_file_is_refused_by_field(tmp_path: Path, change: Any, problem: str) -> None:
    path = saved(lived(requests=60), tmp_path / "tables.json")
    tables = json.loads(path.read_text())
    change(tables)
    path.write_text(json.dumps(tables))
    with pytest.raises(SettingsError) as caught:
        new(tables=str(path))
    said = str(caught.value)
    assert "'policy_settings.tables'" in said
    assert f"tables {path}: {problem}" in said
    assert said.endswith("write it anew with 'costcache explain TRACE --save-tables FILE'")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is list, not a JSON object"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "tables.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(SettingsError, match=problem):
        read_tables(path)


def test_models_with_states_have_no_tables(tmp_path: Path) -> None:
    path = saved(lived(requests=60), tmp_path / "tables.json")
    trace = tmp_path / "chat.jsonl"
    answer("workload", "chat", "--requests", "50", "--out", trace)
    options = ("explain", trace, "--model", "qwen3-next")
    assert "leave it out" in refusal(*options, "--save-tables", tmp_path / "t.json")
    roomy = (*options, "--capacity", "4GiB")
    assert "this model has states" in refusal(*roomy, "--set", f"costcache.tables={path}")
    assert ModelSpec.preset("qwen3-next").has_states


def test_the_format_is_as_documented() -> None:
    empty = Tables(clock="seconds", watched=0.0, tokens=0.0, squares=0.0, classes=[])
    assert json.loads(empty.text()) == {
        "format": "costcache-hazard-tables",
        "version": 1,
        "clock": "seconds",
        "watched": 0.0,
        "seconds_per_request": None,
        "tokens": 0.0,
        "squares": 0.0,
        "classes": [],
    }
