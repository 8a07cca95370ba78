"""Patches of SGLang's objects, for one cache each: faster freeing of slots, and exact shortfalls.

On the device SGLang evicts the shortfall. Three places of its host tier evict all that is asked for,
though part of it is free: a pool's own reclaim, room for the hits of a storage backend, and a decode server's
room for a request. They get a reclaim that asks for the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

__all__ = ["exact_reclaims", "pre_alloc_host", "slot_freer"]


def slot_freer(allocator: Any) -> Callable[[Sequence[Any]], None]:
    """Make a function that frees the slots of nodes, which are whole pages in the order of their tokens.

    Returns:
        A function that takes one tensor of slots per node, int64 of shape [tokens], and frees all of
        them. The allocator's free list, and its order, are as after its own ``free_segment``.
    """
    import torch

    if type(allocator) is TokenToKVPoolAllocator:
        free = allocator.free

        def free_at_once(parts: Sequence[Any]) -> None:
            free(parts[0] if len(parts) == 1 else torch.cat(tuple(parts)))

        return free_at_once

    if type(allocator) is not PagedTokenToKVPoolAllocator or allocator.debug_mode:
        free_segment = allocator.free_segment

        def free_segments(parts: Sequence[Any]) -> None:
            for slots in parts:
                free_segment(slots, start_pos=0)

        return free_segments

    free_pages, divide, step = allocator.free_page_ids, torch.floor_divide, allocator.page_size
    # A tensor, so that it is not converted at each call.
    page_size = torch.tensor(step)

    def free_whole_pages(parts: Sequence[Any]) -> None:
        if len(parts) == 1:
            free_pages(divide(parts[0][::step], page_size))
            return
        pages = [slots[::step] for slots in parts]
        if not allocator.need_sort and allocator.free_group is None:
            pages.reverse()  # it puts freed pages before free ones
        free_pages(divide(torch.cat(pages), page_size))

    return free_whole_pages


def exact_reclaims(cache: Any) -> None:
    """Make a cache's host tier evict exactly its shortfall: the request less the free slots."""
    group, controller = cache.host_pool_group, cache.cache_controller
    alloc, allocate_hit = group.alloc, controller.allocate_storage_hit

    def alloc_exactly(
        need_size: int, *, pool: Any = None, reclaim: Callable[[int], Any] | None = None, **more: Any
    ) -> Any:
        if reclaim is not None:
            reclaim = _difference(reclaim, group.get_entry(pool).host_pool.available_size)
        return alloc(need_size, pool=pool, reclaim=reclaim, **more)

    def allocate_hit_exactly(*args: Any, evict_host: Callable[[int], Any], **more: Any) -> Any:
        available = controller.mem_pool_host.available_size
        return allocate_hit(*args, evict_host=_difference(evict_host, available), **more)

    group.alloc = alloc_exactly
    controller.allocate_storage_hit = allocate_hit_exactly


def _difference(reclaim: Callable[[int], Any], available: Callable[[], int]) -> Callable[[int], Any]:
    def reclaim_difference(demand: int) -> Any:
        # With enough slots free, the allocation failed for other memory, which the same leaves own.
        short = demand - available()
        return reclaim(short if short > 0 else demand)

    return reclaim_difference


def pre_alloc_host(original: Callable[..., Any], queue: Any, *args: Any) -> Any:
    """Wrap the step in which a decode server makes room on the host for a request's KV.

    SGLang asks for all that the request takes, if any of it is missing.
    """
    cache = queue.tree_cache
    if not hasattr(cache, "evicting_the_shortfall"):
        return original(queue, *args)
    with cache.evicting_the_shortfall():
        return original(queue, *args)
