"""vLLM's cached blocks as records of a pool: runs of blocks, each after the other, that share their history.

vLLM has no tree. A block is cached under the hash of its whole prefix, the same prefix may be cached in
several copies, and what follows a block is not noted anywhere. But a request holds its blocks in order, from
its first token on. So the tree is made of *physical* blocks: a new block follows the one that its request
held before it. No key is compared or hashed here; a request's path is that of the blocks that vLLM gave it.

Where there are copies, a request may hold a block that was made after another copy of its prefix. It is moved
to the copy that the request holds, so the blocks of a running request are always the path of one run.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused
from costcache.radix.node import shared_pages
from costcache.records import Action, NodeRecord, RequestRecord, Victim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from costcache.binding import Binding
    from costcache.pool import Pool
    from costcache.records import RequestInfo
    from costcache.vllm.blocks import Blocks
    from costcache.vllm.shadow import ShadowPath

__all__ = ["Held", "Run", "Runs"]

_DELETE = Action.DELETE
_HASHED = 8
"""Bytes of a block's hash that stand for its prefix among evicted ones."""


class Run(NodeRecord):
    """Consecutive blocks of one prefix that the same requests used.

    Attributes:
        blocks: vLLM's ``KVCacheBlock`` objects, in order.
    """

    __slots__ = ("blocks",)

    def __init__(self, parent: NodeRecord | None, tokens: int, depth: int, blocks: list[Any]) -> None:
        NodeRecord.__init__(self, 0, parent, tokens, depth)  # the pool numbers it
        self.blocks = blocks

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`; vLLM's hash of a block is that of its whole prefix."""
        blocks = self.blocks
        name = blocks[offset * len(blocks) // self.tokens if offset else 0]._block_hash
        return None if name is None else self.prefix_hash_with(offset, name)

    def content(self, start: int, end: int) -> bytes | None:
        """See :class:`costcache.records.NodeRecord`."""
        blocks = self.blocks
        # Not the property, a call for each block.
        names = [block._block_hash for block in blocks[start * len(blocks) // end :]]
        try:
            return b"".join(names)
        except TypeError:  # one has no contents any more; looking for it takes half as long again
            return None

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int | None:
        """See :class:`costcache.records.NodeRecord`: the content names its prefix, too."""
        # With the depth beside it, only prefixes of one length can collide.
        return self.depth + offset << 64 | int.from_bytes(content[:_HASHED], "big")

    def shared(self, offset: int, content: bytes | bytearray) -> int:
        """See :class:`costcache.records.NodeRecord`."""
        blocks = self.blocks
        size = self.tokens // len(blocks)
        first = blocks[offset // size].block_hash
        if first is None:
            return 0
        pages = len(content) // len(first)
        names = [block._block_hash for block in blocks[offset // size : offset // size + pages]]
        if None in names:
            return 0
        return shared_pages(b"".join(names), content, len(first)) * size


class Held:
    """The path of the blocks that a request holds, as far as the runs have them.

    Attributes:
        request: The request's record.
        blocks: Its blocks, in order: vLLM's own list, once it has computed some.
        tables: vLLM's lists of its blocks in all KV cache groups, if there are several.
        length: Blocks of the path.
        run: The last run of the path, which is pinned.
        info: The facts known of the request, once it has finished.
        shadow: The request as it would be under LRU, if that is followed.
    """

    __slots__ = ("blocks", "info", "length", "request", "run", "shadow", "tables")

    def __init__(self, request: RequestRecord, root: NodeRecord) -> None:
        self.request = request
        self.blocks: Sequence[Any] = ()
        self.tables: Sequence[list[Any]] = ()
        self.length = 0
        self.run = root
        self.info: RequestInfo | None = None
        self.shadow: ShadowPath | None = None


class Runs:
    """The host of a pool over the cached blocks of one group of layers with full attention.

    vLLM's free list stays in vLLM's own order; victims are taken out of its middle. So vLLM's LRU can take
    over at any time.

    Attributes:
        pool: The pool.
        size: Tokens per block.
        evict: The pool's method, or what measures it.
        trim_step: Tokens that a trim is a multiple of; 0 if victims are evicted whole.
        taken: Blocks taken out of the free list so far; the caller of :meth:`victims` empties it before.
        lost: Blocks that lost their contents while they were in use: their numbers in their prompts, by id.
        stray: Blocks of no run that a connector still holds, by id: what they follow is gone, but they keep
            their hash for as long as they are held, since the connector looks at it.
    """

    def __init__(self, binding: Binding, vllm: Any, blocks: Blocks) -> None:
        """Start with an empty cache.

        Args:
            binding: The model, its policy and its plugin; its page is a block.
            vllm: vLLM's block pool.
            blocks: What stands in for its methods.
        """
        self.size = binding.page_size
        self.taken: list[Any] = []
        self.lost: dict[int, int] = {}
        self.stray: dict[int, Any] = {}
        self.trim_step = binding.trim_step()
        self._vllm = vllm
        self._adapter = blocks
        self._queue = vllm.free_block_queue
        self._held: dict[Held, None] = {}  # a set in order
        self._first: dict[int, Run] = {}  # runs by the id of their first block
        self.pool: Pool = self._make_pool(binding)
        self.evict: Callable[[int], Any] = self.pool.evict

    def _make_pool(self, binding: Binding) -> Pool:
        return binding.pool("kv", self.take, capacity=(len(self._vllm.blocks) - 1) * self.size)

    def _run_of(self, blocks: Sequence[Any], at: int, *, found: bool = False) -> Run | None:
        """The run that has a block of a request; None if no run has it.

        Runs are looked up by their first block. A request can come upon the middle of one only when its
        blocks are ``found``, and only after a copy of the block before it.
        """
        run = self._first.get(blocks[at].block_id)
        if run is None and found and at:
            copies = self._vllm.cached_block_hash_to_block._cache.get(blocks[at - 1].block_hash)
            if isinstance(copies, dict) or self.lost:
                run = self._search(blocks[at], at)
        return run

    def _search(self, block: Any, at: int) -> Run | None:
        """Look for the run that has a block among all of them."""
        depth, size = at * self.size, self.size
        for run in self.pool.live.values():
            start = run.depth
            inside = start <= depth < start + run.tokens
            if inside and isinstance(run, Run) and run.blocks[(depth - start) // size] is block:
                return run
        return None

    # -- requests ----------------------------------------------------------------------------

    def hold(self, request: RequestRecord) -> Held:
        """Begin the path of a request, which holds no blocks yet."""
        held = Held(request, self.pool.root)
        self.pool.pin(held.run)
        self._held[held] = None
        return held

    def advance(
        self, held: Held, blocks: Sequence[Any], end: int, *, found: bool = False, new: bool = False
    ) -> None:
        """Let a request's path go on to the first ``end`` of its blocks, all of them cached.

        Args:
            held: The path.
            blocks: The request's blocks. Those that are in runs are used; the others become a run.
            end: Blocks to go on to.
            found: vLLM found them; otherwise the request computed them.
            new: Nobody else can have seen them yet, so they are in no run.
        """
        pool, at, request = self.pool, held.length, held.request
        held.blocks = blocks
        if at >= end:
            return
        pool.clock.accesses += 1
        parent, last = held.run, held.run
        while at < end:
            path = [] if new else self._walk(blocks, at, end, parent, found=found)
            if path:
                pool.use(path, request)
                parent = path[-1]
                at = (parent.depth + parent.tokens) // self.size
                continue
            if found and self._settle(held):  # they were generated by a request that still runs
                continue
            stop = end if new else at + 1
            while stop < end and self._run_of(blocks, stop, found=found) is None:
                stop += 1
            run = self._new(held, parent, at, stop)
            self._first[blocks[at].block_id] = run
            pool.insert(run, request)
            parent, at = run, stop
        held.run, held.length = parent, end
        pool.pin(parent)
        pool.unpin(last)

    def _new(self, held: Held, parent: NodeRecord, at: int, stop: int) -> Run:
        """A run of the blocks ``at`` to ``stop`` of a request."""
        blocks = held.blocks[at:stop]
        if type(blocks) is not list:
            blocks = list(blocks)
        return Run(parent, (stop - at) * self.size, at * self.size, blocks)

    def _walk(
        self, blocks: Sequence[Any], at: int, end: int, parent: NodeRecord, *, found: bool = False
    ) -> list[NodeRecord]:
        """The runs of consecutive blocks, up to the first that is in none; they follow each other then."""
        pool = self.pool
        path: list[NodeRecord] = []
        while at < end and (run := self._run_of(blocks, at, found=found)) is not None:
            run = self._cut(run, blocks, at, end)
            if run.parent is not parent:
                pool.move(run, parent)
            path.append(run)
            parent = run
            at += len(run.blocks)
        return path

    def _cut(self, run: Run, blocks: Sequence[Any], at: int, end: int) -> Run:
        """The part of a run that starts with ``blocks[at]`` and goes as far as they are the same."""
        before = at - run.depth // self.size
        if before:
            self._split(run, before)
        own = run.blocks
        count = len(own)
        if at + count > end or own != blocks[at : at + count]:  # they compare by identity first
            count, most = 1, min(count, end - at)  # the first is the same
            while count < most and own[count] is blocks[at + count]:
                count += 1
            return self._split(run, count)
        return run

    def _split(self, run: Run, count: int) -> Run:
        """Split the first blocks off a run; returns them as a run of their own."""
        prefix = type(run)(run.parent, count * self.size, run.depth, run.blocks[:count])
        run.blocks = run.blocks[count:]
        for part in (prefix, run):
            self._first[part.blocks[0].block_id] = part
        run.recency -= count  # that of its first block, see release
        self.pool.split(prefix, run)
        prefix.recency += count
        return prefix

    def release(self, held: Held) -> None:
        """The blocks of a request were freed: they are as recent as they will be, and may be evicted."""
        pool = self.pool
        del self._held[held]
        path = self._freed(held)
        for run in reversed(path):
            # What comes first is the most recent, block by block, however it is split and moved.
            pool.clock.accesses += len(run.blocks)
            pool.use([run], held.request)
        pool.unpin(held.run)
        for run in path:
            if run.locks and not run.blocks[0].ref_cnt:
                self._settle()  # another request holds a copy: the rest of its path was moved away from there
                break
        if held.info is not None:
            pool.finish(held.request, held.info)

    def _settle(self, but: Held | None = None) -> bool:
        """Let each path but one be that of the request's own blocks, all that are cached.

        Returns:
            Whether any has become longer.
        """
        longer = False
        for held in self._held:
            if held is but:
                continue
            blocks, end = held.blocks, held.length
            self._walk(blocks, 0, end, self.pool.root)
            while end < len(blocks) and blocks[end].block_hash is not None:
                end += 1
            if end > held.length:
                longer = True
                self.advance(held, blocks, end)
        return longer

    def _freed(self, held: Held) -> list[Run]:
        """The runs of a path whose blocks were freed; one moves back to it from a copy that is free, too."""
        blocks, at = held.blocks, 0
        path: list[Run] = []
        parent: NodeRecord = self.pool.root
        while at < held.length and (run := self._run_of(blocks, at)) is not None:
            above = run.parent
            if above is not parent and isinstance(above, Run) and not above.blocks[0].ref_cnt:
                self.pool.move(run, parent)
            path.append(run)
            parent = run
            at += len(run.blocks)
        return path

    # -- evictions ---------------------------------------------------------------------------

    def victims(self, count: int) -> list[Any]:
        """Take so many blocks out of the free list: those without contents, then the policy's.

        The list must have as many. More may be taken, after the first ``count``, if the policy evicts more.
        """
        queue, pool, size = self._queue, self.pool, self.size
        taken = self.taken
        empty = self._empty(count)
        if empty:
            taken += self._adapter.first(empty)
        if empty < count:
            pool.reserved = max(0, pool.capacity - pool.pinned - queue.num_free_blocks * size)
            self.evict((count - empty) * size)
            while len(taken) < count:  # something else than a request holds what follows, or it goes last
                block = self._adapter.first(1)[0]
                taken.append(block)
                tokens = block.block_hash_num_tokens
                at = self.lost.pop(block.block_id, None) if tokens is None else tokens // size - 1
                if at is not None:
                    self.forget(block, at)
        return taken

    def _empty(self, count: int) -> int:
        """Blocks without contents at the head of the list, up to a count; in vLLM's order they come first."""
        block, empty, lost = self._queue.fake_free_list_head.next_free_block, 0, self.lost
        while empty < count and block._block_hash is None:
            at = lost.pop(block.block_id, None) if lost else None
            if at is not None and self.forget(block, at):  # what follows it comes first now
                return self._empty(count)
            empty += 1
            block = block.next_free_block
        return empty

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Free a run, or as much of its tail as ``needed`` asks for; the pool calls this."""
        run = victim.record
        if (
            not isinstance(run, Run)
            or run.live_children
            or victim.action is not _DELETE
            or self.pool.live.get(run.serial) is not run
        ):
            return Refused.NOT_A_LEAF
        if run.locks:
            return Refused.LOCKED
        tokens, size, step, blocks = run.tokens, self.size, self.trim_step, run.blocks
        if victim.tokens is not None:
            needed = victim.at_most(needed)
        keep = (tokens - needed) // step * step // size if step and needed < tokens else 0
        count = self._unlink(blocks, keep)
        if not count:
            return Refused.NOT_NOW
        self._drop_tail(run, len(blocks) - count)
        return count * size

    def _unlink(self, blocks: list[Any], keep: int) -> int:
        """Take blocks out of the free list, from the last one on but for the first ``keep``.

        Stops at one that something else than a request holds, or that goes last. Returns how many.
        """
        tail, last = blocks[keep:], self._vllm._reuse_watchers
        tail.reverse()
        if last:
            tail = list(itertools.takewhile(lambda block: block.block_id not in last, tail))
        before: Any = None
        after: Any = None
        for index, block in enumerate(tail):
            if block is not after:  # not the one before it in the list, as it is if they were freed together
                if after is not None:
                    before.next_free_block, after.prev_free_block = after, before
                    after = None
                if block.ref_cnt:
                    del tail[index:]
                    break
                before = block.prev_free_block
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
        if after is not None:
            before.next_free_block, after.prev_free_block = after, before
        self._queue.num_free_blocks -= len(tail)
        self.taken += tail
        return len(tail)

    def _drop_tail(self, run: Run, keep: int) -> None:
        """Report that all but the first blocks of a leaf are gone; an order may look at them once more."""
        if keep:
            self.pool.trim(run, (len(run.blocks) - keep) * self.size)
            del run.blocks[keep:]
        else:
            self.pool.remove(run)
            del self._first[run.blocks[0].block_id]
            run.blocks = []  # the order may keep the record for a while

    def forget(self, block: Any, at: int) -> bool:
        """Take a block that lost its contents out of its run, with all that follows and cannot be found.

        Args:
            block: The block.
            at: Its number in the prompt.

        Returns:
            Whether it was in a run.
        """
        run = self._search(block, at)
        if run is not None and run.locks:  # nobody holds the block: its request has a copy
            self._settle()
            run = self._search(block, at)
        if run is None:
            return False
        gone: list[Any] = []
        for record in reversed(self._below(run)):
            if isinstance(record, Run):
                keep = at - run.depth // self.size if record is run else 0
                gone += record.blocks[keep:]
                self._drop_tail(record, keep)
        self.stray |= {each.block_id: each for each in gone if each.ref_cnt}
        self._adapter.discard([each for each in gone if not each.ref_cnt and each is not block])
        return True

    def _below(self, run: Run) -> list[NodeRecord]:
        """A run and all that follows it, parents first."""
        after: dict[NodeRecord | None, list[NodeRecord]] = {}
        if run.live_children:
            for record in self.pool.live.values():
                after.setdefault(record.parent, []).append(record)
        below: list[NodeRecord] = [run]
        for record in below:  # which grows
            below += after.get(record, ())
        return below

    def gather(self, blocks: Sequence[Any]) -> None:
        """Stray blocks among these were let go: nobody can find them, unless a request has in between."""
        for block in blocks:
            if block.ref_cnt or self.stray.pop(block.block_id, None) is None:
                continue
            tokens = block.block_hash_num_tokens
            if tokens is not None and self._search(block, tokens // self.size - 1) is None:
                self._adapter.discard([block])

    def ranked(self) -> Iterator[Any]:
        """Free blocks in the order of eviction, as far as that is known without evicting.

        The policy names the leaves. What they follow is evictable once they are gone, and not ranked before:
        it comes here when a less recent leaf would not come any more, as under LRU.
        """
        queue, pool = self._queue, self.pool
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail and block.block_hash is None:
            yield block
            block = block.next_free_block
        named: dict[int, Victim] = {}
        left: dict[int, int] = {}  # of each run some of whose children came: how many did not
        waiting: list[tuple[int, int, Run]] = []
        try:
            while True:
                victim = pool.next_victim(named)
                run: Any = None
                if victim is not None:
                    run = victim.record
                    named[run.serial] = victim
                    if not isinstance(run, Run) or run.locks:
                        break
                while waiting and (run is None or waiting[0][0] < run.recency):
                    yield from self._upwards(heapq.heappop(waiting)[2], left, waiting)
                if run is None:
                    break
                yield from self._upwards(run, left, waiting)
        finally:
            for victim in named.values():
                pool.defer(victim)

    def _upwards(self, run: Run, left: dict[int, int], waiting: list[tuple[int, int, Run]]) -> Iterator[Any]:
        """The blocks of a run, and of what it follows as far as that is as old and has no other children."""
        at: NodeRecord | None = run
        while isinstance(at, Run) and not at.locks:
            yield from reversed(at.blocks)
            above, recency = at.parent, at.recency
            if not isinstance(above, Run):
                return
            left[above.serial] = count = left.get(above.serial, above.live_children) - 1
            if count:
                return
            if above.recency > recency:
                heapq.heappush(waiting, (above.recency, above.serial, above))
                return
            at = above

    def reset(self) -> None:
        """Forget all blocks and start the policy afresh."""
        self._first.clear()
        self._held.clear()
        self.lost.clear()
        self.stray.clear()
        for record in self.pool.live.values():
            record.blocks = []  # type: ignore[attr-defined]  # a Run
        self.pool.reset()
