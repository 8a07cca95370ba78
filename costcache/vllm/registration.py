"""Makes vLLM's schedulers ours: each reads the settings for itself, and is vLLM's own without them."""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from costcache._version import described
from costcache.recording.settings import recording_asked
from costcache.vllm.build import VllmSettings, bind, is_tested, read_config, serving
from costcache.vllm.clients import Clients
from costcache.vllm.metrics import VLLMS_OWN, Sent
from costcache.vllm.mixed import attach

if TYPE_CHECKING:
    from costcache.binding import Binding
    from costcache.recording.settings import RecordSettings
    from costcache.vllm.blocks import Blocks
    from costcache.vllm.recording import Recording

__all__ = ["choose", "chunk_of", "record", "register", "why_not"]

logger = logging.getLogger("costcache")

_MARK = "_costcache"


def register() -> None:
    """Wrap vLLM's choice of a scheduler class, once per process."""
    from vllm.config import SchedulerConfig

    choice = SchedulerConfig.get_scheduler_cls
    if hasattr(choice, _MARK):
        return

    @functools.wraps(choice)
    def get_scheduler_cls(self: Any) -> Any:
        return scheduler_class(choice(self))

    setattr(get_scheduler_cls, _MARK, True)
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    if "vllm.engine.arg_utils" in sys.modules:  # the process that reads the command line, and has the metrics
        check_early(sys.modules["vllm.engine.arg_utils"].EngineArgs)


def check_early(arguments: Any) -> None:
    """Check the settings as soon as the command line has been read, and prepare for the metrics."""
    create = arguments.create_engine_config

    @functools.wraps(create)
    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        config = create(*args, **kwargs)
        settings = read_config(config)
        recording_asked(None if settings is None else settings.record)
        if settings is not None:
            from costcache.vllm import metrics

            metrics.install()
        return config

    arguments.create_engine_config = create_engine_config


def log_as_vllm() -> None:
    """Let our log go where vLLM's goes: vLLM sets up no other logger than its own."""
    vllms = logging.getLogger("vllm")
    if logger.handlers or logging.getLogger().handlers:
        return
    for handler in vllms.handlers:
        logger.addHandler(handler)
    logger.setLevel(vllms.level)


@functools.cache
def scheduler_class(base: Any) -> Any:
    """A scheduler class of vLLM, or of another plugin, that reads the settings when a scheduler is made."""

    class CostScheduler(base):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            settings = read_config(vllm_config)
            asked = settings is not None
            recorded = recording_asked(settings.record if settings is not None else None)
            if asked or recorded is not None:
                log_as_vllm()
            if recorded is not None and not is_tested(settings or VllmSettings()):
                recorded = None
            if settings is not None and not is_tested(settings):
                settings = None
            self._costcache_clients = clients = Clients()
            with serving(vllm_config, clients):  # always: the offload tier alone may have a policy
                super().__init__(vllm_config, *args, **kwargs)
            if settings is not None and choose(self.kv_cache_manager, vllm_config, settings):
                blocks = self.kv_cache_manager.block_pool.costcache
                self._costcache_sent = blocks.sent
                if self.log_stats:
                    blocks.sent.observe(blocks.runs)
            elif asked:
                self._costcache_sent = Sent(None)
            self._costcache_recording: Recording | None = None
            if recorded is not None:
                self._costcache_recording = record(self.kv_cache_manager, vllm_config, recorded)

        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._costcache_recording is not None:
                self._costcache_recording.begin(request)
            self._costcache_clients.arrive(request)
            return super().add_request(request, *args, **kwargs)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._costcache_recording is not None:
                self._costcache_recording.end(request)
            try:
                return super()._free_request(request, *args, **kwargs)
            finally:
                self._costcache_clients.leave(request)

        def make_stats(self, *args: Any, **kwargs: Any) -> Any:
            stats = super().make_stats(*args, **kwargs)
            sent = getattr(self, "_costcache_sent", None)
            if stats is not None and sent is not None:
                sent.add_to(stats)
            return stats

    CostScheduler.__name__ = base.__name__
    CostScheduler.__qualname__ = base.__qualname__
    CostScheduler.__doc__ = base.__doc__
    return CostScheduler


