"""Serves with two data parallel engines on the CPU, as engine.py does with one.

What the HTTP server of vLLM is made of, without its HTTP: ``AsyncLLM``, the coordinator of data parallelism,
and an engine core for each rank, in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.vllm.engine import ENGINE, prompts  # after the path


async def serve(given: dict[str, Any]) -> dict[str, Any]:
    """Answer the prompts of some rounds; returns what was cached, and the page of metrics."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    rounds = given.pop("rounds")
    given["additional_config"] = {"costcache": given.pop("costcache")}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**ENGINE, data_parallel_size=2, **given))
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False)

    async def answer(name: str, prompt: list[int]) -> int:
        cached = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, sampling, name):
            cached = output.num_cached_tokens or 0
        return cached

    cached = 0
    for turn, batch in enumerate(prompts(rounds)):
        cached += sum(await asyncio.gather(*(answer(f"{turn} {at}", each) for at, each in enumerate(batch))))
    import prometheus_client

    page = prometheus_client.generate_latest().decode()
    reset = await llm.reset_prefix_cache()  # only if no block is in use any more, on either rank
    llm.shutdown()
    return {"cached": cached, "page": page, "reset": reset}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(serve(json.loads(sys.argv[1])))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end may wait for the engines' processes for minutes
