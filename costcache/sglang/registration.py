"""Puts costcache into SGLang's registries: policy names, the cache backend, and six hooks."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import RADIX_EVICTION_POLICY_CHOICES, add_radix_eviction_policy_choices

from costcache.sglang.arguments import parsed, resolving
from costcache.sglang.build import PREFIX, build, policy_names, read_policy, refuse
from costcache.sglang.cache import CostCache
from costcache.sglang.patches import pre_alloc_host

__all__ = ["is_ours", "register"]

BACKEND = "costcache"


def register() -> None:
    """Register everything, once per process."""
    if BACKEND in registry.registered_radix_cache_backends():
        return
    # The names are choices of the command line only. They are not added to SGLang's table of strategies, so
    # that a build which misses our hook ends in SGLang's own error, not in another order.
    add_radix_eviction_policy_choices(
        [name for name in policy_names() if name not in RADIX_EVICTION_POLICY_CHOICES]
    )
    registry.register_radix_cache_backend(BACKEND, backend)
    HookRegistry.register(
        "sglang.srt.mem_cache.registry.create_unified_radix_cache", create_unified, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.mem_cache.registry.create_tree_cache", create_tree, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.prepare_server_args", parsed, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", resolving, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._pre_alloc_host",
        pre_alloc_host,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_policy.SchedulePolicy._touch_waiting_prefixes",
        touch_waiting_prefixes,
        HookType.AROUND,
    )


def is_ours(policy: str) -> bool:
    """Whether a policy name is one of those registered here."""
    return policy == BACKEND or policy.startswith(PREFIX)


def create_unified(original: Any, ctx: Any, *, cache_class: Any = None) -> Any:
    """Wrap SGLang's builder: build our cache if the policy is one of ours."""
    params = ctx.params
    if not is_ours(params.eviction_policy):
        return original(ctx, cache_class=cache_class)
    settings = read_policy(params.eviction_policy, params.eviction_policy_config)
    return build(original, ctx, settings, cache_class=cache_class)


def create_tree(original: Any, ctx: Any) -> Any:
    """Wrap SGLang's choice of a cache: refuse clearly the options that bypass the builder."""
    if is_ours(ctx.params.eviction_policy) and not ctx.disable_radix_cache:
        from sglang.srt.runtime_context import get_memory

        refuse(ctx)
        named = get_memory().radix_cache_backend
        if named and named != BACKEND:
            from costcache.errors import SettingsError

            raise SettingsError(
                f"--radix-eviction-policy is {ctx.params.eviction_policy!r} and --radix-cache-backend is "
                f"{named!r}: costcache orders its own cache only; drop one of the two"
            )
    return original(ctx)


def backend(ctx: Any) -> Any:
    """``--radix-cache-backend costcache``: SGLang's policy names mean our orders of that name.

    Without ``--radix-eviction-policy`` the policy is ``costcache``.
    """
    from sglang.srt.runtime_context import get_memory

    params = ctx.params
    name = params.eviction_policy
    if name == "lru" and not get_memory()._radix_eviction_policy_explicitly_set:
        name = BACKEND
    settings = read_policy(name, params.eviction_policy_config)
    # The builder may or may not be wrapped by the hook (SGLANG_PLUGINS, tests): both work.
    params.eviction_policy = "lru"
    return build(registry.create_unified_radix_cache, ctx, settings)


def touch_waiting_prefixes(original: Any, self: Any, policy: Any, waiting_queue: list[Any]) -> None:
    """Wrap the scheduler's refresh of waiting requests' prefixes.

    SGLang does it under the policy name "lru" alone. Our orders rank by recency too, or ignore it.
    """
    from sglang.srt.environ import envs
    from sglang.srt.managers import schedule_policy as scheduling

    cache = self.tree_cache
    if not isinstance(cache, CostCache) or scheduling.get_memory().radix_eviction_policy.lower() == "lru":
        original(self, policy, waiting_queue)
        return
    if (
        isinstance(policy, scheduling.CacheAwarePolicy)
        or not waiting_queue
        or not envs.SGLANG_ENABLE_WAITING_PREFIX_REFRESH.get()
        or scheduling.get_disagg().disaggregation_mode == "decode"
        or cache.supports_fast_match_prefix()
        or not cache.supports_prefix_sharing()
    ):
        return
    turn = self._waiting_prefix_refresh_calls % scheduling.WAITING_PREFIX_REFRESH_INTERVAL
    self._waiting_prefix_refresh_calls += 1
    if turn:
        return
    # The head of the queue last, so that it is the most recent.
    for req in reversed(waiting_queue[: scheduling.WAITING_QUEUE_PREFIX_MATCH_MAX]):
        scheduling.touch_waiting_prefix(req, cache)
