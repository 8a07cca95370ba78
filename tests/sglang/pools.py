"""Real SGLang pools, allocators and caches on CPU, small enough to fill in a test."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel, publish, reset_context
from sglang.srt.server_args import ServerArgs

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.settings import read_settings
from costcache.sglang.build import SglangSettings, make_cache, speeds
from costcache.sglang.cache import CostCache

Kind = Literal["mha", "mla", "mamba", "mla_mamba", "swa", "v4"]
KINDS: tuple[Kind, ...] = ("mha", "mla", "mamba", "mla_mamba", "swa")

DTYPE = torch.bfloat16
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
HEADS = {"head_num": 1, "head_dim": 8}
RATIOS = [0, 4, 128]


@dataclass(frozen=True)
class Shape:
    """Shape of the pools to build.

    Attributes:
        kind: Attention kind: mha and mla have one pool; mamba and mla_mamba add state slots; swa
            adds a pool for the sliding-window layers; v4 is DeepSeek-V4, in pages of 256.
        page_size: Tokens per page.
        tokens: KV slots.
        states: State slots (mamba kinds).
        window: Sliding window, in tokens, and its pool's slots (swa, v4).
        requests: Requests that can run at once.
        core: Tree core: "python", "rust", or the name of a registered one.
        hicache: Write policy of a host tier, or None for no host tier.
        storage: Folder of SGLang's storage backend "file" behind the host tier, or None.
        host_ratio: Slots of the host tier over those of the device.
        unified: KV and states share one buffer, of as many bytes (mamba alone).
        params: More arguments for CacheInitParams.
    """

    kind: Kind = "mha"
    page_size: int = 1
    tokens: int = 4096
    states: int = 24
    window: int = 64
    window_tokens: int | None = None
    requests: int = 8
    context: int = 16384
    core: str = "python"
    hicache: str | None = None
    storage: str | None = None
    host_ratio: float = 2.0
    unified: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def has_states(self) -> bool:
        return self.kind in ("mamba", "mla_mamba")

    @property
    def components(self) -> tuple[ComponentType, ...]:
        if self.has_states:
            return (ComponentType.FULL, ComponentType.MAMBA)
        if self.has_windows:
            return (ComponentType.FULL, ComponentType.SWA)
        return (ComponentType.FULL,)

    @property
    def has_windows(self) -> bool:
        return self.kind in ("swa", "v4")

    @property
    def extra_buffer(self) -> bool:
        """Whether states are kept at chunk ends too; without it stock allows page 1 only."""
        return self.has_states and self.page_size > 1


def publish_args(shape: Shape, **overrides: Any) -> ServerArgs:
    """Give this process the configuration that the classes look up."""
    reset_context()
    if shape.hicache is not None:
        overrides = {
            "enable_hierarchical_cache": True,
            "hicache_ratio": shape.host_ratio,
            "hicache_write_policy": shape.hicache,
            "hicache_io_backend": "direct",
            # State pools exist in this layout only.
            "hicache_mem_layout": "page_first_direct" if shape.has_states else "layer_first",
            **overrides,
        }
    if shape.storage is not None:
        overrides = {
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(
                {"file_storage_path": shape.storage, "prefetch_threshold": 1}
            ),
            **overrides,
        }
    if shape.unified:
        overrides = {"enable_unified_memory": True, **overrides}
    args = ServerArgs(model_path="dummy", device="cpu", **overrides)
    args._mamba_cache_chunk_size = 64  # else it is looked up in the dummy model's config
    publish(args, role="tokenizer")
    if shape.storage is not None:  # its files are named by rank
        get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_dcp_rank=0)
    return args


def pools(shape: Shape) -> tuple[Any, Any]:
    """The request pool and the KV allocator."""
    memory = {"device": "cpu", "enable_memory_saver": False}
    layers = [0, 1]
    if shape.has_states:
        state = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=32,
            n_groups=1,
            num_heads=2,
            head_dim=16,
            state_size=16,
            conv_kernel=4,
        )
        linear = [0, 2]
        if shape.unified:
            return _unified(shape, Mamba2CacheParams(shape=state, layers=linear))
        requests: Any = HybridReqToTokenPool(
            size=shape.requests,
            mamba_size=shape.states,
            mamba_spec_state_size=shape.requests,
            max_context_len=shape.context,
            cache_params=Mamba2CacheParams(shape=state, layers=linear),
            mamba_layer_ids=linear,
            enable_mamba_extra_buffer=shape.extra_buffer,
            **memory,
        )
        kv: Any = HybridLinearKVPool(
            size=shape.tokens,
            dtype=DTYPE,
            page_size=shape.page_size,
            full_attention_layer_ids=[1, 3],
            device="cpu",
            mamba_pool=requests.mamba_pool,
            use_mla=shape.kind == "mla_mamba",
            **HEADS,
            **(LATENT if shape.kind == "mla_mamba" else {}),
        )
    else:
        requests = ReqToTokenPool(size=shape.requests, max_context_len=shape.context, **memory)
        common = {"size": shape.tokens, "page_size": shape.page_size, "dtype": DTYPE}
        if shape.kind == "swa":
            window_tokens = shape.window_tokens or shape.tokens
            kv = SWAKVPool(
                **common,
                **HEADS,
                size_swa=window_tokens,
                swa_attention_layer_ids=layers[:1],
                full_attention_layer_ids=layers[1:],
                device="cpu",
            )
            return requests, SWATokenToKVPoolAllocator(
                **common, size_swa=window_tokens, device="cpu", kvcache=kv, need_sort=False
            )
        if shape.kind == "v4":
            return requests, _compressed(shape)
        if shape.kind == "mla":
            kv = MLATokenToKVPool(**common, **LATENT, layer_num=len(layers), **memory)
        else:
            kv = MHATokenToKVPool(**common, **HEADS, layer_num=len(layers), enable_alt_stream=False, **memory)
    if shape.page_size == 1:
        allocator: Any = TokenToKVPoolAllocator(
            size=shape.tokens, dtype=DTYPE, device="cpu", kvcache=kv, need_sort=False
        )
    else:
        allocator = PagedTokenToKVPoolAllocator(
            size=shape.tokens,
            page_size=shape.page_size,
            dtype=DTYPE,
            device="cpu",
            kvcache=kv,
            need_sort=False,
        )
    return requests, allocator


def _compressed(shape: Shape) -> SWATokenToKVPoolAllocator:
    """DeepSeek-V4's, as SGLang makes them on CUDA: latents follow the slots of the full context."""
    window_tokens = shape.window_tokens or shape.tokens
    common = {"page_size": shape.page_size, "dtype": torch.float8_e4m3fn, "device": "cpu"}
    kv = DeepSeekV4TokenToKVPool(
        max_num_reqs=shape.requests,
        swa_size=window_tokens,
        full_size=shape.tokens,
        c4_size=shape.tokens // 4,
        c128_size=shape.tokens // 128,
        c4_state_pool_size=window_tokens,
        c128_state_pool_size=shape.requests,
        swa_page_size=shape.page_size,
        c4_state_dtype=DTYPE,
        c128_state_dtype=DTYPE,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(RATIOS),
        enable_memory_saver=False,
        compression_ratios=RATIOS,
        sliding_window=shape.window,
        **common,
    )
    return SWATokenToKVPoolAllocator(shape.tokens, window_tokens, **common, kvcache=kv, need_sort=False)


