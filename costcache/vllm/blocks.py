"""What vLLM's block pool, its free list and its KV cache manager tell the runs, and what they ask.

Some methods of vLLM's own objects are replaced, on these objects alone. What vLLM does stays as it is; the
calls are reported once it has done it. If a report fails, vLLM's own list, which is kept in vLLM's own order
all the time, decides from then on.

The objects keep their classes: with another class, or a subclass, Python would run vLLM's own loops over
blocks a fifth slower.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from costcache.vllm.metrics import Sent
from costcache.vllm.requests import info, keep_list, life_of
from costcache.vllm.runs import Held, Runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from costcache.binding import Binding

__all__ = ["NAME", "Blocks"]

logger = logging.getLogger("costcache")

NAME = "costcache"
"""Attribute of vLLM's block pool that has the :class:`Blocks`."""


class Blocks:
    """Stands in for methods of one KV cache manager, its block pool and its free list.

    Attributes:
        runs: The runs; None once vLLM's own order has taken over.
        sent: What the engine core sends of the pool's counts.
        leaving: Paths of requests that gave up their blocks before these are free, by the last one's id.
        request: The request that blocks are being allocated for.
    """

    def __init__(self, manager: Any, binding: Binding) -> None:
        """Replace the methods."""
        self._pool = pool = manager.block_pool
        self._queue = queue = pool.free_block_queue
        runs = self._make_runs(manager, binding)
        self.runs: Runs | None = runs
        self.sent = Sent(runs.pool)
        self.leaving: dict[int, Held] = {}
        self.request: Any = None
        self.first = queue.popleft_n
        self._iter_blocks_after = queue.iter_blocks_after
        self._touch = pool.touch
        self._cache_full_blocks = pool.cache_full_blocks
        self._free_blocks = pool.free_blocks
        self._evict_blocks = pool.evict_blocks
        self._reset_prefix_cache = pool.reset_prefix_cache
        self._allocate_slots = manager.allocate_slots
        self._free = manager.free
        self._pop_blocks_for_free = manager.pop_blocks_for_free
        for thing, names in (
            (queue, ("popleft_n", "iter_blocks_after")),
            (pool, ("touch", "cache_full_blocks", "free_blocks", "evict_blocks", "reset_prefix_cache")),
            (manager, ("allocate_slots", "free", "pop_blocks_for_free")),
        ):
            for name in names:
                setattr(thing, name, getattr(self, name))

    def _make_runs(self, manager: Any, binding: Binding) -> Runs:
        self._group = manager.coordinator.single_type_managers[0]
        return Runs(binding, self._pool, self)

    def give_up(self, what: str, error: Exception) -> None:
        """Leave the choice to vLLM's own LRU from now on."""
        logger.error("costcache: %s failed, and vLLM's own LRU takes over", what, exc_info=error)
        self.runs = None
        self.sent.given_up += 1
        self.leaving.clear()

    # -- the free list -----------------------------------------------------------------------

    def popleft_n(self, n: int) -> list[Any]:
        """Take the next ``n`` blocks to evict."""
        runs = self.runs
        if runs is None or not n:
            return self.first(n)  # type: ignore[no-any-return]  # it is vLLM's
        runs.taken = []
        try:
            taken = runs.victims(n)
        except Exception as error:
            self.give_up("choosing victims", error)
            taken = runs.taken
            if len(taken) < n:
                taken += self.first(n - len(taken))
        if len(taken) > n:  # the policy evicts more than is needed: they are free, and next
            more = taken[n:]
            del taken[n:]
            for block in more:
                self._pool._maybe_evict_cached_block(block)
            self._queue.prepend_n(more)
        return taken

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Free blocks in the order of eviction.

        From the first one, wherever the last reader stopped: in between the policy may have changed its mind.
        """
        if self.runs is None:
            return self._iter_blocks_after(cursor)  # type: ignore[no-any-return]  # as above
        return self.runs.ranked()

    # -- the block pool ----------------------------------------------------------------------

    def touch(self, blocks: Sequence[Any]) -> None:
        """Blocks were found for a request, if one is being allocated."""
        self._touch(blocks)
        if self.request is not None:
            self.follow(self.request, blocks, len(blocks), found=True)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Blocks of a request are full. Those of its prompt are reported at once, others when it ends."""
        self._cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        if num_full_blocks * block_size <= request.num_prompt_tokens:
            self.follow(request, blocks, num_full_blocks, new=num_cached_blocks)
        elif num_cached_blocks < num_full_blocks:
            keep_list(request, blocks)

    def follow(
        self,
        request: Any,
        blocks: Sequence[Any],
        count: int,
        *,
        found: bool = False,
        new: int | None = None,
    ) -> None:
        """Let a request's path go on to its first ``count`` blocks.

        They were ``found``, or nobody else has seen those from number ``new`` on.
        """
        runs = self.runs
        if runs is None or not count:
            return
        try:
            life = life_of(request, runs.pool)
            held = life.held
            if held is None:
                held = life.held = runs.hold(life.record)
                if found and not life.record.counted:  # a resumed request finds its own tokens
                    life.record.matched = count * runs.size
            if new is not None and held.length < new:
                runs.advance(held, blocks, new, found=True)
            runs.advance(held, blocks, count, found=found, new=new is not None)
        except Exception as error:
            self.give_up("following a request", error)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Blocks were freed; if they are those of a request, from back to front, it ends."""
        runs = self.runs
        stray = runs is not None and runs.stray
        if not self.leaving and not stray:
            self._free_blocks(ordered_blocks)
            return
        ordered = list(ordered_blocks)
        self._free_blocks(ordered)
        if self.leaving:
            self.release(self.leaving.pop(ordered[0].block_id, None) if ordered else None)
        if stray and self.runs is not None:
            try:
                self.runs.gather(ordered)
            except Exception as error:
                self.give_up("freeing blocks", error)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Blocks lost their contents: they and what follows them are next."""
        runs, blocks = self.runs, self._pool.blocks
        if runs is None:
            self._evict_blocks(block_ids)
            return
        numbers = {
            number: blocks[number].block_hash_num_tokens // runs.size - 1
            for number in sorted(block_ids)
            if blocks[number].block_hash is not None
        }
        self._evict_blocks(block_ids)
        try:
            for number, at in numbers.items():
                block = blocks[number]
                if block.ref_cnt:
                    runs.lost[number] = at
                elif runs.forget(block, at):
                    self.discard([block])
        except Exception as error:
            self.give_up("evicting blocks", error)

    def discard(self, blocks: list[Any]) -> None:
        """Evict free blocks that nobody can find: they come first from now on."""
        pool, queue = self._pool, self._queue
        for block in blocks:
            pool._maybe_evict_cached_block(block)
        free = [block for block in blocks if block.block_id not in pool._reuse_watchers]
        for block in free:
            queue.remove(block)
        queue.prepend_n(free)

    def reset_prefix_cache(self) -> bool:
        """All blocks lost their contents, if none is in use."""
        done: bool = self._reset_prefix_cache()
        if done and self.runs is not None:
            self.leaving.clear()
            self.runs.reset()
        return done

    # -- the KV cache manager ----------------------------------------------------------------

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate blocks for a request."""
        self.request = request
        try:
            return self._allocate_slots(request, *args, **kwargs)
        finally:
            self.request = None

    def free(self, request: Any) -> None:
        """Free the blocks of a request."""
        held = self._leave(request)
        self._free(request)
        self.release(held)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Give the blocks of a request to the scheduler, which frees them later, from back to front."""
        held = self._leave(request)
        blocks: list[Any] = self._pop_blocks_for_free(request)
        if held is not None:
            self.leaving[blocks[-1].block_id] = held  # the last block is always the request's own
        return blocks

    def _leave(self, request: Any) -> Held | None:
        """A request is about to give up its blocks: returns its path, to be released once they are free."""
        runs, name = self.runs, request.request_id
        blocks = self._group.req_to_blocks.get(name)
        if runs is None or not blocks:
            return None
        count = self._group.num_cached_block.get(name, 0)
        try:
            life = life_of(request, runs.pool)
            if life.held is None or life.held.length < count:
                self.follow(request, blocks, count)
            held, life.held = life.held, None
            if held is not None and runs.pool.hears_finish and request.is_finished():
                held.info = info(request, life.record)
            return held
        except Exception as error:
            self.give_up("ending a request", error)
            return None

    def release(self, held: Held | None) -> None:
        """The blocks of a request are free."""
        if held is not None and self.runs is not None:
            try:
                self.runs.release(held)
            except Exception as error:
                self.give_up("ending a request", error)
