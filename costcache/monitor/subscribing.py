"""Subscribes to the KV events of a running server, over ZeroMQ."""

from __future__ import annotations

import os
import time
from typing import Any, Self

import msgspec

from costcache.monitor.events import EventCounts
from costcache.monitor.samples import MetricsError
from costcache.sim.recordings.published import decode

__all__ = ["SCHEMES", "Subscription"]

SCHEMES = ("tcp://", "ipc://")
"""Beginnings of addresses that can be subscribed to."""
_WAITING = 100_000
"""Batches that may wait to be read, as many as a publisher keeps."""
_FRAMES = 3
_NUMBER_BYTES = 8


class Subscription:
    """Counts the KV events of a server's publishers, one address per data-parallel rank.

    Args:
        addresses: Such as ``tcp://127.0.0.1:5557``.
        save: File that published batches are appended to; None for none. They hold tokens.

    Attributes:
        counts: The counts.

    Raises:
        MetricsError: An address is none, the file cannot be written, or pyzmq is missing; says what to do.
    """

    def __init__(self, addresses: tuple[str, ...], save: str | None = None) -> None:
        try:
            import zmq
        except ImportError:
            raise MetricsError(
                "--events of a running server needs the package pyzmq: pip install 'costcache[watch]'"
            ) from None
        self.counts = EventCounts()
        self._file = _opened(save)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._expected: dict[tuple[Any, bytes], int] = {}
        self._addresses: dict[Any, str] = {}
        for address in addresses:
            socket = self._context.socket(zmq.SUB)
            socket.set_hwm(_WAITING)
            socket.linger = 0
            self._addresses[socket] = address
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                self.close()
                raise MetricsError(
                    f"--events is {address!r} ({error}): give the publisher's address, such as "
                    "tcp://127.0.0.1:5557"
                ) from None
            socket.subscribe(b"")
            self._poller.register(socket, zmq.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unsubscribe."""
        for socket in self._addresses:
            socket.close()
        self._context.term()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def listen(self, seconds: float) -> None:
        """Count what is published in the next ``seconds``.

        Raises:
            MetricsError: What arrives is no KV event.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for socket, _ in self._poller.poll(1000 * left):
                self._take(socket, socket.recv_multipart())

    def _take(self, socket: Any, frames: list[bytes]) -> None:
        address = self._addresses[socket]
        try:
            if len(frames) != _FRAMES or len(frames[1]) != _NUMBER_BYTES:
                raise ValueError(f"a message of {len(frames)} frames")
            topic, number, payload = frames[0], int.from_bytes(frames[1], "big"), frames[2]
            batch = decode(payload)
            expected = self._expected.get((socket, topic))
            self._expected[socket, topic] = number + 1
            if expected is not None and number < expected:
                self.counts.restarted(address)
            elif expected is not None:
                self.counts.lost += number - expected
            self.counts.add(batch, address)
        except (ValueError, TypeError, KeyError, msgspec.DecodeError) as error:
            raise MetricsError(
                f"{address}: publishes no KV events ({error!r}); give the endpoint of --kv-events-config"
            ) from None
        if self._file is not None:
            _append(self._file, payload)


def _opened(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        # Nobody else may read it: it holds the tokens of prompts.
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise MetricsError(
            f"--save-events {path}: cannot be written ({error.strerror}); check the path"
        ) from error


def _append(file: int, payload: bytes) -> None:
    try:
        while payload:
            payload = payload[os.write(file, payload) :]
    except OSError as error:
        raise MetricsError(f"--save-events: cannot be written ({error.strerror}); make room") from error