def _unified(shape: Shape, states: Mamba2CacheParams) -> tuple[Any, Any]:
    bundle = init_unified_mamba_pools(
        device="cpu",
        kv_cache_dtype=DTYPE,
        **HEADS,
        v_head_dim=HEADS["head_dim"],
        page_size=shape.page_size,
        start_layer=0,
        end_layer=4,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=states.layers,
        full_attention_layer_ids=[1, 3],
        mamba2_cache_params=states,
        model_context_len=shape.context,
        extra_max_context_len=4,
        max_total_num_tokens=shape.tokens,
        max_mamba_cache_size=shape.states,
        max_num_reqs=shape.requests,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=shape.extra_buffer,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=False,
        need_sort=False,
    )
    return bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator


def init_params(shape: Shape) -> CacheInitParams:
    """Parameters of a cache over fresh pools."""
    requests, allocator = pools(shape)
    return CacheInitParams(
        **{
            "disable": False,
            "req_to_token_pool": requests,
            "token_to_kv_pool_allocator": allocator,
            "page_size": shape.page_size,
            "tree_components": shape.components,
            "tree_core_backend": shape.core,
            "sliding_window_size": shape.window if shape.has_windows else None,
            "enable_mamba_extra_buffer": shape.extra_buffer,
            **shape.params,
        }
    )


CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
LATENT_CONFIG = {**LATENT, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
STATE_CONFIG = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mha": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        **LATENT_CONFIG,
    },
    "mamba": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **STATE_CONFIG},
    "mla_mamba": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **STATE_CONFIG,
        **LATENT_CONFIG,
    },
    "swa": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "max_position_embeddings": 16384,
    },
    "v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(RATIOS),
        "compress_ratios": RATIOS,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "sliding_window": 64,
        "index_head_dim": 128,
        "index_n_heads": 2,
        "index_topk": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
}
"""Configs of models that would have the pools below."""


def bind(shape: Shape, *, plugins: PluginManager | None = None, **settings: Any) -> Binding:
    """The binding of a shape's model; ``settings`` are fields of Settings, LRU by default."""
    chosen = read_settings(SglangSettings, {"policy": "lru", **settings})
    return Binding.of(
        ModelSpec.from_config(CONFIG | CONFIGS[shape.kind]),
        Deployment(
            page_size=shape.page_size, kv_dtype="fp8_e4m3" if shape.kind == "v4" else None, **speeds(chosen)
        ),
        chosen,
        plugins=plugins,
    )


def cost_cache(shape: Shape, *, binding: Binding | None = None, **settings: Any) -> CostCache:
    """Our cache; ``settings`` are fields of Settings, LRU by default."""
    args = publish_args(shape)
    params = init_params(shape)
    core: Literal["python", "rust"] = "rust" if shape.core == "rust" else "python"
    cache: CostCache = make_cache(params, binding or bind(shape, **settings), core)(params)
    if shape.hicache is not None:
        cache.init_hicache(args, params)
    return cache


def stock_cache(shape: Shape) -> UnifiedRadixCache:
    """SGLang's own cache."""
    args = publish_args(shape)
    params = init_params(shape)
    cache = UnifiedRadixCache(params)
    if shape.hicache is not None:
        cache.init_hicache(args, params)
    return cache
