"""``costcache watch``: figures of a server's metrics, and the reasons for its hit rate."""

from __future__ import annotations

import contextlib
import json
import threading
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from costcache.cli import cli
from costcache.recording.hashes import Tokens
from costcache.recording.recorder import Ended, Recorder
from costcache.recording.settings import RecordSettings
from costcache.records import RequestInfo

pytest.importorskip("prometheus_client", reason="reads Prometheus' text format; make test installs it")

from costcache.monitor.events import EventCounts, EventFigures
from costcache.monitor.figures import figures
from costcache.monitor.reasons import reasons
from costcache.monitor.samples import NOTHING, MetricsError, Sample, address, load, parse, saved
from costcache.sim.recordings.published import decode


def page(
    *, prompt: int = 0, found: int = 0, evicted: int = 0, requests: int = 0, ours: bool = True, **more: Any
) -> str:
    """Metrics as SGLang exposes them, with those of others in between."""
    state = {
        "lru": "no",
        "in_force": 0,
        "fallbacks": 0,
        "short": 0,
        "gained": 0,
        "lost": 0,
        "page": 16,
        "resets": 0,
    } | more
    labels = 'model_name="m",tp_rank="0"'
    lines = [
        "# HELP python_gc_objects_collected_total Objects collected",
        "# TYPE python_gc_objects_collected_total counter",
        "python_gc_objects_collected_total 5",
        "# TYPE sglang:prompt_tokens_total counter",
        f"sglang:prompt_tokens_total{{{labels}}} {prompt}",
        f'sglang:cached_tokens_total{{{labels},cache_source="device"}} {found}',
        f"sglang:num_requests_total{{{labels}}} {requests}",
        f"sglang:max_total_num_tokens{{{labels}}} 1000",
        f"sglang:page_size{{{labels}}} {state['page']}",
        f"sglang:kv_used_tokens{{{labels}}} 100",
        f"sglang:kv_evictable_tokens{{{labels}}} 800",
        f"sglang:num_running_reqs{{{labels}}} 2",
        f"sglang:num_queue_reqs{{{labels}}} 1",
    ]
    if ours:
        pool = f'{labels},pool="kv"'
        info = f'{pool},policy="hazard",core="rust",build="0.1.0"'
        lines += [
            f"costcache:evictions_total{{{pool}}} {evicted // 10}",
            f"costcache:evicted_units_total{{{pool}}} {evicted}",
            f"costcache:victims_total{{{pool}}} {evicted // 5}",
            f'costcache:victims_by_uses_total{{{pool},uses="1"}} {evicted // 5}',
            f'costcache:victims_by_uses_total{{{pool},uses="2"}} 0',
            f"costcache:resets_total{{{pool}}} {state['resets']}",
            f"costcache:short_evictions_total{{{pool}}} {state['short']}",
            f"costcache:fallbacks_total{{{pool}}} {state['fallbacks']}",
            f"costcache:lru_in_force{{{pool}}} {state['in_force']}",
            f"costcache:gained_tokens_total{{{pool}}} {state['gained']}",
            f"costcache:lost_tokens_total{{{pool}}} {state['lost']}",
            f"costcache:step_ins_total{{{pool}}} 0",
            f'costcache:policy_info{{{info},lru="{state["lru"]}"}} 1',
        ]
    return "\n".join(lines) + "\n"


def vllms() -> str:
    return (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1\n'
        'vllm:prefix_cache_queries_total{engine="0"} 1000\n'
        'vllm:prefix_cache_hits_total{engine="0"} 250\n'
        'vllm:request_success_total{finished_reason="stop"} 7\n'
        'vllm:request_success_total{finished_reason="length"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:num_requests_running{engine="0"} 3\n'
    )


def sample(at: float = 0.0, **counts: Any) -> Sample:
    return parse(page(**counts), at, "page")


def names(*args: Any) -> list[str]:
    return [reason.name for reason in reasons(*args)]


def test_figures_are_those_between_two_samples() -> None:
    before = sample(100.0, prompt=1000, found=400, evicted=200, requests=10)
    now = figures(sample(160.0, prompt=3000, found=900, evicted=700, requests=30), before)
    assert (now.server, now.seconds, now.policy, now.lru) == ("sglang", 60.0, "hazard", False)
    assert (now.prompt_tokens, now.found_tokens, now.requests, now.evicted) == (2000, 500, 20, 500)
    assert now.hit_rate == 0.25
    assert (now.occupied, now.used) == (0.9, 0.1)
    assert [(pool.name, pool.evictions, pool.victims) for pool in now.pools] == [("kv", 50, 100)]
    again = figures(sample(170.0, prompt=10, found=5), before)  # the server was started again
    assert again.hit_rate == 0.5


