"""Runs of blocks in several KV cache groups, with the window blocks and states at the ends of prefixes.

One free list serves all groups, so a policy has to weigh their blocks against each other. The tree is that of
the blocks of one group of full attention; blocks of other such groups go along with it. What else a request
needs to resume somewhere, the blocks of the last windows and the states, is an *end* there: to a policy, the
state of a model with states, with its own history, of as many bytes as its blocks have.

So a policy names ends, and leaves of the tree. A block goes once nothing needs it any more: not the tree, and
no end. It is *spare* then, like one that never was of use, and spare blocks are given up before any others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused
from costcache.records import Action, PoolState, State
from costcache.vllm.ranking import rank_ends
from costcache.vllm.runs import Held, Run, Runs
from costcache.vllm.shadow import ShadowEnds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from costcache.binding import Binding
    from costcache.orders import VictimOrder
    from costcache.pool import Pool
    from costcache.records import Clock, NodeRecord, Victim
    from costcache.vllm.blocks import Blocks
    from costcache.vllm.groups import Groups

__all__ = ["End", "EndRuns", "WideRun", "WideRuns"]

_DELETE, _TOMBSTONE = Action.DELETE, Action.TOMBSTONE


class WideRun(Run):
    """Consecutive blocks of one prefix, in several groups of full attention.

    Attributes:
        rows: Blocks of the other groups, those that end within the run.
    """

    __slots__ = ("rows",)

    def __init__(self, parent: NodeRecord | None, tokens: int, depth: int, blocks: list[Any]) -> None:
        super().__init__(parent, tokens, depth, blocks)
        self.rows: list[list[Any]] = []


class End(State):
    """The blocks that a request needs to resume at the end of a run, beside those of full attention.

    Attributes:
        run: The run.
        blocks: The blocks: of the last window, and states.
        held: Those of them that are in use.
        alone: Those that nothing else needs.
        recent: Whether none of them has been freed since the last use.
    """

    __slots__ = ("alone", "blocks", "held", "recent", "run")

    def __init__(self, run: WideRun, blocks: list[Any], clock: Clock) -> None:
        self.held = 0
        super().__init__(-1, clock)
        self.run = run
        self.blocks = blocks
        self.alone = 0
        self.recent = True

    @property
    def locks(self) -> int:
        """Locks on it: blocks in use; or 1 if it has none of its own, and so would free none by itself."""
        return self.held or int(not self.alone and self.run.live_children > 0)

    @locks.setter
    def locks(self, value: int) -> None:
        """Ignored: the blocks have the counts."""


class WideRuns(Runs):
    """The host of a pool over the cached blocks of several groups of full attention.

    Attributes:
        spare: Free blocks with contents that nothing needs, by id, in the order of eviction.
    """

    def __init__(self, binding: Binding, vllm: Any, blocks: Blocks, groups: Groups) -> None:
        """Start with an empty cache; see :class:`costcache.vllm.runs.Runs`."""
        self.groups = groups
        self.spare: dict[int, Any] = {}
        self._kv: dict[int, int] = {}  # runs that have a block, by its id: of copies, some may share one
        self._ends: dict[int, tuple[End, ...]] = {}  # ends that have a block, by its id
        super().__init__(binding, vllm, blocks)
        if self.trim_step:
            self.trim_step = ceil(self.trim_step / groups.step) * groups.step

    # -- runs --------------------------------------------------------------------------------

    def _new(self, held: Held, parent: NodeRecord, at: int, stop: int) -> Run:
        size = self.size
        run = WideRun(parent, (stop - at) * size, at * size, list(held.blocks[at:stop]))
        start, end = run.depth, run.depth + run.tokens
        for group in self.groups.others:
            run.rows.append(held.tables[group.number][start // group.size : end // group.size])
        self._enter(run.blocks)
        for row in run.rows:
            self._enter(row)
        return run

    def _enter(self, blocks: list[Any]) -> None:
        """One more run has these blocks."""
        kv, spare, ends = self._kv, self.spare, self._ends
        numbers = [block.block_id for block in blocks]
        new = dict.fromkeys(numbers, 1)
        # As a rule nothing else has them, which is seen at once.
        if len(new) == len(numbers) and kv.keys().isdisjoint(numbers) and ends.keys().isdisjoint(numbers):
            kv.update(new)
            for number in spare.keys() & new.keys():
                del spare[number]
            return
        for number in numbers:
            others = kv.get(number, 0)
            kv[number] = others + 1
            if not others:
                spare.pop(number, None)
                if number in ends:
                    self._joined(number)

    def _leave(self, blocks: Iterable[Any]) -> None:
        """One run less has these blocks. They are spare, if nothing else has them."""
        kv, spare, ends, last = self._kv, self.spare, self._ends, self._vllm._reuse_watchers
        for block in blocks:
            number = block.block_id
            others = kv.pop(number) - 1
            if others:
                kv[number] = others
            elif number in ends:
                self._left(number)
            elif not block.ref_cnt and block._block_hash is not None and number not in last:
                spare[number] = block  # see _give_up

    def _split(self, run: Run, count: int) -> Run:
        prefix = super()._split(run, count)
        if isinstance(run, WideRun) and isinstance(prefix, WideRun):
            for index, group in enumerate(self.groups.others):
                row = run.rows[index]
                here = run.depth // group.size - prefix.depth // group.size
                prefix.rows.append(row[:here])
                run.rows[index] = row[here:]
        return prefix

    def _search(self, block: Any, at: int) -> Run | None:
        run = super()._search(block, at)
        if run is None and self.groups.others:
            for record in self.pool.live.values():
                if isinstance(record, WideRun) and any(each is block for row in record.rows for each in row):
                    return record
        return run

    def _drop_tail(self, run: Run, keep: int) -> None:
        """Report that all but the first blocks of a leaf are gone: spare, if nothing else has them."""
        gone = run.blocks[keep:]
        gone.reverse()
        if isinstance(run, WideRun):
            tokens = run.depth + keep * self.size
            for index, group in enumerate(self.groups.others):
                here = tokens // group.size - run.depth // group.size
                gone += reversed(run.rows[index][here:])
                del run.rows[index][here:]
        super()._drop_tail(run, keep)
        self._leave(gone)

    def _joined(self, number: int) -> None:
        """A block that ends have is in a run, too."""

    def _left(self, number: int) -> None:
        """A block that ends have is in no run any more."""

    def _give_up(self, block: Any) -> None:
        """Nothing needs a block any more: it is spare, once it is free."""
        number = block.block_id
        if not block.ref_cnt and block._block_hash is not None and number not in self._vllm._reuse_watchers:
            self.spare[number] = block

    # -- what vLLM does with blocks ------------------------------------------------------------

    def touched(self, blocks: Iterable[Any]) -> None:
        """Blocks have one more reference each."""
        spare = self.spare
        for block in blocks:
            if block.ref_cnt == 1:
                spare.pop(block.block_id, None)

    def freed(self, blocks: Iterable[Any]) -> None:
        """Blocks have one reference less each."""
        kv = self._kv
        for block in blocks:
            if block.block_id not in kv:
                self._give_up(block)

    def lose(self, block: Any) -> None:
        """A free block has lost its contents, or is about to: what cannot be found without it is spare."""
        number = block.block_id
        while number in self._kv and (run := self._with(block)) is not None:
            self.forget(block, self._position(run, block))
        self.spare.pop(number, None)

    def _replace(self, run: WideRun, block: Any) -> bool:
        """Let a run in use do without a block of another group: its request holds a copy, as a rule."""
        for group, row in zip(self.groups.others, run.rows, strict=True):
            for at, each in enumerate(row):
                if each is block:
                    number = run.depth // group.size + at
                    copy = self._vllm.null_block
                    for held in self._held:
                        table = held.tables[group.number]
                        if number < len(table) and table[number].block_hash is not None and _has(held, run):
                            copy = table[number]
                    row[at] = copy
                    self._enter([copy])
                    self._leave([block])
                    return True
        return False

    def lose_in_use(self, block: Any) -> None:
        """A block has lost its contents while requests hold it."""
        run = self._with(block) if block.block_id in self._kv else None
        if run is not None:
            self.lost[block.block_id] = self._position(run, block)

    def _with(self, block: Any) -> WideRun | None:
        """The run that has a block."""
        for run in self.pool.live.values():
            if isinstance(run, WideRun):
                for row in (run.blocks, *run.rows):
                    if any(each is block for each in row):
                        return run
        return None

    def _position(self, run: WideRun, block: Any) -> int:
        """The number, in the first group, of the block in a run with which another one of it ends."""
        for at, each in enumerate(run.blocks):
            if each is block:
                return run.depth // self.size + at
        for group, row in zip(self.groups.others, run.rows, strict=True):
            for at, each in enumerate(row):
                if each is block:
                    return ((run.depth // group.size + at + 1) * group.size - 1) // self.size
        raise ValueError(f"{run!r} does not have {block!r}")

    # -- evictions ---------------------------------------------------------------------------

    def victims(self, count: int) -> list[Any]:
        """Take so many blocks out of the free list: those without contents, spare ones, the policy's."""
        taken, spare = self.taken, self.spare
        if self.lost:
            empty = self._empty(count)
            if empty:
                taken += self._adapter.first(empty)
        elif self._queue.fake_free_list_head.next_free_block._block_hash is None:
            self._take_empty(count)
        if taken and not self._kv.keys().isdisjoint([block.block_id for block in taken]):
            for block in list(taken):
                if block.block_id in self._kv:  # it lost its contents while it was in use
                    self.lose(block)
        missing = count - len(taken)
        if missing > 0:
            if missing > len(spare):
                self._evict(missing - len(spare))
            self._take([spare.pop(number) for number in list(itertools.islice(spare, missing))])
        while len(taken) < count:  # something else than a request holds what follows, or it goes last
            block = self._adapter.first(1)[0]
            taken.append(block)
            self.lose(block)
        return taken

    def _take_empty(self, count: int) -> None:
        """Take blocks without contents out of the free list, up to a count; they come first in it."""
        queue, taken = self._queue, self.taken
        head = queue.fake_free_list_head
        block = head.next_free_block
        for _ in range(count):
            if block._block_hash is not None:
                break
            taken.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        if taken:
            head.next_free_block, block.prev_free_block = block, head
            queue.num_free_blocks -= len(taken)

    def _take(self, blocks: list[Any]) -> None:
        """Take blocks out of the free list, together where they follow each other there, as most do."""
        before: Any = None
        after: Any = None
        for block in blocks:
            if block is not after:
                if after is not None:
                    before.next_free_block, after.prev_free_block = after, before
                before = block.prev_free_block
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
        if after is not None:
            before.next_free_block, after.prev_free_block = after, before
        self._queue.num_free_blocks -= len(blocks)
        self.taken += blocks

    def _evict(self, blocks: int) -> None:
        """Make that many blocks spare."""
        self.evict(ceil(blocks / self.groups.density) * self.size)

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Give up a run, or as much of its tail as ``needed`` asks for; the pool calls this."""
        run = victim.record
        if not self._is_leaf(run) or victim.action is not _DELETE or not isinstance(run, WideRun):
            return Refused.NOT_A_LEAF
        if run.locks:
            return Refused.LOCKED
        tokens, size, step = run.tokens, self.size, self.trim_step
        if victim.tokens is not None:
            needed = victim.at_most(needed)
        keep = max(0, tokens - needed) // size if step else 0
        if keep:  # no boundary is within a step
            keep = max(0, (run.depth + keep * size) // step * step - run.depth) // size
        count = self._free_from_the_end(run.blocks, keep)
        if not count:
            return Refused.NOT_NOW
        self._drop_tail(run, len(run.blocks) - count)
        return count * size

    def _is_leaf(self, run: NodeRecord) -> bool:
        return not run.live_children and self.pool.live.get(run.serial) is run

    def _free_from_the_end(self, blocks: Sequence[Any], keep: int) -> int:
        """Count the free blocks at the end of a run, after the first ``keep``, that are not to go last."""
        tail, last = blocks[keep:], self._vllm._reuse_watchers
        if not last and not [block for block in tail if block.ref_cnt]:
            return len(tail)
        count = 0
        for block in reversed(tail):
            if block.ref_cnt or block.block_id in last:
                break
            count += 1
        return count

    def forget(self, block: Any, at: int) -> bool:
        """Take a block that lost its contents out of its run, with all that follows; see the base class."""
        run = self._search(block, at)
        if run is not None and run.locks:  # nobody holds the block: its request has a copy
            self._settle()
            run = self._search(block, at)
        if run is None:
            return False
        if isinstance(run, WideRun) and run.locks and self._replace(run, block):
            return True
        for record in reversed(self._below(run)):
            if isinstance(record, WideRun):
                self._drop_tail(record, at - run.depth // self.size if record is run else 0)
        return True

    def ranked(self) -> Iterator[Any]:
        """Free blocks in the order of eviction, as far as that is known without evicting."""
        queue, pool = self._queue, self.pool
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail and block.block_hash is None:
            yield block
            block = block.next_free_block
        yield from list(self.spare.values())
        seen: set[int] = set()
        named: dict[int, Victim] = {}
        try:
            while (victim := pool.next_victim(named)) is not None:
                run = victim.record
                named[run.serial] = victim
                if not isinstance(run, WideRun):
                    break
                for block in self._blocks_of(victim, run):
                    if block.block_id not in seen:
                        seen.add(block.block_id)
                        yield block
        finally:
            for victim in named.values():
                pool.defer(victim)

    def _blocks_of(self, victim: Victim, run: WideRun) -> Iterator[Any]:  # noqa: ARG002  # ends need it
        """Free blocks that go with a victim."""
        for row in (run.blocks, *run.rows):
            for block in reversed(row):
                if not block.ref_cnt:
                    yield block

    def reset(self) -> None:
        """Forget all blocks and start the policy afresh."""
        self.spare.clear()
        self._kv.clear()
        self._ends.clear()
        super().reset()


def _has(held: Held, run: Run) -> bool:
    """Whether a run is on the path of a request."""
    each: NodeRecord | None = held.run
    while each is not None and each is not run:
        each = each.parent
    return each is run


class EndRuns(WideRuns):
    """The host of a pool over the cached blocks of groups of full attention, windows and states.

    The pool is in bytes. KV after the last end of a path is dead, as in a model with states: nobody can
    resume there. So a leaf goes together with its end.
    """

    def __init__(self, binding: Binding, vllm: Any, blocks: Blocks, groups: Groups) -> None:
        """Start with an empty cache; see :class:`costcache.vllm.runs.Runs`."""
        self._free = 0  # blocks that a free end has alone
        self._unit = groups.block_bytes
        self.pool: Any = None
        self._shadow: ShadowEnds | None = None
        super().__init__(_priced(binding, groups), vllm, blocks, groups)

    def _make_pool(self, binding: Binding) -> Pool:
        def make_order(pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
            name, order = rank_ends(binding, pools)
            hash_size = self._vllm.hash_block_size
            self._shadow = None
            # With a drafter an end needs the block after it, too, which the shadow does not follow.
            if not self.groups.proven and order.compares():
                self._shadow = ShadowEnds(self.groups, len(self._vllm.blocks) - 1, self.size // hash_size)
            return name, order

        return binding.pool(
            "memory",
            self.take,
            unit="bytes",
            capacity=(len(self._vllm.blocks) - 1) * self._unit,
            measure=self._measure,
            make_order=make_order,
        )

    def _measure(self) -> PoolState:
        """The pool as it is: what is evictable is what nothing holds, and no more than that."""
        capacity = len(self._vllm.blocks) - 1
        pool, free = self.pool, len(self.spare)
        kv = 0
        if pool is not None:
            kv = (pool.cached - pool.pinned) // self.size
            if self.groups.others:
                kv = max(kv, int(kv * self.groups.density) - len(pool.live) * len(self.groups.others))
        evictable = kv + self._free
        unit = self._unit
        return PoolState(
            "memory",
            "bytes",
            capacity * unit,
            free * unit,
            evictable * unit,
            max(0, capacity - free - evictable) * unit,
            self.groups.step,
        )

    # -- against LRU -------------------------------------------------------------------------

    def follow(self, held: Held, request: Any) -> None:
        """A request's path begins: note what LRU would have found, if this is its first one."""
        shadow, size, step = self._shadow, self.size, self.groups.step
        if shadow is None or self.pool.fell_back:
            return
        prompt, shared = request.num_prompt_tokens, request.shared_prefix_boundary // step * step
        if shared in (prompt // step * step, (prompt - 1) // step * step):
            shared = 0
        path = shadow.begin(request.block_hashes, (request.num_tokens - 1) // size, shared // size)
        held.shadow = path
        record = held.request
        if record.lru_matched is None and not record.counted:
            record.lru_matched = path.found * size

    def advance(
        self, held: Held, blocks: Sequence[Any], end: int, *, found: bool = False, new: bool = False
    ) -> None:
        """Let a request's path go on; see the base class."""
        before = held.length
        super().advance(held, blocks, end, found=found, new=new)
        if self._shadow is not None and held.shadow is not None and not found:
            self._shadow.go_on(held.shadow, held.length, before)

    def _needed(self) -> int:
        """Blocks that the tree or an end needs."""
        return len(self._kv) + len(self._ends)

    # -- ends --------------------------------------------------------------------------------

    def mark(
        self, request: Any, held: Held, boundary: int, *, found: bool = False, counts: bool = False
    ) -> None:
        """Keep what a request holds of the end at a boundary of its path, if that is complete.

        Args:
            request: vLLM's request.
            held: Its path, which goes at least that far.
            boundary: The boundary.
            found: vLLM found the end: the request resumes from it.
            counts: That is a use.
        """
        groups = self.groups
        blocks = groups.end(held.tables, boundary)
        if blocks is None:
            return
        for group in groups.proven:
            block = self._proof(request, held.tables[group.number], group, boundary)
            if block is not None:
                blocks.append(block)
            elif not found:
                return
        run = self._ending(held, boundary)
        if run is None:
            return
        end, shadow, path = run.state, self._shadow, held.shadow
        if shadow is not None and path is not None:
            if not found:
                shadow.mark(path, boundary // self.size)
            elif end is None:
                shadow.spared(path, boundary // self.size)
                if held.request.lru_matched is not None and counts:
                    held.request.lru_matched = path.found * self.size
        if isinstance(end, End):
            if found and blocks != end.blocks and self._is_copy(end, blocks):
                self._swap(end, blocks)
        else:
            step = self.groups.step
            end = self._attach(run, blocks, parts=boundary == request.shared_prefix_boundary // step * step)
        if found:
            end.recent = True
            self.pool.consume(run, counts=counts)

    def _is_copy(self, end: End, blocks: list[Any]) -> bool:
        """Whether not all of the blocks are those of an end."""
        return any(end not in self._ends.get(block.block_id, ()) for block in blocks)

    def release(self, held: Held) -> None:
        """The blocks of a request were freed; see the base class. An end without blocks goes by its run."""
        run: NodeRecord | None = held.run
        shadow = self._shadow
        if shadow is not None and held.shadow is not None:
            shadow.room = max(shadow.room, self._needed())
            shadow.release(held.shadow)
        super().release(held)
        while isinstance(run, WideRun):
            end = run.state
            if isinstance(end, End) and not end.blocks:
                end.recency = run.recency
            run = run.parent

    def _proof(self, request: Any, table: list[Any], group: Any, boundary: int) -> Any:
        """The cached block of full attention after a boundary; None if there is none."""
        at = boundary // group.size
        if at < len(table) and table[at].block_hash is not None:
            return table[at]
        hashes = request.block_hashes
        last = (at + 1) * group.size // self._vllm.hash_block_size - 1
        if last >= len(hashes):
            return None
        found = self._vllm.get_cached_block(hashes[last], [group.number])
        return found[0] if found else None

    def _ending(self, held: Held, boundary: int) -> WideRun | None:
        """The run of a path that ends at a boundary, split off if need be."""
        run = held.run
        while run.depth >= boundary and run.parent is not None:
            run = run.parent
        if not isinstance(run, WideRun) or run.end < boundary:
            return None
        if run.end > boundary:
            part = self._split(run, (boundary - run.depth) // self.size)
            return part if isinstance(part, WideRun) else None
        return run

    def _attach(self, run: WideRun, blocks: list[Any], *, parts: bool = False) -> End:
        end = End(run, blocks, self.pool.clock)
        end.parts = parts
        self._gain(end)
        self.pool.attach(run, end)
        return end

    def _gain(self, end: End) -> None:
        """An end has its blocks from now on."""
        ends, kv, spare = self._ends, self._kv, self.spare
        one, alone = (end,), 0
        for number in [block.block_id for block in end.blocks]:
            others = ends.get(number)
            if others is None:
                ends[number] = one
                if number not in kv:
                    alone += 1
                    spare.pop(number, None)
            else:
                ends[number] = (*others, end)
                if len(others) == 1 and number not in kv:
                    self._count(others[0], -1)
        end.alone, end.held = alone, len([True for block in end.blocks if block.ref_cnt])
        if not end.held:
            self._free += alone

    def _part_with(self, end: End) -> None:
        """An end gives up its blocks. Those that nothing else needs are spare."""
        ends, kv, spare, last = self._ends, self._kv, self.spare, self._vllm._reuse_watchers
        if not end.held:
            self._free -= end.alone
        for block in reversed(end.blocks):
            number = block.block_id
            having = ends.pop(number)
            if len(having) > 1:
                ends[number] = others = tuple(each for each in having if each is not end)
                if len(others) == 1 and number not in kv:
                    self._count(others[0], 1)
            elif not (number in kv or block.ref_cnt or block._block_hash is None or number in last):
                spare[number] = block  # see _give_up

    def _count(self, end: End, more: int) -> None:
        end.alone += more
        if not end.held:
            self._free += more

    def _swap(self, end: End, blocks: list[Any]) -> None:
        self._part_with(end)
        end.blocks = blocks
        self._gain(end)

    def _drop_end(self, run: WideRun) -> None:
        end = run.state
        self.pool.detach(run)
        if isinstance(end, End):
            self._part_with(end)

    def _joined(self, number: int) -> None:
        ends = self._ends[number]
        if len(ends) == 1:
            self._count(ends[0], -1)

    def _left(self, number: int) -> None:
        ends = self._ends[number]
        if len(ends) == 1:
            self._count(ends[0], 1)

    def _drop_tail(self, run: Run, keep: int) -> None:
        if isinstance(run, WideRun) and run.state is not None:
            self._drop_end(run)
        if keep:  # orders that rank ends hear of whole nodes only
            self._split(run, keep)
        super()._drop_tail(run, 0)

    # -- what vLLM does with blocks ------------------------------------------------------------

    def touched(self, blocks: Iterable[Any]) -> None:
        """Blocks have one more reference each."""
        known, spare = self._ends, self.spare
        numbers = [block.block_id for block in blocks if block.ref_cnt == 1]
        if spare:
            for number in numbers:
                spare.pop(number, None)
        if known.keys().isdisjoint(numbers):
            return
        for number in numbers:
            for end in known.get(number, ()):
                if not end.held:
                    self._free -= end.alone
                end.held += 1

    def freed(self, blocks: Iterable[Any]) -> None:
        """Blocks have one reference less each. An end is as recent as the first of its blocks to be free."""
        known, spare, last, clock = self._ends, self.spare, self._vllm._reuse_watchers, self.pool.clock
        # Blocks of the tree are in no end, but for those that a drafter needs.
        kv: dict[int, int] = {} if self.groups.proven else self._kv
        for block in blocks:
            if block.ref_cnt or block._block_hash is None:  # the null block has none either
                continue
            number = block.block_id
            if number in kv:
                continue
            ends = known.get(number)
            if ends is None:
                if number not in self._kv and number not in last:
                    spare[number] = block  # see _give_up
                continue
            for end in ends:
                end.held -= 1
                if not end.held:
                    self._free += end.alone
                if end.recent:
                    end.recent = False
                    clock.accesses += 1
                    end.recency = clock.accesses
                    self.pool.refresh(end.run)

    def lose(self, block: Any) -> None:
        """A free block has lost its contents, or is about to: what cannot be found without it is spare."""
        self._lose_ends(block)
        super().lose(block)

    def lose_in_use(self, block: Any) -> None:
        """A block has lost its contents while requests hold it."""
        self._lose_ends(block)
        super().lose_in_use(block)

    def _lose_ends(self, block: Any) -> None:
        for end in self._ends.get(block.block_id, ()):
            self._drop_end(end.run)

    # -- evictions ---------------------------------------------------------------------------

    def _evict(self, blocks: int) -> None:
        self.evict(blocks * self._unit)
        if self._shadow is not None:
            self._shadow.room = self._needed()

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Give up the end of a run, or a leaf: its end, and as much of its tail as is needed."""
        run = victim.record
        if not isinstance(run, WideRun) or self.pool.live.get(run.serial) is not run:
            return Refused.NOT_A_LEAF
        end, before = run.state, len(self.spare)
        if victim.action is _TOMBSTONE:
            if not isinstance(end, End):
                return Refused.NOT_A_LEAF
            if end.locks:
                return Refused.LOCKED
            self._drop_end(run)
            return (len(self.spare) - before) * self._unit or Refused.NOT_NOW
        if run.live_children:
            return Refused.NOT_A_LEAF
        if run.locks:
            return Refused.LOCKED
        if not self._free_from_the_end(run.blocks, len(run.blocks) - 1) and not self._frees(end):
            return Refused.NOT_NOW
        if end is not None:
            self._drop_end(run)
        missing = -(-needed // self._unit) - (len(self.spare) - before)
        if missing > 0:
            keep = max(0, len(run.blocks) - ceil(missing / self.groups.density))
            count = self._free_from_the_end(run.blocks, keep)
            if count:
                if count < len(run.blocks):
                    self._split(run, len(run.blocks) - count)
                self._drop_tail(run, 0)
        return (len(self.spare) - before) * self._unit or Refused.NOT_NOW

    def _frees(self, end: State | None) -> bool:
        """Whether there are blocks that are free and that only this end has."""
        return isinstance(end, End) and any(True for _ in self._only(end))

    def _only(self, end: End) -> Iterator[Any]:
        """Free blocks that only this end has, the last ones first."""
        ends, kv, last = self._ends, self._kv, self._vllm._reuse_watchers
        for block in reversed(end.blocks):
            number = block.block_id
            if not (block.ref_cnt or number in kv or number in last or len(ends[number]) > 1):
                yield block

    def _blocks_of(self, victim: Victim, run: WideRun) -> Iterator[Any]:
        end = run.state
        if isinstance(end, End):
            yield from self._only(end)
        if victim.action is _DELETE:
            yield from super()._blocks_of(victim, run)

    def reset(self) -> None:
        """Forget all blocks and start the policy afresh."""
        self._free = 0
        super().reset()


def _priced(binding: Binding, groups: Groups) -> Binding:
    """A binding with the bytes that vLLM's blocks have: to a policy, an end is a state."""
    token = binding.cost.token.model_copy(
        update={
            "kv_bytes": max(1, round(groups.block_bytes * groups.density / groups.first.size)),
            "state_bytes": max(1, round(groups.block_bytes * groups.end_blocks)),  # chunks of a block: 0
        }
    )
    return replace(binding, cost=binding.cost.model_copy(update={"token": token}))
