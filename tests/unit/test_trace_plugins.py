"""Formats of trace files that plugins read: found before the built-in ones, and bypassed if broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from costcache import TraceError, TraceFormat, hookimpl
from costcache.plugins import PluginManager
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.traces.columns import Columns
from costcache.sim.traces.files import Source
from costcache.sim.traces.reading import Reading
from costcache.sim.traces.rows import fail
from tests.unit.commands import refusal

MOONCAKE = '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [7], "block_size": 16}\n'
OURS = "3,20,1 2\n1,16,1\n"
"""Seconds, tokens, and ids of blocks."""


def read(source: Source, reading: Reading) -> Trace:
    columns = Columns(source)
    for number, line in source.lines():
        try:
            seconds, tokens, ids = line.decode().split(",")
            columns.ids.extend(map(int, ids.split()))
            columns.add(float(seconds), int(tokens), 0, session="s")
        except ValueError:
            fail(source.label, number, "the line", line.decode().strip(), "SECONDS,TOKENS,IDS")
    return columns.trace(reading.block_size or 16)


def by_ending(name: str, start: bytes) -> bool:
    return name.endswith(".ours")


class Offering:
    """A plugin that offers formats."""

    def __init__(self, offer: Callable[[], Any]) -> None:
        self.offer = offer

    @hookimpl
    def trace_formats(self) -> Any:
        return self.offer()


def manager(**offers: Callable[[], Any]) -> PluginManager:
    made = PluginManager()
    for name, offer in offers.items():
        made.register(Offering(offer), name, f"tests:{name}")
    return made


def ours(**fields: Any) -> TraceFormat:
    every: dict[str, Any] = {"read": read, "claims": by_ending, "summary": "ours"}
    return TraceFormat(**(every | fields))


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_is_read_by_the_plugin_that_claims_it(tmp_path: Path) -> None:
    plugins = manager(mine=lambda: {"ours": ours()})
    trace = load_trace(file(tmp_path, "a.ours", OURS), plugins=plugins)
    assert trace.timestamps.tolist() == [1.0, 3.0]  # in order of time
    assert trace.input_tokens.tolist() == [16, 20]
    assert trace.ids.tolist() == [1, 1, 2]
    # Others stay the built-in readers'.
    assert load_trace(file(tmp_path, "a.jsonl", MOONCAKE), plugins=plugins).ids.tolist() == [7]


def test_by_its_content_a_plugin_goes_before_the_built_in_formats(tmp_path: Path) -> None:
    empty = ours(
        claims=lambda name, start: b'"timestamp"' in start,
        read=lambda source, reading: read(Fake(source), reading),  # type: ignore[arg-type] # a source in part
    )
    trace = load_trace(file(tmp_path, "a.jsonl", MOONCAKE), plugins=manager(mine=lambda: {"ours": empty}))
    assert trace.ids.tolist() == [5]


class Fake:
    """A source of one line."""

    def __init__(self, source: Source) -> None:
        self.label, self.name, self.allow = source.label, source.name, source.allow

    def lines(self) -> Any:
        yield 1, b"0,16,5"


def test_a_format_is_asked_for_by_name(tmp_path: Path) -> None:
    plugins = manager(mine=lambda: {"ours": ours(claims=lambda name, start: False)})
    path = file(tmp_path, "a.txt", OURS)
    assert len(load_trace(path, plugins=plugins, format="ours")) == 2
    with pytest.raises(TraceError, match=r"format is 'our': did you mean 'ours'\? The formats are ours, "):
        load_trace(path, plugins=plugins, format="our")
    built_in = file(tmp_path, "a.jsonl", MOONCAKE)
    assert len(load_trace(built_in, plugins=plugins, format="mooncake")) == 1
    said = refusal("trace", "info", built_in, "--format", "mooncak")
    assert "format is 'mooncak': did you mean 'mooncake'?" in said


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 2: the line is 'x'; expected SECONDS,TOKENS,IDS"):
        load_trace(file(tmp_path, "a.ours", OURS[:9] + "x\n"), plugins=manager(mine=lambda: {"ours": ours()}))


def test_two_that_claim_a_file_are_named(tmp_path: Path) -> None:
    plugins = manager(a=lambda: {"one": ours()}, b=lambda: {"two": ours()})
    with pytest.raises(
        TraceError, match=r"'one' of plugin 'a' and 'two' of plugin 'b' both claim it: name one with --format"
    ):
        load_trace(file(tmp_path, "a.ours", OURS), plugins=plugins)
    assert len(load_trace(file(tmp_path, "b.ours", OURS), plugins=plugins, format="two")) == 2


def raising(*_: Any) -> Any:
    raise SystemExit("ended")


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raising, "trace_formats raised SystemExit('ended')"),
    "a list": (lambda: ["ours"], "trace_formats returned ['ours'], not a dict"),
    "a number": (lambda: {"ours": 3}, "trace format 'ours' is 3, not a TraceFormat"),
    "no name": (lambda: {"our s": ours()}, "trace format 'our s' cannot be asked for"),
    "built in": (lambda: {"mooncake": ours()}, "trace format 'mooncake' is taken by 'costcache'"),
    "twice": (lambda: {"good": ours()}, "trace format 'good' is taken by 'a'"),
    "read": (lambda: {"ours": ours(read=None)}, "trace format 'ours' has the read None, not a function"),
    "claims": (lambda: {"ours": ours(claims=1)}, "trace format 'ours' has the claims 1, not a function"),
    "summary": (lambda: {"ours": ours(summary="a\nb")}, "has the summary 'a\\nb', not one line of text"),
    "claims raises": (lambda: {"ours": ours(claims=raising)}, "claims raised SystemExit('ended')"),
    "claims a word": (
        lambda: {"ours": ours(claims=lambda name, start: "yes")},
        "claims answered 'yes', not True or False",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_is_reported_by_name_and_passed_over(kind: str, tmp_path: Path) -> None:
    offer, said = BROKEN[kind]
    good = ours(claims=lambda name, start: name.endswith(".good"))
    plugins = manager(a=lambda: {"good": good}, broken=offer)
    for _ in range(2):
        assert len(load_trace(file(tmp_path, "a.jsonl", MOONCAKE), plugins=plugins)) == 1
        assert len(load_trace(file(tmp_path, "a.good", OURS), plugins=plugins)) == 2
    (failure,) = plugins.failures
    assert failure.plugin == "broken"
    assert said in failure.reason


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (raising, r"raised SystemExit\('ended'\)"),
        (lambda source, reading: None, "answered None, not a Trace"),
    ],
)
def test_one_that_cannot_read_is_an_error_that_names_it(reads: Any, said: str, tmp_path: Path) -> None:
    plugins = manager(mine=lambda: {"ours": ours(read=reads)})
    with pytest.raises(TraceError, match=rf"format 'ours' of plugin 'mine' {said}: correct the plugin, or"):
        load_trace(file(tmp_path, "a.ours", OURS), plugins=plugins)


def test_they_are_listed() -> None:
    (listed,) = manager(mine=lambda: {"ours": ours()}).describe()["trace_formats"]
    assert listed == {"name": "ours", "plugin": "mine", "summary": "ours"}
