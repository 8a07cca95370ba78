"""From SGLang's build context to our cache: settings, model, plugin, order and tree core."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)

from costcache._version import described
from costcache.deployment import Deployment, KVDtype
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.plugins import PluginManager, get_plugins
from costcache.settings import Settings, read_settings
from costcache.sglang.cache import CostCache
from costcache.sglang.choice import choose_core
from costcache.sglang.components import COMPONENTS
from costcache.sglang.fastcore import FastTreeCore
from costcache.sglang.plan import Plan
from costcache.sglang.pycore import CORE
from costcache.sglang.readback import describe_pools

__all__ = ["PREFIX", "build", "make_cache", "policy_names", "read_policy", "refuse"]

logger = logging.getLogger("costcache")

STOCK_POLICIES = frozenset({"lru", "lfu", "slru", "priority", "tlru", "fifo", "mru", "filo"})
"""SGLang's own names: the same names as ours, for the same orders."""

PREFIX = "costcache:"

KV_DTYPES: dict[str, KVDtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2",
}


def read_policy(name: str, config: dict[str, Any] | None) -> Settings:
    """The settings that a policy name and its JSON object say.

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
        nested = {key: values.pop(key) for key in list(values) if key not in Settings.model_fields}
        if nested:
            values["policy_settings"] = {**nested, **values.get("policy_settings", {})}
    if chosen != "costcache" and values.setdefault("policy", chosen) != chosen:
        raise SettingsError(
            f"--radix-eviction-policy is {name!r} and its config has policy {values['policy']!r}: "
            "give one of the two"
        )
    return read_settings(Settings, values)


def read_deployment(ctx: Any, kv_dtype: str) -> Deployment:
    """How the server runs the model, from its arguments and pools."""
    args, params = ctx.server_args, ctx.params
    replicas = getattr(args, "attn_dp_size", None) or (args.dp_size if args.enable_dp_attention else 1)
    return Deployment(
        tp=ctx.tp_size,
        dp_attention=int(replicas),
        pp=args.pp_size,
        # Four-byte KV is for tests on CPU: priced as two bytes, and compared as four.
        kv_dtype=KV_DTYPES.get(kv_dtype, "bf16"),
        page_size=params.page_size,
    )


def refuse(ctx: Any) -> None:
    """Raise for what our cache has not been tried with; never fall back in silence.

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


def build(
    original: Any,
    ctx: Any,
    settings: Settings,
    *,
    cache_class: Any = None,
    plugins: PluginManager | None = None,
) -> Any:
    """Build our cache where SGLang builds its own.

    Args:
        original: SGLang's ``create_unified_radix_cache``.
        ctx: Its build context.
        settings: What the command line says.
        cache_class: A cache class that somebody else asks for: refused.
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
    model = ModelSpec.from_config(ctx.model_config.hf_config)
    dtype = str(getattr(kv_pool, "dtype", "bfloat16")).removeprefix("torch.")
    draft = Plan.of(model, read_deployment(ctx, dtype), settings, plugins=plugins)
    params.tree_components = _components(ctx)  # SGLang's builder says so itself, after this
    core, reason = choose_core(
        params,
        settings,
        draft.sample_order(),
        host_tier=ctx.enable_hierarchical_cache
        or get_disagg().disaggregation_decode_retraction_backup == "host_pool",
        linker=get_memory().enable_unified_cache_external_linker,
    )
    plan = replace(draft, core=core, reason=reason)
    cache = original(ctx, cache_class=make_cache(params, plan))
    architecture = plan.architecture
    if get_memory().enable_unified_memory:
        logger.warning(
            "costcache: under --enable-unified-memory our order names the victims, but SGLang's walk takes "
            "them whole: no trimming and no headroom"
        )
    logger.info(
        "costcache %s: plugin %r (specificity %d) for %s, policy %r, %s core (%s), %s, class %s",
        described(),
        architecture.name,
        architecture.specificity,
        model.architecture,
        cache.pools.kv.guard.name,
        core,
        reason,
        describe_pools(params, plan),
        type(cache).__name__,
    )
    return cache


def _components(ctx: Any) -> tuple[ComponentType, ...]:
    return (
        ComponentType.FULL,
        *((ComponentType.SWA,) if ctx.is_hybrid_swa else ()),
        *((ComponentType.MAMBA,) if ctx.is_hybrid_ssm else ()),
    )


def make_cache(params: Any, plan: Plan) -> Any:
    """What makes the cache of SGLang's parameters: point these at our parts."""
    params.eviction_policy, params.eviction_policy_config = "lru", None
    if plan.core == "rust":
        from costcache.sglang import rustcore

        params.tree_core_backend = rustcore.CORE
        _register_core(rustcore.CORE, rustcore.CostRustCore)
    else:
        params.component_registry_override = {**COMPONENTS, **(params.component_registry_override or {})}
        params.tree_core_backend = CORE
        _register_core(CORE, FastTreeCore)
    return functools.partial(CostCache, plan=plan)


def _register_core(name: str, core: Any) -> None:
    if get_tree_core_factory(name) is None:
        register_tree_core_backend(name, core)


def policy_names(plugins: PluginManager | None = None) -> list[str]:
    """The names that the command line gets: ``costcache`` and ``costcache:NAME`` for every policy."""
    plugins = get_plugins() if plugins is None else plugins
    return ["costcache", *(PREFIX + name for name in plugins.policies())]
