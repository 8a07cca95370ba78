"""costcache in vLLM's CPU offload tier: a ``CachePolicy`` that vLLM loads by name.

In ``--kv-transfer-config``, the connector's extra config names it::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64000000000,
        "cache_policy_module_path": "costcache.vllm.offload", "eviction_policy": "hazard"}}

``eviction_policy`` is ``costcache`` or the name of a policy, see :func:`__getattr__`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.v1.kv_offload.base import ReqContext  # noqa: TID253 # vLLM loads this
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy  # noqa: TID253 # vLLM loads this
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy  # noqa: TID253 # vLLM loads this

from costcache._version import described
from costcache.errors import CostcacheError, SettingsError
from costcache.plugins import get_plugins
from costcache.vllm import build
from costcache.vllm.chunks import Chunks
from costcache.vllm.offload_settings import chunk_tokens, read_offload_config
from costcache.vllm.registration import log_as_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from costcache.binding import Binding
    from costcache.cost import CostModel

F = TypeVar("F", bound="Callable[..., Any]")

__all__ = ["CostCachePolicy"]

logger = logging.getLogger("costcache")


def guarded(method: F) -> F:
    """Let vLLM's own LRU take over, and answer, if a call of vLLM's fails."""

    @functools.wraps(method)
    def call(self: CostCachePolicy, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            self._give_up(method.__name__, error)
            return getattr(self.lru, method.__name__)(*arguments)

    return cast("F", call)


class CostCachePolicy(CachePolicy):
    """Evicts by a policy of costcache.

    A policy that fails is replaced by LRU, see :mod:`costcache.guard`. If anything else here fails, vLLM's
    own LRU takes over, with the chunks in their order: a cache must not stop the server.
    """

    policy: str | None = None
    """The policy's name; None for the one that the settings name."""

    def __init__(self, cache_capacity: int) -> None:
        """Make the tier's policy; vLLM does.

        Args:
            cache_capacity: Chunks.

        Raises:
            CostcacheError: A setting is wrong, or no policy can serve the model.
        """
        super().__init__(cache_capacity)
        log_as_vllm()
        config = build.current()
        if config is None:
            raise SettingsError(
                "costcache cannot see vLLM's configuration: its plugin is not loaded. Leave 'costcache' in "
                "VLLM_PLUGINS, or leave that variable unset"
            )
        settings = read_offload_config(config, self.policy)
        self.settings = settings
        self.binding = binding = build.bind(config, settings, chunk_tokens(config))
        clients = build.current_clients()
        clients.listening = True
        self.chunks = Chunks(binding, cache_capacity, clients.of)
        # vLLM asks for each chunk, and often: no function of ours is in between.
        setattr(self, "get", self.chunks.held.get)  # noqa: B010 # it replaces a method
        if build.is_tested(settings) and _tells_enough(settings):
            self._log(binding)
        else:
            self._hand_over()

    def _log(self, binding: Binding) -> None:
        from vllm import __version__

        architecture = binding.architecture
        logger.info(
            "costcache %s: vLLM %s, plugin %r (specificity %d) for %s, policy %r, CPU offload tier of %d "
            "chunks of %d tokens",
            described(),
            __version__,
            architecture.name,
            architecture.specificity,
            architecture.model.architecture,
            self.chunks.pool.policy,
            self.cache_capacity,
            binding.page_size,
        )

    def priced(self) -> CostModel:
        """The cost model at the speeds of the settings."""
        speeds = ("flops_per_second", "host_link_bytes_per_second")
        given = {name: value for name in speeds if (value := getattr(self.settings, name)) is not None}
        return self.binding.architecture.cost(self.binding.cost.deployment.model_copy(update=given))

    # -- failures ----------------------------------------------------------------------------

    def _give_up(self, what: str, error: Exception) -> None:
        """Leave the tier to vLLM's own LRU from now on."""
        logger.error("costcache: %s failed, and vLLM's own LRU takes over", what, exc_info=error)
        self._hand_over()

    def _hand_over(self) -> None:
        self.lru, held, nobody = LRUCachePolicy(self.cache_capacity), self.chunks.held, ReqContext("")
        try:
            keys = list(dict.fromkeys(self.chunks.least_recent_first()))
        except Exception:
            logger.exception("costcache: the order of LRU is lost, too")
            keys = list(held)
        for key in keys:
            self.lru.insert(key, held[key], nobody)
        for name in _ANSWERED:
            setattr(self, name, getattr(self.lru, name))

    # -- vLLM's calls --------------------------------------------------------------------------

    def get(self, key: Any) -> Any:
        """The status of a chunk, None if it is not in the tier."""
        return self.chunks.held.get(key)

    @guarded
    def insert(self, key: Any, chunk: Any, req_context: Any) -> None:
        """A request stores a chunk."""
        self.chunks.store(key, chunk, req_context)

    @guarded
    def remove(self, key: Any) -> None:
        """A chunk could not be stored."""
        self.chunks.forget(key)

    @guarded
    def touch(self, keys: Iterable[Any], req_context: Any) -> None:  # noqa: ARG002 # it is not a request's use
        """Chunks are wanted again."""
        self.chunks.touch(keys)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        """A request is going to store chunks: no use of any other."""

    @guarded
    def on_request_access(self, keys: Iterable[Any], req_context: Any) -> None:
        """A request names chunks for the first time."""
        self.chunks.name(keys, req_context)

    @guarded
    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],  # noqa: ARG002 # the chunks that it named
        insertion_only_keys: set[Any],  # noqa: ARG002 # those of them that it stored
        reused_keys: set[Any],  # noqa: ARG002 # and the others
        req_context: Any,
    ) -> None:
        """A request ends."""
        self.chunks.end(req_context)

    @guarded
    def mark_non_evictable(self, key: Any) -> None:
        """A chunk is going to be read."""
        self.chunks.begin_transfer(key)

    @guarded
    def mark_evictable(self, key: Any) -> None:
        """A chunk was written, or its last reader has it."""
        self.chunks.end_transfer(key)

    @guarded
    def evict(self, n: int, protected: set[Any]) -> Any:
        """Evict exactly ``n`` chunks, or none and return None."""
        return self.chunks.evict(n, protected)

    @guarded
    def clear(self) -> None:
        """Forget all chunks."""
        self.chunks.clear()


