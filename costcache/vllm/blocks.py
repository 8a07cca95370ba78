"""What vLLM's block pool, its free list and its KV cache manager tell the runs, and what they ask.

Each class here is put before the class of one of vLLM's own objects, see :func:`adopt`. What vLLM does stays
as it is; the calls are reported once it has done it. If a report fails, vLLM's own list, which is kept in
vLLM's own order all the time, decides from then on.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from costcache.vllm.metrics import Sent
from costcache.vllm.requests import info, keep_list, life_of
from costcache.vllm.runs import Held, Runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from costcache.binding import Binding

__all__ = ["adopt", "attach"]

logger = logging.getLogger("costcache")


def attach(manager: Any, binding: Binding) -> Runs:
    """Let a policy choose the victims of a KV cache manager of one group with full attention."""
    pool = manager.block_pool
    queue = pool.free_block_queue
    runs = Runs(binding, pool)
    for thing, before in ((queue, Queue), (pool, Blocks), (manager, Manager)):
        adopt(thing, before)
    pool.runs = runs
    pool.sent = Sent(runs.pool)
    pool.leaving = {}
    pool.request = None
    queue.pool = pool
    return runs


def adopt(thing: Any, before: type) -> None:
    """Put a class before that of an object, whatever that is."""
    of: Any = type(thing)
    thing.__class__ = _joined(before, of)


@functools.cache
def _joined(before: Any, of: Any) -> Any:
    return type(of.__name__, (before, of), {"__module__": before.__module__})


class Queue:
    """The free list: the policy's victims come first."""

    pool: Blocks

    def popleft_n(self: Any, n: int) -> list[Any]:
        """Take the next ``n`` blocks to evict."""
        pool = self.pool
        runs = pool.runs
        if runs is None or not n:
            return self.first(n)  # type: ignore[no-any-return]
        runs.taken = []
        try:
            taken = runs.victims(n)
        except Exception as error:
            pool.give_up("choosing victims", error)
            taken = runs.taken
            if len(taken) < n:
                taken += self.first(n - len(taken))
        if len(taken) > n:  # the policy evicts more than is needed: they are free, and next
            more = taken[n:]
            del taken[n:]
            for block in more:
                pool._maybe_evict_cached_block(block)
            self.prepend_n(more)
        return taken  # type: ignore[no-any-return]

    def first(self: Any, n: int) -> list[Any]:
        """Take the first ``n`` blocks of the list."""
        return super().popleft_n(n)  # type: ignore[misc,no-any-return]

    def iter_blocks_after(self: Any, cursor: Any) -> Iterator[Any]:
        """Free blocks in the order of eviction.

        From the first one, wherever the last reader stopped: in between the policy may have changed its mind.
        """
        if self.pool.runs is None:
            return super().iter_blocks_after(cursor)  # type: ignore[misc,no-any-return]
        return self.pool.runs.ranked()  # type: ignore[no-any-return]


