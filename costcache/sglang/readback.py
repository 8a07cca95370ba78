"""Bytes per token and per state of SGLang's real pools, compared with the cost model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costcache.binding import Binding

__all__ = ["describe_pools", "pool_bytes"]

logger = logging.getLogger("costcache")


def pool_bytes(params: Any) -> dict[str, float]:
    """Bytes per token (``kv``, ``swa``) and per state (``state``) of one rank's pools.

    Each pool has one page, or one state, more than it hands out: slot 0 absorbs writes to be discarded.
    """
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    page = pool.page_size
    found: dict[str, float] = {}
    if hasattr(pool, "swa_kv_pool"):
        found["kv"] = _total(pool.full_kv_pool) / (pool.full_kv_pool.size + page)
        found["swa"] = _total(pool.swa_kv_pool) / (pool.swa_kv_pool.size + page)
    else:
        inner = getattr(pool, "full_kv_pool", pool)
        found["kv"] = _total(inner) / (inner.size + page)
    states = getattr(params.req_to_token_pool, "mamba_pool", None)
    if states is not None and getattr(params.req_to_token_pool, "mamba_ckpt_pool", None) is None:
        found["state"] = states.mamba_cache.mem_usage_bytes() / (states.size + 1)
    return found


def _total(pool: Any) -> int:
    size = pool.get_kv_size_bytes()
    return int(sum(size)) if isinstance(size, tuple) else int(size)


def _expected(binding: Binding, pool: str) -> int:
    """Bytes of one unit of a pool on one rank, by the cost model."""
    token = binding.cost.token
    return {"swa": token.swa_bytes, "state": token.state_bytes}.get(pool, token.kv_bytes)


def describe_pools(params: Any, binding: Binding) -> str:
    """Describe the pools in words; warns if the cost model is off by more than a byte in a thousand."""
    try:
        found = pool_bytes(params)
    except Exception as error:  # pools of other platforms: do not fail for a figure in the log
        logger.warning(
            "costcache: the pools' sizes cannot be read back (%r); the cost model is unchecked", error
        )
        return "pools not read back"
    allocator = params.token_to_kv_pool_allocator
    wide = "float32" in str(getattr(allocator.get_kvcache(), "dtype", ""))
    words = []
    for name, bytes_found in found.items():
        unit = "state" if name == "state" else "token"
        expected = _expected(binding, name) * (2 if wide and name != "state" else 1)
        words.append(f"{bytes_found:,.0f} B per {unit} of pool {name!r} (cost model: {expected:,})")
        if abs(bytes_found - expected) > expected / 1000:
            logger.warning(
                "costcache: pool %r holds %s bytes per %s and the cost model of plugin %r says %s: decisions "
                "that weigh bytes against recomputing will be off by that factor",
                name,
                f"{bytes_found:,.1f}",
                unit,
                binding.architecture.name,
                f"{expected:,}",
            )
    return f"{', '.join(words)}, {allocator.size_full:,} tokens in pages of {binding.page_size}"
