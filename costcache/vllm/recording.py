"""Records the requests of a vLLM scheduler, whatever chooses its victims."""

from __future__ import annotations

import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

from costcache.recording.hashes import Hashed, Tokens
from costcache.recording.recorder import EPOCH, Ended, Recorder
from costcache.records import RequestRecord
from costcache.vllm.requests import info

if TYPE_CHECKING:
    from costcache.recording.hashes import Content
    from costcache.recording.settings import RecordSettings

__all__ = ["Recording"]

logger = logging.getLogger("costcache")

_BEGUN = "_costcache_begun"


class Recording:
    """A scheduler's recorder.

    Args:
        manager: vLLM's ``KVCacheManager``.
        settings: Where, and how much.
        page_size: Tokens per block.
        policy: Policy that chooses the victims.
        architecture: Class of the model.
        chunk: Tokens that a step computes of a prompt, at most.
        trim: Tokens that victims are cut at multiples of; None if that is vLLM's business.

    Raises:
        SettingsError: A setting is wrong, or the folder cannot be written to.
    """

    def __init__(
        self,
        manager: Any,
        settings: RecordSettings,
        page_size: int,
        policy: str,
        architecture: str,
        chunk: int,
        trim: int | None,
    ) -> None:
        from vllm import __version__

        pool, groups = manager.block_pool, manager.coordinator.single_type_managers
        self._hashed = pool.hash_block_size if manager.enable_caching else 0
        self._recorder: Recorder | None = Recorder(
            settings,
            page_size,
            server=f"vllm {__version__}",
            policy=policy,
            architecture=architecture,
            capacity=(pool.num_gpu_blocks - 1) * page_size if len(groups) == 1 else None,
            chunk=chunk,
            trim=trim,
        )

    def begin(self, request: Any) -> None:
        """Keep vLLM's figures of a request, which it takes away when the prefill has ended, and the time."""
        setattr(request, _BEGUN, (request.prefill_stats, time.perf_counter()))

    def end(self, request: Any) -> None:
        """Record a request that has finished; one that was never scheduled has used nothing."""
        recorder = self._recorder
        stats, began = getattr(request, _BEGUN, (None, 0.0))
        if recorder is None or stats is None or not stats.num_prompt_tokens:
            return
        try:
            recorder.add(
                Ended(
                    self._content(request),
                    request.num_prompt_tokens,
                    stats.num_cached_tokens,
                    EPOCH + began,
                    EPOCH + time.perf_counter(),
                    info(request, RequestRecord(0)),
                )
            )
        except Exception as error:
            logger.error("costcache: recording ends, and the server goes on", exc_info=error)
            self._recorder = None

    def _content(self, request: Any) -> Content:
        if self._hashed:
            return Hashed(
                request.block_hashes,
                request.num_prompt_tokens,
                len(request.output_token_ids),
                self._hashed,
                request.request_id.encode(),
            )
        seen = [feature.identifier for feature in request.mm_features]
        lora = None if request.lora_request is None else request.lora_request.lora_name
        tokens = array("q", request.all_token_ids)
        prompt = request.num_prompt_tokens
        return Tokens(
            repr((lora, request.cache_salt, seen)).encode(),
            tokens[:prompt].tobytes(),
            tokens[prompt:].tobytes(),
        )
