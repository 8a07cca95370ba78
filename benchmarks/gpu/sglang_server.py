"""SGLang's Engine, as the benchmark runs it."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, ClassVar

from server import Server

__all__ = ["SglangServer"]

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "random_seed": 0,
    "enable_metrics": True,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24, 32, 48, 64],
    "cuda_graph_bs_prefill": [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192],
}


class SglangServer(Server):
    """SGLang's Engine. A policy's name is its ``--radix-eviction-policy``; ``lru`` is SGLang's own cache."""

    defaults: ClassVar[dict[str, Any]] = ENGINE
    stock: ClassVar[str] = "lru"
    counted: ClassVar[tuple[str, ...]] = ("costcache:", "sglang:evict")
    packages: ClassVar[tuple[str, ...]] = ("sglang", "sglang-kernel")

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        """Start the Engine."""
        self.metrics = log.with_suffix(".metrics")
        self.metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self.metrics)  # before prometheus_client is imported
        import sglang

        self.engine = sglang.Engine(**arguments)
        self.loop = self.engine.loop
        self.most = int(arguments.get("max_total_tokens") or 8192) // 2

    @staticmethod
    def arguments(
        model: Path, pool: int, policy: str, settings: dict[str, Any], number: int, more: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments of an Engine, apart from the defaults."""
        chosen: dict[str, Any] = {"radix_eviction_policy": policy}
        if settings:
            chosen["radix_eviction_policy_config"] = settings
        port = 31000 + 1000 * number
        return {"model_path": str(model), "max_total_tokens": pool, **chosen, "port": port, **more}

    def empty(self) -> bool:
        """Empty the cache."""
        return bool(getattr(self.engine.flush_cache(), "success", True))

    async def one(self, prompt: list[int], output: int) -> dict[str, float]:
        """Answer a request."""
        sampling = {
            "max_new_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream_interval": 1 << 20,  # sends the first token at once, and all others together
        }
        sent = time.perf_counter()
        first = 0.0
        seen: dict[str, Any] = {}
        chunks: AsyncIterator[dict[str, Any]] = await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True
        )
        async for chunk in chunks:
            first = first or time.perf_counter()
            seen = chunk["meta_info"]
        ended = time.perf_counter()
        return {
            "prompt": seen["prompt_tokens"],
            "cached": seen["cached_tokens"],
            "host": (seen.get("cached_tokens_details") or {}).get("host", 0),
            "output": seen["completion_tokens"],
            "ttft": first - sent,
            "seconds": ended - sent,
        }

    def samples(self) -> Iterable[Any]:
        """Prometheus's samples, which SGLang's processes leave in a folder."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.metrics))
        return (sample for family in registry.collect() for sample in family.samples)

    def shutdown(self) -> None:
        """Stop the Engine."""
        self.engine.shutdown()
