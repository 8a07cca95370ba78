"""Follows a real publisher of KV events in the tests of both servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from costcache.monitor.events import EventFigures
from costcache.monitor.subscribing import Subscription

__all__ = ["Followed"]

_PATIENCE = 30.0


class Followed:
    """A subscription to a publisher of the test's own process.

    Args:
        endpoint: Where it publishes.
        publish: Publishes a batch of events.
        save: File that batches are appended to.
    """

    def __init__(self, endpoint: str, publish: Callable[[list[Any]], None], save: Path) -> None:
        self.subscription = Subscription((endpoint,), str(save))
        self.publish = publish
        self.join()

    def join(self) -> None:
        """Wait until what is published arrives: what was published before is not."""
        end, counts = time.monotonic() + _PATIENCE, self.subscription.counts
        before = counts.batches
        while counts.batches == before:
            assert time.monotonic() < end, "nothing arrives"
            self.publish([])
            self.subscription.listen(0.05)
        # Those that were published while it waited are still on their way.
        self.subscription.listen(0.2)
        counts.batches = counts.lost = 0

    def figures(self, batches: int) -> EventFigures:
        """Figures of as many batches, once they have arrived."""
        end = time.monotonic() + _PATIENCE
        while self.subscription.counts.batches < batches:
            assert time.monotonic() < end, "a batch is missing"
            self.subscription.listen(0.05)
        return self.subscription.counts.take(1.0)
