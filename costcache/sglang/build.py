"""Builds our cache from SGLang's build context: settings, model, policy and tree core."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)

from costcache._version import described
from costcache.binding import Binding
from costcache.deployment import Deployment, KVDtype
from costcache.errors import SettingsError
from costcache.model import CompressedAttention, ModelSpec
from costcache.plugins import PluginManager, get_plugins
from costcache.recording.settings import ServerSettings, recording_asked
from costcache.settings import Settings, read_settings
from costcache.sglang.cache import CostCache
from costcache.sglang.components import COMPONENTS
from costcache.sglang.fastcore import FastTreeCore
from costcache.sglang.pycore import CORE
from costcache.sglang.readback import describe_pools, index_dtype, state_dtypes

if TYPE_CHECKING:
    from costcache.recording.recorder import Recorder

__all__ = [
    "PREFIX",
    "SglangSettings",
    "build",
    "choose_core",
    "make_cache",
    "policy_names",
    "read_policy",
    "refuse",
    "refuse_pools",
    "speeds",
]

logger = logging.getLogger("costcache")

STOCK_POLICIES = frozenset({"lru", "lfu", "slru", "priority", "tlru", "fifo", "mru", "filo"})
"""SGLang's own names; ours are the same, for the same orders."""

PREFIX = "costcache:"

KV_DTYPES: dict[str, KVDtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2",
    "float4_e2m1fn_x2": "fp4_e2m1",
}


class SglangSettings(ServerSettings):
    """Settings of costcache inside SGLang: those of every server, and those of its host tier."""

    host_tier: Literal["stock", "by_cost"] = Field(
        "stock",
        description="In SGLang, with --enable-hierarchical-cache: 'stock' copies to the host and loads back "
        "what SGLang's write policy does; 'by_cost' of that only what saves time, by the chance of reuse, "
        "the FLOPs to compute it and the bytes to load it.",
    )
    flops_per_second: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="For 'by_cost': FLOP/s of one accelerator in a prefill, as measured; by default the peak "
        "of an H100.",
    )
    host_link_bytes_per_second: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="For 'by_cost': bytes per second from host memory to one accelerator, as measured; by "
        "default the peak of PCIe 5.0 x16.",
    )


def read_policy(name: str, config: dict[str, Any] | None) -> SglangSettings:
    """Read the settings that a policy name and its JSON object give.

    Args:
        name: ``costcache``, ``costcache:NAME``, or one of SGLang's own names, whose JSON is that of SGLang:
            the parameters of the policy, at the top.
        config: The JSON object.

    Raises:
        SettingsError: Names the field, its value and what is allowed.
    """
    values = dict(config or {})
    chosen = name[len(PREFIX) :] if name.startswith(PREFIX) else name
    if name in STOCK_POLICIES:
        nested = {key: values.pop(key) for key in list(values) if key not in SglangSettings.model_fields}
        if nested:
            values["policy_settings"] = {**nested, **values.get("policy_settings", {})}
    if chosen != "costcache" and values.setdefault("policy", chosen) != chosen:
        raise SettingsError(
            f"--radix-eviction-policy is {name!r} and its config has policy {values['policy']!r}: "
            "give one of the two"
        )
    return read_settings(SglangSettings, values)


def read_deployment(ctx: Any, kv_dtype: str, settings: Settings | None = None) -> Deployment:
    """Read how the server runs the model from its arguments and pools."""
    args, params = ctx.server_args, ctx.params
    return Deployment(
        tp=ctx.tp_size,
        dp_attention=_replicas(ctx),
        pp=args.pp_size,
        # Four-byte KV is for tests on CPU: priced as two bytes, and compared as four.
        kv_dtype=KV_DTYPES.get(kv_dtype, "bf16"),
        index_dtype=index_dtype(params),
        decode_context_parallel=getattr(args, "dcp_size", None) or 1,
        page_size=params.page_size,
        **state_dtypes(params),
        **speeds(settings),
    )


