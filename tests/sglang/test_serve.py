"""`sglang serve` over HTTP, as a user starts it."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from costcache.monitor.figures import figures
from costcache.monitor.reasons import reasons
from costcache.monitor.samples import parse
from tests.sglang.engine import environment
from tests.sglang.tiny_models import write_model

FLAGS = shlex.split(
    "--device cpu --load-format dummy --skip-tokenizer-init --attention-backend torch_native "
    "--sampling-backend pytorch --grammar-backend none --disable-cuda-graph --disable-overlap-schedule "
    "--max-total-tokens 1024 --max-running-requests 4 --context-length 2048 --mem-fraction-static 0.3 "
    "--dtype float32 --skip-server-warmup --enable-metrics --host 127.0.0.1"
)
SECONDS_TO_START = 300


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(url: str, data: Any = None, timeout: float = 60) -> str:
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return str(answer.read().decode())


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[str, Path]]:
    """A server's address and its log, which ends with the block."""
    port = free_port()
    log = folder / "serve.log"
    words = ["serve", "--model-path", str(write_model("mla", folder)), *FLAGS, "--port", str(port), *flags]
    program = "from sglang.cli.main import main; main()"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env=environment(folder),
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + SECONDS_TO_START
        while True:
            if server.poll() is not None or time.monotonic() > until:
                break
            try:
                ask(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield url, log
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.mark.engine
def test_the_second_of_two_equal_prompts_is_cached(tmp_path: Path) -> None:
    config = json.dumps({"headroom": 0.05, "core": "python"})
    with serving(
        tmp_path, "--radix-eviction-policy", "costcache", "--radix-eviction-policy-config", config
    ) as (url, log):
        prompt = {
            "input_ids": list(range(3, 203)),
            "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        }
        answers = [json.loads(ask(f"{url}/generate", prompt)) for _ in range(2)]
        others = [
            json.loads(ask(f"{url}/generate", {**prompt, "input_ids": list(range(start, start + 190))}))
            for start in range(210, 300, 15)
        ]
        metrics = ask(f"{url}/metrics")
    text = log.read_text()
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 199], text[-4000:]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert len(others) == 6
    (line,) = [line for line in text.splitlines() if ": plugin " in line]
    for words in ("plugin 'mla'", "policy 'hazard'", "384 B per token", "cost model: 384", "class CostCache"):
        assert words in line
    assert "impl=CostCache" in text
    assert "sglang:evicted_tokens_total" in metrics
    assert "costcache:evictions_total{" in metrics
    assert "costcache:decision_seconds_bucket{" in metrics
    watched = figures(parse(metrics, 0.0, url))
    assert (watched.server, watched.policy, watched.lru) == ("sglang", "hazard", False)
    assert (watched.prompt_tokens, watched.found_tokens) == (2 * 200 + 6 * 190, 199)
    assert (watched.requests, watched.capacity, watched.page_size) == (8, 1024, 1)
    assert watched.evicted > 0
    assert watched.occupied is not None
    assert 0.5 < watched.occupied <= 1.0
    assert "evicted" in [reason.name for reason in reasons(watched)]
