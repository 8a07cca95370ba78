"""Writes requests to files in a thread of its own, which a server's requests never wait for."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from costcache._version import described
from costcache.recording.files import Files, FilesFullError
from costcache.recording.hashes import Hasher
from costcache.recording.lines import VERSION, Header, Line, Request
from costcache.recording.settings import read_salt

if TYPE_CHECKING:
    from costcache.recording.hashes import Content
    from costcache.recording.settings import RecordSettings
    from costcache.records import RequestInfo

__all__ = ["EPOCH", "Ended", "Recorder", "request_of"]

logger = logging.getLogger("costcache")

EPOCH = time.time() - time.perf_counter()
"""Unix time at which ``time.perf_counter()`` was 0. Requests are timed by that clock, since one that is set
meanwhile would change their order."""
_MOST_WAITING = 256 << 20
"""Bytes of requests that may wait to be written."""
_PATIENCE = 5.0
"""Seconds that the end of the process waits for the last requests."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended.

    Attributes:
        content: Its prompt and output.
        prompt: Tokens of the prompt.
        cached: Prompt tokens that the server found, None if unknown.
        arrived: Unix time of its arrival, in seconds.
        ended: Unix time of its end.
        info: What the policy hears of it.
    """

    content: Content
    prompt: int
    cached: int | None
    arrived: float
    ended: float
    info: RequestInfo


def request_of(ended: Ended, hasher: Hasher, block_size: int, started: float, dropped: int = 0) -> Request:
    """The line of a request: its tokens and names as salted hashes."""
    info = ended.info
    prompt, output = ended.content.numbers(hasher, block_size)
    returns = info.returns_after
    return Request(
        timestamp=round((ended.arrived - started) * 1000.0, 3),
        input_length=ended.prompt,
        output_length=info.output_tokens,
        hash_ids=prompt,
        output_ids=output,
        cached_tokens=ended.cached,
        service_ms=round(max(0.0, ended.ended - ended.arrived) * 1000.0, 3),
        finish_reason=info.finish_reason,
        session=None if info.session is None else hasher.name("session", info.session),
        tenant=None if info.tenant is None else hasher.name("tenant", info.tenant),
        priority=info.priority,
        session_ends=info.session_ends,
        returns_after=hasher.name("label", returns) if isinstance(returns, str) else returns,
        keep_seconds=info.keep_seconds,
        dropped=dropped,
    )


class Recorder:
    """Records the requests of one process, until its files are full or cannot be written.

    Args:
        settings: Where, and how much.
        page_size: Tokens per page of the server.
        facts: Further fields of the files' :class:`~costcache.recording.lines.Header`.

    Raises:
        SettingsError: A setting is wrong, or the folder cannot be written to.
    """

    def __init__(self, settings: RecordSettings, page_size: int, **facts: Any) -> None:
        self.block_size = settings.tokens_per_hash(page_size)
        self._hasher = Hasher(read_salt())
        self._started = EPOCH + time.perf_counter()
        header = Header(
            version=VERSION,
            started=round(self._started, 6),
            block_size=self.block_size,
            salt=self._hasher.fingerprint,
            costcache=described(),
            page_size=page_size,
            **facts,
        )
        self._encode = msgspec.json.Encoder().encode
        self._files = Files(
            settings.folder,
            self._encode(Line(recording=header)) + b"\n",
            settings.most_bytes,
            rotate=settings.when_full == "rotate",
        )
        self._queue: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._on = True
        # Each is written by one thread alone, so neither needs a lock.
        self._put = self._done = 0
        self._dropped = self._told = 0
        self._thread = threading.Thread(target=self._run, name="costcache-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        logger.info("costcache: requests are recorded in %s, without their tokens", self._files.path)

    def add(self, ended: Ended) -> None:
        """Record a request, soon; drop it if too many wait already."""
        if not self._on:
            return
        size = ended.content.size
        if self._put - self._done + size > _MOST_WAITING:
            if not self._dropped:
                logger.warning(
                    "costcache: requests end faster than they can be recorded; some are left out (said once)"
                )
            self._dropped += 1
            return
        self._put += size
        self._queue.put(ended)

    def close(self) -> None:
        """Write what waits, and end."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_PATIENCE)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while (ended := self._queue.get()) is not None:
                dropped, self._told = self._dropped - self._told, self._dropped
                request = request_of(ended, self._hasher, self.block_size, self._started, dropped)
                self._files.append(self._encode(Line(request=request)) + b"\n")
                self._done += ended.content.size
        except FilesFullError:
            logger.warning(
                "costcache: the recording in %s is full and ends; the server goes on", self._files.path
            )
        except Exception as error:
            logger.error(
                "costcache: the recording in %s ends, and the server goes on: %s", self._files.path, error
            )
        finally:
            self._on = False
            self._files.close()
            while not self._queue.empty():  # what came in between
                self._queue.get_nowait()
