"""What SGLang's real pools hold per token and per state, next to what our cost model says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costcache.sglang.plan import Plan

__all__ = ["describe_pools", "pool_bytes"]

logger = logging.getLogger("costcache")


def pool_bytes(params: Any) -> dict[str, float]:
    """Bytes per token (``kv``, ``swa``) and per state (``state``) of one rank's pools.

    Each pool keeps one page, or one state, more than it hands out: slot 0 takes writes that nobody wants.
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


def describe_pools(params: Any, plan: Plan) -> str:
    """The pools in words; warns where the cost model is off by more than a byte in a thousand."""
    try:
        found = pool_bytes(params)
    except Exception as error:  # pools of other platforms: a figure for the log is no reason to fail
        logger.warning(
            "costcache: the pools' sizes cannot be read back (%r); the cost model is unchecked", error
        )
        return "pools not read back"
    allocator = params.token_to_kv_pool_allocator
    wide = "float32" in str(getattr(allocator.get_kvcache(), "dtype", ""))
    words = []
    for name, bytes_found in found.items():
        unit = "state" if name == "state" else "token"
        expected = plan.bytes_of(name) * (2 if wide and name != "state" else 1)
        words.append(f"{bytes_found:,.0f} B per {unit} of pool {name!r} (cost model: {expected:,})")
        if abs(bytes_found - expected) > expected / 1000:
            logger.warning(
                "costcache: pool %r holds %s bytes per %s and the cost model of plugin %r says %s: decisions "
                "that weigh bytes against recomputing will be off by that factor",
                name,
                f"{bytes_found:,.1f}",
                unit,
                plan.architecture.name,
                f"{expected:,}",
            )
    return f"{', '.join(words)}, {allocator.size_full:,} tokens in pages of {plan.page_size}"
