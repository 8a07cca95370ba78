"""Which tree core holds a cache: SGLang's Rust core where it can do what is asked, else its Python core."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from costcache.errors import SettingsError
from costcache.policies.keyed import FIFO, FILO, LFU, LRU, MRU, SLRU, Priority

if TYPE_CHECKING:
    from costcache.orders import VictimOrder
    from costcache.settings import Settings

__all__ = ["choose_core", "why_not_rust"]

LEAF_ORDERS = (FIFO, FILO, LFU, LRU, MRU, Priority, SLRU)


def choose_core(
    params: Any, settings: Settings, order: VictimOrder, *, host_tier: bool = False, linker: bool = False
) -> tuple[Literal["python", "rust"], str]:
    """Choose the tree core.

    Args:
        params: SGLang's ``CacheInitParams``, as SGLang made them: no components of ours in them yet.
        settings: ``core`` and ``trim`` decide.
        order: An order of the chosen policy.
        host_tier: HiCache, or retraction to the host, will be attached.
        linker: An external cache linker will be attached.

    Returns:
        The core, and the reason in a few words, for the log.

    Raises:
        SettingsError: ``core`` is ``"rust"``, and it cannot do what is asked.
    """
    if settings.core == "python":
        return "python", "asked for"
    why = why_not_rust(params, settings, order, host_tier=host_tier, linker=linker)
    if settings.core == "rust":
        if why is not None:
            raise SettingsError(f"setting 'core' is 'rust', but {why}: set it to 'auto' or 'python'")
        return "rust", "asked for"
    if why is not None:
        return "python", why
    return "rust", "SGLang's own choice for full attention alone"


def why_not_rust(
    params: Any, settings: Settings, order: VictimOrder, *, host_tier: bool = False, linker: bool = False
) -> str | None:
    """Why the Rust core cannot hold this cache under our orders; None where it can.

    Takes what :func:`choose_core` takes.
    """
    from sglang.srt.mem_cache.unified_cache import tree_core_registry
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    if tuple(params.tree_components) != (ComponentType.FULL,):
        names = "+".join(component.name for component in params.tree_components)
        return f"the model needs {names} and the Rust core takes our victims for FULL alone"
    if host_tier:
        return "a host tier is attached, and the Rust core does not tell what is a leaf on the device"
    if linker:
        return "an external cache linker is attached"
    if settings.trim == "exact":
        return "setting 'trim' is 'exact', and the Rust core can cut at chunks only"
    if not needs_leaves_only(order):
        return f"the order {type(order).__name__} looks at more than leaves"
    backend = tree_core_registry.select_tree_core_backend(params)
    if backend != "rust":
        reason: str | None = tree_core_registry._rust_fallback_reason(params)
        return reason or f"SGLang is told to use its tree core {backend!r}"
    return _broken()


def needs_leaves_only(order: VictimOrder) -> bool:
    """Whether an order can do with what the Rust core lets us know.

    That is: records of leaves, with uses, times and priorities, but depth and tokens as they were at the
    last insert or naming; and no event but those that a :class:`~costcache.orders.KeyedOrder` handles. The
    built-in orders on these are known; another one says so by a class attribute ``leaves_only = True``.
    """
    return bool(getattr(type(order), "leaves_only", type(order) in LEAF_ORDERS))


@cache
def _broken() -> str | None:
    """Try the Rust core once, on one token: built for another torch it loads and then panics."""
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
    except BaseException as error:  # a panic of the core is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"SGLang's Rust tree core does not work here with torch {torch.__version__}: {error!r}"
    return None if found == 1 else "SGLang's Rust tree core does not find what was put into it"
