"""Runs one Engine in a separate process: it starts, warms up, and replays requests on demand.

The Engine is a server without HTTP: the same scheduler, cache and model runner. A driver talks to it over a
pipe, so that several Engines can start at once on one GPU and then take turns.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

__all__ = ["Job", "Server", "main"]


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


def main(pipe: Connection, kind: type[Server], arguments: dict[str, Any], log: Path) -> None:
    """Run an Engine until the pipe closes.

    The first answer says that the Engine is up. Each job is answered with its figures, or ``{"error": ...}``.

    Args:
        pipe: Pipe to the driver.
        kind: Which server it is.
        arguments: Arguments of the Engine, see :meth:`Server.arguments`.
        log: File for the Engine's output.
    """
    file = log.open("w")
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())
    server = None
    try:
        began = time.perf_counter()
        server = kind(arguments, log)
        server.warm_up()
        pipe.send({"seconds": round(time.perf_counter() - began, 1), "packages": packages(kind.packages)})
        while True:
            pipe.send(server.run(pipe.recv()))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        pipe.send({"error": traceback.format_exc(limit=-4)})
        raise
    finally:
        if server is not None:
            server.shutdown()


class Server(ABC):
    """An Engine, warmed up and measured.

    Attributes:
        defaults: Arguments of the Engine, unless others are given.
        stock: Name of the server's own policy.
        counted: Prefixes of the metrics that are reported.
        packages: What is measured, beside costcache.
        loop: Event loop of the Engine.
        most: Tokens of a prompt in the warm-up, at most.
    """

    defaults: ClassVar[dict[str, Any]]
    stock: ClassVar[str]
    counted: ClassVar[tuple[str, ...]]
    packages: ClassVar[tuple[str, ...]]
    loop: asyncio.AbstractEventLoop
    most: int

    @abstractmethod
    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        """Start the Engine.

        Args:
            arguments: What :meth:`arguments` gave, and any that replace them.
            log: File for the Engine's output; other files may be put beside it.
        """

    @staticmethod
    @abstractmethod
    def arguments(
        model: Path, pool: int, policy: str, settings: dict[str, Any], number: int, more: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments of an Engine, apart from the defaults.

        Args:
            model: Folder of the model.
            pool: Size of the pool in tokens.
            policy: Name of the policy.
            settings: Settings of the policy.
            number: Number of the Engine, from 0, for what two may not share.
            more: Arguments of the user, which come before all others.
        """

    @abstractmethod
    async def one(self, prompt: list[int], output: int) -> dict[str, float]:
        """Answer a request with so many tokens, and return its figures."""

    @abstractmethod
    def empty(self) -> bool:
        """Empty the cache, which also resets the policy; False if a request still uses it."""

    def from_host(self, found: dict[str, Any]) -> float:
        """Tokens that were loaded from host memory, by the figures of a run."""
        return sum(each.get("host", 0.0) for each in found["requests"])

    @abstractmethod
    def samples(self) -> Iterable[Any]:
        """Prometheus's samples of the server's metrics."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the Engine."""

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
        """Empty the cache.

        Raises:
            RuntimeError: If the Engine does not empty it.
        """
        for _ in range(20):
            if self.empty():
                return
            time.sleep(0.1)  # a request that has answered may not have been released yet
        raise RuntimeError("the cache could not be flushed: a request still uses it")

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
        metrics = {name: value - before.get(name, 0.0) for name, value in after.items()}
        found = {"seconds": seconds, "requests": answers, "metrics": metrics}
        return {**found, "host": self.from_host(found)}

    def _replay(self, job: Job) -> list[dict[str, float]]:
        return self.loop.run_until_complete(self._clients(job) if job.clients else self._open(job))

    async def _open(self, job: Job) -> list[dict[str, float]]:
        began = time.perf_counter()

        async def at(number: int) -> dict[str, float]:
            due = job.times[number]
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
            late = time.perf_counter() - began - due
            return {**await self.one(job.prompts[number], job.outputs[number]), "late": late}

        return list(await asyncio.gather(*map(at, range(len(job.prompts)))))

    async def _clients(self, job: Job) -> list[dict[str, float]]:
        answers: list[dict[str, float]] = [{}] * len(job.prompts)
        left = iter(range(len(job.prompts)))

        async def client() -> None:
            for number in left:
                answers[number] = await self.one(job.prompts[number], job.outputs[number])

        await asyncio.gather(*(client() for _ in range(job.clients or 1)))
        return answers

    def _counters(self) -> dict[str, float]:
        """The server's metrics so far, summed over ranks, by name and bucket."""
        found: dict[str, float] = {}
        for sample in self.samples():
            if sample.name.startswith(self.counted):
                bucket = sample.labels.get("le")
                name = sample.name if bucket is None else f"{sample.name}<={bucket}"
                found[name] = found.get(name, 0.0) + sample.value
        return found


def packages(names: Iterable[str]) -> dict[str, str]:
    """Versions of the packages of these names, costcache's build, and the GPU's name and driver."""
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    from costcache._version import described

    found = {"python": sys.version.split()[0], "costcache": described()}
    for name in (*names, "torch", "triton", "transformers"):
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