def _tells_enough(settings: build.VllmSettings) -> bool:
    """Whether this version of vLLM tells its policies which request uses a chunk; it does since 0.33."""
    if hasattr(CachePolicy, "on_request_access"):
        return True
    problem = "costcache: the offload tier of this version of vLLM tells a policy too little"
    if settings.untested == "refuse":
        raise CostcacheError(
            f"{problem}: use vLLM 0.33.0, or set 'untested' to 'lru' to keep vLLM's own LRU until then"
        )
    logger.warning("%s, so vLLM's own LRU stays in force", problem)
    return False


_ANSWERED = [name for name in vars(CachePolicy) if not name.startswith("_")]


def __getattr__(name: str) -> type[CachePolicy]:
    """The class that ``eviction_policy`` names: ``costcache``, or any policy of costcache or of a plugin.

    vLLM's own ``lru`` and ``arc`` come before ours of these names: ours are ``costcache`` with the setting
    ``policy``.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return _class_of(name)


@functools.cache
def _class_of(name: str) -> type[CachePolicy]:
    if name == build.KEY:
        return CostCachePolicy
    known = get_plugins().policies()
    if name not in known:
        raise AttributeError(
            f"eviction_policy is {name!r}: costcache has {', '.join(sorted({build.KEY, *known}))}"
        )
    return type("CostCachePolicy", (CostCachePolicy,), {"policy": name, "__module__": __name__})
