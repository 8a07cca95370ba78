"""vLLM's cached blocks as records of a pool: runs of blocks, each after the other, that share their history.

vLLM has no tree. A block is cached under the hash of its whole prefix, the same prefix may be cached in several
copies, and what follows a block is not noted anywhere. But a request holds its blocks in order, from its first
token on. So the tree is made of *physical* blocks: a new block follows the one that its request held before
it. No key is compared or hashed here; a request's path is that of the blocks that vLLM gave it.

Where there are copies, a request may hold a block that was made after another copy of its prefix. It is moved to
the copy that the request holds, so the blocks of a running request are always the path of one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused
from costcache.radix.node import shared_pages
from costcache.records import Action, NodeRecord, RequestRecord, Victim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from costcache.binding import Binding
    from costcache.pool import Pool
    from costcache.records import RequestInfo

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

    def _size(self) -> int:
        return self.tokens // len(self.blocks)

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`; vLLM's hash of a block is that of its whole prefix."""
        blocks = self.blocks
        name = blocks[offset * len(blocks) // self.tokens if offset else 0].block_hash
        return None if name is None else int.from_bytes(name[:_HASHED], "big")

    def content(self, start: int, end: int) -> bytes | None:
        """See :class:`costcache.records.NodeRecord`."""
        blocks = self.blocks
        names = [block.block_hash for block in blocks[start * len(blocks) // end :]]
        return None if None in names else b"".join(names)

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int | None:  # noqa: ARG002
        """See :class:`costcache.records.NodeRecord`: the content names its prefix, too."""
        return int.from_bytes(content[:_HASHED], "big")

    def shared(self, offset: int, content: bytes | bytearray) -> int:
        """See :class:`costcache.records.NodeRecord`."""
        blocks = self.blocks
        size = self.tokens // len(blocks)
        first = blocks[offset // size].block_hash
        if first is None:
            return 0
        pages = len(content) // len(first)
        names = [block.block_hash for block in blocks[offset // size : offset // size + pages]]
        if None in names:
            return 0
        return shared_pages(bytearray(b"".join(names)), content, len(first)) * size


class Held:
    """The path of the blocks that a request holds, as far as the runs have them.

    Attributes:
        request: The request's record.
        blocks: Its blocks, in order, and maybe more.
        length: Blocks of the path.
        run: The last run of the path, which is pinned.
        info: The facts known of the request, once it has finished.
    """

    __slots__ = ("blocks", "info", "length", "request", "run")

    def __init__(self, request: RequestRecord, root: NodeRecord) -> None:
        self.request = request
        self.blocks: Sequence[Any] = ()
        self.length = 0
        self.run = root
        self.info: RequestInfo | None = None


class Runs:
    """The host of a pool over the cached blocks of one group of layers with full attention.

    vLLM's free list stays in vLLM's own order; victims are taken out of its middle. So vLLM's LRU can take over
    at any time.

    Attributes:
        pool: The pool.
        size: Tokens per block.
        taken: Blocks that the eviction under way has freed.
    """

    def __init__(self, binding: Binding, blocks: list[Any], queue: Any, kept: Callable[[], Any]) -> None:
        """Start with an empty cache.

        Args:
            binding: The model, its policy and its plugin; its page is a block.
            blocks: vLLM's blocks by id; the first is the null block.
            queue: vLLM's ``FreeKVCacheBlockQueue``.
            kept: Gives the ids of free blocks to take last, by a container.
        """
        self.size = binding.page_size
        self.taken: list[Any] = []
        self._step = binding.trim_step()
        self._blocks = blocks
        self._queue = queue
        self._kept = kept
        self._where: list[Run | None] = [None] * len(blocks)
        self._held: dict[Held, None] = {}  # a set in order
        self.pool: Pool = binding.pool("kv", self.take, capacity=(len(blocks) - 1) * self.size)

    def owns(self, block: Any) -> bool:
        """Whether a block is in a run."""
        return self._where[block.block_id] is not None

    # -- requests ----------------------------------------------------------------------------

    def hold(self, request: RequestRecord) -> Held:
        """Begin the path of a request, which holds no blocks yet."""
        held = Held(request, self.pool.root)
        self.pool.pin(held.run)
        self._held[held] = None
        return held

    def advance(self, held: Held, blocks: Sequence[Any], end: int) -> None:
        """Let a request's path go on to the first ``end`` of its blocks, all of them cached.

        Those that are in runs are used; the others become a run.
        """
        pool, where, at, request = self.pool, self._where, held.length, held.request
        held.blocks = blocks
        if at >= end:
            return
        pool.clock.accesses += 1
        parent, last = held.run, held.run
        while at < end:
            if where[blocks[at].block_id] is None:
                stop = at + 1
                while stop < end and where[blocks[stop].block_id] is None:
                    stop += 1
                parent = self._append(parent, list(blocks[at:stop]), at, request)
                at = stop
            else:
                path = self._walk(blocks, at, end, parent)
                pool.use(path, request)
                parent = path[-1]
                at = (parent.depth + parent.tokens) // self.size
        held.run, held.length = parent, end
        pool.pin(parent)
        pool.unpin(last)

    def _walk(self, blocks: Sequence[Any], at: int, end: int, parent: NodeRecord) -> list[NodeRecord]:
        """The runs of consecutive blocks, up to the first one that is in none; they follow each other then."""
        pool, where = self.pool, self._where
        path: list[NodeRecord] = []
        while at < end:
            run = where[blocks[at].block_id]
            if run is None:
                break
            run = self._cut(run, blocks, at, end)
            if run.parent is not parent:
                pool.move(run, parent)
            path.append(run)
            parent = run
            at += len(run.blocks)
        return path

    def _append(self, parent: NodeRecord, blocks: list[Any], at: int, request: RequestRecord) -> Run:
        run = Run(parent, len(blocks) * self.size, at * self.size, blocks)
        where = self._where
        for block in blocks:
            where[block.block_id] = run
        self.pool.insert(run, request)
        return run

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
        prefix = Run(run.parent, count * self.size, run.depth, run.blocks[:count])
        where = self._where
        for block in prefix.blocks:
            where[block.block_id] = prefix
        run.blocks = run.blocks[count:]
        self.pool.split(prefix, run)
        return prefix

    def release(self, held: Held) -> None:
        """The blocks of a request were freed: they are as recent as they will be, and may be evicted."""
        pool = self.pool
        del self._held[held]
        path = self._freed(held)
        for run in reversed(path):  # what comes first in the prompt is the most recent, wherever it is moved
            pool.clock.accesses += 1
            pool.use([run], held.request)
        pool.unpin(held.run)
        if any(run.locks and not run.blocks[0].ref_cnt for run in path):
            # Another request holds a copy of it, and the rest of its path was moved away from there.
            for other in self._held:
                self._walk(other.blocks, 0, other.length, pool.root)
        if held.info is not None:
            pool.finish(held.request, held.info)

    def _freed(self, held: Held) -> list[Run]:
        """The runs of a path whose blocks were freed; one moves back to it from a copy that is free, too."""
        blocks, where, at = held.blocks, self._where, 0
        path: list[Run] = []
        parent: NodeRecord = self.pool.root
        while at < held.length and (run := where[blocks[at].block_id]) is not None:
            above = run.parent
            if above is not parent and isinstance(above, Run) and not above.blocks[0].ref_cnt:
                self.pool.move(run, parent)
            path.append(run)
            parent = run
            at += len(run.blocks)
        return path

    # -- evictions ---------------------------------------------------------------------------

    def victims(self, count: int) -> list[Any]:
        """Take so many blocks out of the free list: those that nobody can find again, then the policy's.

        The list must have as many. More may be taken, after the first ``count``, if the policy evicts more.
        """
        queue, where = self._queue, self._where
        self.taken = taken = []
        block, loose = queue.fake_free_list_head.next_free_block, 0
        while loose < count:
            run = where[block.block_id]
            if run is not None:
                if block.block_hash is not None:
                    break
                self.forget(block)
            loose += 1
            block = block.next_free_block
        if loose:
            taken += queue.first(loose)
        short = count - loose
        if short:
            pool, size = self.pool, self.size
            pool.reserved = max(0, pool.capacity - pool.pinned - queue.num_free_blocks * size)
            pool.evict(short * size)
            while len(taken) < count:
                # Blocks that nobody uses, but a path does: the other copies of what a request holds.
                block = queue.first(1)[0]
                if where[block.block_id] is not None:
                    self.forget(block)
                taken.append(block)
        return taken

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
        tokens, size, step, blocks = run.tokens, self.size, self._step, run.blocks
        if victim.tokens is not None:
            needed = victim.at_most(needed)
        keep = (tokens - needed) // step * step // size if step and needed < tokens else 0
        kept, where, taken = self._kept(), self._where, self.taken
        at = len(blocks)
        while at > keep:
            block = blocks[at - 1]
            before, after = block.prev_free_block, block.next_free_block
            if before is None or block.block_id in kept:
                break  # in use by something else than a request
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
            where[block.block_id] = None
            taken.append(block)
            at -= 1
        freed = (len(blocks) - at) * size
        if not freed:
            return Refused.NOT_NOW
        self._queue.num_free_blocks -= len(blocks) - at
        self._drop_tail(run, at)
        return freed

    def _drop_tail(self, run: Run, keep: int) -> None:
        """Report that all but the first blocks of a leaf are gone; an order may look at them one last time."""
        if keep:
            self.pool.trim(run, (len(run.blocks) - keep) * self.size)
            del run.blocks[keep:]
        else:
            self.pool.remove(run)
            run.blocks = []  # the order may keep the record for a while

    def forget(self, block: Any) -> list[Any]:
        """Take a block that is gone out of its run, and what follows it, which nobody can find any more.

        Returns:
            The blocks that were taken out.
        """
        run = self._where[block.block_id]
        if run is None:
            return []
        at = next(index for index, each in enumerate(run.blocks) if each is block)
        after: dict[NodeRecord | None, list[NodeRecord]] = {}
        if run.live_children:
            for record in self.pool.live.values():
                after.setdefault(record.parent, []).append(record)
        below: list[NodeRecord] = [run]
        for record in below:  # which grows
            below += after.get(record, ())
        gone: list[Any] = []
        for record in reversed(below):
            if isinstance(record, Run):
                gone += self._cut_loose(record, at if record is run else 0)
        return gone

    def _cut_loose(self, run: Run, keep: int) -> list[Any]:
        blocks = run.blocks[keep:]
        for each in blocks:
            self._where[each.block_id] = None
        self._drop_tail(run, keep)
        return blocks

    def ranked(self) -> Iterator[Any]:
        """Free blocks in the order of eviction, as far as that is known without evicting: leaf by leaf."""
        queue, where, pool = self._queue, self._where, self.pool
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail and where[block.block_id] is None:
            yield block
            block = block.next_free_block
        named: list[Victim] = []
        try:
            while (victim := pool.next_victim()) is not None:
                named.append(victim)
                run = victim.record
                if not isinstance(run, Run) or run.locks:
                    break
                yield from reversed(run.blocks)
        finally:
            for victim in named:
                pool.defer(victim)

    def reset(self) -> None:
        """Forget all blocks and start the policy afresh."""
        self._where = [None] * len(self._blocks)
        self._held.clear()
        for record in self.pool.live.values():
            record.blocks = []  # type: ignore[attr-defined]  # a Run
        self.pool.reset()
