"""The pools that SGLang itself makes for a config, on CPU: its own sizes, of its own classes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

__all__ = ["ModelPools", "model_pools"]

DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PAGES = 2


@dataclass(frozen=True)
class ModelPools:
    """SGLang's config of a model, and its pools, under the names that a cache is given."""

    model_config: ModelConfig
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any


def model_pools(
    config: dict[str, Any], folder: Path, *, kv_dtype: str = "bf16", page_size: int = 64, **arguments: Any
) -> ModelPools:
    """Build what SGLang builds for ``config`` when it starts, a few pages and one state long.

    ``arguments`` are more of the server's (tp_size, for example). The figures are those of one rank; no
    process group is needed for them.
    """
    (folder / "config.json").write_text(json.dumps(config))
    reset_context()
    args = ServerArgs(
        model_path="dummy", device="cpu", page_size=page_size, max_mamba_cache_size=1, **arguments
    )
    args._mamba_cache_chunk_size = 64  # else it is looked up in the dummy model's config
    publish(args, role="tokenizer")
    model = ModelConfig(str(folder))
    dtype = DTYPES[kv_dtype]
    configurator = KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=model,
        server_args=args,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str=str(dtype).removeprefix("torch."),
        model_dtype=torch.bfloat16,
        page_size=page_size,
        sliding_window_size=None,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SpecAuxHiddenStateConfig(),
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=model.is_hybrid_swa_compress,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=object(), model_config=model, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )
    tokens = PAGES * page_size
    windows = tokens if model.is_hybrid_swa else None
    sizes = configurator._derive_pool_sizes(
        config=MemoryPoolConfig(
            max_total_num_tokens=tokens,
            max_running_requests=1,
            full_max_total_num_tokens=windows,
            swa_max_total_num_tokens=windows,
            c4_max_total_num_tokens=tokens // 4,
            c128_max_total_num_tokens=tokens // 128,
        )
    )
    pools = configurator._init_pools(sizes=sizes, req_to_token_pool=None, token_to_kv_pool_allocator=None)
    return ModelPools(model, pools.req_to_token_pool, pools.token_to_kv_pool_allocator)