class Blocks:
    """The block pool: reports what becomes of blocks.

    Attributes:
        runs: The runs; None once vLLM's own order has taken over.
        sent: What the engine core sends of the pool's counts.
        leaving: Paths of requests that gave up their blocks before these are free, by the last one's id.
        request: The request that blocks are being allocated for.
    """

    runs: Runs | None
    sent: Sent
    leaving: dict[int, Held]
    request: Any

    def give_up(self: Any, what: str, error: Exception) -> None:
        """Leave the choice to vLLM's own LRU from now on."""
        logger.error("costcache: %s failed, and vLLM's own LRU takes over", what, exc_info=error)
        self.runs = None
        self.sent.given_up += 1
        self.leaving.clear()

    def touch(self: Any, blocks: Sequence[Any]) -> None:
        """Blocks were found for a request, if one is being allocated."""
        super().touch(blocks)  # type: ignore[misc]
        if self.request is not None:
            self.follow(self.request, blocks, len(blocks), found=True)

    def cache_full_blocks(
        self: Any,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Blocks of a request are full. Those of its prompt are reported at once, others when it ends."""
        super().cache_full_blocks(  # type: ignore[misc]
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        if num_full_blocks * block_size <= request.num_prompt_tokens:
            self.follow(request, blocks, num_full_blocks, new=num_cached_blocks)
        elif num_cached_blocks < num_full_blocks:
            keep_list(request, blocks)

    def follow(
        self: Any,
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
            if life.held is None:
                life.held = runs.hold(life.record)
                if found and not life.record.counted:  # a resumed request finds its own tokens
                    life.record.matched = count * runs.size
            if new is not None:
                runs.advance(life.held, blocks, new, found=True)
            runs.advance(life.held, blocks, count, found=found, new=new is not None)
        except Exception as error:
            self.give_up("following a request", error)

    def leave(self: Any, request: Any, manager: Any) -> Held | None:
        """A request is about to give up its blocks: returns its path, to be released once they are free."""
        runs, name = self.runs, request.request_id
        blocks = manager.req_to_blocks.get(name)
        if runs is None or not blocks:
            return None
        self.follow(request, blocks, manager.num_cached_block.get(name, 0))
        try:
            life = life_of(request, runs.pool)
            held, life.held = life.held, None
            if held is not None and request.is_finished():
                held.info = info(request, life.record)
            return held
        except Exception as error:
            self.give_up("ending a request", error)
            return None

    def free_blocks(self: Any, ordered_blocks: Iterable[Any]) -> None:
        """Blocks were freed; if they are those of a request, from back to front, it ends."""
        if not self.leaving:
            super().free_blocks(ordered_blocks)  # type: ignore[misc]
            return
        ordered = list(ordered_blocks)
        super().free_blocks(ordered)  # type: ignore[misc]
        held = self.leaving.pop(ordered[0].block_id, None) if ordered else None
        if held is not None:
            self.release(held)

    def release(self: Any, held: Held | None) -> None:
        """The blocks of a request are free."""
        if held is not None and self.runs is not None:
            try:
                self.runs.release(held)
            except Exception as error:
                self.give_up("ending a request", error)

    def evict_blocks(self: Any, block_ids: set[int]) -> None:
        """Blocks lost their contents: they and what follows them are next."""
        numbers = {
            number: self.blocks[number].block_hash_num_tokens // self.runs.size - 1
            for number in sorted(block_ids)
            if self.runs is not None and self.blocks[number].block_hash is not None
        }
        super().evict_blocks(block_ids)  # type: ignore[misc]
        try:
            for number, at in numbers.items():
                block = self.blocks[number]
                if block.ref_cnt:
                    self.runs.lost[number] = at
                elif self.runs.forget(block, at):
                    self.discard([block])
        except Exception as error:
            self.give_up("evicting blocks", error)

    def discard(self: Any, blocks: list[Any]) -> None:
        """Evict blocks that nobody can find: those that are free come first from now on."""
        queue = self.free_block_queue
        for block in blocks:
            self._maybe_evict_cached_block(block)
        free = [block for block in blocks if not block.ref_cnt and block.block_id not in self._reuse_watchers]
        for block in free:
            queue.remove(block)
        queue.prepend_n(free)

    def reset_prefix_cache(self: Any) -> bool:
        """All blocks lost their contents, if none is in use."""
        done: bool = super().reset_prefix_cache()  # type: ignore[misc]
        if done and self.runs is not None:
            self.leaving.clear()
            self.runs.reset()
        return done


class Manager:
    """The KV cache manager: says for which request blocks are allocated and freed."""

    def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate blocks for a request."""
        pool = self.block_pool
        pool.request = request
        try:
            return super().allocate_slots(request, *args, **kwargs)  # type: ignore[misc]
        finally:
            pool.request = None

    def free(self: Any, request: Any) -> None:
        """Free the blocks of a request."""
        held = self.block_pool.leave(request, self.coordinator.single_type_managers[0])
        super().free(request)  # type: ignore[misc]
        self.block_pool.release(held)

    def pop_blocks_for_free(self: Any, request: Any) -> list[Any]:
        """Give the blocks of a request to the scheduler, which frees them later, from back to front."""
        pool = self.block_pool
        held = pool.leave(request, self.coordinator.single_type_managers[0])
        blocks: list[Any] = super().pop_blocks_for_free(request)  # type: ignore[misc]
        if held is not None:
            pool.leaving[blocks[-1].block_id] = held  # the last block is always the request's own
        return blocks
