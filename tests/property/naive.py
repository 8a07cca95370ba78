"""A prefix cache in its simplest form: a dictionary of prefixes, searched from end to end.

It keeps one entry for each cached page, named by the whole prefix up to its end, and the set of
prefixes at which a node ends. Each rule is written as the documentation says it, without a thought
of speed, so that the real cache can be compared with it step by step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Namespace = tuple[str | None, str | None]
Prefix = tuple[Namespace, tuple[int, ...]]
Gone = tuple[int, int, bool, int, int]
"""One victim: first token, tokens, trimmed, uses, recency."""


@dataclass
class Page:
    """A cached page and the history of its node, which all pages of a node share."""

    slots: tuple[int, ...]
    created: int
    creator: int
    uses: int = 1
    last_use: float = 0
    recency: int = 0
    priority: int = 0
    longest: int = 0
    merged: bool = False


@dataclass
class Place:
    """The end of a node, followed as the node is trimmed; None once the node was evicted."""

    prefix: Prefix | None


@dataclass
class Running:
    """A request."""

    number: int
    counted: int = 0
    windows_counted: int = 0
    branch: int = -1
    end: Place = field(default_factory=lambda: Place(None))


KEYS: dict[str, Callable[[Page, int, int, int], Any]] = {
    "lru": lambda page, start, end, slack: page.recency,
    "lfu": lambda page, start, end, slack: (page.uses, page.recency),
    "fifo": lambda page, start, end, slack: page.created,
    "mru": lambda page, start, end, slack: -page.recency,
    "filo": lambda page, start, end, slack: -page.created,
    "priority": lambda page, start, end, slack: (page.priority, page.recency),
    "slru": lambda page, start, end, slack: (1 if page.uses >= slack else 0, page.recency),
    "tlru": lambda page, start, end, slack: (
        -1 if (end > bound(page, slack) if page.merged else start >= bound(page, slack)) else 0,
        page.recency,
    ),
}
"""Rank of a leaf under each policy; the lowest is evicted first. ``slack`` is the policy's own number."""


def bound(page: Page, slack: int) -> int:
    """Tokens after which nothing is needed, under tlru."""
    return max(0, page.longest - slack)


