"""Shadow of LRU in several KV cache groups: what our ``lru`` would find with the same blocks.

A request resumes from an end, so what LRU finds is the longest of the ends on the request's path that it
still has. The shadow keeps the ends that ``lru`` would keep, with the blocks that each of them needs, and
gives them up as ``lru`` does: blocks after the last end of a path first, then the end that is least recent,
alone if others follow it and else with the blocks back to the one before it. An end whose blocks are those of
the next one, too, as within a chunk of local attention, stays as long as that one.

No block is looked at twice. A *stretch* stands for the blocks of full attention between two ends, named by
vLLM's own hashes; so does one that leads to several stretches and whose end is gone. A request looks up the
names of its blocks in two dicts, in C, and changes a few stretches.

It is close, not exact. What it takes for granted:

- LRU's room is that of the cache: what tree and ends need after an eviction. So a running request needs the
  same in both; in truth it needs more in the one that found less, by the window blocks of a chunk at most.
- Ends are as recent as their request's end, one after the other.
- LRU keeps the ends that the cache keeps after what LRU found, and one where prompts part by what LRU has. A
  state that only LRU's own chunks would have left, on the way, is not made.
- Where two ends share window blocks of a third that is gone, each counts them.
- Blocks that nothing needs are gone at once, but for those of an end that the cache found that way, too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from costcache.vllm.groups import Groups

__all__ = ["ShadowEnds", "ShadowPath"]


class _Stretch:
    """Blocks of a path between two ends.

    Attributes:
        above: The stretch before it; None for the root.
        names: Hashes of its blocks.
        start: Blocks before it.
        is_end: Whether LRU has the end after its last block.
        own: Blocks, beside those of full attention, that this end adds to those of the one before it.
        after: The stretches that follow it, in order.
        pins: Running requests that resumed from its end, or made it.
        grows: Whether it is the tail of a running request.
    """

    __slots__ = ("above", "after", "grows", "is_end", "names", "own", "pins", "start")

    def __init__(self, above: _Stretch | None, names: list[bytes], start: int) -> None:
        self.above = above
        self.names = names
        self.start = start
        self.is_end = False
        self.own = 0
        self.after: dict[_Stretch, None] = {}
        self.pins = 0
        self.grows = False
        if above is not None:
            above.after[self] = None

    @property
    def stop(self) -> int:
        """Blocks of the path up to its end."""
        return self.start + len(self.names)


class ShadowPath:
    """A running request, as it would be under LRU.

    Attributes:
        found: Blocks that LRU found for it.
        hashes: vLLM's list of the request's hashes, which grows.
        names: Those of its blocks of the first group.
        parts: Blocks up to where prompts part by what LRU has, until there is an end; 0 without.
        unnoticed: Blocks up to where they part by what the cache has, if LRU has less or more; 0 without.
        ends: Stretches whose ends it found or made.
        tail: What follows the last of them.
    """

    __slots__ = ("ends", "found", "hashes", "names", "parts", "tail", "unnoticed")

    def __init__(self, hashes: list[bytes], names: list[bytes], end: _Stretch) -> None:
        self.hashes = hashes
        self.names = names
        self.found = end.stop
        self.parts = self.unnoticed = 0
        self.ends = [end]
        self.tail = _Stretch(end, [], end.stop)
        self.tail.grows = True


class ShadowEnds:
    """The ends and blocks that LRU would have.

    Attributes:
        room: Blocks that it has room for; as many as there are until the first eviction.
        blocks: Blocks that it has.
    """

    def __init__(self, groups: Groups, capacity: int, every: int) -> None:
        """Start with an empty cache.

        Args:
            groups: The KV cache groups.
            capacity: Blocks of the pool.
            every: Hashes of a request to a block of the first group.
        """
        self._every = every
        self.room = float(capacity)
        self.blocks = 0.0
        self._groups = groups
        self._size = groups.first.size
        self._density = groups.density
        self._free = groups.free_ends // self._size  # blocks between ends that are KV of full attention alone
        self._root = _Stretch(None, [], 0)
        self._ends: dict[bytes, _Stretch] = {}  # by the hash of the block before it; of copies, the newest
        self._first: dict[bytes, _Stretch] = {}  # likewise, by the hash of the first block
        self._line: OrderedDict[_Stretch, None] = OrderedDict()  # ends that may go, the least recent first
        self._dead: deque[_Stretch] = deque()  # stretches without any end

    # -- requests ----------------------------------------------------------------------------

    def begin(self, hashes: list[bytes], most: int, shared: int) -> ShadowPath:
        """A request begins.

        Args:
            hashes: vLLM's list of its hashes.
            most: Blocks that it may find; the last token of a prompt is always computed.
            shared: Blocks up to where prompts part, as vLLM has noticed, unless it keeps the end there in any
                case; else 0.
        """
        names = hashes[self._every - 1 :: self._every]
        best = self._root
        for name in self._ends.keys() & names:
            end = self._ends[name]
            if best.stop < end.stop <= most:
                best = end
        self._pin(best)
        path = ShadowPath(hashes, names, best)
        step = self._groups.step // self._size
        reach = min(self._reach(names), most) // step * step
        if reach > best.stop:
            path.parts = reach
        if shared != reach:
            path.unnoticed = shared
        return path

    def _reach(self, names: list[bytes]) -> int:
        """Blocks at the start of a path of which LRU has the full attention."""
        found = [self._first[name] for name in self._first.keys() & names]
        found.sort(key=lambda stretch: stretch.start)
        reach = 0
        for stretch in found:
            if stretch.start > reach:
                break
            if stretch.stop > reach:
                reach = max(reach, stretch.start + _common(stretch.names, names[stretch.start :]))
        return reach

    def spared(self, path: ShadowPath, at: int) -> None:
        """A request found an end that nobody had kept, in blocks that nothing had been in need of yet.

        LRU, which leaves those alone as long, finds it too.
        """
        if at <= path.found:
            return
        named = [self._first[name] for name in self._first.keys() & path.names]
        holding = [
            stretch
            for stretch in named
            # Another request may still be adding to one that grows.
            if stretch.start < at < stretch.stop + (not stretch.grows)
            and stretch.names[at - stretch.start - 1] == path.names[at - 1]
        ]
        if holding:
            # Of copies, the same one whatever the order in which a set gives them.
            end = self._cut(max(holding, key=lambda stretch: stretch.start), at)
            self._keep(end)
            self._pin(end)
            path.ends.append(end)
            tail = path.tail
            if tail.above is not None:
                del tail.above.after[tail]
            tail.above, tail.start = end, at
            end.after[tail] = None
        path.found = at

    def go_on(self, path: ShadowPath, count: int, before: int) -> None:
        """A request has computed its first ``count`` blocks; the cache had the first ``before`` of them."""
        tail = path.tail
        if count > len(path.names):  # it has generated some
            path.names = path.hashes[self._every - 1 :: self._every]
        more = path.names[tail.stop : count]
        if more:
            if not tail.names:
                self._first[more[0]] = tail
            tail.names += more
            self.blocks += len(more) * self._density
        made: list[int] = []
        if self._free and tail.start < before:  # the cache found what LRU has to compute
            made += range((tail.start // self._free + 1) * self._free, before + 1, self._free)
        if path.parts and count >= path.parts:
            made.append(path.parts)
            made.sort()
            path.parts = 0
        for at in made:
            self.mark(path, at)

    def mark(self, path: ShadowPath, at: int) -> None:
        """A request leaves an end after its first ``at`` blocks."""
        tail = path.tail
        if not tail.start < at <= tail.stop or at == path.unnoticed:
            return
        end = self._cut(tail, at)
        if end is tail:
            end.grows = False
            path.tail = _Stretch(end, [], at)
            path.tail.grows = True
        self._keep(end)
        self._pin(end)
        path.ends.append(end)

    def release(self, path: ShadowPath) -> None:
        """A request has ended, or waits again: its ends are as recent as they will be."""
        for end in path.ends:
            end.pins -= 1
            if not end.pins and end.is_end:
                self._line[end] = None
        tail = path.tail
        tail.grows = False
        if tail.names:
            self._dead.append(tail)
        else:
            self._remove(tail)
        self.fit()

    # -- room --------------------------------------------------------------------------------

    def fit(self) -> None:
        """Give up what does not fit."""
        while self.blocks > self.room:
            if self._dead:
                dead = self._dead[0]
                if dead.names and not dead.is_end and not dead.after:
                    self._trim(dead)
                else:  # it was found after all
                    self._dead.popleft()
            elif self._line:
                end = self._line.popitem(last=False)[0]
                if self._frees(end):
                    self._give_up(end)
            else:
                break

    def _trim(self, dead: _Stretch) -> None:
        """Give up as much of the end of a stretch as is needed."""
        count = min(len(dead.names), max(1, int((self.blocks - self.room) / self._density)))
        self.blocks -= count * self._density
        keep = len(dead.names) - count
        if not keep:
            self._dead.popleft()
            self._forget(dead)
            self._remove(dead)
        del dead.names[keep:]

    def _give_up(self, end: _Stretch) -> None:
        name = end.names[-1]
        if self._ends.get(name) is end:
            del self._ends[name]
        end.is_end = False
        self.blocks -= end.own
        end.own = 0
        self._count_below(end)
        before = _end_before(end)
        if before is not None and not before.pins and before not in self._line:
            self._line[before] = None  # it was kept for this one, which was as recent
            self._line.move_to_end(before, last=False)
        self._settle(end)

    def _frees(self, end: _Stretch) -> bool:
        """Whether LRU gains by giving up an end: nothing follows it, or ends after it lack some block."""
        size = self._size
        return not end.after or self._groups.adds(
            end.stop * size, (each.stop * size for each in _ends_after(end))
        )

    def _count_below(self, stretch: _Stretch) -> None:
        """Ends after a stretch share blocks with its end from now on, or no longer."""
        for each in _ends_after(stretch):
            self._count(each)

    def _settle(self, stretch: _Stretch) -> None:
        """A stretch has lost its end, or one that followed it."""
        if stretch.is_end or stretch.above is None or stretch.pins:
            return
        if not stretch.after:
            self._dead.appendleft(stretch)
        elif len(stretch.after) == 1:  # what follows takes its blocks over
            (other,) = stretch.after
            self._forget(stretch)
            if other.names:
                self._forget(other)
            other.names[:0] = stretch.names
            other.start, other.above = stretch.start, stretch.above
            self._first[other.names[0]] = other
            del stretch.above.after[stretch]
            stretch.above.after[other] = None

    def _remove(self, stretch: _Stretch) -> None:
        above = stretch.above
        if above is not None:
            del above.after[stretch]
            self._settle(above)

    # -- stretches ---------------------------------------------------------------------------

    def _pin(self, end: _Stretch) -> None:
        end.pins += 1
        self._line.pop(end, None)

    def _keep(self, stretch: _Stretch) -> None:
        """LRU has the end of a stretch from now on."""
        stretch.is_end = True
        self._ends[stretch.names[-1]] = stretch
        self._count(stretch)
        self._count_below(stretch)

    def _count(self, end: _Stretch) -> None:
        before = _end_before(end)
        size = self._size
        own = self._groups.own(0 if before is None else before.stop * size, end.stop * size)
        self.blocks += own - end.own
        end.own = own

    def _cut(self, stretch: _Stretch, at: int) -> _Stretch:
        """The part of a stretch up to ``at`` blocks of the path; what follows it is a stretch of its own."""
        above, count = stretch.above, at - stretch.start
        if count == len(stretch.names) or above is None:
            return stretch
        front = _Stretch(above, stretch.names[:count], stretch.start)
        del above.after[stretch]
        if self._first.get(front.names[0]) is stretch:
            self._first[front.names[0]] = front
        del stretch.names[:count]
        stretch.above, stretch.start = front, at
        front.after[stretch] = None
        self._first[stretch.names[0]] = stretch
        return front

    def _forget(self, stretch: _Stretch) -> None:
        name = stretch.names[0]
        if self._first.get(name) is stretch:
            del self._first[name]


def _ends_after(stretch: _Stretch) -> Iterator[_Stretch]:
    """The next stretches after one whose ends LRU has, on each path."""
    after = list(stretch.after)
    for each in after:  # which grows
        if each.is_end:
            yield each
        else:
            after += each.after


def _end_before(stretch: _Stretch) -> _Stretch | None:
    """The last stretch before one whose end LRU has."""
    before = stretch.above
    while before is not None and not before.is_end:
        before = before.above
    return before


def _common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Equal names at the start of two paths; a name is that of its whole prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
