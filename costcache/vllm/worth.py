"""The offload tier for prompts that are worth it: those that take longer to compute than to copy back.

A prefix is found from its first token on. So a prompt is stored whole or not at all, and the question is how
long it has to be. The work of computing grows faster than the prompt and that of copying with it, so there is
one shortest prompt.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import PrepareStoreOutput  # noqa: TID253 # vLLM loads this
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: TID253 # vLLM loads this
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # noqa: TID253 # vLLM loads this

from costcache.vllm import build
from costcache.vllm.offload import CostCachePolicy

if TYPE_CHECKING:
    from collections.abc import Collection

    from costcache.cost import CostModel

__all__ = ["CostCacheOffloadingSpec", "WorthwhileManager", "shortest_worth"]

logger = logging.getLogger("costcache")


def shortest_worth(cost: CostModel, page: int, longest: int) -> int | None:
    """Find the shortest prompt that takes longer to compute than to copy from host memory.

    Args:
        cost: The cost model, of a deployment with its FLOP/s and its bytes per second.
        page: Tokens of which a stored prompt has a multiple.
        longest: Tokens of the longest prompt.

    Returns:
        Tokens; None if even the longest is not worth it.
    """

    def worth(pages: int) -> bool:
        tokens = pages * page
        return bool(cost.recompute_seconds(0, tokens) > cost.reload_seconds(tokens))

    low, high = 1, max(1, longest // page)
    if not worth(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if worth(middle):
            high = middle
        else:
            low = middle + 1
    return low * page


class WorthwhileManager(CPUOffloadingManager):
    """vLLM's manager of the tier, which stores no prompt that is too short.

    Attributes:
        shortest: Tokens of the shortest prompt to store; None to store nothing.
    """

    shortest: int | None

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        """Store the chunks of a request, or, if its prompt is too short, only use those that there are."""
        if self.shortest is None or _length(keys, req_context) < self.shortest:
            keys = [key for key in keys if self._policy.get(key) is not None]
        return super().prepare_store(keys, req_context)


def _length(keys: Collection[Any], context: Any) -> int:
    """Tokens of a request, as far as vLLM has named its chunks; it names those of a whole prompt at once."""
    positions = getattr(context, "_offload_key_positions", None)
    if positions is None:
        positions = {key: context.get_offload_key_position(key) or 0 for key in keys}
    return max(positions.values(), default=0)


class CostCacheOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec of the CPU tier with costcache's policy, and with its settings for what is worth storing.

    In the connector's extra config: ``"spec_name": "CostCacheOffloadingSpec", "spec_module_path":
    "costcache.vllm.worth"``; the policy is ``eviction_policy``, or that of the entry ``costcache``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.eviction_policy = self.extra_config.get("eviction_policy", build.KEY)
        self.cache_policy_module_path = self.extra_config.get(
            "cache_policy_module_path", CostCachePolicy.__module__
        )

    def get_manager(self) -> Any:
        """Make the manager; the scheduler does, once."""
        if self._manager is not None:
            return self._manager
        manager: Any = super().get_manager()
        policy = manager._policy
        settings = getattr(policy, "settings", None)
        if settings is None or not settings.worth:
            return manager
        cost, page = policy.priced(), policy.chunks.size
        manager.__class__ = WorthwhileManager
        manager.shortest = shortest_worth(cost, page, self.config.model.max_model_len or 1 << 20)
        if manager.shortest is None:
            logger.warning("costcache: no prompt takes longer to compute than to copy: nothing is offloaded")
        else:
            logger.info("costcache: prompts of %d tokens and more are offloaded", manager.shortest)
        return manager
