"""W-TinyLFU: a small window for new nodes, and a frequency sketch that decides who enters the main region."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.policies.queues import Entry, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["Sketch", "WTinyLFU", "WTinyLFUSettings"]

MOST = 15
"""Uses that four bits can count."""
ROWS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""An odd number for each row of the sketch: multiplicative hashing (Knuth, volume 3, 6.4)."""
HALVES = bytes(count >> 1 for count in range(256))
SMALLEST, LARGEST = 8, 16
"""Bits of the number of counters in a row, at the least and at the most."""


class WTinyLFUSettings(BaseModel):
    """Settings of ``wtinylfu``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: float = Field(0.01, gt=0.0, lt=1.0, description="Share of the pool that the window may take.")
    protected: float = Field(
        0.8, ge=0.0, le=1.0, description="Share of the main region for nodes that were hit there."
    )
    sample: int = Field(
        10,
        ge=1,
        description="Uses after which the sketch halves its counts, as a multiple of the cached nodes.",
    )


class Sketch:
    """Approximate recent uses by name: a count-min sketch of four rows (Cormode and Muthukrishnan 2005).

    Attributes:
        added: Uses counted since the counts were last halved.
    """

    __slots__ = ("_counts", "_shift", "_width", "added")

    def __init__(self, names: int) -> None:
        """Make room for about ``names`` names, with at most 65,536 counters per row: 256 KiB."""
        bits = min(max((names - 1).bit_length(), SMALLEST), LARGEST)
        self._width, self._shift = 1 << bits, 64 - bits
        self._counts = bytearray(self._width * len(ROWS))
        self.added = 0

    def cells(self, name: int) -> tuple[int, ...]:
        """Return the counters of a name, one per row."""
        shift, width = self._shift, self._width
        return tuple(
            row * width + ((name * odd & 0xFFFFFFFFFFFFFFFF) >> shift) for row, odd in enumerate(ROWS)
        )

    def estimate(self, cells: tuple[int, ...]) -> int:
        """Estimate the uses of a name; never too low, but for halving and for uses beyond 15."""
        counts = self._counts
        a, b, c, d = cells
        return min(counts[a], counts[b], counts[c], counts[d])

    def add(self, cells: tuple[int, ...]) -> None:
        """Count a use."""
        counts = self._counts
        for cell in cells:
            if counts[cell] < MOST:
                counts[cell] += 1
        self.added += 1

    def raise_to(self, cells: tuple[int, ...], uses: int) -> None:
        """Give a new name at least ``uses`` uses."""
        counts = self._counts
        for cell in cells:
            counts[cell] = max(counts[cell], uses)

    def forget(self) -> None:
        """Halve every count."""
        self._counts = self._counts.translate(HALVES)
        self.added //= 2


class Sketched(Entry):
    """An entry with the counters of its node in the sketch."""

    __slots__ = ("cells",)

    def __init__(self, record: NodeRecord, queue: Queue) -> None:
        super().__init__(record, queue)
        self.cells: tuple[int, ...] = ()


class WTinyLFU(QueueOrder):
    """Evicts the less used of two nodes once the window exceeds its share: its oldest, or the main region's.

    The window and the main region are LRU queues. The main region has two segments: a hit on probation
    protects a node, and what exceeds the protected segment is on probation again. Its oldest node is that of
    the probation segment, or of the protected one if the first is empty. If the window's oldest was used more
    often than that, it moves into the probation segment and the other is evicted. Otherwise it is evicted
    itself.

    Source: G. Einziger, R. Friedman and B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM
    Transactions on Storage 13(4), 2017. Parameters: the window's share, 1 % in the paper; the protected
    share of the main region, 80 % there; and the uses after which the sketch halves its counts, 10 times the
    size of the cache there. Counters have 4 bits.

    Departures: a prefix cache must cache what was computed, so admission became a choice between two
    victims, made when room is needed; nodes that overflow the window while nothing has to be evicted enter
    the main region unconditionally. Objects are nodes of tokens, compared one to one whatever their sizes,
    while queues are measured in tokens; only unlocked leaves are evicted, and a node whose turn comes while
    it is not evictable is next once it is. A use is counted once per request. The sketch knows nodes by their
    first page; the tail of a split inherits the uses. There is no doorkeeper. A victim costs O(1), amortised.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int = 1,
        window: float = 0.01,
        protected: float = 0.8,
        sample: int = 10,
    ) -> None:
        super().__init__()
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._window_share = capacity * window
        self._protected_share = (capacity - self._window_share) * protected
        self._sample = sample
        self._sketch = Sketch(capacity // page_size)
        self._contested = False

    def insert(self, record: NodeRecord) -> None:
        window = self._window
        if not self._contested:
            while window.tokens > self._window_share and (entry := window.oldest) is not None:
                self.move(entry, self._probation)
        self._contested = False
        entry = Sketched(record, window)
        entry.cells = self._cells(record)
        self._count(entry)
        self.enter(entry)

    def use(self, record: NodeRecord) -> None:
        entry: Sketched = record.data
        self._count(entry)
        if entry.queue is self._window:
            self.move(entry, self._window)
            return
        protected = self._protected
        self.move(entry, protected)
        while protected.tokens > self._protected_share and (oldest := protected.oldest) is not None:
            self.move(oldest, self._probation)

    def refresh(self, record: NodeRecord) -> None:
        self.move(record.data, record.data.queue)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        super().split(prefix, tail)
        entry: Sketched = tail.data
        prefix.data.cells, entry.cells = entry.cells, self._cells(tail)
        self._sketch.raise_to(entry.cells, self._sketch.estimate(prefix.data.cells))

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        tail.data.cells = prefix.data.cells
        super().merge(prefix, tail)

    def next_victim(self, pool: str) -> Victim | None:
        self._contested = True
        window, rest = self._window, None
        candidate = self.oldest(window) if window.tokens > self._window_share else None
        rest = self.oldest(self._probation) or self.oldest(self._protected)
        if isinstance(candidate, Sketched) and isinstance(rest, Sketched):
            estimate = self._sketch.estimate
            if estimate(candidate.cells) > estimate(rest.cells):
                self.move(candidate, self._probation)
            else:
                rest = candidate
        entry = rest or candidate or self.oldest(window)
        if entry is None:
            self._named = None
            return None
        return self.name(entry)

    def _cells(self, record: NodeRecord) -> tuple[int, ...]:
        name = record.prefix_hash()
        return self._sketch.cells(record.serial if name is None else name)

    def _count(self, entry: Sketched) -> None:
        sketch = self._sketch
        sketch.add(entry.cells)
        if sketch.added >= self._sample * max(self._entries, 64):
            sketch.forget()


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "wtinylfu": PolicySpec(
            lambda cost, pools, settings: WTinyLFU(
                pools[0].capacity, pools[0].page_size, settings.window, settings.protected, settings.sample
            ),
            "The less used of the window's oldest and the main region's oldest.",
            WTinyLFUSettings,
        )
    }