def speeds(settings: Settings | None) -> dict[str, float]:
    """Fields of a deployment that the settings give."""
    names = ("flops_per_second", "host_link_bytes_per_second")
    given = {name: getattr(settings, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _replicas(ctx: Any) -> int:
    """Groups of ranks that serve requests of their own."""
    args = ctx.server_args
    return int(getattr(args, "attn_dp_size", None) or (args.dp_size if args.enable_dp_attention else 1))


def refuse(ctx: Any) -> None:
    """Refuse options that our cache is not tested with; never fall back silently.

    Raises:
        SettingsError: Names the option and what to do.
    """
    from sglang.srt.hardware_backend.mlx.runtime import use_mlx
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    other = None
    if memory.enable_lmcache:
        other = "--enable-lmcache has a prefix cache of its own"
    elif memory.enable_flexkv:
        other = "--enable-flexkv has a prefix cache of its own"
    elif ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0:
        other = "a model of sliding-window layers alone has a prefix cache of its own in SGLang"
    elif memory.enable_hierarchical_cache and memory.hicache_host_memory_mode == "buffer_only":
        other = "--hicache-host-memory-mode buffer_only has not been tried"
    elif use_mlx() or hasattr(ctx.params.req_to_token_pool, "req_to_c128_sidecar"):
        other = "this platform's own cache components have not been tried"
    if other is not None:
        raise SettingsError(
            f"costcache cannot serve here: {other}. Drop that option, or --radix-eviction-policy costcache"
            " (and --radix-cache-backend costcache)"
        )


def refuse_pools(model: ModelSpec, params: Any, *, host_tier: bool) -> None:
    """Refuse pools of DeepSeek-V4 that our eviction has not been tried with.

    Its latents follow the slots of full attention, and its windows are paged like those of other models: on
    CUDA both are evicted as theirs are.

    Raises:
        SettingsError: Names the option, and what to do.
    """
    if not any(isinstance(layer, CompressedAttention) for layer in model.layers):
        return
    allocator = params.token_to_kv_pool_allocator
    other = None
    if host_tier:
        other = "its pools have not been tried with a host tier. Drop --enable-hierarchical-cache"
    elif getattr(allocator, "swa_req_ring", False):
        other = "rings of windows per request have not been tried. Drop SGLANG_HACK_FLASHMLA_BACKEND"
    elif getattr(allocator.get_kvcache(), "request_window", None) is not None:
        other = "windows per request have not been tried. Drop --enable-encoder-swa-bounded-replay"
    if other is not None:
        raise SettingsError(
            f"costcache cannot serve {model.name!r} here: {other}, or use --radix-eviction-policy lru"
        )


def build(
    original: Any,
    ctx: Any,
    settings: ServerSettings,
    *,
    cache_class: Any = None,
    plugins: PluginManager | None = None,
) -> Any:
    """Build our cache in place of SGLang's own.

    Args:
        original: SGLang's ``create_unified_radix_cache``.
        ctx: Its build context.
        settings: The settings of the command line.
        cache_class: Another plugin's cache class; refused if given.
        plugins: Where to look for plugins; the process's own by default.

    Raises:
        SettingsError: A setting is wrong, or something asked for cannot be combined.
        PluginError: No plugin or policy can serve the model.
        ConfigError: The model's config cannot be read.
    """
    from sglang.srt.runtime_context import get_disagg, get_memory

    params = ctx.params
    if ctx.disable_radix_cache:
        # Nothing is cached, so nothing is evicted; under a policy name that SGLang knows.
        params.eviction_policy, params.eviction_policy_config = "lru", None
        logger.warning("costcache: --disable-radix-cache is on, so there is nothing to decide")
        return original(ctx, cache_class=cache_class)
    refuse(ctx)
    if cache_class is not None:
        raise SettingsError(
            f"costcache cannot serve here: {cache_class.__name__} replaces SGLang's cache too"
        )
    kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
    plugins = get_plugins() if plugins is None else plugins
    model = plugins.read(ctx.model_config.hf_config)
    refuse_pools(model, params, host_tier=ctx.enable_hierarchical_cache)
    dtype = str(getattr(kv_pool, "dtype", "bfloat16")).removeprefix("torch.")
    binding = Binding.of(model, read_deployment(ctx, dtype, settings), settings, plugins=plugins)
    params.tree_components = _components(ctx)  # SGLang's builder says so itself, after this
    core, reason = choose_core(
        params,
        binding,
        host_tier=ctx.enable_hierarchical_cache
        or get_disagg().disaggregation_decode_retraction_backup == "host_pool",
        linker=get_memory().enable_unified_cache_external_linker,
    )
    cache = original(ctx, cache_class=make_cache(params, binding, core))
    cache.recorder = _recorder(ctx, settings, cache)
    architecture = binding.architecture
    if get_memory().enable_unified_memory:
        logger.warning(
            "costcache: under --enable-unified-memory our order names the victims, but SGLang's walk evicts "
            "them whole: no trimming and no headroom"
        )
    logger.info(
        "costcache %s: plugin %r (specificity %d) for %s, policy %r, %s core (%s), %s, class %s",
        described(),
        architecture.name,
        architecture.specificity,
        model.architecture,
        cache.pools.kv.policy,
        core,
        reason,
        describe_pools(params, binding),
        type(cache).__name__,
    )
    return cache


def _recorder(ctx: Any, settings: ServerSettings, cache: Any) -> Recorder | None:
    """The recorder of a cache, on one of the ranks that serve the same requests; None if none is asked for.

    Raises:
        SettingsError: A setting is wrong, or the folder cannot be written to.
    """
    asked = recording_asked(settings.record)
    params = ctx.params
    if asked is None:
        return None
    asked.tokens_per_hash(params.page_size)  # wrong on every rank, or on none
    if ctx.tp_rank % (ctx.tp_size // _replicas(ctx)) or params.pp_rank:
        return None
    from sglang import __version__

    from costcache.recording.recorder import Recorder

    return Recorder(
        asked,
        params.page_size,
        server=f"sglang {__version__}",
        policy=cache.pools.kv.policy,
        architecture=cache.binding.architecture.model.architecture,
        capacity=cache.pools.kv.state().capacity if cache.full_alone else None,
        chunk=max(0, params.chunked_prefill_size or 0),  # -1 computes each prompt at once
        trim=cache.pools.trim_step,
    )


def choose_core(
    params: Any, binding: Binding, *, host_tier: bool = False, linker: bool = False
) -> tuple[Literal["python", "rust"], str]:
    """Choose the tree core: SGLang's Rust core if it can serve this cache, else its Python core.

    Args:
        params: SGLang's ``CacheInitParams``, as SGLang made them: no components of ours in them yet.
        binding: The model and its policy; the settings ``core`` and ``trim`` decide.
        host_tier: HiCache, or retraction to the host, will be attached.
        linker: An external cache linker will be attached.

    Returns:
        The core, and the reason in a few words, for the log.

    Raises:
        SettingsError: ``core`` is ``"rust"``, and that core cannot serve this cache.
    """
    settings = binding.settings
    if settings.core == "python":
        return "python", "asked for"
    why = why_not_rust(params, binding, host_tier=host_tier, linker=linker)
    if settings.core == "rust":
        if why is not None:
            raise SettingsError(f"setting 'core' is 'rust', but {why}: set it to 'auto' or 'python'")
        return "rust", "asked for"
    if why is not None:
        return "python", why
    return "rust", "SGLang's own choice for full attention alone"


def why_not_rust(
    params: Any, binding: Binding, *, host_tier: bool = False, linker: bool = False
) -> str | None:
    """Say why the Rust core cannot serve this cache; None if it can.

    Takes the arguments of :func:`choose_core`.
    """
    from sglang.srt.mem_cache.unified_cache import tree_core_registry
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    if tuple(params.tree_components) != (ComponentType.FULL,):
        names = "+".join(component.name for component in params.tree_components)
        return f"the model needs {names} and the Rust core takes victims for FULL alone"
    if host_tier:
        return (
            "a host tier is attached, and the Rust core does not expose which nodes are leaves on the device"
        )
    if linker:
        return "an external cache linker is attached"
    if binding.settings.trim == "exact":
        return "setting 'trim' is 'exact', and the Rust core can cut at chunks only"
    if not binding.spec.leaves_only:
        return f"the policy {binding.policy!r} looks at more than leaves"
    backend = tree_core_registry.select_tree_core_backend(params)
    if backend != "rust":
        reason: str | None = tree_core_registry._rust_fallback_reason(params)
        return reason or f"SGLang is told to use its tree core {backend!r}"
    return _broken()


@functools.cache
def _broken() -> str | None:
    """Try the Rust core once, on one token: one built for another torch loads and then panics."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    try:
        from array import array

        from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore

        core = RustUnifiedTreeCore(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=None,
                page_size=1,
                tree_components=(ComponentType.FULL,),
            )
        )
        key = RadixKey(array("q", [1]))
        core.begin_insert(InsertParams(key=key, value=torch.zeros(1, dtype=torch.int64)))
        found = core.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
    except BaseException as error:  # a panic of the core is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"SGLang's Rust tree core does not work here with torch {torch.__version__}: {error!r}"
    return None if found == 1 else "SGLang's Rust tree core does not find the tokens that were put into it"


def _components(ctx: Any) -> tuple[ComponentType, ...]:
    return (
        ComponentType.FULL,
        *((ComponentType.SWA,) if ctx.is_hybrid_swa else ()),
        *((ComponentType.MAMBA,) if ctx.is_hybrid_ssm else ()),
    )


def make_cache(params: Any, binding: Binding, core: Literal["python", "rust"] = "python") -> Any:
    """Put our components and core into SGLang's parameters; returns the constructor of the cache."""
    params.eviction_policy, params.eviction_policy_config = "lru", None
    if core == "rust":
        from costcache.sglang import rustcore

        params.tree_core_backend = rustcore.CORE
        _register_core(rustcore.CORE, rustcore.CostRustCore)
    else:
        params.component_registry_override = {**COMPONENTS, **(params.component_registry_override or {})}
        params.tree_core_backend = CORE
        _register_core(CORE, FastTreeCore)
    return functools.partial(CostCache, binding=binding, core=core)


def _register_core(name: str, core: Any) -> None:
    if get_tree_core_factory(name) is None:
        register_tree_core_backend(name, core)


def policy_names(plugins: PluginManager | None = None) -> list[str]:
    """The names that the command line gets: ``costcache`` and ``costcache:NAME`` for every policy."""
    plugins = get_plugins() if plugins is None else plugins
    return ["costcache", *(PREFIX + name for name in plugins.policies())]
