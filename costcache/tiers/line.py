"""A link between two neighbouring tiers of memory: the thread that copies, and the estimate of its speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from costcache.radix.node import shared_pages
from costcache.tiers.copies import Copies, Job
from costcache.tiers.links import Link

if TYPE_CHECKING:
    from costcache.tiers.tier import Place

__all__ = ["Line"]


class Line:
    """A link, its queue, and what is on its way down.

    Attributes:
        copies: The thread and its queue.
        link: Speed and queue; told of transfers when all ranks have finished them.
        writes: Prefixes that are being copied down.
    """

    def __init__(self, copies: Copies, bytes_per_second: float) -> None:
        self.copies = copies
        self.link = Link(bytes_per_second)
        self.writes: list[Place] = []

    def submit(self, work: Callable[[], int], collected: Callable[[int], object], size: int) -> Job:
        """Queue a copy of ``size`` bytes."""
        self.link.begin(size, 0.0)
        job = Job(work, collected, size)
        self.copies.submit(job)
        return job

    def covered(self, place: Place, page_bytes: int, page_size: int) -> int:
        """Tokens of a prefix that copies under way will have brought down, if none of them fails."""
        best = 0
        for other in self.writes:
            if other.namespace == place.namespace:
                pages = shared_pages(place.key, memoryview(other.key), page_bytes)
                best = max(best, pages * page_size)
        return best
