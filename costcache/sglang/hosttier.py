"""Exact shortfalls for SGLang's host tier.

On the device SGLang evicts what is missing. Two places of its host tier evict all that is asked for,
though part of it is free: a pool's own reclaim, and room for what a storage backend has found. They
get a reclaim that asks for the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["exact_reclaims"]


def exact_reclaims(cache: Any) -> None:
    """Wrap the two places, in the objects of one cache."""
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
        # With enough free, the allocation failed for something else that the same leaves hold.
        short = demand - available()
        return reclaim(short if short > 0 else demand)

    return reclaim_difference