class NaiveCache:
    """The model of a cache."""

    def __init__(
        self,
        capacity: int,
        page_size: int,
        policy: str,
        *,
        trim_step: int,
        slack: int = 0,
        headroom: float = 0.0,
        merge_from: float = math.inf,
        merge_alike: int = 8,
    ) -> None:
        self.page_size = page_size
        self.capacity = capacity // page_size * page_size
        self.policy = policy
        self.key = KEYS[policy]
        self.slack = slack
        self.trim_step = trim_step
        self.headroom = headroom
        self.merge_from = merge_from
        self.merge_alike = merge_alike
        self.pages: dict[Prefix, Page] = {}
        self.ends: set[Prefix] = set()
        self.pins: Counter[Prefix] = Counter()
        self.free: set[int] = set(range(self.capacity))
        self.reserved: set[int] = set()
        self.requests: dict[str, Running] = {}
        self.places: list[Place] = []
        self.begun = 0
        self.accesses = 0
        self.now: float = 0
        self.in_seconds = False

    # -- facts -------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def evictable(self) -> int:
        return self.cached - self.page_size * len(self.protected())

    def protected(self) -> set[Prefix]:
        """The pages that are part of a locked prefix."""
        size = self.page_size
        return {
            (space, tokens[:stop])
            for (space, tokens), count in self.pins.items()
            if count
            for stop in range(size, len(tokens) + 1, size)
        }

    def edges(self, prefix: Prefix) -> list[int]:
        """Ends of the nodes on the path to ``prefix``."""
        space, tokens = prefix
        return [n for n in range(1, len(tokens) + 1) if (space, tokens[:n]) in self.ends]

    def start(self, end: Prefix) -> int:
        """Start of the node that ends at ``end``."""
        return ([0, *self.edges(end)])[-2]

    def nodes(self) -> dict[Prefix, tuple[Any, ...]]:
        """Every node: its start, slots and history."""
        size, found = self.page_size, {}
        for space, tokens in self.ends:
            first = self.start((space, tokens))
            page = self.pages[space, tokens]
            inside = [self.pages[space, tokens[:n]] for n in range(first + size, len(tokens) + 1, size)]
            found[space, tokens] = (
                first,
                tuple(slot for part in inside for slot in part.slots),
                page.uses,
                page.last_use,
                page.recency,
                page.created,
                page.creator,
                page.priority,
            )
        return found

    # -- what callers do ---------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        if not self.in_seconds or seconds > self.now:
            self.now = seconds
        self.in_seconds = True

    def request(self, name: str | None) -> Running:
        if name is not None and name in self.requests:
            return self.requests[name]
        self.begun += 1
        if not self.in_seconds:
            self.now = self.begun
        made = Running(self.begun)
        if name is not None:
            self.requests[name] = made
        return made

    def place(self, prefix: Prefix) -> Place:
        """A handle of the node that ends at ``prefix``."""
        made = Place(prefix)
        self.places.append(made)
        return made

    def match(self, space: Namespace, tokens: Sequence[int], name: str | None) -> int:
        return self._walk(space, tuple(tokens), self.request(name))

    def insert(
        self,
        space: Namespace,
        tokens: Sequence[int],
        name: str | None,
        priority: int,
        given: Sequence[int] | None,
        took: Callable[[], Sequence[int]],
    ) -> tuple[int, int, list[Gone]]:
        """Returns tokens matched, tokens added and what was evicted for them.

        ``given`` are the caller's slots; without them ``took`` tells the slots that the cache chose.
        """
        whole, size = tuple(tokens), self.page_size
        whole = whole[: len(whole) // size * size]
        request = self.request(name)
        matched = self._walk(space, whole, request)
        for n in range(size, matched + 1, size):
            page = self.pages[space, whole[:n]]
            page.priority = max(page.priority, priority)
        gone: list[Gone] = []
        stop = len(whole)
        slots: Sequence[int]
        if given is None:
            if stop - matched > len(self.free):
                used = (space, whole[:matched])
                self.pins[used] += 1  # what it reuses must not go for it
                gone = self.evict(stop - matched - len(self.free))
                self.pins[used] -= 1
                stop = min(stop, matched + len(self.free) // size * size)
            slots = took() if stop > matched else ()
            assert set(slots) <= self.free, "the cache took a slot that was not free"
        else:
            slots = given[matched:stop]
        assert len(set(slots)) == stop - matched
        self.free -= set(slots)
        self.reserved -= set(slots)
        if stop > matched:
            for n in range(matched + size, stop + 1, size):
                self.pages[space, whole[:n]] = Page(
                    tuple(slots[n - size - matched : n - matched]),
                    created=self.accesses,
                    creator=request.number,
                    last_use=self.now,
                    recency=self.accesses,
                    priority=priority,
                )
            self.ends.add((space, whole[:stop]))
            for n in range(size, stop + 1, size):
                page = self.pages[space, whole[:n]]
                page.longest = max(page.longest, stop)
            request.counted = max(request.counted, stop)
            request.end = self.place((space, whole[:stop]))
        return matched, stop - matched, gone

    def finish(self, name: str, priority: int) -> None:
        end = self.requests.pop(name).end.prefix
        if end is not None and priority:  # 0 is what a request without a priority has
            for n in range(self.page_size, len(end[1]) + 1, self.page_size):
                page = self.pages[end[0], end[1][:n]]
                page.priority = max(page.priority, priority)

    def refresh(self, prefix: Prefix | None) -> None:
        self.accesses += 1
        if prefix is not None:
            for n in range(self.page_size, len(prefix[1]) + 1, self.page_size):
                self.pages[prefix[0], prefix[1][:n]].recency = self.accesses

    def reset(self) -> None:
        for page in self.pages.values():
            self.free |= set(page.slots)
        self.pages.clear()
        self.ends.clear()
        self.pins.clear()
        for place in self.places:
            place.prefix = None
        self.places.clear()
        for request in self.requests.values():
            request.counted = 0
            request.end = Place(None)

    def evict(self, shortfall: int) -> list[Gone]:
        """Evict by sorting all unlocked leaves again for each victim."""
        gone: list[Gone] = []
        if shortfall <= 0:
            return gone
        goal = min(shortfall + math.ceil(self.headroom * self.capacity), self.evictable)
        protected = self.protected()
        while goal > 0:
            size = self.page_size
            inner = {(space, tokens[:-size]) for space, tokens in self.pages}
            leaves = [end for end in self.ends if end not in inner and end not in protected]
            ranks = {
                end: self.key(self.pages[end], self.start(end), len(end[1]), self.slack) for end in leaves
            }
            assert len(set(ranks.values())) == len(leaves), "two leaves tie: the model cannot tell"
            victim = min(leaves, key=lambda end: ranks[end])
            gone.append(self._take(victim, min(goal, self._may_take(victim))))
            goal -= gone[-1][1]
        return gone

    # -- parts -------------------------------------------------------------------------------

    def _may_take(self, victim: Prefix) -> int:
        """Tokens that the policy gives of a leaf; the rest is worth more to it."""
        page, end = self.pages[victim], len(victim[1])
        last = end - bound(page, self.slack)
        return last if self.policy == "tlru" and page.merged and last > 0 else end

    def _walk(self, space: Namespace, tokens: tuple[int, ...], request: Running) -> int:
        size, stop = self.page_size, 0
        self.accesses += 1
        while stop + size <= len(tokens) and (space, tokens[: stop + size]) in self.pages:
            stop += size
        request.end = Place(None)
        if stop:
            self.ends.add((space, tokens[:stop]))
            request.end = self.place((space, tokens[:stop]))
        for first, last in self._nodes_to(space, tokens[:stop]):
            for n in range(first + size, last + 1, size):
                page = self.pages[space, tokens[:n]]
                page.recency = self.accesses
                if last > request.counted:
                    page.uses += 1
                    page.last_use = self.now
        request.counted = max(request.counted, stop)
        if stop:
            self._merge(space, tokens[:stop])
        return stop

    def _merge(self, space: Namespace, tokens: tuple[int, ...]) -> None:
        """Merge the nodes of a long path that have about the same uses, and that nothing branches off."""
        ends = self.edges((space, tokens))
        if len(ends) <= self.merge_from:
            return
        runs: list[list[int]] = [[ends[0]]]
        for before, end in pairwise(ends):
            first = self.pages[space, tokens[: runs[-1][0]]]
            last, page = self.pages[space, tokens[:before]], self.pages[space, tokens[:end]]
            size = before + self.page_size
            after = [
                t for s, t in self.pages if s == space and len(t) == size and t[:before] == tokens[:before]
            ]
            if (
                len(after) == 1
                and not self.pins[space, tokens[:before]]
                and last.priority == page.priority
                and (first.uses - page.uses) * self.merge_alike <= first.uses
                and self._joins(space, tokens, runs[-1][0], before, end)
            ):
                runs[-1].append(end)
            else:
                runs.append([end])
        if (len(ends) - len(runs)) * 8 < len(ends):
            return
        for run in runs:
            if len(run) == 1:
                continue
            whole, start = (space, tokens[: run[-1]]), self.start((space, tokens[: run[0]]))
            self._share(self.pages, space, tokens[: run[-1]], start)
            self._merged(space, tokens[: run[-1]], start)
            for end in run[:-1]:
                self.ends.discard((space, tokens[:end]))
                for place in self.places:
                    if place.prefix == (space, tokens[:end]):
                        place.prefix = whole

    def _joins(self, space: Namespace, tokens: tuple[int, ...], first: int, before: int, end: int) -> bool:
        """Whether a node may take over what is before it, by what else the nodes carry."""
        return True

    def _merged(self, space: Namespace, tokens: tuple[int, ...], start: int) -> None:
        """One node was made of all that is after ``start``."""

    def _share(
        self, pages: dict[Prefix, Page], space: Namespace, tokens: tuple[int, ...], start: int
    ) -> None:
        """Give the pages of a node that was merged one history: that of its last part, but for the uses."""
        last, size = pages[space, tokens], self.page_size
        parts = [pages[space, tokens[:n]] for n in range(start + size, len(tokens) + 1, size)]
        uses, longest = max(page.uses for page in parts), max(page.longest for page in parts)
        for page in parts:
            page.uses, page.longest, page.merged = uses, longest, True
            page.last_use, page.created, page.creator = last.last_use, last.created, last.creator

    def _nodes_to(self, space: Namespace, tokens: tuple[int, ...]) -> list[tuple[int, int]]:
        edges = self.edges((space, tokens))
        return list(zip([0, *edges], edges, strict=False))

    def _take(self, victim: Prefix, needed: int) -> Gone:
        space, tokens = victim
        page, start, size, step = self.pages[victim], self.start(victim), self.page_size, self.trim_step
        held = len(tokens) - start
        keep = (held - needed) // step * step if step and needed < held else 0
        for n in range(start + keep + size, len(tokens) + 1, size):
            self.free |= set(self.pages.pop((space, tokens[:n])).slots)
        self.ends.discard(victim)
        rest = (space, tokens[: start + keep]) if keep else None
        if rest is not None:
            self.ends.add(rest)
        for place in self.places:
            if place.prefix == victim:
                place.prefix = rest
        self.places = [place for place in self.places if place.prefix is not None]
        return start + keep, held - keep, keep > 0, page.uses, page.recency
