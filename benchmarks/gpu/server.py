"""Runs one Engine in a separate process: it starts, warms up, and replays requests on demand.

The Engine is SGLang's server without HTTP: the same scheduler, cache and model runner. A driver talks to it
over a pipe, so that several Engines can start at once on one GPU and then take turns.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Job", "main"]

COUNTED = ("costcache:", "sglang:evict")
"""Prefixes of the metrics that are reported."""


@dataclass(frozen=True)
class Job:
    """Requests to replay.

    Attributes:
        prompts: Token ids of each prompt.
        outputs: Tokens to generate for each.
        times: When to send each, in seconds.
        clients: Keep so many requests running and send the next when one ends; None to send by ``times``.
    """

    prompts: list[list[int]]
    outputs: list[int]
    times: list[float]
    clients: int | None = None


def main(pipe: Connection, arguments: dict[str, Any], log: Path) -> None:
    """Run an Engine until the pipe closes.

    The first answer says that the Engine is up. Each job is answered with its figures, or ``{"error": ...}``.

    Args:
        pipe: Pipe to the driver.
        arguments: Arguments of the Engine.
        log: File for the Engine's output.
    """
    file = log.open("w")
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())
    metrics = log.with_suffix(".metrics")
    metrics.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)  # before anything imports prometheus_client
    try:
        began = time.perf_counter()
        server = Server(arguments, metrics)
        server.warm_up()
        pipe.send({"seconds": round(time.perf_counter() - began, 1), "packages": packages()})
        while True:
            pipe.send(server.run(pipe.recv()))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        pipe.send({"error": traceback.format_exc(limit=-4)})
        raise
    server.engine.shutdown()


class Server:
    """An Engine, warmed up and measured."""

    def __init__(self, arguments: dict[str, Any], metrics: Path) -> None:
        import sglang

        self.engine = sglang.Engine(**arguments)
        self.loop: asyncio.AbstractEventLoop = self.engine.loop
        self.metrics = metrics
        self.most = int(arguments.get("max_total_tokens") or 8192) // 2

    def warm_up(self) -> None:
        """Make the Engine compile kernels and reserve memory: prompts of all lengths, and many at once."""
        rng = np.random.default_rng(1)

        def draw(size: int) -> list[int]:
            tokens: list[int] = rng.integers(10, 400, size).tolist()
            return tokens

        lengths = [min(size, self.most) for size in (16, 100, 300, 700, 1500, 3000, 6000, 300)]
        alone = Job([draw(size) for size in lengths], [4] * len(lengths), [0.0] * len(lengths), clients=1)
        shared = draw(min(1000, self.most))
        many = [shared + draw(size) for size in (10, 40, 90, 200) * 8]
        self._replay(alone)
        self._replay(Job(many, [8] * len(many), [0.0] * len(many), clients=16))
        self.flush()

    def flush(self) -> None:
        """Empty the cache, which also resets the policy.

        Raises:
            RuntimeError: If the Engine does not empty it.
        """
        for _ in range(20):
            answer = self.engine.flush_cache()
            if getattr(answer, "success", True):
                return
            time.sleep(0.1)  # a request that has answered may not have been released yet
        raise RuntimeError(f"the cache could not be flushed: {answer}")

    def run(self, job: Job) -> dict[str, Any]:
        """Replay a job on a warmed-up Engine with an empty cache."""
        self.warm_up()
        before = self._counters()
        gc.collect()
        gc.disable()
        try:
            began = time.perf_counter()
            answers = self._replay(job)
            seconds = time.perf_counter() - began
        finally:
            gc.enable()
        after = self._counters()
        return {
            "seconds": seconds,
            "requests": answers,
            "metrics": {name: value - before.get(name, 0.0) for name, value in after.items()},
        }

    def _replay(self, job: Job) -> list[dict[str, float]]:
        return self.loop.run_until_complete(self._clients(job) if job.clients else self._open(job))

    async def _open(self, job: Job) -> list[dict[str, float]]:
        began = time.perf_counter()

        async def at(number: int) -> dict[str, float]:
            due = job.times[number]
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
            late = time.perf_counter() - began - due
            return {**await self._one(job.prompts[number], job.outputs[number]), "late": late}

        return list(await asyncio.gather(*map(at, range(len(job.prompts)))))

    async def _clients(self, job: Job) -> list[dict[str, float]]:
        answers: list[dict[str, float]] = [{}] * len(job.prompts)
        left = iter(range(len(job.prompts)))

        async def client() -> None:
            for number in left:
                answers[number] = await self._one(job.prompts[number], job.outputs[number])

        await asyncio.gather(*(client() for _ in range(job.clients or 1)))
        return answers

    async def _one(self, prompt: list[int], output: int) -> dict[str, float]:
        sampling = {
            "max_new_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream_interval": 1 << 20,  # sends the first token at once, and all others together
        }
        sent = time.perf_counter()
        first = 0.0
        seen: dict[str, Any] = {}
        chunks: AsyncIterator[dict[str, Any]] = await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True
        )
        async for chunk in chunks:
            first = first or time.perf_counter()
            seen = chunk["meta_info"]
        ended = time.perf_counter()
        return {
            "prompt": seen["prompt_tokens"],
            "cached": seen["cached_tokens"],
            "host": (seen.get("cached_tokens_details") or {}).get("host", 0),
            "output": seen["completion_tokens"],
            "ttft": first - sent,
            "seconds": ended - sent,
        }

    def _counters(self) -> dict[str, float]:
        """SGLang's metrics so far, summed over ranks, by name and bucket."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.metrics))
        found: dict[str, float] = {}
        for family in registry.collect():
            if family.name.startswith(COUNTED):
                for sample in family.samples:
                    bucket = sample.labels.get("le")
                    name = sample.name if bucket is None else f"{sample.name}<={bucket}"
                    found[name] = found.get(name, 0.0) + sample.value
        return found


def packages() -> dict[str, str]:
    """Versions of the measured packages, costcache's build, and the GPU's name and driver."""
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    from costcache._version import described

    found = {"python": sys.version.split()[0], "costcache": described()}
    for name in ("sglang", "sglang-kernel", "torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return found
