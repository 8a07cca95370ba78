"""A prefix cache with a pool of sliding windows, in its simplest form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.property.naive import Gone, NaiveCache, Namespace, Page, Prefix, Running

WindowGone = tuple[int, int, bool]
"""One victim of the pool of windows: first token, tokens, whether its leaf went with it."""


class NaiveWindows(NaiveCache):
    """The model of a cache with two pools.

    ``windows`` has an entry for each page whose window KV is cached, named like the page.
    """

    def __init__(self, capacity: int, page_size: int, policy: str, *, window: int, room: int, **more: Any):
        super().__init__(capacity, page_size, policy, **more)
        self.window = window
        self.room = room // page_size * page_size
        self.tail = -(-window // page_size) * page_size
        self.kept = self.tail + page_size
        self.windows: dict[Prefix, Page] = {}
        self.window_reserved = 0

    # -- facts -------------------------------------------------------------------------------

    @property
    def window_free(self) -> int:
        return self.room - self.window_reserved - len(self.windows) * self.page_size

    def locked_windows(self) -> set[Prefix]:
        """Pages of nodes that the window before a locked end reaches into."""
        size = self.page_size
        found = set()
        for (space, tokens), count in self.pins.items():
            edges = [0, *self.edges((space, tokens))] if count else [0]
            for first, last in itertools.pairwise(edges):
                if last > len(tokens) - self.window:
                    found |= {(space, tokens[:n]) for n in range(first + size, last + 1, size)}
        return found

    @property
    def window_evictable(self) -> int:
        return self.page_size * len(self.windows.keys() - self.locked_windows())

    def has_room_for_two(self) -> bool:
        return 2 * self.kept <= self.window_free + self.window_evictable

    def usable(self, space: Namespace, tokens: tuple[int, ...]) -> int:
        """The longest prefix of cached ``tokens`` whose last window is cached, page by page."""
        size = self.page_size
        for end in range(len(tokens), 0, -size):
            pages = range(end, max(0, end - self.window), -size)
            if all((space, tokens[:n]) in self.windows for n in pages):
                return end
        return 0

    def window_nodes(self) -> dict[Prefix, tuple[Any, ...]]:
        """Every node with window KV: its start and the history of that KV."""
        found = {}
        for space, tokens in self.ends:
            part = self.windows.get((space, tokens))
            if part is not None:
                facts = (part.uses, part.recency, part.created, part.priority)
                found[space, tokens] = (self.start((space, tokens)), *facts)
        return found

    # -- what callers do ---------------------------------------------------------------------

    def match(self, space: Namespace, tokens: Sequence[int], name: str | None) -> int:
        whole = tuple(tokens)
        request = self.request(name)
        size, stop = self.page_size, 0
        while stop + size <= len(whole) and (space, whole[: stop + size]) in self.pages:
            stop += size
        if stop:
            self.ends.add((space, whole[:stop]))
        end = self.usable(space, whole[:stop])
        request.branch = stop
        merge_from, self.merge_from = self.merge_from, math.inf
        self._walk(space, whole[:end], request)  # what is cached beyond is of no use
        self.merge_from = merge_from
        self.use_window(space, whole[:end], request)
        return end

    def insert_both(
        self,
        space: Namespace,
        tokens: Sequence[int],
        name: str | None,
        priority: int,
        given: Sequence[int] | None,
        took: Callable[[], Sequence[int]],
        window_from: int,
    ) -> tuple[int, int, list[Gone], list[WindowGone], set[Prefix]]:
        """As ``insert``; also what went for windows, and the pages whose window KV was added."""
        size = self.page_size
        whole = tuple(tokens)[: len(tokens) // size * size]
        request = self.request(name)
        name = name or f"only #{request.number}"
        self.requests[name] = request
        stop = 0
        while stop < len(whole) and (space, whole[: stop + size]) in self.pages:
            stop += size
        computed = max(-(-window_from // size) * size, self.usable(space, whole[:stop]))
        # What the walk uses, before anything is evicted.
        self._used_first = (space, whole[: self.usable(space, whole[:stop])], request)
        matched, added, gone = self.insert(space, tokens, name, priority, given, took)
        before, went = set(self.windows), []
        end = (space, whole[: matched + added])
        at = matched if request.branch < 0 else request.branch
        request.branch = 0
        branch = (space, whole[:at])
        if computed < at < matched + added and self.has_room_for_two():
            self.ends.add(branch)
            self.pins[end] += 1
            went += self.keep(*branch, computed, request, fresh=matched < at)
            self.pins[end] -= 1
            self.pins[branch] += 1
            went += self.keep(*end, computed, request, fresh=added > 0)
            self.pins[branch] -= 1
        else:
            went += self.keep(*end, computed, request, fresh=added > 0)
        if name.startswith("only"):
            del self.requests[name]
        return matched, added, gone, went, set(self.windows) - before

    _used_first: Any = None

    def _walk(self, space: Namespace, tokens: tuple[int, ...], request: Running) -> int:
        stop = super()._walk(space, tokens, request)
        if self._used_first is not None:
            used, self._used_first = self._used_first, None
            self.use_window(*used)
        return stop

    def _joins(self, space: Namespace, tokens: tuple[int, ...], first: int, before: int, end: int) -> bool:
        """Windows join within one window, if they have nearly the same history and the same locks."""
        a, part = space, self.windows.get((space, tokens[:before]))
        record, oldest = self.windows.get((a, tokens[:end])), self.windows.get((a, tokens[:first]))
        if part is None or record is None or oldest is None:
            return part is record
        locked = self.locked_windows()
        return (
            (part.recency, part.priority) == (record.recency, record.priority)
            and ((a, tokens[:before]) in locked) == ((a, tokens[:end]) in locked)
            and abs(oldest.uses - record.uses) * self.merge_alike <= max(oldest.uses, record.uses)
            and end - self.start((a, tokens[:first])) <= self.tail
        )

    def _merged(self, space: Namespace, tokens: tuple[int, ...], start: int) -> None:
        if (space, tokens) in self.windows:
            self._share(self.windows, space, tokens, start)

    def keep(
        self, space: Namespace, tokens: tuple[int, ...], start: int, request: Running, *, fresh: bool
    ) -> list[WindowGone]:
        size, went = self.page_size, []
        end = len(tokens)
        for keep in (self.kept, self.tail):  # a window and a page, or one window
            first = max(start, end - keep)
            pages = range(first + size, end + 1, size)
            missing = [n for n in pages if (space, tokens[:n]) not in self.windows]
            short = len(missing) * size - self.window_free
            if missing and short > 0:
                self.pins[space, tokens] += 1
                went += self.evict_windows(short) if short <= self.window_evictable else []
                self.pins[space, tokens] -= 1
            if len(missing) * size <= self.window_free:
                break
        else:
            return went
        if missing:
            first = missing[0] - size
            if first and first not in (0, *self.edges((space, tokens))):
                self._cut(space, tokens, first)
            long = end - self.start((space, tokens)) > self.tail
            if fresh and long:
                self._cut(space, tokens, end - self.tail)
            for n in missing:
                self.windows[space, tokens[:n]] = Page(
                    (),
                    created=self.accesses,
                    creator=request.number,
                    recency=self.accesses,
                    priority=self.pages[space, tokens[:n]].priority,
                )
            request.windows_counted = max(request.windows_counted, *missing)
        self.use_window(space, tokens, request)
        return went

    def _cut(self, space: Namespace, tokens: tuple[int, ...], at: int) -> None:
        self.ends.add((space, tokens[:at]))

    def use_window(self, space: Namespace, tokens: tuple[int, ...], request: Running | None) -> None:
        for first, last in self._nodes_to(space, tokens):
            if last <= len(tokens) - self.kept or (space, tokens[:last]) not in self.windows:
                continue
            counts = request is not None and last > request.windows_counted
            for n in range(first + self.page_size, last + 1, self.page_size):
                part = self.windows[space, tokens[:n]]
                part.recency = self.accesses
                part.uses += counts
            if request is not None:
                request.windows_counted = max(request.windows_counted, last)

    def refresh(self, prefix: Prefix | None) -> None:
        super().refresh(prefix)
        if prefix is not None:
            self.use_window(*prefix, None)

    def reset(self) -> None:
        super().reset()
        self.windows.clear()
        for request in self.requests.values():
            request.windows_counted, request.branch = 0, -1

    def evict_windows(self, shortfall: int) -> list[WindowGone]:
        """Evict by sorting all unlocked windows again for each victim."""
        went: list[WindowGone] = []
        if shortfall <= 0:
            return went
        goal = min(shortfall, self.window_evictable)
        while goal > 0:
            size, locked = self.page_size, self.locked_windows()
            inner = {(space, tokens[:-size]) for space, tokens in self.pages}
            free = [end for end in self.ends if end in self.windows and end not in locked]
            victim = min(
                free,
                key=lambda end: (
                    self.key(self.windows[end], self.start(end), len(end[1]), self.slack),
                    len(end[1]),
                ),
            )
            start, end = self.start(victim), len(victim[1])
            leaf = victim not in inner and victim not in self.protected()
            if leaf:
                self._take_all(victim)
            else:
                self._drop(victim, start)
            went.append((start, end - start, leaf))
            goal -= end - start
        return went

    # -- parts -------------------------------------------------------------------------------

    def _drop(self, end: Prefix, start: int) -> None:
        for n in range(start + self.page_size, len(end[1]) + 1, self.page_size):
            self.windows.pop((end[0], end[1][:n]), None)

    def _take_all(self, victim: Prefix) -> Gone:
        step, self.trim_step = self.trim_step, 0
        gone = super()._take(victim, 1)
        self.trim_step = step
        self._drop(victim, gone[0])
        return gone

    def _take(self, victim: Prefix, needed: int) -> Gone:
        space, tokens = victim
        start, step = self.start(victim), self.trim_step
        held = len(tokens) - start
        keep = (held - needed) // step * step if step and needed < held else 0
        if not keep or self.usable(space, tokens[: start + keep]) < start + keep:
            return self._take_all(victim)
        gone = super()._take(victim, needed)
        for n in range(start + keep + self.page_size, len(tokens) + 1, self.page_size):
            self.windows.pop((space, tokens[:n]), None)
        return gone
