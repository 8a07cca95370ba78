"""Real SGLang Engines on CPU, each in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIMS = Path(__file__).resolve().parent / "shims"

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_running_requests": 4,
    "mem_fraction_static": 0.3,
    "context_length": 2048,
    "chunked_prefill_size": 512,
    "dtype": "float32",
    "random_seed": 0,
    "log_level": "info",
}


@dataclass(frozen=True)
class Answer:
    """One prompt's output tokens, and its cached tokens."""

    output: tuple[int, ...]
    cached: int


@dataclass(frozen=True)
class Run:
    """All answers of one Engine, and its log."""

    answers: list[Answer]
    log: str


def environment(folder: Path) -> dict[str, str]:
    """Environment of a process that runs SGLang on CPU; ``folder`` gets the shims' entry point."""
    info = folder / "costcache_test_shims-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: costcache-test-shims\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n"
        "cpu_shims = tests.sglang.shims.cpu_backend:install\n"
        "record_victims = tests.sglang.shims.record_victims:install\n"
    )
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SHIMS), str(folder), str(SHIMS.parents[2])]),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # as the models are
    }


def run_engine(
    model: Path, prompts: list[list[int]], folder: Path, output_tokens: int = 8, **arguments: Any
) -> Run:
    """Start an Engine, send the prompts one after the other, stop it.

    Args:
        model: Folder of the model's config.
        prompts: Token ids.
        folder: For temporary files.
        output_tokens: Tokens to generate for each prompt, greedily.
        arguments: More of the Engine's arguments.
    """
    job = {
        "engine": {**ARGUMENTS, "model_path": str(model), **arguments},
        "prompts": prompts,
        "output_tokens": output_tokens,
    }
    done = subprocess.run(
        [sys.executable, str(SHIMS / "run_engine.py")],
        input=json.dumps(job),
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, f"the Engine failed:\n{log[-6000:]}"
    answers = json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    return Run([Answer(tuple(a["output"]), a["cached"]) for a in answers], log)