def test_figures_of_vllm() -> None:
    now = figures(parse(vllms(), 0.0, "page"))
    assert (now.server, now.seconds, now.policy, now.lru) == ("vllm", None, "", None)
    assert (now.capacity, now.page_size, now.used) == (1600, 16, 0.25)
    assert (now.hit_rate, now.requests, now.running) == (0.25, 10, 3)
    assert names(now) == ["unknown"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, ["idle"]),
        ({"prompt": 1000, "found": 900, "evicted": 100}, []),
        ({"prompt": 1000, "found": 10}, ["nothing-shared"]),
        ({"prompt": 1000, "found": 10, "evicted": 900}, ["evicted"]),
        ({"prompt": 1000, "found": 10, "evicted": 900, "short": 2}, ["evicted", "pinned"]),
        ({"prompt": 1000, "found": 10, "evicted": 900, "lost": 200, "gained": 5}, ["evicted", "regret"]),
        ({"prompt": 1000, "found": 10, "evicted": 900, "in_force": 1}, ["lru-in-force", "evicted"]),
        ({"prompt": 1000, "found": 900, "fallbacks": 1, "lru": "yes"}, ["fallback"]),
        ({"prompt": 1000, "found": 10, "requests": 10, "page": 64}, ["nothing-shared", "page-size"]),
        ({"prompt": 1000, "found": 10, "ours": False}, ["unknown"]),
        ({"prompt": 1000, "found": 10, "evicted": 900, "resets": 2}, ["reset", "evicted"]),
        ({"prompt": 1000, "found": 900, "evicted": 900, "resets": 2}, []),
    ],
)
def test_reasons(counts: dict[str, Any], expected: list[str]) -> None:
    found = reasons(figures(sample(**counts)))
    assert [reason.name for reason in found] == expected
    assert all(reason.text and reason.fix for reason in found)


