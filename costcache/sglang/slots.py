"""Giving the slots of evicted nodes back to SGLang's allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

__all__ = ["slot_freer"]


def slot_freer(allocator: Any) -> Callable[[Sequence[Any]], None]:
    """How to free the slots of nodes, which are whole pages in the order of their tokens.

    Returns:
        A function that takes one tensor of slots per node, int64 of shape [tokens], and frees all of
        them. What ends up in the allocator's free list, and its order, are as with its own ``free_segment``.
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
    # As a tensor it is not made into one at each call.
    page_size = torch.tensor(step)

    def free_whole_pages(parts: Sequence[Any]) -> None:
        if len(parts) == 1:
            free_pages(divide(parts[0][::step], page_size))
            return
        pages = [slots[::step] for slots in parts]
        if not allocator.need_sort and allocator.free_group is None:
            pages.reverse()  # it puts what is freed before what was free
        free_pages(divide(torch.cat(pages), page_size))

    return free_whole_pages
