"""Bytes per token and per state of SGLang's real pools, compared with the cost model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from costcache.cost import token_cost
from costcache.deployment import IndexDtype
from costcache.model import StateDtype

if TYPE_CHECKING:
    from costcache.binding import Binding

__all__ = ["describe_pools", "index_dtype", "pool_bytes", "state_dtypes"]

logger = logging.getLogger("costcache")

_STATE_DTYPES: dict[str, StateDtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def pool_bytes(params: Any) -> dict[str, float]:
    """Bytes per token (``kv``, ``swa``) and per state (``state``) of one rank's pools.

    Each pool has one page, or one state, more than it hands out: slot 0 absorbs writes to be discarded.
    """
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    page = pool.page_size
    found: dict[str, float] = {}
    if hasattr(pool, "kv_pools"):  # DeepSeek-V4
        found["kv"] = sum(_rows(part, ratio) for ratio, part in pool.kv_pools.items())
        found["kv"] += sum(_rows(part, ratio) for ratio, part in pool.index_pools.items())
        found["swa"] = _rows(pool.swa_kv_pool, 1)
    elif hasattr(pool, "swa_kv_pool"):
        found["kv"] = _total(pool.full_kv_pool) / (pool.full_kv_pool.size + page)
        found["swa"] = _total(pool.swa_kv_pool) / (pool.swa_kv_pool.size + page)
    else:
        inner = getattr(pool, "full_kv_pool", pool)
        found["kv"] = (_total(inner) + _pooled_keys(pool)) / (inner.size + page)
    states = _states(params)
    if states is not None:
        # Qwen4's n-gram embeddings have states slot by slot beside the others. The few token ids of the last
        # n-gram, which it keeps as well, do not count.
        beside = getattr(getattr(params.req_to_token_pool, "short_conv_pool", None), "conv_state", None)
        held = states.mamba_cache.mem_usage_bytes() + (0 if beside is None else beside.nbytes)
        found["state"] = held / (states.size + 1)
    return found


def state_dtypes(params: Any) -> dict[str, StateDtype]:
    """The dtypes in which states are kept, as fields of a deployment; {} without states.

    Options and environment variables decide them (``--mamba-ssm-dtype``, ``SGLANG_MAMBA_CONV_DTYPE``).
    """
    states = _states(params)
    if states is None:
        return {}
    tensors = {"state_dtype": [states.mamba_cache.temporal], "conv_dtype": states.mamba_cache.conv}
    names = {name: str(held[0].dtype).removeprefix("torch.") for name, held in tensors.items() if held}
    return {name: _STATE_DTYPES[dtype] for name, dtype in names.items() if dtype in _STATE_DTYPES}


def index_dtype(params: Any) -> IndexDtype | None:
    """The dtype of a sparse layer's index keys, where an option or the platform decides it."""
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    if any(getattr(part, "use_fp4_indexer", False) for part in getattr(pool, "index_pools", {}).values()):
        return "fp4"
    keys = getattr(pool, "index_k_pool", None)  # MiniMax-M3
    dtype = str(getattr(pool, "qsa_compressed_dtype", getattr(keys, "dtype", "")))
    if "float8" in dtype:
        return "fp8"
    return "bf16" if "float16" in dtype else None


def _states(params: Any) -> Any:
    """The pool of states, if states and checkpoints of them are one kind of slot."""
    if getattr(params.req_to_token_pool, "mamba_ckpt_pool", None) is not None:
        return None
    return getattr(params.req_to_token_pool, "mamba_pool", None)


def _total(pool: Any) -> int:
    size = pool.get_kv_size_bytes()
    return int(sum(size)) if isinstance(size, tuple) else int(size)


def _pooled_keys(pool: Any) -> int:
    """Qwen4's index keys. Its rings of keys not yet pooled belong to requests, not to tokens."""
    return sum(keys.nbytes for keys in getattr(pool, "qsa_compressed_k_buffer_pool", ()))


def _rows(pool: Any, ratio: int) -> float:
    """Bytes per token of the context, of rows that stand for ``ratio`` tokens each."""
    if pool is None:
        return 0.0
    keys = getattr(pool, "index_k_with_scale_buffer", None)
    buffers = pool.kv_buffer if keys is None else keys
    return float(sum(x.nbytes / (len(x) * pool.page_size * ratio) for x in buffers))


def _expected(binding: Binding, found: dict[str, float]) -> dict[str, int]:
    """Bytes of one unit of each pool on one rank, by the cost model.

    SGLang gives windows a pool of their own for some models only; for the others every layer caches every
    token. It also gives layers that share an earlier layer's K/V (Gemma-3n) room of their own.
    """
    token = binding.cost.token
    layers = binding.cost.spec.layers
    if any(getattr(layer, "kv_shared", False) for layer in layers):
        kept = tuple(
            layer.model_copy(update={"kv_shared": False}) if hasattr(layer, "kv_shared") else layer
            for layer in layers
        )
        token = token_cost(binding.cost.spec.model_copy(update={"layers": kept}), binding.cost.deployment)
    kv = token.kv_bytes if "swa" in found else token.kv_bytes + token.swa_bytes
    return {"kv": kv, "swa": token.swa_bytes, "state": token.state_bytes}


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
    ways = binding.cost.deployment.decode_context_parallel  # rows of one rank, tokens of all of them
    expected = _expected(binding, found)
    words = []
    for name in found:
        unit = "state" if name == "state" else "token"
        bytes_found = found[name] / ways if name == "kv" else found[name]
        bytes_expected = expected[name] * (2 if wide and name != "state" else 1)
        words.append(f"{bytes_found:,.0f} B per {unit} of pool {name!r} (cost model: {bytes_expected:,})")
        if abs(bytes_found - bytes_expected) > max(1, bytes_expected / 1000):
            logger.warning(
                "costcache: pool %r holds %s bytes per %s and the cost model of plugin %r says %s: decisions "
                "that weigh bytes against recomputing will be off by that factor",
                name,
                f"{bytes_found:,.1f}",
                unit,
                binding.architecture.name,
                f"{bytes_expected:,}",
            )
    if "swa" not in found and binding.cost.token.swa_bytes:
        words.append("windows in the same pool, every token of them")
    return f"{', '.join(words)}, {allocator.size_full:,} tokens in pages of {binding.page_size}"
