"""An offline reference policy for models with states: knows the future and decides greedily."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from costcache.policies.states import StateOrder

if TYPE_CHECKING:
    from costcache.records import NodeRecord, RequestInfo, RequestRecord
    from costcache.sim.runs import PageRuns

__all__ = ["Clairvoyant"]


class Clairvoyant(StateOrder):
    """Evicts the entry that saves the fewest tokens per byte and per request until its known next use.

    With states the entries of a cache differ in size and cost, and no rule is known to be optimal. This one
    is greedy: another order may hit more, so it bounds online policies in practice only.
    """

    period = 4

    def __init__(self, runs: PageRuns, page_size: int, kv_bytes: int, state_bytes: int) -> None:
        super().__init__()
        self._request = 0  # number of the running request, from 0
        self._page_size, self._kv_bytes, self._state_bytes = page_size, kv_bytes, state_bytes
        self._runs = runs
        self._offsets = runs.offsets.tolist()
        self._ends: tuple[int, list[int]] = (-1, [])  # of the runs of a request
        self._next: dict[int, int] = {}

    def insert(self, record: NodeRecord) -> None:
        """See the base class."""
        self._look(record)
        super().insert(record)

    def touch(self, record: NodeRecord) -> None:
        """See the base class."""
        self._look(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:  # noqa: ARG002  # its next use is the same
        """See the base class."""
        self._look(prefix)

    def remove(self, record: NodeRecord) -> None:
        """See the base class."""
        self._next.pop(record.serial, None)
        super().remove(record)

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """See the base class."""
        self._request = request.number  # counted from 1, so this is the next one
        super().finish(request, info)

    def _look(self, record: NodeRecord) -> None:
        runs, request = self._runs, self._request
        start = self._offsets[request]
        if self._ends[0] != request:
            visits = runs.visits[start : self._offsets[request + 1]]
            self._ends = request, runs.ends[visits].tolist()
        self._next[record.serial] = int(
            runs.following[start + bisect_left(self._ends[1], record.end // self._page_size)]
        )

    def score(self, record: NodeRecord) -> float:
        """See the base class."""
        following = self._next[record.serial]
        if following == len(self._offsets) - 1:  # never
            return 0.0
        freed = self._state_bytes + (0 if record.live_children else record.tokens * self._kv_bytes)
        return record.replay / (freed * max(1, following - self._request))
