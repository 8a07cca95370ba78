"""Runs a real engine on the CPU: ``python engine.py '{...}'`` answers prompts and prints what was cached."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A Llama with random weights: its config is all that the engine needs."""

WINDOWS: dict[str, Any] = {
    **{name: value for name, value in MODEL.items() if name not in {"architectures", "model_type"}},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 4, *["full_attention"] * 2],
    "sliding_window": 96,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""A Gemma 3 likewise: two groups of sliding windows and one of full attention."""

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 101,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}
"""Arguments of an engine that is soon under pressure."""


def run_engine(
    folder: Path,
    costcache: Any = None,
    environment: dict[str, str] | None = None,
    *,
    config: Any = MODEL,
    script: str = __file__,
    **options: Any,
) -> tuple[dict[str, Any], str]:
    """Answer prompts in an engine of its own.

    Args:
        folder: Where to put the model.
        costcache: The entry ``costcache`` of the additional config, None for stock.
        environment: More variables.
        config: The model's config.
        script: What answers them.
        options: ``rounds`` of 8 prompts, ``at_once`` how many of them are sent together (all), and arguments
            of vLLM's ``LLM``.

    Returns:
        What :func:`main` printed as JSON, and the engine's log.
    """
    (folder / "config.json").write_text(json.dumps(config))
    given = {"model": str(folder), "costcache": costcache, **options}
    done = subprocess.run(
        [sys.executable, script, json.dumps(given)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        | (environment or {}),
        check=False,
    )
    log = done.stdout + done.stderr
    if done.returncode:
        return {"failed": done.returncode}, log
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"cached"')]
    return json.loads(line), log


def prompts(rounds: int) -> list[list[list[int]]]:
    """Half of the prompts share one of a few long system prompts, the others are never seen again."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(count)]

    systems = [words(192) for _ in range(12)]
    return [
        [rng.choice(systems) + words(64) if rng.random() < 0.5 else words(700) for _ in range(8)]
        for _ in range(rounds)
    ]


def main() -> None:
    """Answer the prompts of some rounds, and print a digest of the answers and what was cached."""
    given = json.loads(sys.argv[1])
    costcache, rounds, at_once = given.pop("costcache"), given.pop("rounds"), given.pop("at_once", 8)

    from vllm import LLM, SamplingParams

    if costcache is not None:
        given["additional_config"] = {"costcache": costcache}
    llm = LLM(**ENGINE | given)
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    cached, digest = 0, hashlib.sha256()
    sent = [prompt for batch in prompts(rounds) for prompt in batch]
    for start in range(0, len(sent), at_once):
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in sent[start : start + at_once]]
        for output in llm.generate(inputs, sampling, use_tqdm=False):
            cached += output.num_cached_tokens or 0
            digest.update(repr(list(output.outputs[0].token_ids)).encode())
    import prometheus_client

    metrics = {
        sample.name: sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("costcache")
    }
    reset = llm.reset_prefix_cache()  # only if no block is in use any more
    result = {
        "cached": cached,
        "answers": digest.hexdigest(),
        "metrics": metrics,
        "page": prometheus_client.generate_latest().decode(),
        "reset": reset,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # the interpreter's own end may wait for the engine's processes for minutes


if __name__ == "__main__":
    main()