def test_the_pace_of_the_pool_is_named() -> None:
    now = figures(sample(60.0, prompt=5000, evicted=3000), sample(0.0))
    (reason,) = reasons(now)
    assert "Its contents are replaced every 20 s." in reason.text


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server of these pages, in turn, the last one for ever."""
    pages: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            text = pages.pop(0) if len(pages) > 1 else pages[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", pages
        served.shutdown()


def watch(*words: str) -> Result:
    return CliRunner().invoke(cli, ["watch", *words])


def test_a_running_server_is_shown(server: tuple[str, list[str]], tmp_path: Path) -> None:
    url, pages = server
    pages.append(page(prompt=1000, found=250, evicted=900, requests=5))
    done = watch("--url", url, "--once", "--save", str(tmp_path / "saved"))
    assert done.exit_code == 0, done.output
    for text in (
        "sglang, since the server's start",
        "policy          hazard",
        "pool            1,000 tokens in pages of 16",
        "occupancy       90.0%, 10.0% by running requests",
        "hit rate        25.0%, 250 tokens",
        "900 tokens were evicted, and 750 had to be computed",
    ):
        assert text in done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["kv", "180", "0", "0", "0", "0", "0"] in lines  # victims by their uses
    assert "python_gc" not in (tmp_path / "saved").read_text()
    facts = json.loads(watch("--url", f"{url}/metrics", "--once", "--json").output)
    assert (facts["hit_rate"], facts["pools"][0]["evicted"]) == (0.25, 900)
    assert facts["pools"][0]["by_uses"]["1"] == 180
    assert facts["reasons"][0]["name"] == "evicted"


def test_intervals_are_shown_one_after_another(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, pages = server
    pages += [page(prompt=1000), page(prompt=2000, found=600), page(prompt=3000, found=700)]
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("costcache.cli.watch.time.sleep", wait)
    done = watch("--url", url, "--interval", "7", "--json")
    assert done.exit_code == 0
    decoder, text, found = json.JSONDecoder(), done.output.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value["hit_rate"])
        text = text[end:].strip()
    assert found == [0.0, 0.6, 0.1]
    assert waited == [7.0] * 3


def test_a_file_is_shown_as_the_server_was(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.write_text(
        saved(sample(100.0, prompt=1000))
        + saved(sample(130.0, prompt=1500))
        + saved(sample(160.0, prompt=2000, found=900))
    )
    done = watch("--file", str(path))
    assert done.exit_code == 0, done.output
    assert "sglang, over 60 s" in done.output
    assert "hit rate        90.0%, 900 tokens" in done.output
    (tmp_path / "page").write_text(vllms())
    assert "vllm, since the server's start" in watch("--file", str(tmp_path / "page"), "--once").output


def test_a_recording_says_why(tmp_path: Path) -> None:
    recorder = Recorder(RecordSettings(folder=str(tmp_path / "recorded")), 16)
    for at in range(10):
        prompt = array("q", [at, *range(100)])
        recorder.add(Ended(Tokens(b"", prompt.tobytes(), b""), 101, 0, at, at + 0.5, RequestInfo()))
    recorder.close()
    (tmp_path / "page").write_text(page(prompt=1010))
    done = watch("--file", str(tmp_path / "page"), "--recording", str(tmp_path / "recorded"))
    assert done.exit_code == 0, done.output
    assert (
        "100.0% of the prompt tokens are in prompts that begin as no other: nothing is shared." in done.output
    )


def free() -> str:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as served:
        return f"http://127.0.0.1:{served.server_port}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (lambda url, _: ("--url", free()), "/metrics: no server answers ("),
        (
            lambda url, _: ("--url", f"{url}/v1/models"),
            "answers 404: SGLang has metrics with",
        ),
        (
            lambda url, _: ("--url", "file:///etc/passwd"),
            "--url is 'file:///etc/passwd': give",
        ),
        (
            lambda url, _: ("--url", "http://host:port"),
            "--url is 'http://host:port': give",
        ),
        (lambda url, _: ("--url", url, "--once"), "has no metrics of SGLang, vLLM or costcache"),
        (lambda url, folder: ("--file", f"{folder}/none"), "cannot be read (No such file or directory)"),
        (lambda url, folder: ("--file", f"{folder}/bad"), "bad, line 2: is no sample; give a file of --save"),
        (lambda url, folder: ("--file", f"{folder}/page", "--save", "x"), "--save is for a server"),
        (lambda url, folder: ("--url", url, "--file", "x"), "give --url of a server"),
        (lambda url, folder: ("--once",), "give --url of a server"),
        (lambda url, folder: ("--url", url, "--events", "x"), "a file of --events goes with --file or alone"),
        (lambda url, folder: ("--events", "x", "--events", "y"), "a file of --events goes with --file"),
        (
            lambda url, folder: ("--file", f"{folder}/page", "--events", "tcp://x:1"),
            "an address of --events goes with --url or alone",
        ),
        (lambda url, folder: ("--events", "x", "--save-events", "y"), "--save-events is for a server"),
        (lambda url, folder: ("--events", f"{folder}/none"), "none: cannot be read"),
        (lambda url, folder: ("--events", f"{folder}/bad"), "batch 1: is no batch of KV events"),
        (lambda url, folder: ("--events", f"{folder}/empty"), "holds no batch of KV events"),
        (lambda url, folder: ("--file", f"{folder}/broken"), "is not in Prometheus' text format"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: Callable[[str, Path], tuple[str, ...]], message: str, server: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, pages = server
    pages.append("python_info 1\n")
    (tmp_path / "page").write_text(page())
    (tmp_path / "bad").write_text(saved(sample()) + "{}\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken").write_text("sglang:page_size{ 16\n")
    done = watch(*words(url, tmp_path))
    assert done.exit_code != 0
    assert message in done.output
    assert "Traceback" not in done.output
    assert len(done.output.splitlines()) <= 4  # the usage, for options that exclude each other


def stored(
    first: int, count: int = 1, *, parent: int | None = None, tokens: Any = (), size: int = 64
) -> dict[str, Any]:
    """An event that stores ``count`` blocks, whose hashes are numbers from ``first`` on."""
    return {
        "type": "BlockStored",
        "block_hashes": [*range(first, first + count)],
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
    }


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [*blocks], "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


def of_events(*events: dict[str, Any], rank: int | None = None) -> EventFigures:
    counts = EventCounts()
    for at, event in enumerate(events):
        counts.add(decode(msgspec.msgpack.encode([float(at), [event], rank])))
    return counts.take(10.0)


def test_blocks_that_are_stored_again_had_been_evicted_or_reset() -> None:
    found = of_events(
        CLEARED,  # of an empty cache, as a server publishes at its start
        stored(0, 10),
        stored(0, 3),  # found, and published again
        removed(8, 9),
        stored(9, parent=8),
        CLEARED,
        stored(0, 4),
        stored(8),
        removed(100),  # stored before anybody subscribed
        stored(100),
        {**stored(50), "medium": "CPU"},
        {**stored(50), "group_idx": 1},
    )
    assert (found.stored, found.removed, found.resets) == (64 * 17, 64 * 3, 1)
    assert (found.after_eviction, found.after_reset, found.cached) == (64 * 3, 64 * 4, 64 * 6)


def test_prompts_that_share_less_than_a_block_are_seen() -> None:
    shared = [1] * 40
    found = of_events(
        stored(1, tokens=shared + [2] * 24),
        stored(2, tokens=shared + [3] * 24),
        stored(3, parent=2, tokens=shared + [4] * 24),  # another place
        {**stored(4, tokens=shared + [5] * 24), "cache_salt": "x"},  # another namespace
        stored(5, tokens=[6] * 64),
        stored(1, tokens=shared + [2] * 24),
    )
    assert (found.stored, found.cut) == (5 * 64, 32)
    assert [reason.name for reason in reasons(figures(NOTHING, events=found))] == [
        "page-size",
        "nothing-shared",
    ]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), ["idle"]),
        ((stored(0, 10),), ["nothing-shared"]),
        ((stored(0, 10), removed(*range(10)), stored(0, 9)), ["evicted", "nothing-shared"]),
        (
            (stored(0, 10), CLEARED, stored(0, 8), removed(7), stored(7)),
            ["reset", "evicted", "nothing-shared"],
        ),
        ((stored(0, 10), CLEARED, stored(20, 10)), ["nothing-shared", "reset"]),
    ],
)
def test_reasons_of_events(events: tuple[dict[str, Any], ...], expected: list[str]) -> None:
    alone = reasons(figures(NOTHING, events=of_events(*events)))
    assert [reason.name for reason in alone] == expected
    both = reasons(figures(sample(prompt=1000, found=10), events=of_events(*events)))
    assert [reason.name for reason in both] == (expected if events else ["nothing-shared"])
    assert not reasons(figures(sample(prompt=1000, found=900), events=of_events(*events)))


def test_a_publisher_that_is_started_again_has_not_been_reset() -> None:
    counts = EventCounts()
    counts.add(decode(msgspec.msgpack.encode([1.0, [stored(0, 5)], 0])), "a")
    counts.add(decode(msgspec.msgpack.encode([1.0, [stored(0, 5)], 0])), "b")
    assert counts.take(1.0).cached == 640
    counts.restarted("a")
    counts.add(decode(msgspec.msgpack.encode([1.0, [stored(0, 5)], 0])), "a")
    found = counts.take(1.0)
    assert (found.cached, found.resets, found.stored) == (640, 0, 320)


def test_what_is_remembered_of_events_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costcache.monitor.events._MOST", 100)
    counts = EventCounts()
    for at in range(1000):
        events = [stored(at, tokens=range(at, at + 64)), removed(at)]
        counts.add(decode(msgspec.msgpack.encode([1.0, events, None])))
    (cache,) = counts._caches.values()
    assert len(cache._by_reset) == len(cache._beginnings) == 100
    assert not cache.present


def test_a_file_of_events_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "events"
    batches = [
        [100.0, [stored(0, 10)], 0],
        [110.0, [CLEARED], 0],
        [120.0, [stored(0, 10), removed(9)], 0],
    ]
    path.write_bytes(b"".join(map(msgspec.msgpack.encode, batches)))
    done = watch("--events", str(path))
    assert done.exit_code == 0, done.output
    for text in (
        "KV events, over 20 s: 3 batches",
        "stored          1,280 tokens, 64 a second",
        "  again         0.0% after eviction, 50.0% after a reset",
        "removed         64 tokens, 3 a second",
        "resets          1",
        "cached          576 tokens of those, in blocks of 64",
        "50.0% of the tokens stored had been cached before, and dropped when the cache was reset.",
    ):
        assert text in done.output
    assert "occupancy" not in done.output
    (tmp_path / "page").write_text(page(prompt=1000, found=10))
    both = json.loads(watch("--file", str(tmp_path / "page"), "--events", str(path), "--json").output)
    assert (both["hit_rate"], both["events"]["after_reset"]) == (0.01, 640)
    assert both["reasons"][0]["name"] == "reset"
    path.write_bytes(path.read_bytes() + msgspec.msgpack.encode([130.0, [{"type": "BlockStored"}], 0]))
    assert "batch 4: an event is malformed" in watch("--events", str(path)).output


def test_addresses() -> None:
    assert address("localhost:30000") == "http://localhost:30000/metrics"
    assert address("https://host/") == "https://host/metrics"
    assert address("http://host/other/metrics") == "http://host/other/metrics"
    with pytest.raises(MetricsError):
        address("")


def test_samples_survive_a_file(tmp_path: Path) -> None:
    one = sample(12.5, prompt=7)
    (tmp_path / "saved").write_text(saved(one))
    (found,) = load(tmp_path / "saved")
    assert (found.time, found.values) == (12.5, one.values)


@given(st.data())
def test_no_damage_to_a_page_ends_in_a_traceback(data: st.DataObject) -> None:
    text = page(prompt=1000, found=10, evicted=500)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(max_size=5)) + text[at + data.draw(st.integers(0, 9)) :]
    with contextlib.suppress(MetricsError):
        reasons(figures(parse(text, 0.0, "page")))