def choose(manager: Any, vllm_config: Any, settings: VllmSettings) -> bool:
    """Let the policy of the settings choose victims, where it can, and log what is in force.

    Args:
        manager: vLLM's ``KVCacheManager``.
        vllm_config: vLLM's configuration.
        settings: The settings.

    Returns:
        Whether it does.

    Raises:
        SettingsError: A setting is wrong.
        PluginError: No plugin or policy can serve the model.
        ConfigError: The model's config cannot be read.
    """
    binding = bind(vllm_config, settings, tokens_per_block(manager))
    reason = why_not(manager)
    if reason is not None:
        logger.warning("costcache: vLLM's own LRU stays in force: %s", reason)
        return False
    _log(attach(manager, binding), manager, binding)
    return True


def record(manager: Any, vllm_config: Any, settings: RecordSettings) -> Recording:
    """Record the requests of a scheduler.

    Raises:
        SettingsError: A setting is wrong, or the folder cannot be written to.
    """
    from costcache.vllm.recording import Recording

    blocks = getattr(manager.block_pool, "costcache", None)
    runs = None if blocks is None else blocks.runs
    names = getattr(vllm_config.model_config.hf_config, "architectures", None) or [""]
    return Recording(
        manager,
        settings,
        tokens_per_block(manager),
        VLLMS_OWN if runs is None else runs.pool.policy,
        names[0],
        chunk_of(vllm_config.scheduler_config),
        None if runs is None else runs.trim_step,
    )


def chunk_of(config: Any) -> int:
    """Tokens that a step computes of a prompt, at most."""
    most: int = config.max_num_batched_tokens
    longest: int = config.long_prefill_token_threshold
    return min(most, longest) if longest > 0 else most


def why_not(manager: Any) -> str | None:
    """Say why no policy can choose among the blocks of a manager; None if one can."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    groups, pool = manager.coordinator.single_type_managers, manager.block_pool
    if not manager.enable_caching:
        return "prefix caching is off, so there is nothing to decide"
    if len(groups) > 1:
        from costcache.vllm.groups import why_not_groups

        return why_not_groups(manager)
    if not groups:
        return "the model has no KV cache groups"
    if type(groups[0]) is not FullAttentionManager:
        return f"its layers are of the kind {type(groups[0].kv_cache_spec).__name__}, not full attention"
    if pool.hash_block_size != groups[0].block_size:
        return f"blocks of {groups[0].block_size} tokens are hashed in parts of {pool.hash_block_size}"
    return None


def tokens_per_block(manager: Any) -> int:
    """Tokens of a block of full attention; of any block if there is none."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    groups = manager.coordinator.single_type_managers
    sizes: list[int] = [group.block_size for group in groups if type(group) is FullAttentionManager]
    return sizes[0] if sizes else groups[0].block_size if groups else 1


def _log(blocks: Blocks, manager: Any, binding: Binding) -> None:
    from vllm import __version__

    if blocks.runs is None:
        return  # it has given up already, and said why
    kv, pool, groups = blocks.runs.pool, manager.block_pool, len(manager.coordinator.single_type_managers)
    architecture = binding.architecture
    logger.info(
        "costcache %s: vLLM %s, plugin %r (specificity %d) for %s, policy %r, pool %r of %d blocks of %d "
        "tokens (%s B per token by the cost model)%s",
        described(),
        __version__,
        architecture.name,
        architecture.specificity,
        architecture.model.architecture,
        kv.policy,
        kv.name,
        pool.num_gpu_blocks - 1,
        binding.page_size,
        f"{binding.cost.token.kv_bytes:,}",
        "" if groups < 2 else f", shared by {groups} KV cache groups",
    )
