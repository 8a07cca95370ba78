"""ARC: one LRU queue of nodes used once and one of nodes used again, in shares that adapt by their ghosts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from costcache.hookspecs import hookimpl
from costcache.policies.ghosts import Ghosts
from costcache.policies.queues import Entry, Queue, QueueOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

__all__ = ["ARC"]


class ARC(QueueOrder):
    """Evicts the least recent of the nodes used once while they exceed their share, else of those used again.

    Two LRU queues hold the nodes that one request has used and those that several have (T1 and T2 in the
    paper). Each queue has ghosts of what was evicted from it (B1 and B2). The share of the first queue, p,
    starts at 0. It rises whenever a ghost of the first queue is cached again, and falls whenever one of the
    second is; the fewer ghosts that list has beside the other, the larger the step. A node with a ghost has
    been used before, so it enters the second queue.

    Source: N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003,
    figure 4. No parameters.

    Departures: objects are nodes of tokens, so queues, ghosts and p are measured in tokens, and a step is
    the paper's times the tokens that were found. Room is made before a node is cached, so p moves after the
    eviction that the node causes, not before it, and the rule for ``|T1| = p`` is left out. Only unlocked
    leaves are evicted, and a node whose turn comes while it is not evictable is next once it is; if a queue
    has nothing evictable, the other one is asked. A use is counted once per request. A node is known by its
    first page, and ghosts that continue it are found too; what was trimmed off a node is known as its next
    only child, whatever that holds. A victim costs O(1), amortised.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._once, self._again = Queue(), Queue()
        # The bounds depend on the queues and are kept by _fit. The memory is the tokens, which may have been
        # cached as several nodes or trimmed off one. A hash is a name, and minus a serial number is that of
        # what was trimmed off a cached node.
        self._ghosts_once: Ghosts[int] = Ghosts(math.inf)
        self._ghosts_again: Ghosts[int] = Ghosts(math.inf)
        self._share = 0.0

    def insert(self, record: NodeRecord) -> None:
        found = self._recall(record)
        self.enter(Entry(record, self._again if found or record.uses > 1 else self._once))
        self._fit()

    def use(self, record: NodeRecord) -> None:
        self.move(record.data, self._again)

    def refresh(self, record: NodeRecord) -> None:
        self.move(record.data, record.data.queue)

    def trim(self, record: NodeRecord, tokens: int) -> None:
        super().trim(record, tokens)
        self._remember(record, -record.serial, tokens)

    def remove(self, record: NodeRecord) -> None:
        self._remember(record, record.prefix_hash(), record.tokens)
        super().remove(record)

    def next_victim(self, pool: str) -> Victim | None:
        first, second = self._again, self._once
        if second.tokens > self._share:
            first, second = second, first
        entry = self.oldest(first) or self.oldest(second)
        if entry is None:
            self._named = None
            return None
        return self.name(entry)

    def load(self, records: Iterable[NodeRecord]) -> None:
        super().load(sorted(records, key=lambda record: record.recency))

    def _remember(self, record: NodeRecord, name: int | None, tokens: int) -> None:
        """Make a ghost of evicted tokens and of what had been trimmed off behind them."""
        trimmed = -record.serial
        tokens += self._ghosts_once.take(trimmed) or self._ghosts_again.take(trimmed) or 0
        once = record.data.queue is self._once
        ghosts, others = self._ghosts_once, self._ghosts_again
        if not once:
            ghosts, others = others, ghosts
        others.take(name)
        ghosts.keep(name, tokens, tokens)

    def _recall(self, record: NodeRecord) -> bool:
        """Take the ghosts of a new node and adapt the share; returns whether its first page had one."""
        if not (self._ghosts_once.tokens or self._ghosts_again.tokens):
            return False
        parent, tokens, found = record.parent, record.tokens, 0
        if parent is not None and parent.live_children == 1:
            found = self._adapt(-parent.serial, tokens)
        while found < tokens:
            more = self._adapt(record.prefix_hash(found), tokens - found)
            if not more:
                break
            found += more
        return found > 0

    def _adapt(self, name: int | None, most: int) -> int:
        """Take one ghost and move the share; returns the tokens of it that were found, up to ``most``."""
        once, again = self._ghosts_once.tokens, self._ghosts_again.tokens
        if tokens := self._ghosts_once.take(name):
            tokens = min(tokens, most)
            self._share = min(self._capacity, self._share + tokens * max(1.0, again / once))
            return tokens
        if tokens := self._ghosts_again.take(name):
            tokens = min(tokens, most)
            self._share = max(0.0, self._share - tokens * max(1.0, once / again))
            return tokens
        return 0

    def _fit(self) -> None:
        """Bound what is remembered: |T1| + |B1| by the capacity, and all four lists by twice as much."""
        once, capacity = self._once.tokens, self._capacity
        self._ghosts_once.fit(max(0, capacity - once))
        cached = once + self._again.tokens
        self._ghosts_again.fit(max(0, 2 * capacity - cached - self._ghosts_once.tokens))


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "arc": PolicySpec(
            lambda cost, pools, settings: ARC(pools[0].capacity),
            "Least recent of the nodes used once or of those used again, in shares that adapt.",
        )
    }
