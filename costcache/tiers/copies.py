"""Copies beside the scheduler: one thread per link, which touches buffers and files and never the tree.

What a copy did is collected on the caller's thread, in the order of submission.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from costcache.errors import one_line

__all__ = ["Copies", "Job"]

logger = logging.getLogger("costcache")


class Job:
    """One copy.

    Attributes:
        work: Called in the thread of the link; returns how much was copied, in units of the job's own.
        collected: Called on the caller's thread with what was copied on every rank.
        size: Bytes to copy.
        result: What was copied; 0 if it failed.
        seconds: Seconds that the copy took.
    """

    __slots__ = ("after", "collected", "result", "seconds", "size", "work")

    def __init__(self, work: Callable[[], int], collected: Callable[[int], object], size: int) -> None:
        self.work = work
        self.collected = collected
        self.size = size
        self.result = 0
        self.seconds = 0.0
        self.after: Any = None  # event of the caller's CUDA stream: what it wrote before


class Copies:
    """The copies of one link, done one after the other by a thread of its own.

    Attributes:
        name: Name of the link, for messages.
        submitted: Jobs submitted so far.
        finished: Jobs finished so far.
        taken: Jobs collected so far.
        in_flight: Bytes of the jobs that were not collected yet.
        failed: Jobs that raised.
        before: Called in the thread before each copy; for tests that delay copies.
    """

    def __init__(self, name: str, device: Any = None) -> None:
        """Start the thread.

        Args:
            name: Name of the link.
            device: A CUDA device, to copy on a stream of its own; None for the CPU.
        """
        self.name = name
        self.submitted = self.finished = self.taken = 0
        self.in_flight = 0
        self.failed = 0
        self.before: Callable[[Job], object] | None = None
        self._device = device
        self._jobs: deque[Job] = deque()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"costcache-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a copy. On a CUDA device it begins after what the caller's stream has queued so far."""
        if self._device is not None:
            import torch

            job.after = torch.cuda.current_stream(self._device).record_event()
        self.submitted += 1
        self.in_flight += job.size
        self._jobs.append(job)
        self._queue.put(job)

    def ready(self) -> int:
        """Jobs that have finished and were not collected, in order."""
        return self.finished - self.taken

    def take(self, count: int) -> list[Job]:
        """The ``count`` oldest jobs, which must have finished."""
        jobs = [self._jobs.popleft() for _ in range(count)]
        self.taken += count
        self.in_flight -= sum(job.size for job in jobs)
        return jobs

    def wait(self, number: int, timeout: float | None = None) -> bool:
        """Wait until so many jobs have finished since the start; False after ``timeout`` seconds."""
        with self._progress:
            return self._progress.wait_for(lambda: self.finished >= number, timeout)

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        stream: Any = contextlib.nullcontext()
        if self._device is not None:
            import torch

            own = torch.cuda.Stream(self._device)
            stream = torch.cuda.stream(own)
        with stream:
            while (job := self._queue.get()) is not None:
                began = time.perf_counter()
                try:
                    if self.before is not None:
                        self.before(job)
                        began = time.perf_counter()
                    if job.after is not None:
                        own.wait_event(job.after)
                    job.result = job.work()
                    if self._device is not None:
                        own.synchronize()
                except (
                    BaseException
                ) as error:  # also SystemExit of a backend: the scheduler must not wait for ever
                    job.result = 0
                    self._report(error)
                job.seconds = time.perf_counter() - began
                with self._progress:
                    self.finished += 1
                    self._progress.notify_all()

    def _report(self, error: BaseException) -> None:
        self.failed += 1
        text = one_line(error)
        if text not in self._told:
            self._told.add(text)
            logger.warning(
                "a copy over link %r failed: %s; its tokens are computed again when they are asked for",
                self.name,
                text,
            )
